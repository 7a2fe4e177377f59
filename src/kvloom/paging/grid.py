"""Grid of texts: recurrent states are kept at multiples of a number of tokens."""

from typing import Final

from kvloom.errors import ArgumentError

_INTERVAL: Final = 256


def grid_interval(interval: int | None, page_size: int) -> int:
    """Interval of the grid, a multiple of ``page_size``; by default 256, rounded up to one.

    Raises:
        ArgumentError: ``interval`` is no positive multiple of ``page_size``.
    """
    if interval is None:
        return -(-_INTERVAL // page_size) * page_size
    if interval < 1 or interval % page_size:
        raise ArgumentError(
            f"state_interval must be a positive multiple of page_size {page_size}, got {interval}"
        )
    return interval
