"""What a session does besides tokens: forks, streams, samples, cancels, refuses; and the model afterwards."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from integrations.models.test_families import family
from oracles.batching import GREEDY, alone, batching_config, session
from oracles.language_models import make_model
from oracles.stateful_models import stateful_model
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    CompileConfig,
    ContinuousBatchingConfig,
    GenerationConfig,
    LlamaConfig,
)

from kvloom.core.specs import QuantSpec
from kvloom.errors import ArgumentError, StateError, UnsupportedError
from kvloom.integrations.transformers import continuous_batching, disable, enable
from kvloom.integrations.transformers.session.requests import groups

PROMPT = [3 + (7 * i) % 90 for i in range(70)]


@pytest.fixture(scope="module")
def model() -> Any:
    return continuous_batching(make_model())


@pytest.mark.parametrize("length", [2, 31, 33, 70])
@pytest.mark.parametrize("blocks", [64, 10])
def test_forks_have_the_tokens_of_the_request(model: Any, length: int, blocks: int) -> None:
    prompt = PROMPT[:length]
    generation = {"num_return_sequences": 3, "do_sample": True, "top_k": 1}  # the likeliest
    with session(model, generation, num_blocks=blocks, max_batch_tokens=40) as running:
        running.manager.add_requests([prompt, prompt[::-1]])
        running.run()
        running.manager.add_request(prompt)  # finds its pages, and is forked behind them
        running.run()
        report = running.manager.report()
    assert len(running.outputs) == 9 and report.active == 0
    tokens = {name: x.generated_tokens for name, x in running.outputs.items()}
    expected = [alone(model, x, 8) for x in (prompt, prompt[::-1])]
    assert all(x in expected for x in tokens.values())
    assert sum(x == expected[0] for x in tokens.values()) >= 6


def test_sampled_forks_differ_and_share_pages(model: Any) -> None:
    with session(model, {"num_return_sequences": 4, "do_sample": True}) as running:
        running.manager.add_request(PROMPT)
        running.step()
        assert running.manager.report().shared == 5  # the last one until it is written
        running.step()
        assert running.manager.report().shared == 4
        running.run()
    assert len({tuple(x.generated_tokens) for x in running.outputs.values()}) > 1


def test_a_cancelled_request_leaves_its_pages(model: Any) -> None:
    with session(model) as running:
        names = [running.manager.add_request(PROMPT[i:]) for i in range(3)]
        running.step()
        running.manager.cancel_request(names[1])
        running.run()
        assert running.manager.report().active == 0
    assert sorted(running.outputs) == sorted([names[0], names[2]])
    for i in (0, 2):
        assert running.outputs[names[i]].generated_tokens == alone(model, PROMPT[i:], 8)


def test_streams_of_a_running_session(model: Any) -> None:
    generation = GenerationConfig(max_new_tokens=6, **GREEDY)
    expected = alone(model, PROMPT, 6)
    with model.continuous_batching_context_manager(generation) as manager:
        name = manager.add_request(PROMPT, streaming=True)
        seen = [output.generated_tokens for output in manager.request_id_iter(name)]
    assert seen == [expected[: n + 1] for n in range(6)]


def test_log_probabilities_and_sampling_of_each_request(model: Any) -> None:
    generation = {"do_sample": True, "temperature": 0.9, "top_k": 40}
    options = {"return_logprobs": True, "per_request_processors": True}
    with session(model, generation, **options) as running:
        greedy = running.manager.add_request(PROMPT, top_k=1, cache_salt="a")
        running.manager.add_request(PROMPT, temperature=5.0)
        running.run()
    assert running.outputs[greedy].generated_tokens == alone(model, PROMPT, 8)
    for output in running.outputs.values():
        assert output.error is None and len(output.logprobs) == 8 and max(output.logprobs) <= 0


def test_without_a_limit_a_request_has_what_the_pages_hold(model: Any) -> None:
    with session(model, {"max_new_tokens": None}, num_blocks=4) as running:
        name = running.manager.add_request(PROMPT[:40])
        running.run()
    assert running.outputs[name].generated_tokens == alone(model, PROMPT[:40], 24)


def test_a_request_that_can_never_fit_fails_alone(model: Any) -> None:
    with session(model, num_blocks=4) as running:
        bad, good = running.manager.add_request(PROMPT), running.manager.add_request(PROMPT[:20])
        running.run()
    assert "input_ids and max_new_tokens must be at most 65 tokens" in running.outputs[bad].error
    assert running.outputs[good].generated_tokens == alone(model, PROMPT[:20], 8)


def test_an_id_that_is_taken_fails_the_second_request(model: Any) -> None:
    with session(model) as running:
        running.manager.add_request(PROMPT, request_id="a")
        running.step()
        running.manager.add_request(PROMPT[::-1], request_id="a")
        running.step()
        assert running.outputs.pop("a").error == "request_id must be new, got 'a', which has not ended"
        running.run()
        assert running.manager.report().active == 0
    assert running.outputs["a"].generated_tokens == alone(model, PROMPT, 8)


def test_a_forward_of_the_callers_own_is_refused_in_a_session(model: Any) -> None:
    with session(model), pytest.raises(StateError, match="a session of continuous batching holds this model"):
        model(torch.tensor([PROMPT]))
    model(torch.tensor([PROMPT]))


def test_none_takes_it_back() -> None:
    model = make_model()
    before = type(model.init_continuous_batching(GenerationConfig(**GREEDY), batching_config()))
    model.set_attn_implementation("sdpa")
    assert continuous_batching(model) is model
    manager = model.init_continuous_batching(GenerationConfig(**GREEDY), batching_config())
    assert type(manager) is not before and issubclass(type(manager), before)
    model.set_attn_implementation("sdpa")
    for _ in range(2):
        assert continuous_batching(model, None) is model
        assert "init_continuous_batching" not in vars(model)
    assert type(model.init_continuous_batching(GenerationConfig(**GREEDY), batching_config())) is before


def test_calling_again_replaces_the_arguments() -> None:
    model = continuous_batching(continuous_batching(make_model(), "int8:g16"))
    model.generate_batch([PROMPT], persistent_manager=True, max_new_tokens=8)
    kept = model._cached_continuous_batching_manager
    continuous_batching(model, "int8:g16", values="int4:g16")
    assert not hasattr(model, "_cached_continuous_batching_manager")
    with session(model) as running:
        key, value = running.cache.requests.pages.storages[0].specs
        assert (key.quant, value.quant) == (QuantSpec(8, 16), QuantSpec(4, 16, full_range=True))
        assert running.manager is not kept


def test_a_model_may_be_enabled_too() -> None:
    model = make_model()
    enable(model, "int8:g16")
    continuous_batching(model)
    expected = alone(model, PROMPT, 8)
    disable(model)
    float_tokens = alone(model, PROMPT, 8)
    enable(model, "int8:g16")
    (out,) = model.generate_batch([PROMPT], GenerationConfig(max_new_tokens=8, **GREEDY)).values()
    assert out.generated_tokens == float_tokens
    assert model.config._attn_implementation == "kvloom"
    assert alone(model, PROMPT, 8) == expected


def test_a_copy_has_sessions_of_its_own() -> None:
    model = continuous_batching(make_model())
    other = copy.deepcopy(model)
    with session(other) as running:
        assert running.manager.model is other


def test_no_configuration_takes_little_memory(model: Any) -> None:
    model.generate_batch([PROMPT], persistent_manager=True, max_new_tokens=8)
    report = model._cached_continuous_batching_manager.report()
    model.destroy_cached_continuous_batching_manager()
    assert report.num_pages <= 64 < report.max_pages and report.page_size == 16


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "offload": ({"cpu_offload_space": 1.0}, "cpu_offload_space must be left at its default"),
    "as much as there is": ({"cpu_offload_space": None}, "cpu_offload_space must be left at its default"),
    "graphs": ({"use_cuda_graph": True}, "use_cuda_graph must be left at its default"),
    "asynchronous": ({"use_async_batching": True}, "use_async_batching must be left at its default"),
    "level": ({"default_compile_level": 1}, "default_compile_level must be left at its default"),
    "compiled": (
        {"varlen_compile_config": CompileConfig()},
        "varlen_compile_config must be left at its default",
    ),
    "padding": ({"q_padding_interval_size": 64}, "q_padding_interval_size must be left at its default"),
    "pages": ({"num_blocks": 0}, "num_blocks must be a positive int, got 0"),
    "scheduler": (
        {"scheduler_type": "last"},
        "scheduler_type must be one of fifo, prefill_first, got 'last'",
    ),
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_what_is_refused_in_a_configuration(model: Any, case: str) -> None:
    options, message = REFUSED[case]
    with pytest.raises((UnsupportedError, ArgumentError), match=message):
        model.init_continuous_batching(GenerationConfig(**GREEDY), ContinuousBatchingConfig(**options))
    assert model.config._attn_implementation == "sdpa"


def test_a_model_with_chunks_is_refused() -> None:
    model = family("Llama4")
    with pytest.raises(UnsupportedError, match="model must"):
        continuous_batching(model)
    assert "init_continuous_batching" not in vars(model)


def test_a_model_with_recurrent_states_that_gets_no_cache_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of transformers before 5.24."""
    monkeypatch.setattr(groups, "argument_of", lambda model: "past_key_values")
    with pytest.raises(UnsupportedError, match="model must take its cache as `cache` where it has recurrent"):
        continuous_batching(stateful_model("lfm2"))


def test_arguments_that_are_refused() -> None:
    model = make_model()
    bart = BartForConditionalGeneration(
        BartConfig(d_model=16, encoder_layers=1, decoder_layers=1, vocab_size=9)
    )
    cases: list[tuple[type[Exception], str, tuple[Any, ...], dict[str, Any]]] = [
        (ArgumentError, "model must be a PreTrainedModel, got LlamaConfig", (LlamaConfig(),), {}),
        (UnsupportedError, "model must be a decoder alone", (bart,), {}),
        (ArgumentError, "kv must be one of", (model, "int7"), {}),
        (ArgumentError, "values must have a group that divides", (model, "int8:g16"), {"values": "int8:g32"}),
        (ArgumentError, "share must be True or False, got 1", (model,), {"share": 1}),
    ]
    for error, message, args, options in cases:
        with pytest.raises(error, match=message):
            continuous_batching(*args, **options)


def test_transformers_4_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvloom.integrations.transformers.session.served.IS_4", True)
    monkeypatch.setattr("kvloom.integrations.transformers.session.served.transformers.__version__", "4.57.6")
    with pytest.raises(UnsupportedError, match=r"must have transformers 5\.19\.0 or newer, got 4\.57\.6"):
        continuous_batching(make_model())


def test_requests_that_are_refused(model: Any) -> None:
    with session(model, {"num_return_sequences": 2, "do_sample": True}) as running:
        for prompt, options, message in (
            ([], {}, "input_ids must be at least 2 tokens, got 0"),
            ([5], {}, "input_ids must be at least 2 tokens, got 1"),
            (5, {}, "input_ids must be a list of token ids, got 5"),
            ("text", {}, "input_ids must be token ids, which are ints, got 't'"),
            ([5, 6.5, 7], {}, r"input_ids must be token ids, which are ints, got 6\.5"),
            ([5, True], {}, "input_ids must be token ids, which are ints, got True"),
            ([5, 6], {"cache_salt": 3}, "cache_salt must be a string, got 3"),
        ):
            with pytest.raises(ArgumentError, match=message):
                running.manager.add_request(prompt, **options)


def test_a_running_session_keeps_its_arguments(model: Any) -> None:
    with model.continuous_batching_context_manager(
        GenerationConfig(**GREEDY), persistent_manager=True
    ) as manager:
        model._cached_continuous_batching_manager = manager
        with pytest.raises(StateError, match="model must have no running session"):
            continuous_batching(model, "int8:g16")
    model.destroy_cached_continuous_batching_manager()
