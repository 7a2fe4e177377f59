"""Pages of a cache: their holders, and the tensors of every layer."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any, Final, NamedTuple, Protocol

import torch
from torch import Tensor

from kvloom import ops
from kvloom.caches.format import CacheFormat, num_exact
from kvloom.caches.tensors.memory import counted
from kvloom.caches.tensors.storage import Storage
from kvloom.core.memory import expect_memory
from kvloom.errors import OutOfPages
from kvloom.paging import Copy, Growth, PagePool, PageTable

_DOUBLED: Final = 128
"""Length of a sequence up to which its storage doubles."""
_RESIDUAL: Final = 16
"""Page size of a residual window whose pages are not kept for prefixes."""
_SHARE: Final = 32
"""Token slots of codes for each slot of a residual window, where pages are kept for prefixes."""
_PAGE_BYTES: Final = 256
"""Bytes of a page in the pool's lists, about."""
_ENDS: Final = 8
"""Minimum number of texts whose residual windows fit, where pages are kept for prefixes."""


class _User(Protocol):
    """Sequences that hold pages."""

    @property
    def size(self) -> int: ...

    @property
    def tables(self) -> tuple[PageTable, ...]: ...

    def give_up_passed(self) -> None: ...


class Span(NamedTuple):
    """Contiguous span of the tokens of each sequence, in evenly spaced extents.

    Attributes:
        extents: Extents of the sequences, in order.
        start: Slot of the first token in each extent.
        first: Position of that token; above 0 if a window has evicted tokens before it.
    """

    extents: slice
    start: int
    first: int = 0


class Pages:
    """Pages of one pool, and the tensors of every layer.

    Page i of the pool is the same place in every layer's storage, so all layers share one table. The pool
    doubles at first and then grows by a quarter, up to ``format.max_tokens``. It has one extent for each
    sequence of the first batch.

    Args:
        format: Format of the tokens.
        is_kept: Whether all ``max_tokens`` are allocated at once and never freed, since pages that no table
            holds can be found again.
        policy: Eviction policy for these pages, as of ``PagePool``.

    Attributes:
        needs_positions: Whether a layer stores keys that depend on their positions in the text.
        least: Pages that ``keep`` allocates; those of ``max_tokens`` if ``None``.
    """

    def __init__(self, format: CacheFormat, is_kept: bool = False, policy: str = "lru") -> None:
        self.format = format
        self.needs_positions = any(x.needs_positions for x in format.layers or (format,))
        self.most: int | None = None  # pages of one sequence, beyond which the pool grows only by need
        self.least: int | None = None
        self.is_kept = False
        self.policy = policy
        self.pool = PagePool(0, policy)
        if is_kept:
            self.keep()
        self.storages: dict[int, Storage] = {}
        self.users: weakref.WeakSet[_User] = weakref.WeakSet()
        self.num_writes = 0
        self.saved: weakref.WeakSet[Any] = weakref.WeakSet()  # pages that are being saved

    def __reduce__(self) -> Any:
        """Pickle no pages: their holders save them."""
        return Pages, (self.format, False, self.policy), {"most": self.most, "least": self.least}

    def __setstate__(self, state: dict[str, Any]) -> None:
        residual: Pages | None = state.pop("residual", None)
        if residual is not None:  # of earlier releases
            residual.least = _num_residual(self.format)
        vars(self).update(state)

    def of_residual(self) -> Pages | None:
        """Make pages for the residual window of layers in these pages; ``None`` without one."""
        if not self.format.recent:
            return None
        pages = Pages(self.format.residual(self.format.page_size if self.is_kept else _RESIDUAL))
        pages.least = _num_residual(self.format)
        if self.is_kept:
            pages.keep()
        return pages

    @property
    def stride(self) -> int:
        """Pages in the longest extent."""
        return -(-self.pool.num_pages // self.pool.num_extents)

    @property
    def nbytes(self) -> int:
        """Bytes allocated in all layers."""
        return sum(storage.nbytes for storage in self.storages.values())

    @property
    def num_spare(self) -> int:
        """Number of pages that are free, or that a window has passed."""
        return self.pool.num_free + self.pool.num_passed

    def kind(self, *head_dims: int) -> str:
        """``format.kind`` for the head dims of the stored layers, or for ``head_dims`` if there are none."""
        if self.storages:
            specs = self.storages[min(self.storages)].specs
            return self.format.kind(*(None if spec is None else spec.head_dim for spec in specs))
        return self.format.kind(*head_dims)

    def keep(self) -> None:
        """Allocate ``least`` pages, or all ``max_tokens``, for good, as ``is_kept`` does."""
        num_pages = self.format.max_pages or 0 if self.least is None else self.least
        expect_memory(
            f"max_tokens of {counted(num_pages, 'page')}", num_pages * _PAGE_BYTES, torch.device("cpu")
        )
        self.is_kept = True
        self.pool.grow(max(num_pages - self.pool.num_pages, 0))

    def add_layers(
        self,
        layers: Iterable[int],
        heads: int,
        head_dims: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Allocate the tensors of some layers, for keys and values of these sizes."""
        for i in layers:
            own = self.format.of_layer(i)
            specs = own.spec(heads, head_dims[0], dtype), (own.values or own).spec(heads, head_dims[1], dtype)
            self.storages[i] = Storage(
                *specs, self.format.page_size, device, self.format.layout, smoothing=own.smoothing
            )
            self.fit(self.storages[i])

    def make_room(self, num_pages: int) -> None:
        """Try to have ``num_pages`` free pages to read into; does nothing where the pool has a fixed size."""

    def fit(self, storage: Storage) -> None:
        """Grow a storage to every page of the pool."""
        storage.reserve(self.pool.num_extents, self.stride)

    def append(self, tables: Sequence[PageTable], num_tokens: Sequence[int]) -> bool:
        """Make room for ``num_tokens[i]`` tokens after ``tables[i]``, in every layer: pages, tensors, copies.

        Returns:
            Whether a table has other pages now.

        Raises:
            OutOfPages: ``format.max_tokens`` is reached; nothing was changed.
            Exception: any error of an allocation; tables and tokens are unchanged.
        """
        grown = list(zip(tables, num_tokens, strict=True))
        if all(count >= 0 and table.has_room(count) for table, count in grown):
            for table, count in grown:
                table.fill(count)
            return False
        growth = Growth(tables, num_tokens)
        num_pages = self._num_pages_for(growth, num_tokens)
        if num_pages > self.pool.num_pages:
            num_extents = self.pool.num_extents if self.pool.num_pages else len(tables)
            self._grow(num_pages, num_extents)
        with growth.made() as copies:
            self.copy(copies)
        return growth.num_pages > 0

    def continue_run(self, tables: Sequence[PageTable], run: Span, num_tokens: int) -> bool:
        """Keep the pages of each table contiguous as it gets ``num_tokens`` more tokens, if possible.

        Extents grow to twice the pages of the tables. Then the tables move to the front of new tensors, once
        for every n new tokens if they hold n. Tensors that were read before do not change.

        Returns:
            Whether the tables have other pages now.

        Raises:
            Exception: any error of an allocation; tables and tokens are unchanged.
        """
        num_pages, missing = tables[0].num_pages, tables[0].num_missing(num_tokens)
        if all(len(self.pool.next_free(table.pages[-1].id, missing)) == missing for table in tables):
            return False
        extents = range(run.extents.start, run.extents.stop, run.extents.step)
        free = [self.pool.free_from(extent, 0, num_pages) for extent in extents]
        if all(len(pages) == num_pages for pages in free):
            self._move(tables, free)
            return True
        have, num_extents = self.pool.num_pages, self.pool.num_extents
        wanted = min(have + max(have // 4, missing * num_extents), 2 * num_pages * num_extents)
        if self.format.max_pages is not None:
            wanted = min(wanted, self.format.max_pages)
        if wanted > have:
            self._grow(wanted, num_extents)
        return False

    def copy(self, copies: Sequence[Copy]) -> None:
        """Copy pages, in every layer."""
        if not copies:
            return
        sources, targets = zip(*copies, strict=True)
        for storage in self.storages.values():
            view = storage.view
            read, written = (self.slots(pages, storage).to(view.device) for pages in (sources, targets))
            ops.copy(view, read, view, written)

    def table(
        self,
        tables: Sequence[PageTable],
        storage: Storage,
        before: Sequence[int] | None = None,
        after: Sequence[int] | None = None,
    ) -> Tensor:
        """First slot of each page of each table, ``[B, P]`` int64 with P at least 1, padded by -1.

        Row b begins with ``before[b]`` placeholders, slot 0, for pages that table b no longer has, and ends
        with ``after[b]`` for such that it does not have yet.
        """
        rows = [self.first_slots([ref.id for ref in x.pages], storage) for x in tables]
        none = [0] * len(rows)
        places = zip(before or none, rows, after or none, strict=True)
        rows = [[0] * m + row + [0] * n for m, row, n in places]
        width = max(1, *map(len, rows))
        padded = [[*row, *[-1] * (width - len(row))] for row in rows]
        return torch.tensor(padded, dtype=torch.int64, device=storage.device)

    def first_slots(self, pages: Iterable[int], storage: Storage) -> list[int]:
        """First slot of each of some pages."""
        size, stride = storage.page_size, storage.stride
        return [(extent * stride + index) * size for extent, index in map(self.pool.place, pages)]

    def slot(self, table: PageTable, token: int, storage: Storage) -> int:
        """Slot of one token of a sequence."""
        extent, index = self.pool.place(table.page_of(token).id)
        return (extent * storage.stride + index) * storage.page_size + token % storage.page_size

    def slots(self, pages: Iterable[int], storage: Storage) -> Tensor:
        """Every slot of some pages, ``[pages * page_size]`` int64, on the CPU."""
        first = torch.tensor(self.first_slots(pages, storage), dtype=torch.int64).unsqueeze(1)
        return (first + torch.arange(storage.page_size)).flatten()

    def run(self, tables: Sequence[PageTable]) -> Span | None:
        """Contiguous span of the pages of each table, in evenly spaced extents; ``None`` if there is none."""
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
        return Span(slice(extents[0], end, step), indices.pop() * self.format.page_size)

    def all_tables(self) -> list[PageTable]:
        """Page tables of all sequences."""
        return [table for user in self.users for table in user.tables]

    def give_back(self) -> None:
        """Free the tensors if no sequence can use them."""
        if not self.is_kept and not any(user.size for user in self.users):
            self.storages.clear()
            self.pool = PagePool(0, self.policy)

    def _grow(self, num_pages: int, num_extents: int) -> None:
        """Grow to ``num_pages`` pages: tensors first, since their allocation may fail."""
        for storage in self.storages.values():
            storage.reserve(num_extents, -(-num_pages // num_extents))
        self.pool.grow(num_pages - self.pool.num_pages, num_extents)

    def _move(self, tables: Sequence[PageTable], free: Sequence[Sequence[int]]) -> None:
        """Move the tokens of each table to the pages ``free``, in new tensors."""
        refs = self.pool.take(sum(map(len, free)), [page for pages in free for page in pages])
        try:
            for storage in self.storages.values():
                storage.renew()
            old = [ref.id for table in tables for ref in table.pages]
            self.copy([Copy(source, ref.id) for source, ref in zip(old, refs, strict=True)])
        except BaseException:
            for ref in refs:
                self.pool.release(ref)
            raise
        for table, first in zip(tables, accumulate(map(len, free), initial=0), strict=False):
            table.move(refs[first : first + table.num_pages])

    def _num_pages_for(self, growth: Growth, num_tokens: Sequence[int]) -> int:
        """Number of pages that the pool must have."""
        limit, have = self.format.max_pages, self.pool.num_pages
        missing = growth.num_pages - self.pool.num_free - self.pool.num_evictable
        if missing <= 0:
            return have
        wanted = enlarged(self.pool, self.format.page_size, missing)
        if self.most is not None:
            wanted = max(have + missing, min(wanted, self.most * max(self.pool.num_extents, 1)))
        if limit is None:
            return wanted
        if have + missing > limit:
            raise OutOfPages(
                f"max_tokens must be at least {(have + missing) * self.format.page_size} to hold "
                f"{counted(max(num_tokens), 'more token')} of {counted(len(num_tokens), 'sequence')}, "
                f"got {self.format.max_tokens} with {self.pool.num_active} of {counted(limit, 'page')} taken"
            )
        return min(wanted, limit)


def enlarged(pool: PagePool, page_size: int, missing: int) -> int:
    """Number of pages that a pool is to have when it needs ``missing`` more, before any limit."""
    # Growing by a quarter wastes little, and each token moves about four times in all. Short texts double, or
    # they would move at every page.
    have = pool.num_pages
    return have + max(have // 4, min(have, _DOUBLED // page_size * max(pool.num_extents, 1)), missing)


def _num_residual(format: CacheFormat) -> int:
    """Number of pages that are kept for the residual windows of layers of this format."""
    end = -(-(num_exact(format.recent) + 1) // format.page_size) + 1
    return max((format.max_pages or 0) // _SHARE, _ENDS * end)
