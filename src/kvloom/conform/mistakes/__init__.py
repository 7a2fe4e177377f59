"""Known mistakes: the wrong results of a legal call with each, for diagnosis."""

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
"""All known mistakes, in no particular order."""

__all__ = ["MISTAKES", "Mistake"]
