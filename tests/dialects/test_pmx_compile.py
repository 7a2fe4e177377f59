"""The PMX operators inside ``torch.compile(fullgraph=True)`` give what they give outside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracles import bits
from torch import Tensor

from kvloom.dialects import pmx

pytestmark = pytest.mark.compile

dynamic = pmx.dynamic_batching

SEQSTARTS, KVSTARTS = torch.tensor([0, 3, 5]), torch.tensor([0, 3, 9])
OFFSETS, START_POS = torch.tensor([0, 10]), torch.tensor([0, 4])
INDEX = (SEQSTARTS, KVSTARTS, OFFSETS, START_POS)


def assert_same_compiled(
    call: Callable[..., Any], cache: Tensor, scale: Tensor | None, *inputs: Tensor
) -> None:
    """Run ``call`` eagerly and compiled on copies of one cache; results and caches have the same bits."""
    runs = []
    for run in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
        own = [cache.clone(), None if scale is None else scale.clone()]
        out = run(*own, *inputs)
        runs.append([*(out if isinstance(out, tuple) else (out,)), *own])
    for eager, compiled in zip(*runs, strict=True):
        if eager is not None:
            bits.assert_same_bits(compiled, eager, "compiled")


@pytest.mark.parametrize("quant_bit", [0, 8, 4])
def test_fused_attention(quant_bit: int) -> None:
    def call(cache: Tensor, scale: Tensor | None, query: Tensor, new: Tensor) -> Tensor:
        return dynamic.multi_head_cache_attention(
            query, new, new, *INDEX, 0, 3, 6, cache, scale,
            num_heads=4, head_dim=16, is_causal=True, num_kv_heads=2, quant_bit=quant_bit, cache_layout=3,
        )  # fmt: skip

    dtype, stored = {0: (torch.float32, 16), 8: (torch.int8, 16), 4: (torch.uint8, 8)}[quant_bit]
    scale = torch.zeros(2, 1, 2, 32, 2) if quant_bit else None
    cache = torch.zeros(2, 1, 2, 32, stored, dtype=dtype)
    assert_same_compiled(call, cache, scale, torch.randn(5, 4, 16), torch.randn(5, 2, 16))


def test_static_cache() -> None:
    def call(cache: Tensor, scale: Tensor | None, new: Tensor) -> tuple[Tensor, Tensor]:
        return pmx.key_value_cache(new, new, 4, cache, cache_layout=1, num_layer=2, layer_idx=1)

    assert_same_compiled(call, torch.zeros(2, 2, 2, 2, 32, 16), None, torch.randn(2, 3, 2, 16))


def test_ragged_cache_of_which_the_length_is_read_from_a_tensor() -> None:
    def call(cache: Tensor, scale: Tensor | None, new: Tensor, *index: Tensor) -> tuple[Tensor, Tensor]:
        return dynamic.key_value_cache(new, new, *index, 3, 6, cache)

    # Not by monkeypatch, which leaves the setting deleted, so that nothing can be exported any more.
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        assert_same_compiled(call, torch.zeros(32, 1, 2, 2, 16), None, torch.randn(5, 2, 16), *INDEX)
