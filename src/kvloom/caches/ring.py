"""Slots that are taken in turn, so that the newest tokens take the place of the oldest."""

import torch
from torch import Tensor

from kvloom.core.indexing import CacheIndex


class Ring:
    """``num_slots`` slots for each of B sequences: token t lies in slot t modulo their number.

    Args:
        rows: B.
        num_slots: Of each sequence.
        max_tokens: Tokens that a sequence can have; ``None`` for any number.
        device: Of the index.

    Attributes:
        index: The same as pages, all of one place: for every token, or for two rounds if there is no end.
    """

    def __init__(self, rows: int, num_slots: int, max_tokens: int | None, device: torch.device) -> None:
        starts = torch.arange(rows, device=device).unsqueeze(1) * num_slots
        num_rounds = 2 if max_tokens is None else -(-max_tokens // num_slots)
        self.index = CacheIndex.pages(starts.repeat(1, num_rounds), num_slots)
        self._starts = starts
        self._max_tokens = max_tokens

    def slots(self, position: Tensor) -> Tensor:
        """Slots ``[B, Q]`` of the tokens at ``position`` ``[Q]``; no slot for those that do not fit."""
        size, end = self.index.page_size, self._max_tokens
        slots = self._starts + position % size
        return slots if end is None else torch.where(position < end, slots, len(self._starts) * size)
