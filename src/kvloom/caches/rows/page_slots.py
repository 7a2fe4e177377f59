"""Page tables as tensors, which follow the tables of growing texts without being made again.

Shapes: B texts, P pages of the longest.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvloom.caches.rows.pages import Pages
from kvloom.caches.tensors.memory import outside_inference_mode
from kvloom.caches.tensors.storage import Storage
from kvloom.paging import PageRef, PageTable


class PageSlots:
    """First slot of each page of some tables in a storage, ``[B, P]``, as ``Pages.table``.

    Whoever changes the tables in another way than by growth makes a new one.

    Args:
        pages: Pages of the tables.
        tables: B tables.
        storage: The storage.
        before: Number of placeholders in front of each table.
        after: Number of placeholders behind each table, until it grows; ``None`` for none.
    """

    _slots: Tensor
    _room: Tensor  # where slots of growing tables are written
    _ends: list[tuple[int, PageRef | None]]
    _stride: int

    def __init__(
        self,
        pages: Pages,
        tables: Sequence[PageTable],
        storage: Storage,
        before: Sequence[int],
        after: Sequence[int] | None = None,
    ) -> None:
        self._pages, self._tables, self._storage, self._before = pages, list(tables), storage, list(before)
        self._make(after)

    def follow(self) -> Tensor:
        """Slots of the present pages; in time linear in the new ones if tables grew at their ends alone.

        Tensors that were returned before do not change: what is added lies behind them.
        """
        ends, is_same = ends_of(self._tables), self._storage.stride == self._stride
        if is_same and ends == self._ends:
            return self._slots
        if not is_same or not are_longer(self._tables, self._ends) or torch.compiler.is_compiling():
            self._make()
            return self._slots
        width = max(n + count for n, (count, _) in zip(self._before, ends, strict=True))
        if width > self._room.shape[1]:
            with outside_inference_mode():
                shape = len(self._tables), width + width // 4 + 16
                room = torch.full(shape, -1, dtype=torch.int64, device=self._storage.device)
            room[:, : self._slots.shape[1]] = self._slots
            self._room = room
        for b, (table, (first, _), (end, _)) in enumerate(zip(self._tables, self._ends, ends, strict=True)):
            if end > first:
                pages = [ref.id for ref in table.pages_from(first)]
                new = torch.tensor(self._pages.first_slots(pages, self._storage))
                at = self._before[b]
                self._room.data[b, at + first : at + end] = new  # autograd may have saved what lies before
        self._slots, self._ends = self._room[:, :width].contiguous(), ends
        return self._slots

    def _make(self, after: Sequence[int] | None = None) -> None:
        self._stride, self._ends = self._storage.stride, ends_of(self._tables)
        self._slots = self._pages.table(self._tables, self._storage, self._before, after)
        self._room = self._slots[:, :0]


def ends_of(tables: Sequence[PageTable]) -> list[tuple[int, PageRef | None]]:
    """Number of pages and last page of each table."""
    counted = [(table, table.num_pages) for table in tables]
    return [(n, table.page(n - 1) if n else None) for table, n in counted]


def are_longer(tables: Sequence[PageTable], ends: Sequence[tuple[int, PageRef | None]]) -> bool:
    """Whether tables have the pages that they had when these were the ``ends_of`` them, and maybe more.

    Holds for tables that did nothing but grow, since then the last page alone may have been copied.
    """
    return all(
        table.num_pages >= n and (not n or table.page(n - 1) == last)
        for table, (n, last) in zip(tables, ends, strict=True)
    )
