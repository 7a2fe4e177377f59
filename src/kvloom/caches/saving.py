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
from kvloom.caches.pages import Pages
from kvloom.caches.storage import Storage
from kvloom.core.specs import KVSpec
from kvloom.core.views import KVView, raw
from kvloom.ops import KeySmoothing
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
        is_gathered: Whether attention read gathered tensors.
        tensors: As those of a ``Storage``; what pickle has no dtype for, as integers.
        smoothing: Of its keys; ``None`` if they are not smoothed.
    """

    specs: tuple[KVSpec, KVSpec | None]
    page_size: int
    layout: str
    is_gathered: bool
    tensors: tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]
    smoothing: KeySmoothing | None = None

    @classmethod
    def of(cls, storage: Storage, slots: Tensor) -> "SavedStorage":
        """Some pages of a layer, of which these are all slots."""
        held = storage.like(storage.page_size)
        held.reserve(1, len(slots) // storage.page_size)
        where = torch.arange(len(slots), device=storage.device)
        ops.copy(storage.view, slots.to(storage.device), held.view, where)
        key, value, *scales = held.tensors
        tensors = raw(key), None if value is None else raw(value), scales[0], scales[1]
        return cls(
            held.specs, held.page_size, storage.layout, storage.is_gathered, tensors, storage.smoothing
        )

    @property
    def view(self) -> KVView:
        """All pages."""
        (key, value), (codes, others, *scales) = self.specs, self.tensors
        codes = codes.view(key.cache_dtype)
        if value is None or others is None:
            return KVView.split(key.axes, codes, None, scales[0])
        others = others.view(value.cache_dtype)
        return KVView.split(key.axes, codes, others, scales[0], scales[1], value_layout=value.axes)

    def storage(self, page_size: int | None = None) -> Storage:
        """An empty storage for the same keys and values."""
        size = self.page_size if page_size is None else page_size
        device = self.tensors[0].device
        smoothing = None if self.smoothing is None else self.smoothing.to(device)
        return Storage(
            *self.specs, size, device, self.layout, is_gathered=self.is_gathered, smoothing=smoothing
        )

    def write(self, storage: Storage, slots: Tensor) -> None:
        """Copy them to as many slots of a storage."""
        every = torch.arange(len(slots), device=storage.device)
        ops.copy(self.view, every, storage.view, slots.to(storage.device))


class SavedPages:
    """Copies of some pages in every layer; while they are being saved, others that hold them refer to them.

    Attributes:
        refs: The pages; once loaded they are held as long as this object lives.
    """

    def __init__(self, pages: Pages, refs: Sequence[PageRef]) -> None:
        self.refs = list(refs)
        self._pages = pages
        self._num_writes = pages.num_writes
        pages.saved.add(self)

    @property
    def is_current(self) -> bool:
        """Whether nothing was written since."""
        return self._num_writes == self._pages.num_writes

    def __reduce__(self) -> Any:
        pages = [ref.id for ref in self.refs]
        storages = self._pages.storages.items()
        layers = {i: SavedStorage.of(x, self._pages.slots(pages, x)) for i, x in storages}
        return _load, (self._pages, len(pages), layers)


def save_pages(pages: Pages, refs: Iterable[PageRef]) -> dict[PageRef, Place]:
    """Where each page is saved: with one that is being saved already, or with new ones."""
    known = {ref: (x, i) for x in pages.saved if x.is_current for i, ref in enumerate(x.refs)}
    refs = dict.fromkeys(refs)
    missing = [ref for ref in refs if ref not in known]
    if missing:
        new = SavedPages(pages, missing)
        known |= {ref: (new, i) for i, ref in enumerate(missing)}
    return {ref: known[ref] for ref in refs}


def save_tables(pages: Pages, tables: Sequence[PageTable]) -> list[tuple[int, list[Place]]]:
    """Of each table its tokens, and where its pages are saved."""
    places = save_pages(pages, (ref for table in tables for ref in table.pages))
    return [(table.num_tokens, [places[ref] for ref in table.pages]) for table in tables]


def load_tables(pages: Pages, saved: Iterable[tuple[int, list[Place]]]) -> list[PageTable]:
    """Tables of the same tokens."""
    tables = []
    for num_tokens, places in saved:
        table = PageTable(pages.pool, pages.format.page_size)
        table.adopt(hold(pages, places))
        table.truncate(num_tokens)
        tables.append(table)
    return tables


def hold(pages: Pages, places: Iterable[Place]) -> list[PageRef]:
    """Pages that were loaded, with one more reference to each."""
    refs = [saved.refs[i] for saved, i in places]
    for ref in refs:
        pages.pool.retain(ref)
    return refs


def _load(pages: Pages, num_pages: int, layers: Mapping[int, SavedStorage]) -> SavedPages:
    table = PageTable(pages.pool, pages.format.page_size)
    pages.append([table], [num_pages * pages.format.page_size])
    held = [ref.id for ref in table.pages]
    for index, saved in layers.items():
        storage = pages.storages.setdefault(index, saved.storage())
        pages.fit(storage)
        saved.write(storage, pages.slots(held, storage))
    loaded = SavedPages(pages, table.pages)
    weakref.finalize(loaded, table.release)
    return loaded
