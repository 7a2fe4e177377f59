"""Triton's attention to latents with rope keys: against float64, the reference, and itself."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from ops import kernels
from ops.attention import Case, float32_error, plain
from ops.cases import alone, codes, golden, options
from ops.kernels import there
from ops.latents import joined, latent_case
from ops.pools import PLAIN, Kind
from oracles.attention import assert_as_good_as_plain
from oracles.bits import FLOATS, assert_same_bits
from oracles.pairs import in_turn, pairwise
from torch import Tensor

from kvloom import KVView, ops
from kvloom.errors import UnsupportedError
from kvloom.ops import AttendedPart, Scores
from kvloom.ops.impl.triton import configs

pytestmark = kernels.pytestmark

BF16 = Kind(torch.bfloat16)
PAGES = {"page_size": 16, "block_size": 16}
SHORT = {"new": [1, 18], "stored": [260, 30], **PAGES}
SCORES = {"default": Scores()} | {
    name: x for name, x in options(4, 19, 290).items() if x.positional_bias is None
}
KINDS = [PLAIN, BF16, codes(8, 16), codes(4, 16)]
each_kind = pytest.mark.parametrize("kind", KINDS, ids=str)


def attend(case: Case, scores: Scores | None = None) -> Tensor:
    """By Triton's kernels."""
    with there(case.query, case.kv, case.batch(), scores or Scores()) as moved:
        return ops.attend(*moved, is_latent=True, backend="triton").cpu()


def attend_part(case: Case, scores: Scores, prior: AttendedPart | None = None, **how: Any) -> AttendedPart:
    """By Triton's kernels."""
    before = (None, None) if prior is None else tuple(prior)
    with there(case.query, case.kv, case.batch(), scores, *before) as (query, kv, batch, scores, *before):
        prior = None if prior is None else AttendedPart(*before)
        part = ops.attend_part(query, kv, batch, scores, is_latent=True, prior=prior, backend="triton", **how)
        return AttendedPart(*(x.cpu() for x in part))


def assert_right(case: Case, scores: Scores | None = None) -> None:
    scores, whole = scores or Scores(), replace(case, kv=joined(case), loaded=[])
    expected = golden(whole, scores), plain(whole, scores), float32_error(whole, scores)
    assert_as_good_as_plain(attend(case, scores), *expected)


# --- numbers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "heads", "bits", "dtype"),
    pairwise([(512, 64), (256, 32), (40, 8)], [1, 16, 128], [0, 16, 8, 4, 2], FLOATS),
    ids=str,
)
def test_sizes(sizes: tuple[int, int], heads: int, bits: int, dtype: torch.dtype) -> None:
    """Sequences of few new tokens and of many, over latents of as many groups as are products, and fewer."""
    kind = codes(bits, sizes[1]) if 0 < bits < 16 else BF16 if bits else PLAIN
    few = {"new": [1], "stored": [35]} if heads == 128 else {"new": [2, 17], "stored": [35, 20]}
    assert_right(latent_case(*sizes, kind, dtype, heads, **few, **PAGES))


@pytest.mark.parametrize(
    ("sizes", "kind"), in_turn([(17, 3), (96, 40), (320, 16), (1, 256)], [BF16]), ids=str
)
def test_sizes_that_are_no_powers_of_two(sizes: tuple[int, int], kind: Kind) -> None:
    dtype = torch.float32 if kind is PLAIN else torch.bfloat16
    assert_right(latent_case(*sizes, kind, dtype, heads=64, new=[17], stored=[35], **PAGES))


@pytest.mark.parametrize(
    ("kinds", "dtype"),
    in_turn([(codes(4, 32), codes(8, 32)), (codes(8, 64), BF16), (BF16, codes(8, 16))], FLOATS),
    ids=str,
)
def test_latents_and_rope_keys_of_different_kinds(kinds: tuple[Kind, Kind], dtype: torch.dtype) -> None:
    latents, rope = (latent_case(128, 64, kind, dtype, **SHORT) for kind in kinds)
    assert_right(replace(latents, kv=KVView(latents.kv.key, rope.kv.value), loaded=[]))


@pytest.mark.parametrize(("name", "kind"), in_turn(list(SCORES), [PLAIN, codes(8, 16)]), ids=str)
def test_scores(name: str, kind: Kind) -> None:
    dtype = torch.float32 if kind is PLAIN else torch.bfloat16
    case = latent_case(64, 16, kind, dtype, **SHORT)
    case.first_visible = [30, 0]
    assert_right(case, SCORES[name])


@pytest.mark.parametrize(
    ("kind", "name", "dtype"),
    pairwise([PLAIN, codes(8, 16), codes(4, 16)], ["window", "sinks", "mask"], FLOATS),
    ids=str,
)
def test_parts_are_those_of_the_reference(kind: Kind, name: str, dtype: torch.dtype) -> None:
    case, scores = latent_case(64, 16, kind, dtype, **SHORT), SCORES[name]
    near = {torch.float32: 3e-6, torch.float16: 3e-3, torch.bfloat16: 3e-2}[dtype]
    expected: AttendedPart | None = None
    actual: AttendedPart | None = None
    for how in ({"skip": 9}, {}):
        expected = ops.attend_part(
            case.query,
            case.kv,
            case.batch(),
            scores,
            is_latent=True,
            prior=expected,
            backend="reference",
            **how,
        )
        actual = attend_part(case, scores, prior=actual, **how)
        for a, b in zip(actual, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=near, atol=near)


def test_without_rope_keys_latents_are_keys_and_values() -> None:
    case = latent_case(64, 16, **SHORT)
    case = replace(case, query=case.query[..., :64].contiguous())
    expected = kernels.attend(replace(case, kv=KVView(case.kv.key, case.kv.key)))
    assert_same_bits(attend(replace(case, kv=KVView(case.kv.key, None))), expected, "output")


# --- bits ---------------------------------------------------------------------------------------------------


@each_kind
def test_sequences_alone_have_the_bits_of_the_batch(kind: Kind) -> None:
    new, dtype = [1, 5, 17], torch.float32 if kind is PLAIN else torch.bfloat16
    case = latent_case(32, 16, kind, dtype, new=new, stored=[260, 40, 30], **PAGES)
    for b, part in enumerate(attend(case).split(new)):
        assert_same_bits(attend(alone(case, b)), part, f"sequence {b}")


@pytest.mark.parametrize("kind", [BF16, codes(4, 16)], ids=str)
def test_rows_have_the_bits_that_they_have_one_by_one(kind: Kind) -> None:
    case = latent_case(32, 16, kind, torch.bfloat16, new=[3], stored=[260], **PAGES)
    for i, row in enumerate(attend(case)):
        one = alone(case, 0, 1, 258 + i)
        assert_same_bits(attend(one)[0], row, f"row {i}")


@each_kind
def test_pages_have_the_same_bits(kind: Kind) -> None:
    dtype = torch.float32 if kind is PLAIN else torch.bfloat16
    how = {"new": [1, 17], "stored": [70, 20]}
    expected = attend(latent_case(32, 16, kind, dtype, **how, **PAGES))
    for page_size, block_size in ((1, 16), (3, 4), (64, 32)):
        pages = {"page_size": page_size, "block_size": block_size}
        got = attend(latent_case(32, 16, kind, dtype, **how, **pages))
        assert_same_bits(got, expected, f"pages of {page_size}")


# --- hidden -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "heads", "bad"), pairwise(["latent", "rope"], [1, 64], [math.nan, math.inf]), ids=str
)
def test_only_rows_that_see_what_is_broken_are_nan(where: str, heads: int, bad: float) -> None:
    case = latent_case(40, 8, BF16, torch.bfloat16, heads, new=[3, 17], stored=[40, 20], **PAGES)
    expected = attend(case)
    assert bool(expected.isfinite().all())
    side = case.kv.key if where == "latent" else case.kv.value
    assert side is not None
    for slots in case.slots:  # the last token, which the last row sees
        side.cache.view(-1, side.head_dim)[slots[-1]] = bad
    actual, sees = attend(case), [2, 19]
    assert bool(actual[sees].isnan().all())
    hidden = [i for i in range(20) if i not in sees]
    torch.testing.assert_close(actual[hidden], expected[hidden])


# --- limits -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(520, 8), (8, 264)], ids=str)
def test_sizes_beyond_the_limits_are_refused(sizes: tuple[int, int]) -> None:
    case = latent_case(*sizes, new=[1], stored=[3])
    most = f"latents up to 512 and rope keys up to 256 elements, got {sizes[0]} and {sizes[1]}; use 'auto'"
    with pytest.raises(UnsupportedError, match=f"'triton' attends to {most}"):
        attend(case)


def test_latents_that_are_read_once_differ_by_rounding_only(monkeypatch: pytest.MonkeyPatch) -> None:
    case = latent_case(**SHORT, kind=BF16)
    expected, pinned = attend(case), configs.pinned
    monkeypatch.setattr(configs, "pinned", lambda x: pinned(x)._replace(reads_once=True))
    torch.testing.assert_close(attend(case), expected, rtol=1e-5, atol=1e-6)
