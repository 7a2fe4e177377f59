"""Pages, positions and slots of the tokens of a batch of sequences.

A position is one token of every sequence, as in ``[B, H, N, D]``. Sequences end together: a shorter one, as
after a crop of single rows or after left padding, has empty positions in front. A sequence has not begun if
its padding is longer than the others' tokens so far.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from kvloom.caches.format import CacheFormat, first_seen, num_exact
from kvloom.caches.rows.page_slots import PageSlots, are_longer
from kvloom.caches.rows.pages import Pages, Span
from kvloom.caches.rows.row import Row
from kvloom.caches.tensors.storage import Storage
from kvloom.caches.tensors.token_index import AlignedStep, TokenIndex
from kvloom.core.indexing import CacheIndex
from kvloom.errors import StateError
from kvloom.paging import PageRef, PageTable

_FEW = 64
"""Number of slots up to which a loop in Python is faster than operators of torch."""


class RowPlacement:
    """The pages of B sequences, and the slots of their positions in the storage of a layer.

    Attributes:
        pages: Pages and tensors that hold the tokens.
        window: Tokens that a token sees, itself included; ``None`` for all.
        rollback: Tokens kept beyond the window.
        is_required: Whether all that a window shows must be there. Otherwise ``step.known`` has the first
            valid column.
        is_recording: Whether what the window evicts is kept until tokens are removed.
        previous: The state before the step, if the step's tokens alone fill the window.
        rows: Pages of each sequence. One that has not begun begins after the last position.
        num_positions: Positions so far, those included that the window has evicted.
        step: The step of the last tokens.
    """

    def __init__(self, pages: Pages, window: int | None, rollback: int, *, is_required: bool) -> None:
        self.pages, self.window, self.rollback, self.is_required = pages, window, rollback, is_required
        self.is_recording = False
        self.previous: RowPlacement | None = None
        self.rows: list[Row] = []
        self.num_positions = 0
        self.step: AlignedStep | None = None
        self._slots: dict[tuple[int, torch.device], tuple[list[int], PageSlots]] = {}
        self._tokens: dict[tuple[int, int, int, int, torch.device], TokenIndex] = {}
        self._run: Span | Literal["unknown"] | None = "unknown"

    @property
    def format(self) -> CacheFormat:
        """Format of the tokens."""
        return self.pages.format

    @property
    def reach(self) -> int | None:
        """Tokens that a found prefix must have, the one after it included; ``None`` for all.

        In a residual window these are all that may be read unquantized once some of the last are removed.
        """
        return self.window if self.is_required else num_exact(self.window or 0) + 1

    @property
    def most_pages(self) -> int:
        """Most pages that one sequence of a window takes: what it keeps before a step, and after it."""
        size = self.format.page_size
        return 2 * -(-(self._num_held + size - 1) // size)

    @property
    def storages(self) -> dict[int, Storage]:
        """The tensors of each layer."""
        return self.pages.storages

    @property
    def size(self) -> int:
        """B; 0 before the first ``reserve``."""
        return len(self.rows)

    @property
    def num_pages_held(self) -> int:
        """Pages that hold tokens of these sequences or their forks; a shared page counts once."""
        return self.pages.pool.num_active

    @property
    def tables(self) -> tuple[PageTable, ...]:
        """The pages of each sequence."""
        return tuple([row.table for row in self.rows])

    @property
    def begins(self) -> list[int]:
        """Position of the first token of each sequence; after the last one if it has not begun."""
        return [row.begin for row in self.rows]

    def place(self, start: int, end: int, storage: Storage, num_new: int = 0) -> TokenIndex:
        """Slots of positions ``start .. end`` in a storage; the same object until something changes.

        Args:
            start: As above.
            end: As above.
            storage: The tensors.
            num_new: Number of the last positions that are queries. Attention needs this many tokens in each
                sequence, so one that begins among them has placeholder pages in front.
        """
        stride, device, size = storage.stride, storage.device, self.format.page_size
        found = self._tokens.get((start, end, num_new, stride, device))
        if found is None:
            before = [row.num_before(end - num_new) for row in self.rows]
            known, slots = self._slots.get((stride, device), (None, None))
            if slots is None or known != before:
                after = [self._num_after(row) for row in self.rows]
                slots = PageSlots(self.pages, self.tables, storage, before, after)
                if len(self._slots) > _FEW:
                    self._slots.clear()  # of strides before the storages grew
                self._slots[stride, device] = before, slots
            index = CacheIndex(slots.follow(), None, size)
            firsts = self.first_held(0)
            bases = [first - n * size for first, n in zip(firsts, before, strict=True)]
            found = TokenIndex.of(index, bases, start, end, firsts, self.begins)
            self._tokens[start, end, num_new, stride, device] = found
        return found

    def begin(self, start: int, end: int, storage: Storage, visible: TokenIndex) -> AlignedStep:
        """Step that stores positions ``start .. end``, and whose attention reads ``visible``."""
        step = self.step
        if step is None or step[:3] != (start, end, storage.stride) or step.visible is not visible:
            if (end - start) * self.size > _FEW:
                slots = self.place(start, end, storage, end - start).own_slots()
            else:
                found = [
                    [
                        self.pages.slot(table, position - first, storage) if position >= first else -1
                        for position in range(start, end)
                    ]
                    for table, first in zip(self.tables, self.first_held(0), strict=True)
                ]
                slots = torch.tensor(found, dtype=torch.int64, device=storage.device)
            known = None if self.is_required else self.known(start, storage.device, is_read=end > start)
            positions = self._positions(start, end, storage)
            self.step = step = AlignedStep(start, end, storage.stride, slots, positions, visible, known)
        return step

    def _next_step(self) -> AlignedStep | None:
        """Step after the last one, whose slots and lengths are larger by 1; ``None`` if it is not so easy."""
        last, window = self.step, self.window
        if last is None or last.end != self.num_positions or last.end - last.start != 1:
            return None
        if last.known is not None or last.visible.begins is not None or self.previous is not None:
            return None
        if window is not None and not self.is_recording and not self.pages.is_kept:
            for row in self.rows:
                if row.num_passed(last.end + 1 - self._num_held):
                    return None
        for row in self.rows:
            if not row.table.has_room(1):
                return None  # nor has an empty table room: each sequence has begun
        visible = last.visible.longer(is_sliding=window is not None and last.end >= window)
        positions = None if last.positions is None else last.positions + 1
        return AlignedStep(last.end, last.end + 1, last.stride, last.slots + 1, positions, visible)

    def _positions(self, start: int, end: int, storage: Storage) -> Tensor | None:
        """Positions of tokens in their texts, ``[B, end - start]``; ``None`` if no layer needs them."""
        if not (storage.needs_positions or self.pages.needs_positions):
            return None
        if (end - start) * self.size <= _FEW:
            found = [[position - begin for position in range(start, end)] for begin in self.begins]
            return torch.tensor(found, dtype=torch.int64, device=storage.device).view(len(found), end - start)
        first = torch.tensor([start - begin for begin in self.begins], device=storage.device)
        return first.unsqueeze(1) + torch.arange(end - start, device=storage.device)

    def known(self, start: int, device: torch.device, *, is_read: bool) -> Tensor | None:
        """First valid column of each sequence, among those that a token at ``start`` sees before it.

        Args:
            start: Position of the token.
            device: Device of the result.
            is_read: Whether the token reads them; then a missing one makes its sequence inexact.

        Returns:
            ``[B]`` int64; ``None`` if all columns are valid.
        """
        column = first_seen(start, self.window)
        firsts = [max(row.start, row.stale) for row in self.rows]
        missing = [
            max(first - max(column, row.begin), 0) for row, first in zip(self.rows, firsts, strict=True)
        ]
        if is_read:
            for row, is_missing in zip(self.rows, missing, strict=True):
                # A page that begins with unknown tokens is not shared, though a window of one token reads
                # none.
                if is_missing or row.stale >= start > row.begin:
                    row.is_exact = False
        if not any(missing):
            return None
        return torch.tensor([max(first - column, 0) for first in firsts], device=device)

    def run(self) -> Span | None:
        """Contiguous span of each sequence's tokens, in evenly spaced extents; ``None`` if there is none."""
        if self._run == "unknown":
            # Sequences that begin together and lost the same number of tokens to the window.
            firsts = self.first_held(0)
            is_even = not any(self.begins) and len(set(firsts)) <= 1 and self.previous is None
            run = self.pages.run(self.tables) if is_even else None
            self._run = None if run is None or not firsts else run._replace(first=firsts[0])
        return self._run

    def _run_after(self, ends: Sequence[tuple[int, PageRef | None]]) -> Span | Literal["unknown"] | None:
        """``_run`` after tables grew that had these ``ends_of`` them."""
        place = self.pages.pool.place
        tables = self.tables
        if not are_longer(tables, ends):
            return "unknown"
        for table, (count, last) in zip(tables, ends, strict=True):
            if last is None:
                return "unknown"
            extent, index = place(last.id)
            if any(place(ref.id) != (extent, index + i) for i, ref in enumerate(table.pages_from(count), 1)):
                return "unknown"
        return self._run if isinstance(self._run, Span) else "unknown"

    @property
    def has_own_pages(self) -> bool:
        """Whether no other sequence holds a page of these."""
        return all(self.pages.pool.is_writable(ref) for table in self.tables for ref in table.pages)

    def expect_begun(self, counts: Sequence[int]) -> None:
        """Raise StateError if a sequence has not begun; ``counts`` of removed tokens are for the message."""
        if max(self.begins, default=0) > self.num_positions:
            b = self.begins.index(max(self.begins))
            raise StateError(
                f"counts must be one number for all while sequence {b} has not begun, with padding of "
                f"{self.begins[b]} in {self.num_positions} columns, got {list(counts)}"
            )

    def expect_removable(self, counts: Sequence[int]) -> None:
        """Raise StateError if later tokens would see evicted ones, or some sequence has not begun."""
        if len(set(counts)) > 1:
            self.expect_begun(counts)
        if self.window is None or not self.is_required or self._reaches_previous(counts):
            return
        for b, (row, count) in enumerate(zip(self.rows, counts, strict=True)):
            kept = max(self.num_positions - count, row.begin)
            if max(first_seen(kept, self.window), row.begin) < min(kept, row.start):
                raise StateError(
                    f"sequence {b} must keep at least {row.start + self.window - 1 - row.begin} tokens, as "
                    f"the window of {self.window} has evicted what fewer would see, got {kept - row.begin}"
                )

    def _num_after(self, row: Row) -> int:
        """Number of placeholder pages after those of a sequence: of tokens that a residual window lost."""
        size = self.format.page_size
        return max(-(-(self.num_positions - row.start) // size) - row.table.num_pages, 0)

    def first_held(self, position: int) -> list[int]:
        """First position at or after ``position`` that each sequence holds."""
        return [max(row.start, position) for row in self.rows]

    def _reaches_previous(self, counts: Sequence[int]) -> bool:
        """Whether a removal ends before this step: ``previous`` still has all tokens of that time."""
        if self.previous is None or not self.previous.size:
            return False
        return max(self.num_positions - count for count in counts) <= self.previous.num_positions

    @property
    def _num_held(self) -> int:
        """Number of last tokens that a window keeps before a step."""
        return (self.window or 0) - 1 + self.rollback

    def _hold(self, rows: Sequence[Row], num_positions: int) -> None:
        self.rows[:], self.num_positions = rows, num_positions
        self._changed()

    def _changed(self) -> None:
        self._slots.clear()
        self._tokens.clear()
        self.step = None
        self._run = "unknown"


def advance(groups: Sequence[RowPlacement]) -> bool:
    """Begin a step of one token that follows from the last step, in all groups or in none.

    Returns:
        Whether each ``step`` is the new one, for which there is room. If not, nothing was changed: the last
        step had another number of tokens, a window evicts a page, tokens are missing in it, or a sequence
        needs another page.
    """
    steps = list[AlignedStep]()
    for group in groups:
        if (step := group._next_step()) is None:
            return False
        steps.append(step)
    for group, step in zip(groups, steps, strict=True):
        for row in group.rows:
            row.table.fill(1)
        group._tokens.clear()
        group.step, group.num_positions = step, step.end
    return True
