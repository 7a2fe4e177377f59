"""Descriptions of all operators, the source of checks, vectors, refusals and the documentation."""

from typing import Final

from kvloom.conform.operators import pages, pmx, recurrent, rows

_ALL: Final = (*pmx.OPERATORS, *pages.OPERATORS, *rows.OPERATORS, *recurrent.OPERATORS)
OPERATORS: Final = {each.name: each for each in _ALL}
"""Operators by dialect."""
