"""Tokens that a model was given with a cache of a pool, by which ``commit`` knows what the pages hold.

Shapes: B rows, C columns: those of found tokens and padding, then all that were computed.
"""

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from kvloom.errors import ArgumentError

_MOST: Final = 256
"""Number of parts that are merged."""


class FedTokens:
    """The tokens of each row.

    Args:
        asked: Tokens that were asked for, ``[B, C]``, padding included; they are copied.
        end: Number of columns that were found.

    Attributes:
        num_rows: B.
        num_columns: C.
        is_known: Whether all tokens are known; false after embeddings, and after rows lost tokens apart.
        is_chosen: Whether rows were chosen among others, as by beam search, whose results have another order.
    """

    def __init__(self, asked: Tensor, end: int) -> None:
        self._asked = asked.detach().to("cpu", torch.int64, copy=True)
        self._parts = [self._asked[:, :end]]
        self._num_merged = 1  # parts that stay as they are
        self.num_rows, self.num_columns = len(asked), end
        self._is_fed = False
        self.is_known, self.is_chosen = True, False

    def __copy__(self) -> "FedTokens":
        other = FedTokens.__new__(FedTokens)
        vars(other).update(vars(self))
        other._parts = [*self._parts]
        return other

    def add(self, input_ids: Any, num_columns: int) -> None:
        """Add the tokens ``[B, T]`` of a forward, after which there are ``num_columns``."""
        num_new = num_columns - self.num_columns
        if num_new <= 0:
            return
        self._is_fed = True
        if isinstance(input_ids, Tensor) and input_ids.shape == (self.num_rows, num_new):
            self._parts.append(input_ids.detach().clone())
            if len(self._parts) == self._num_merged + _MOST:
                self._parts[self._num_merged :] = [torch.cat(self._parts[self._num_merged :], 1)]
                self._num_merged += 1
        else:
            self._parts.append(torch.zeros(self.num_rows, num_new, dtype=torch.int64))
            self.is_known = False
        self.num_columns = num_columns

    def are_given_again(self, input_ids: Any) -> bool:
        """Whether the first forward is given all tokens that were asked for, found ones, too.

        More may follow them, as those that an assistant drafted.

        Raises:
            ArgumentError: it begins neither with the first token nor with the first one that was not found.
        """
        if self._is_fed or not self.num_columns or not isinstance(input_ids, Tensor):
            return False
        given, asked = input_ids.to("cpu", torch.int64), self._asked
        if given.shape[1] >= asked.shape[1] and torch.equal(given[:, : asked.shape[1]], asked):
            return True
        rest = asked[:, self.num_columns :]
        common = min(given.shape[1], rest.shape[1])
        if not torch.equal(given[:, :common], rest[:, :common]):
            raise ArgumentError(
                f"decoder_input_ids must be all tokens with which the cache began, {asked.tolist()}, or "
                f"those after the {self.num_columns} that were found, and then any, got {given.tolist()}"
            )
        return False

    def select(self, rows: Sequence[int]) -> None:
        """Replace row i by row ``rows[i]``."""
        where = torch.tensor(rows, dtype=torch.int64)
        self._parts, self._asked, self._num_merged = [self._whole()[where]], self._asked[where], 1
        self.num_rows, self.is_chosen = len(rows), True

    def truncate(self, num_columns: int) -> None:
        """Forget all columns after the first ``num_columns``."""
        if num_columns < self.num_columns:
            self._parts, self._num_merged = [self._whole()[:, :num_columns]], 1
            self.num_columns = num_columns

    def _whole(self) -> Tensor:
        return torch.cat([x.to("cpu", torch.int64) for x in self._parts], 1)

    def rows(self, begins: Sequence[int]) -> list[list[int]]:
        """Tokens of each row, without padding."""
        return [row[begin:] for row, begin in zip(self._whole().tolist(), begins, strict=True)]

    def are_as_asked(self, begins: Sequence[int]) -> bool:
        """Whether the model was given the tokens that were asked for, and not others that stand for them."""
        return self._first_other(self._asked, begins) is None

    def expect(self, input_ids: Tensor, begins: Sequence[int], num_columns: int) -> None:
        """Raise ArgumentError unless the first columns of ``input_ids`` ``[B, T]`` are the cache's."""
        given = input_ids[:, :num_columns].to("cpu", torch.int64)
        if (place := self._first_other(given, begins)) is not None:
            row, column = place
            raise ArgumentError(
                f"input_ids must be the tokens of the cache, row by row, got {int(given[row, column])} as "
                f"token {column - begins[row]} of row {row}, where {int(self._whole()[row, column])} was "
                f"found or computed"
            )

    def _first_other(self, given: Tensor, begins: Sequence[int]) -> tuple[int, int] | None:
        """Row and column of the first token that differs; padding does not count."""
        own = self._whole()
        num_columns = min(own.shape[1], given.shape[1])
        is_text = torch.arange(num_columns) >= torch.tensor(begins, dtype=torch.int64)[:, None]
        others = ((own[:, :num_columns] != given[:, :num_columns]) & is_text).nonzero()
        return (int(others[0, 0]), int(others[0, 1])) if len(others) else None
