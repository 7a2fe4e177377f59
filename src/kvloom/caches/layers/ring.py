"""Tokens in storage that never moves: in a ring of slots, where a new token overwrites the oldest one.

Positions are tensors, and shapes depend only on the number of new tokens, so that a step compiles once and
does not synchronize.

Shapes: B sequences of one length, H key/value heads, Q new tokens of each, D head dim.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvloom import ops
from kvloom.caches.format import CacheFormat, num_exact
from kvloom.caches.rows.saving import SavedStorage
from kvloom.caches.tensors.memory import outside_inference_mode
from kvloom.caches.tensors.storage import Storage
from kvloom.caches.tensors.token_index import BLOCK, PARTIAL, TokenIndex
from kvloom.caches.tensors.tokens import Tokens
from kvloom.core.indexing import CacheIndex
from kvloom.core.views import KVView


class Added(NamedTuple):
    """New tokens of a ring that do not count yet.

    Attributes:
        tokens: What their attention reads.
        view: Where they are.
        copied: Their slots there and in the ring, if they must be copied.
        reach: That of the ring with them.
    """

    tokens: Tokens
    view: KVView
    copied: tuple[Tensor, Tensor] | None
    reach: Tensor


class Ring:
    """Tokens of B sequences, each in one page of a storage: token t is in slot t modulo ``num_slots``.

    Args:
        storage: The tensors; pages of a multiple of ``BLOCK`` slots if ``max_tokens`` is ``None``.
        window: Tokens that a token sees, itself included; ``None`` for all.
        num_held: Number of the last tokens that are held.
        max_tokens: Maximum number of tokens of a sequence; ``None`` for any number.
        reach: Number of tokens so far, see below.

    Attributes:
        storage, window, num_held: As above.
        num_slots: Slots of each sequence.
        starts: ``[B, 1]``, the first slot of each sequence; with ``max_tokens`` ``[B, P]``, repeated for each
            of P rounds of the ring.
        reach: Largest number of tokens since it was empty, 0-d int64: those before the last ``num_held`` of
            so many are gone.
    """

    def __init__(
        self, storage: Storage, window: int | None, num_held: int, max_tokens: int | None, reach: int = 0
    ) -> None:
        self.storage, self.window, self.num_held, self._max_tokens = storage, window, num_held, max_tokens
        self.num_slots = storage.page_size
        num_rounds = 1 if max_tokens is None else -(-max_tokens // self.num_slots)
        with outside_inference_mode():
            rows = torch.arange(storage.num_pages, device=storage.device)
            self.starts = (rows.unsqueeze(1) * self.num_slots).repeat(1, num_rounds)
            self.reach = torch.full((), reach, dtype=torch.int64, device=storage.device)

    def __reduce__(self) -> Any:
        """Pickle the tokens, without free slots."""
        reach = int(self.reach)
        num_slots = max(min(reach, self.num_slots), 1)
        slots = self.slots(torch.arange(num_slots, device=self.starts.device)).flatten()
        saved = SavedStorage.of(self.storage, slots, num_slots)
        return load_ring, (saved, self.num_slots, self.window, self.num_held, self._max_tokens, reach)

    @property
    def gone(self) -> Tensor:
        """Number of tokens at the beginning that are no longer held, 0-d."""
        return (self.reach - self.num_held).clamp(min=0)

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors, which keep their addresses."""
        return [x for x in (*self.storage.tensors, self.starts, self.reach) if x is not None]

    def add(self, key: Tensor, value: Tensor, start: Tensor, num_columns: int) -> "Added":
        """Store new tokens ``[B, H, Q, D]``, of which the first is at position ``start``, 0-d.

        They count once ``keep`` is called; until then nothing that is held has changed. Where they would
        overwrite what they see, they are in a ring of this step. ``num_columns`` are attended to, from the
        first one that they see on.
        """
        num_new, before = key.shape[2], (self.window or 1) - 1
        # A compiled step may also overwrite tokens that would be visible again only after a crop.
        needed = before if torch.compiler.is_compiling() else self.num_held
        is_roomy = self.num_slots == self._max_tokens or num_new <= self.num_slots - needed
        ring = self if is_roomy else self._step(start, before, num_new)
        position, end = start + torch.arange(num_new, device=key.device), start + num_new
        last = position[-self.num_slots :]
        copied = None if ring is self else (ring.slots(last).flatten(), self.slots(last).flatten())
        tokens, reach = ring.tokens((start - before).clamp(min=0), end, num_columns), self.reach
        added = Added(tokens, ring.storage.view, copied, torch.maximum(reach, end))
        ring.storage.store(key, value, ring.slots(position), position.expand(len(self.starts), -1))
        return added

    def keep(self, added: "Added") -> None:
        """Let the tokens of ``add`` count."""
        if added.copied is not None:
            ops.copy(added.view, added.copied[0], self.storage.view, added.copied[1])
        self.reach.copy_(added.reach)

    def tokens(self, first: Tensor, end: Tensor, num_columns: int) -> Tokens:
        """Tokens before position ``end``: all, or ``num_columns`` from ``first`` on."""
        is_whole = self.num_slots == self._max_tokens
        rows = self.storage.rows_of(slice(None), 0) if is_whole else None
        return self.storage.tokens(self.place(first, end, num_columns), self.window, rows)

    def slots(self, position: Tensor) -> Tensor:
        """Slots ``[B, Q]`` of the tokens at ``position`` ``[Q]``; out of range from ``max_tokens`` on."""
        slots, end = self.starts[:, :1] + position % self.num_slots, self._max_tokens
        return slots if end is None else torch.where(position < end, slots, len(self.starts) * self.num_slots)

    def place(self, first: Tensor, end: Tensor, num_columns: int) -> TokenIndex:
        """Slots of ``tokens``."""
        rows = len(self.starts)
        if self._max_tokens is not None:
            index = CacheIndex(self.starts, None, self.num_slots)
            return TokenIndex(index, end.expand(rows), self._max_tokens)
        base = first // PARTIAL * PARTIAL
        blocks = base + torch.arange(0, PARTIAL + num_columns, BLOCK, device=first.device)
        index = CacheIndex(self.starts + blocks % self.num_slots, None, BLOCK)
        lengths, origins = (end - base).expand(rows), (first - base).expand(rows)
        return TokenIndex(index, lengths, num_columns, origins, first_position=base.expand(rows))

    def truncate(self, num_tokens: int) -> None:
        """Keep the first ``num_tokens`` tokens, as far as they are held."""
        self.reach.clamp_(max=num_tokens + self.num_held if num_tokens else 0)

    def forget(self, end: Tensor) -> None:
        """Count all tokens before position ``end`` as gone."""
        self.reach.copy_(end + self.num_held)

    def select(self, rows: Sequence[int]) -> None:
        """Make sequence i what sequence ``rows[i]`` was, in the same memory."""
        self._copy_rows(rows, self.storage)

    def selected(self, rows: Sequence[int]) -> "Ring":
        """A new ring whose sequence i is sequence ``rows[i]`` of this one."""
        copied = self.storage.like(self.num_slots)
        copied.reserve(len(rows), 1)
        self._copy_rows(rows, copied)
        return Ring(copied, self.window, self.num_held, self._max_tokens, int(self.reach))

    def _copy_rows(self, rows: Sequence[int], target: Storage) -> None:
        """Copy some sequences to a storage of the same length, which may be this one."""
        view, count = self.storage.view, min(int(self.reach), self.num_slots)
        position = torch.arange(count, device=view.device)
        sources, targets = (
            (torch.tensor(x, device=view.device).unsqueeze(1) * self.num_slots + position).flatten()
            for x in (rows, range(len(rows)))
        )
        ops.copy(view, sources, target.view, targets)

    def _step(self, start: Tensor, before: int, num_new: int) -> "Ring":
        """Ring of a step, with room for its tokens and those that they see, which are copied."""
        num_slots, end = before + num_new, self._max_tokens
        storage = self.storage.like(-(-num_slots // BLOCK) * BLOCK if end is None else min(num_slots, end))
        storage.reserve(len(self.starts), 1)
        ring = Ring(storage, self.window, self.num_held, end)
        # With fewer tokens than a window, some copied slots are empty.
        old = start + torch.arange(-before, 0, device=start.device)
        ops.copy(self.storage.view, self.slots(old).flatten(), storage.view, ring.slots(old).flatten())
        return ring


def load_ring(
    saved: SavedStorage,
    num_slots: int,
    window: int | None,
    num_held: int,
    max_tokens: int | None,
    reach: int,
) -> Ring:
    """Make a ring of loaded tokens, the first ones in its first slots; arguments as of ``Ring``."""
    storage = saved.storage(num_slots)
    storage.reserve(saved.num_pages, 1)
    ring = Ring(storage, window, num_held, max_tokens, reach)
    position = torch.arange(saved.page_size, device=storage.device)
    saved.write(storage, ring.slots(position).flatten())
    return ring


def RecentRing(tensors: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Keys and values ``[B, H, slots, D]`` of a residual window, in files of earlier releases."""
    return tensors


def FixedRecent(
    num_newest: int,
    num_tokens: int,
    max_tokens: int | None,
    ring: tuple[Tensor, Tensor],
    known: int,
    end: int,
) -> Ring:
    """Residual window of ``num_tokens``, in files of earlier releases.

    There ``known`` is the first valid position, and ``end`` that after the last token that was written.
    """
    key, value = ring
    storage = Storage.of(CacheFormat().residual(key.shape[2]), key, value, key.shape[2])
    storage.reserve(key.shape[0], 1)
    held = num_exact(num_tokens)
    made = Ring(storage, num_tokens, held, None, max(known + held, end))
    storage.store(key, value, made.slots(torch.arange(key.shape[2], device=key.device)))
    return made
