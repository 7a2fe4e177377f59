"""Several models in one server: a request's ``model`` chooses, and none concerns another."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from browsers import opened, wait
from oracles.serving import PROMPT, Served, make_session, running, serve
from prometheus_client.parser import text_string_to_metric_families
from transformers import LlamaConfig, LlamaForCausalLM

from kvloom.cli import main
from kvloom.models import bundled_model_path
from kvloom.serving.endpoints.models import Model
from kvloom.serving.settings import Settings

SETTINGS = Settings(port=0, max_answers=2)


def other_model(**sizes: Any) -> Any:
    """A model of random weights with the tokens of the bundled one."""
    torch.manual_seed(1)
    given: dict[str, Any] = {
        "vocab_size": 2048,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 256,
        "eos_token_id": None,
    }
    return LlamaForCausalLM(LlamaConfig(**{**given, **sizes})).eval()


@pytest.fixture(scope="module")
def models() -> list[Model]:
    sessions = {
        "code": make_session("int8", None, SETTINGS),
        "noise": make_session("auto", {"num_blocks": 64}, SETTINGS, other_model()),
    }
    return [Model((name, f"folder/{name}"), session) for name, session in sessions.items()]


@pytest.fixture(scope="module")
def server(models: list[Model]) -> Iterator[Served]:
    with running(models, SETTINGS) as port:
        yield Served(models[0].session, port, SETTINGS)


def ask(server: Served, **fields: object) -> tuple[int, Any]:
    body = json.dumps({"prompt": PROMPT, "max_tokens": 8, "logprobs": 0, **fields}).encode()
    status, answer = server.send("POST", "/v1/completions", body)
    return status, json.loads(answer)


def test_all_are_listed_and_each_answers_by_its_names(server: Served) -> None:
    with server.client() as client:
        assert [model.id for model in client.models.list()] == ["code", "noise"]
    said = {name: ask(server, model=name)[1] for name in ("code", "noise", "folder/noise")}
    assert [answer["model"] for answer in said.values()] == ["code", "noise", "noise"]
    texts = [answer["choices"][0]["text"] for answer in said.values()]
    assert texts[0] != texts[1] == texts[2]
    assert said["folder/noise"]["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_any_of_a_models_ends_ends_an_answer(server: Served) -> None:
    """Published configurations of Llama 3, Gemma 3 and GLM have a list of ends."""
    session = make_session("auto", {"num_blocks": 64}, SETTINGS, other_model(eos_token_id=[2040, 2041]))
    assert session.reading.end_tokens == {2040, 2041}
    with running([Model(("noise",), session)], SETTINGS) as port:
        served = Served(session, port, SETTINGS)
        for end in (2040, 2041):
            (choice,) = ask(served, logit_bias={str(end): 100})[1]["choices"]
            assert choice["finish_reason"] == "stop"


def test_a_model_that_is_none_is_not_found(server: Served) -> None:
    with server.client() as client, pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="nois", prompt=PROMPT)
    assert caught.value.code == "model_not_found"
    assert "model must be 'code' or 'noise', got 'nois'" in str(caught.value)
    for bad in ({}, {"model": None}, {"model": ["code"]}):
        status, answer = ask(server, **bad)
        assert status == 400 and answer["error"]["message"].startswith(
            "model must be 'code' or 'noise', got "
        )
    assert server.send("POST", "/v1/completions", b"[1]")[0] == 400
    status, answer = server.send("GET", "/dashboard/state?model=nois")
    assert status == 404 and json.loads(answer)["error"]["code"] == "model_not_found"


def test_each_has_the_answers_that_it_has_alone(models: list[Model], server: Served) -> None:
    def answers_of(served: Served, name: str, number: int) -> Any:
        status, answer = ask(
            served, model=name, prompt=f"# {number}\n{PROMPT}", max_tokens=12, cache_salt=str(name)
        )
        assert status == 200
        return answer["choices"][0]["text"], answer["choices"][0]["logprobs"]["token_logprobs"]

    asked = [(name, number) for number in range(4) for name in ("code", "noise")]
    with ThreadPoolExecutor(2) as threads:
        together = list(threads.map(lambda x: answers_of(server, *x), asked))
    fresh = make_session("auto", {"num_blocks": 64}, SETTINGS, other_model())
    with running([Model(("noise",), fresh)], SETTINGS) as port:
        by_itself = Served(fresh, port, SETTINGS)
        assert [answers_of(by_itself, *x) for x in asked[1::2]] == together[1::2]
    fresh = make_session("int8", None, SETTINGS)
    with running([Model(("code",), fresh)], SETTINGS) as port:
        by_itself = Served(fresh, port, SETTINGS)
        assert [answers_of(by_itself, *x) for x in asked[::2]] == together[::2]


def test_a_model_that_is_full_refuses_and_the_other_answers(models: list[Model], server: Served) -> None:
    code = models[0].session
    code.num_placed += 2
    try:
        assert ask(server, model="code")[0] == 429
        assert ask(server, model="noise")[0] == 200
    finally:
        code.num_placed -= 2
    assert ask(server, model="code")[0] == 200 and code.num_taken == models[1].session.num_taken == 0


def test_each_has_its_own_room(server: Served) -> None:
    assert ask(server, model="code", max_tokens=230)[0] == 200
    status, answer = ask(server, model="noise", max_tokens=230)
    assert status == 400 and "at most 256 tokens together" in answer["error"]["message"]


def test_metrics_and_states_name_the_model(models: list[Model], server: Served) -> None:
    ask(server, model="noise")
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(server.send("GET", "/metrics")[1].decode())
        for sample in family.samples
    }
    assert samples["kvloom_pages_limit", "code"] == 256 and samples["kvloom_pages_limit", "noise"] == 64
    assert samples["kvloom_requests", "code", "waiting"] == 0
    generated = [samples["kvloom_generated_tokens_total", model.name] for model in models]
    assert generated == [model.session.num_new for model in models] and generated[0] != generated[1] > 0
    assert samples["kvloom_time_to_first_token_seconds_count", "noise"] > 0
    states = [json.loads(server.send("GET", f"/dashboard/state{x}")[1]) for x in ("", "?model=noise")]
    assert [(state["model"], state["kv"]) for state in states] == [("code", "int8:g64"), ("noise", "auto")]
    assert states[0]["models"] == states[1]["models"] == ["code", "noise"]


@pytest.mark.browser
def test_a_browser_shows_the_model_that_is_chosen(server: Served, tmp_path: Path) -> None:
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.select import Select

    with opened(tmp_path) as browser:
        browser.get(f"http://127.0.0.1:{server.port}/dashboard")
        kept = browser.find_element(By.ID, "kept")
        wait(lambda: "int8" in kept.text)
        choice = Select(browser.find_element(By.ID, "models"))
        assert [option.text for option in choice.options] == ["code", "noise"]
        choice.select_by_visible_text("noise")
        wait(lambda: "kept as auto" in kept.text)
        assert choice.first_selected_option.text == "noise"
        wait(lambda: browser.find_element(By.ID, "speed").text != "\u2013")
        choice.select_by_visible_text("code")
        wait(lambda: "int8" in kept.text)
        assert not browser.get_log("browser")


def test_the_command_serves_the_models_of_its_options(tmp_path: Path) -> None:
    other_model().save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((bundled_model_path() / name).read_bytes())

    def ask(url: str) -> None:
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
            assert [model.id for model in client.models.list()] == ["code", "noise"]
            for name in ("code", "noise"):
                answer = client.completions.create(model=name, prompt=PROMPT, max_tokens=2)
                assert answer.model == name and answer.usage and answer.usage.completion_tokens == 2
        with closing(http.client.HTTPConnection(url.split("/")[2])) as connection:
            connection.request("GET", "/health")
            assert connection.getresponse().status == 200

    assert serve(ask, "--model", f"code={bundled_model_path()}", "--model", f"noise={tmp_path}") == (0, "")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "a"], "--model must be NAME=FOLDER, each with a name of its own, got 'a'"),
        (["--model", "=a"], "--model must be NAME=FOLDER"),
        (["--model", "a=x", "--model", "a=y"], "each with a name of its own, got 'a=y'"),
        (["--model", "a=x", "folder"], "--model must be given without MODEL and --name"),
        (["--model", "a=x", "--name", "b"], "--model must be given without MODEL and --name"),
        (["--model", "a=/nowhere"], "model must be a local folder with a config.json, got '/nowhere'"),
        (
            ["--model", "a=x", "--model", "b=y", "--record", "f"],
            "--record and --chat-template must be given with one model",
        ),
    ],
)
def test_bad_models_are_one_line_and_status_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("kvloom: ") and words in line
