"""Tensors of one layer in pages: how they are kept, and how they grow while tokens keep their slots."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvloom import ops
from kvloom.blocks import Copy
from kvloom.core.layouts import CacheLayout
from kvloom.core.specs import KVSpec, QuantSpec
from kvloom.core.views import KVView
from kvloom.errors import ConfigError

_LAYOUT = CacheLayout("B S H D")


@dataclass(frozen=True, slots=True)
class PagedFormat:
    """How a paged layer keeps its tokens.

    Attributes:
        dtype: Of unquantised storage; ``None`` keeps that of the keys.
        quant: ``None`` for unquantised storage.
        page_size: Token slots in a page.
        max_tokens: Token slots in all, of all sequences; ``None`` grows on demand.
    """

    dtype: torch.dtype | None = None
    quant: QuantSpec | None = None
    page_size: int = 16
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.page_size, bool) or not isinstance(self.page_size, int) or self.page_size < 1:
            raise ConfigError(f"page_size must be a positive int, got {self.page_size!r}")
        if self.max_tokens is not None and self.max_tokens < self.page_size:
            raise ConfigError(
                f"max_tokens must be at least one page of {self.page_size}, got {self.max_tokens!r}"
            )

    def spec(self, heads: int, head_dim: int, dtype: torch.dtype) -> KVSpec:
        """Keys or values of one layer whose model computes in ``dtype``."""
        return KVSpec(1, heads, head_dim, dtype if self.dtype is None else self.dtype, _LAYOUT, self.quant)


class PagedStorage:
    """Keys and values of one layer, ``[pages, page_size, H, D]`` each, and their scales.

    Args:
        key: Spec of the keys.
        value: Spec of the values.
        page_size: Token slots in a page.
        device: Where the tensors live.
    """

    def __init__(self, key: KVSpec, value: KVSpec, page_size: int, device: torch.device) -> None:
        self.specs = (key, value)
        self._page_size = page_size
        self._device = device
        self.tensors = self._allocate(0)
        self.view = KVView.split(_LAYOUT, *self.tensors)

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

    def grow(self, num_pages: int) -> None:
        """Hold at least ``num_pages`` pages; bytes keep their slots. A ``view`` taken before is stale."""
        if num_pages <= self.num_pages:
            return
        old, self.tensors = self.tensors, self._allocate(num_pages)
        for target, source in zip(self.tensors, old, strict=True):
            if target is not None and source is not None:
                target[: source.shape[0]] = source
        self.view = KVView.split(_LAYOUT, *self.tensors)

    def _allocate(self, num_pages: int) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        size = self._page_size
        (key, key_scale), (value, value_scale) = (
            spec.empty(num_pages * size, size, device=self._device) for spec in self.specs
        )
        return key, value, key_scale, value_scale


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
