"""Mistakes that somebody might make: each is found, and nearly all are called by their cause."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("onnxruntime")
pytest.importorskip("safetensors")
from conform.planted import PLANTED
from conform.planting import (
    APPEND,
    DYNAMIC,
    FLASH,
    GQA,
    RIGHT,
    SCATTER,
    STATIC,
    UPDATE,
    Planted,
    answered,
    asked,
    right,
)

from kvloom.conform import causes
from kvloom.conform.describe import Call, Operator, Results
from kvloom.conform.mistakes import Mistake
from kvloom.conform.operators import OPERATORS
from kvloom.conform.running import Report, run
from kvloom.conform.vectors import Vector, published, read

NAMES = [f"{p.dialect} {p.cause}" for p in PLANTED]
ENOUGH, SLOW = 40, ("pmx", "group_query_attention", "linear_attention")
"""Legal vectors of a slow dialect; rare cases of the others are further back."""


@pytest.fixture(scope="module", autouse=True)
def each_mistake_once() -> Iterator[None]:
    """What a known mistake gives for a vector does not depend on the target: it is computed for the first."""
    compute = causes._result_of
    known: dict[tuple[int, Vector], Results | None] = {}

    def once(mistake: Mistake, operator: Operator, vector: Vector) -> Results | None:
        key = id(mistake), vector
        if key not in known:
            known[key] = compute(mistake, operator, vector)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(causes, "_result_of", once)
        yield


@functools.cache
def legal(dialect: str) -> list[Vector]:
    return [vector for vector in read(published(), dialect) if vector.expected is not None]


def judged(planted: Planted) -> Report:
    vectors = legal(planted.dialect)
    is_slow = any(name in planted.dialect for name in SLOW)
    return run(planted.target(), vectors[:ENOUGH] if is_slow else vectors, "planted")


def test_there_are_sixty_over_all_dialects() -> None:
    assert len(set(NAMES)) == len(NAMES) >= 60
    assert {planted.dialect for planted in PLANTED} == set(RIGHT) == set(OPERATORS)


@pytest.mark.parametrize("dialect", RIGHT)
def test_what_mistakes_are_planted_in_is_right(dialect: str) -> None:
    report = run(right(dialect), legal(dialect))
    assert not report.failures and report.count("passed") > 50


@pytest.mark.parametrize("planted", PLANTED, ids=NAMES)
def test_each_is_caught_and_has_its_name_and_no_other(planted: Planted) -> None:
    report = judged(planted)
    assert report.failures and not report.passed
    assert report.cause is not None and report.cause.name == planted.cause
    assert {cause.name for outcome in report.outcomes for cause in outcome.causes} == {planted.cause}
    shown = sum(outcome.difference is not None for outcome in report.failures)
    assert report.explained == shown or "refused" in report.failures[-1].message


def flipped(before: Call, results: Results, call: Call) -> Results:
    """The lowest bit of the first element of every result."""
    for x in results.values():
        if x.numel():
            x.view(-1)[:1].view(torch.uint8)[0] ^= 1
    return results


def one_for_zero(before: Call, results: Results, call: Call) -> Results:
    """1 wherever 0 is."""
    return {name: torch.where(x == 0, torch.ones_like(x), x) for name, x in results.items()}


NAMELESS = (
    answered(STATIC, "", flipped),
    answered(DYNAMIC, "", flipped),
    answered(SCATTER, "", flipped),
    answered(FLASH, "", one_for_zero),
    answered(GQA, "", flipped),
    answered(APPEND, "", one_for_zero),
    answered(UPDATE, "", flipped),
)


@pytest.mark.parametrize("planted", NAMELESS, ids=lambda planted: planted.dialect)
def test_what_is_no_known_mistake_has_no_name(planted: Planted) -> None:
    report = judged(planted)
    assert len(report.failures) > 10 and report.cause is None and not report.explained
    assert not any(outcome.causes for outcome in report.outcomes)


def test_of_two_mistakes_the_more_frequent_one_is_named_with_its_count() -> None:
    def both(call: Call) -> Call:
        if call["slot_mapping"].numel() and call["key"].dtype == torch.float16:
            return {"key": call["key"] + 1}
        return {"key": call["value"], "value": call["key"]}

    report = judged(asked(FLASH, "", both))
    assert report.cause is not None and report.cause.name == "value for key"
    assert len(report.failures) / 2 < report.explained < len(report.failures)


def test_what_lies_behind_the_length_of_a_row_stays_or_is_zero() -> None:
    def behind(value: int | None) -> Planted:
        def change(before: Call, results: Results, call: Call) -> Results:
            for name in ("present_key", "present_value"):
                for b, last in enumerate(before["seqlens_k"].tolist()):
                    stored = max(last + 1, before["query"].shape[1])  # padding of a prompt is stored, too
                    past = before[name.replace("present", "past")][b, :, stored:]
                    results[name][b, :, stored:] = past if value is None else value
            return results

        return answered(GQA, "", change)

    assert judged(behind(0)).passed and judged(behind(None)).passed
    assert not judged(behind(3)).passed
