"""Key smoothing in vLLM: planted biases cost nothing, wherever tokens stand and whatever vLLM does."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from integrations.vllm.engines import INT4, INT8, Engine, needs_vllm, prompts, random_model, tokens_of
from integrations.vllm.test_models import SMALL, sinks

from kvloom.models import bundled_model_path

needs_vllm()
pytestmark = pytest.mark.filterwarnings("ignore")

BLOCK, BIAS = 32, 60.0
NONE: dict[str, Any] = {"kvloom": {"smooth": "none"}}
LONG = prompts()[1:8:2]


def biased(folder: Path, config: Any) -> Path:
    """A model whose keys have biases in two pairs of channels, to which queries are small."""
    from transformers import AutoModelForCausalLM

    random_model(folder, config)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    dim = config.head_dim
    with torch.no_grad():
        for layer in model.model.layers:
            attention = layer.self_attn
            for pair in (2, 9):
                for channel in (pair, pair + dim // 2):
                    attention.k_proj.bias[channel::dim] = BIAS
                    attention.q_proj.weight[channel::dim] /= BIAS
                    attention.q_proj.bias[channel::dim] = 0
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import Qwen2Config

    config = Qwen2Config(**SMALL, tie_word_embeddings=False)
    return biased(tmp_path_factory.mktemp("qwen"), config)


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Windows of 128 in every other layer, sinks, and frequencies of YaRN."""
    return biased(tmp_path_factory.mktemp("windowed"), sinks()[0])


def log_probs(model: Path, **arguments: Any) -> torch.Tensor:
    """Of each token of some prompts behind the first, as an engine has them."""
    with closing(Engine(model, **arguments)) as engine:
        requests = engine.run(LONG, 1, prompt_logprobs=0)
    rows = [place for request in requests for place in request.prompt_logprobs[1:]]
    return torch.tensor([x.logprob for place in rows for x in place.values()])


def layers_of(engine: Engine) -> list[Any]:
    runner = engine.llm.llm_engine.model_executor.driver_worker.worker.model_runner
    layers = runner.compilation_config.static_forward_context.values()
    return [layer.impl for layer in layers if hasattr(layer, "impl")]


# Beside each bound what was found, smoothed and not.
@pytest.mark.parametrize(
    ("which", "kind", "bound"),
    [
        ("qwen", INT8, 0.006),  # 0.0021, 0.035
        ("qwen", INT4, 0.08),  # 0.025, 0.31
        ("windowed", INT8, 0.045),  # 0.018, 0.108
        ("windowed", INT4, 0.2),  # 0.058, 0.59
    ],
)
def test_biases_cost_hardly_anything(
    which: str, kind: str, bound: float, request: pytest.FixtureRequest
) -> None:
    model = request.getfixturevalue(which)
    exact = log_probs(model)
    smoothed, plain = (
        float((log_probs(model, kv_cache_dtype=kind, additional_config=x) - exact).square().mean().sqrt())
        for x in ({}, NONE)
    )
    assert smoothed < bound < plain


@pytest.mark.parametrize("kind", [INT8, INT4])
@pytest.mark.parametrize("which", ["qwen", "windowed"])
def test_prompts_in_pieces_and_found_prefixes_change_nothing(
    which: str, kind: str, request: pytest.FixtureRequest
) -> None:
    model = request.getfixturevalue(which)
    with closing(Engine(model, kv_cache_dtype=kind, block_size=BLOCK)) as engine:
        wanted = engine.tokens(LONG)
        again = engine.run(LONG)
        assert sum(found.num_cached_tokens for found in again) >= BLOCK
        assert [list(found.outputs[0].token_ids) for found in again] == wanted
    assert tokens_of(model, LONG, kv_cache_dtype=kind, max_num_batched_tokens=48) == wanted


@pytest.mark.parametrize(("kind", "blocks"), [(INT8, 50), (INT4, 100)])
def test_preempted_requests_change_nothing(kind: str, blocks: int, qwen: Path) -> None:
    texts, new, found = prompts()[::2], 250, []
    for limits in ({}, {"num_gpu_blocks_override": blocks, "max_num_batched_tokens": 32}):
        arguments = {"kv_cache_dtype": kind, "block_size": BLOCK, "disable_log_stats": False, **limits}
        with closing(Engine(qwen, **arguments, max_model_len=512)) as engine:
            found.append(engine.tokens(texts, new))
            metrics = engine.llm.get_metrics()
            preempted = sum(x.value for x in metrics if x.name == "vllm:num_preemptions")
            assert (preempted > 0) == bool(limits)
    assert found[0] == found[1]


def test_numbers_are_those_of_the_model_in_transformers(qwen: Path, windowed: Path) -> None:
    from transformers import AutoModelForCausalLM

    from kvloom.integrations.transformers.smoothing import smoothing_of

    for folder in (qwen, windowed, bundled_model_path()):
        expected = smoothing_of(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
        with closing(Engine(folder, kv_cache_dtype=INT8)) as engine:
            found = [impl.smoothed for impl in layers_of(engine)]
        assert [x.reason for x in found] == [x.reason for x in expected]
        assert [x.smoothing.digest for x in found] == [x.smoothing.digest for x in expected]


def test_float_layers_among_them_are_asked_too(qwen: Path) -> None:
    with closing(Engine(qwen, kv_cache_dtype=INT8, kv_cache_dtype_skip_layers=["1"])) as engine:
        assert [impl.smoothing is not None for impl in layers_of(engine)] == [True, False, True]


def test_a_model_that_cannot_be_asked_is_served_as_before(
    qwen: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from kvloom.integrations.vllm import smoothing

    def fail(*args: Any) -> Any:
        raise RuntimeError("no such tokens")

    with monkeypatch.context() as patch:
        patch.setattr(smoothing, "_read", fail)
        found = tokens_of(qwen, LONG, kv_cache_dtype=INT8)
    said = "kvloom smooths keys: calibration failed: RuntimeError: no such tokens in 3 layers."
    assert caplog.text.count(said) == 1
    assert found == tokens_of(qwen, LONG, kv_cache_dtype=INT8, additional_config=NONE)


def test_no_model_is_asked_for_what_is_not_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvloom.integrations.vllm import smoothing

    def fail(*args: Any) -> Any:
        raise AssertionError

    monkeypatch.setattr(smoothing, "calibrate", fail)
    for arguments in ({}, {"additional_config": {"kvloom": {"float": True}}}):
        with closing(Engine(**arguments)):
            pass
    with closing(Engine(kv_cache_dtype=INT4, additional_config=NONE)) as engine:
        assert all(impl.smoothing is None for impl in layers_of(engine))
