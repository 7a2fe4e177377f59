"""Pages: how tokens are kept in them, and how they grow while tokens keep their slots."""

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvloom import ops
from kvloom.blocks.pool import BlockPool
from kvloom.blocks.table import BlockTable, Copy, append_all
from kvloom.caches.huge_pages import ask_for_huge_pages
from kvloom.caches.layers import outside_inference_mode
from kvloom.caches.page_layout import PAGE_LAYOUTS, page_layout
from kvloom.core.specs import KVSpec, QuantSpec
from kvloom.core.views import KVView
from kvloom.errors import ConfigError, OutOfBlocks, ShapeError

if TYPE_CHECKING:
    from kvloom.caches.batch import PagedBatch


@dataclass(frozen=True, slots=True)
class PagedFormat:
    """How a paged layer keeps its tokens.

    Attributes:
        dtype: Of unquantised storage; ``None`` keeps that of the keys.
        quant: ``None`` for unquantised storage.
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
        self._page_size = page_size
        self._device = torch.empty(0, device=device).device  # with its index
        self.tensors = self._allocate(0)
        self.view = self._view()

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
        return sum(spec.nbytes(self._page_size, self._page_size) for spec in self.specs) / self._page_size

    def expect_fits(self, key: Tensor, value: Tensor, batch: int) -> None:
        """Check ``[batch, H, Q, D]`` against what is kept here.

        Raises:
            ShapeError: a size or the device differs.
        """
        for name, x, spec in zip(("key", "value"), (key, value), self.specs, strict=True):
            if x.shape[0] != batch:
                raise ShapeError(f"{name} must have the {batch} sequences of this cache, got {x.shape[0]}")
            if (x.shape[1], x.shape[3]) != (spec.heads, spec.head_dim):
                raise ShapeError(
                    f"{name} must have {spec.heads} heads of {spec.head_dim}, got {list(x.shape)}"
                )
            if x.device != self._device:
                raise ShapeError(f"{name} must be on {self._device}, got {x.device}")

    def store(self, key: Tensor, value: Tensor, slots: Tensor) -> None:
        """Write ``[B, H, Q, D]`` to slots ``[B, Q]``."""
        key, value = (x.transpose(1, 2).flatten(0, 1) for x in (key, value))
        ops.store(key, value, slots.flatten(), self.view)

    def grow(self, num_pages: int) -> None:
        """Hold at least ``num_pages`` pages; bytes keep their slots. A ``view`` taken before is stale."""
        if num_pages <= self.num_pages:
            return
        old, self.tensors = self.tensors, self._allocate(num_pages)
        for target, source in zip(self.tensors, old, strict=True):
            if target is not None and source is not None:
                target[: source.shape[0]] = source
        self.view = self._view()

    def _view(self) -> KVView:
        key, value = (spec.axes for spec in self.specs)
        return KVView.split(key, *self.tensors, value_layout=value)

    def _allocate(self, num_pages: int) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        size = self._page_size
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
        self.is_kept = is_kept
        self.pool = BlockPool((format.max_tokens or 0) // format.page_size if is_kept else 0)
        self.storages: dict[int, PagedStorage] = {}
        self.batches: weakref.WeakSet[PagedBatch] = weakref.WeakSet()

    def append(self, tables: Sequence[BlockTable], num_tokens: Sequence[int]) -> bool:
        """``append_all``, after growing the pool as often as it takes; runs the copies in every layer.

        Returns:
            Whether a table has other pages now.

        Raises:
            OutOfBlocks: ``format.max_tokens`` is reached; nothing was changed.
        """
        before = sum(table.num_blocks for table in tables)
        copies = self._append(tables, num_tokens)
        if copies:
            for storage in self.storages.values():
                storage.grow(self.pool.num_blocks)
            copy_pages(self.storages.values(), copies, self.format.page_size)
        return bool(copies) or before != sum(table.num_blocks for table in tables)

    def give_back(self) -> None:
        """Free the tensors if nobody is left who could use them."""
        if not self.is_kept and not any(batch.size for batch in self.batches):
            self.storages.clear()
            self.pool = BlockPool(0)

    def _append(self, tables: Sequence[BlockTable], num_tokens: Sequence[int]) -> list[Copy]:
        size, max_tokens = self.format.page_size, self.format.max_tokens
        limit = None if max_tokens is None else max_tokens // size
        while True:
            try:
                return append_all(tables, num_tokens)
            except OutOfBlocks:
                have = self.pool.num_blocks
                if limit is not None and have >= limit:
                    raise OutOfBlocks(
                        f"max_tokens must hold {max(num_tokens)} more tokens of {len(tables)} sequences, "
                        f"got {max_tokens} with {self.pool.num_active} of {limit} pages taken"
                    ) from None
                # By a quarter: little is held in vain, and each token moves about four times in all.
                grown = max(have // 4, sum(-(-n // size) for n in num_tokens))
                self.pool.grow(grown if limit is None else min(grown, limit - have))


def block_ids(tables: Iterable[BlockTable], device: torch.device) -> Tensor:
    """Pages of each table, ``[B, P]`` int64 with P at least 1, short rows filled with -1."""
    rows = [[ref.id for ref in table.blocks] for table in tables]
    width = max(1, *map(len, rows))
    padded = [[*row, *[-1] * (width - len(row))] for row in rows]
    return torch.tensor(padded, dtype=torch.int64, device=device)


def copy_pages(storages: Iterable[PagedStorage], copies: Sequence[Copy], page_size: int) -> None:
    """Run the copies that a table asked for, in the storage of every layer."""
    if not copies:
        return
    sources, targets = (_page_slots(pages, page_size) for pages in zip(*copies, strict=True))
    for storage in storages:
        view = storage.view
        ops.copy(view, sources.to(view.device), view, targets.to(view.device))


def _page_slots(pages: Sequence[int], page_size: int) -> Tensor:
    """Every slot of some pages, ``[len(pages) * page_size]`` int64."""
    return (
        torch.tensor(pages, dtype=torch.int64).unsqueeze(1) * page_size + torch.arange(page_size)
    ).flatten()
