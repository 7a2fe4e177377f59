"""Options at the ends of their ranges mean the same to the reference and to the compiled kernels."""

from __future__ import annotations

import math
import sys

import pytest
import torch
from ops.attention import Case, make_case
from ops.pools import INT8, PLAIN, Kind
from oracles.bits import assert_same_bits
from torch import Tensor

from kvloom import ops
from kvloom.core.indexing import CacheIndex
from kvloom.errors import ArgumentError
from kvloom.ops import Batch, Scores
from kvloom.ops.impl import cpu

NEW, STORED = [3, 1, 5], [7, 6, 5]
BACKEND = pytest.mark.parametrize(
    "backend",
    ["reference", pytest.param("cpu", marks=pytest.mark.skipif(cpu.ISA is None, reason=str(cpu.WHY_NOT)))],
)
KIND = pytest.mark.parametrize("kind", [PLAIN, INT8], ids=str)


def attend(case: Case, scores: Scores, backend: str) -> Tensor:
    return ops.attend(case.query, case.kv, case.batch(), scores, backend=backend)


@BACKEND
@KIND
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("window", [7, 100, 2**31, 2**62, 2**63 - 3, 2**63 - 2, 2**63 - 1])
def test_window_of_all_tokens_is_none(window: int, is_causal: bool, kind: Kind, backend: str) -> None:
    case = make_case(NEW, STORED, kind=kind)
    expected = attend(case, Scores(is_causal=is_causal), backend)
    got = attend(case, Scores(is_causal=is_causal, window=window), backend)
    assert_same_bits(got, expected, "output")


@BACKEND
@KIND
@pytest.mark.parametrize("softcap", [1e30, 3.4028234e38, 3.5e38, 1e300, sys.float_info.max])
def test_softcap_far_above_every_score_changes_nothing(softcap: float, kind: Kind, backend: str) -> None:
    case = make_case(NEW, STORED, kind=kind)
    torch.testing.assert_close(
        attend(case, Scores(softcap=softcap), backend), attend(case, Scores(), backend), rtol=1e-5, atol=1e-5
    )


@BACKEND
@KIND
@pytest.mark.parametrize("softcap", [1e-30, 1.2e-38, 1e-45, 1e-300, 5e-324])
def test_softcap_far_below_every_score_makes_them_equal(softcap: float, kind: Kind, backend: str) -> None:
    case = make_case(NEW, STORED, kind=kind)
    torch.testing.assert_close(
        attend(case, Scores(softcap=softcap), backend), attend(case, Scores(scale=0.0), backend)
    )


@BACKEND
@KIND
@pytest.mark.parametrize("page_size", [7, 2**31, 2**61, 2**62, 2**62 + 1, 2**63 - 1])
def test_pages_larger_than_any_cache(page_size: int, kind: Kind, backend: str) -> None:
    """Only the first page of a row is used; what follows it is padding."""
    case = make_case(NEW, STORED, kind=kind, contiguous=True)
    expected = ops.attend(case.query, case.kv, case.batch("offset"), backend=backend)
    table = torch.tensor([[row[0], 2**63 - 1, -(2**63), -1] for row in case.slots])
    batch = case.batch()
    batch = Batch(CacheIndex.pages(table, page_size), batch.seqstarts, batch.kvstarts)
    assert_same_bits(ops.attend(case.query, case.kv, batch, backend=backend), expected, "output")


@pytest.mark.parametrize("page_size", [2**63, 2**64, 10**30])
def test_page_size_beyond_int64_is_refused(page_size: int) -> None:
    for make, name in ((CacheIndex.pages, "page_size"), (CacheIndex.blocks, "block_size")):
        with pytest.raises(ArgumentError, match=rf"^{name} must be below 9223372036854775808, got"):
            make(torch.zeros(1, 1, dtype=torch.int64), page_size)


# --- more new tokens than stored ones -----------------------------------------------------------------------

PLACES = {
    "causal": (Scores(), 0),
    "causal behind a decoding one": (Scores(), 1),
    "window": (Scores(is_causal=False, window=4), 0),
    "window of decoding ones": (Scores(window=4), 3),
    "alibi": (Scores(is_causal=False, alibi_slopes=torch.ones(4)), 0),
    "alibi of decoding ones": (Scores(alibi_slopes=torch.ones(4)), 3),
}


@BACKEND
@pytest.mark.parametrize("stored", [0, 1, 3])
@pytest.mark.parametrize("what", PLACES)
def test_more_new_tokens_than_stored_ones_are_refused(what: str, stored: int, backend: str) -> None:
    case = make_case([2, 4, 1], [5, stored, 1])
    scores, case.decoding_batches = PLACES[what]
    with pytest.raises(ArgumentError) as raised:
        attend(case, scores, backend)
    assert str(raised.value) == f"kvstarts must give sequence 1 at least its 4 new tokens, got {stored}"


@BACKEND
@pytest.mark.parametrize(("scores", "decoding"), [(Scores(is_causal=False), 0), (Scores(), 2)], ids=str)
def test_queries_without_a_place_may_be_more_than_the_stored_tokens(
    scores: Scores, decoding: int, backend: str
) -> None:
    """As from a text to a shorter one: every query sees all there is."""
    case = make_case([2, 4, 1], [5, 2, 1])
    case.decoding_batches = decoding
    out = attend(case, scores, backend)
    key, value = case.keys_and_values()[1]
    scores_HqN = torch.einsum("thd,nhd->htn", case.query[2:6], key.repeat_interleave(2, dim=1))
    weights = (scores_HqN / math.sqrt(8)).softmax(-1)
    wanted = torch.einsum("htn,nhd->thd", weights, value.repeat_interleave(2, dim=1))
    torch.testing.assert_close(out[2:6], wanted)
