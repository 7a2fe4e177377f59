"""One sequence's attention by Triton has the same bits in any batch, layout, page size and spelling."""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import pytest
import torch
from ops import kernels
from ops.attention import Case, make_case
from ops.cases import alone, codes
from ops.kernels import DEVICE, attend
from ops.native import native
from ops.pools import ALL_AXES, PLAIN, Kind
from oracles.bits import assert_same_bits
from oracles.pairs import in_turn, pairs_in_turn

from kvloom import ops
from kvloom.core.indexing import CacheIndex
from kvloom.core.views import KVView, Side
from kvloom.ops import Scores, alibi_slopes

pytestmark = kernels.pytestmark

NEW, STORED = [1, 5, 20, 1], [600, 70, 131, 1]
KINDS = [PLAIN, Kind(torch.bfloat16), codes(8, 32), codes(4, 32)]
each_kind = pytest.mark.parametrize("kind", KINDS, ids=str)


def large_case(kind: Kind, new: list[int] = NEW, stored: list[int] = STORED, **how: object) -> Case:
    how = {"page_size": 16, "block_size": 16, "head_dim": 32, **how}
    return make_case(new, stored, kind=kind, dtype=torch.float32 if kind is PLAIN else torch.bfloat16, **how)


@functools.cache
def expected_of(kind: Kind, stored: int) -> torch.Tensor:
    """Attention of two sequences, of which the first has ``stored`` tokens, in pages of 16."""
    return attend(large_case(kind, [1, 18], [stored, 40]))


@each_kind
@pytest.mark.parametrize(
    "scores",
    [Scores(), Scores(window=33, sinks=torch.ones(4), alibi_slopes=alibi_slopes(4))],
    ids=["", "all"],
)
def test_sequences_alone_have_the_bits_of_the_batch(kind: Kind, scores: Scores) -> None:
    case = large_case(kind)
    parts = attend(case, scores).split(NEW)
    for b in range(len(NEW)):
        assert_same_bits(attend(alone(case, b), scores), parts[b], f"sequence {b}")


def test_order_of_the_batch_does_not_matter() -> None:
    case = large_case(PLAIN)
    parts, rows = attend(case).split(NEW), case.query.split(NEW)
    order = [2, 0, 3]
    few = Case(torch.cat([rows[b] for b in order]), case.kv, *zip(
        *((NEW[b], STORED[b], case.slots[b]) for b in order), strict=True), case.page_size)  # fmt: skip
    assert_same_bits(attend(few), torch.cat([parts[b] for b in order]), "output")


def test_a_batch_larger_than_one_step_of_planning() -> None:
    """More sequences than one step adds up, of few new tokens, of many, and of none."""
    new = [(1, 0, 17, 2)[b % 4] if b in (2, 129, 130, 131) else 1 for b in range(133)]
    case = make_case(new, [n + 3 for n in new], head_dim=16, kv_heads=1)
    parts = attend(case).split(new)
    for b in (0, 2, 127, 128, 130, 131, 132):
        assert_same_bits(attend(alone(case, b)), parts[b], f"sequence {b}")


@pytest.mark.parametrize(("axes", "kind"), in_turn(ALL_AXES, KINDS), ids=str)
def test_layouts_have_the_same_bits(axes: str, kind: Kind) -> None:
    case = large_case(kind, [1, 18], [80, 40], block_size=48, axes=axes)
    assert_same_bits(attend(case), expected_of(kind, 80), axes)


@pytest.mark.parametrize("kind", KINDS[2:], ids=str)
def test_pages_of_integer_products_have_the_same_bits(kind: Kind) -> None:
    """Keys and values whose slots are split otherwise."""
    case = large_case(kind, [1, 18], [80, 40], axes="B S H D")
    assert_same_bits(attend(replace(case, kv=native(case))), attend(case), "native")


@pytest.mark.parametrize(
    ("page_size", "block_size", "kind"),
    [(*sizes, kind) for sizes, kind in in_turn([(1, 16), (3, 4), (64, 32), (600, 8)], KINDS)],
    ids=str,
)
def test_pages_have_the_same_bits(page_size: int, block_size: int, kind: Kind) -> None:
    case = large_case(kind, [1, 18], [300, 40], page_size=page_size, block_size=block_size)
    assert_same_bits(attend(case), expected_of(kind, 300), "output")


@pytest.mark.parametrize(
    ("spelling", "kind", "dtype"),
    pairs_in_turn(["offset", "pages", "blocks", "slots", "tokens"], KINDS, [torch.int64, torch.int32]),
    ids=str,
)
def test_spellings_have_the_same_bits(spelling: str, kind: Kind, dtype: torch.dtype) -> None:
    case = large_case(kind, [1, 18], [300, 40], contiguous=True, page_size=4)
    got = attend(case, spelling=spelling, dtype=dtype, padding=-1)
    assert_same_bits(got, expected_of(kind, 300), "output")


def test_padding_and_width_of_the_table_do_not_matter() -> None:
    case = large_case(PLAIN)
    expected = attend(case)
    batch = case.batch(padding=2**62)
    wide = torch.cat((batch.index.table, batch.index.table.new_full((4, 100), 2**62)), dim=1)
    wider = ops.Batch(CacheIndex.pages(wide, case.page_size), batch.seqstarts, batch.kvstarts)
    with kernels.there(case.query, case.kv, wider) as moved:
        assert_same_bits(ops.attend(*moved, backend="triton").cpu(), expected, "output")


def test_rows_of_a_token_table_may_begin_anywhere() -> None:
    case = make_case([2, 20], [37, 25], head_dim=16)
    expected, batch = attend(case), case.batch("tokens")
    table = torch.full((2 * batch.index.table.numel() + 9,), -1)
    table[9::2] = batch.index.table
    starts = torch.stack((batch.index.row_starts, torch.zeros(3, dtype=torch.int64)), dim=1)[:, 0]
    spread = ops.Batch(CacheIndex.tokens(table[9::2], starts), batch.seqstarts, batch.kvstarts)
    with kernels.there(case.query, case.kv, spread) as moved:
        assert_same_bits(ops.attend(*moved, backend="triton").cpu(), expected, "output")


@each_kind
def test_unread_slots_never_show(kind: Kind) -> None:
    short = {"new": [1, 18], "stored": [80, 40]}
    expected = attend(large_case(kind, poison=0.0, **short))
    assert bool(expected.isfinite().all())
    for poison in (math.nan, math.inf, 1e4):
        assert_same_bits(attend(large_case(kind, poison=poison, **short)), expected, f"poison {poison}")


def test_unread_columns_of_the_mask_never_show() -> None:
    case = make_case([2, 17], [3, 20], head_dim=16)
    mask = torch.zeros(19, 25)
    expected = attend(case, Scores(mask=mask))
    mask[:2, 3:] = mask[2:, :3] = mask[2:, 23:] = math.nan
    assert_same_bits(attend(case, Scores(mask=mask)), expected, "output")


def test_strides_of_the_query_do_not_matter() -> None:
    case = large_case(PLAIN)
    expected = attend(case)
    case.query = case.query.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    assert_same_bits(attend(case), expected, "output")


@pytest.mark.parametrize("head_dim", [8, 24, 40])
def test_nothing_around_the_tokens_shows(head_dim: int) -> None:
    """NaN before, behind and between the tokens, and in every slot that holds none."""
    case = make_case([2, 17], [37, 25], axes="B S H D", head_dim=head_dim)
    expected = attend(case)
    assert bool(expected.isfinite().all())
    sides = []
    for side in (x.cache for x in case.kv.sides):
        padded = torch.full([n + 1 if i in (0, 3) else n for i, n in enumerate(side.shape)], math.nan)
        guarded = torch.full((padded.numel() + 128,), math.nan)[64:-64].view(padded.shape)
        guarded[: side.shape[0], :, :, : side.shape[3]] = side
        sides.append(guarded[: side.shape[0], :, :, : side.shape[3]])
    case.kv = KVView(*map(Side, sides))
    assert_same_bits(attend(case), expected, "output")


@pytest.mark.parametrize(("kind", "multiprocessors"), in_turn(KINDS, [1, 5, 64]), ids=str)
def test_number_of_programs_does_not_matter(
    kind: Kind, multiprocessors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvloom.ops.impl.triton.attending import launch as launcher

    case = large_case(kind)
    expected = attend(case)
    monkeypatch.setattr(launcher, "num_multiprocessors", lambda device: multiprocessors)
    assert_same_bits(attend(case), expected, "output")


def test_repeated_calls_have_the_same_bits() -> None:
    case = large_case(Kind(torch.bfloat16))
    expected = attend(case)
    for _ in range(20 if DEVICE == "cuda" else 2):
        assert_same_bits(attend(case), expected, "output")
