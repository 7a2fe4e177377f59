"""Pages: how tokens are kept in them, and how they grow while tokens keep their slots."""

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from kvloom import ops
from kvloom.caches.huge_pages import ask_for_huge_pages
from kvloom.caches.memory import outside_inference_mode
from kvloom.caches.page_layout import PAGE_LAYOUTS, page_layout
from kvloom.caches.words import counted
from kvloom.core.specs import KVSpec, QuantSpec
from kvloom.core.views import KVView
from kvloom.errors import ConfigError, OutOfPages, ShapeError
from kvloom.paging.pool import PagePool
from kvloom.paging.table import Copy, Growth, PageTable

if TYPE_CHECKING:
    from kvloom.caches.batch import PagedBatch
    from kvloom.caches.saving import SavedPages

_Tensors: TypeAlias = tuple[Tensor, Tensor, Tensor | None, Tensor | None]


@dataclass(frozen=True, slots=True)
class PagedFormat:
    """How a paged layer keeps its tokens.

    Attributes:
        dtype: Of unquantized storage; ``None`` keeps that of the keys.
        quant: ``None`` for unquantized storage.
        page_size: Token slots in a page.
        max_tokens: Token slots in all, of all sequences; ``None`` grows on demand.
        values: How the values are kept, all but ``dtype`` and ``quant`` as here; as the keys if ``None``.
        layout: Axis order of the pages, see ``page_layout``.
    """

    dtype: torch.dtype | None = None
    quant: QuantSpec | None = None
    page_size: int = 16
    max_tokens: int | None = None
    values: "PagedFormat | None" = None
    layout: str = "auto"

    def __post_init__(self) -> None:
        if isinstance(self.page_size, bool) or not isinstance(self.page_size, int) or self.page_size < 1:
            raise ConfigError(f"page_size must be a positive int, got {self.page_size!r}")
        if self.max_tokens is not None and self.max_tokens < self.page_size:
            raise ConfigError(
                f"max_tokens must be at least one page of {self.page_size}, got {self.max_tokens!r}"
            )
        if self.layout not in PAGE_LAYOUTS:
            raise ConfigError(f"layout must be one of {PAGE_LAYOUTS}, got {self.layout!r}")

    def spec(self, heads: int, head_dim: int, dtype: torch.dtype) -> KVSpec:
        """Keys of one layer whose model computes in ``dtype``; ``values.spec`` is that of its values."""
        return KVSpec(1, heads, head_dim, self.dtype or dtype, quant=self.quant)


class PagedStorage:
    """Pages of one layer's keys and values, and their scales.

    Args:
        key: Spec of the keys, of which the layout does not count.
        value: Spec of the values.
        page_size: Token slots in a page.
        device: Where the tensors live.
        layout: Axis order of the pages, see ``page_layout``.
    """

    def __init__(
        self, key: KVSpec, value: KVSpec, page_size: int, device: torch.device, layout: str = "auto"
    ) -> None:
        self.layout = layout
        self.specs = (
            replace(key, layout=page_layout(layout, "key", key, page_size, device)),
            replace(value, layout=page_layout(layout, "value", value, page_size, device)),
        )
        self.page_size = page_size
        self._device = torch.empty(0, device=device).device  # with its index
        self.tensors = self._allocate(0)
        self.view = self._view(self.tensors)

    @classmethod
    def of(cls, format: PagedFormat, key: Tensor, value: Tensor, page_size: int) -> "PagedStorage":
        """For keys and values such as these, ``[B, H, Q, D]``."""
        key_spec = format.spec(key.shape[1], key.shape[3], key.dtype)
        value_spec = (format.values or format).spec(value.shape[1], value.shape[3], key.dtype)
        return cls(key_spec, value_spec, page_size, key.device, format.layout)

    def like(self, page_size: int) -> "PagedStorage":
        """An empty one for the same keys and values, in pages of another size that a layout may not fit."""
        layout = "auto" if self.layout == "native" else self.layout
        return PagedStorage(*self.specs, page_size, self._device, layout)

    @property
    def num_pages(self) -> int:
        """Pages allocated."""
        return self.tensors[0].shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes allocated, scales included."""
        return sum(x.nbytes for x in self.tensors if x is not None)

    @property
    def nbytes_per_token(self) -> float:
        """Bytes that one token of one sequence takes, scales included."""
        return sum(spec.nbytes(self.page_size, self.page_size) for spec in self.specs) / self.page_size

    def expect_fits(self, key: Tensor, value: Tensor, batch: int) -> None:
        """Check ``[batch, H, Q, D]`` against what is kept here.

        Raises:
            ShapeError: a size or the device differs.
        """
        for side, (name, x) in enumerate((("key", key), ("value", value))):
            self.expect_side(name, side, x, batch)

    def expect_side(self, name: str, side: int, x: Tensor, batch: int) -> None:
        """``expect_fits`` of keys (side 0) or values (1) alone."""
        spec = self.specs[side]
        if x.shape[0] != batch:
            raise ShapeError(f"{name} must have the {batch} sequences of this cache, got {x.shape[0]}")
        if (x.shape[1], x.shape[3]) != (spec.heads, spec.head_dim):
            raise ShapeError(f"{name} must have {spec.heads} heads of {spec.head_dim}, got {list(x.shape)}")
        if x.device != self._device:
            raise ShapeError(f"{name} must be on {self._device}, got {x.device}")

    def store(self, key: Tensor, value: Tensor, slots: Tensor) -> None:
        """Write ``[B, H, Q, D]`` to slots ``[B, Q]``."""
        key, value = (x.transpose(1, 2).flatten(0, 1) for x in (key, value))
        ops.store(key, value, slots.flatten(), self.view)

    def replace(self, new: Mapping[int, Tensor], slots: Tensor) -> None:
        """``store`` keys (0), values (1) or both; a negative slot skips a token."""
        if len(new) == 2:
            self.store(new[0], new[1], slots)
            return
        key, value, key_scale, value_scale = self.tensors
        for side, x in new.items():  # as a cache of keys only
            tensor, scale = ((key, key_scale), (value, value_scale))[side]
            view = KVView.split(self.specs[side].axes, tensor, None, scale)
            ops.store(x.transpose(1, 2).flatten(0, 1), None, slots.flatten(), view)

    def grow(self, num_pages: int) -> None:
        """Hold at least ``num_pages`` pages; bytes keep their slots. A ``view`` taken before is stale."""
        if num_pages <= self.num_pages:
            return
        tensors = self._allocate(num_pages)
        for target, source in zip(tensors, self.tensors, strict=True):
            if target is not None and source is not None:
                target[: source.shape[0]] = source
        self.tensors, self.view = tensors, self._view(tensors)

    def _view(self, tensors: _Tensors) -> KVView:
        key, value = (spec.axes for spec in self.specs)
        return KVView.split(key, *tensors, value_layout=value)

    def _allocate(self, num_pages: int) -> _Tensors:
        size = self.page_size
        with outside_inference_mode():
            (key, key_scale), (value, value_scale) = (
                spec.empty(num_pages * size, size, device=self._device) for spec in self.specs
            )
        tensors = key, value, key_scale, value_scale
        for x in tensors:
            if x is not None:
                ask_for_huge_pages(x)
        return tensors


class PagedMemory:
    """Pages of one pool, and the tensors of every layer that lie in them.

    Page i of the pool is page i of every layer's storage, so one table serves all layers. The pool grows by
    a quarter, up to ``format.max_tokens``.

    Args:
        format: How tokens are kept.
        is_kept: Have all ``max_tokens`` from the beginning and never give them back, since pages that no
            table holds can be found again.
    """

    def __init__(self, format: PagedFormat, is_kept: bool = False) -> None:
        self.format = format
        self.is_kept = False
        self.pool = PagePool(0)
        if is_kept:
            self.keep()
        self.storages: dict[int, PagedStorage] = {}
        self.batches: weakref.WeakSet[PagedBatch] = weakref.WeakSet()
        self.num_writes = 0
        self.saved: weakref.WeakSet[SavedPages] = weakref.WeakSet()

    def __reduce__(self) -> Any:
        """To be saved: no pages, which come with those who hold them."""
        return PagedMemory, (self.format,)

    def keep(self) -> None:
        """Have all ``max_tokens`` from now on, as if ``is_kept``."""
        self.is_kept = True
        self.pool.grow(max((self.format.max_tokens or 0) // self.format.page_size - self.pool.num_pages, 0))

    def append(self, tables: Sequence[PageTable], num_tokens: Sequence[int]) -> bool:
        """Room for ``num_tokens[i]`` tokens behind ``tables[i]``, in every layer: pages, tensors, copies.

        Returns:
            Whether a table has other pages now.

        Raises:
            OutOfPages: ``format.max_tokens`` is reached; nothing was changed.
            Exception: whatever an allocation raises; every table and token is as it was.
        """
        growth = Growth(tables, num_tokens)
        # Tensors first, which is where memory runs out; the tables change when nothing can fail any more.
        num_pages = self._num_pages_for(growth, num_tokens)
        for storage in self.storages.values():
            storage.grow(num_pages)
        self.pool.grow(num_pages - self.pool.num_pages)
        with growth.made() as copies:
            copy_pages(self.storages.values(), copies, self.format.page_size)
        return growth.num_pages > 0

    def give_back(self) -> None:
        """Free the tensors if nobody is left who could use them."""
        if not self.is_kept and not any(batch.size for batch in self.batches):
            self.storages.clear()
            self.pool = PagePool(0)

    def _num_pages_for(self, growth: Growth, num_tokens: Sequence[int]) -> int:
        """How many pages the pool must have."""
        size, max_tokens, have = self.format.page_size, self.format.max_tokens, self.pool.num_pages
        missing = growth.num_pages - self.pool.num_free - self.pool.num_evictable
        if missing <= 0:
            return have
        # By a quarter: little is held in vain, and each token moves about four times in all.
        wanted = have + max(have // 4, missing)
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


def page_ids(tables: Iterable[PageTable], device: torch.device) -> Tensor:
    """Pages of each table, ``[B, P]`` int64 with P at least 1, short rows filled with -1."""
    rows = [[ref.id for ref in table.pages] for table in tables]
    width = max(1, *map(len, rows))
    padded = [[*row, *[-1] * (width - len(row))] for row in rows]
    return torch.tensor(padded, dtype=torch.int64, device=device)


def copy_pages(storages: Iterable[PagedStorage], copies: Sequence[Copy], page_size: int) -> None:
    """Run the copies that a table asked for, in the storage of every layer."""
    if not copies:
        return
    sources, targets = (page_slots(pages, page_size) for pages in zip(*copies, strict=True))
    for storage in storages:
        view = storage.view
        ops.copy(view, sources.to(view.device), view, targets.to(view.device))


def page_slots(pages: Sequence[int], page_size: int) -> Tensor:
    """Every slot of some pages, ``[len(pages) * page_size]`` int64, on the CPU."""
    return (
        torch.tensor(pages, dtype=torch.int64).unsqueeze(1) * page_size + torch.arange(page_size)
    ).flatten()
