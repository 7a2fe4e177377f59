"""Bad arguments of attend."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from ops.attention import make_case, starts_of
from ops.pools import INT4, INT8, PLAIN, Kind
from ops.refusals import (
    PARTS,
    Bad,
    Call,
    Change,
    as_dtype,
    assert_refused,
    on_meta,
    other_backends,
    part,
    rows,
    views,
)
from torch import Tensor

from kvloom import ops
from kvloom.core.indexing import CacheIndex
from kvloom.core.views import KVView
from kvloom.errors import ArgumentError, ShapeError
from kvloom.ops import PositionalBias, Scores, alibi_slopes

NEW, STORED = [3, 1], [7, 6]


def good_call(kind: Kind = PLAIN, spelling: str = "pages") -> Call:
    """4 query rows with 4 heads over 13 stored tokens with 2 heads, with every option."""
    case = make_case(NEW, STORED, kind=kind, contiguous=spelling == "offset")
    bias = PositionalBias(torch.zeros(4, 4, 6), torch.ones(2, 3), torch.tensor([0, 5]))
    scores = Scores(mask=torch.zeros(4, 4, 13), alibi_slopes=alibi_slopes(4), sinks=torch.zeros(4), window=5,
                    softcap=9.0, positional_bias=bias)  # fmt: skip
    return {"query": case.query, "kv": case.kv, "batch": case.batch(spelling), "scores": scores}


def starts(name: str, total: int) -> list[Bad]:
    """Bad ``seqstarts`` or ``kvstarts``; ``total`` is their last entry."""

    def change(value: object) -> Change:
        return lambda c: part(c, "batch", **{name: value})

    return [
        Bad(f"{name} 2-D", ShapeError, name, change(torch.tensor([[0, 1, total]]))),
        Bad(f"{name} float", ShapeError, name, change(torch.tensor([0.0, 1, total]))),
        Bad(f"{name} int16", ShapeError, name, change(torch.tensor([0, 1, total], dtype=torch.int16))),
        Bad(f"{name} on meta", ShapeError, name, change(on_meta)),
        Bad(f"{name} list", ShapeError, name, change([0, 1, total])),
        Bad(f"{name} too long", ShapeError, "kvstarts", change(torch.tensor([0, 1, total, total]))),
        Bad(f"{name} too short", ShapeError, "kvstarts", change(torch.tensor([0, total]))),
        Bad(f"{name} not from 0", ArgumentError, name, change(torch.tensor([1, 2, total]))),
        Bad(f"{name} negative", ArgumentError, name, change(torch.tensor([0, -1, total]))),
        Bad(f"{name} from below 0", ArgumentError, name, change(torch.tensor([-1, 1, total]))),
        Bad(f"{name} decreasing", ArgumentError, name, change(torch.tensor([0, total, total - 1]))),
    ]


def with_page_size(size: object) -> Change:
    return lambda c: part(c, "batch", index=dataclasses.replace(c["batch"].index, page_size=size))


def index_rows(call: Call) -> Call:
    index = call["batch"].index
    return part(call, "batch", index=dataclasses.replace(index, table=index.table[:1]))


def table_entry(at: tuple[int, ...], value: int) -> Change:
    """Put ``value`` into the index."""

    def change(call: Call) -> Call:
        index = call["batch"].index
        table = index.table.clone()
        table[at] = value
        return part(call, "batch", index=dataclasses.replace(index, table=table))

    return change


def scored(**changes: object) -> Change:
    return lambda call: part(call, "scores", **changes)


def biased(**changes: object) -> Change:
    def change(call: Call) -> Call:
        return part(call, "scores", **part({"positional_bias": call["scores"].positional_bias},
                                           "positional_bias", **changes))  # fmt: skip

    return change


def queried(how: Callable[[Tensor], Tensor | None]) -> Change:
    return lambda call: {"query": how(call["query"])}


BAD = [
    *other_backends(),
    *starts("seqstarts", 4),
    *starts("kvstarts", 13),
    Bad("no starts", ShapeError, "kvstarts",
        lambda c: part(c, "batch", seqstarts=torch.tensor([]).long(), kvstarts=torch.tensor([]).long())),
    Bad("seqstarts end before the query", ArgumentError, "seqstarts",
        lambda c: part(c, "batch", seqstarts=torch.tensor([0, 1, 3]))),
    Bad("seqstarts end behind the query", ArgumentError, "seqstarts",
        lambda c: part(c, "batch", seqstarts=torch.tensor([0, 1, 5]))),
    *(Bad(f"decoding_batches {n!r}", ArgumentError, "decoding_batches",
          lambda c, n=n: part(c, "batch", decoding_batches=n)) for n in (-1, True, 1.5, None)),
    *(Bad(f"first_visible {name}", ShapeError, "first_visible",
          lambda c, x=x: part(c, "batch", first_visible=x)) for name, x in (
              ("of another batch", torch.zeros(7).long()), ("2-D", torch.zeros(3, 1).long()),
              ("of floats", torch.zeros(3)), ("on meta", torch.zeros(3, device="meta").long()))),
    Bad("kv of keys only", ArgumentError, "kv",
        lambda c: {"kv": KVView(c["kv"].key, None)}),
    Bad("kv on meta", ShapeError, r"key\w*|query|kv", lambda c: views(c, on_meta, *PARTS)),
    Bad("query 2-D", ShapeError, "query", queried(lambda x: x[0])),
    Bad("query 4-D", ShapeError, "query", queried(lambda x: x[None])),
    Bad("query narrower", ShapeError, "query", queried(lambda x: x[..., :4])),
    Bad("query wider", ShapeError, "query", queried(lambda x: x.repeat(1, 1, 2))),
    Bad("query of 3 heads over 2", ShapeError, "query", queried(lambda x: x[:, :3])),
    Bad("query float64", ShapeError, "query", queried(lambda x: x.double())),
    Bad("query int8", ShapeError, "query", queried(as_dtype(torch.int8))),
    Bad("query on meta", ShapeError, "query", queried(on_meta)),
    Bad("query None", ShapeError, "query", queried(lambda x: None)),
    Bad("query shorter than seqstarts", ArgumentError, "seqstarts|query|mask", queried(lambda x: x[:3])),
    *(Bad(f"page_size {size!r}", ArgumentError, "page_size", with_page_size(size))
      for size in (0, -1, True, 2.0, None, 2**63)),
    Bad("index with one row for two", ShapeError, "index", index_rows),
    Bad("index on meta", ShapeError, "index",
        lambda c: part(c, "batch", index=CacheIndex.pages(on_meta(c["batch"].index.table), 2))),
    Bad("mask 1-D", ShapeError, "mask", scored(mask=torch.zeros(13))),
    Bad("mask 4-D", ShapeError, "mask", scored(mask=torch.zeros(1, 4, 4, 13))),
    Bad("mask with fewer rows", ShapeError, "mask", scored(mask=torch.zeros(3, 13))),
    Bad("mask with more rows", ShapeError, "mask", scored(mask=torch.zeros(5, 13))),
    Bad("mask with fewer heads", ShapeError, "mask", scored(mask=torch.zeros(2, 4, 13))),
    Bad("mask one column short", ShapeError, "mask", scored(mask=torch.zeros(4, 12))),
    Bad("mask of one column for the last sequence", ShapeError, "mask", scored(mask=torch.zeros(4, 8))),
    Bad("mask of no columns", ShapeError, "mask", scored(mask=torch.zeros(4, 4, 0))),
    Bad("mask of booleans", ShapeError, "mask", scored(mask=torch.zeros(4, 13, dtype=torch.bool))),
    Bad("mask of integers", ShapeError, "mask", scored(mask=torch.zeros(4, 13, dtype=torch.int64))),
    Bad("mask on meta", ShapeError, "mask", scored(mask=on_meta)),
    *(Bad(f"{name} {what}", ShapeError, name, scored(**{name: how})) for name in ("alibi_slopes", "sinks")
      for what, how in {"of the key heads": lambda x: x[:2], "2-D": lambda x: x[None], "on meta": on_meta,
                        "of integers": as_dtype(torch.int64), "list": [0.0] * 4}.items()),
    Bad("positional_bias of a tensor", ArgumentError, "positional_bias",
        scored(positional_bias=torch.zeros(4, 4, 6))),
    *(Bad(f"{name} {what}", ShapeError, f"positional_bias.{name}", biased(**{name: how}))
      for name in ("coefficients", "frequencies", "first_position")
      for what, how in {"a row short": lambda x: x[:-1], "of one dimension more": lambda x: x[None],
                        "on meta": on_meta, "of booleans": as_dtype(torch.bool), "list": [0.0] * 4}.items()),
    Bad("coefficients of other pairs", ShapeError, "coefficients", biased(coefficients=lambda x: x[..., :4])),
    Bad("coefficients of the key heads", ShapeError, "coefficients", biased(coefficients=lambda x: x[:, :2])),
    Bad("coefficients of float64", ShapeError, "coefficients", biased(coefficients=as_dtype(torch.float64))),
    Bad("coefficients None", ShapeError, "coefficients", biased(coefficients=None)),
    Bad("positional_bias of nothing", ShapeError, "frequencies",
        scored(positional_bias=PositionalBias(None, None))),
    Bad("frequencies None", ShapeError, "frequencies", biased(frequencies=None)),
    Bad("frequencies of the query heads", ShapeError, "frequencies", biased(frequencies=torch.ones(4, 3))),
    Bad("frequencies of no pair", ShapeError, "frequencies", biased(frequencies=torch.ones(2, 0))),
    Bad("frequencies of 65 pairs", ShapeError, "frequencies",
        biased(frequencies=torch.ones(2, 65), coefficients=torch.zeros(4, 4, 130))),
    Bad("frequencies of float16", ShapeError, "frequencies", biased(frequencies=as_dtype(torch.float16))),
    *(Bad(f"window {n!r}", ArgumentError, "window", scored(window=n)) for n in (0, -1, True, 2.0, "3")),
    *(Bad(f"softcap {x!r}", ArgumentError, "softcap", scored(softcap=x)) for x in (0.0, -1.0, float("nan"))),
]  # fmt: skip


@rows(BAD)
@pytest.mark.parametrize("kind", [PLAIN, INT8, INT4], ids=str)
def test_attend_refuses(bad: Bad, kind: Kind) -> None:
    assert_refused(ops.attend, good_call(kind), bad)


@pytest.mark.parametrize("value", [-1, 2**63 - 1, -(2**63), 31, 10**6])
@pytest.mark.parametrize("at", [(0, 0), (0, 3), (1, 2)], ids=str)
def test_page_outside_the_cache_is_refused(at: tuple[int, int], value: int) -> None:
    call = good_call()
    num_slots = call["kv"].num_slots
    bad = Bad("entry", ArgumentError, "index", table_entry(at, num_slots if value == 31 else value))
    assert_refused(ops.attend, call, bad)


@pytest.mark.parametrize("at", [(0, 0), (0, 2), (1, 2)], ids=str)
def test_page_that_ends_behind_the_cache_is_refused(at: tuple[int, int]) -> None:
    """A full page of two slots whose first one is the last of the cache."""
    call = good_call()
    bad = Bad("entry", ArgumentError, "index", table_entry(at, call["kv"].num_slots - 1))
    assert_refused(ops.attend, call, bad)


@pytest.mark.parametrize("value", [-1, 2**63 - 1, 10**6])
@pytest.mark.parametrize("at", [0, 6, 7, 12])
def test_token_outside_the_cache_is_refused(at: int, value: int) -> None:
    bad = Bad("entry", ArgumentError, "index", table_entry((at,), value))
    assert_refused(ops.attend, good_call(spelling="tokens"), bad)


@pytest.mark.parametrize("value", [-1, 2**63 - 1, 10**6])
def test_start_outside_the_cache_is_refused(value: int) -> None:
    bad = Bad("entry", ArgumentError, "index", table_entry((1, 0), value))
    assert_refused(ops.attend, good_call(spelling="offset"), bad)


def test_a_flag_is_no_page_size() -> None:
    """Not even where the page size is 1."""
    bad = Bad("flag", ArgumentError, "page_size", with_page_size(True))
    assert_refused(ops.attend, good_call(spelling="slots"), bad)


def test_page_table_with_too_few_pages_is_refused() -> None:
    def narrow(call: Call) -> Call:
        return part(call, "batch", index=CacheIndex.pages(call["batch"].index.table[:, :3], 2))

    assert_refused(ops.attend, good_call(), Bad("narrow", ArgumentError, "index", narrow))


@pytest.mark.parametrize("row_starts", [[0, 8], [7, 7], [-7, 0], [0, -1]], ids=str)
def test_token_table_whose_rows_leave_it_is_refused(row_starts: list[int]) -> None:
    def change(call: Call) -> Call:
        table = call["batch"].index.table
        return part(call, "batch", index=CacheIndex.tokens(table, torch.tensor([*row_starts, 13])))

    assert_refused(
        ops.attend, good_call(spelling="tokens"), Bad("rows", ArgumentError, "index|kvstarts", change)
    )


@pytest.mark.parametrize("spelling", ["pages", "slots", "tokens", "offset"])
@pytest.mark.parametrize("kind", [PLAIN, INT8, INT4], ids=str)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
def test_the_calls_that_the_rows_change_are_good(kind: Kind, spelling: str, dtype: torch.dtype) -> None:
    call = good_call(kind, spelling)
    batch = call["batch"]
    batch = dataclasses.replace(batch, seqstarts=starts_of(NEW, dtype), kvstarts=starts_of(STORED, dtype))
    assert bool(ops.attend(**{**call, "batch": batch}).isfinite().all())
