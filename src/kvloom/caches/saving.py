"""Pickled form of tokens in pages, for pickle and ``torch.save``: each page that is held, once.

Objects that are saved together and share pages share them again after loading. Pages are loaded to the device
of their loaded tensors, in the axis order that is best there.
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
"""Saved pages, and the number of one of them."""


@dataclass(frozen=True)
class SavedStorage:
    """Copies of some pages of one layer.

    Attributes:
        specs: Specs of keys and values, with the axis order of the tensors.
        page_size: Token slots in a page.
        layout: Name by which the axis order was chosen, as ``CacheFormat.layout``.
        is_gathered: Whether attention read gathered tensors.
        tensors: Tensors as of a ``Storage``; dtypes that pickle does not support are viewed as integers.
        smoothing: Smoothing of the keys; ``None`` if they are not smoothed.
    """

    specs: tuple[KVSpec, KVSpec | None]
    page_size: int
    layout: str
    is_gathered: bool
    tensors: tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]
    smoothing: KeySmoothing | None = None

    @classmethod
    def of(cls, storage: Storage, slots: Tensor) -> "SavedStorage":
        """Copy pages of a layer, given all their ``slots``."""
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
        """View of all saved pages."""
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
        """Copy all saved tokens to ``slots`` of a storage."""
        every = torch.arange(len(slots), device=storage.device)
        ops.copy(self.view, every, storage.view, slots.to(storage.device))


class SavedPages:
    """Copies of some pages in every layer; other holders that are saved with them refer to the same copy.

    Attributes:
        refs: The pages; after loading they are held as long as this object exists.
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
    """Place of each page: among pages that are being saved already, or among new ones."""
    known = {ref: (x, i) for x in pages.saved if x.is_current for i, ref in enumerate(x.refs)}
    refs = dict.fromkeys(refs)
    missing = [ref for ref in refs if ref not in known]
    if missing:
        new = SavedPages(pages, missing)
        known |= {ref: (new, i) for i, ref in enumerate(missing)}
    return {ref: known[ref] for ref in refs}


def save_tables(pages: Pages, tables: Sequence[PageTable]) -> list[tuple[int, list[Place]]]:
    """Number of tokens of each table, and the places of its saved pages."""
    places = save_pages(pages, (ref for table in tables for ref in table.pages))
    return [(table.num_tokens, [places[ref] for ref in table.pages]) for table in tables]


def load_tables(pages: Pages, saved: Iterable[tuple[int, list[Place]]]) -> list[PageTable]:
    """Make tables of saved pages, as of ``save_tables``."""
    tables = []
    for num_tokens, places in saved:
        table = PageTable(pages.pool, pages.format.page_size)
        table.adopt(hold(pages, places))
        table.truncate(num_tokens)
        tables.append(table)
    return tables


def hold(pages: Pages, places: Iterable[Place]) -> list[PageRef]:
    """Retain loaded pages, and return them."""
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
