"""What pickle and ``torch.save`` keep of tokens in pages: those that are held, and each page once.

Whatever is saved together and shares pages shares them again when it is loaded. Pages are loaded into the
axis order that is best where they are loaded, on the device that their tensors come back on.
"""

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from kvloom import ops
from kvloom.caches.memory import outside_inference_mode
from kvloom.caches.storage import PagedMemory, PagedStorage, page_slots
from kvloom.core.specs import KVSpec
from kvloom.core.views import KVView, raw
from kvloom.paging import PageRef, PageTable

Place: TypeAlias = "tuple[SavedPages, int]"
"""One of some pages."""


@dataclass(frozen=True)
class SavedStorage:
    """Copies of some pages of one layer.

    Attributes:
        specs: Of keys and values, with the axis order of the tensors.
        page_size: Token slots in a page.
        layout: The name that the axis order was chosen by.
        tensors: As those of a ``PagedStorage``.
    """

    specs: tuple[KVSpec, KVSpec]
    page_size: int
    layout: str
    tensors: tuple[Tensor, Tensor, Tensor | None, Tensor | None]

    @classmethod
    def of(cls, storage: PagedStorage, pages: Sequence[int]) -> "SavedStorage":
        """Some pages of a layer."""
        where = torch.tensor(pages, dtype=torch.int64, device=storage.view.device)
        with outside_inference_mode():
            a, b, c, d = (None if x is None else _rows(x, where) for x in storage.tensors)
        return cls(storage.specs, storage.page_size, storage.layout, (a, b, c, d))  # type: ignore[arg-type]

    @property
    def view(self) -> KVView:
        """All pages."""
        key, value = (spec.axes for spec in self.specs)
        return KVView.split(key, *self.tensors, value_layout=value)

    def storage(self, page_size: int | None = None) -> PagedStorage:
        """An empty storage for the same keys and values."""
        size = self.page_size if page_size is None else page_size
        return PagedStorage(*self.specs, size, self.tensors[0].device, self.layout)

    def write(self, storage: PagedStorage, pages: Sequence[int]) -> None:
        """Copy them to these pages of a storage that has as large ones."""
        slots = page_slots(pages, self.page_size).to(storage.view.device)
        every = torch.arange(len(slots), device=slots.device)
        ops.copy(self.view, every, storage.view, slots)


class SavedPages:
    """Copies of some pages in every layer; while they are being saved, others that hold them refer to them.

    Attributes:
        refs: The pages; once loaded they are held as long as this object lives.
    """

    def __init__(self, memory: PagedMemory, refs: Sequence[PageRef]) -> None:
        self.refs = list(refs)
        self._memory = memory
        self._num_writes = memory.num_writes
        memory.saved.add(self)

    @property
    def is_current(self) -> bool:
        """Whether nothing was written since."""
        return self._num_writes == self._memory.num_writes

    def __reduce__(self) -> Any:
        pages = [ref.id for ref in self.refs]
        layers = {i: SavedStorage.of(x, pages) for i, x in self._memory.storages.items()}
        return _load, (self._memory, len(pages), layers)


def save_pages(memory: PagedMemory, refs: Iterable[PageRef]) -> dict[PageRef, Place]:
    """Where each page is saved: with one that is being saved already, or with new ones."""
    known = {ref: (x, i) for x in memory.saved if x.is_current for i, ref in enumerate(x.refs)}
    refs = dict.fromkeys(refs)
    missing = [ref for ref in refs if ref not in known]
    if missing:
        new = SavedPages(memory, missing)
        known |= {ref: (new, i) for i, ref in enumerate(missing)}
    return {ref: known[ref] for ref in refs}


def save_tables(memory: PagedMemory, tables: Sequence[PageTable]) -> list[tuple[int, list[Place]]]:
    """Of each table its tokens, and where its pages are saved."""
    places = save_pages(memory, (ref for table in tables for ref in table.pages))
    return [(table.num_tokens, [places[ref] for ref in table.pages]) for table in tables]


def load_tables(memory: PagedMemory, saved: Iterable[tuple[int, list[Place]]]) -> list[PageTable]:
    """Tables of the same tokens."""
    tables = []
    for num_tokens, places in saved:
        table = PageTable(memory.pool, memory.format.page_size)
        table.adopt(hold(memory, places))
        table.truncate(num_tokens)
        tables.append(table)
    return tables


def hold(memory: PagedMemory, places: Iterable[Place]) -> list[PageRef]:
    """Pages that were loaded, with one more reference to each."""
    refs = [pages.refs[i] for pages, i in places]
    for ref in refs:
        memory.pool.retain(ref)
    return refs


def _load(memory: PagedMemory, num_pages: int, layers: Mapping[int, SavedStorage]) -> SavedPages:
    table = PageTable(memory.pool, memory.format.page_size)
    memory.append([table], [num_pages * memory.format.page_size])
    pages = [ref.id for ref in table.pages]
    for index, saved in layers.items():
        storage = memory.storages.setdefault(index, saved.storage())
        storage.grow(memory.pool.num_pages)
        saved.write(storage, pages)
    loaded = SavedPages(memory, table.pages)
    weakref.finalize(loaded, table.release)
    return loaded


def _rows(x: Tensor, where: Tensor) -> Tensor:
    return raw(x).index_select(0, where).view(x.dtype)
