"""Pages of a cache: who holds them, and the tensors of every layer that lie in them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple, Protocol

import torch
from torch import Tensor

from kvloom import ops
from kvloom.caches.format import CacheFormat
from kvloom.caches.memory import counted
from kvloom.caches.storage import Storage
from kvloom.errors import OutOfPages
from kvloom.paging import Copy, Growth, PagePool, PageTable

_DOUBLED: Final = 128
"""Tokens of a sequence up to which its storage doubles."""


class _User(Protocol):
    """Sequences that hold pages."""

    @property
    def size(self) -> int: ...

    @property
    def tables(self) -> tuple[PageTable, ...]: ...


class Run(NamedTuple):
    """Sequences whose tokens lie one behind the other.

    Attributes:
        extents: Of the sequences, in order.
        start: Slot of the first token in each of them.
    """

    extents: slice
    start: int


class Pages:
    """Pages of one pool, and the tensors of every layer.

    Page i of the pool is the same place in every layer's storage, so one table serves all layers. The pool
    doubles at first and then grows by a quarter, up to ``format.max_tokens``, and has an extent for each of
    the sequences that came first.

    Args:
        format: How tokens are kept.
        is_kept: Have all ``max_tokens`` from the beginning and never give them back, since pages that no
            table holds can be found again.
    """

    def __init__(self, format: CacheFormat, is_kept: bool = False) -> None:
        self.format = format
        self.is_kept = False
        self.pool = PagePool(0)
        if is_kept:
            self.keep()
        self.storages: dict[int, Storage] = {}
        self.users: weakref.WeakSet[_User] = weakref.WeakSet()
        self.num_writes = 0
        self.saved: weakref.WeakSet[Any] = weakref.WeakSet()  # pages that are being saved

    def __reduce__(self) -> Any:
        """To be saved: no pages, which come with those who hold them."""
        return Pages, (self.format,)

    @property
    def stride(self) -> int:
        """Pages in the longest extent."""
        return -(-self.pool.num_pages // self.pool.num_extents)

    def keep(self) -> None:
        """Have all ``max_tokens`` from now on, as if ``is_kept``."""
        self.is_kept = True
        self.pool.grow(max((self.format.max_tokens or 0) // self.format.page_size - self.pool.num_pages, 0))

    def fit(self, storage: Storage) -> None:
        """Let a storage have every page of the pool."""
        storage.reserve(self.pool.num_extents, self.stride)

    def append(self, tables: Sequence[PageTable], num_tokens: Sequence[int]) -> bool:
        """Room for ``num_tokens[i]`` tokens behind ``tables[i]``, in every layer: pages, tensors, copies.

        Returns:
            Whether a table has other pages now.

        Raises:
            OutOfPages: ``format.max_tokens`` is reached; nothing was changed.
            Exception: whatever an allocation raises; every table and token is as it was.
        """
        grown = list(zip(tables, num_tokens, strict=True))
        if all(count >= 0 and table.has_room(count) for table, count in grown):
            for table, count in grown:
                table.fill(count)
            return False
        growth = Growth(tables, num_tokens)
        num_pages = self._num_pages_for(growth, num_tokens)
        if num_pages > self.pool.num_pages:
            # Tensors first, which is where memory runs out; the tables change when nothing can fail any more.
            num_extents = self.pool.num_extents if self.pool.num_pages else len(tables)
            for storage in self.storages.values():
                storage.reserve(num_extents, -(-num_pages // num_extents))
            self.pool.grow(num_pages - self.pool.num_pages, num_extents)
        with growth.made() as copies:
            self.copy(copies)
        return growth.num_pages > 0

    def copy(self, copies: Sequence[Copy]) -> None:
        """Run the copies that tables asked for, in every layer."""
        if not copies:
            return
        sources, targets = zip(*copies, strict=True)
        for storage in self.storages.values():
            view = storage.view
            read, written = (self.slots(pages, storage).to(view.device) for pages in (sources, targets))
            ops.copy(view, read, view, written)

    def table(self, tables: Iterable[PageTable], storage: Storage) -> Tensor:
        """First slot of each page of each table, ``[B, P]`` int64 with P at least 1, short rows padded."""
        rows = [self._first_slots((ref.id for ref in table.pages), storage) for table in tables]
        width = max(1, *map(len, rows))
        padded = [[*row, *[-1] * (width - len(row))] for row in rows]
        return torch.tensor(padded, dtype=torch.int64, device=storage.device)

    def slot(self, table: PageTable, token: int, storage: Storage) -> int:
        """Slot of one token of a sequence."""
        extent, index = self.pool.place(table.page_of(token).id)
        return (extent * storage.stride + index) * storage.page_size + token % storage.page_size

    def slots(self, pages: Iterable[int], storage: Storage) -> Tensor:
        """Every slot of some pages, ``[pages * page_size]`` int64, on the CPU."""
        first = torch.tensor(self._first_slots(pages, storage), dtype=torch.int64).unsqueeze(1)
        return (first + torch.arange(storage.page_size)).flatten()

    def run(self, tables: Sequence[PageTable]) -> Run | None:
        """Where the pages of each table lie one behind the other, in extents of one distance."""
        places = [[self.pool.place(ref.id) for ref in table.pages] or [(0, 0)] for table in tables]
        if any(pages != [(pages[0][0], pages[0][1] + i) for i in range(len(pages))] for pages in places):
            return None
        extents, indices = [pages[0][0] for pages in places], {pages[0][1] for pages in places}
        step = extents[1] - extents[0] if len(extents) > 1 else 1
        if len(indices) != 1 or step < 1:
            return None
        end = extents[0] + step * len(extents)
        if extents != list(range(extents[0], end, step)):
            return None
        return Run(slice(extents[0], end, step), indices.pop() * self.format.page_size)

    def give_back(self) -> None:
        """Free the tensors if nobody is left who could use them."""
        if not self.is_kept and not any(user.size for user in self.users):
            self.storages.clear()
            self.pool = PagePool(0)

    def _first_slots(self, pages: Iterable[int], storage: Storage) -> list[int]:
        size, stride = storage.page_size, storage.stride
        return [(extent * stride + index) * size for extent, index in map(self.pool.place, pages)]

    def _num_pages_for(self, growth: Growth, num_tokens: Sequence[int]) -> int:
        """How many pages the pool must have."""
        size, max_tokens, have = self.format.page_size, self.format.max_tokens, self.pool.num_pages
        missing = growth.num_pages - self.pool.num_free - self.pool.num_evictable
        if missing <= 0:
            return have
        # By a quarter: little is held in vain, and each token moves about four times in all. The first
        # tokens double, or a short text would move at every page.
        doubled = min(have, _DOUBLED // size * max(self.pool.num_extents, 1))
        wanted = have + max(have // 4, doubled, missing)
        if max_tokens is None:
            return wanted
        limit = max_tokens // size
        if have + missing > limit:
            raise OutOfPages(
                f"max_tokens must be at least {(have + missing) * size} to hold "
                f"{counted(max(num_tokens), 'more token')} of {counted(len(num_tokens), 'sequence')}, "
                f"got {max_tokens} with {self.pool.num_active} of {counted(limit, 'page')} taken"
            )
        return min(wanted, limit)
