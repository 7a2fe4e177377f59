"""int4 pages with a residual window in vLLM: no token depends on prefixes, pieces or preemption."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest
from integrations.vllm.engines import INT4, INT8, Engine, needs_vllm, prompts, random_model, tokens_of
from integrations.vllm.test_models import hybrid

from kvloom.errors import UnsupportedError

needs_vllm()
pytestmark = pytest.mark.filterwarnings("ignore")

BLOCK = 32
GROUP = {"kvloom": {"group": 32}}
NONE = {"kvloom": {"recent": 0}}


@pytest.fixture(scope="module")
def stock() -> list[list[int]]:
    return tokens_of()


@pytest.fixture(scope="module")
def int4() -> list[list[int]]:
    return tokens_of(kv_cache_dtype=INT4)


def same_of(a: list[list[int]], b: list[list[int]]) -> int:
    """Tokens before the first that differs, of all texts."""
    return sum(
        next((i for i, (p, q) in enumerate(zip(x, y, strict=True)) if p != q), len(x))
        for x, y in zip(a, b, strict=True)
    )


def groups_of(engine: Engine) -> list[Any]:
    return list(engine.llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_config.kv_cache_groups)


def test_more_tokens_are_those_of_stock_vllm(stock: list[list[int]], int4: list[list[int]]) -> None:
    without = tokens_of(kv_cache_dtype=INT4, additional_config=NONE)
    assert same_of(stock, int4) > 1.5 * same_of(stock, without)


def test_prompts_in_pieces_change_nothing(int4: list[list[int]]) -> None:
    assert tokens_of(kv_cache_dtype=INT4, max_num_batched_tokens=128) == int4


def test_a_found_prefix_changes_nothing(int4: list[list[int]]) -> None:
    with closing(Engine(kv_cache_dtype=INT4, block_size=BLOCK)) as engine:
        assert engine.tokens(prompts()) == int4
        again = engine.run(prompts()[-2:])
        assert sum(request.num_cached_tokens for request in again) >= BLOCK
        assert [list(request.outputs[0].token_ids) for request in again] == int4[-2:]


def test_preempted_requests_change_nothing() -> None:
    texts, new = prompts()[::2], 250  # which take many more blocks than when they begin
    found = []
    for limits in ({}, {"num_gpu_blocks_override": 120, "max_num_batched_tokens": 32}):
        arguments = {"kv_cache_dtype": INT4, "block_size": BLOCK, "disable_log_stats": False, **limits}
        with closing(Engine(**arguments)) as engine:
            found.append(engine.tokens(texts, new))
            metrics = engine.llm.get_metrics()
            preempted = sum(x.value for x in metrics if x.name == "vllm:num_preemptions")
            assert (preempted > 0) == bool(limits)
    assert found[0] == found[1]


def test_a_residual_window_is_a_group_in_pages_of_the_same_bytes(caplog: pytest.LogCaptureFixture) -> None:
    with closing(Engine(kv_cache_dtype=INT4, dtype="bfloat16", additional_config=GROUP)) as engine:
        codes, residual = (group.kv_cache_spec for group in groups_of(engine))
    assert residual.sliding_window == 64 and residual.page_size_bytes == codes.page_size_bytes
    held = (residual.sliding_window - 1) // residual.block_size + 2  # a window begins within a block
    assert held / (4096 / codes.block_size) <= 0.1
    assert "pages of int4:g32," in caplog.text


def test_it_can_be_left_out_and_asked_for() -> None:
    with closing(Engine(kv_cache_dtype=INT4, additional_config=NONE)) as engine:
        assert len(groups_of(engine)) == 1
    with closing(Engine(kv_cache_dtype=INT8, additional_config={"kvloom": {"recent": 16}})) as engine:
        _, residual = groups_of(engine)
        assert residual.kv_cache_spec.sliding_window == 16


def test_layers_with_windows_have_one_too(tmp_path: Any) -> None:
    config, _ = hybrid()
    model = random_model(tmp_path, config)
    texts = prompts()[1::4]
    with closing(Engine(model, kv_cache_dtype=INT4, block_size=BLOCK)) as engine:
        found = engine.tokens(texts)
        names = [name for group in groups_of(engine) for name in group.layer_names]
        assert 2 * sum(not name.endswith(".residual") for name in names) == len(names)
        assert engine.tokens(texts) == found
    assert same_of(tokens_of(model, texts), found) > 0


def test_a_window_of_which_vllm_keeps_all_is_refused() -> None:
    with pytest.raises(
        UnsupportedError, match=r"kvloom\.recent must be 0 with disable_hybrid_kv_cache_manager"
    ):
        Engine(kv_cache_dtype=INT4, disable_hybrid_kv_cache_manager=True)
