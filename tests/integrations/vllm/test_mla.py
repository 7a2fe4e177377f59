"""Latent attention (MLA) in vLLM: pages of kvloom's against its own kernel, and what a scheduler does."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from integrations.vllm.engines import (
    INT4,
    INT8,
    Engine,
    needs_vllm,
    prompts,
    random_model,
    tokens_of,
    tokens_of_child,
)
from integrations.vllm.test_models import SMALL, answers

from kvloom.errors import ConfigError, UnsupportedError
from kvloom.integrations.vllm import layer
from kvloom.quant.affine import dequantize, quantize

needs_vllm()
pytestmark = pytest.mark.filterwarnings("ignore")

FLOAT = {"additional_config": {"kvloom": {"float": True}}}
CODES_ALONE = {"kv_cache_dtype": INT4, "additional_config": {"kvloom": {"recent": 0}}}
KINDS = {"float": FLOAT, "int8": {"kv_cache_dtype": INT8}, "int4": {"kv_cache_dtype": INT4}}
BLOCK = 32
# With plain RoPE vLLM rotates other elements than rope keys: its kernel takes them for dense.
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 512,
    "beta_fast": 32, "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 0.707,
}  # fmt: skip
LATENT = {
    **{name: value for name, value in SMALL.items() if name not in ("num_key_value_heads", "head_dim")},
    "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 32,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "rope_parameters": YARN,
}  # fmt: skip


def v2() -> Any:
    from transformers import DeepseekV2Config

    return DeepseekV2Config(**LATENT, q_lora_rank=None, first_k_dense_replace=3)


def v3() -> Any:
    from transformers import DeepseekV3Config

    sizes = {"num_key_value_heads": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 2}
    return DeepseekV3Config(**LATENT, **sizes, q_lora_rank=48, topk_method="noaux_tc")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model(tmp_path_factory.mktemp("v2"), v2())


class Greedy(NamedTuple):
    """Tokens of prompts, and by how much each was the best, in nats."""

    tokens: list[list[int]]
    leads: list[list[float]]


def greedy(engine: Engine, texts: list[str] | None = None, max_tokens: int = 64) -> Greedy:
    outputs = [request.outputs[0] for request in engine.run(texts or prompts(), max_tokens, logprobs=2)]
    best = [[sorted(x.logprob for x in step.values())[-2:] for step in output.logprobs] for output in outputs]
    leads = [[pair[1] - pair[0] for pair in steps] for steps in best]
    return Greedy([list(output.token_ids) for output in outputs], leads)


def assert_same_but_for_ties(
    found: Sequence[Sequence[int]], expected: Greedy, texts: slice = slice(None)
) -> None:
    """Tokens may part where float32 does not tell the two best ones apart; most texts have none such."""
    parted = 0
    for tokens, own, leads in zip(found, expected.tokens[texts], expected.leads[texts], strict=True):
        first = next((i for i, (p, q) in enumerate(zip(tokens, own, strict=True)) if p != q), None)
        parted += first is not None
        assert first is None or leads[first] < 1e-3
    assert parted <= -(-len(found) // 4)


@pytest.fixture(scope="module")
def whole(model: Path) -> dict[str, Greedy]:
    """Of each kind, tokens of prompts that are computed at once."""
    found = {}
    for kind, arguments in KINDS.items():
        with closing(Engine(model, **arguments)) as engine:
            found[kind] = greedy(engine)
    return found


@pytest.mark.parametrize("config", [v2, v3], ids=lambda config: config.__name__)
def test_float_pages_give_what_vllms_own_kernel_gives(config: Any, tmp_path: Path) -> None:
    folder, found = random_model(tmp_path, config()), []
    for arguments in ({}, FLOAT):
        with closing(Engine(folder, **arguments)) as engine:
            assert engine.kinds() == {"kvloom" if arguments else "vLLM"}
            found.append(answers(engine))
    (stock, stock_logs), (floats, float_logs) = found
    assert floats == stock
    assert float_logs == pytest.approx(stock_logs, abs=2e-3)


def rounded(x: torch.Tensor) -> torch.Tensor:
    codes, scales = quantize(x.float(), 8, 64, torch.float16)
    return dequantize(codes, scales, 8, torch.float32)


def test_int8_pages_are_float_pages_of_rounded_latents(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(Engine(model, kv_cache_dtype=INT8)) as engine:
        assert engine.kinds() == {"kvloom"}
        codes, code_logs = answers(engine)
    with closing(Engine(model, **FLOAT)) as engine:
        floats, float_logs = answers(engine)
    store = layer.store_in_pages
    monkeypatch.setattr(
        layer,
        "store_in_pages",
        lambda key, value, *rest, **k: store(rounded(key), rounded(value), *rest, **k),
    )
    with closing(Engine(model, **FLOAT)) as engine:
        same, same_logs = answers(engine)
    assert codes == same
    assert code_logs == pytest.approx(same_logs, abs=2e-3)
    assert any(abs(a - b) > 2e-3 for a, b in zip(code_logs, float_logs, strict=True))
    firsts = [logs[0 :: len(floats[0])] for logs in (code_logs, float_logs)]
    assert firsts[0] == pytest.approx(firsts[1], abs=0.1)


def test_a_residual_window_leaves_more_tokens_of_stock_vllm(model: Path, whole: dict[str, Greedy]) -> None:
    alone = tokens_of(model, **CODES_ALONE)
    same = [
        sum(next((i for i, (p, q) in enumerate(zip(x, y, strict=True)) if p != q), len(x)) for x, y in pairs)
        for pairs in (
            zip(found, whole["float"].tokens, strict=True) for found in (whole["int4"].tokens, alone)
        )
    ]
    assert same[0] > same[1]
    assert sum(a[0] == b[0] for a, b in zip(whole["int4"].tokens, whole["float"].tokens, strict=True)) >= 9


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_in_pieces_change_nothing(kind: str, model: Path, whole: dict[str, Greedy]) -> None:
    assert_same_but_for_ties(tokens_of(model, **KINDS[kind], max_num_batched_tokens=128), whole[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_found_prefixes_change_nothing(kind: str, model: Path, whole: dict[str, Greedy]) -> None:
    with closing(Engine(model, **KINDS[kind], block_size=BLOCK)) as engine:
        engine.tokens(prompts()[-2:])
        again = engine.run(prompts()[-2:])
        assert sum(request.num_cached_tokens for request in again) >= BLOCK
        found = [list(request.outputs[0].token_ids) for request in again]
        assert_same_but_for_ties(found, whole[kind], slice(-2, None))


@pytest.mark.parametrize("kind", KINDS)
def test_preempted_requests_change_nothing(kind: str, model: Path) -> None:
    texts, found = prompts()[::2], []  # which take many more blocks than when they begin
    limits = {"num_gpu_blocks_override": 130 if kind == "int4" else 66, "max_num_batched_tokens": 32}
    for more in ({}, limits):
        arguments = {**KINDS[kind], "block_size": BLOCK, "disable_log_stats": False, **more}
        with closing(Engine(model, **arguments)) as engine:
            found.append(greedy(engine, texts, 250))
            preempted = [x.value for x in engine.llm.get_metrics() if x.name == "vllm:num_preemptions"]
            assert (sum(preempted) > 0) == bool(more)
    assert_same_but_for_ties(found[1].tokens, found[0])


def test_pages_take_the_bytes_of_their_codes(model: Path) -> None:
    blocks = {}
    for kind, arguments in (("stock", {}), *KINDS.items(), ("alone", CODES_ALONE)):
        with closing(Engine(model, dtype="bfloat16", **arguments)) as engine:
            cache = engine.llm.llm_engine.vllm_config.cache_config
            blocks[kind] = cache.num_gpu_blocks * (16 if kind == "stock" else 128)
    assert blocks["float"] == pytest.approx(blocks["stock"], rel=0.02)
    assert blocks["int8"] / blocks["float"] == pytest.approx(1152 / 594, rel=0.02)
    assert blocks["alone"] / blocks["float"] == pytest.approx(1152 / 338, rel=0.02)
    assert blocks["int4"] == blocks["alone"]  # blocks of its residual window have the same bytes


def settings(engine: Engine) -> tuple[Any, ...]:
    config = engine.llm.llm_engine.vllm_config
    cache, scheduler = config.cache_config, config.scheduler_config
    return cache.block_size, cache.enable_prefix_caching, scheduler.enable_chunked_prefill


def test_vllms_own_pages_keep_its_settings(model: Path) -> None:
    with closing(Engine(model)) as engine:
        assert settings(engine) == (16, False, False)
    with closing(Engine(model, **FLOAT, max_num_batched_tokens=256)) as engine:
        assert settings(engine) == (128, True, True)
        assert engine.llm.llm_engine.vllm_config.scheduler_config.max_num_batched_tokens == 256
    with closing(Engine(model, **FLOAT, block_size=48, enable_prefix_caching=False)) as engine:
        assert settings(engine) == (48, False, True)


def test_the_backend_for_amx_has_the_same_pages(
    model: Path, whole: dict[str, Greedy], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.attention.selector import _cached_get_attn_backend

    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    try:
        _cached_get_attn_backend.cache_clear()
        for kind in ("float", "int8"):
            with closing(Engine(model, **KINDS[kind])) as engine:
                runner = engine.llm.llm_engine.model_executor.driver_worker.worker.model_runner
                layers = runner.compilation_config.static_forward_context.values()
                assert {x.get_attn_backend().get_name() for x in layers} == {"AMX_MLA"}
                assert_same_but_for_ties(engine.tokens(prompts()), whole[kind])
    finally:
        _cached_get_attn_backend.cache_clear()


GUESSES = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}
PROCESSES = {
    "ranks": ({"tensor_parallel_size": 2}, {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}),
    "speculation": ({"speculative_config": GUESSES}, {}),
}


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one core")
@pytest.mark.parametrize("name", PROCESSES)
def test_two_ranks_and_speculation_change_nothing(
    name: str, model: Path, whole: dict[str, Greedy], tmp_path: Path
) -> None:
    arguments, environment = PROCESSES[name]
    arguments = {"model": str(model), "kv_cache_dtype": INT8, **arguments}
    assert_same_but_for_ties(tokens_of_child(arguments, tmp_path, **environment), whole["int8"])


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"kv_cache_dtype": "fp8"},
            (UnsupportedError, ValueError),  # vLLM itself from 0.33 on
            "must be auto, int8_per_token_head, int4_per_token_head or the model's float32 .* got 'fp8'"
            "|kv-cache-dtype fp8 is not supported",
        ),
        (
            {"kv_cache_dtype": INT8, "kv_cache_dtype_skip_layers": ["0"]},
            UnsupportedError,
            "kv_cache_dtype_skip_layers must be empty with latent attention",
        ),
        (
            {"kv_cache_dtype": INT8, "additional_config": {"kvloom": {"group": 48}}},
            ConfigError,
            r"kvloom\.group must divide the head dim 512, got 48",
        ),
        (
            {"kv_cache_dtype": INT8, "additional_config": {"kvloom": {"group": 128}}},
            ConfigError,
            r"kvloom\.group must divide the head dim 64, got 128",
        ),
        (
            {"kv_cache_dtype": INT4, "disable_hybrid_kv_cache_manager": True},
            UnsupportedError,
            r"kvloom\.recent must be 0 with disable_hybrid_kv_cache_manager",
        ),
        (
            {
                "kv_cache_dtype": INT8,
                "kv_transfer_config": {
                    "kv_connector": "KvloomConnector",
                    "kv_connector_module_path": "kvloom.integrations.vllm.connector",
                    "kv_role": "kv_both",
                    "kv_connector_extra_config": {"store": "memory://latents"},
                },
            },
            UnsupportedError,
            "a store has no latents",
        ),
    ],
    ids=["fp8", "skipped", "group", "group of rope keys", "hybrid", "store"],
)
def test_what_cannot_be_served_is_refused_at_start(
    arguments: dict[str, Any], error: type[Exception] | tuple[type[Exception], ...], message: str, model: Path
) -> None:
    with pytest.raises(error, match=message):
        Engine(model, **arguments)


def test_kernels_that_are_missing_are_a_sentence(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvloom import ops

    monkeypatch.setattr(ops, "cpu_kernels", lambda: None)
    monkeypatch.setattr(ops, "why_unavailable", lambda what: "no compiler")
    with pytest.raises(UnsupportedError, match="kvloom must have compiled kernels: no compiler"):
        Engine(model, kv_cache_dtype=INT8)


def test_a_version_that_was_not_tested_is_guarded(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.attention.selector import _cached_get_attn_backend

    from kvloom.integrations import vllm

    try:
        with monkeypatch.context() as patch:
            patch.setattr(vllm, "vllm_version", lambda: "0.99.0")
            vllm.register()
            _cached_get_attn_backend.cache_clear()
            with pytest.raises(UnsupportedError, match=r"vLLM must be .*, got 0\.99\.0"):
                Engine(model, kv_cache_dtype=INT8)
            assert len(tokens_of(model, prompts()[:1])[0]) > 0
    finally:
        vllm.register()
        _cached_get_attn_backend.cache_clear()
