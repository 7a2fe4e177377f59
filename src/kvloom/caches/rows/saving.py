"""Pickled form of tokens in pages, for pickle and ``torch.save``: each page that is held, once.

Objects that are saved together and share pages share them again after loading. Pages are loaded to the device
of their loaded tensors, in the axis order that is best there.
"""

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor

from kvloom import ops
from kvloom.caches.rows.pages import Pages
from kvloom.caches.tensors.storage import Storage
from kvloom.core.specs import KVSpec
from kvloom.core.views import KVView, raw
from kvloom.ops import KeySmoothing
from kvloom.paging import PageRef, PageTable

_PIECE: Final = 256 << 10
"""Minimum bytes that are copied at once to be pickled."""
_PIECES: Final = 64
"""Maximum number of pieces of a layer."""
_ALIGNMENT: Final = 16
Place: TypeAlias = "tuple[SavedPages, int]"
"""Saved pages, and the number of one of them."""


class SavedPart(NamedTuple):
    """Copies of consecutive tokens of one layer.

    Attributes:
        specs: Specs of keys and values, with the axis order of the tensors.
        tensors: Tensors as of a ``Storage``; dtypes that pickle does not support are viewed as integers.
    """

    specs: tuple[KVSpec, KVSpec | None]
    tensors: tuple[Any, Any, Any, Any]

    @property
    def view(self) -> KVView:
        """View of all tokens."""
        (key, value), (codes, others, *scales) = self.specs, self.tensors
        codes = codes.view(key.cache_dtype)
        if value is None or others is None:
            return KVView.split(key.axes, codes, None, scales[0])
        others = others.view(value.cache_dtype)
        return KVView.split(key.axes, codes, others, scales[0], scales[1], value_layout=value.axes)


Part = SavedPart
"""Its name in pickles of earlier releases."""


class SavedStorage:
    """Some pages of one layer, to be pickled, or just loaded.

    They are copied when they are pickled, from protocol 5 on in pieces that are freed once they are written.

    Args:
        specs: Specs of keys and values.
        page_size: Token slots in a page.
        layout: Name by which the axis order was chosen, as ``CacheFormat.layout``.
        is_gathered: Whether attention read gathered tensors.
        parts: All tokens; empty if they are still to be copied.
        smoothing: Smoothing of the keys; ``None`` if they are not smoothed.
    """

    def __init__(
        self,
        specs: tuple[KVSpec, KVSpec | None],
        page_size: int,
        layout: str,
        is_gathered: bool,
        parts: Sequence[SavedPart],
        smoothing: KeySmoothing | None = None,
    ) -> None:
        self.specs, self.page_size, self.layout, self.is_gathered = specs, page_size, layout, is_gathered
        self.parts, self.smoothing = list(parts), smoothing
        self._source: tuple[Storage, Tensor] | None = None  # storage and slots of what is to be copied

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore what earlier releases pickled, which had all tokens in one."""
        vars(self).update(state, parts=[SavedPart(state["specs"], state["tensors"])], _source=None)

    def __reduce_ex__(self, protocol: Any) -> Any:
        own = self.specs, self.page_size, self.layout, self.is_gathered
        if self._source is None:
            return SavedStorage, (*own, self.parts, self.smoothing)
        storage, slots = self._source
        if protocol < 5:  # which copies bytes once more; and ``torch.save`` writes tensors one by one
            return SavedStorage, (*own, [_copied(storage, slots)], self.smoothing)
        count = max(int(_PIECE / storage.nbytes_per_token), -(-len(slots) // _PIECES), 1)
        before: list[bytearray] = []
        pieces = [_Piece(storage, x, before) for x in slots.split(count)]
        return _loaded, (*own, pieces, self.smoothing, str(storage.device))

    @classmethod
    def of(cls, storage: Storage, slots: Tensor, page_size: int | None = None) -> "SavedStorage":
        """Tokens of a layer, given their ``slots``, in pages of ``page_size``; of its own if ``None``."""
        size = storage.page_size if page_size is None else page_size
        saved = cls(
            storage.like(size).specs, size, storage.layout, storage.is_gathered, (), storage.smoothing
        )
        saved._source = storage, slots
        return saved

    @property
    def num_pages(self) -> int:
        """Number of pages that were loaded."""
        return sum(part.view.num_slots for part in self.parts) // self.page_size

    def storage(self, page_size: int | None = None) -> Storage:
        """An empty storage for the keys and values that were loaded."""
        size = self.page_size if page_size is None else page_size
        device = self.parts[0].tensors[0].device
        smoothing = None if self.smoothing is None else self.smoothing.to(device)
        return Storage(
            *self.specs, size, device, self.layout, is_gathered=self.is_gathered, smoothing=smoothing
        )

    def write(self, storage: Storage, slots: Tensor) -> None:
        """Copy all tokens that were loaded to ``slots`` of a storage."""
        slots = slots.to(storage.device)
        for part in self.parts:
            count = part.view.num_slots
            ops.copy(part.view, torch.arange(count, device=storage.device), storage.view, slots[:count])
            slots = slots[count:]


class _Piece:
    """Tokens of a layer, copied to bytes when they are pickled; those of the piece before are freed then."""

    def __init__(self, storage: Storage, slots: Tensor, before: list[bytearray]) -> None:
        self._storage, self._slots, self._before = storage, slots, before

    def __reduce__(self) -> Any:
        for data in self._before:  # which was written; the pickler keeps it until it has written all
            data.clear()
        specs, tensors = _copied(self._storage, self._slots)
        forms, end = list[tuple[int, torch.dtype, torch.Size] | None](), 0
        for x in tensors:
            forms.append(None if x is None else (end, x.dtype, x.shape))
            end += 0 if x is None else -(-x.nbytes // _ALIGNMENT) * _ALIGNMENT
        data = bytearray(end)
        for x, y in zip(tensors, _tensors_in(data, forms), strict=True):
            if x is not None and y is not None:
                y.copy_(x)
        self._before[:] = [data]
        return _loaded_piece, (specs, forms, data)


def _copied(storage: Storage, slots: Tensor) -> SavedPart:
    """Copies of the tokens in these slots, as one page."""
    held = storage.like(max(len(slots), 1))
    held.reserve(1, 1 if len(slots) else 0)
    every = torch.arange(len(slots), device=storage.device)
    ops.copy(storage.view, slots.to(storage.device), held.view, every)
    key, value, *scales = held.tensors
    return SavedPart(held.specs, (raw(key), None if value is None else raw(value), scales[0], scales[1]))


def _tensors_in(
    data: bytearray, forms: Sequence[tuple[int, torch.dtype, torch.Size] | None]
) -> list[Tensor | None]:
    """Tensors in the bytes of a piece, by offset, dtype and shape."""
    found: list[Tensor | None] = []
    for form in forms:
        if form is None:
            found.append(None)
        else:
            offset, dtype, shape = form
            x = torch.frombuffer(data, dtype=dtype, count=shape.numel(), offset=offset) if data else None
            found.append(torch.empty(shape, dtype=dtype) if x is None else x.view(shape))
    return found


def _loaded_piece(specs: Any, forms: Any, data: bytearray) -> tuple[Any, Any]:
    return specs, _tensors_in(data, forms)


def _loaded(
    specs: Any, page_size: int, layout: str, is_gathered: bool, pieces: Any, smoothing: Any, device: str
) -> SavedStorage:
    parts = []
    for own, found in pieces:
        key, value, *scales = (None if x is None else x.to(device) for x in found)
        parts.append(SavedPart(own, (key, value, scales[0], scales[1])))
    return SavedStorage(specs, page_size, layout, is_gathered, parts, smoothing)


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
