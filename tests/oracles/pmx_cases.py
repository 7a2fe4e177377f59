"""Builders of calls to the PMX operators: poisoned caches, ragged batches, and the comparison of one call.

A call is a dict of keyword arguments, so that one value drives both the golden and the operator under test.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvloom.conform.oracles import pmx as pmx_golden
from oracles.bits import FLOATS, assert_same_bits, assert_unchanged, poison, snapshot

PADDING = (-1, 2**63 - 1)
Call = dict[str, Any]


@dataclass(frozen=True)
class Numerics:
    """The dtypes of one call (T1 inputs, T2 cache, T3 scale) and its quantizer."""

    inputs: torch.dtype
    cache: torch.dtype
    scale: torch.dtype | None = None
    bit: int = 0
    group: int = 8

    def attributes(self) -> Call:
        return {"quant_bit": self.bit, "quant_group": self.group}


def plain_numerics(inputs: torch.dtype) -> list[Numerics]:
    """Every unquantized cache dtype for ``inputs``."""
    return [Numerics(inputs, cache) for cache in ((torch.int8,) if inputs == torch.int8 else FLOATS)]


def quantized_numerics(inputs: torch.dtype, bit: int, groups: Iterable[int]) -> list[Numerics]:
    """Every scale dtype and group for ``inputs`` at ``bit`` bits."""
    cache = {8: torch.int8, 4: torch.uint8}[bit]
    return [Numerics(inputs, cache, scale, bit, group) for scale in FLOATS for group in groups]


# --- tensors ------------------------------------------------------------------------------------------------


def random_input(shape: Iterable[int], dtype: torch.dtype, rng: torch.Generator) -> Tensor:
    """Normal values with a random magnitude per head vector; for int8 any code."""
    shape = list(shape)
    if dtype == torch.int8:
        return torch.randint(-128, 128, shape, dtype=dtype, generator=rng)
    magnitude = 10.0 ** (torch.rand([*shape[:-1], 1], generator=rng) * 4 - 2)
    return (torch.randn(shape, generator=rng) * magnitude).to(dtype)


def poisoned_cache(
    axes: str, sizes: dict[str, int], how: Numerics, rng: torch.Generator
) -> tuple[Tensor, Tensor | None]:
    """Cache and scale of random bytes, axes in the order of ``axes``."""
    lead = [sizes[axis] for axis in axes[:-1]]
    width = sizes["D"] // 2 if how.bit == 4 else sizes["D"]
    cache = poison([*lead, width], how.cache, rng)
    if how.bit == 0:
        return cache, None
    assert how.scale is not None
    return cache, poison([*lead, sizes["D"] // how.group], how.scale, rng)


def make_readable(
    cache: Tensor,
    scale: Tensor | None,
    axes: str,
    at: dict[str, int],
    heads: int,
    how: Numerics,
    rng: torch.Generator,
) -> None:
    """Put finite data where a call reads history: both sides and all heads of one token."""
    for side in range(2):
        for head in range(heads):
            index = pmx_golden.index_of(axes, K=side, H=head, **at)
            if scale is not None:
                scale[index] = (torch.rand(scale.shape[-1:], generator=rng) * 0.1 + 1e-3).to(scale.dtype)
            elif how.inputs != torch.int8:
                cache[index] = torch.randn(cache.shape[-1:], generator=rng).to(cache.dtype)


def static_call(
    how: Numerics,
    layout: int,
    num_repeat: int,
    rng: torch.Generator,
    *,
    batch: int = 2,
    num_new: int = 3,
    start_pos: int = 2,
    max_batch: int = 3,
    max_seq: int = 7,
    heads: int = 2,
    head_dim: int = 32,
) -> Call:
    """A call of the static operator into the second of two layers; same-dtype history is random bytes."""
    axes = pmx_golden.STATIC_AXES[layout]
    sizes = {"B": max_batch, "L": 2, "K": 2, "S": max_seq, "H": heads, "D": head_dim}
    cache, scale = poisoned_cache(axes, sizes, how, rng)
    if how.cache != how.inputs:
        for n in range(batch):
            for s in range(start_pos):
                make_readable(cache, scale, axes, {"B": n, "L": 1, "S": s}, heads, how, rng)
    shape = (batch, num_new, heads, head_dim)
    return {
        "current_key": random_input(shape, how.inputs, rng),
        "current_value": random_input(shape, how.inputs, rng),
        "start_pos": start_pos,
        "cache": cache,
        "scale": scale,
        "num_layer": 2,
        "layer_idx": 1,
        "num_repeat": num_repeat,
        "cache_layout": layout,
        **how.attributes(),
    }


# --- ragged batches -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Batch:
    """Lengths and places of a ragged batch; ``form`` is offset, page or token."""

    form: str
    seqlens: tuple[int, ...]
    start_pos: tuple[int, ...]
    cachestarts: tuple
    num_slots: int
    page_size: int = 128

    def kvlens(self) -> list[int]:
        return [p + s for p, s in zip(self.start_pos, self.seqlens, strict=True)]

    def starts(self, lengths: Iterable[int]) -> list[int]:
        sums = [0]
        for length in lengths:
            sums.append(sums[-1] + length)
        return sums

    def slot(self, b: int, t: int) -> int:
        mode, kvstarts = int(self.form != "offset"), self.starts(self.kvlens())
        table = [list(row) if self.form == "page" else row for row in self.cachestarts]
        return pmx_golden.slot_of(b, t, table, kvstarts, mode, self.page_size)

    def history(self) -> list[int]:
        """Slots that the call reads and does not write."""
        tokens = [(b, t) for b, p in enumerate(self.start_pos) for t in range(p)]
        return sorted({self.slot(b, t) for b, t in tokens} - set(self.written()))

    def written(self) -> list[int]:
        pairs = zip(self.start_pos, self.seqlens, strict=True)
        return [self.slot(b, p + i) for b, (p, n) in enumerate(pairs) for i in range(n)]

    def arguments(self) -> Call:
        rows = [list(row) if self.form == "page" else row for row in self.cachestarts]
        table = torch.tensor(rows, dtype=torch.int64)
        if self.form == "page" and not rows:
            table = table.reshape(0, 1)
        return {
            "seqstarts": torch.tensor(self.starts(self.seqlens)),
            "kvstarts": torch.tensor(self.starts(self.kvlens())),
            "cachestarts": table,
            "start_pos": torch.tensor(self.start_pos, dtype=torch.int64),
            "max_seqlen": max(self.seqlens, default=0),
            "max_kvlen": max(self.kvlens(), default=0),
            "cache_mode": int(self.form != "offset"),
            "page_size": self.page_size,
        }


def scatter(lengths: list[int], rng: random.Random) -> tuple[list[int], int]:
    """First slots for blocks of ``lengths``, apart and in random order, and a pool size that just fits."""
    order = list(range(len(lengths)))
    rng.shuffle(order)
    first, cursor = [0] * len(lengths), rng.randrange(3)
    for block in order:
        first[block] = cursor
        cursor += lengths[block] + rng.randrange(3)
    return first, max(cursor, 1)


def random_batch(
    form: str, page_size: int, seqlens: Iterable[int], start_pos: Iterable[int], rng: random.Random
) -> Batch:
    """Place the entries apart from one another: unordered, with gaps, pages at any slot, padded rows."""
    seqlens, start_pos = tuple(seqlens), tuple(start_pos)
    kvlens = [p + s for p, s in zip(start_pos, seqlens, strict=True)]
    if form == "offset":
        first, num_slots = scatter(kvlens, rng)
        return Batch(form, seqlens, start_pos, tuple(first), num_slots, page_size)
    if form == "token":
        num_slots = sum(kvlens) + 3
        return Batch(
            form, seqlens, start_pos, tuple(rng.sample(range(num_slots), sum(kvlens))), num_slots, page_size
        )
    used = [[min(page_size, n - done) for done in range(0, n, page_size)] for n in kvlens]
    first, num_slots = scatter([tokens for row in used for tokens in row], rng)
    width = max((len(row) for row in used), default=0) + rng.randrange(3)
    rows, taken = [], 0
    for row in used:
        pages = first[taken : taken + len(row)]
        rows.append(tuple(pages + [rng.choice(PADDING) for _ in range(width - len(row))]))
        taken += len(row)
    return Batch(form, seqlens, start_pos, tuple(rows), num_slots, page_size)


def dynamic_call(
    batch: Batch,
    how: Numerics,
    axes: str,
    rng: torch.Generator,
    *,
    heads: int = 2,
    head_dim: int = 16,
    finite_history: bool = False,
) -> Call:
    """A call of the dynamic operator into the second of two layers, without layout and repetition."""
    sizes = {"T": batch.num_slots, "L": 2, "K": 2, "H": heads, "D": head_dim}
    cache, scale = poisoned_cache(axes, sizes, how, rng)
    if finite_history or how.cache != how.inputs:
        for slot in batch.history():
            make_readable(cache, scale, axes, {"L": 1, "T": slot}, heads, how, rng)
    shape = (sum(batch.seqlens), heads, head_dim)
    return {
        "current_key": random_input(shape, how.inputs, rng),
        "current_value": random_input(shape, how.inputs, rng),
        **batch.arguments(),
        "cache": cache,
        "scale": scale,
        "num_layer": 2,
        "layer_idx": 1,
        **how.attributes(),
    }


def attention_call(
    batch: Batch,
    how: Numerics,
    rng: torch.Generator,
    *,
    layout: int = 0,
    spec: str = "pmx",
    kv_heads: int = 2,
    ratio: int = 1,
    head_dim: int = 16,
    is_causal: bool = True,
    decoding_batches: int = 0,
    **more: Any,
) -> Call:
    """A call of the fused operator with moderate inputs, so that softmax weights are not all 0 or 1."""
    axes = pmx_golden.FUSED_AXES[spec][layout]
    call = dynamic_call(batch, how, axes, rng, heads=kv_heads, head_dim=head_dim, finite_history=True)
    for name in ("current_key", "current_value"):
        call[name] = torch.randn(call[name].shape, generator=rng).to(how.inputs)
    query = torch.randn(sum(batch.seqlens), kv_heads * ratio, head_dim, generator=rng).to(how.inputs)
    return {
        "query": query,
        **call,
        "decoding_batches": decoding_batches,
        "num_heads": kv_heads * ratio,
        "head_dim": head_dim,
        "num_kv_heads": kv_heads,
        "is_causal": is_causal,
        "cache_layout": layout,
        "spec": spec,
        **more,
    }


# --- comparison ---------------------------------------------------------------------------------------------


def assert_matches_golden(
    operator: Callable[..., tuple[Tensor, Tensor]],
    golden: Callable[..., pmx_golden.Stored],
    call: Call,
    any_nan: bool = False,
) -> pmx_golden.Stored:
    """Run both; outputs, the whole cache and the whole scale agree bit by bit and inputs are left alone."""
    expected, before = golden(**call), snapshot(call)
    key, value = operator(**call)
    assert_same_bits(key, expected.key, "key", any_nan)
    assert_same_bits(value, expected.value, "value", any_nan)
    assert_same_bits(call["cache"], expected.cache, "cache")
    assert_same_bits(call["scale"], expected.scale, "scale")
    assert_unchanged(call, before, "cache", "scale")
    return expected


def with_copies(call: Call, **changes: object) -> Call:
    """The same call with tensors of its own, and some arguments replaced."""
    copied = {name: x.clone() if isinstance(x, Tensor) else x for name, x in call.items()}
    return {**copied, **changes}


def as_tokens(batch: Batch) -> Batch:
    """The same slots spelled as a token table."""
    slots = tuple(batch.slot(b, t) for b, n in enumerate(batch.kvlens()) for t in range(n))
    return replace(batch, form="token", cachestarts=slots)
