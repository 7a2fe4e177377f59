"""Store, load and copy move bits: to the right place, and to no other."""

from __future__ import annotations

import pytest
import torch
from ops.pools import ALL_AXES, FULL4, INT4, INT8, PLAIN, Kind, Pool, as_integers, make_pool, new_tokens
from oracles.bits import FLOATS, assert_same_bits, generator, poison
from oracles.pairs import pairwise

from kvloom import KVView, ops
from kvloom.errors import ArgumentError, ShapeError

KINDS = [PLAIN, Kind(torch.float16), INT8, INT4, FULL4]
ANY_DTYPE = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.uint8,
        torch.uint16,
        torch.uint32,
        torch.uint64,
    ),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
    torch.float8_e8m0fnu,
]
AXES_SAMPLE = ["L 2 T H D", "B 2 H S D", "B H S/2 D S%2", "B (H D/4) S D%4"]


def store(
    pool: Pool, slots: list[int], dtype: torch.dtype, seed: int = 1, index: torch.dtype = torch.int64
) -> None:
    """Store new tokens and remember what they are."""
    key, value = (
        new_tokens(len(slots), pool, dtype, seed + i, part) for i, part in enumerate(("key", "value"))
    )
    ops.store(key, value, torch.tensor(slots, dtype=index), pool.view(), full_range=pool.kind.full_range)
    for token, slot in enumerate(slots):
        if slot >= 0:
            pool.remember("key", slot, key[token])
            pool.remember("value", slot, value[token])


def assert_loads(pool: Pool, slots: list[int], dtype: torch.dtype, index: torch.dtype = torch.int64) -> None:
    """A load gives what was remembered."""
    loaded = ops.load(torch.tensor(slots, dtype=index), pool.view(), dtype=dtype)
    for part, got in zip(("key", "value"), loaded, strict=True):
        want = torch.stack([pool.recall(part, slot, dtype) for slot in slots])
        if got.dtype in (torch.float32, torch.float16, torch.bfloat16) and pool.kind.dtype != dtype:
            assert_same_bits(got, want, part, any_nan=True)
        else:
            assert_same_bits(as_integers(got), as_integers(want), part)


# --- store and load -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("axes", "kind", "strided"), pairwise(ALL_AXES, KINDS, [False, True]), ids=str)
def test_store_writes_its_slots_and_no_other_byte(axes: str, kind: Kind, strided: bool) -> None:
    pool = make_pool(axes, kind, strided=strided)
    pool.check()
    store(pool, [7, -1, 0, 11, -5], kind.dtype if not kind.bits else torch.float32)
    pool.check()
    store(pool, [3, 7, -1], kind.dtype if not kind.bits else torch.bfloat16, seed=3)
    pool.check()


@pytest.mark.parametrize("axes", ALL_AXES)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_load_reads_what_was_stored_in_any_order(axes: str, kind: Kind) -> None:
    pool = make_pool(axes, kind, strided=True)
    store(pool, [7, 0, 11, 2], kind.dtype if not kind.bits else torch.float32)
    for dtype in FLOATS:
        assert_loads(pool, [11, 7, 7, 2, 0, 11], dtype)
    pool.check()


@pytest.mark.parametrize("dtype", ANY_DTYPE, ids=str)
@pytest.mark.parametrize("axes", AXES_SAMPLE)
def test_every_dtype_is_moved_bit_for_bit(dtype: torch.dtype, axes: str) -> None:
    pool = make_pool(axes, Kind(dtype), strided=True)
    store(pool, [5, -1, 9, 0], dtype)
    assert_loads(pool, [0, 9, 5, 9], dtype)
    ops.copy(pool.view(), torch.tensor([5, 0]), pool.view(), torch.tensor([4, 11]))
    for part in pool.parts():
        pool.rows[part, 4], pool.rows[part, 11] = pool.rows[part, 5], pool.rows[part, 0]
    pool.check()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("axes", AXES_SAMPLE)
def test_nan_payloads_and_negative_zero_keep_their_bits(dtype: torch.dtype, axes: str) -> None:
    width = torch.finfo(dtype).bits
    exponent = {torch.float32: 0x7F800000, torch.float16: 0x7C00, torch.bfloat16: 0x7F80}[dtype]
    signs = (0, -(1 << (width - 1)))
    patterns = [
        s | e
        for s in signs
        for e in (0, 1, exponent, exponent | 1, exponent | 0x55, exponent | (exponent >> 1))
    ]
    integer = torch.int32 if width == 32 else torch.int16
    special = torch.tensor(patterns[:8] + patterns[4:12], dtype=integer).view(dtype).view(1, 2, 8)
    pool = make_pool(axes, Kind(dtype))
    ops.store(special, special.flip(1), torch.tensor([6]), pool.view())
    key, value = ops.load(torch.tensor([6]), pool.view())
    assert_same_bits(as_integers(key), as_integers(special), "key")
    assert_same_bits(as_integers(value), as_integers(special.flip(1)), "value")


@pytest.mark.parametrize("cache", FLOATS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_other_float_dtype_is_cast_in_and_out(cache: torch.dtype, dtype: torch.dtype) -> None:
    pool = make_pool("2 B H S D", Kind(cache))
    store(pool, [4, 0], dtype)
    pool.check()
    assert_loads(pool, [0, 4], dtype)


@pytest.mark.parametrize("index", [torch.int64, torch.int32])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_slots_may_be_int64_or_int32(index: torch.dtype, kind: Kind) -> None:
    pool, target = make_pool("L 2 H T D", kind), make_pool("B H D/4 S D%4", kind, seed=9)
    store(pool, [5, -1, 8], torch.float32, index=index)
    assert_loads(pool, [8, 5], torch.float32, index)
    ops.copy(
        pool.view(), torch.tensor([8, 5], dtype=index), target.view(), torch.tensor([1, 10], dtype=index)
    )
    pool.check()
    for part in pool.parts():
        target.rows[part, 1], target.rows[part, 10] = pool.rows[part, 8], pool.rows[part, 5]
    target.check()


@pytest.mark.parametrize("axes", AXES_SAMPLE)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_only_negative_slots_write_nothing(axes: str, kind: Kind) -> None:
    pool = make_pool(axes, kind)
    store(pool, [-1, -(2**62), -7], torch.float32)
    pool.check()


@pytest.mark.parametrize("axes", AXES_SAMPLE)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_no_tokens_change_nothing(axes: str, kind: Kind) -> None:
    pool = make_pool(axes, kind)
    none = torch.tensor([], dtype=torch.int64)
    store(pool, [], torch.float32)
    key, value = ops.load(none, pool.view(), dtype=torch.float32)
    ops.copy(pool.view(), none, pool.view(), none)
    assert key.shape == value.shape == (0, 2, 8)
    pool.check()


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_new_tokens_may_have_any_strides(kind: Kind) -> None:
    pool = make_pool("B 2 S H D", kind)
    heads_first = new_tokens(4, pool, torch.float32, 1).transpose(0, 1).contiguous().transpose(0, 1)
    expanded = new_tokens(1, pool, torch.float32, 2).expand(4, -1, -1)
    slots = torch.tensor([9, 3, 0, 4, 1, 2, 5])[::2]
    ops.store(heads_first, expanded, slots, pool.view(), full_range=kind.full_range)
    for token, slot in enumerate((9, 0, 1, 5)):
        pool.remember("key", slot, heads_first[token])
        pool.remember("value", slot, expanded[token])
    pool.check()


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("num_repeat", [1, 2, 3])
def test_loaded_heads_are_repeated_in_a_row(kind: Kind, num_repeat: int) -> None:
    pool = make_pool("L 2 T H D", kind)
    store(pool, [3, 8], torch.float32)
    loaded = ops.load(torch.tensor([8, 3]), pool.view(), dtype=torch.float32, num_repeat=num_repeat)
    for part, got in zip(("key", "value"), loaded, strict=True):
        assert got.shape == (2, 2 * num_repeat, 8)
        for head in range(2 * num_repeat):
            for token, slot in enumerate((8, 3)):
                want = pool.recall(part, slot, torch.float32)[head // num_repeat]
                assert_same_bits(got[token, head], want, part, any_nan=True)


@pytest.mark.parametrize("kind", [*KINDS, Kind(torch.int8)], ids=str)
def test_loaded_dtype_is_that_of_the_cache_or_of_its_scales(kind: Kind) -> None:
    key, value = ops.load(torch.tensor([1]), make_pool("B S H D", kind).view())
    assert key.dtype == value.dtype == (kind.scale_dtype if kind.bits else kind.dtype)


def test_loaded_tensors_are_new() -> None:
    pool = make_pool("B S H D", PLAIN)
    key, value = ops.load(torch.tensor([1, 2]), pool.view())
    key.fill_(0), value.fill_(0)
    pool.check()


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_keys_and_values_may_differ_in_width(kind: Kind) -> None:
    pool = make_pool("B H S D", kind, head_dim=8, value_dim=16)
    store(pool, [3, 0], torch.float32)
    pool.check()
    assert_loads(pool, [0, 3], torch.float32)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_cache_of_keys_only(kind: Kind) -> None:
    pool = make_pool("B H S D", kind)
    for name in ("value", "value_scale"):
        pool.raw.pop(name, None)
    key = new_tokens(2, pool, torch.float32, 1)
    ops.store(key, None, torch.tensor([6, 1]), pool.view(), full_range=kind.full_range)
    pool.remember("key", 6, key[0]), pool.remember("key", 1, key[1])
    loaded, none = ops.load(torch.tensor([1]), pool.view(), dtype=torch.float32, num_repeat=2)
    assert none.shape == (1, 4, 0)
    assert_same_bits(loaded[:, ::2], pool.recall("key", 1, torch.float32)[None], "key", any_nan=True)
    ops.copy(pool.view(), torch.tensor([1]), pool.view(), torch.tensor([2]))
    for part in ("key", "key_scale") if kind.bits else ("key",):
        pool.rows[part, 2] = pool.rows[part, 1]
    pool.check()


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_named_backends_give_the_same_bytes(backend: str) -> None:
    pool = make_pool("L 2 H T D", INT8)
    key, value = new_tokens(2, pool, torch.float16, 1), new_tokens(2, pool, torch.float16, 2)
    ops.store(key, value, torch.tensor([6, 1]), pool.view(), backend=backend)
    for token, slot in enumerate((6, 1)):
        pool.remember("key", slot, key[token]), pool.remember("value", slot, value[token])
    ops.copy(pool.view(), torch.tensor([1]), pool.view(), torch.tensor([0]), backend=backend)
    for part in pool.parts():
        pool.rows[part, 0] = pool.rows[part, 1]
    pool.check()
    loaded, _ = ops.load(torch.tensor([0]), pool.view(), dtype=torch.float16, backend=backend)
    assert_same_bits(loaded[0], pool.recall("key", 0, torch.float16), "key")


# --- copy ---------------------------------------------------------------------------------------------------


def fill(pool: Pool, slots: list[int]) -> None:
    """Put random codes, scales or values into ``slots``, past the library."""
    for number, part in enumerate(pool.parts()):
        name, offsets = pool.where(part)
        dtype = pool.kind.scale_dtype if part.endswith("scale") else pool.kind.dtype
        for slot in slots:
            row = poison((pool.sizes["H"], pool.width(part)), dtype, generator(100 * slot + number))
            as_integers(pool.bases[name]).flatten()[offsets[slot]] = as_integers(row)
            pool.rows[part, slot] = row


@pytest.mark.parametrize(
    ("source_axes", "target_axes", "kind"),
    pairwise(ALL_AXES, ["L 2 T H D", "B H S/2 D S%2", "2 B H S D", "B (H D/4) S D%4"], KINDS),
    ids=str,
)
def test_copy_to_another_layout_keeps_every_byte(source_axes: str, target_axes: str, kind: Kind) -> None:
    source = make_pool(source_axes, kind, seed=1, strided=True)
    target = make_pool(target_axes, kind, seed=2, blocks=5, block_size=2, strided=True)
    fill(source, [2, 5, 11])
    ops.copy(source.view(), torch.tensor([11, 2, 5, 2]), target.view(), torch.tensor([0, 9, 3, 4]))
    for part in source.parts():
        for slot, to in ((11, 0), (2, 9), (5, 3), (2, 4)):
            target.rows[part, to] = source.rows[part, slot]
    source.check()
    target.check()


@pytest.mark.parametrize(("shift", "axes", "kind"), pairwise([1, -1], ALL_AXES, KINDS), ids=str)
def test_overlapping_copy_reads_before_it_writes(axes: str, kind: Kind, shift: int) -> None:
    pool = make_pool(axes, kind)
    fill(pool, list(range(12)))
    before = dict(pool.rows)
    source = list(range(2, 9))
    ops.copy(pool.view(), torch.tensor(source), pool.view(), torch.tensor([s + shift for s in source]))
    for part in pool.parts():
        for slot in source:
            pool.rows[part, slot + shift] = before[part, slot]
    pool.check()


def test_copy_can_swap_slots() -> None:
    pool = make_pool("T L 2 H D", INT4)
    fill(pool, [3, 8])
    ops.copy(pool.view(), torch.tensor([3, 8]), pool.view(), torch.tensor([8, 3]))
    for part in pool.parts():
        pool.rows[part, 3], pool.rows[part, 8] = pool.rows[part, 8], pool.rows[part, 3]
    pool.check()


def test_copy_between_layers_of_one_tensor() -> None:
    pool = make_pool("L 2 T H D", PLAIN)
    other = make_pool("L 2 T H D", PLAIN)
    other.bases, other.raw, other.layer = pool.bases, pool.raw, 0
    fill(pool, [3, 4])
    ops.copy(pool.view(), torch.tensor([3, 4]), other.view(), torch.tensor([4, 3]))
    name, offsets = other.where("key")
    flat = as_integers(pool.bases[name]).flatten()
    assert torch.equal(flat[offsets[4]], as_integers(pool.rows["key", 3]))
    assert torch.equal(flat[offsets[3]], as_integers(pool.rows["key", 4]))


@pytest.mark.parametrize("axes", AXES_SAMPLE)
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_slots_of_rows_give_tensors_of_rows(backend: str, axes: str, kind: Kind) -> None:
    """``[B, N]`` slots, also of int32 and not contiguous, are loaded as ``[B, H, N, D]``."""
    pool = make_pool(axes, kind, strided=True)
    store(pool, [7, 0, 11, 2, 5, 3], kind.dtype if not kind.bits else torch.float32)
    slots = torch.tensor([[7, 2, 5], [0, 3, 7]], dtype=torch.int32).T
    for repeat in (1, 3):
        expected = ops.load(slots.flatten(), pool.view(), dtype=torch.float32, num_repeat=repeat)
        found = ops.load(slots, pool.view(), dtype=torch.float32, num_repeat=repeat, backend=backend)
        for x, y in zip(found, expected, strict=True):
            assert x.is_contiguous()
            y = y.unflatten(0, (3, 2)).transpose(1, 2).contiguous()
            assert_same_bits(x, y, "rows", any_nan=kind.dtype != torch.float32)  # casts may quiet a NaN
    pool.check()


@pytest.mark.parametrize("axes", AXES_SAMPLE)
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_rows_are_stored_as_their_tokens_are(backend: str, axes: str, kind: Kind) -> None:
    """``[B, H, N, D]`` with slots ``[B, N]``, also of int32 and not contiguous."""
    rows, packed = make_pool(axes, kind, strided=True), make_pool(axes, kind, strided=True)
    dtype = kind.dtype if not kind.bits else torch.float32
    key, value = (new_tokens(6, rows, dtype, 3 + i, part) for i, part in enumerate(("key", "value")))
    slots = torch.tensor([[7, -1, 5], [0, 3, 2]], dtype=torch.int32).T
    ops.store(key, value, slots.flatten(), packed.view(), backend=backend)
    a, b = (x.unflatten(0, (3, 2)).transpose(1, 2) for x in (key, value))
    ops.store(a, b, slots, rows.view(), backend=backend)
    for name, base in rows.bases.items():
        assert_same_bits(base, packed.bases[name], name)


@pytest.mark.parametrize(
    ("key", "value", "slots", "message"),
    [
        ((2, 2, 3, 8), (2, 2, 3, 8), (3, 2), "key must be .B, H, N, Dk. with B=3, N=2"),
        ((2, 2, 3, 8), (2, 2, 2, 8), (2, 3), "value must be .B, H, N, Dv. with B=2, H=2, N=3"),
        ((2, 2, 3, 8), (2, 2, 3, 8), (6,), "key must be .T, H, D. with"),
        ((6, 2, 8), (6, 2, 8), (2, 3), "slots must be .T., got"),
    ],
)
def test_rows_that_do_not_fit_are_not_stored(
    key: tuple[int, ...], value: tuple[int, ...], slots: tuple[int, ...], message: str
) -> None:
    pool = make_pool("B S H D", PLAIN)
    with pytest.raises(ShapeError, match=message):
        ops.store(torch.ones(key), torch.ones(value), torch.arange(6).view(slots), pool.view())
    pool.check()


def test_tokens_between_the_rows_of_a_cache_are_stored() -> None:
    """They share no byte with it, and lie between its first and its last."""
    base = torch.zeros(4, 2, 2, 8)  # slots, cache or tokens, heads, dim
    base[:, 1] = torch.arange(4.0)[:, None, None] + 1
    view = KVView.split("T H D", base[:, 0], torch.zeros(4, 2, 8))
    ops.store(base[:, 1], base[:, 1].clone(), torch.tensor([3, 2, 1, 0]), view)
    assert torch.equal(base[:, 0], base[:, 1].flip(0))
    with pytest.raises(ShapeError, match="key"):
        ops.store(base[:, 0], base[:, 1].clone(), torch.tensor([3, 2, 1, 0]), view)


@pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
def test_no_rows_or_no_tokens_give_empty_tensors(shape: tuple[int, int]) -> None:
    view = make_pool("B S H D", KINDS[0]).view()
    for x in ops.load(torch.zeros(shape, dtype=torch.int64), view):
        assert x.shape == (shape[0], view.num_heads, shape[1], 8)


def test_slots_of_rows_are_checked() -> None:
    view = make_pool("B S H D", KINDS[0]).view()
    with pytest.raises(ArgumentError, match="slots"):
        ops.load(torch.tensor([[0, 1], [2, view.num_slots]]), view)
    with pytest.raises(ShapeError, match="slots"):
        ops.load(torch.zeros(1, 2, 3, dtype=torch.int64), view)
    with pytest.raises(ShapeError, match="slots"):
        ops.load(torch.zeros(2, 3), view)
