"""A change of rows or lengths in all layers of a cache, planned in each of them before the first is made."""

from collections.abc import Callable
from typing import Any, NamedTuple


class Change(NamedTuple):
    """Steps of a change, in order.

    Attributes:
        layers: Changes of layers with memory of their own. One that raises leaves its layer unchanged.
        tables: Changes of page tables and of numbers of tokens, which cannot fail.
    """

    layers: list[Callable[[], Any]]
    tables: list[Callable[[], Any]]
