"""Attention in parts: results and logarithms of sums against float64, and parts that make a whole."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch
from ops.attention import Case, bias_terms, float32_error, make_case, plain, starts_of
from ops.cases import codes, fewest_tokens_in_tiles, golden, options
from ops.pools import INT4, INT8, PLAIN, Kind
from oracles.attention import assert_as_good_as_plain
from oracles.bits import FLOATS, assert_same_bits
from torch import Tensor

from kvloom import Batch, ops
from kvloom.errors import ArgumentError, ShapeError, UnsupportedError
from kvloom.ops import AttendedPart, Scores, alibi_slopes
from kvloom.ops.impl import cpu

NEW, STORED = [3, 1, 20, 2], [7, 530, 60, 2]
SCORES = options(4, sum(NEW), sum(STORED))


@pytest.fixture(params=["auto", "reference"])
def attend_part(request: pytest.FixtureRequest) -> partial[AttendedPart]:
    return partial(ops.attend_part, backend=request.param)


def logits(case: Case, scores: Scores, skip: int, skip_from: list[int]) -> list[Tensor]:
    """Of each sequence ``[Hq, Q, N]`` float64, -inf where a query sees no key, the sink in a last column."""
    found, rows, columns = [], starts_of(case.new).tolist(), starts_of(case.stored).tolist()
    for b, (key, _) in enumerate(case.keys_and_values()):
        query = case.query[rows[b] : rows[b + 1]].double().transpose(0, 1)
        key = key.double().transpose(0, 1).repeat_interleave(query.shape[0] // key.shape[1], 0)
        x = query @ key.mT
        if scores.positional_bias is not None:
            x = x + bias_terms(scores.positional_bias, b, rows[b], rows[b + 1], case.stored[b], 2).sum(-1)
        x = x * (1 / math.sqrt(query.shape[2]) if scores.scale is None else scores.scale)
        if scores.softcap is not None:
            x = scores.softcap * torch.tanh(x / scores.softcap)
        if scores.mask is not None:
            x = x + scores.mask[..., rows[b] : rows[b + 1], columns[b] : columns[b + 1]].double()
        position = torch.arange(case.stored[b] - case.new[b], case.stored[b]).unsqueeze(1)
        token = torch.arange(case.stored[b])
        if scores.alibi_slopes is not None:
            x = x + scores.alibi_slopes.double().view(-1, 1, 1) * (token - position)
        hidden = torch.full(x.shape[1:], False)
        if scores.alibi_slopes is not None or scores.is_causal:
            hidden |= token > position
        if scores.window is not None:
            hidden |= token <= position - scores.window
        if skip:
            hidden |= (token > position - skip) & (token >= skip_from[b])
        x = x.masked_fill(hidden, -math.inf)
        if scores.sinks is not None:
            sinks = scores.sinks.double().view(-1, 1, 1).expand(-1, case.new[b], 1)
            x = torch.cat((x, sinks), -1)
        found.append(x)
    return found


def assert_lse(
    part: AttendedPart, case: Case, scores: Scores, skip: int = 0, skip_from: tuple[int, ...] = ()
) -> None:
    each = logits(case, scores, skip, list(skip_from) or [0] * len(case.new))
    expected = torch.cat([x.logsumexp(-1).mT for x in each])
    sizes = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}[case.query.dtype]
    torch.testing.assert_close(part.lse.double(), expected, rtol=sizes, atol=4 * sizes)


@pytest.mark.parametrize("scores", [Scores(), *SCORES.values()], ids=["default", *SCORES])
@pytest.mark.parametrize("kind", [PLAIN, INT4], ids=str)
def test_part_of_all_tokens_is_attention(
    attend_part: partial[AttendedPart], kind: Kind, scores: Scores
) -> None:
    case = make_case(NEW, STORED, kind=kind)
    part = attend_part(case.query, case.kv, case.batch(), scores)
    assert (part.out.dtype, part.lse.dtype) == (torch.float32, torch.float32)
    assert_same_bits(
        part.out,
        ops.attend(case.query, case.kv, case.batch(), scores, backend=attend_part.keywords["backend"]),
        "out",
    )
    assert_lse(part, case, scores)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("kind", [PLAIN, Kind(torch.bfloat16), INT8, codes(8, 32), codes(4, 64)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 192])
def test_every_kernel_says_its_sums(
    attend_part: partial[AttendedPart], head_dim: int, kind: Kind, dtype: torch.dtype
) -> None:
    case = make_case(
        [1, 40], [530, 70], kind=kind, dtype=dtype, head_dim=head_dim, page_size=16, block_size=16
    )
    part = attend_part(case.query, case.kv, case.batch())
    assert_as_good_as_plain(
        part.out.to(dtype), golden(case, Scores()), plain(case, Scores()), float32_error(case, Scores())
    )
    assert_lse(part, case, Scores())


@pytest.mark.parametrize("scores", [Scores(), SCORES["alibi"], SCORES["mask"], Scores(window=30)])
@pytest.mark.parametrize("skip", [1, 5, 64, 10**30])
@pytest.mark.parametrize("skip_from", [(), (2, 500, 0, 9)])
def test_newest_tokens_are_left_out(
    attend_part: partial[AttendedPart], scores: Scores, skip: int, skip_from: tuple[int, ...]
) -> None:
    case = make_case(NEW, STORED, kind=INT8)
    skip = min(skip, 2**62)
    part = attend_part(
        case.query, case.kv, case.batch(), scores,
        skip=skip, skip_from=torch.tensor(skip_from) if skip_from else None,
    )  # fmt: skip
    assert_lse(part, case, scores, skip, skip_from)
    assert not part.out[part.lse == -math.inf].any()


def window_and_rest(
    attend_part: partial[AttendedPart], case: Case, scores: Scores, skip: int, skip_from: Tensor | None
) -> AttendedPart:
    """The newest tokens of each query, and then all others; sinks count once."""
    batch = case.batch()
    first = torch.zeros(len(case.new), dtype=torch.int64)
    first = first if batch.first_visible is None else batch.first_visible
    if skip_from is not None:
        first = torch.maximum(first, skip_from)
    recent = replace(scores, window=min(skip, scores.window or skip), sinks=None)
    newest = attend_part(case.query, case.kv, replace(batch, first_visible=first), recent)
    return attend_part(case.query, case.kv, batch, scores, skip=skip, skip_from=skip_from, prior=newest)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("kind", [PLAIN, codes(4, 32)], ids=str)
@pytest.mark.parametrize(
    "scores",
    [Scores(), SCORES["alibi"], SCORES["all"], SCORES["sinks"]],
    ids=["default", "alibi", "all", "sinks"],
)
@pytest.mark.parametrize("skip_from", [None, [2, 500, 55, 0]])
def test_two_parts_are_the_whole(
    attend_part: partial[AttendedPart],
    kind: Kind,
    dtype: torch.dtype,
    scores: Scores,
    skip_from: list[int] | None,
) -> None:
    case = make_case(NEW, STORED, kind=kind, dtype=dtype, head_dim=32, page_size=16, block_size=16)
    case.first_visible = [0, 3, 50, 1]
    floor = None if skip_from is None else torch.tensor(skip_from)
    part = window_and_rest(attend_part, case, scores, 9, floor)
    assert_as_good_as_plain(
        part.out.to(dtype), golden(case, scores), plain(case, scores), 2 * float32_error(case, scores)
    )
    whole = attend_part(case.query, case.kv, case.batch(), scores)
    sizes = 4e-6 if dtype == torch.float32 else 4e-3 if dtype == torch.float16 else 4e-2
    torch.testing.assert_close(part.lse, whole.lse, rtol=sizes, atol=sizes)


@pytest.mark.skipif(cpu.ISA is None, reason="a matrix product of torch has bits of its own for each size")
@pytest.mark.parametrize("kind", [PLAIN, INT4], ids=str)
def test_tokens_one_by_one_have_the_bits_of_all_at_once(kind: Kind) -> None:
    attend_part = partial(ops.attend_part)
    case = make_case([40], [600], kind=kind, dtype=torch.float16, head_dim=32, page_size=16, block_size=16)
    assert fewest_tokens_in_tiles(case) == math.inf
    whole = window_and_rest(attend_part, case, Scores(), 25, torch.tensor([570]))
    for i in range(40):
        stored = 561 + i
        one = Case(case.query[i : i + 1], case.kv, [1], [stored], [case.slots[0][:stored]], case.page_size)
        part = window_and_rest(attend_part, one, Scores(), 25, torch.tensor([570]))
        assert_same_bits(part.out[0], whole.out[i], "out")
        assert_same_bits(part.lse[0], whole.lse[i], "lse")


def test_part_without_tokens_changes_nothing(attend_part: partial[AttendedPart]) -> None:
    case = make_case([1, 3], [5, 600])
    nothing = attend_part(case.query, case.kv, case.batch(), skip=10**9)
    assert bool((nothing.lse == -math.inf).all()) and not nothing.out.any()
    alone = attend_part(case.query, case.kv, case.batch())
    for prior, other in ((nothing, {}), (alone, {"skip": 10**9}), (nothing, {"skip": 10**9})):
        part = attend_part(case.query, case.kv, case.batch(), prior=prior, **other)
        expected = nothing if prior is nothing and other else alone
        assert_same_bits(part.out, expected.out, "out")
        torch.testing.assert_close(part.lse, expected.lse, rtol=1e-6, atol=0)


def test_weight_of_zero_hides_nan_of_the_other_part(attend_part: partial[AttendedPart]) -> None:
    case = make_case([2], [600])
    alone = attend_part(case.query, case.kv, case.batch())
    for lse in (-math.inf, -1000.0):
        bad = AttendedPart(torch.full_like(alone.out, math.nan), torch.full_like(alone.lse, lse))
        part = attend_part(case.query, case.kv, case.batch(), prior=bad)
        torch.testing.assert_close(part.out, alone.out)
        torch.testing.assert_close(part.lse, alone.lse)
    key = case.kv.value
    assert key is not None
    key.cache.fill_(math.nan)
    other = AttendedPart(torch.ones_like(alone.out), torch.full_like(alone.lse, 1000.0))
    part = attend_part(case.query, case.kv, case.batch(), prior=other)
    assert_same_bits(part.out, other.out, "out")
    seen = attend_part(case.query, case.kv, case.batch(), prior=other._replace(lse=alone.lse))
    assert bool(seen.out.isnan().all())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_broken_scores_break_what_they_are_merged_into(
    attend_part: partial[AttendedPart], bad: float
) -> None:
    case = make_case([1], [70])
    alone = attend_part(case.query, case.kv, case.batch())
    broken = attend_part(torch.full_like(case.query, bad), case.kv, case.batch())
    assert bool(broken.lse.isnan().all()) and bool(broken.out.isnan().all())
    merged = attend_part(case.query, case.kv, case.batch(), prior=broken)
    assert bool(merged.lse.isnan().all()) and bool(merged.out.isnan().all())
    assert bool(alone.out.isfinite().all())


def test_few_threads_and_many_give_the_same_bits() -> None:
    case = make_case([1, 30], [3000, 900], kind=INT4, page_size=16, block_size=16, head_dim=64)
    before, results = torch.get_num_threads(), []
    try:
        for count in (1, 4):
            torch.set_num_threads(count)
            results.append(window_and_rest(partial(ops.attend_part), case, SCORES["sinks"], 33, None))
    finally:
        torch.set_num_threads(before)
    for a, b in pairwise(results):
        assert_same_bits(a.out, b.out, "out")
        assert_same_bits(a.lse, b.lse, "lse")


@pytest.mark.parametrize(
    ("error", "match", "change"),
    [
        (ArgumentError, "skip must be", {"skip": 0}),
        (ArgumentError, "skip must be", {"skip": 1.5}),
        (ShapeError, "skip_from must", {"skip": 1, "skip_from": torch.zeros(3, dtype=torch.int64)}),
        (ShapeError, "skip_from must", {"skip": 1, "skip_from": torch.zeros(2)}),
        (ArgumentError, "prior must be an AttendedPart, got int", {"prior": 3}),
        (ArgumentError, "prior must be an AttendedPart, got tuple", {"prior": (torch.zeros(4, 4, 8),)}),
        (ShapeError, r"prior\.out must", {"prior": AttendedPart(torch.zeros(4, 4, 9), torch.zeros(4, 4))}),
        (ShapeError, r"prior\.out must", {"prior": AttendedPart(None, None)}),
        (ShapeError, r"prior\.lse must", {"prior": AttendedPart(torch.zeros(4, 4, 8), torch.zeros(4, 3))}),
        (ShapeError, r"prior\.lse must",
         {"prior": AttendedPart(torch.zeros(4, 4, 8), torch.zeros(4, 4).half())}),
        (ArgumentError, r"prior\.out must be contiguous",
         {"prior": AttendedPart(torch.zeros(4, 4, 16)[..., ::2], torch.zeros(4, 4))}),
    ],
)  # fmt: skip
def test_bad_arguments_are_refused(
    attend_part: partial[AttendedPart], error: type[Exception], match: str, change: dict[str, object]
) -> None:
    case = make_case([1, 3], [5, 6])
    with pytest.raises(error, match=match):
        attend_part(case.query, case.kv, case.batch(), **change)


def test_more_new_tokens_than_stored_ones_are_refused(attend_part: partial[AttendedPart]) -> None:
    case = make_case([1, 3], [5, 6])
    batch = Batch(case.batch().index, torch.tensor([0, 1, 4]), torch.tensor([0, 5, 7]))
    with pytest.raises(ArgumentError, match="kvstarts must give sequence 1 at least its 3 new tokens"):
        attend_part(case.query, case.kv, batch, Scores(is_causal=False), skip=2)


def test_no_gradient(attend_part: partial[AttendedPart]) -> None:
    case = make_case([1], [5])
    part = attend_part(case.query.requires_grad_(), case.kv, case.batch())
    with pytest.raises(UnsupportedError, match="no gradient"):
        part.out.sum().backward()


def test_compiled() -> None:
    case = make_case([2], [9], kind=INT4)
    torch.library.opcheck(
        torch.ops.kvloom.attend_part.default,
        (*_arguments(case), 3, torch.tensor([4]), torch.randn(2, 4, 8), torch.randn(2, 4)),
    )


def _arguments(case: Case) -> tuple[object, ...]:
    from kvloom.ops.attend_arguments import attend_arguments

    return attend_arguments(case.query, case.kv, case.batch(), Scores(alibi_slopes=alibi_slopes(4)), 8)
