"""Known mistakes: for a legal call, the results of somebody who makes it. Diagnosis compares with these."""

from typing import Final

from kvloom.conform.mistakes import (
    ascend,
    attention,
    codes,
    entries,
    leaving,
    others,
    recurrent,
    sides,
    storing,
)
from kvloom.conform.mistakes.making import Mistake

MISTAKES: Final[tuple[Mistake, ...]] = (
    *sides.MISTAKES,
    *leaving.MISTAKES,
    *storing.MISTAKES,
    *entries.MISTAKES,
    *codes.MISTAKES,
    *attention.MISTAKES,
    *ascend.MISTAKES,
    *others.MISTAKES,
    *recurrent.MISTAKES,
)
"""In no order; diagnosis tries them all."""

__all__ = ["MISTAKES", "Mistake"]
