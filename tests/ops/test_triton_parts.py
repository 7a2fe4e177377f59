"""Triton's attention in parts: against the reference."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from ops import kernels
from ops.attention import Case, make_case
from ops.cases import codes, options
from ops.kernels import there
from ops.pools import PLAIN, Kind
from oracles.bits import FLOATS
from oracles.pairs import pairwise

from kvloom import ops
from kvloom.ops import AttendedPart, Scores

pytestmark = kernels.pytestmark

SCORES = options(4, 21, 360)
TOLERANCES = {torch.float32: 3e-6, torch.float16: 3e-3, torch.bfloat16: 3e-2}


def attend_part(case: Case, scores: Scores, prior: AttendedPart | None = None, **how: Any) -> AttendedPart:
    """By Triton's kernels."""
    names, values = zip(*how.items(), strict=True) if how else ((), ())
    before = (None, None) if prior is None else tuple(prior)
    with there(case.query, case.kv, case.batch(), scores, *values, *before) as moved:
        query, kv, batch, scores, *rest = moved
        options = dict(zip(names, rest[: len(names)], strict=True))
        prior = None if prior is None else AttendedPart(*rest[len(names) :])
        part = ops.attend_part(query, kv, batch, scores, prior=prior, backend="triton", **options)
        return AttendedPart(*(x.cpu() for x in part))


@pytest.mark.parametrize(
    ("kind", "dtype", "name"),
    pairwise([PLAIN, codes(8, 16), codes(4, 32)], FLOATS, ["default", "alibi", "sinks", "mask"]),
    ids=str,
)
def test_parts_are_those_of_the_reference(kind: Kind, dtype: torch.dtype, name: str) -> None:
    case = make_case([20, 1], [60, 300], kind=kind, dtype=dtype, head_dim=32, page_size=16, block_size=16)
    case.first_visible = [2, 0]
    scores = SCORES.get(name, Scores())
    skip = {"skip": 9, "skip_from": torch.tensor([45, 0])}
    first, second = {}, skip
    expected: AttendedPart | None = None
    actual: AttendedPart | None = None
    for how in (second, first):
        expected = ops.attend_part(
            case.query, case.kv, case.batch(), scores, prior=expected, backend="reference", **how
        )
        actual = attend_part(case, scores, prior=actual, **how)
        for a, b in zip(actual, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


def test_weight_of_zero_hides_nan_of_the_other_part() -> None:
    case = make_case([20, 1], [60, 300])
    alone = attend_part(case, Scores())
    for lse in (-math.inf, -1000.0):
        bad = AttendedPart(torch.full_like(alone.out, math.nan), torch.full_like(alone.lse, lse))
        for a, b in zip(attend_part(case, Scores(), prior=bad), alone, strict=True):
            torch.testing.assert_close(a, b)
    nothing = attend_part(case, Scores(), skip=10**9)
    assert bool((nothing.lse == -math.inf).all()) and not nothing.out.any()
    broken = alone._replace(lse=torch.full_like(alone.lse, math.nan))
    assert all(bool(x.isnan().all()) for x in attend_part(case, Scores(), prior=broken))
