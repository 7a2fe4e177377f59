"""Layers named as in transformers, each a paged or a fixed layer with its format and length."""

from typing import Any, Final

from torch import Tensor

from kvloom.caches.format import CacheFormat, expect_config
from kvloom.caches.layers.fixed import FixedLayer
from kvloom.caches.layers.paged import PagedLayer
from kvloom.caches.rows.sequences import Sequences

PAGE_SIZE: Final = 128
"""Token slots in a page of a layer by itself: large, for few look-ups and allocations."""


class DynamicLayer(PagedLayer):
    """All tokens, in storage that doubles at first and then grows by a quarter; ``update`` returns views."""

    def __init__(self) -> None:
        super().__init__(CacheFormat(page_size=PAGE_SIZE))


class SlidingWindowLayer(PagedLayer):
    """Sliding window of tokens in pages, where each token sees ``window`` tokens, itself included.

    Between updates the last ``window - 1 + rollback`` tokens are held, in storage of hardly more than twice
    that size, even after a long prefill.

    Args:
        window: Tokens that a token sees, itself included.
        rollback: Number of last tokens that ``crop`` can remove, such as those of a rejected draft.
    """

    def __init__(self, window: int, rollback: int = 0) -> None:
        self._most_held = expect_config("window", window, 1) - 1 + expect_config("rollback", rollback, 0)
        format = CacheFormat(page_size=max(min(self._most_held // 8, PAGE_SIZE), 1))
        super().__init__(format, Sequences(format, window, rollback))
        self._first = 0  # position of the first token that is held

    @property
    def num_columns(self) -> int:
        """n of ``keys``: number of tokens that are held."""
        return self.num_tokens - self._first

    def _num_evicted(self) -> int:
        return self._first

    def _add(self, key: Tensor, value: Tensor, *, is_gathered: bool) -> Any:
        result = super()._add(key, value, is_gathered=is_gathered)
        self._first = max(self._first, self.num_tokens - self._most_held)
        return result

    def _truncate(self, num_tokens: int) -> None:
        super()._truncate(num_tokens)
        self._first = min(self._first, num_tokens)

    def _reset(self) -> None:
        super()._reset()
        self._first = 0


class StaticLayer(FixedLayer):
    """Storage of ``max_length`` tokens of each sequence, which never moves; ``update`` returns all of it.

    Positions after the stored tokens are 0, and the mask must hide them.

    Args:
        max_length: Maximum number of tokens of each sequence.
    """

    length_name = "max_length"

    def __init__(self, max_length: int) -> None:
        self.max_length = expect_config("max_length", max_length, 1)
        super().__init__(CacheFormat(page_size=1, max_tokens=max_length))


class StaticSlidingWindowLayer(FixedLayer):
    """Sliding window of tokens in fixed storage: each token sees ``window`` tokens, itself included.

    Storage has slots for ``window + rollback`` tokens, in a multiple of 16. ``update`` returns
    ``window - 1 + Q`` tokens. In a text shorter than the window, those after the new tokens are 0; the mask
    must hide them, as any causal one does. ``keys`` has ``window - 1 + rollback`` tokens, at least one.

    Args:
        window: Tokens that a token sees, itself included.
        rollback: Number of last tokens that ``crop`` can remove, such as those of a rejected draft.
    """

    length_name = "window"

    def __init__(self, window: int, rollback: int = 0) -> None:
        expect_config("window", window, 1)
        super().__init__(CacheFormat(page_size=1), window, expect_config("rollback", rollback, 0))
