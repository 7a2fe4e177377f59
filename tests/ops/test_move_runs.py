"""Loads and copies of many adjacent slots, which the compiled kernels move at once, have the right bits."""

from __future__ import annotations

import pytest
import torch
from ops.pools import FULL4, INT2, INT4, INT8, Kind, Pool, as_integers, make_pool
from ops.twins import assert_twins, twins
from oracles.bits import FLOATS, assert_same_bits, generator
from oracles.pairs import pairwise

from kvloom import ops

KINDS = (
    *(INT8, Kind(torch.int8, 8, 16), Kind(torch.int8, 8, 64, torch.bfloat16)),
    *(Kind(torch.int8, 8, 40, torch.float32), INT4, FULL4, Kind(torch.uint8, 4, 16)),
    *(Kind(torch.uint8, 4, 64, torch.bfloat16), INT2, Kind(torch.bits2x4, 2, 16), *map(Kind, FLOATS)),
)
AXES = ("B H S D", "2 B H S D", "L 2 H T D", "B S H D", "B H D/4 S D%4", "T/3 D/2 H T%3 D%2")
SIZES = {"blocks": 3, "block_size": 320}
SCALES = [0.0, -0.0, 1e-7, 0.01, 2.0, 500.0, 511.0, 512.0, 8188.0, 65504.0, -3e4, 3e38, torch.inf, torch.nan]
"""Some by which codes of 8, 4 and 2 bits are beyond float16, and some just not."""


def slots_of(count: int, num_slots: int) -> torch.Tensor:
    """Runs of some length, in any order: of one slot, within a block and across blocks."""
    rng, found = generator(5), []
    while sum(map(len, found)) < count:
        first = int(torch.randint(num_slots, (1,), generator=rng))
        length = int(torch.randint(1, 300, (1,), generator=rng)) if len(found) % 3 else 1
        found.append(torch.arange(first, min(first + length, num_slots)))
    return torch.cat(found)[:count]


def fill(pool: Pool, seed: int) -> None:
    """Any bytes in the place of numbers and codes, and ``SCALES`` as scales."""
    rng = generator(seed)
    for name, x in pool.raw.items():
        if name.endswith("scale"):
            x.copy_(torch.tensor(SCALES)[torch.randint(len(SCALES), x.shape, generator=rng)].to(x.dtype))
        elif pool.kind.bits:
            integers = x.view(torch.uint8) if x.dtype == torch.bits2x4 else x
            integers.copy_(torch.randint(0, 256, x.shape, generator=rng).to(torch.uint8).view(integers.dtype))
        else:
            x.copy_(torch.randn(x.shape, generator=rng))


@pytest.mark.parametrize(("axes", "kind", "dtype"), pairwise(AXES, KINDS, FLOATS), ids=str)
def test_loads_of_runs_have_the_bits_of_the_reference(axes: str, kind: Kind, dtype: torch.dtype) -> None:
    head_dim = 80 if kind.group == 40 else 64
    pool = make_pool(axes, kind, heads=3, head_dim=head_dim, **SIZES)
    fill(pool, 1)
    slots = slots_of(2 * 430, pool.num_slots).view(2, 430)
    for at in (slots, slots[0]):
        found, expected = (ops.load(at, pool.view(), dtype=dtype, backend=b) for b in ("auto", "reference"))
        for got, want in zip(found, expected, strict=True):
            assert_same_bits(got.contiguous(), want.contiguous(), "loaded", any_nan=True)


@pytest.mark.parametrize(("axes", "kind"), pairwise(AXES, (INT8, Kind(torch.float16))), ids=str)
def test_copies_of_runs_have_the_bytes_of_the_reference(axes: str, kind: Kind) -> None:
    source = make_pool(axes, kind, heads=3, head_dim=64, **SIZES)
    fill(source, 2)
    pools = twins("B H S D", kind, heads=3, head_dim=64, blocks=2, block_size=480)
    slots = slots_of(700, source.num_slots)
    to = torch.cat((torch.arange(100, 500), torch.arange(900, 600, -1)))
    for pool, backend in zip(pools, ("auto", "reference"), strict=True):
        ops.copy(source.view(), slots, pool.view(), to, backend=backend)
    assert_twins(*pools)
    assert as_integers(pools[0].raw["key"]).unique().numel() > 1
