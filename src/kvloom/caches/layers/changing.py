"""Rows and lengths of a layer, which a cache changes in all of its layers together.

Shapes: B sequences of one length.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, TypeVar

from torch import Tensor

from kvloom.caches.format import first_seen
from kvloom.caches.layers.assigning import Assignment
from kvloom.caches.rows.selection import reordered, repeated, selected
from kvloom.caches.rows.sequences import Sequences
from kvloom.core.checks import expect_range
from kvloom.errors import ArgumentError, StateError

_Rows = TypeVar("_Rows", bound="Changing")
Forks: TypeAlias = Mapping[Sequences, Sequences]
"""The fork of each of some sequences."""


class Changing(ABC):
    """B sequences of one length, whatever is kept of their tokens.

    Attributes:
        sequences: Page tables that other layers may share; ``None`` for a layer with memory of its own.
        assignment: Keys or values that were assigned while the other side still has another length.
    """

    sequences: Sequences | None = None

    def __init__(self) -> None:
        self.assignment = Assignment()

    @property
    @abstractmethod
    def size(self) -> int:
        """B; 0 before the first update."""

    @property
    @abstractmethod
    def num_tokens(self) -> int:
        """Number of tokens seen of each sequence, evicted ones included."""

    @property
    def num_held(self) -> int:
        """Number of tokens of each sequence that are held: the first ones of ``keys``."""
        return self.num_tokens - self._num_evicted()

    @property
    def window(self) -> int | None:
        """Number of tokens that a token sees, itself included; ``None`` for all before it."""
        return None if self.sequences is None else self.sequences.window

    def crop(self, num_tokens: int) -> None:
        """Keep the first ``num_tokens`` tokens, or, if negative, remove the last ``-num_tokens``.

        Keeping more than there are keeps all; removing more than there are removes all.

        Raises:
            ArgumentError: ``num_tokens`` is no int.
            StateError: the layer has evicted tokens that later ones would see; nothing was changed.
        """
        length = self.num_tokens
        kept = cropped_length(num_tokens, length)
        self.expect_settled()
        self._expect_held(kept, num_tokens)
        if kept < length:
            self.truncate(kept)

    def truncate(self, num_tokens: int) -> None:
        """Keep the first ``num_tokens`` of each sequence.

        Raises:
            StateError: there are fewer, or the window has evicted tokens that later ones would see.
        """
        self.expect_truncatable(num_tokens)
        self._truncate(num_tokens)

    def expect_truncatable(self, num_tokens: int) -> None:
        """Raise as ``truncate`` would, and change nothing."""
        if not 0 <= num_tokens <= self.num_tokens:
            raise StateError(f"num_tokens must be in [0, {self.num_tokens}], got {num_tokens}")
        self._expect_held(num_tokens, num_tokens)

    def reorder(self, rows: Tensor) -> None:
        """Replace sequence i by sequence ``rows[i]``; does nothing before the first update.

        Args:
            rows: ``[B]`` int64 or int32 on any device, repeats allowed.

        Raises:
            ArgumentError: ``rows`` does not fit; nothing was changed.
        """
        self._choose(reordered, rows)

    def select(self, rows: Tensor) -> None:
        """Keep the sequences at ``rows``, in that order; does nothing before the first update.

        Args:
            rows: ``[R]`` int64 or int32, or a bool mask ``[B]``, on any device.

        Raises:
            ArgumentError: ``rows`` does not fit; nothing was changed.
        """
        self._choose(selected, rows)

    def repeat_interleave(self, n: int) -> None:
        """Repeat each sequence ``n`` times in a row; does nothing before the first update.

        Raises:
            ArgumentError: ``n`` is not at least 1.
        """
        expect_range("n", n, 1)
        if n > 1:
            self._choose(repeated, n)

    def expect_settled(self) -> None:
        """Raise StateError if only one of keys and values was assigned with another length."""
        if self.assignment.waiting is not None:
            self.assignment.expect_none(self.num_columns)

    def reset(self) -> None:
        """Forget all tokens."""
        self.assignment.clear()
        self._reset()

    def fork(self: _Rows, forks: Forks | None = None) -> _Rows:  # noqa: PYI019 (not in Python 3.10)
        """Another layer of the same tokens; tokens that one stores are not seen by the other.

        Args:
            forks: Forks of the sequences that this layer shares; ``None`` to fork them here.
        """
        self.expect_settled()
        other = object.__new__(type(self))
        vars(other).update(vars(self), assignment=Assignment())
        other._hold_alone(forks)
        return other

    @abstractmethod
    def _truncate(self, num_tokens: int) -> None: ...

    @abstractmethod
    def _select(self, rows: list[int]) -> None: ...

    def _reset(self) -> None:
        self._truncate(0)

    @abstractmethod
    def _hold_alone(self, forks: Forks | None) -> None:
        """Separate a fork from its layer, with ``forks`` of the sequences that layers share."""

    def _expect_held(self, kept: int, given: int) -> None:
        """Raise StateError if the next token would see evicted ones when ``kept`` tokens remain."""
        window, evicted = self.window, self._num_evicted()
        if window is not None and first_seen(kept, window) < min(kept, evicted):
            raise StateError(
                f"num_tokens must keep at least {evicted + window - 1} tokens or none, got {given}: of "
                f"{self.num_tokens} tokens the window has evicted the first {evicted}"
            )

    def _num_evicted(self) -> int:
        """Number of tokens at the beginning that a window has evicted."""
        return 0

    @property
    @abstractmethod
    def num_columns(self) -> int:
        """Number of columns of ``keys``; 0 before the first update of a layer that grows."""

    def _choose(self, rows_of: Callable[[Any, int], list[int]], given: Any) -> None:
        """Keep the rows ``rows_of(given, B)``, if there are any rows."""
        self.expect_settled()
        if self.size:
            self._select(rows_of(given, self.size))


def cropped_length(num_tokens: int, length: int) -> int:
    """Number of ``length`` tokens that ``crop(num_tokens)`` keeps.

    Raises:
        ArgumentError: ``num_tokens`` is no int.
    """
    if isinstance(num_tokens, bool) or not isinstance(num_tokens, int):
        raise ArgumentError(f"num_tokens must be an int, got {num_tokens!r}")
    return max(length + num_tokens, 0) if num_tokens < 0 else min(num_tokens, length)
