"""Fields that change how a request chooses its tokens: as in ``generate``, and OpenAI's own by counting."""

from __future__ import annotations

import functools
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
import torch
from oracles.serving import PROMPT, Served, served
from transformers import LogitsProcessor, LogitsProcessorList, MinPLogitsWarper

from kvloom.integrations.transformers import KVCache, load_model
from kvloom.integrations.transformers.session.choices.penalties import CountPenalties, TokenBias
from kvloom.integrations.transformers.session.choices.sampling import Choice
from kvloom.models import bundled_model_path
from kvloom.serving.protocol.text import TextStream

OPTIONS: dict[str, Any] = {"model": "bundled", "prompt": PROMPT, "max_tokens": 24}
MODEL, TOKENIZER = load_model(bundled_model_path(), progress=False)
MODEL.float()
EOS = 1


def text_of(client: openai.OpenAI, **fields: Any) -> str:
    return client.completions.create(**{**OPTIONS, "extra_body": fields}).choices[0].text


def generated(prompt: str = PROMPT, new_tokens: int = 24, **options: Any) -> str:
    """What ``generate`` gives with a cache of the same kind."""
    ids = torch.tensor([TOKENIZER(prompt).input_ids])
    out = MODEL.generate(
        ids,
        max_new_tokens=new_tokens,
        do_sample=False,
        pad_token_id=0,
        past_key_values=KVCache.for_model(MODEL, kv="int8"),
        **options,
    )
    return str(TOKENIZER.decode(out[0, ids.shape[1] :], skip_special_tokens=True))


@functools.cache
def plain() -> str:
    """The text of ``OPTIONS`` alone."""
    return generated()


class Counted(LogitsProcessor):  # type: ignore[misc]
    """OpenAI's two penalties, token by token."""

    def __init__(self, presence: float, frequency: float, bias: dict[int, float]) -> None:
        self.presence, self.frequency, self.bias = presence, frequency, bias
        self.num_prompt: int | None = None

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        tokens, changed = input_ids[0].tolist(), scores.clone()
        if self.num_prompt is None:
            self.num_prompt = len(tokens)
        for token, count in Counter(tokens[self.num_prompt :]).items():
            changed[0, token] -= self.presence + count * self.frequency
        for token, added in self.bias.items():
            changed[0, token] += added
        return changed


@pytest.mark.parametrize(
    ("presence", "frequency", "added"),
    [(1.5, 0, 0), (0, 0.7, 0), (-2, 0.3, 0), (0, -1.5, 0), (0, 0, -100), (0, 0, 4.5), (0.5, 0.5, 3)],
)
def test_penalties_of_what_was_generated_are_openais(
    client: openai.OpenAI, presence: float, frequency: float, added: float
) -> None:
    tokens = TOKENIZER(plain(), add_special_tokens=False).input_ids
    bias = {tokens[3]: added} if added else {}
    oracle = Counted(presence, frequency, bias)
    fields = {"presence_penalty": presence, "frequency_penalty": frequency, "logit_bias": bias}
    text = text_of(client, **fields)
    assert text == generated(logits_processor=LogitsProcessorList([oracle])) != plain()


@pytest.mark.parametrize("penalty", [0.7, 1.4])
def test_a_repetition_penalty_is_that_of_generate_whatever_runs_beside_it(
    client: openai.OpenAI, penalty: float
) -> None:
    expected = generated(repetition_penalty=penalty)
    with ThreadPoolExecutor(6) as pool:
        asked = [pool.submit(text_of, client, repetition_penalty=penalty) for _ in range(3)]
        free = [pool.submit(text_of, client) for _ in range(3)]
    assert {x.result() for x in asked} == {expected} and {x.result() for x in free} == {plain()}
    assert expected != plain()


def test_penalties_outlive_a_preemption() -> None:
    """A request that is preempted comes back with its answer as a part of its prompt."""
    fields = {"frequency_penalty": 1.2, "presence_penalty": 0.5, "max_tokens": 40}
    prompts = [f"# {number}\n{PROMPT}" for number in range(4)]
    with served() as roomy, roomy.client() as client:
        apart = [text_of(client, prompt=prompt, **fields) for prompt in prompts]
    with served(config={"num_blocks": 10}) as narrow, narrow.client() as client:
        with ThreadPoolExecutor(4) as pool:
            together = [pool.submit(text_of, client, prompt=prompt, **fields) for prompt in prompts]
        assert [x.result() for x in together] == apart
        assert narrow.session.report().preemptions > 0


@pytest.mark.parametrize("min_p", [0.05, 0.3, 1.0])
@pytest.mark.parametrize("temperature", [0.7, 1.5])
def test_min_p_leaves_the_tokens_that_generate_leaves(min_p: float, temperature: float) -> None:
    logits = torch.randn(50, generator=torch.Generator().manual_seed(1)) * 2
    kept = (
        MinPLogitsWarper(min_p)(None, logits[None] / temperature)[0].isfinite().nonzero().flatten().tolist()
    )
    choice = Choice(temperature, min_p=min_p, seed=1)
    drawn = Counter(choice.next_token(logits, position) for position in range(4000))
    assert set(drawn) <= set(kept)
    likely = (logits[kept].double() / temperature).softmax(0)
    for token, probability in zip(kept, likely.tolist(), strict=True):  # a deviation of 5 sigma is no chance
        assert abs(drawn[token] / 4000 - probability) <= 5 * (probability / 4000) ** 0.5


def test_min_p_beside_others_leaves_what_each_leaves() -> None:
    logits = torch.tensor([0.0, 3.0, 1.0, 2.0, -torch.inf])  # 0.03, 0.64, 0.09, 0.24

    def drawn(**fields: Any) -> set[int]:
        return {Choice(1.0, **fields).next_token(logits, position) for position in range(2000)}

    assert drawn(min_p=0.2) == {1, 3} and drawn(min_p=0.1) == {1, 3, 2}
    assert drawn(min_p=0.1, top_k=2) == drawn(min_p=0.1, top_p=0.8) == {1, 3}
    assert drawn(min_p=0.9, top_p=0.99) == {1}


def test_a_request_with_min_p_alone_is_sampled(client: openai.OpenAI) -> None:
    texts = {text_of(client, min_p=0.01, seed=seed) for seed in range(4)}
    assert len(texts) > 1 and text_of(client, min_p=1, seed=2) == text_of(client)


def test_logprobs_are_the_models_whatever_changes_the_choice(client: openai.OpenAI) -> None:
    options = {**OPTIONS, "max_tokens": 1, "logprobs": 5}
    plain = client.completions.create(**options).choices[0].logprobs
    changed = client.completions.create(**options, logit_bias={"3": 100}).choices[0].logprobs
    assert plain is not None and changed is not None and plain.top_logprobs == changed.top_logprobs
    assert changed.tokens == [TOKENIZER.decode([3])] != plain.tokens
    assert changed.token_logprobs is not None and changed.token_logprobs[0] < -5


def test_the_models_end_token_ends_an_answer_unless_it_is_to_be_ignored(client: openai.OpenAI) -> None:
    bias = {str(EOS): 100}

    def ask(**fields: Any) -> tuple[int, str]:
        answer = client.completions.create(**OPTIONS, logit_bias=bias, extra_body=fields)
        assert answer.usage is not None
        return answer.usage.completion_tokens, answer.choices[0].finish_reason

    assert ask() == (1, "stop")
    assert ask(min_tokens=7) == (8, "stop")
    assert ask(min_tokens=24) == (24, "length")
    assert ask(ignore_eos=True) == (24, "length")
    assert ask(ignore_eos=True, min_tokens=7) == (24, "length")
    assert ask(ignore_eos=True, stop_token_ids=[EOS]) == (1, "stop")


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_token_ends_an_answer_and_is_a_part_of_it(client: openai.OpenAI, stream: bool) -> None:
    tokens = TOKENIZER(plain(), add_special_tokens=False).input_ids
    stop = next(token for i, token in enumerate(tokens) if i > 4 and token not in tokens[:i])
    expected = TOKENIZER.decode(tokens[: tokens.index(stop) + 1])
    answer = client.completions.create(**OPTIONS, stream=stream, extra_body={"stop_token_ids": [stop]})
    choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
    assert "".join(choice.text for choice in choices) == expected
    assert choices[-1].finish_reason == "stop"
    # Before min_tokens it cannot come, and the answer takes another way.
    later = client.completions.create(**OPTIONS, extra_body={"stop_token_ids": [stop], "min_tokens": 20})
    assert later.usage is not None and later.usage.completion_tokens >= 20
    assert stop not in TOKENIZER(later.choices[0].text, add_special_tokens=False).input_ids[:20]


def test_a_stop_that_is_whole_before_min_tokens_is_text() -> None:
    tokens = TOKENIZER("import os\nimport os\nimport os\n", add_special_tokens=False).input_ids
    parts = [TOKENIZER.decode([token]) for token in tokens]
    for min_tokens in range(len(tokens) + 1):
        for stops in (["os"], ["\nimp"], ["os", "s\nimport os\nimport os and more"]):
            stream = TextStream(TOKENIZER, stops, min_tokens=min_tokens)
            text = "".join(stream.feed([token]) for token in tokens) + stream.end(tokens)
            whole = "".join(parts)
            ends = []  # where a stop is whole, behind which token
            for stop in stops[:1]:
                ends += [at for at in range(len(whole)) if whole.startswith(stop, at)]
            after = [at for at in ends if at + len(stops[0]) > len("".join(parts[:min_tokens]))]
            assert text == (whole[: after[0]] if after else whole)


def test_several_prompts_have_their_answers_in_order(client: openai.OpenAI, server: Served) -> None:
    texts = [PROMPT, "import sys\n", "class Reader:\n    def __init__("]
    ids = [TOKENIZER(text).input_ids for text in texts]
    apart = [text_of(client, prompt=text) for text in texts]
    for prompts in (texts, ids):
        answer = client.completions.create(**{**OPTIONS, "prompt": prompts})
        assert [(x.index, x.text) for x in answer.choices] == [*enumerate(apart)]
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == sum(map(len, ids)) and answer.usage.completion_tokens == 72
    streamed = ["", "", ""]
    *chunks, last = client.completions.create(
        **{**OPTIONS, "prompt": texts}, stream=True, stream_options={"include_usage": True}
    )
    for chunk in chunks:
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == apart and last.usage is not None and last.usage.completion_tokens == 72
    several = client.completions.create(**{**OPTIONS, "prompt": texts}, n=2, temperature=1, seed=4)
    first = client.completions.create(**{**OPTIONS, "prompt": texts[1]}, n=2, temperature=1, seed=4)
    assert [x.index for x in several.choices] == [*range(6)]
    assert [x.text for x in several.choices[2:4]] == [x.text for x in first.choices]
    server.until(active=0, running=0)


def test_found_tokens_are_those_of_all_prompts(client: openai.OpenAI) -> None:
    prompts = [f"# found {number}\n{PROMPT}" for number in range(3)]
    client.completions.create(**{**OPTIONS, "prompt": prompts})
    usage = client.completions.create(**{**OPTIONS, "prompt": prompts}).usage
    assert usage is not None and usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == sum(
        (len(TOKENIZER(prompt).input_ids) - 1) // 16 * 16 for prompt in prompts
    )


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_is_the_prompt_before_each_answer(client: openai.OpenAI, stream: bool) -> None:
    prompts = ["import sys\n", "<|eos|>class Reader:\n"]
    plain = client.completions.create(**{**OPTIONS, "prompt": prompts}, n=2, temperature=1, seed=1).choices
    for asked in (prompts, [TOKENIZER(prompt).input_ids for prompt in prompts]):
        answer = client.completions.create(
            **{**OPTIONS, "prompt": asked}, n=2, temperature=1, seed=1, echo=True, stream=stream
        )
        texts = [""] * 4
        for choice in [x for chunk in answer for x in chunk.choices] if stream else answer.choices:
            texts[choice.index] += choice.text
        assert texts == [prompts[i // 2] + choice.text for i, choice in enumerate(plain)]


def test_more_answers_than_there_can_be_are_refused(server: Served, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="answers to all prompts must be at most 128, got 130"):
        client.completions.create(**{**OPTIONS, "prompt": ["a"] * 65}, n=2)
    assert server.session.num_placed == 0


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"presence_penalty": 2.1}, "presence_penalty must be a number from -2 to 2, got 2.1"),
        ({"frequency_penalty": "much"}, "frequency_penalty must be a number"),
        ({"repetition_penalty": 0}, "repetition_penalty must be a number from 0.01 to 100, got 0"),
        ({"min_p": 1.5}, "min_p must be a number from 0 to 1"),
        ({"logit_bias": [1]}, "logit_bias must be an object"),
        ({"logit_bias": {"x": 1}}, "logit_bias must be an object of numbers from -100 to 100 by token ids"),
        ({"logit_bias": {"3": 101}}, "by token ids, got {'3': 101}"),
        ({"logit_bias": {"3": None}}, "by token ids, got {'3': None}"),
        ({"logit_bias": {"-1": 1}}, "by token ids, got {'-1': 1}"),
        ({"logit_bias": {"2048": 1}}, "logit_bias must be token ids from 0 to 2047"),
        ({"min_tokens": 25}, "min_tokens must be at most max_tokens, which are 24, got 25"),
        ({"min_tokens": -1}, "min_tokens must be an integer"),
        ({"ignore_eos": 1}, "ignore_eos must be true or false"),
        ({"stop_token_ids": 3}, "stop_token_ids must be a list of token ids, got 3"),
        ({"stop_token_ids": [True]}, "stop_token_ids must be a list of token ids"),
        ({"stop_token_ids": [9999]}, "stop_token_ids must be token ids from 0 to 2047"),
        ({"echo": "yes"}, "echo must be true or false"),
        ({"echo": True, "prompt": [-1]}, "the prompt must be token ids"),
        ({"prompt": []}, "prompt must be a text, a list of token ids, or a list of those"),
        ({"prompt": ["a", 3]}, "prompt must be a text, a list of token ids, or a list of those"),
        ({"prompt": ["a", [3, "b"]]}, "prompt must be a text, a list of token ids, or a list of those"),
        ({"prompt": ["a", ""]}, "the prompt must be at least one token"),
        ({"prompt": {"a": 1}}, "prompt must be a text"),
    ],
)
def test_a_field_without_sense_is_named(
    server: Served, client: openai.OpenAI, fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        text_of(client, **fields)
    assert words in str(error.value)
    assert server.session.alive and not server.session.readers


def test_a_bias_of_a_token_that_no_logit_is_of_is_left_out() -> None:
    """A model may have more rows of its embedding than logits."""
    scores = torch.zeros(1, 4)
    assert TokenBias({1: 2.0, 7: 3.0})(None, scores).tolist() == [[0, 2, 0, 0]] and not scores.any()
    counted = CountPenalties(2, 0.5, 0.25)(torch.tensor([[3, 3, 1, 1]]), scores)
    assert counted.tolist() == [[0, -1, 0, 0]]
