"""Mistakes that somebody might make: each is found, and nearly all are called by their cause."""

from __future__ import annotations

import pytest

pytest.importorskip("onnxruntime")
pytest.importorskip("safetensors")
from conform.planted import PLANTED, RIGHT, Planted, right

from kvloom.conform.operators import OPERATORS
from kvloom.conform.running import Report, run
from kvloom.conform.vectors import PUBLISHED, read

NAMES = [f"{p.dialect} {p.cause}" for p in PLANTED]
ENOUGH = 60
"""Legal vectors of a slow dialect; rare cases of the others are further back."""


def judged(planted: Planted) -> Report:
    vectors = [vector for vector in read(PUBLISHED, planted.dialect) if vector.expected is not None]
    return run(planted.target(), vectors[:ENOUGH] if "pmx" in planted.dialect else vectors, "planted")


def test_there_are_sixty_over_all_dialects() -> None:
    assert len(set(NAMES)) == len(NAMES) >= 60
    assert {planted.dialect for planted in PLANTED} == set(RIGHT) == set(OPERATORS)


@pytest.mark.parametrize("dialect", RIGHT)
def test_what_mistakes_are_planted_in_is_right(dialect: str) -> None:
    legal = (vector for vector in read(PUBLISHED, dialect) if vector.expected is not None)
    report = run(right(dialect), legal)
    assert not report.failures and report.count("passed") > 50


@pytest.mark.parametrize("planted", PLANTED, ids=NAMES)
def test_each_is_caught_and_named(planted: Planted) -> None:
    report = judged(planted)
    assert report.failures and not report.passed
    assert report.cause is not None and report.cause.name == planted.cause
