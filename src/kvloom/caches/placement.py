"""Where the tokens of a batch of sequences lie: pages, positions, and slots.

A position is one token of every sequence, as in ``[B, H, N, D]``. Sequences end together: one that is
shorter, as after a crop of single rows, has positions in front that hold nothing.
"""

from collections.abc import Sequence
from math import lcm
from typing import Literal

import torch
from torch import Tensor

from kvloom.caches.format import CacheFormat
from kvloom.caches.pages import Pages, Run
from kvloom.caches.storage import Storage
from kvloom.caches.tokens import PARTIAL, Step, TokenIndex
from kvloom.core.indexing import CacheIndex
from kvloom.paging import PageTable

_FEW = 64
"""Slots that are faster looked up one by one than by operators of torch."""


class Placement:
    """The pages of B sequences, and where their positions are in the storage of a layer.

    Attributes:
        pages: Where they lie.
        window: Tokens that a token sees, itself included; ``None`` for all.
        is_required: Whether all that a window shows must be there. Otherwise ``Step.known`` says what is.
        is_exact: Of each sequence of a residual window, whether each of its tokens read what it should there.
        previous: The sequences before a step whose tokens alone fill the window.
        begins: Of each sequence, the position of its first token.
        step: The step of the last tokens.
    """

    def __init__(self, pages: Pages, window: int | None, *, is_required: bool) -> None:
        self.pages, self.window, self.is_required = pages, window, is_required
        self.is_exact: list[bool] = []
        self.previous: Placement | None = None
        self.begins: list[int] = []
        self.step: Step | None = None
        self._tables: list[PageTable] = []
        self._first: list[int] = []  # of each sequence, the position of the first token that is held
        self._unknown = 0  # positions whose tokens a residual window holds, and that are others now
        self._indices: dict[tuple[int, torch.device], CacheIndex] = {}
        self._tokens: dict[tuple[int, int, int, torch.device], TokenIndex] = {}
        self._run: Run | Literal["unknown"] | None = "unknown"

    @property
    def format(self) -> CacheFormat:
        """How tokens are kept."""
        return self.pages.format

    @property
    def storages(self) -> dict[int, Storage]:
        """The tensors of each layer."""
        return self.pages.storages

    @property
    def size(self) -> int:
        """B; 0 before the first ``reserve``."""
        return len(self._tables)

    @property
    def num_positions(self) -> int:
        """Positions so far, those included that the window has evicted."""
        return self._first[0] + self._tables[0].num_tokens if self._tables else 0

    @property
    def num_pages_held(self) -> int:
        """Pages that hold tokens of these sequences or their forks; a shared page counts once."""
        return self.pages.pool.num_active

    @property
    def tables(self) -> tuple[PageTable, ...]:
        """The pages of each sequence."""
        return tuple(self._tables)

    def place(self, start: int, end: int, storage: Storage) -> TokenIndex:
        """Where positions ``start .. end`` are in a storage; the same object until something changes."""
        stride, device = storage.stride, storage.device
        found = self._tokens.get((start, end, stride, device))
        if found is None:
            before = [self._num_before(b) for b in range(self.size)]
            if (stride, device) not in self._indices:
                table = self.pages.table(self._tables, storage, before)
                self._indices[stride, device] = CacheIndex(table, None, self.format.page_size)
            bases = [first - n * self.format.page_size for first, n in zip(self._first, before, strict=True)]
            found = TokenIndex.of(self._indices[stride, device], bases, start, end)
            self._tokens[start, end, stride, device] = found
        return found

    def begin(self, start: int, end: int, storage: Storage, visible: TokenIndex) -> Step:
        """The step that stores positions ``start .. end``, and whose attention reads ``visible``."""
        step = self.step
        if step is None or step[:3] != (start, end, storage.stride) or step.visible is not visible:
            if (end - start) * len(self._tables) > _FEW:
                slots = self.place(start, end, storage).slots
            else:
                found = [
                    [self.pages.slot(table, position - first, storage) for position in range(start, end)]
                    for table, first in zip(self._tables, self._first, strict=True)
                ]
                slots = torch.tensor(found, dtype=torch.int64, device=storage.device)
            known = None if self.is_required else self.known(start, storage.device, is_read=end > start)
            self.step = step = Step(start, end, storage.stride, slots, visible, known)
        return step

    def known(self, start: int, device: torch.device, *, is_read: bool) -> Tensor | None:
        """Of each sequence the first column that is there, of those that a token at ``start`` sees before it.

        Args:
            start: Position of the token.
            device: Of the result.
            is_read: Whether it reads them; what is missing makes its sequence inexact.

        Returns:
            ``[B]`` int64; ``None`` if all are there.
        """
        column = max(start - (self.window or start) + 1, 0)
        firsts = [max(first, self._unknown) for first in self._first]
        missing = [
            max(first - max(column, begin), 0) for begin, first in zip(self.begins, firsts, strict=True)
        ]
        if not any(missing):
            return None
        if is_read:
            self.is_exact = [was and not x for was, x in zip(self.is_exact, missing, strict=True)]
        return torch.tensor([max(first - column, 0) for first in firsts], device=device)

    def run(self) -> Run | None:
        """Where all tokens lie one behind the other, with the sequences in extents of one distance."""
        if self._run == "unknown":
            # Sequences that begin together, and of which the window has evicted as many tokens.
            is_even = not any(self.begins) and len(set(self._first)) <= 1 and self.previous is None
            run = self.pages.run(self._tables) if is_even else None
            self._run = None if run is None or not self._first else run._replace(first=self._first[0])
        return self._run

    @property
    def has_own_pages(self) -> bool:
        """Whether no other sequence holds a page of these."""
        return all(self.pages.pool.is_writable(ref) for table in self._tables for ref in table.pages)

    def _num_before(self, b: int) -> int:
        """Evicted pages of sequence b that an index counts, to begin at a multiple of ``PARTIAL`` tokens."""
        size = self.format.page_size
        return (self._first[b] - self.begins[b]) % lcm(PARTIAL, size) // size

    def first_held(self, position: int) -> list[int]:
        """Of each sequence, the first position at or behind ``position`` that is held."""
        return [max(first, position) for first in self._first]

    @property
    def first_pages(self) -> list[int]:
        """Of each sequence that begins in position 0, the number of its first page."""
        return [first // self.format.page_size for first in self._first]

    def _hold(self, tables: Sequence[PageTable], begin: Sequence[int], first: Sequence[int]) -> None:
        self._tables[:], self.begins, self._first = tables, list(begin), list(first)
        self._changed()

    def _changed(self) -> None:
        self._indices.clear()
        self._tokens.clear()
        self.step = None
        self._run = "unknown"
