"""The nearest cause of a difference among known mistakes."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from kvloom.conform.comparing import agrees, differing
from kvloom.conform.describe import Operator, Results
from kvloom.conform.mistakes import MISTAKES, Mistake
from kvloom.conform.vectors import Vector

_NEAR = 0.9
"""Of the elements that differ, those that a mistake must explain to be near."""


class Cause(NamedTuple):
    """A mistake that explains a difference, wholly or nearly."""

    name: str
    text: str
    is_exact: bool


def explain(
    operator: Operator, vector: Vector, got: Mapping[str, Tensor], names: frozenset[str] | None = None
) -> list[Cause]:
    """Mistakes that give what was given, exact ones alone if there are any.

    Args:
        operator: Of the vector.
        vector: A legal call.
        got: The wrong results.
        names: Try these only; all if ``None``.
    """
    exact: dict[str, Cause] = {}
    near: dict[str, Cause] = {}
    for mistake in MISTAKES:
        if mistake.name in exact or (names is not None and mistake.name not in names):
            continue
        wrong = _result_of(mistake, operator, vector)
        if wrong is None or agrees(operator, wrong, vector.expected or {}):
            continue
        if agrees(operator, _with_free(wrong, vector), got):
            exact[mistake.name] = Cause(mistake.name, mistake.text, True)
        elif _explains(operator, vector, wrong, got) >= _NEAR:
            near.setdefault(mistake.name, Cause(mistake.name, mistake.text, False))
    return list((exact or near).values())


def most_common(causes: Sequence[Sequence[Cause]]) -> Cause | None:
    """The cause of most failures; an exact one before a near one."""
    counts = Counter(cause for each in causes for cause in each)
    return max(counts, key=lambda cause: (counts[cause], cause.is_exact), default=None)


def _result_of(mistake: Mistake, operator: Operator, vector: Vector) -> Results | None:
    try:
        return mistake.wrong(operator, vector)
    except Exception:  # this call cannot be made with this mistake
        return None


def _with_free(wrong: Results, vector: Vector) -> Results:
    free = {name: x for name, x in (vector.expected or {}).items() if "@" in name}
    return {**wrong, **free}


def _explains(operator: Operator, vector: Vector, wrong: Results, got: Mapping[str, Tensor]) -> float:
    """The part of the elements that differ which ``wrong`` has as they are."""
    total = same = 0
    for name, expected in (vector.expected or {}).items():
        if "@" in name or name not in got or name not in wrong:
            continue
        if not got[name].shape == wrong[name].shape == expected.shape:
            return 0.0
        how, free = operator.how(name), (vector.expected or {}).get(f"{name}@free")
        differs = differing(expected, got[name], how, free)
        total += int(differs.sum())
        same += int((differs & ~differing(wrong[name], got[name], how, free)).sum())
    return same / total if total else 0.0
