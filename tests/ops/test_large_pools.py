"""Pools of more than 2^31 elements, of which few are ever touched: the rest is mapped and has no memory."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch
from oracles.bits import FLOATS, assert_same_bits, generator
from torch import Tensor

from kvloom import Batch, CacheIndex, KVSpec, KVView, QuantSpec, ops
from kvloom.ops.impl import cpu

HEADS, HEAD_DIM = 2, 64
LIMIT = 2**31
NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Linux, where Python does not name it yet

KINDS = {
    **{str(dtype).removeprefix("torch."): (dtype, None) for dtype in FLOATS},
    "int8": (torch.bfloat16, QuantSpec(8, 32)),
    "int4": (torch.bfloat16, QuantSpec(4, 32)),
}
BACKENDS = [
    pytest.param(
        "cpu", marks=pytest.mark.skipif(cpu.ISA is None, reason=f"no compiled backend: {cpu.WHY_NOT}")
    ),
    "reference",
]


def mapped(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros that take memory page by page, as they are written."""
    numbers = 1
    for extent in shape:
        numbers *= extent
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE
    try:
        memory = mmap.mmap(-1, numbers * dtype.itemsize, flags=flags)
    except OSError as error:
        pytest.skip(f"{numbers * dtype.itemsize >> 30} GiB cannot be mapped: {error}")
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def by_slot(raw: Tensor, axes: str) -> Tensor:
    """``raw`` with its slots first, by torch's own arithmetic."""
    return raw.movedim(axes.split().index("T"), 0)


class Pool:
    """A cache in ``axes``, mapped or small."""

    def __init__(self, kind: str, axes: str, num_slots: int, make: object = torch.zeros) -> None:
        dtype, quant = KINDS[kind]
        spec = KVSpec(1, HEADS, HEAD_DIM, dtype, axes, quant)
        cache_shape, scale_shape = spec.shapes(num_slots)
        sides = 1 if "2" in axes else 2
        self.axes = axes
        self.caches = [make(cache_shape, dtype=spec.cache_dtype) for _ in range(sides)]
        self.scales = []
        if scale_shape is not None and quant is not None:
            self.scales = [make(scale_shape, dtype=quant.scale_dtype) for _ in range(sides)]
        if sides == 1:
            self.kv = KVView.joint(spec.axes, self.caches[0], *self.scales)
        else:
            self.kv = KVView.split(spec.axes, *self.caches, *self.scales)

    def assert_holds(self, slots: Tensor, other: Pool, other_slots: Tensor) -> None:
        """The bytes of the same slots of another pool."""
        for got, want in zip(self.caches + self.scales, other.caches + other.scales, strict=True):
            assert_same_bits(by_slot(got, self.axes)[slots], by_slot(want, self.axes)[other_slots], "storage")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux to map without memory")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("axes", ["T H D", "H T D", "2 T H D", "2 H T D"])
@pytest.mark.parametrize("kind", KINDS)
def test_slots_on_both_sides_of_the_2_to_the_31st_element(kind: str, axes: str, backend: str) -> None:
    before = resident_bytes()
    width = HEAD_DIM // 2 if kind == "int4" else HEAD_DIM
    border = LIMIT // (width if "H T" in axes else HEADS * width)
    num_slots = border + 40
    large, small = Pool(kind, axes, num_slots, mapped), Pool(kind, axes, 16)
    assert min(cache.numel() for cache in large.caches) > LIMIT

    rng = generator(0)
    key, value = (torch.randn(8, HEADS, HEAD_DIM, generator=rng).bfloat16() for _ in range(2))
    slots = torch.tensor([border, 0, border - 1, num_slots - 1, 7, border + 1, border - 2, num_slots - 9])
    few = torch.arange(8)
    ops.store(key, value, slots.int(), large.kv, backend=backend)
    ops.store(key, value, few, small.kv, backend="reference")
    large.assert_holds(slots, small, few)
    empty = torch.tensor([1, 6, border - 3, border + 2, num_slots - 2])
    large.assert_holds(empty, small, torch.full((5,), 15))

    targets = torch.tensor([2, border + 3, border - 4])
    ops.copy(large.kv, slots[:3], large.kv, targets, backend=backend)
    ops.copy(small.kv, few[:3], small.kv, few[:3] + 8, backend="reference")
    large.assert_holds(targets, small, few[:3] + 8)

    for got, want in zip(
        ops.load(slots, large.kv, dtype=torch.float32, backend=backend),
        ops.load(few, small.kv, dtype=torch.float32, backend="reference"),
        strict=True,
    ):
        assert_same_bits(got, want, "loaded")

    query = torch.randn(2, 2 * HEADS, HEAD_DIM, generator=rng).bfloat16()
    starts, stored = torch.tensor([0, 2]), torch.tensor([0, 8])
    answers = [
        ops.attend(query, pool.kv, Batch(CacheIndex.tokens(table, stored), starts, stored), backend=backend)
        for pool, table in ((large, slots), (small, few))
    ]
    assert_same_bits(*answers, "attention")
    run = torch.tensor([border - 2, border - 1, border, border + 1])
    stored = torch.tensor([0, 4])
    answers = [
        ops.attend(query, large.kv, Batch(index, starts, stored), backend=backend)
        for index in (CacheIndex.offset(run[:1]), CacheIndex.tokens(run, stored))
    ]
    assert_same_bits(*answers, "attention over consecutive slots")
    assert resident_bytes() - before < 128 << 20
