"""Attention to latents with rope keys: that of keys which are both, whose values are the latents."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from ops.attention import Case, make_case
from ops.cases import alone, codes, options, waves
from ops.latents import HEADS, NEW, STORED, joined, latent_case
from ops.pools import PLAIN, Kind
from oracles.bits import FLOATS, assert_same_bits
from oracles.pairs import pairwise
from torch import Tensor

from kvloom import KVView, ops
from kvloom.errors import ArgumentError, ShapeError, UnsupportedError
from kvloom.ops import Scores, schemas
from kvloom.ops.attend_arguments import attend_arguments
from kvloom.ops.impl import cpu

SCORES = {"default": Scores()} | {
    name: x for name, x in options(HEADS, sum(NEW), sum(STORED)).items() if x.positional_bias is None
}
SIZES = [(64, 32), (512, 64), (40, 8), (17, 3), (576, 64), (16, 128), (32, 576)]
KINDS = [PLAIN, Kind(torch.float16), Kind(torch.bfloat16), codes(8, 8), codes(4, 8), codes(2, 8)]


def assert_near(actual: Tensor, case: Case, expected: Tensor) -> None:
    """Weights are rounded to 16 bits, or sums to 24, and values are at most about 5."""
    eps = torch.finfo(case.query.dtype).eps
    bound = 16 * eps if case.query.dtype == torch.float32 else 8 * eps
    torch.testing.assert_close(actual, expected, rtol=bound, atol=8 * bound)


@pytest.mark.parametrize(
    ("kind", "dtype", "case_number"), pairwise(KINDS, FLOATS, range(len(SCORES))), ids=str
)
def test_it_is_attention_to_both(kind: Kind, dtype: torch.dtype, case_number: int) -> None:
    name, sizes = list(SCORES)[case_number], SIZES[case_number % len(SIZES)]
    kind = PLAIN if kind.bits and any(n % 8 for n in sizes) else kind
    case, scores = latent_case(*sizes, kind=kind, dtype=dtype), SCORES[name]
    expected = ops.attend(case.query, joined(case), case.batch(), scores, backend="reference")
    for backend in ("auto", "reference"):
        actual = ops.attend(case.query, case.kv, case.batch(), scores, is_latent=True, backend=backend)
        assert actual.shape == (*case.query.shape[:2], sizes[0])
        assert_near(actual, case, expected)


@pytest.mark.parametrize(("kind", "heads"), pairwise(KINDS, [1, 16, 128]), ids=str)
def test_any_number_of_heads_reads_latents_once(kind: Kind, heads: int) -> None:
    case = latent_case(64, 16, kind=kind, heads=heads)
    expected = ops.attend(case.query, joined(case), case.batch(), backend="reference")
    assert_near(ops.attend(case.query, case.kv, case.batch(), is_latent=True), case, expected)


def test_latents_and_rope_keys_may_be_of_different_kinds() -> None:
    latents, rope = latent_case(64, 16, kind=codes(4, 16)), latent_case(64, 16)
    latents = replace(latents, slots=rope.slots, kv=KVView(latents.kv.key, rope.kv.value), loaded=[])
    expected = ops.attend(latents.query, joined(latents), latents.batch(), backend="reference")
    assert_near(ops.attend(latents.query, latents.kv, latents.batch(), is_latent=True), latents, expected)


@pytest.mark.parametrize("kind", [PLAIN, codes(8, 8), codes(4, 8)], ids=str)
def test_parts_make_the_whole(kind: Kind) -> None:
    case, batch = latent_case(kind=kind), latent_case(kind=kind).batch()
    newest = ops.attend_part(case.query, case.kv, batch, Scores(window=9), is_latent=True)
    both = ops.attend_part(case.query, case.kv, batch, is_latent=True, skip=9, prior=newest)
    whole = ops.attend_part(case.query, case.kv, batch, is_latent=True)
    reference = ops.attend_part(case.query, case.kv, batch, is_latent=True, backend="reference")
    assert_near(both.out, case, whole.out)
    for a, b in ((both.lse, whole.lse), (whole.lse, reference.lse)):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("kind", "dtype"), pairwise(KINDS, FLOATS), ids=str)
def test_a_sequence_has_the_bits_that_it_has_alone(kind: Kind, dtype: torch.dtype) -> None:
    case = latent_case(kind=kind, dtype=dtype)
    all_of_them = ops.attend(case.query, case.kv, case.batch(), is_latent=True)
    first = 0
    for b, count in enumerate(NEW):
        own = alone(case, b)
        of_sequence = all_of_them[first : first + count]
        assert_same_bits(ops.attend(own.query, own.kv, own.batch(), is_latent=True), of_sequence, "sequence")
        for i in range(count):  # one query after the other
            one = alone(case, b, 1, STORED[b] - count + 1 + i)
            row = ops.attend(one.query, one.kv, one.batch(), is_latent=True)
            assert_same_bits(row, of_sequence[i : i + 1], "row")
        first += count


@pytest.mark.parametrize("where", ["latent", "rope"])
def test_hidden_values_have_no_effect_and_seen_ones_do(where: str) -> None:
    case = latent_case()
    expected = ops.attend(case.query, case.kv, case.batch(), is_latent=True)
    side = case.kv.key if where == "latent" else case.kv.value
    assert side is not None
    last = case.slots[0][-1]  # which the first queries of sequence 0 do not see
    side.cache[last // 4, last % 4] = math.nan
    for backend in ("auto", "reference"):
        actual = ops.attend(case.query, case.kv, case.batch(), is_latent=True, backend=backend)
        assert actual[2].isnan().all()
        assert_near(actual[:2], case, expected[:2])
        assert_near(actual[3:], case, expected[3:])


def test_out_is_written() -> None:
    case = latent_case()
    out = torch.empty(sum(NEW), HEADS, 64)
    assert ops.attend(case.query, case.kv, case.batch(), is_latent=True, out=out) is out
    assert_same_bits(out, ops.attend(case.query, case.kv, case.batch(), is_latent=True), "out")


@pytest.mark.parametrize("kind", [PLAIN, codes(4, 8)], ids=str)
def test_without_values_there_are_no_rope_keys(kind: Kind) -> None:
    case = latent_case(kind=kind)
    query, alone = case.query[..., :64].contiguous(), KVView(case.kv.key, None)
    expected = ops.attend(query, KVView(case.kv.key, case.kv.key), case.batch())
    assert_same_bits(ops.attend(query, alone, case.batch(), is_latent=True), expected, "out")
    part = ops.attend_part(query, alone, case.batch(), is_latent=True)
    torch.testing.assert_close(part.out, expected)


def test_what_does_not_fit_is_refused_by_name() -> None:
    case = latent_case()
    batch = case.batch()
    several = make_case(NEW, STORED, kv_heads=2, axes="B S H D")
    with pytest.raises(ShapeError, match="kv must have latents and rope keys of one head, got 2 of 8"):
        ops.attend(case.query, several.kv, several.batch(), is_latent=True)
    with pytest.raises(ShapeError, match=r"query must be .*Dk=96.*got \[24, 4, 64\]"):
        ops.attend(case.query[..., :64], case.kv, batch, is_latent=True)
    with pytest.raises(ShapeError, match=r"query must be .*Dk=64.*got \[24, 4, 96\]"):
        ops.attend(case.query, KVView(case.kv.key, None), batch, is_latent=True)
    with pytest.raises(ArgumentError, match="kv must have values"):
        ops.attend(case.query, KVView(several.kv.key, None), several.batch(), is_latent=True)
    biased = Scores(positional_bias=waves(sum(NEW), HEADS, 3, kv_heads=1))
    for attend in (ops.attend, ops.attend_part):
        with pytest.raises(UnsupportedError, match="no positional_bias"):
            attend(case.query, case.kv, batch, biased, is_latent=True)


@pytest.mark.parametrize("kind", [PLAIN, codes(8, 8)], ids=str)
def test_operators_pass_opcheck(kind: Kind) -> None:
    case = latent_case(16, 8, kind=kind)
    arguments = attend_arguments(case.query, case.kv, case.batch(), Scores(), 24)
    operators = [(schemas.attend_latent, ()), (schemas.attend_latent_part, (2, None, None, None))]
    for operator, more in operators:
        assert set(torch.library.opcheck(operator, (*arguments, *more)).values()) == {"SUCCESS"}


@pytest.mark.compile
@pytest.mark.skipif(cpu.WHY_NOT is not None, reason=str(cpu.WHY_NOT))
def test_it_compiles() -> None:
    case, batch = latent_case(), latent_case().batch()

    def attend(query: Tensor) -> Tensor:
        return ops.attend(query, case.kv, batch, is_latent=True)

    assert_same_bits(
        torch.compile(attend, backend="aot_eager", fullgraph=True)(case.query), attend(case.query), "out"
    )
