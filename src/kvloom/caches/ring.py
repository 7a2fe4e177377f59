"""Slots that are taken in turn, so that the newest tokens take the place of the oldest."""

import torch
from torch import Tensor

from kvloom.caches.tokens import BLOCK, PARTIAL, TokenIndex
from kvloom.core.indexing import CacheIndex


class Ring:
    """``num_slots`` slots for each of B sequences: token t lies in slot t modulo their number.

    Args:
        rows: B.
        num_slots: Of each sequence; a multiple of ``BLOCK`` if sequences have no end.
        max_tokens: Tokens that a sequence can have; ``None`` for any number.
        device: Of the index.

    Attributes:
        starts: ``[B, 1]``, the first slot of each sequence; where sequences have an end ``[B, P]``, the same
            for each round.
    """

    def __init__(self, rows: int, num_slots: int, max_tokens: int | None, device: torch.device) -> None:
        self.num_slots, self._max_tokens = num_slots, max_tokens
        num_rounds = 1 if max_tokens is None else -(-max_tokens // num_slots)
        self.starts = (torch.arange(rows, device=device).unsqueeze(1) * num_slots).repeat(1, num_rounds)

    def slots(self, position: Tensor) -> Tensor:
        """Slots ``[B, Q]`` of the tokens at ``position`` ``[Q]``; no slot for those that do not fit."""
        slots, end = self.starts[:, :1] + position % self.num_slots, self._max_tokens
        return slots if end is None else torch.where(position < end, slots, len(self.starts) * self.num_slots)

    def place(self, first: Tensor, end: Tensor, num_columns: int) -> TokenIndex:
        """Where tokens are before position ``end``: all, or ``num_columns`` from ``first`` on."""
        rows = len(self.starts)
        if self._max_tokens is not None:
            index = CacheIndex(self.starts, None, self.num_slots)
            return TokenIndex(index, end.expand(rows), self._max_tokens)
        base = first // PARTIAL * PARTIAL
        blocks = base + torch.arange(0, PARTIAL + num_columns, BLOCK, device=first.device)
        index = CacheIndex(self.starts + blocks % self.num_slots, None, BLOCK)
        lengths, origins = (end - base).expand(rows), (first - base).expand(rows)
        return TokenIndex(index, lengths, num_columns, origins, first_position=base.expand(rows))
