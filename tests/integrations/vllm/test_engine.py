"""What vLLM's scheduler does with requests, over int8 pages: none of it changes a token."""

from __future__ import annotations

import re
from contextlib import closing
from typing import Any

import pytest
from integrations.vllm.engines import INT4, INT8, Engine, needs_vllm, prompts, tokens_of

from kvloom.errors import ConfigError, UnsupportedError

needs_vllm()
pytestmark = pytest.mark.filterwarnings("ignore")

BLOCK = 32
REFUSES = UnsupportedError, ValueError  # vLLM itself from 0.33 on


@pytest.fixture(scope="module")
def stock() -> list[list[int]]:
    return tokens_of()


@pytest.fixture(scope="module")
def int8() -> list[list[int]]:
    return tokens_of(kv_cache_dtype=INT8)


def metric(engine: Engine, name: str) -> int:
    return sum(metric.value for metric in engine.llm.get_metrics() if metric.name == f"vllm:{name}")


def test_prompts_in_pieces_change_nothing(int8: list[list[int]]) -> None:
    assert tokens_of(kv_cache_dtype=INT8, max_num_batched_tokens=128) == int8


@pytest.mark.parametrize("group", [16, 32])
def test_a_group_of_ones_own(group: int, stock: list[list[int]], caplog: pytest.LogCaptureFixture) -> None:
    config = {"kvloom": {"group": group, "smooth": "none"}}
    found = tokens_of(kv_cache_dtype=INT8, block_size=64, additional_config=config)
    assert f"pages of int8:g{group}," in caplog.text
    assert sum(a == b for a, b in zip(found, stock, strict=True)) >= 10  # texts; the last bits are others


def test_found_prefixes_and_preempted_requests_change_nothing(int8: list[list[int]]) -> None:
    arguments = {"kv_cache_dtype": INT8, "block_size": BLOCK, "disable_log_stats": False}
    with closing(Engine(**arguments, num_gpu_blocks_override=110)) as engine:
        assert engine.tokens(prompts()) == int8
        assert metric(engine, "num_preemptions") > 0
        again = engine.run(prompts()[-2:])
        assert sum(request.num_cached_tokens for request in again) >= BLOCK
        assert [list(request.outputs[0].token_ids) for request in again] == int8[-2:]


def test_layers_may_keep_their_floats(stock: list[list[int]]) -> None:
    plain = {"kvloom": {"smooth": "none"}}
    arguments = {"kv_cache_dtype": INT8, "kv_cache_dtype_skip_layers": ["0"], "additional_config": plain}
    with closing(Engine(**arguments)) as engine:
        assert engine.kinds() == {"kvloom", "vLLM"}
        assert engine.tokens(prompts()) == stock


def test_pages_take_the_bytes_of_their_codes() -> None:
    blocks = {}
    for kind in ("auto", INT8, INT4):
        with closing(Engine(kv_cache_dtype=kind, dtype="bfloat16")) as engine:
            blocks[kind] = engine.llm.llm_engine.vllm_config.cache_config.num_gpu_blocks
    assert blocks[INT8] / blocks["auto"] == pytest.approx(256 / 132, rel=0.02)
    assert blocks[INT4] / blocks["auto"] == pytest.approx(256 / 68, rel=0.02)


def test_a_probe_decides_for_float_pages(stock: list[list[int]]) -> None:
    from kvloom.integrations.vllm import probe

    for is_faster, kind in ((True, "kvloom"), (False, "vLLM")):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(probe, "is_faster", lambda *_, answer=is_faster: answer)
            with closing(Engine(additional_config={"kvloom": {"float": "auto"}})) as engine:
                assert engine.kinds() == {kind}
                assert engine.tokens(prompts()[:2]) == stock[:2]


def test_the_probe_times_both() -> None:
    import torch

    from kvloom.integrations.vllm import probe

    times = probe.probe(2, 4, 64, torch.float32)
    assert len(times) == len(probe.CASES) and all(seconds > 0 for pair in times for seconds in pair)
    assert probe.is_faster(2, 4, 64, torch.float32) in (True, False)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"kv_cache_dtype": INT8, "additional_config": {"kvloom": {"group": 48}}},
            ConfigError,
            r"kvloom\.group must divide the head dim 64, got 48",
        ),
        (
            {"additional_config": {"kvloom": {"bits": 8}}},
            ConfigError,
            "options group, float, recent, smooth only, got 'bits'",
        ),
        (
            {"kv_cache_dtype": "fp8_per_token_head"},
            REFUSES,
            "kv_cache_dtype must be auto, .* int4_per_token_head or the model's float32 on a CPU, "
            "got 'fp8_per_token_head'|kv-cache-dtype fp8_per_token_head is not supported",
        ),
    ],
    ids=["group", "option", "fp8_per_token_head"],
)
def test_what_cannot_be_served_is_refused_at_start(
    arguments: dict[str, Any], error: type[Exception] | tuple[type[Exception], ...], message: str
) -> None:
    with pytest.raises(error, match=message):
        Engine(**arguments)


def test_a_version_that_was_not_tested_is_guarded(
    stock: list[list[int]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from vllm.v1.attention.selector import _cached_get_attn_backend

    from kvloom.integrations import vllm

    try:
        with monkeypatch.context() as patch:
            patch.setattr(vllm, "vllm_version", lambda: "0.99.0")
            vllm.register()
            reason = f"vLLM must be {' or '.join(vllm.TESTED)}, got 0.99.0"
            assert f"kvloom is not active: {reason}" in caplog.text
            _cached_get_attn_backend.cache_clear()
            with pytest.raises(UnsupportedError, match=re.escape(reason)):
                Engine(kv_cache_dtype=INT8)
            assert tokens_of(texts=prompts()[:2]) == stock[:2]
    finally:
        vllm.register()
        _cached_get_attn_backend.cache_clear()


def test_kernels_that_are_missing_are_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvloom import ops

    monkeypatch.setattr(ops, "cpu_kernels", lambda: None)
    monkeypatch.setattr(ops, "why_unavailable", lambda what: "no compiler")
    with pytest.raises(UnsupportedError, match="kvloom must have compiled kernels: no compiler"):
        Engine(kv_cache_dtype=INT8)
