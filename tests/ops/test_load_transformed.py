"""``ops.load`` of smoothed keys, and of rotated keys and values: the bits of the steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ops.cases import offset_of
from ops.pools import ALL_AXES, FULL4, INT2, INT4, INT8, Kind, Pool, make_pool
from ops.test_smoothing import HEADS, by_reference, keys, positions_of, smoothing_of
from oracles.bits import FLOATS, assert_same_bits, generator
from oracles.pairs import in_turn, pairwise
from torch import Tensor

from kvloom import KVView, ops
from kvloom.core.layouts import CacheLayout
from kvloom.errors import ArgumentError, KVError, ShapeError, UnsupportedError
from kvloom.ops import KeySmoothing, schemas
from kvloom.ops.smoothing import transform_arguments
from kvloom.quant import rotation
from kvloom.quant.rotation import block_of

compiled = pytest.mark.skipif(ops.cpu_kernels() is None, reason="there are no compiled kernels")
KINDS = (INT8, INT4, FULL4, INT2, Kind(torch.int8, 8, 8, torch.bfloat16), *map(Kind, FLOATS))
DIMS = (8, 24, 64, 128)  # of which the first two are no whole vectors somewhere


def filled(axes: str, kind: Kind, **sizes: int) -> Pool:
    """A pool in which every slot has keys and values."""
    pool = make_pool(axes, kind, heads=HEADS, **sizes)
    dtype = kind.dtype if kind.dtype.is_floating_point else torch.float32
    key, value = (keys(pool.num_slots, HEADS, sizes["head_dim"], dtype=dtype, seed=i) for i in (1, 2))
    ops.store(key, value, torch.arange(pool.num_slots), pool.view(), full_range=kind.full_range)
    return pool


def slots_of(shape: tuple[int, ...], num_slots: int) -> Tensor:
    """Runs of slots in any order; some come twice."""
    count = torch.Size(shape).numel()
    first = torch.randint(max(num_slots - 5, 1), (count // 5 + 1,), generator=generator(3))
    return (first.unsqueeze(1) + torch.arange(5)).clamp(max=num_slots - 1).flatten()[:count].view(shape)


def assert_bits_of_the_steps(
    pool: Pool, slots: Tensor, dtype: torch.dtype, smoothing: KeySmoothing | None, blocks: tuple[int, int]
) -> None:
    key, value = ops.load(slots, pool.view(), dtype=dtype)
    positions = positions_of(key)
    how: dict[str, Any] = {"smoothing": smoothing, "positions": positions, "blocks": blocks}
    if smoothing is None:
        del how["positions"]
    found = ops.load(slots, pool.view(), dtype=dtype, **how)
    if smoothing is not None:
        key = smoothing.restored(key, positions, blocks[0])
    elif blocks[0]:
        key = ops.rotate(key, blocks[0])
    value = ops.rotate(value, blocks[1]) if blocks[1] else value
    for name, got, want in zip(("key", "value"), found, (key, value), strict=True):
        assert_same_bits(got.contiguous(), want.contiguous(), name, any_nan=True)


@pytest.mark.parametrize(
    ("head_dim", "pairs", "dtype", "is_batch", "rotates"),
    [
        case
        for case in pairwise(DIMS, (None, 0, 3, 8, 9, 17), FLOATS, (False, True), ("neither", "keys", "both"))
        if 2 * (case[1] or 0) <= case[0]
    ],
)
def test_bits_are_those_of_the_steps(
    head_dim: int, pairs: int | None, dtype: torch.dtype, is_batch: bool, rotates: str
) -> None:
    """``pairs`` is ``None`` where keys are not smoothed."""
    pool = filled("B H S D", INT8, head_dim=head_dim, blocks=2, block_size=300)
    smoothing, block = None if pairs is None else smoothing_of(head_dim, pairs), block_of(head_dim)
    blocks = 0 if rotates == "neither" else block, block if rotates == "both" else 0
    slots = slots_of((2, 280) if is_batch else (280,), pool.num_slots)
    assert_bits_of_the_steps(pool, slots, dtype, smoothing, blocks)
    assert_bits_of_the_steps(pool, torch.arange(560).view(2, 280), dtype, smoothing, blocks)


@pytest.mark.parametrize(("axes", "kind", "block_size"), in_turn(ALL_AXES, KINDS, (6, 12)), ids=str)
def test_bits_are_those_of_the_steps_in_every_layout(axes: str, kind: Kind, block_size: int) -> None:
    head_dim = 16 if kind.bits == 2 else 24
    pool = filled(axes, kind, head_dim=head_dim, blocks=36 // block_size, block_size=block_size)
    assert_bits_of_the_steps(pool, slots_of((2, 13), 36), torch.bfloat16, smoothing_of(head_dim, 5), (8, 8))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("pairs", [0, 5])
@pytest.mark.parametrize("block", [0, 8])
def test_the_reference_loads_then_restores(dtype: torch.dtype, pairs: int, block: int) -> None:
    """And so do the kernels, where they have the same bits: without an offset."""
    pool, smoothing = filled("B S H D", INT8, head_dim=24, blocks=9), smoothing_of(24, pairs)
    slots = slots_of((26,), pool.num_slots)
    key, value = ops.load(slots, pool.view(), dtype=dtype)
    positions = positions_of(key)
    how: dict[str, Any] = {"smoothing": smoothing, "positions": positions, "blocks": (block, block)}
    expected = by_reference(smoothing, key, positions, block, True), rotation.rotate(value, block or 1)
    for backend in ("reference", "reference" if pairs else "auto"):
        found = ops.load(slots, pool.view(), dtype=dtype, backend=backend, **how)
        assert_same_bits(found[0], expected[0], "key")
        assert_same_bits(found[1], expected[1] if block else value, "value")


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("head_dim", [64, 24])
def test_keys_beyond_the_largest_number_are_the_largest(dtype: torch.dtype, head_dim: int) -> None:
    """In place, a row must not be read again after a part of it was written."""
    pool = filled("B H S D", Kind(dtype), head_dim=head_dim, blocks=1, block_size=40)
    pool.raw["key"].fill_(torch.finfo(dtype).max)
    pool.raw["key"][..., 1] = 2.0
    gain = torch.full((HEADS, head_dim), 0.5)
    gain[:, ::3] = 4.0
    slots = torch.arange(40)
    found, _ = ops.load(slots, pool.view(), smoothing=KeySmoothing(gain))
    key, _ = ops.load(slots, pool.view())
    assert_same_bits(found, KeySmoothing(gain).restored(key, None), "key")
    assert bool(found.isfinite().all()) == (dtype == torch.float16)  # others are beyond float32, too


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_many_tokens_in_threads_have_these_bits(dtype: torch.dtype) -> None:
    """So many that without a transform they are written past the caches."""
    pool = filled("B H S D", INT8, head_dim=128, blocks=2, block_size=3000)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert_bits_of_the_steps(pool, torch.arange(6000).view(2, 3000), dtype, smoothing_of(128, 7), (0, 0))
        assert_bits_of_the_steps(pool, torch.arange(6000), dtype, smoothing_of(128, 0), (128, 128))
    finally:
        torch.set_num_threads(threads)


def test_keys_alone_are_restored() -> None:
    """In a cache without values, of positions of 32 bits, of which the block of values says nothing."""
    key, smoothing = keys(16, HEADS, 16), smoothing_of(16, 3)
    cache, scale = torch.zeros(4, 4, HEADS, 16, dtype=torch.int8), torch.zeros(4, 4, HEADS, 4).half()
    view, positions = KVView.split(CacheLayout("B S H D"), cache, None, scale), torch.arange(16).int()
    ops.store(key, None, torch.arange(16), view)
    how: dict[str, Any] = {"smoothing": smoothing, "positions": positions, "blocks": (16, 8)}
    found, value = ops.load(torch.arange(16), view, dtype=torch.float32, **how)
    stored, _ = ops.load(torch.arange(16), view, dtype=torch.float32)
    assert_same_bits(found, smoothing.restored(stored, positions, 16), "key")
    assert value.shape == (16, HEADS, 0)


def test_no_tokens_are_loaded() -> None:
    pool, at = filled("B S H D", INT8, head_dim=64), torch.empty(2, 0, dtype=torch.int64)
    key, value = ops.load(
        at, pool.view(), smoothing=smoothing_of(64, 4), positions=at, blocks=(64, 64), dtype=torch.float16
    )
    assert key.shape == value.shape == (2, HEADS, 0, 64)


# --- refusals -----------------------------------------------------------------------------------------------

AT, GAIN = torch.arange(3), torch.ones(2, 16)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"smoothing": GAIN}, ArgumentError, "^smoothing must be a KeySmoothing or None, got Tensor$"),
        ({"blocks": 8}, ArgumentError, "^blocks must be two numbers of elements, got 8$"),
        ({"blocks": (3, 0)}, ArgumentError, "^block must be 0, or a power of two .* head dim 16, got 3$"),
        ({"blocks": (0, 32)}, ArgumentError, "^block must be 0, or a power of two .* head dim 16, got 32$"),
        ({"positions": None}, ShapeError, "^positions must be a tensor, got NoneType$"),
        ({"positions": AT[:2]}, ShapeError, r"^positions must be \[3\], as tokens of key, got \[2\]$"),
        ({"positions": AT.double()}, ShapeError, "^positions must be one of .*, got torch.float64 on cpu$"),
        ({"slots": AT + 90}, ArgumentError, r"^slots must be in \[0, 12\), got 90 for token 0$"),
        ({"smoothing": KeySmoothing(torch.ones(3, 16))}, ShapeError, "^smoothing must have 2 heads of 16 as"),
        ({"smoothing": KeySmoothing(GAIN).to(torch.device("meta"))}, ShapeError, "^smoothing must be on cpu"),
        ({"num_repeat": 2}, ArgumentError, "^offset and num_repeat must be left out with smoothing or"),
        ({"offset": offset_of()}, ArgumentError, "^offset and num_repeat must be left out with smoothing or"),
        ({"dtype": torch.int32}, ShapeError, "dtype of the loaded key|^dtype must be one of"),
        (
            {"backend": "triton"},
            UnsupportedError,
            "^backend 'triton' has no smoothing or rotation within a store or load",
        ),
    ],
    ids=str,
)
def test_bad_arguments_are_refused(changed: dict[str, Any], error: type[KVError], message: str) -> None:
    given: dict[str, Any] = {"slots": AT, "kv": make_pool("B S H D", INT8, head_dim=16).view()}
    given |= {"smoothing": KeySmoothing(GAIN, offset_of()), "positions": AT, "blocks": (16, 16)}
    for backend in ("auto", "reference"):
        with pytest.raises(error, match=message):
            ops.load(**(given | {"backend": backend} | changed))


def bare(**changed: Any) -> dict[str, Any]:
    kv, offset = make_pool("B S H D", INT8, head_dim=16).view(), offset_of()
    names = ("key_cache", "value_cache", "key_scale", "value_scale")
    given: dict[str, Any] = {"slots": AT, **dict(zip(names, kv.tensors, strict=True))}
    given |= {"dtype": torch.float32, "key_block": 16, "value_block": 16, "positions": AT, "factor": GAIN}
    given |= {"mean": offset.mean, "channels": offset.channels, "frequencies": offset.frequencies}
    return given | changed


@compiled
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"key_block": 3}, "block must be 0, or"),
        ({"value_block": -8}, "block must be 0, or"),
        ({"factor": None}, "factor must be there with positions"),
        ({"positions": None}, "positions must be there with mean"),
        ({"positions": AT[:2]}, "positions must be one for each token"),
        ({"factor": torch.ones(3, 16), "mean": torch.ones(3, 3, 2)}, "key must have the heads of factor"),
        ({"channels": torch.full((2, 3, 2), 16)}, "channels must be in the head dim"),
        ({"slots": AT + 90}, r"slots must be in \[0, 12\), got 90 for token 0"),
    ],
    ids=str,
)
def test_the_kernel_itself_refuses_what_it_would_read_wrong(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(IndexError, match=f"ArgumentError: .*{message}"):
        schemas.load_transformed(**bare(**changed))


# --- as a part of torch -------------------------------------------------------------------------------------


@pytest.mark.parametrize("pairs", [None, 0, 3])
@pytest.mark.parametrize("block", [0, 16])
def test_opcheck(pairs: int | None, block: int) -> None:
    kv = make_pool("B S H D", INT8, head_dim=16).view()
    scales = [torch.rand(t.shape).to(t.dtype) for t in kv.tensors[2:] if t is not None]
    smoothing = None if pairs is None else smoothing_of(16, pairs, 2)
    transform = transform_arguments((block, block), smoothing, torch.arange(5), is_restored=True)
    slots = torch.tensor([5, 1, 0, 3, 7])
    given = slots, *kv.tensors[:2], *scales, torch.float32, *transform
    torch.library.opcheck(schemas.load_transformed, given)


@pytest.mark.compile
def test_it_compiles() -> None:
    view, smoothing = filled("B S H D", INT8, head_dim=16).view(), smoothing_of(16, 3)

    def load(slots: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        how: dict[str, Any] = {"smoothing": smoothing, "positions": positions, "blocks": (16, 16)}
        return ops.load(slots, view, dtype=torch.float32, **how)

    compiled = torch.compile(load, backend="eager", fullgraph=True)
    slots, positions = torch.tensor([[5, 1, 0]]), torch.arange(3)[None]
    for got, want in zip(compiled(slots, positions), load(slots, positions), strict=True):
        assert_same_bits(got, want, "loaded")
