"""Triton's store, load and copy do to every byte what the reference does."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from campaign import times
from hypothesis import given, settings
from hypothesis import strategies as st
from ops import kernels
from ops.kernels import there
from ops.pools import ALL_AXES, Kind, as_integers, make_pool, new_tokens
from ops.twins import SPECIAL, assert_refuses_as_the_reference, assert_twins, twins
from oracles.bits import FLOATS, assert_same_bits, generator, poison
from oracles.pairs import in_turn, pairwise
from torch import Tensor

from kvloom import KVSpec, KVView, QuantSpec, ops
from kvloom.core.entries import OF_BITS
from kvloom.ops.impl.triton.configs import Tile, tuned

pytestmark = kernels.pytestmark

KINDS = [
    *map(Kind, (torch.float32, torch.bfloat16, torch.int64, torch.float8_e5m2)),
    Kind(torch.int8, 8, 4, torch.float16),
    Kind(torch.uint8, 4, 2, torch.bfloat16),
    Kind(torch.uint8, 4, 2, torch.bfloat16, full_range=True),
    Kind(torch.bits2x4, 2, 4, torch.float16),
    Kind(torch.bits2x4, 2, 4, torch.float16, full_range=True),
]

QUANTS = [(8, False), (4, False), (4, True), (2, False), (2, True)]
"""Bits of codes, and whether they have the lowest number, too."""
OF_QUANT = pytest.mark.parametrize(("bits", "full_range"), QUANTS, ids=["8", "4", "4-full", "2", "2-full"])


LARGE = 1 << 14
"""Numbers of a tile for as many, or more, of which the interpreter then runs few programs."""


def store(
    backend: str, key: Tensor, value: Tensor | None, slots: Tensor, kv: KVView, full_range: bool = False
) -> None:
    if backend == "reference":
        ops.store(key, value, slots, kv, full_range=full_range, backend=backend)
        return
    with there(key, value, slots, kv) as moved:
        ops.store(*moved, full_range=full_range, backend=backend)


def load(backend: str, slots: Tensor, kv: KVView, **how: Any) -> tuple[Tensor, ...]:
    if backend == "reference":
        return ops.load(slots, kv, backend=backend, **how)
    with there(slots, kv) as moved:
        return tuple(x.cpu() for x in ops.load(*moved, backend=backend, **how))


def copy(backend: str, source: KVView, source_slots: Tensor, target: KVView, target_slots: Tensor) -> None:
    with there(source, source_slots, target, target_slots) as moved:
        ops.copy(*moved, backend=backend)


def quantize_both(x: Tensor, quant: QuantSpec) -> None:
    """Store ``x``, ``[T, H, D]``, by both backends: the same codes, scales and values, bit for bit."""
    large = tuned({}, Tile(LARGE, 2)) if kernels.INTERPRETED and x.numel() >= LARGE else nullcontext()
    with large:
        quantize_in_tiles(x, quant)


def quantize_in_tiles(x: Tensor, quant: QuantSpec) -> None:
    spec = KVSpec(1, x.shape[1], x.shape[2], layout="B S H D", quant=quant)
    slots = torch.arange(x.shape[0])
    stored = {}
    for backend in ("triton", "reference"):
        cache, scale = spec.empty(x.shape[0], 1)
        assert scale is not None
        view = KVView.split(spec.axes, cache, None, scale)
        store(backend, x, None, slots, view, quant.full_range)
        stored[backend] = (cache, scale, view)
    assert_same_bits(stored["triton"][0], stored["reference"][0], "codes")
    assert_same_bits(as_integers(stored["triton"][1]), as_integers(stored["reference"][1]), "scales")
    got, want = (load(b, slots, stored["triton"][2], dtype=x.dtype)[0] for b in ("triton", "reference"))
    assert_same_bits(got, want, "values", any_nan=True)


# --- numbers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("quant", "width", "dtype", "scale_dtype"), pairwise(QUANTS, [24, 33, 128], FLOATS, FLOATS), ids=str
)
def test_codes_of_every_group(
    quant: tuple[int, bool], width: int, dtype: torch.dtype, scale_dtype: torch.dtype
) -> None:
    bits, full_range = quant
    rng = generator(width)
    x = torch.randn(5, 4, width, generator=rng) * 10.0 ** (torch.rand(5, 4, 1, generator=rng) * 12 - 7)
    x[0, 0] = 0.0
    for group in (g for g in range(1, width + 1) if width % g == 0 and g * bits % 8 == 0):
        quantize_both(x.to(dtype), QuantSpec(bits, group, scale_dtype, full_range=full_range))


@pytest.mark.parametrize(
    ("quant", "dtype", "scale_dtype"),
    [
        (quant, *dtypes)
        for dtypes, quant in in_turn([*itertools.product([torch.float16, torch.bfloat16], FLOATS)], QUANTS)
    ],
    ids=str,
)
def test_every_16_bit_pattern_as_the_largest_of_its_group(
    quant: tuple[int, bool], dtype: torch.dtype, scale_dtype: torch.dtype
) -> None:
    bits, full_range = quant
    pattern = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)
    parts = torch.linspace(-1, 1, 8).to(torch.float32)
    x = (pattern.float().unsqueeze(1) * parts).to(dtype)
    x[:, 3] = pattern
    quantize_both(x.view(1 << 12, 16, 8), QuantSpec(bits, 8, scale_dtype, full_range=full_range))


@OF_QUANT
@pytest.mark.parametrize("dtype", FLOATS)
def test_special_values_beside_each_other(dtype: torch.dtype, bits: int, full_range: bool) -> None:
    pairs = torch.tensor(list(itertools.product(SPECIAL, SPECIAL)))
    x = torch.cat((pairs, pairs.new_full((len(pairs), 6), 1e-3)), dim=1).to(dtype)
    for group, scale_dtype in itertools.product((2, 4, 8) if bits > 2 else (4, 8), FLOATS):
        quantize_both(x.unsqueeze(1), QuantSpec(bits, group, scale_dtype, full_range=full_range))


@pytest.mark.parametrize(("bits", "qmax", "full_range"), [(8, 127, False), (4, 7, False), (4, 8, True)])
def test_ties_are_divided_and_go_to_even(bits: int, qmax: int, full_range: bool) -> None:
    """``(k + 1/2) * scale`` over ``scale``, which no reciprocal gets right for every scale."""
    scale = torch.arange(3, 1003, 2).float().view(-1, 1, 1)
    ties = (torch.arange(qmax) + 0.5) * scale
    x = torch.cat((scale * qmax, ties, -ties, -scale), dim=-1)
    quantize_both(x, QuantSpec(bits, x.shape[-1], torch.float32, full_range=full_range))


@pytest.mark.parametrize("scale_dtype", FLOATS)
@pytest.mark.parametrize("bits", OF_BITS)
@pytest.mark.parametrize("group", [4, 24])
def test_any_scale_and_code_is_read_alike(bits: int, scale_dtype: torch.dtype, group: int) -> None:
    heads, width = 64, 24
    spec = KVSpec(1, heads, width, layout="B S H D", quant=QuantSpec(bits, group, scale_dtype))
    cache, _ = spec.empty(64, 1)
    cache.view(torch.int8).random_(-128, 128, generator=generator(1))
    scale = poison((64, 1, heads, width // group), scale_dtype, generator(2))
    scale.flatten()[: len(SPECIAL)] = torch.tensor(SPECIAL).to(scale_dtype)
    view = KVView.split(spec.axes, cache, None, scale)
    for dtype in FLOATS:
        got, want = (load(b, torch.arange(64), view, dtype=dtype)[0] for b in ("triton", "reference"))
        assert_same_bits(got, want, "values", any_nan=True)


@pytest.mark.parametrize("cache", FLOATS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_casts_round_alike(dtype: torch.dtype, cache: torch.dtype) -> None:
    width = torch.finfo(dtype).bits
    bits = torch.randint(-(1 << (width - 1)), 1 << (width - 1), (1 << 16,), generator=generator(3))
    if width == 16:
        bits = torch.arange(-(1 << 15), 1 << 15)
    x = bits.to(torch.int32 if width == 32 else torch.int16).view(dtype)
    x[: len(SPECIAL)] = torch.tensor(SPECIAL).to(dtype)
    x = x.view(64, 16, 64)
    stored = torch.zeros(2, 64, 1, 16, 64, dtype=cache)
    for target, backend in zip(stored, ("triton", "reference"), strict=True):
        spec = KVSpec(1, 16, 64, cache, "B S H D")
        store(backend, x, None, torch.arange(64), KVView.split(spec.axes, target, None))
    assert_same_bits(stored[0], stored[1], "cache", any_nan=dtype != cache)


# --- places -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("axes", "kind"), in_turn(ALL_AXES, KINDS), ids=str)
def test_layouts_are_written_read_and_copied_alike(axes: str, kind: Kind) -> None:
    ours, theirs = twins(axes, kind, heads=3, head_dim=16, value_dim=16 if "2" in axes.split() else 32)
    dtype = torch.bfloat16 if kind.bits or kind.dtype in FLOATS else kind.dtype
    key, value = (new_tokens(6, ours, dtype, i, part) for i, part in enumerate(("key", "value")))
    slots = torch.tensor([9, -1, 0, 4, 5, 11], dtype=torch.int32)
    between = torch.tensor([4, 9, 0]), torch.tensor([0, 2, 9])
    for pool, backend in ((ours, "triton"), (theirs, "reference")):
        store(backend, key, value, slots, pool.view(), kind.full_range)
        copy(backend, pool.view(), between[0], pool.view(), between[1])
    assert_twins(ours, theirs, any_nan=dtype != kind.dtype)
    everything = torch.arange(12)
    out = dtype if kind.bits else kind.dtype
    for repeat in (1, 3):
        loaded = [
            load(b, everything, ours.view(), dtype=out, num_repeat=repeat) for b in ("triton", "reference")
        ]
        for got, want in zip(*loaded, strict=True):
            if kind.bits:
                assert_same_bits(got, want, "loaded", any_nan=True)
            else:
                assert_same_bits(as_integers(got), as_integers(want), "loaded")


@settings(max_examples=times(30))
@given(st.data())
def test_any_call_is_done_alike(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(KINDS), label="kind")
    unit = max(kind.group, 4) if kind.bits else 4  # what layouts split D by, counted in codes
    unit *= 8 // (kind.bits or 8)
    sizes = {
        "heads": data.draw(st.integers(1, 4), label="heads"),
        "head_dim": unit * data.draw(st.integers(1, 9), label="width"),
        "blocks": 3 * data.draw(st.integers(1, 3), label="blocks"),
        "block_size": 2 * data.draw(st.integers(1, 6), label="block size"),
    }
    axes, other_axes = (data.draw(st.sampled_from(ALL_AXES), label="axes") for _ in range(2))
    if "2" not in axes.split() + other_axes.split():
        sizes["value_dim"] = unit * data.draw(st.integers(1, 9), label="value width")
    ours, theirs = twins(axes, kind, **sizes)
    mine, other = (make_pool(other_axes, kind, seed=5, **sizes) for _ in range(2))
    floats = kind.bits or kind.dtype in FLOATS
    dtype = data.draw(st.sampled_from(FLOATS), label="dtype") if floats else kind.dtype
    slots = data.draw(
        st.lists(st.integers(-3, ours.num_slots - 1), max_size=20, unique=True).map(torch.tensor),
        label="slots",
    ).long()
    order = data.draw(st.sampled_from([(0, 1, 2), (1, 0, 2), (2, 1, 0), (1, 2, 0)]), label="order in memory")
    back = [order.index(i) for i in range(3)]
    key, value = (
        new_tokens(len(slots), ours, dtype, i, part).permute(order).contiguous().permute(back)
        for i, part in enumerate(("key", "value"))
    )
    for pool, target, backend in ((ours, mine, "triton"), (theirs, other, "reference")):
        store(backend, key, value, slots, pool.view(), kind.full_range)
        kept = slots[slots >= 0]
        copy(backend, pool.view(), kept, target.view(), kept.flip(0))
    assert_twins(ours, theirs, any_nan=dtype != kind.dtype)
    assert_twins(mine, other, any_nan=dtype != kind.dtype)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_cache_of_keys_only(kind: Kind) -> None:
    ours, theirs = twins("B S H D", kind)
    key = new_tokens(3, ours, torch.bfloat16 if kind.bits else kind.dtype, 1)
    loaded = []
    for pool, backend in ((ours, "triton"), (theirs, "reference")):
        kv = pool.view()
        view = KVView(kv.key, None)
        store(backend, key, None, torch.tensor([3, 0, -7]), view)
        copy(backend, view, torch.tensor([0, 3]), view, torch.tensor([3, 0]))
        loaded.append(load(backend, torch.tensor([3, 0]), view))
    assert_twins(ours, theirs)
    assert loaded[0][1].shape == loaded[1][1].shape == (2, 2, 0)
    assert_same_bits(as_integers(loaded[0][0]), as_integers(loaded[1][0]), "key")


def test_slots_may_be_strided_and_none() -> None:
    ours, theirs = twins("2 B S H D", Kind(torch.float32))
    x = new_tokens(3, ours, torch.float32, 1)
    slots = torch.tensor([7, -1, 2, 99, 4, 99])[::2]
    for pool, backend in ((ours, "triton"), (theirs, "reference")):
        store(backend, x, x, slots, pool.view())
        store(backend, x[:0], x[:0], slots[:0], pool.view())
        assert load(backend, slots[:0], pool.view())[0].shape == (0, 2, 8)
    assert_twins(ours, theirs)


@pytest.mark.skipif(kernels.DEVICE != "cpu", reason="values are not read on a device")
@pytest.mark.parametrize("index", [torch.int64, torch.int32])
def test_refusals_read_as_the_references_do(index: torch.dtype) -> None:
    assert_refuses_as_the_reference("triton", index)
