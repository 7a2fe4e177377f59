"""The compiled backend does to every byte what the reference does."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ops.pools import ALL_AXES, Kind, as_integers, make_pool, new_tokens
from ops.twins import SPECIAL, assert_refuses_as_the_reference, assert_twins, twins
from oracles.bits import FLOATS, assert_same_bits, generator, poison
from oracles.pairs import a_few_each, pairwise
from torch import Tensor

from kvloom import KVSpec, KVView, QuantSpec, ops
from kvloom.core.entries import OF_BITS
from kvloom.ops import schemas
from kvloom.ops.impl import cpu

pytestmark = pytest.mark.skipif(cpu.ISA is None, reason=f"no compiled backend: {cpu.WHY_NOT}")

KINDS = [
    *map(Kind, (*FLOATS, torch.int8, torch.int64, torch.float8_e5m2)),
    *(Kind(torch.int8, 8, 4, dtype) for dtype in FLOATS),
    *(Kind(torch.uint8, 4, 2, dtype, full) for dtype in FLOATS for full in (False, True)),
    *(Kind(torch.bits2x4, 2, 4, dtype, full) for dtype in FLOATS for full in (False, True)),
]

QUANTS = {"8": (8, False), "4": (4, False), "4-full": (4, True), "2": (2, False), "2-full": (2, True)}
OF_QUANT = pytest.mark.parametrize(("bits", "full_range"), QUANTS.values(), ids=QUANTS)


def guarded(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Poison, and a part of it of this shape with 64 elements on either side; the same at each call."""
    numbers = torch.Size(shape).numel()
    base = poison((numbers + 128,), dtype, generator(7))
    return base, base[64:-64].view(shape)


def quantize_both(x: Tensor, quant: QuantSpec) -> None:
    """Store ``x``, ``[T, H, D]``, by both backends: the same codes, scales and values, bit for bit."""
    spec = KVSpec(1, x.shape[1], x.shape[2], layout="B S H D", quant=quant)
    slots = torch.arange(x.shape[0])
    shapes = spec.shapes(x.shape[0], 1)
    stored = {}
    for backend in ("cpu", "reference"):
        (all_codes, cache), (all_scales, scale) = map(guarded, shapes, (spec.cache_dtype, quant.scale_dtype))
        view = KVView.split(spec.axes, cache, None, scale)
        ops.store(x, None, slots, view, full_range=quant.full_range, backend=backend)
        stored[backend] = (all_codes, all_scales, view)
    assert_same_bits(stored["cpu"][0], stored["reference"][0], "codes")
    assert_same_bits(as_integers(stored["cpu"][1]), as_integers(stored["reference"][1]), "scales")
    for dtype in FLOATS:
        got, want = (
            ops.load(slots, stored["cpu"][2], dtype=dtype, backend=b)[0] for b in ("cpu", "reference")
        )
        assert_same_bits(got, want, "values", any_nan=True)


# --- numbers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("quant", "width", "dtype", "scale_dtype"),
    pairwise([*QUANTS], [24, 33, 80, 128, 256], FLOATS, FLOATS),
    ids=str,
)
def test_codes_of_every_group(quant: str, width: int, dtype: torch.dtype, scale_dtype: torch.dtype) -> None:
    bits, full_range = QUANTS[quant]
    rng = generator(width)
    x = torch.randn(5, 3, width, generator=rng) * 10.0 ** (torch.rand(5, 3, 1, generator=rng) * 12 - 7)
    x[0, 0] = 0.0
    for group in (g for g in range(1, width + 1) if width % g == 0 and g * bits % 8 == 0):
        quantize_both(x.to(dtype), QuantSpec(bits, group, scale_dtype, full_range=full_range))


@pytest.mark.parametrize("scale_dtype", FLOATS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@OF_QUANT
def test_every_16_bit_pattern_as_the_largest_of_its_group(
    bits: int, full_range: bool, dtype: torch.dtype, scale_dtype: torch.dtype
) -> None:
    pattern = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)
    parts = torch.linspace(-1, 1, 16).to(torch.float32)
    x = (pattern.float().unsqueeze(1) * parts).to(dtype)
    x[:, 3] = pattern
    for group in (8, 16):
        quantize_both(x.view(1 << 12, 16, 16), QuantSpec(bits, group, scale_dtype, full_range=full_range))


@OF_QUANT
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_number_beside_every_largest_of_a_binade(
    dtype: torch.dtype, bits: int, full_range: bool
) -> None:
    """All mantissas that meet in a quotient, so that none may differ from a division's."""
    mantissas = round(1 / torch.finfo(dtype).eps)
    largest = torch.ones((), dtype=dtype).view(torch.int16).int() + torch.arange(mantissas)
    below = torch.arange((bits + 1) * mantissas)  # down to what rounds to 0
    x = (largest[:, None] - below).to(torch.int16).view(dtype) * torch.where(below % 3 == 0, -1, 1).to(dtype)
    spec = KVSpec(1, 1, len(below), layout="B S H D", quant=QuantSpec(bits, len(below), torch.float32))
    got, want = (spec.empty(mantissas, 1) for _ in range(2))
    for (cache, scale), backend in ((got, "cpu"), (want, "reference")):
        view = KVView.split(spec.axes, cache, None, scale)
        slots = torch.arange(mantissas)
        ops.store(x.unsqueeze(1), None, slots, view, full_range=full_range, backend=backend)
    assert_same_bits(got[0], want[0], "codes")
    assert_same_bits(got[1], want[1], "scales")


@OF_QUANT
@pytest.mark.parametrize("dtype", FLOATS)
def test_special_values_beside_each_other(dtype: torch.dtype, bits: int, full_range: bool) -> None:
    pairs = torch.tensor(list(itertools.product(SPECIAL, SPECIAL)))
    x = torch.cat((pairs, pairs.new_full((len(pairs), 6), 1e-3)), dim=1).to(dtype)
    for group, scale_dtype in itertools.product((2, 4, 8) if bits > 2 else (4, 8), FLOATS):
        quantize_both(x.unsqueeze(1), QuantSpec(bits, group, scale_dtype, full_range=full_range))


@OF_QUANT
@pytest.mark.parametrize("dtype", FLOATS)
def test_codes_beside_a_nan_of_any_bits_are_0(dtype: torch.dtype, bits: int, full_range: bool) -> None:
    wide = torch.finfo(dtype).bits
    nan = torch.tensor(float("nan"), dtype=dtype).view(torch.int32 if wide == 32 else torch.int16)
    x = torch.randn(256, 1, 32, generator=generator(5)).to(dtype)
    x[:, 0, 3] = (nan | torch.arange(256).to(nan.dtype) % 128).view(dtype)
    x[::2, 0, 3] *= -1
    for group in (8, 32):
        quantize_both(x, QuantSpec(bits, group, torch.float32, full_range=full_range))


@pytest.mark.parametrize("dtype", FLOATS)
def test_of_two_largest_the_positive_one_decides_wherever_they_are(dtype: torch.dtype) -> None:
    """Registers, lanes and halves of a lane: every pair of places in a group."""
    for group in (2, 8, 24, 32, 64, 128):
        first, second = torch.triu_indices(group, group, 1)
        x = torch.randn(len(first), 1, group, generator=generator(group)).clamp(-0.9, 0.9)
        rows = torch.arange(len(first))
        x[rows, 0, first], x[rows, 0, second] = 1.0, -1.0
        x[::2] *= -1
        quantize_both(x.to(dtype), QuantSpec(4, group, dtype, full_range=True))


@pytest.mark.parametrize("scale_dtype", FLOATS)
@pytest.mark.parametrize("bits", OF_BITS)
@pytest.mark.parametrize("group", [4, 8, 24])
def test_any_scale_and_code_is_read_alike(bits: int, scale_dtype: torch.dtype, group: int) -> None:
    heads, width = 256, 24
    spec = KVSpec(1, heads, width, layout="B S H D", quant=QuantSpec(bits, group, scale_dtype))
    cache, _ = spec.empty(64, 1)
    cache.view(torch.int8).random_(-128, 128, generator=generator(1))
    scale = poison((64, 1, heads, width // group), scale_dtype, generator(2))
    scale.flatten()[: len(SPECIAL)] = torch.tensor(SPECIAL).to(scale_dtype)
    view = KVView.split(spec.axes, cache, None, scale)
    for dtype in FLOATS:
        got, want = (
            ops.load(torch.arange(64), view, dtype=dtype, backend=b)[0] for b in ("cpu", "reference")
        )
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
    got, want = torch.zeros(2, 64, 1, 16, 64, dtype=cache)
    for target, backend in ((got, "cpu"), (want, "reference")):
        spec = KVSpec(1, 16, 64, cache, "B S H D")
        ops.store(x, None, torch.arange(64), KVView.split(spec.axes, target, None), backend=backend)
    assert_same_bits(got, want, "cache", any_nan=dtype != cache)


@pytest.mark.parametrize("cache", FLOATS[1:], ids=str)
def test_casts_round_ties_to_even(cache: torch.dtype) -> None:
    """What lies in the middle between a number of 16 bits and the next, of every one."""
    assert cache.itemsize == 2
    lower = torch.arange(-(1 << 15), (1 << 15) - 1).to(torch.int16)
    x = sum(each.view(cache).double() for each in (lower, lower + 1)).div(2).float()
    x = torch.nn.functional.pad(x, (0, 1)).view(64, 16, 64)
    got, want = torch.zeros(2, 64, 1, 16, 64, dtype=cache)
    for target, backend in ((got, "cpu"), (want, "reference")):
        spec = KVSpec(1, 16, 64, cache, "B S H D")
        ops.store(x, None, torch.arange(64), KVView.split(spec.axes, target, None), backend=backend)
    assert_same_bits(got, want, "cache", any_nan=True)


# --- places -------------------------------------------------------------------------------------------------


# Layouts say where, kinds how: with each layout a kind of each number of bits.
@pytest.mark.parametrize(("axes", "kind"), a_few_each(ALL_AXES, KINDS, 6), ids=str)
def test_layouts_are_written_read_and_copied_alike(axes: str, kind: Kind) -> None:
    ours, theirs = twins(axes, kind, heads=3, head_dim=16, value_dim=16 if "2" in axes.split() else 32)
    dtype = torch.bfloat16 if kind.bits or kind.dtype in FLOATS else kind.dtype
    key, value = (new_tokens(6, ours, dtype, i, part) for i, part in enumerate(("key", "value")))
    slots = torch.tensor([9, -1, 0, 4, 5, 11], dtype=torch.int32)
    between = torch.tensor([4, 9, 0]), torch.tensor([0, 2, 9])
    for pool, backend in ((ours, "cpu"), (theirs, "reference")):
        ops.store(key, value, slots, pool.view(), full_range=kind.full_range, backend=backend)
        ops.copy(pool.view(), between[0], pool.view(), between[1], backend=backend)
    assert_twins(ours, theirs, any_nan=dtype != kind.dtype)
    everything = torch.arange(12)
    out = dtype if kind.bits else kind.dtype
    for repeat in (1, 3):
        loaded = [
            ops.load(everything, ours.view(), dtype=out, num_repeat=repeat, backend=b)
            for b in ("cpu", "reference")
        ]
        for got, want in zip(*loaded, strict=True):
            if kind.bits:
                assert_same_bits(got, want, "loaded", any_nan=True)
            else:
                assert_same_bits(as_integers(got), as_integers(want), "loaded")


@pytest.mark.parametrize("order", [(0, 1, 3, 2), (0, 2, 1, 3), (3, 2, 1, 0)])
def test_scales_may_lie_in_another_order_than_their_codes(order: tuple[int, ...]) -> None:
    x = torch.randn(12, 3, 32, generator=generator(6)).bfloat16()
    back = [order.index(i) for i in range(4)]
    spec = KVSpec(1, 3, 32, layout="B S H D", quant=QuantSpec(8, 8))
    stored = {}
    for backend in ("cpu", "reference"):
        cache, contiguous = spec.empty(12, 4)
        assert contiguous is not None
        scale = contiguous.permute(order).contiguous().permute(back)
        view = KVView.split(spec.axes, cache, None, scale)
        ops.store(x, None, torch.arange(12), view, backend=backend)
        loaded = ops.load(torch.arange(12), view, dtype=torch.float32, backend=backend)[0]
        stored[backend] = (cache, scale, loaded)
    for got, want, what in zip(*stored.values(), ("codes", "scales", "values"), strict=True):
        assert_same_bits(got, want, what)


LARGE_AXES = ["B S H D", "B H S D", "B (H D/16) S D%16", "T H D", "B H S/2 D S%2"]
LARGE_KINDS = [
    Kind(torch.float32),
    Kind(torch.bfloat16),
    Kind(torch.int8, 8, 64),
    Kind(torch.uint8, 4, 8, full_range=True),
    Kind(torch.bits2x4, 2, 16, full_range=True),
]


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
    other = make_pool(other_axes, kind, seed=5, **sizes)
    mine = make_pool(other.axes, kind, seed=5, **sizes)
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
    for pool, target, backend in ((ours, mine, "cpu"), (theirs, other, "reference")):
        ops.store(key, value, slots, pool.view(), full_range=kind.full_range, backend=backend)
        kept = slots[slots >= 0]
        ops.copy(pool.view(), kept, target.view(), kept.flip(0), backend=backend)
    assert_twins(ours, theirs, any_nan=dtype != kind.dtype)
    assert_twins(mine, other, any_nan=dtype != kind.dtype)


@pytest.mark.parametrize(
    ("axes", "kind"),
    [(axes, LARGE_KINDS[(i + j) % 5]) for i, axes in enumerate(LARGE_AXES) for j in (0, 1)],
    ids=str,
)
def test_many_tokens_by_several_threads_and_past_the_caches(axes: str, kind: Kind) -> None:
    torch.set_num_threads(2)
    ours, theirs = twins(axes, kind, heads=8, head_dim=64, blocks=256, block_size=16)
    x = torch.randn(4000, 8, 64, generator=generator(0)).bfloat16()
    slots = torch.randperm(4096, generator=generator(1))[:4000]
    for pool, backend in ((ours, "cpu"), (theirs, "reference")):
        ops.store(x, x, slots, pool.view(), full_range=kind.full_range, backend=backend)
        ops.copy(pool.view(), slots, pool.view(), slots.roll(1), backend=backend)
    assert_twins(ours, theirs)
    loaded = [ops.load(slots, ours.view(), dtype=torch.float32, backend=b)[0] for b in ("cpu", "reference")]
    assert_same_bits(*loaded, "loaded")


def test_streamed_lines_of_a_pool_that_is_not_aligned() -> None:
    spec = KVSpec(1, 8, 64, torch.float32, "B S H D")
    x = torch.randn(2048, 8, 64, generator=generator(0))
    for shift in (0, 1, 16):
        memory = torch.zeros(2048 * 512 + 64)
        cache = memory[shift : shift + 2048 * 512].view(128, 16, 8, 64)
        ops.store(x, None, torch.arange(2048), KVView.split(spec.axes, cache, None), backend="cpu")
        assert torch.equal(cache.view(2048, 8, 64), x)
        assert not memory[:shift].any()
        assert not memory[shift + 2048 * 512 :].any()


@pytest.mark.parametrize("index", [torch.int64, torch.int32])
def test_refusals_read_as_the_references_do(index: torch.dtype) -> None:
    assert_refuses_as_the_reference("cpu", index)


def test_the_bare_operators_stay_within_tensors_that_do_not_fit() -> None:
    cache, small = torch.zeros(2, 1, 4, 2, 1, 8), torch.zeros(1, 1, 4, 2, 1, 8)
    scale, slots, x = torch.zeros(2, 1, 4, 2, 1, 3), torch.tensor([7]), torch.zeros(1, 2, 8)
    codes = cache.to(torch.int8)
    calls = [
        lambda: schemas.store(x[:, :1], None, slots, cache, None, None, None),
        lambda: schemas.store(x, x[:0], slots, cache, cache, None, None),
        lambda: schemas.store(x, x, slots, cache, small, None, None),
        lambda: schemas.store(x, None, slots.repeat(2), cache, None, None, None),
        lambda: schemas.store(x.double(), None, slots, cache, None, None, None),
        lambda: schemas.store(x[0], None, slots, cache, None, None, None),
        lambda: schemas.store(x, None, slots, codes, None, scale, None),
        lambda: schemas.load(slots, cache, small, None, None, torch.float32, 1),
        lambda: schemas.load(slots, codes, None, None, None, torch.float32, 1),
        lambda: schemas.copy([cache, cache], slots, [cache, small], slots),
        lambda: schemas.copy([cache], slots, [codes], slots),
    ]
    for call in calls:
        with pytest.raises(IndexError, match=r"ArgumentError: .* must"):
            call()
