"""Bad arguments of store, load and copy."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from ops.pools import INT4, INT8, PLAIN, Kind, make_pool, new_tokens
from ops.refusals import (
    PARTS,
    Bad,
    Call,
    Change,
    as_dtype,
    assert_refused,
    on_meta,
    other_backends,
    rows,
    views,
)
from torch import Tensor

from kvloom import debug, ops
from kvloom.core.views import KVView
from kvloom.errors import ArgumentError, ShapeError


def replaced(**changes: object) -> Change:
    """A change that does not look at the call."""
    return lambda call: changes


def slots(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def bad_slots(name: str, num_slots: int, *, negative: bool) -> list[Bad]:
    """Slots of the wrong shape, dtype or device, or outside the cache; three are expected."""
    table = [
        Bad(f"{name} 3-D", ShapeError, name, replaced(**{name: slots(1, 2, 3)[None, None]})),
        Bad(f"{name} 0-D", ShapeError, name, replaced(**{name: torch.tensor(1)})),
        Bad(f"{name} float", ShapeError, name, replaced(**{name: slots(1, 2, 3).float()})),
        Bad(f"{name} int16", ShapeError, name, replaced(**{name: slots(1, 2, 3).short()})),
        Bad(f"{name} bool", ShapeError, name, replaced(**{name: slots(1, 0, 1).bool()})),
        Bad(f"{name} on meta", ShapeError, name, replaced(**{name: on_meta(slots(1, 2, 3))})),
        Bad(f"{name} list", ShapeError, name, replaced(**{name: [1, 2, 3]})),
        Bad(f"{name} None", ShapeError, name, replaced(**{name: None})),
        Bad(f"{name} one too far", ArgumentError, name, replaced(**{name: slots(0, 1, num_slots)})),
        Bad(
            f"{name} int32 too far",
            ArgumentError,
            name,
            replaced(**{name: slots(0, 2**31 - 1, 1).int()}),
        ),
        Bad(f"{name} largest", ArgumentError, name, replaced(**{name: slots(2**63 - 1, 0, 1)})),
    ]
    if negative:
        table += [
            Bad(f"{name} negative", ArgumentError, name, replaced(**{name: slots(0, -1, 2)})),
            Bad(f"{name} smallest", ArgumentError, name, replaced(**{name: slots(0, 1, -(2**63))})),
        ]
    return table


def expanded(x: Tensor) -> Tensor:
    """Heads that are all one head in memory."""
    return x[:, :, :, :1].expand_as(x)


# --- store --------------------------------------------------------------------------------------------------


def good_store(kind: Kind) -> Call:
    pool = make_pool("L 2 T H D", kind)
    key, value = new_tokens(3, pool, torch.float32, 1), new_tokens(3, pool, torch.float32, 2)
    return {"key": key, "value": value, "slots": slots(4, 0, 9), "kv": pool.view()}


def overlap_with_cache(call: Call) -> Call:
    """A key that is three slots of the cache itself."""
    return {"key": call["kv"].key.cache[0, 3:6, 0].flatten(2)}


STORE = [
    *bad_slots("slots", 12, negative=False),
    *other_backends(),
    Bad("slots 2-D", ShapeError, "slots", replaced(slots=slots(1, 2, 3)[None])),
    Bad("slots too few", ShapeError, "slots", replaced(slots=slots(1, 2))),
    Bad("slots too many", ShapeError, "slots", replaced(slots=slots(1, 2, 3, 4))),
    Bad("far slot behind a skipped one", ArgumentError, "slots", replaced(slots=slots(-1, 12, 3))),
    Bad("key 2-D", ShapeError, "key", lambda c: {"key": c["key"][0]}),
    Bad("key 4-D", ShapeError, "key", lambda c: {"key": c["key"][None]}),
    Bad("key fewer heads", ShapeError, "key", lambda c: {"key": c["key"][:, :1]}),
    Bad("key narrower", ShapeError, "key", lambda c: {"key": c["key"][..., :4]}),
    Bad("key wider", ShapeError, "key", lambda c: {"key": c["key"].repeat(1, 1, 2)}),
    Bad("key int32", ShapeError, "key", lambda c: {"key": c["key"].int(), "value": c["value"].int()}),
    Bad("key float64", ShapeError, "key", lambda c: {"key": c["key"].double(), "value": c["value"].double()}),
    Bad("key on meta", ShapeError, "key", lambda c: {"key": on_meta(c["key"])}),
    Bad("key None", ShapeError, "key", replaced(key=None)),
    Bad("key list", ShapeError, "key", replaced(key=[[[1.0]]])),
    Bad("value missing", ArgumentError, "value", replaced(value=None)),
    Bad("value shorter", ShapeError, "value", lambda c: {"value": c["value"][:2]}),
    Bad("value fewer heads", ShapeError, "value", lambda c: {"value": c["value"][:, :1]}),
    Bad("value narrower", ShapeError, "value", lambda c: {"value": c["value"][..., :4]}),
    Bad("value of another dtype", ShapeError, "value", lambda c: {"value": c["value"].half()}),
    Bad("value on meta", ShapeError, "value", lambda c: {"value": on_meta(c["value"])}),
    *(Bad(f"range {x!r}", ArgumentError, "full_range", replaced(full_range=x)) for x in (None, 1, "all")),
    Bad("value for a cache of keys", ArgumentError, "value",
        lambda c: {"kv": KVView(c["kv"].key, None)}),
    *(Bad(f"kv with a {side} that overlaps itself", ShapeError, rf"kv\.{side}",
          lambda c, side=side: views(c, expanded, side)) for side in ("key", "value")),
    Bad("kv on meta", ShapeError, r"key\w*|kv|slots", lambda c: views(c, on_meta, *PARTS)),
]  # fmt: skip

STORE_PLAIN = [
    Bad("key of codes for a cache of floats", ShapeError, "key",
        lambda c: {"key": c["key"].to(torch.int8), "value": c["value"].to(torch.int8)}),
    Bad("key within the cache", ShapeError, "key", overlap_with_cache),
    Bad("value within the cache", ShapeError, "value",
        lambda c: {"value": c["kv"].value.cache[0, 3:6, 0].flatten(2)}),
    Bad("floats for a cache of integers", ShapeError, "key",
        lambda c: views(c, as_dtype(torch.int16), "key", "value")),
]  # fmt: skip

STORE_QUANTIZED = [
    Bad("key of codes", ShapeError, "key",
        lambda c: {"key": c["key"].to(torch.int8), "value": c["value"].to(torch.int8)}),
    *(Bad(f"{side} that overlaps itself", ShapeError, rf"kv\.{side}\.scale",
          lambda c, side=side: views(c, expanded, f"{side}_scale")) for side in ("key", "value")),
]  # fmt: skip


@rows(STORE)
@pytest.mark.parametrize("kind", [PLAIN, INT8, INT4], ids=str)
def test_store_refuses(bad: Bad, kind: Kind) -> None:
    assert_refused(ops.store, good_store(kind), bad)


@rows(STORE_PLAIN)
def test_plain_store_refuses(bad: Bad) -> None:
    assert_refused(ops.store, good_store(PLAIN), bad)


@rows(STORE_QUANTIZED)
@pytest.mark.parametrize("kind", [INT8, INT4], ids=str)
def test_quantized_store_refuses(bad: Bad, kind: Kind) -> None:
    assert_refused(ops.store, good_store(kind), bad)


# --- load ---------------------------------------------------------------------------------------------------


def good_load(kind: Kind) -> Call:
    return {"slots": slots(4, 4, 11), "kv": make_pool("B 2 H S D", kind).view(), "dtype": torch.float32}


LOAD = [
    *bad_slots("slots", 12, negative=True),
    *other_backends(),
    *(Bad(f"num_repeat {n!r}", ArgumentError, "num_repeat", replaced(num_repeat=n))
      for n in (0, -1, True, 1.5, None)),
    *(Bad(f"dtype {t}", ShapeError, "dtype", replaced(dtype=t))
      for t in (torch.float64, torch.int8, torch.int32, torch.bool)),
]  # fmt: skip


@rows(LOAD)
@pytest.mark.parametrize("kind", [PLAIN, INT8], ids=str)
def test_load_refuses(bad: Bad, kind: Kind) -> None:
    assert_refused(ops.load, good_load(kind), bad)


def test_load_refuses_a_dtype_that_one_side_does_not_hold() -> None:
    call = good_load(PLAIN)
    bad = Bad(
        "value of integers", ShapeError, "dtype.* value", lambda c: views(c, as_dtype(torch.int16), "value")
    )
    assert_refused(ops.load, call, bad)


def test_load_of_integers_is_no_float() -> None:
    bad = Bad("float32 of int8", ShapeError, "dtype", lambda c: {"dtype": torch.float32})
    assert_refused(ops.load, good_load(Kind(torch.int8)), bad)


# --- copy ---------------------------------------------------------------------------------------------------


def good_copy() -> Call:
    source, target = make_pool("B H S D", INT8, seed=1), make_pool("B S H D", INT8, blocks=2, seed=2)
    return {
        "source": source.view(),
        "source_slots": slots(4, 4, 11),
        "target": target.view(),
        "target_slots": slots(7, 0, 3),
    }


def without(*names: str, argument: str) -> Change:
    return lambda c: views(c, lambda x: None, *names, argument=argument)


def on_target(how: Callable[[Tensor], Tensor], *names: str) -> Change:
    return lambda c: views(c, how, *names, argument="target")


def path_of(name: str) -> str:
    """A pattern for the attribute of a view that ``views`` calls ``name``."""
    return rf"{name.removesuffix('_scale')}\.{'scale' if name.endswith('scale') else 'cache'}"


COPY = [
    Bad("source_slots 2-D", ShapeError, "source_slots", replaced(source_slots=slots(1, 2, 3)[None])),
    Bad("target_slots 2-D", ShapeError, "target_slots", replaced(target_slots=slots(1, 2, 3)[None])),
    *bad_slots("source_slots", 12, negative=True),
    *bad_slots("target_slots", 8, negative=True),
    *other_backends(),
    Bad("source_slots too few", ShapeError, "source_slots|target_slots", replaced(source_slots=slots(1, 2))),
    Bad("target_slots too many", ShapeError, "target_slots", replaced(target_slots=slots(1, 2, 3, 4))),
    Bad("target on meta", ShapeError, "target|target_slots", on_target(on_meta, *PARTS)),
    Bad("target on meta with its slots", ShapeError, "target",
        lambda c: {**views(c, on_meta, *PARTS, argument="target"), "target_slots": on_meta(slots(1, 2, 3))}),
    Bad("target with fewer heads", ShapeError, r"target\.key", on_target(lambda x: x[:, :, :, :1], *PARTS)),
    Bad("target with fewer heads for values", ShapeError, "value",
        on_target(lambda x: x[:, :, :, :1], "value", "value_scale")),
    Bad("target narrower", ShapeError, r"target\.key", on_target(lambda x: x[..., :4], "key")),
    Bad("target of another dtype", ShapeError, r"target\.key",
        on_target(lambda x: x.view(torch.uint8), "key")),
    Bad("target with larger groups", ShapeError, r"target\.key\.scale",
        on_target(lambda x: x[..., :1], "key_scale")),
    Bad("target with other scales", ShapeError, r"target\.value\.scale",
        on_target(lambda x: x.view(torch.bfloat16), "value_scale")),
    *(Bad(f"{argument} without {'scales' if 'key_scale' in names else 'values'}", ArgumentError,
          rf"target\.{path_of(names[0])}", without(*names, argument=argument))
      for argument in ("source", "target")
      for names in (("key_scale", "value_scale"), ("value", "value_scale"))),
    *(Bad(f"target with a {name} that overlaps itself", ShapeError, rf"target\.{path_of(name)}",
          on_target(expanded, name)) for name in PARTS),
]  # fmt: skip


@rows(COPY)
def test_copy_refuses(bad: Bad) -> None:
    assert_refused(ops.copy, good_copy(), bad)


# --- what costs a sort --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [PLAIN, INT8], ids=str)
def test_debug_finds_a_slot_that_is_stored_twice(kind: Kind) -> None:
    twice = Bad("twice", ArgumentError, "slots must be distinct, got slot 7", replaced(slots=slots(7, -1, 7)))
    with debug():
        assert_refused(ops.store, good_store(kind), twice)


def test_debug_finds_a_slot_that_is_copied_to_twice() -> None:
    twice = Bad(
        "twice", ArgumentError, "target_slots must be distinct", replaced(target_slots=slots(7, 0, 7))
    )
    with debug():
        assert_refused(ops.copy, good_copy(), twice)


def test_debug_allows_reading_a_slot_twice_and_skipping_many() -> None:
    with debug():
        call = good_store(PLAIN)
        ops.store(**{**call, "slots": slots(-1, -1, 7)})
        key, _ = ops.load(slots(7, 7), call["kv"])
        ops.copy(**good_copy())
    assert torch.equal(key[0].view(torch.int32), call["key"][2].view(torch.int32))
    assert torch.equal(key[1].view(torch.int32), call["key"][2].view(torch.int32))


@pytest.mark.parametrize(
    ("operator", "call"),
    [
        (ops.store, good_store(PLAIN)),
        (ops.store, good_store(INT4)),
        (ops.load, good_load(INT8)),
        (ops.copy, good_copy()),
    ],
    ids=["store", "store int4", "load", "copy"],
)
def test_the_calls_that_the_rows_change_are_good(operator: Callable[..., object], call: Call) -> None:
    with debug():
        operator(**call)
