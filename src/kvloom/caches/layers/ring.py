"""Ring buffer of token slots: a new token overwrites the oldest one."""

import torch
from torch import Tensor

from kvloom.caches.tensors.token_index import BLOCK, PARTIAL, TokenIndex
from kvloom.core.indexing import CacheIndex


class Ring:
    """``num_slots`` slots for each of B sequences: token t is in slot t modulo ``num_slots``.

    Args:
        rows: B.
        num_slots: Slots of each sequence; a multiple of ``BLOCK`` if ``max_tokens`` is ``None``.
        max_tokens: Maximum number of tokens of a sequence; ``None`` for any number.
        device: Device of the index.

    Attributes:
        starts: ``[B, 1]``, the first slot of each sequence; with ``max_tokens`` ``[B, P]``, repeated for each
            of P rounds of the ring.
    """

    def __init__(self, rows: int, num_slots: int, max_tokens: int | None, device: torch.device) -> None:
        self.num_slots, self._max_tokens = num_slots, max_tokens
        num_rounds = 1 if max_tokens is None else -(-max_tokens // num_slots)
        self.starts = (torch.arange(rows, device=device).unsqueeze(1) * num_slots).repeat(1, num_rounds)

    def slots(self, position: Tensor) -> Tensor:
        """Slots ``[B, Q]`` of the tokens at ``position`` ``[Q]``; out of range from ``max_tokens`` on."""
        slots, end = self.starts[:, :1] + position % self.num_slots, self._max_tokens
        return slots if end is None else torch.where(position < end, slots, len(self.starts) * self.num_slots)

    def place(self, first: Tensor, end: Tensor, num_columns: int) -> TokenIndex:
        """Slots of the tokens before position ``end``: all, or ``num_columns`` from ``first`` on."""
        rows = len(self.starts)
        if self._max_tokens is not None:
            index = CacheIndex(self.starts, None, self.num_slots)
            return TokenIndex(index, end.expand(rows), self._max_tokens)
        base = first // PARTIAL * PARTIAL
        blocks = base + torch.arange(0, PARTIAL + num_columns, BLOCK, device=first.device)
        index = CacheIndex(self.starts + blocks % self.num_slots, None, BLOCK)
        lengths, origins = (end - base).expand(rows), (first - base).expand(rows)
        return TokenIndex(index, lengths, num_columns, origins, first_position=base.expand(rows))
