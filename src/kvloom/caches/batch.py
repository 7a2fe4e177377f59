"""The sequences of a cache: the pages they hold, shared by its layers and, copy-on-write, by its forks."""

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from kvloom.blocks.pool import BlockPool
from kvloom.blocks.table import BlockTable, Copy, append_all
from kvloom.caches.storage import PagedFormat, PagedStorage, copy_pages
from kvloom.errors import OutOfBlocks, ShapeError


class PagedBatch:
    """B sequences of one length, in pages of one pool.

    Page i of the pool is page i of every layer's storage, so a table serves all layers. The pool grows by
    doubling, up to ``format.max_tokens``. Forks share the pool and the storages; a page is copied when one of
    its holders writes it.

    Args:
        format: How tokens are kept.
    """

    def __init__(self, format: PagedFormat) -> None:
        self.format = format
        self.storages: dict[int, PagedStorage] = {}
        self._pool = BlockPool(0)
        self._tables: list[BlockTable] = []
        self._slots: dict[torch.device, Tensor] = {}  # [B, tokens in the pages held], made when asked for
        weakref.finalize(self, _release, self._tables)

    @property
    def size(self) -> int:
        """B; 0 before the first ``reserve``."""
        return len(self._tables)

    @property
    def num_tokens(self) -> int:
        """Tokens of each sequence."""
        return self._tables[0].num_tokens if self._tables else 0

    @property
    def num_pages(self) -> int:
        """Pages in the pool: what every storage must hold."""
        return self._pool.num_blocks

    @property
    def num_pages_held(self) -> int:
        """Pages that hold tokens of this batch or its forks; a shared page counts once."""
        return self._pool.num_active

    def reserve(self, batch: int, num_tokens: int) -> None:
        """Give each of ``batch`` sequences room for ``num_tokens`` tokens in all; does nothing where it has.

        Pages that others hold and that will be written are copied, in every layer.

        Raises:
            ShapeError: this batch has another number of sequences; nothing was changed.
            OutOfBlocks: ``format.max_tokens`` is reached; nothing was changed.
        """
        if self._tables and len(self._tables) != batch:
            raise ShapeError(f"key must have the {len(self._tables)} sequences of this cache, got {batch}")
        more = num_tokens - self.num_tokens
        if self._tables and more <= 0:
            return
        tables = self._tables or [BlockTable(self._pool, self.format.page_size) for _ in range(batch)]
        copies = self._append(tables, more)
        self._tables[:] = tables
        self._slots.clear()
        if copies:
            for storage in self.storages.values():
                storage.grow(self.num_pages)
            copy_pages(self.storages.values(), copies, self.format.page_size)

    def slots(self, start: int, end: int, device: torch.device) -> Tensor:
        """Slots of positions ``start .. end`` of every sequence, ``[B, end - start]`` int64."""
        if device not in self._slots:
            pages = [[ref.id for ref in table.blocks] for table in self._tables]
            first = torch.tensor(pages, dtype=torch.int64, device=device) * self.format.page_size
            within = torch.arange(self.format.page_size, device=device)
            self._slots[device] = (first.unsqueeze(-1) + within).flatten(1)
        return self._slots[device][:, start:end]

    def truncate(self, num_tokens: int) -> None:
        """Keep the first ``num_tokens`` tokens of each sequence; shorter sequences stay as they are."""
        for table in self._tables:
            table.truncate(min(num_tokens, table.num_tokens))
        self._slots.clear()

    def select(self, indices: Sequence[int]) -> None:
        """Make sequence i what sequence ``indices[i]`` was; moves tables and no keys or values.

        Raises:
            IndexError: there is no such sequence; nothing was changed.
        """
        chosen = [self._tables[i] for i in indices]
        self._replace([table.fork() for table in chosen])

    def fork(self) -> "PagedBatch":
        """Another batch of the same sequences on the same pages."""
        other = PagedBatch(self.format)
        other.storages, other._pool = self.storages, self._pool
        other._tables += [table.fork() for table in self._tables]
        return other

    def clear(self) -> None:
        """Forget all sequences; storages that no fork uses are given back."""
        self._replace([])
        if not self._pool.num_active:
            self.storages.clear()
            self._pool = BlockPool(0)

    def _replace(self, tables: list[BlockTable]) -> None:
        _release(self._tables)
        self._tables[:] = tables
        self._slots.clear()

    def _append(self, tables: list[BlockTable], num_tokens: int) -> list[Copy]:
        """``append_all``, after growing the pool as often as it takes."""
        size, max_tokens = self.format.page_size, self.format.max_tokens
        limit = None if max_tokens is None else max_tokens // size
        while True:
            try:
                return append_all(tables, [num_tokens] * len(tables))
            except OutOfBlocks:
                have = self._pool.num_blocks
                if limit is not None and have >= limit:
                    raise OutOfBlocks(
                        f"max_tokens must hold {num_tokens} more tokens of {len(tables)} sequences, "
                        f"got {max_tokens} with {self._pool.num_active} of {limit} pages taken"
                    ) from None
                grown = max(have, len(tables) * -(-num_tokens // size))
                self._pool.grow(grown if limit is None else min(grown, limit - have))


def _release(tables: list[BlockTable]) -> None:
    for table in tables:
        table.release()
