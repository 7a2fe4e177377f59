"""``ops.store`` of keys that are smoothed and of keys and values that are rotated: the bytes of the steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ops.cases import offset_of
from ops.pools import ALL_AXES, FULL4, INT2, INT4, INT8, Kind, Pool, make_pool
from ops.test_smoothing import HEADS, by_reference, keys, positions_of, smoothing_of
from ops.twins import SPECIAL, assert_twins, twins
from oracles.bits import FLOATS, generator
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
ORDERS = ("3-D", "by head", "by token", "strided", "strided vectors")


def tokens(order: str, head_dim: int, dtype: torch.dtype, seed: int, heads: int = HEADS) -> Tensor:
    """26 tokens, ``[26, H, D]`` or two sequences of 13."""
    if order == "3-D":
        return keys(26, heads, head_dim, dtype=dtype, seed=seed)
    x = keys(2, heads, 13, head_dim, dtype=dtype, is_by_token=order == "by token", seed=seed)
    if order == "strided":
        return keys(4, heads, 26, 2 * head_dim, dtype=dtype, seed=seed)[::2, :, ::2, :head_dim]
    return x.mT.contiguous().mT if order == "strided vectors" else x


def slots_of(x: Tensor, num_slots: int, seed: int = 3) -> Tensor:
    """For ``[T, H, D]`` or ``[B, H, N, D]``: in any order, of which some are left out."""
    shape = x.shape[:1] if x.dim() == 3 else (x.shape[0], x.shape[2])
    rng = generator(seed)
    found = torch.randperm(num_slots, generator=rng)[: torch.Size(shape).numel()]
    found[torch.rand(len(found), generator=rng) < 0.2] = -1
    return found.view(shape)


def rotated(x: Tensor, block: int) -> Tensor:
    return ops.rotate(x, block) if block else x


# --- bits ---------------------------------------------------------------------------------------------------


def assert_bytes_of_the_steps(
    pools: tuple[Pool, Pool],
    key: Tensor,
    value: Tensor,
    smoothing: KeySmoothing | None,
    blocks: tuple[int, int],
) -> None:
    """Stores into one pool at once, into the other in steps, and compares every byte, gaps included."""
    kind, slots, positions = pools[0].kind, slots_of(key, pools[0].num_slots), positions_of(key)
    how: dict[str, Any] = {"smoothing": smoothing, "positions": positions, "blocks": blocks}
    ops.store(key, value, slots, pools[0].view(), full_range=kind.full_range, **how)
    if smoothing is None:
        key = rotated(key, blocks[0])
    else:
        key = smoothing.smoothed(key, positions, blocks[0])
    ops.store(key, rotated(value, blocks[1]), slots, pools[1].view(), full_range=kind.full_range)
    assert_twins(*pools)


@pytest.mark.parametrize(
    ("head_dim", "pairs", "dtype", "order", "rotates"),
    [
        case
        for case in pairwise(DIMS, (None, 0, 3, 8, 9, 17), FLOATS, ORDERS, ("neither", "keys", "both"))
        if 2 * (case[1] or 0) <= case[0]
    ],
)
def test_bytes_are_those_of_the_steps(
    head_dim: int, pairs: int | None, dtype: torch.dtype, order: str, rotates: str
) -> None:
    """``pairs`` is ``None`` where keys are not smoothed."""
    pools = twins("B S H D", INT8, heads=HEADS, head_dim=head_dim, blocks=9)
    smoothing = None if pairs is None else smoothing_of(head_dim, pairs)
    key, value = tokens(order, head_dim, dtype, 1), tokens(order, head_dim, dtype, 2)
    block = block_of(head_dim)
    blocks = 0 if rotates == "neither" else block, block if rotates == "both" else 0
    assert_bytes_of_the_steps(pools, key, value, smoothing, blocks)


@pytest.mark.parametrize(("axes", "kind", "block_size"), in_turn(ALL_AXES, KINDS, (6, 12)), ids=str)
def test_bytes_are_those_of_the_steps_in_every_layout(axes: str, kind: Kind, block_size: int) -> None:
    head_dim = 16 if kind.bits == 2 else 24  # of a multiple of 4 stored elements
    pools = twins(axes, kind, heads=HEADS, head_dim=head_dim, blocks=36 // block_size, block_size=block_size)
    dtype = kind.dtype if kind.dtype.is_floating_point else torch.bfloat16
    key, value = tokens("by token", head_dim, dtype, 1), tokens("by head", head_dim, dtype, 2)
    assert_bytes_of_the_steps(pools, key, value, smoothing_of(head_dim, 5), (8, 8))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("pairs", [0, 5])
@pytest.mark.parametrize("block", [0, 8])
def test_the_reference_smooths_then_stores(dtype: torch.dtype, pairs: int, block: int) -> None:
    """And so do the kernels, where they have the same bits: without an offset."""
    pools = twins("B S H D", INT8, heads=HEADS, head_dim=24, blocks=9)
    smoothing, key = smoothing_of(24, pairs), keys(26, HEADS, 24, dtype=dtype)
    slots, positions = slots_of(key, 36), positions_of(key)
    how: dict[str, Any] = {"smoothing": smoothing, "positions": positions, "blocks": (block, block)}
    ops.store(key, key, slots, pools[0].view(), backend="reference", **how)
    smoothed = by_reference(smoothing, key, positions, block, False)
    value = rotation.rotate(key, block) if block else key
    ops.store(smoothed, value, slots, pools[1].view(), backend="reference")
    assert_twins(*pools)
    if not pairs:
        ops.store(key, key, slots, pools[0].view(), **how)
        assert_twins(*pools)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("is_by_token", [False, True])
def test_many_tokens_in_threads_have_these_bytes(dtype: torch.dtype, is_by_token: bool) -> None:
    """So many that they are written past the caches, of heads that have a buffer of one token."""
    heads, head_dim, count = 40, 128, 150
    fused, stepped = (make_pool("2 B H S D", INT8, heads=heads, head_dim=head_dim, blocks=20, block_size=16)
                      for _ in range(2))  # fmt: skip
    smoothing = smoothing_of(head_dim, 7, heads)
    key = keys(2, heads, count, head_dim, dtype=dtype, is_by_token=is_by_token)
    slots, positions = slots_of(key, 320), positions_of(key)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        ops.store(key, key, slots, fused.view(), smoothing=smoothing, positions=positions)
    finally:
        torch.set_num_threads(threads)
    ops.store(smoothing.smoothed(key, positions), key, slots, stepped.view())
    assert_twins(fused, stepped)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("head_dim", [64, 24])
@pytest.mark.parametrize("block", [0, 8])
def test_special_values_are_those_of_the_steps(dtype: torch.dtype, head_dim: int, block: int) -> None:
    values = torch.tensor(SPECIAL, dtype=torch.float32).to(dtype)
    key = values[torch.randint(len(values), (26, HEADS, head_dim), generator=generator(1))]
    key[5:] = key[5:].nan_to_num(nan=1.0, posinf=2.0, neginf=-2.0)
    smoothing = KeySmoothing(torch.full((HEADS, head_dim), 0.125))
    slots = torch.arange(26)
    for kind in (INT8, Kind(dtype)):
        fused, stepped = twins("B H S D", kind, heads=HEADS, head_dim=head_dim, blocks=7)
        ops.store(key, key, slots, fused.view(), smoothing=smoothing, blocks=(block, block))
        smoothed = smoothing.smoothed(key, None, block)
        ops.store(smoothed, rotated(key, block), slots, stepped.view())
        assert_twins(fused, stepped)
        reference = by_reference(smoothing, key, torch.arange(26), block, False)
        assert torch.equal(smoothed.isnan(), reference.isnan())
        infinite = {"posinf": torch.inf, "neginf": -torch.inf}
        assert torch.equal(smoothed.nan_to_num(**infinite), reference.nan_to_num(**infinite))


@pytest.mark.parametrize("kind", [INT8, Kind(torch.float32)], ids=str)
def test_keys_alone_are_smoothed(kind: Kind) -> None:
    """In a cache without values, of positions of 32 bits, of which the block of values says nothing."""
    layout, smoothing = CacheLayout("B S H D"), smoothing_of(16, 3)
    key = keys(11, HEADS, 16)
    found = []
    for is_fused in (True, False):
        cache = torch.zeros(4, 4, HEADS, 16, dtype=kind.dtype)
        scale = torch.zeros(4, 4, HEADS, 4, dtype=torch.float16) if kind.bits else None
        view, positions = KVView.split(layout, cache, None, scale), positions_of(key, largest=99).int()
        if is_fused:
            how: dict[str, Any] = {"smoothing": smoothing, "positions": positions, "blocks": (16, 8)}
            ops.store(key, None, torch.arange(11), view, **how)
        else:
            ops.store(smoothing.smoothed(key, positions, 16), None, torch.arange(11), view)
        found.append([cache, scale])
    assert all(a is b or torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert bool(found[0][0].any())


def test_tokens_that_no_slot_takes_are_not_read_into_others() -> None:
    """Of 30 tokens whole tiles have none; positions of padding may be any number."""
    fused, stepped = twins("B S H D", INT8, heads=HEADS, head_dim=64, blocks=9)
    smoothing, key = smoothing_of(64, 4), keys(30, HEADS, 64)
    positions, slots = positions_of(key), torch.arange(30)
    slots[3:27] = -1
    positions[3:27] = 2**62
    key[3:27] = float("nan")
    ops.store(key, key, slots, fused.view(), smoothing=smoothing, positions=positions)
    ops.store(smoothing.smoothed(key, positions), key, slots, stepped.view())
    assert_twins(fused, stepped)


def test_no_tokens_are_stored() -> None:
    fused, untouched = twins("B S H D", INT8, heads=HEADS, head_dim=64)
    smoothing, none = smoothing_of(64, 4), torch.empty(0, HEADS, 64)
    at = torch.empty(0, dtype=torch.int64)
    ops.store(none, none, at, fused.view(), smoothing=smoothing, positions=at, blocks=(64, 64))
    assert_twins(fused, untouched)


# --- refusals -----------------------------------------------------------------------------------------------

X, AT, GAIN = torch.ones(3, 2, 16), torch.arange(3), torch.ones(2, 16)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"smoothing": GAIN}, ArgumentError, "^smoothing must be a KeySmoothing or None, got Tensor$"),
        ({"blocks": 8}, ArgumentError, "^blocks must be two numbers of elements, got 8$"),
        ({"blocks": (8,)}, ArgumentError, r"^blocks must be two numbers of elements, got \(8,\)$"),
        ({"blocks": (8, 0.5)}, ArgumentError, r"^blocks must be two numbers .*, got \(8, 0.5\)$"),
        ({"blocks": (3, 0)}, ArgumentError, "^block must be 0, or a power of two .* head dim 16, got 3$"),
        ({"blocks": (0, 32)}, ArgumentError, "^block must be 0, or a power of two .* head dim 16, got 32$"),
        ({"blocks": (0, -8)}, ArgumentError, r"^block must be in \[0, 1025\), got -8$"),
        ({"positions": None}, ShapeError, "^positions must be a tensor, got NoneType$"),
        ({"positions": AT[:2]}, ShapeError, r"^positions must be \[3\], as tokens of key, got \[2\]$"),
        ({"positions": AT.double()}, ShapeError, "^positions must be one of .*, got torch.float64 on cpu$"),
        ({"key": X.double()}, ShapeError, "^key must be one of .* on cpu, got torch.float64 on cpu$"),
        ({"key": torch.ones(3, 3, 16)}, ShapeError, r"^key must be \[T, 2, 16\] or .*, got \[3, 3, 16\]$"),
        ({"value": X.half()}, ShapeError, "^value must be torch.float32, got torch.float16$"),
        ({"slots": AT + 90}, ArgumentError, r"^slots must be in \[0, 12\), got 90 for token 0$"),
        ({"smoothing": KeySmoothing(torch.ones(3, 16))}, ShapeError, r"^key must be \[T, 3, 16\] or"),
        ({"smoothing": KeySmoothing(GAIN).to(torch.device("meta"))}, ShapeError, "^key must be .* on meta"),
        (
            {"backend": "triton"},
            UnsupportedError,
            "^backend 'triton' has no smoothing or rotation within a store or load",
        ),
    ],
    ids=str,
)
def test_bad_arguments_are_refused_before_anything_is_written(
    changed: dict[str, Any], error: type[KVError], message: str
) -> None:
    pool, untouched = twins("B S H D", INT8, head_dim=16)
    given: dict[str, Any] = {"key": X, "value": X, "slots": AT, "kv": pool.view(), "positions": AT}
    given |= {"smoothing": KeySmoothing(GAIN, offset_of()), "blocks": (16, 16)}
    for backend in ("auto", "reference"):
        with pytest.raises(error, match=message):
            ops.store(**(given | {"backend": backend} | changed))
        assert_twins(pool, untouched)


def bare(**changed: Any) -> dict[str, Any]:
    kv, offset = make_pool("B S H D", INT8, head_dim=16).view(), offset_of()
    names = ("key_cache", "value_cache", "key_scale", "value_scale")
    given: dict[str, Any] = {"key": X, "value": X, "slots": AT, **dict(zip(names, kv.tensors, strict=True))}
    given |= {"full_range": False, "key_block": 16, "value_block": 16, "positions": AT, "factor": GAIN}
    given |= {"mean": offset.mean, "channels": offset.channels, "frequencies": offset.frequencies}
    return given | changed


@compiled
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"key": X.transpose(0, 1).contiguous().transpose(0, 1).mT.contiguous().mT}, "must be contiguous"),
        ({"key_block": 3}, "block must be 0, or"),
        ({"value_block": -8}, "block must be 0, or"),
        ({"factor": None}, "factor must be there with positions"),
        ({"factor": None, "positions": None}, "positions must be there with mean"),
        ({"positions": None}, "positions must be there with mean"),
        ({"positions": AT[:2]}, "positions must be one for each token"),
        ({"factor": torch.ones(3, 16), "mean": torch.ones(3, 3, 2)}, "key must have the heads of factor"),
        ({"channels": torch.full((2, 3, 2), 16)}, "channels must be in the head dim"),
        ({"slots": AT + 90}, r"slots must be in \[0, 12\), got 90 for token 0"),
    ],
    ids=str,
)
def test_the_kernel_itself_refuses_what_it_would_read_wrong(changed: dict[str, Any], message: str) -> None:
    given = bare(**changed)
    before = [given[name].clone() for name in ("key_cache", "value_cache")]
    with pytest.raises(IndexError, match=f"ArgumentError: .*{message}"):
        schemas.store_transformed(**given)
    assert torch.equal(given["key_cache"], before[0]) and torch.equal(given["value_cache"], before[1])


# --- as a part of torch -------------------------------------------------------------------------------------


@pytest.mark.parametrize("pairs", [None, 0, 3])
@pytest.mark.parametrize("block", [0, 16])
def test_opcheck(pairs: int | None, block: int) -> None:
    kv, x = make_pool("B S H D", INT8, head_dim=16).view(), keys(5, 2, 16)
    scales = [torch.rand(t.shape).to(t.dtype) for t in kv.tensors[2:] if t is not None]
    smoothing = None if pairs is None else smoothing_of(16, pairs, 2)
    transform = transform_arguments((block, block), smoothing, torch.arange(5))
    given = x, x + 1, torch.tensor([5, -1, 0, 3, 7]), *kv.tensors[:2], *scales, False, *transform
    torch.library.opcheck(schemas.store_transformed, given)


@pytest.mark.compile
def test_it_compiles() -> None:
    fused, stepped = twins("B S H D", INT8, head_dim=16)
    smoothing, x, views = smoothing_of(16, 3, 2), keys(5, 2, 16), (fused.view(), stepped.view())

    def store(x: Tensor, slots: Tensor, positions: Tensor, view: KVView) -> None:
        ops.store(x, x, slots, view, smoothing=smoothing, positions=positions, blocks=(16, 16))

    compiled = torch.compile(store, backend="eager", fullgraph=True)
    for run, view in zip((compiled, store), views, strict=True):
        run(x, torch.tensor([5, -1, 0, 3, 7]), torch.arange(5), view)
    assert_twins(fused, stepped)


def test_keys_that_require_a_gradient_are_stored_without_it() -> None:
    fused, stepped = twins("B S H D", Kind(torch.float32), head_dim=16)
    smoothing, x = smoothing_of(16, 3, 2), keys(5, 2, 16)
    for pool, key in ((fused, x.clone().requires_grad_()), (stepped, x)):
        view = pool.view()
        ops.store(key, key, torch.arange(5), view, smoothing=smoothing, positions=torch.arange(5))
        assert not any(t.requires_grad for t in view.tensors if t is not None)
    assert_twins(fused, stepped)
