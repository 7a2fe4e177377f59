"""Diagnosis: the known mistake that gives the same wrong results."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from kvloom.conform.comparing import agrees
from kvloom.conform.describe import Operator, Results, Vector
from kvloom.conform.mistakes import MISTAKES, Mistake
from kvloom.conform.operators import OPERATORS


class Cause(NamedTuple):
    """Mistake that gives the results of a target."""

    name: str
    text: str


def explain(
    operator: Operator, vector: Vector, got: Mapping[str, Tensor], names: frozenset[str] | None = None
) -> list[Cause]:
    """Find mistakes that give exactly the wrong results of a target.

    Args:
        operator: Operator of the vector.
        vector: A legal call.
        got: The wrong results.
        names: Names of the mistakes to try; all if ``None``.
    """
    found: dict[str, Cause] = {}
    for mistake in MISTAKES:
        if mistake.name in found or (names is not None and mistake.name not in names):
            continue
        wrong = _result_of(mistake, operator, vector)
        if wrong is not None and agrees(operator, wrong, got) and not _is_right(operator, vector, wrong):
            found[mistake.name] = Cause(mistake.name, mistake.text)
    return list(found.values())


def decisive(failures: Sequence[Sequence[Cause]], passed: Sequence[Vector]) -> list[str]:
    """Names of the mistakes that explain the most failures, and more than half of them.

    Of several, those that would fail on the fewest of the vectors that passed.

    Args:
        failures: Causes of each failure.
        passed: Legal vectors that passed.
    """
    counts: dict[str, int] = {}
    for causes in failures:
        for cause in causes:
            counts[cause.name] = counts.get(cause.name, 0) + 1
    most = max(counts.values(), default=0)
    if 2 * most <= len(failures):
        return []
    names = [name for name, count in counts.items() if count == most]
    if len(names) > 1:
        seen = {name: sum(_is_seen(name, vector) for vector in passed) for name in names}
        names = [name for name in names if seen[name] == min(seen.values())]
    return names


def _is_seen(name: str, vector: Vector) -> bool:
    """Whether a target with the mistake fails on the vector, in every variant of the mistake."""
    operator = OPERATORS[vector.dialect]
    ways = [_result_of(mistake, operator, vector) for mistake in MISTAKES if mistake.name == name]
    found = [wrong for wrong in ways if wrong is not None]
    return bool(found) and not any(_is_right(operator, vector, wrong) for wrong in found)


def _is_right(operator: Operator, vector: Vector, results: Results) -> bool:
    return agrees(operator, vector.expected or {}, results)


def _result_of(mistake: Mistake, operator: Operator, vector: Vector) -> Results | None:
    expected = {name: x.clone() for name, x in (vector.expected or {}).items()}
    padding = {name: x for name, x in expected.items() if "@" in name}
    try:
        wrong = mistake.wrong(operator, operator.complete(vector.call), expected)
    except Exception:  # the mistake does not apply to this call
        return None
    return None if wrong is None else {**wrong, **padding}
