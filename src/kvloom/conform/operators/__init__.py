"""Every operator, described once; checks, vectors, refusals and the documentation are made from this."""

from typing import Final

from kvloom.conform.operators import pages, pmx, rows

OPERATORS: Final = {each.name: each for each in (*pmx.OPERATORS, *pages.OPERATORS, *rows.OPERATORS)}
"""By dialect."""
