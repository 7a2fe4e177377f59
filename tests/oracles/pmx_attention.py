"""Run one attention call of the operator under test and judge it against the golden."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvloom.conform.oracles import pmx as pmx_golden
from oracles import bits
from oracles.attention import assert_as_good_as_plain, plain_attention
from oracles.pmx_cases import Call

NOT_OF_ATTENTION = (
    "current_key",
    "current_value",
    "cachestarts",
    "start_pos",
    "cache",
    "scale",
    "num_layer",
    "layer_idx",
    "quant_bit",
    "quant_group",
    "cache_mode",
    "cache_layout",
    "page_size",
    "spec",
)


def unfused_call(call: Call, key: Tensor, value: Tensor) -> Call:
    """The attention half of a fused call, on keys and values that are already loaded."""
    kept = {name: x for name, x in call.items() if name not in NOT_OF_ATTENTION}
    return {**kept, "key": key, "value": value}


def check_fused(operator: Callable[..., Tensor], call: Call) -> Tensor:
    """Output within the error rule, cache and scale bit-equal to the golden's, inputs left alone."""
    golden, before = pmx_golden.multi_head_cache_attention(**call), bits.snapshot(call)
    output = operator(**call)
    plain = plain_attention(**unfused_call(call, golden.key, golden.value))
    assert_as_good_as_plain(output, golden.output, plain)
    bits.assert_same_bits(call["cache"], golden.cache, "cache")
    bits.assert_same_bits(call["scale"], golden.scale, "scale")
    bits.assert_unchanged(call, before, "cache", "scale")
    return output


def check_unfused(operator: Callable[..., Tensor], call: Call) -> Tensor:
    """Output within the error rule, inputs left alone."""
    golden, before = pmx_golden.multi_head_attention(**call), bits.snapshot(call)
    output = operator(**call)
    assert_as_good_as_plain(output, golden, plain_attention(**call))
    bits.assert_unchanged(call, before)
    return output


def random_unfused_call(
    dtype: torch.dtype,
    seqlens: list[int],
    kvlens: list[int],
    *,
    seed: int = 0,
    kv_heads: int = 2,
    ratio: int = 1,
    head_dim: int = 16,
    is_causal: bool = True,
    decoding_batches: int = 0,
    **more: Any,
) -> Call:
    """Packed queries, keys and values of entries whose lengths need not be related."""
    rng = bits.generator(seed)
    heads = kv_heads * ratio

    def packed(tokens: int, heads: int) -> Tensor:
        return torch.randn(tokens, heads, head_dim, generator=rng).to(dtype)

    return {
        "query": packed(sum(seqlens), heads),
        "key": packed(sum(kvlens), kv_heads),
        "value": packed(sum(kvlens), kv_heads),
        "seqstarts": torch.tensor([0, *seqlens]).cumsum(0),
        "kvstarts": torch.tensor([0, *kvlens]).cumsum(0),
        "decoding_batches": decoding_batches,
        "max_seqlen": max(seqlens, default=0),
        "max_kvlen": max(kvlens, default=0),
        "num_heads": heads,
        "head_dim": head_dim,
        "is_causal": is_causal,
        "num_kv_heads": kv_heads,
        **more,
    }
