"""Torch's attention over gathered tokens errs no more than others may, and says where it is not taken."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from ops.attention import Case, exact, float32_error, make_case, plain
from ops.cases import waves
from ops.pools import INT4, INT8, PLAIN, Kind
from oracles.attention import assert_as_good_as_plain
from oracles.bits import FLOATS, assert_same_bits
from oracles.gathering import gathering
from oracles.pairs import pairwise
from torch import Tensor

from kvloom import ops
from kvloom.errors import ArgumentError, UnsupportedError
from kvloom.ops import BatchInvariance, Counts, Scores
from kvloom.ops.gathered import attention as gathered
from kvloom.ops.gathered import flash

NEW, STORED = [3, 1, 6, 6, 0], [7, 12, 11, 11, 4]
SIZES = {
    "as one": {"head_dim": 32, "ratio": 1},
    "grouped": {"head_dim": 64, "ratio": 4},
    "wide": {"head_dim": 256, "kv_heads": 1},
    "unequal": {"head_dim": 48, "value_dim": 32, "axes": "B S H D"},
    "longer values": {"head_dim": 20, "value_dim": 40, "axes": "B H S D"},
}
SHOWN = {"all": {}, "window": {"window": 4}, "one": {"window": 1}, "beyond": {"window": 100}}


def counts_of(case: Case) -> Counts:
    first = None if case.first_visible is None else tuple(case.first_visible)
    return Counts(tuple(case.new), tuple(case.stored), first)


def attend(case: Case, scores: Scores = ops.Scores(), spelling: str = "pages", **more: Any) -> Tensor:  # noqa: B008
    batch = replace(case.batch(spelling), counts=counts_of(case))
    return ops.attend(case.query, case.kv, batch, scores, **more)


def is_taken(case: Case, scores: Scores, counts: Counts | None) -> bool:
    with gathering():
        batch = replace(case.batch(), counts=counts)
        return gathered.is_gathered(case.query, case.kv, batch, scores, is_latent=False)


@pytest.mark.parametrize(
    ("size", "shown", "kind", "dtype"),
    pairwise([*SIZES], [*SHOWN], [PLAIN, Kind(torch.float16), Kind(torch.bfloat16), INT8, INT4], FLOATS),
    ids=str,
)
def test_ragged_batches_have_the_results_of_the_definition(
    size: str, shown: str, kind: Kind, dtype: torch.dtype
) -> None:
    case, scores = make_case(NEW, STORED, kind=kind, dtype=dtype, **SIZES[size]), Scores(**SHOWN[shown])  # type: ignore[arg-type]
    with gathering() as calls:
        actual = attend(case, scores)
    assert len(calls) == 1
    assert_as_good_as_plain(actual, exact(case, scores), plain(case, scores), float32_error(case, scores))


@pytest.mark.parametrize("spelling", ["blocks", "slots", "tokens"])
@pytest.mark.parametrize(
    "first", [None, [2, 0, 1, 1, 4], [5, 12, 8, 9, 0]], ids=["all", "padded", "within the new"]
)
def test_hidden_tokens_and_spellings(spelling: str, first: list[int] | None) -> None:
    case = make_case(NEW, STORED)
    case.first_visible = first
    with gathering() as calls:
        actual = attend(case, spelling=spelling)
    assert len(calls) == 1
    torch.testing.assert_close(actual, exact(case, Scores()).float(), rtol=1e-5, atol=1e-6)


def test_few_new_tokens_stay_where_they_are() -> None:
    """Rows of sequences that are not gathered have the bits of the other backend."""
    case = make_case(NEW, STORED)
    with gathering(least_rows=12) as calls:  # 6 new tokens of 2 heads
        actual = attend(case)
    alone = ops.attend(case.query, case.kv, case.batch())
    assert len(calls) == 1
    assert_same_bits(actual[:4], alone[:4], "rows of 3 and 1 new tokens")
    torch.testing.assert_close(actual, alone)
    with gathering(least_rows=13) as calls:
        assert_same_bits(attend(case), alone, "output")
    assert not calls


def test_no_more_is_gathered_at_once_than_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    case, sizes = make_case([6] * 5, [11] * 5), list[int]()
    whole = attend(case)
    call = gathered.call

    def loading(backend: str, name: str, device: torch.device, slots: Tensor, *arguments: Any) -> Any:
        sizes.append(slots.shape[0])
        return call(backend, name, device, slots, *arguments)

    monkeypatch.setattr(gathered, "call", loading)
    one = 11 * 2 * 2 * case.query.shape[2] * 4
    with gathering(most_bytes=2 * one):
        torch.testing.assert_close(attend(case), whole)
    assert sizes == [2, 2, 1]
    with gathering(most_bytes=1):
        torch.testing.assert_close(attend(case), whole)
    assert sizes[3:] == [1] * 5


def test_layers_of_a_step_share_a_plan() -> None:
    case = make_case(NEW, STORED)
    batch = replace(case.batch(), counts=counts_of(case))
    with gathering():
        ops.attend(case.query, case.kv, batch)
        plans = dict(batch.counts.plans)  # type: ignore[union-attr]
        ops.attend(case.query, case.kv, batch)
        assert batch.counts is not None
        assert batch.counts.plans == plans


def test_scores_that_torch_lacks_are_computed_in_place() -> None:
    case = make_case(NEW, STORED)
    four = torch.ones(4)
    others = [
        Scores(mask=torch.zeros(16, 45)),
        Scores(alibi_slopes=four),
        Scores(softcap=5.0),
        Scores(positional_bias=waves(16, 4, 2)),
        Scores(is_causal=False),
    ]
    counts = counts_of(case)
    assert is_taken(case, Scores(), counts)
    assert not any(is_taken(case, scores, counts) for scores in others)
    assert not is_taken(case, Scores(), None)
    with BatchInvariance():
        assert not is_taken(case, Scores(), counts)
    assert not gathered.is_gathered(
        case.query, case.kv, replace(case.batch(), counts=counts), Scores(), is_latent=False
    ), "on a CPU kernels in place take less time"


def test_out_is_written_and_backends_by_name_are_taken() -> None:
    case = make_case(NEW, STORED)
    out = torch.full_like(case.query, 7.0)
    with gathering() as calls:
        assert attend(case, out=out) is out
        assert len(calls) == 1
        reference = attend(case, backend="reference")
        assert len(calls) == 1
    torch.testing.assert_close(out, reference)


def test_there_is_no_gradient() -> None:
    case = make_case(NEW, STORED)
    case.query.requires_grad_()
    with gathering(), pytest.raises(UnsupportedError, match="attend has no gradient"):
        attend(case).sum().backward()


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        (Counts((3, 1), (7, 12)), "counts must be of 5 sequences, got 2"),
        (Counts((3, 1, 6, 5, 0), (7, 12, 11, 11, 4)), "counts must sum to the 16 rows of query, got 15"),
        (Counts((3, 1, 6, 6, 0), (7, 12, 11, 5, 4)), "counts.stored must give sequence 3 at least"),
        (Counts((3, 1, 6, 6, 0), (7, 12, 11, 10, 4)), "counts.stored must be [7, 12, 11, 11, 4] as in the"),
        (Counts((3, 1, 6, 6, 0), (7, 12, 11, 11, 4), (1,) * 5), "counts.first must be [0, 0, 0, 0, 0]"),
    ],
    ids=str,
)
def test_counts_that_are_not_those_of_the_batch(counts: Counts, said: str) -> None:
    case = make_case(NEW, STORED)
    with gathering(), pytest.raises(ArgumentError, match=re.escape(said)):
        ops.attend(case.query, case.kv, replace(case.batch(), counts=counts))


@pytest.mark.parametrize("window", [None, 4])
def test_flash_attention_is_told(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch's operator is told on a device, and what it says."""
    case = make_case([6, 6], [11, 11], head_dim=20, ratio=2)
    scores = Scores(window=window, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0]))

    def operator(
        query: Tensor, key: Tensor, value: Tensor, new: None, seen: None, most_new: int, most_seen: int,
        dropout: float, is_causal: bool, has_mask: bool, *, scale: float, window_size_left: int,
        window_size_right: int,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        assert new is seen is None
        assert (dropout, has_mask) == (0.0, False)
        assert (most_new, most_seen) == (query.shape[1], key.shape[1])
        assert query.shape[3] == key.shape[3] == value.shape[3] == 24
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        behind = torch.arange(most_new).unsqueeze(1) + most_seen - most_new - torch.arange(most_seen)
        hidden = behind < -window_size_right
        if not is_causal:
            hidden |= behind > window_size_left
        assert is_causal == (window_size_left == -1)
        logits = ((q @ k.mT) * scale).masked_fill(hidden, float("-inf"))
        return (logits.softmax(-1) @ v).transpose(1, 2), logits.logsumexp(-1), query, query, query

    def on_a_device(
        query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None
    ) -> tuple[Tensor, Tensor]:
        out, lse = flash._flash(*flash._of_one_width(query, key, value), scale, window)
        found = out[..., : value.shape[3]].transpose(1, 2), lse.transpose(1, 2)
        torch.testing.assert_close(found, flash.attention_part(query, key, value, scale, window))
        return found

    monkeypatch.setattr(flash, "_FLASH", operator)
    monkeypatch.setattr(gathered, "attention_part", on_a_device)
    with gathering() as calls:
        torch.testing.assert_close(attend(case, scores), exact(case, scores).float(), rtol=1e-5, atol=1e-6)
    assert len(calls) == 1


@pytest.mark.parametrize("window", [None, 3])
def test_this_torch_has_the_operator(window: int | None) -> None:
    """With these arguments, by what it says of tensors without memory."""
    query, key = torch.empty(2, 8, 5, 16, device="meta"), torch.empty(2, 4, 9, 16, device="meta")
    out, lse = flash._flash(query, key, key, 1.0, window)
    assert out.shape == query.shape
    assert lse.shape == query.shape[:3]
    assert lse.dtype == torch.float32


@pytest.mark.parametrize(
    ("size", "shown", "dtype"),
    pairwise([*SIZES], [*SHOWN], FLOATS),
    ids=str,
)
def test_sinks_take_a_part_of_the_sum(size: str, shown: str, dtype: torch.dtype) -> None:
    case = make_case(NEW, STORED, dtype=dtype, **SIZES[size])  # type: ignore[arg-type]
    case.first_visible = [5, 0, 8, 9, 0]
    sinks = torch.tensor([0.5, -torch.inf, 20.0, -3.0]).repeat(8)[: case.query.shape[1]]
    scores = Scores(sinks=sinks.to(dtype), **SHOWN[shown])  # type: ignore[arg-type]
    with gathering() as calls:
        actual = attend(case, scores)
    assert len(calls) == 1
    assert_as_good_as_plain(actual, exact(case, scores), plain(case, scores), float32_error(case, scores))


@pytest.mark.parametrize("kind", [PLAIN, INT4], ids=str)
@pytest.mark.parametrize("skip", [1, 4, 6, 11, 40])
@pytest.mark.parametrize("scores", [Scores(), Scores(window=5), Scores(window=4, scale=0.3)], ids=str)
@pytest.mark.parametrize("first", [None, [2, 0, 1, 7, 4]], ids=["all", "padded"])
def test_parts_leave_out_the_newest_tokens(
    kind: Kind, skip: int, scores: Scores, first: list[int] | None
) -> None:
    """Of every query, whatever a window shows of them; and with few new tokens beside many."""
    case = make_case(NEW, STORED, kind=kind)
    case.first_visible = first
    batch = replace(case.batch(), counts=counts_of(case))
    expected = ops.attend_part(case.query, case.kv, case.batch(), scores, skip=skip, backend="reference")
    for least_rows in (1, 12):
        with gathering(least_rows) as calls:
            actual = ops.attend_part(case.query, case.kv, batch, scores, skip=skip)
        assert len(calls) == 1
        assert (actual.out.dtype, actual.lse.dtype) == (torch.float32, torch.float32)
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


def test_other_parts_are_computed_in_place() -> None:
    case = make_case(NEW, STORED)
    batch = replace(case.batch(), counts=counts_of(case))
    part = ops.attend_part(case.query, case.kv, batch)
    others: list[dict[str, Any]] = [
        {},
        {"skip": 3, "prior": part},
        {"skip": 3, "skip_from": torch.zeros(5, dtype=torch.int64)},
        {"skip": 3, "scores": Scores(sinks=torch.ones(4))},
        {"skip": 3, "backend": "reference"},
    ]
    for how in others:
        with gathering() as calls:
            found = ops.attend_part(case.query, case.kv, batch, **how)
        assert not calls
        torch.testing.assert_close(found, ops.attend_part(case.query, case.kv, case.batch(), **how))
    case.query.requires_grad_()
    with gathering(), pytest.raises(UnsupportedError, match="attend_part has no gradient"):
        ops.attend_part(case.query, case.kv, batch, skip=3).out.sum().backward()
