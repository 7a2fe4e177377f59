"""Schema, fake and mutation of every operator, each on tensors of its own that were never written.

``opcheck`` compares before and after, so a cache that already holds the values hides a write: every case
builds its caches from random numbers.
"""

from __future__ import annotations

import pytest
import torch
from ops.pools import ALL_AXES, FULL4, INT4, INT8, Kind, Pool, make_pool
from oracles.bits import FLOATS, generator
from oracles.pairs import in_turn
from torch import Tensor

from kvloom.core.indexing import ENDLESS
from kvloom.ops import schemas

FLOAT_KINDS = [Kind(dtype) for dtype in FLOATS]
CODE_KINDS = [
    INT8,
    INT4,
    FULL4,
    Kind(torch.int8, 8, 8, torch.bfloat16),
    Kind(torch.uint8, 4, 4, torch.float16),
]
KINDS = FLOAT_KINDS + CODE_KINDS
# In turn: how kinds, dtypes and layouts meet in a kernel is for the tests of kernels.
DTYPES = [(kind, FLOATS[i % 3]) for i, kind in enumerate(KINDS)]
each_dtype = pytest.mark.parametrize(("kind", "dtype"), DTYPES, ids=str)
LAYOUTS = [(axes, (Kind(torch.float32), INT8, INT4)[i % 3]) for i, axes in enumerate(ALL_AXES)]


def some_layouts(first: int) -> pytest.MarkDecorator:
    """Every fourth layout; those of the four operators are all of them."""
    return pytest.mark.parametrize(("axes", "kind"), LAYOUTS[first::4], ids=str)


def poisoned(axes: str, kind: Kind, seed: int = 0, strided: bool = False, **sizes: int) -> Pool:
    """A pool of random finite values: NaN would not compare as equal."""
    pool, rng = make_pool(axes, kind, strided=strided, **sizes), generator(seed)
    for base in pool.bases.values():
        if base.is_floating_point():
            base.copy_(1 + torch.rand(base.shape, generator=rng))
    return pool


def caches(pool: Pool) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    kv = pool.view()
    return kv.tensors


def tokens(count: int, dtype: torch.dtype, width: int = 8, strided: bool = False) -> Tensor:
    """New keys or values ``[count, 2, width]``."""
    if not dtype.is_floating_point:
        return torch.randint(-100, 100, (count, 2, width), dtype=dtype, generator=generator(3))
    x = torch.randn(2 if strided else count, count if strided else 2, width, generator=generator(3)).to(dtype)
    return x.transpose(0, 1) if strided else x


def assert_passes(op: object, *arguments: object) -> None:
    """All of ``opcheck``: schema, autograd registration, fake tensors, dynamic shapes."""
    results = torch.library.opcheck(op, arguments)
    assert set(results.values()) == {"SUCCESS"}


def assert_described(op: object, *arguments: object) -> None:
    """The same without tracing of dynamic shapes, which knows no layout and no kind of codes."""
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    results = torch.library.opcheck(op, arguments, test_utils=checks)
    assert set(results.values()) == {"SUCCESS"}


# --- store --------------------------------------------------------------------------------------------------


@some_layouts(0)
def test_store_in_layouts(axes: str, kind: Kind) -> None:
    x = tokens(3, torch.float32)
    assert_described(schemas.store, x, x + 1, torch.tensor([5, -1, 0]), *caches(poisoned(axes, kind)))


@pytest.mark.parametrize(
    ("kind", "dtype"),
    DTYPES + [(Kind(t), t) for t in (torch.int8, torch.float64)],
    ids=str,
)
def test_store_of_every_dtype(kind: Kind, dtype: torch.dtype) -> None:
    pool = poisoned("L 2 H T D", kind)
    x = tokens(3, dtype)
    slots = torch.tensor([5, 7, 0], dtype=torch.int32)
    assert_described(schemas.store, x, x + 1, slots, *caches(pool), kind.full_range)


@pytest.mark.parametrize(
    ("how", "kind"),
    in_turn(
        ["no tokens", "all skipped", "keys only", "strided tokens", "strided cache", "wide values"],
        [INT4, Kind(torch.float16), INT8],
    ),
    ids=str,
)
def test_store_with_other_arguments(kind: Kind, how: str) -> None:
    wide = {"value_dim": 16} if how == "wide values" else {}
    pool = poisoned("B H S D", kind, strided=how == "strided cache", **wide)
    count = 0 if how == "no tokens" else 3
    key = tokens(count, torch.float16, strided=how == "strided tokens")
    value = tokens(count, torch.float16, width=wide.get("value_dim", 8), strided=how == "strided tokens")
    slots = torch.tensor([-1, -1, -1] if how == "all skipped" else [4, 9, 1])[:count]
    key_cache, value_cache, key_scale, value_scale = caches(pool)
    if how == "keys only":
        assert_passes(schemas.store, key, None, slots, key_cache, None, key_scale, None)
    else:
        assert_passes(schemas.store, key, value, slots, key_cache, value_cache, key_scale, value_scale)


# --- load ---------------------------------------------------------------------------------------------------


@some_layouts(1)
def test_load_from_layouts(axes: str, kind: Kind) -> None:
    slots = torch.tensor([5, 5, 0])
    assert_described(schemas.load, slots, *caches(poisoned(axes, kind)), torch.float32, 1)


@each_dtype
def test_load_as_every_dtype(kind: Kind, dtype: torch.dtype) -> None:
    slots = torch.tensor([5, 5, 0], dtype=torch.int32)
    assert_described(schemas.load, slots, *caches(poisoned("B 2 H S D", kind)), dtype, 2)


@pytest.mark.parametrize(
    ("how", "kind"),
    in_turn(["no tokens", "keys only", "strided cache", "wide values"], [Kind(torch.float16), INT8]),
    ids=str,
)
def test_load_with_other_arguments(kind: Kind, how: str) -> None:
    wide = {"value_dim": 16} if how == "wide values" else {}
    pool = poisoned("B H S/2 D S%2", kind, strided=how == "strided cache", **wide)
    slots = torch.tensor([4, 9, 1])[: 0 if how == "no tokens" else 3]
    key_cache, value_cache, key_scale, value_scale = caches(pool)
    if how == "keys only":
        value_cache = value_scale = None
    assert_passes(schemas.load, slots, key_cache, value_cache, key_scale, value_scale, torch.float16, 2)


# --- copy ---------------------------------------------------------------------------------------------------


@some_layouts(2)
def test_copy_to_layouts(axes: str, kind: Kind) -> None:
    sources = [x for x in caches(poisoned("L 2 H T D", kind, seed=1)) if x is not None]
    targets = [x for x in caches(poisoned(axes, kind, seed=2)) if x is not None]
    assert_described(schemas.copy, sources, torch.tensor([4, 4, 0]), targets, torch.tensor([1, 7, 2]))


@pytest.mark.parametrize(
    ("kind", "count"), in_turn([*FLOAT_KINDS, Kind(torch.int8), Kind(torch.float64)], [3, 0]), ids=str
)
def test_copy_of_every_dtype(kind: Kind, count: int) -> None:
    sources = [x for x in caches(poisoned("B S H D", kind, seed=1, strided=True)) if x is not None]
    targets = [x for x in caches(poisoned("B H S D", kind, seed=2, strided=True)) if x is not None]
    slots = torch.arange(count, dtype=torch.int32)
    check = assert_passes if kind == FLOAT_KINDS[0] else assert_described
    check(schemas.copy, sources, slots, targets, slots + 5)


# --- attend -------------------------------------------------------------------------------------------------

SLOPES, SINKS = torch.rand(4, generator=generator(2)), torch.randn(4, generator=generator(5))
MASK = torch.randn(4, 4, 9, generator=generator(1))
OPTIONS: dict[str, dict[str, object]] = {
    "scale": {"scale": 0.7},
    "not causal": {"is_causal": False},
    "decoding": {"decoding_batches": 1},
    "first visible": {"first_visible": torch.tensor([1, 2])},
    "mask": {"mask": torch.randn(4, 11, generator=generator(1))},
    "mask of heads": {"mask": MASK.half()},
    "alibi": {"alibi_slopes": SLOPES},
    "window": {"window": 2},
    "softcap": {"softcap": 5.0},
    "sinks": {"sinks": SINKS},
    "all": {"scale": 0.3, "mask": MASK, "alibi_slopes": SLOPES, "window": 3, "softcap": 2.0, "sinks": SINKS},
}


def attend_arguments(pool: Pool, dtype: torch.dtype = torch.float32, **options: object) -> tuple[object, ...]:
    """Two sequences of 4 and 5 stored tokens, 1 and 3 of them new, in offset mode unless said otherwise."""
    query = torch.randn(4, 4, 8, generator=generator(4)).to(dtype)
    given = {
        "table": torch.tensor([[0], [6]]), "row_starts": None, "page_size": ENDLESS,
        "seqstarts": torch.tensor([0, 1, 4]), "kvstarts": torch.tensor([0, 4, 9]), "decoding_batches": 0,
        "first_visible": None, "scale": 0.35, "is_causal": True, "mask": None, "alibi_slopes": None,
        "window": None, "softcap": None, "sinks": None, "query": query, **options,
    }  # fmt: skip
    return given.pop("query"), *caches(pool), *given.values()


@some_layouts(3)
def test_attend_over_layouts(axes: str, kind: Kind) -> None:
    assert_described(schemas.attend, *attend_arguments(poisoned(axes, kind)))


@each_dtype
def test_attend_in_every_dtype(kind: Kind, dtype: torch.dtype) -> None:
    assert_described(schemas.attend, *attend_arguments(poisoned("2 B S H D", kind), dtype))


@pytest.mark.parametrize("name", OPTIONS)
def test_attend_with_every_option(name: str) -> None:
    check = assert_passes if name in ("first visible", "mask", "all") else assert_described
    check(schemas.attend, *attend_arguments(poisoned("B 2 S H D", INT4), **OPTIONS[name]))


@pytest.mark.parametrize(("kind", "options"), in_turn(KINDS[::3], ["alibi", "all"]), ids=str)
def test_attend_into_a_given_tensor(kind: Kind, options: str) -> None:
    arguments = attend_arguments(poisoned("2 B S H D", kind), **OPTIONS[options])
    assert_passes(schemas.attend_out, *arguments, torch.zeros(4, 4, 8))


def waves(
    dtype: torch.dtype = torch.float32,
    of_frequencies: torch.dtype = torch.float64,
    first: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """A positional bias of three pairs."""
    coefficients = torch.randn(4, 4, 6, generator=generator(6)).to(dtype)
    return coefficients, torch.rand(2, 3, generator=generator(7)).to(of_frequencies), first


BIASES = {
    "float32": waves(),
    "bfloat16": waves(torch.bfloat16, torch.float32),
    "first position": waves(first=torch.tensor([7, 100])),
}


@pytest.mark.parametrize(("bias", "options"), in_turn([*BIASES], ["scale", "all"]), ids=str)
def test_attend_with_a_positional_bias(bias: str, options: str) -> None:
    arguments = (*attend_arguments(poisoned("B 2 S H D", INT8), **OPTIONS[options]), *BIASES[bias])
    check = assert_passes if bias == "first position" else assert_described
    check(schemas.attend_biased, *arguments)
    check(schemas.attend_biased_reference, *arguments)
    check(schemas.attend_biased_out, *arguments, torch.zeros(4, 4, 8))


@pytest.mark.parametrize("bias", BIASES)
def test_attend_part_with_a_positional_bias(bias: str) -> None:
    prior = torch.randn(4, 4, 8, generator=generator(8)), torch.randn(4, 4, generator=generator(9))
    own = attend_arguments(poisoned("B 2 S H D", INT8))
    check = assert_passes if bias == "first position" else assert_described
    check(schemas.attend_part_biased, *own, 2, torch.tensor([1, 0]), *prior, *BIASES[bias])


NO_QUERY = torch.empty(0, 4, 8)
STARTS = {"seqstarts": torch.tensor([0, 1, 4]), "kvstarts": torch.tensor([0, 4, 9])}
NO_BATCH = {"seqstarts": torch.tensor([0]), "kvstarts": torch.tensor([0]), "query": NO_QUERY}
ALL_EMPTY = {"seqstarts": torch.tensor([0, 0, 0]), "kvstarts": torch.tensor([0, 0, 3]), "query": NO_QUERY}
PAGES = torch.tensor([[4, 0, 2], [8, 2, 6]])
SLOTS = torch.tensor([5, 4, 3, 2, 9, 1, 8, 0, 7])
INDEXES: dict[str, dict[str, object]] = {
    "padded pages": {"table": torch.tensor([[4, -1], [0, 8]]), "page_size": 4},
    "int32": {"table": PAGES.int(), "page_size": 2, **{name: x.int() for name, x in STARTS.items()}},
    "tokens": {"table": SLOTS, "row_starts": STARTS["kvstarts"], "page_size": 1},
    "empty batch": {**NO_BATCH, "table": torch.empty(0, 1, dtype=torch.int64)},
    "empty sequences": ALL_EMPTY,
    "strided query": {"query": torch.randn(4, 4, 8, generator=generator(4)).transpose(0, 1)},
    "strided table": {"table": PAGES.t().contiguous().t(), "page_size": 2},
}


@pytest.mark.parametrize("options", INDEXES.values(), ids=INDEXES)
def test_attend_with_every_index(options: dict[str, object]) -> None:
    assert_passes(schemas.attend, *attend_arguments(poisoned("L 2 T H D", INT8), **options))


def test_attend_with_wide_values() -> None:
    assert_passes(schemas.attend, *attend_arguments(poisoned("B H S D", INT8, value_dim=16)))


@pytest.mark.parametrize(("kind", "options"), in_turn(KINDS[1::3], ["scale", "all", "tokens"]), ids=str)
def test_attend_by_the_reference(kind: Kind, options: str) -> None:
    given = attend_arguments(poisoned("L 2 H T D", kind), **(OPTIONS | INDEXES)[options])
    assert_passes(schemas.attend_reference, *given)
