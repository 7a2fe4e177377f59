"""Libraries that talk to OpenAI's API ask ``kvloom serve``, and read the same text as OpenAI's own client."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest

from kvloom.models import bundled_model_path

KEY = "KEY1"
MODEL = "stdlib-4m"
PROMPT = "import os\n\n\ndef walk(path):\n    for root, dirs, files in"
QUESTION = "Return the sum of two numbers."
NEW_TOKENS = 16

pytestmark = [
    pytest.mark.process,
    pytest.mark.filterwarnings("ignore"),  # of these libraries and of what they need
    pytest.mark.usefixtures("offline"),
]


def needs(name: str) -> Any:
    """Skip a test whose library is not installed."""
    return pytest.mark.skipif(find_spec(name) is None, reason=f"needs {name}, which `make test-clients` gets")


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """These libraries look up prices, data sets and models, none of which is needed here."""
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("OPENAI_API_KEY", KEY)


@pytest.fixture
def client(url: str) -> Iterator[Any]:
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
        yield client


@pytest.fixture
def text(client: Any) -> str:
    """What follows ``PROMPT``."""
    return client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=NEW_TOKENS).choices[0].text


@pytest.fixture
def answer(client: Any) -> str:
    """The answer to ``QUESTION``."""
    messages = [{"role": "user", "content": QUESTION}]
    created = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=NEW_TOKENS)
    return created.choices[0].message.content


def test_openai(client: Any, answer: str) -> None:
    messages = [{"role": "user", "content": QUESTION}]
    chunks = client.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=NEW_TOKENS, stream=True
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == answer
    response = client.responses.create(model=MODEL, input=QUESTION, max_output_tokens=NEW_TOKENS)
    assert response.output_text == answer
    assert [model.id for model in client.models.list()] == [MODEL]


@needs("langchain_openai")
def test_langchain(url: str, text: str, answer: str) -> None:
    from langchain_core.prompts import ChatPromptTemplate
    from langchain_openai import ChatOpenAI, OpenAI
    from pydantic import BaseModel

    class Person(BaseModel):
        name: str
        is_adult: bool

    options: dict[str, Any] = {"model": MODEL, "base_url": url, "api_key": KEY}
    chain = ChatPromptTemplate.from_messages([("human", "{q}")]) | ChatOpenAI(
        **options, max_tokens=NEW_TOKENS
    )
    message = chain.invoke({"q": QUESTION})
    assert message.content == "".join(chunk.content for chunk in chain.stream({"q": QUESTION})) == answer
    assert message.usage_metadata["output_tokens"] == NEW_TOKENS
    assert [x.content for x in chain.batch([{"q": QUESTION}] * 3)] == [answer] * 3
    assert OpenAI(**options, max_tokens=NEW_TOKENS, temperature=0).invoke(PROMPT) == text
    person = ChatOpenAI(**options, max_tokens=200).with_structured_output(Person, method="json_schema")
    assert isinstance(person.invoke(QUESTION), Person)


@needs("litellm")
@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_litellm(url: str, answer: str, provider: str) -> None:
    import litellm

    options: dict[str, Any] = {
        "model": f"{provider}/{MODEL}",
        "messages": [{"role": "user", "content": QUESTION}],
        "api_base": url,
        "api_key": KEY,
        "max_tokens": NEW_TOKENS,
    }
    created = litellm.completion(**options)
    assert created.choices[0].message.content == answer
    assert created.usage.completion_tokens == NEW_TOKENS
    assert (
        "".join(x.choices[0].delta.content or "" for x in litellm.completion(**options, stream=True))
        == answer
    )
    later = asyncio.run(litellm.acompletion(**options))
    assert later.choices[0].message.content == answer
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(**options, temperature=-1)


def evaluate(model: str, url: str, task: dict[str, Any], **options: Any) -> Any:
    """Results of lm-eval on a task of its own."""
    from lm_eval import simple_evaluate

    arguments = {"model": MODEL, "base_url": url, "tokenizer": str(bundled_model_path()), "max_retries": 1}
    results = simple_evaluate(model, model_args=arguments, tasks=[task], **options)
    return results["results"][task["task"]]


def task_of(*lines: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """A task of lm-eval with these lines of data."""
    from datasets import Dataset

    return {
        "task": "local",
        "custom_dataset": lambda **kwargs: {"test": Dataset.from_list([*lines])},
        "test_split": "test",
        "doc_to_text": "{{prompt}}",
        "doc_to_target": "{{answer}}",
        "metadata": {"version": 1},
        **fields,
    }


@needs("lm_eval")
@pytest.mark.parametrize("kind", ["completions", "chat-completions"])
def test_lm_eval_generates(url: str, text: str, answer: str, kind: str) -> None:
    is_chat = kind == "chat-completions"
    lines = [
        {"prompt": QUESTION if is_chat else PROMPT, "answer": answer if is_chat else text},
        {"prompt": QUESTION if is_chat else PROMPT, "answer": "something else"},
    ]
    task = task_of(
        *lines,
        output_type="generate_until",
        generation_kwargs={"until": ["</s>"], "max_gen_toks": NEW_TOKENS},
        metric_list=[{"metric": "exact_match"}],
    )
    path = f"{url}/{'chat/' if is_chat else ''}completions"
    result = evaluate(f"local-{kind}", path, task, apply_chat_template=is_chat)
    assert result["exact_match,none"] == 0.5


@needs("lm_eval")
def test_lm_eval_asks_for_likelihoods(url: str, text: str) -> None:
    """Of what the model says itself, which it takes for certain, and of something else."""
    task = task_of(
        {"prompt": PROMPT, "answer": text},
        {"prompt": PROMPT, "answer": " something else"},
        output_type="loglikelihood",
        target_delimiter="",
        metric_list=[{"metric": "acc"}, {"metric": "perplexity"}],
    )
    result = evaluate("local-completions", f"{url}/completions", task)
    assert result["acc,none"] == 0.5


@needs("lm_eval")
def test_lm_eval_chooses_among_answers(url: str, text: str) -> None:
    choices = [" something else", text, " nothing at all"]
    task = task_of(
        {"prompt": PROMPT, "answer": 1, "choices": choices},
        {"prompt": PROMPT, "answer": 2, "choices": choices},
        output_type="multiple_choice",
        doc_to_choice="choices",
        target_delimiter="",
        metric_list=[{"metric": "acc"}],
    )
    assert evaluate("local-completions", f"{url}/completions", task)["acc,none"] == 0.5
