"""Attention that kernels treat differently: of many kinds, options and lengths, and what it should give."""

from __future__ import annotations

import math

import torch
from ops.attention import Case, plain
from ops.pools import Kind
from oracles.bits import generator
from torch import Tensor

from kvloom.core.specs import CODE_DTYPE
from kvloom.ops import KeyOffset, PositionalBias, Scores, alibi_slopes
from kvloom.ops.impl import cpu


def codes(bits: int, group: int, scale_dtype: torch.dtype = torch.float16) -> Kind:
    """Of 4 and 2 bits in full range, of which scales of 4 have both signs and codes all numbers."""
    return Kind(CODE_DTYPE[bits], bits, group, scale_dtype, full_range=bits < 8)


def golden(case: Case, scores: Scores) -> Tensor:
    """In float64, of the values that attention receives."""
    wide = Case(case.query.double(), case.kv, case.new, case.stored, case.slots)
    wide.decoding_batches, wide.first_visible = case.decoding_batches, case.first_visible
    wide.loaded = [(key.double(), value.double()) for key, value in case.keys_and_values()]
    return plain(wide, scores)


def fewest_tokens_in_tiles(case: Case) -> float:
    """New tokens of a sequence from which on AMX computes in tiles, which round in another order.

    Infinity where it does not: on other instruction sets, and of other dtypes and head dims.
    """
    serves = cpu.ISA in ("amx", "amx-emulated") and case.query.dtype == torch.bfloat16
    for side in case.kv.sides:
        serves &= side.head_dim % 32 == 0 and side.head_dim <= 256
        if side.scale is None:
            serves &= side.cache.dtype == torch.bfloat16
        else:
            row = side.head_dim * max(side.bits, 4) // 8  # 2 bits are read as 4
            serves &= row % 16 == 0 and row % (4 * (side.head_dim // side.group)) == 0
    return 17 if serves else math.inf


def alone(case: Case, b: int, new: int | None = None, last: int | None = None) -> Case:
    """Sequence b without the others; of its new tokens only ``new`` that end at stored token ``last``."""
    stop = case.stored[b] if last is None else last
    end = sum(case.new[: b + 1]) - (case.stored[b] - stop)
    count = case.new[b] if new is None else new
    query = case.query[end - count : end].clone()
    return Case(query, case.kv, [count], [stop], [case.slots[b][:stop]], case.page_size)


def waves(rows: int, heads: int, pairs: int, kv_heads: int = 2) -> PositionalBias:
    """A bias with frequencies as RoPE has them, from 1 on."""
    rng = generator(17)
    coefficients = 3 * torch.randn(rows, heads, 2 * pairs, generator=rng)
    exponent = torch.rand(kv_heads, pairs, generator=rng, dtype=torch.float64)
    exponent[0, 0] = 0
    return PositionalBias(coefficients, 10000.0**-exponent)


def offset_of(size: float = 30.0, pairs: int = 3, heads: int = 2, head_dim: int = 16) -> KeyOffset:
    """Pairs as in Llama, of channels i and D/2 + i."""
    rng = generator(3)
    first = torch.stack([torch.randperm(head_dim // 2, generator=rng)[:pairs] for _ in range(heads)])
    mean = size * torch.randn(heads, pairs, 2, generator=rng)
    return KeyOffset(
        mean,
        torch.stack((first, first + head_dim // 2), -1),
        10000.0 ** (-2.0 * first.double() / head_dim),
        head_dim,
    )


def options(heads: int, rows: int, columns: int) -> dict[str, Scores]:
    rng = generator(5)
    mask = torch.randn(rows, columns, generator=rng).masked_fill_(
        torch.rand(rows, columns, generator=rng) < 0.3, -math.inf
    )
    slopes, sinks = alibi_slopes(heads), torch.randn(heads, generator=rng)
    return {
        "window": Scores(window=40),
        "window over splits": Scores(window=513),
        "softcap": Scores(softcap=2.0),
        "alibi": Scores(alibi_slopes=slopes),
        "sinks": Scores(sinks=sinks.half()),
        "mask": Scores(mask=mask),
        "mask of each head": Scores(mask=torch.stack([mask * (1 + h) for h in range(heads)]).bfloat16()),
        "not causal": Scores(is_causal=False),
        "positional bias": Scores(positional_bias=waves(rows, heads, 3)),
        "all": Scores(
            mask=mask,
            alibi_slopes=slopes,
            sinks=sinks,
            window=100,
            softcap=5.0,
            scale=0.2,
            is_causal=False,
            positional_bias=waves(rows, heads, 17),
        ),
    }
