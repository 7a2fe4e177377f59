"""Real vLLM in two minutes: registration, and greedy tokens over int8 and int4 pages (``make test-vllm``)."""

from __future__ import annotations

from contextlib import closing

import pytest
from integrations.vllm.engines import INT4, INT8, Engine, needs_vllm, prompts

from kvloom.integrations.vllm import register, why_not_registered

needs_vllm()
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def stock() -> list[list[int]]:
    with closing(Engine()) as engine:
        assert engine.kinds() == {"vLLM"}
        return engine.tokens(prompts())


def test_vllm_takes_its_attention_from_kvloom() -> None:
    from vllm.plugins import load_general_plugins
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    assert why_not_registered() is None
    load_general_plugins()
    register()  # a second time
    path = AttentionBackendEnum.CPU_ATTN.get_path()
    assert path == "kvloom.integrations.vllm.backend.KvloomBackend"


def test_unsmoothed_int8_pages_give_the_tokens_of_stock_vllm_in_float32(
    stock: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    plain = {"kvloom": {"smooth": "none"}}
    with closing(Engine(kv_cache_dtype=INT8, additional_config=plain)) as engine:
        assert engine.kinds() == {"kvloom"}
        assert engine.tokens(prompts()) == stock
    lines = [record.getMessage() for record in caplog.records if record.name == "vllm.kvloom"]
    assert len(lines) == 1 and "attends to pages of int8:g64,smooth=none" in lines[0]


def test_smoothed_int8_pages_are_left_where_stock_vllm_wavers(stock: list[list[int]]) -> None:
    with closing(Engine()) as engine:
        sure = [request.outputs[0].logprobs for request in engine.run(prompts(), logprobs=2)]
    with closing(Engine(kv_cache_dtype=INT8)) as engine:
        found = engine.tokens(prompts())
    firsts = [
        next((i for i, (p, q) in enumerate(zip(x, y, strict=True)) if p != q), None)
        for x, y in zip(found, stock, strict=True)
    ]
    assert firsts.count(None) >= 8
    for first, steps in zip(firsts, sure, strict=True):
        if first is not None:
            best, second = sorted((x.logprob for x in steps[first].values()), reverse=True)[:2]
            assert best - second < 0.1


def test_int4_pages_begin_with_the_tokens_of_stock_vllm(stock: list[list[int]]) -> None:
    with closing(Engine(kv_cache_dtype=INT4)) as engine:
        found = engine.tokens(prompts(), 1)
    assert sum(a[0] == b[0] for a, b in zip(found, stock, strict=True)) >= 10
