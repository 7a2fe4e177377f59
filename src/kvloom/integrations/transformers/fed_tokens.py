"""Tokens that a model was given with a cache of a pool, by which ``commit`` knows what the pages hold.

Shapes: B rows, C columns: those of found tokens and padding, then all that were computed.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvloom.errors import ArgumentError


class FedTokens:
    """The tokens of each row.

    Args:
        rows: Tokens of each row, of which the first were found.
        begins: Column of the first token of each row.
        end: Number of columns that were found.

    Attributes:
        num_rows: B.
        num_columns: C.
        is_known: Whether all tokens are known; false after embeddings, and after rows lost tokens apart.
        is_chosen: Whether rows were chosen among others, as by beam search, whose results have another order.
    """

    def __init__(self, rows: Sequence[Sequence[int]], begins: Sequence[int], end: int) -> None:
        columns = [[0] * begin + [*row] for row, begin in zip(rows, begins, strict=True)]
        self._asked = torch.tensor(columns, dtype=torch.int64)  # found or not
        self._parts = [self._asked[:, :end]]
        self.num_rows, self.num_columns = len(columns), end
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
        if isinstance(input_ids, Tensor) and input_ids.shape == (self.num_rows, num_new):
            self._parts.append(input_ids.detach().clone())
        else:
            self._parts.append(torch.zeros(self.num_rows, num_new, dtype=torch.int64))
            self.is_known = False
        self.num_columns = num_columns

    def select(self, rows: Sequence[int]) -> None:
        """Replace row i by row ``rows[i]``."""
        where = torch.tensor(rows, dtype=torch.int64)
        self._parts, self._asked = [self._whole()[where]], self._asked[where]
        self.num_rows, self.is_chosen = len(rows), True

    def truncate(self, num_columns: int) -> None:
        """Forget all columns after the first ``num_columns``."""
        if num_columns < self.num_columns:
            self._parts, self.num_columns = [self._whole()[:, :num_columns]], num_columns

    def _whole(self) -> Tensor:
        return torch.cat([x.cpu().long() for x in self._parts], 1)

    def rows(self, begins: Sequence[int]) -> list[list[int]]:
        """Tokens of each row, without padding."""
        return [row[begin:] for row, begin in zip(self._whole().tolist(), begins, strict=True)]

    def are_as_asked(self, begins: Sequence[int]) -> bool:
        """Whether the model was given the tokens that were asked for, and not others that stand for them."""
        given = self._whole()[:, : self._asked.shape[1]]
        asked = self._asked[:, : given.shape[1]]
        is_text = torch.arange(asked.shape[1]) >= torch.tensor(begins)[:, None]
        return bool(((given == asked) | ~is_text).all())

    def expect(self, rows: Sequence[Sequence[int]], begins: Sequence[int]) -> None:
        """Raise ArgumentError unless the tokens of each row begin with those of ``rows``."""
        for i, (given, own) in enumerate(zip(rows, self.rows(begins), strict=True)):
            for at, (token, known) in enumerate(zip(given, own, strict=False)):
                if token != known:
                    raise ArgumentError(
                        f"input_ids must be the tokens of the cache, row by row, got {token} as token {at} "
                        f"of row {i}, where {known} was found or computed"
                    )
