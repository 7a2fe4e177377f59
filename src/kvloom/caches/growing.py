"""Layers that keep tokens as they came, in storage that grows: all of them, or those of a window.

Letters: B sequences, H key/value heads, Q new tokens of each, N stored ones.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from kvloom.caches.columns import Columns
from kvloom.caches.layers import Form, Layer, expect_config
from kvloom.errors import StateError


class _ColumnsLayer(Layer):
    """A layer whose tokens are columns as they came."""

    def __init__(self, columns: Columns) -> None:
        super().__init__()
        self._columns = columns

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return self._columns.nbytes

    def _reset(self) -> None:
        self._columns, self._form = Columns(self._columns.limit), None

    def _num_columns(self) -> int:
        return len(self._columns)

    def _stored(self) -> tuple[Tensor, Tensor]:
        return self._columns.view(len(self._columns))

    def _replace(self, new: Mapping[int, Tensor], form: Form) -> None:
        key, value = (new[side] if side in new else self._stored()[side] for side in range(2))
        self._columns = Columns(self._columns.limit).append(key, value)

    def _take(self, rows: Tensor) -> None:
        self._columns = self._columns.take(rows)


class DynamicLayer(_ColumnsLayer):
    """Every token, in storage that grows by half when it is full; ``update`` returns views of N columns."""

    def __init__(self) -> None:
        super().__init__(Columns())

    def get_seq_length(self) -> int:
        """N."""
        return len(self._columns)

    def get_max_length(self) -> int:
        """-1: no bound."""
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """``(N + Q, 0)``."""
        return len(self._columns) + query_length, 0

    def _append(self, key: Tensor, value: Tensor, form: Form) -> tuple[Tensor, Tensor]:
        self._columns = self._columns.append(key, value)
        return self._stored()

    def _truncate(self, num_tokens: int) -> None:
        self._columns = self._columns.truncate(num_tokens)


class SlidingWindowLayer(_ColumnsLayer):
    """The tokens that later ones can see, when each sees ``window`` tokens, itself included.

    Between updates the last ``window - 1 + rollback`` tokens are held, in storage of at most
    ``2 * (window + rollback)`` columns, also after a long prefill.

    Args:
        window: Tokens that a token sees, itself included.
        rollback: How many of the last tokens ``crop`` can remove, as those of a rejected draft.
    """

    is_sliding = True
    _num_fixed = "those that the window has left"

    def __init__(self, window: int, rollback: int = 0) -> None:
        self.window = expect_config("window", window, 1)
        self._limit = 2 * (window + expect_config("rollback", rollback, 0))
        super().__init__(Columns(self._limit))
        self._hold = window - 1 + rollback
        self._seen = 0

    def get_seq_length(self) -> int:
        """Tokens seen, more than are held."""
        return self._seen

    def get_max_length(self) -> int:
        """The window."""
        return self.window

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """``(min(seen, window - 1) + Q, max(seen - window + 1, 0))``."""
        return min(self._seen, self.window - 1) + query_length, max(self._seen - self.window + 1, 0)

    def _reset(self) -> None:
        super()._reset()
        self._seen = 0

    def _append(self, key: Tensor, value: Tensor, form: Form) -> tuple[Tensor, Tensor]:
        num_new, count = key.shape[2], self.get_mask_sizes(key.shape[2])[0]
        held = len(self._columns) + num_new
        if held <= self._limit:
            columns = self._columns.append(key, value)
            result = columns.view(count)
            self._columns = columns.drop_front(max(held - self._hold, 0))
        else:  # a long prefill goes past the storage
            keys, values = key, value
            if len(self._columns):
                old = self._columns.view(len(self._columns))
                keys, values = torch.cat([old[0], key], 2), torch.cat([old[1], value], 2)
            result = keys[:, :, held - count :], values[:, :, held - count :]
            first = held - self._hold
            self._columns = Columns(self._limit).append(keys[:, :, first:], values[:, :, first:])
        self._seen += num_new
        return result

    def expect_croppable(self, num_tokens: int) -> int:
        """As for any layer, but what the next token sees must still be held."""
        kept = super().expect_croppable(num_tokens)
        start, first = self._seen - len(self._columns), max(kept - self.window + 1, 0)
        if first < min(kept, start):
            raise StateError(
                f"num_tokens must keep at least {start + self.window - 1} tokens or none, got {num_tokens}: "
                f"of {self._seen} tokens the first {start} are gone"
            )
        return kept

    def _truncate(self, num_tokens: int) -> None:
        self._columns = self._columns.truncate(max(num_tokens - self._seen + len(self._columns), 0))
        self._seen = num_tokens
