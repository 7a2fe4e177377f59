"""Keys and values of one attention layer in pages that are taken as a batch grows.

Letters: B sequences, Q new tokens of each, N stored tokens of each, H heads, D head dim.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvloom import ops
from kvloom.core.checks import expect
from kvloom.core.layouts import CacheLayout
from kvloom.core.specs import KVSpec, QuantSpec
from kvloom.core.views import KVView
from kvloom.errors import ConfigError, OutOfBlocks, ShapeError, StateError

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


class PagedLayer:
    """Keys and values of B sequences of one length, in pages.

    Nothing is allocated before the first ``append``, which fixes B, H, both head dims and the device. Storage
    grows by doubling, so that appending n tokens moves O(n) bytes in all. A page belongs to one sequence.
    """

    def __init__(self, format: PagedFormat) -> None:
        self.format = format
        self.num_tokens = 0
        self._specs: tuple[KVSpec, KVSpec] | None = None
        self._tensors: tuple[Tensor, Tensor, Tensor | None, Tensor | None] | None = None
        self._pages: Tensor | None = None  # [B, P] page ids
        self._num_pages = 0

    @property
    def nbytes(self) -> int:
        """Bytes allocated, scales included."""
        return 0 if self._tensors is None else sum(x.nbytes for x in self._tensors if x is not None)

    @property
    def nbytes_per_token(self) -> float:
        """Bytes that one token of one sequence takes, scales included."""
        size = self.format.page_size
        return 0.0 if self._specs is None else sum(spec.nbytes(size, size) for spec in self._specs) / size

    def append(self, key: Tensor, value: Tensor) -> None:
        """Store new tokens behind the ones that are there.

        Args:
            key: ``[B, H, Q, Dk]`` float32, float16 or bfloat16.
            value: ``[B, H, Q, Dv]``, dtype and device of ``key``.

        Raises:
            ShapeError: B, H, a head dim or the device differs from the first ``append``; nothing was written.
            OutOfBlocks: ``max_tokens`` is reached; nothing was written.
        """
        sizes = expect("key", key, "B H Q Dk")
        expect(
            "value",
            value,
            "B H Q Dv",
            dtype=key.dtype,
            device=key.device,
            B=sizes["B"],
            H=sizes["H"],
            Q=sizes["Q"],
        )
        if self._pages is None:
            self._specs = (
                self.format.spec(key.shape[1], key.shape[3], key.dtype),
                self.format.spec(value.shape[1], value.shape[3], key.dtype),
            )
            self._pages = torch.empty(sizes["B"], 0, dtype=torch.int64, device=key.device)
        elif self._pages.shape[0] != sizes["B"]:
            raise ShapeError(
                f"key must have the {self._pages.shape[0]} sequences of this cache, got {sizes['B']}"
            )
        end = self.num_tokens + sizes["Q"]
        self._reserve(end)
        slots = self._slots(self.num_tokens, end)
        ops.store(key.transpose(1, 2).flatten(0, 1), value.transpose(1, 2).flatten(0, 1), slots, self._view())
        self.num_tokens = end

    def gather(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Everything stored, dequantised: keys ``[B, H, N, Dk]`` and values ``[B, H, N, Dv]``."""
        if self._pages is None:
            raise StateError("gather needs a cache to which tokens were appended")
        key, value = ops.load(self._slots(0, self.num_tokens), self._view(), dtype=dtype)
        rows = (self._pages.shape[0], self.num_tokens)
        return key.unflatten(0, rows).transpose(1, 2), value.unflatten(0, rows).transpose(1, 2)

    def truncate(self, num_tokens: int) -> None:
        """Keep the first ``num_tokens`` of each sequence; their pages stay taken."""
        if not 0 <= num_tokens <= self.num_tokens:
            raise StateError(f"num_tokens must be in [0, {self.num_tokens}], got {num_tokens}")
        self.num_tokens = num_tokens

    def reset(self) -> None:
        """Forget all tokens, the batch and its shapes; the memory is given back."""
        self.__init__(self.format)  # type: ignore[misc]

    def _slots(self, start: int, end: int) -> Tensor:
        """Slots of positions ``start .. end`` of every sequence, ``[B * (end - start)]``."""
        if self._pages is None:
            raise StateError("this cache has no pages yet")
        position = torch.arange(start, end, device=self._pages.device)
        size = self.format.page_size
        return (self._pages[:, position // size] * size + position % size).flatten()

    def _view(self) -> KVView:
        if self._tensors is None:
            raise StateError("this cache has no storage yet")
        key, value, key_scale, value_scale = self._tensors
        return KVView.split(_LAYOUT, key, value, key_scale, value_scale)

    def _reserve(self, num_tokens: int) -> None:
        """Give every sequence pages for ``num_tokens`` tokens, all or none."""
        if self._pages is None or self._specs is None:
            raise StateError("this cache has no batch yet")
        batch, have = self._pages.shape
        more = -(-num_tokens // self.format.page_size) - have
        if more <= 0 and self._tensors is not None:
            return
        wanted = self._num_pages + batch * max(more, 0)
        limit = None if self.format.max_tokens is None else self.format.max_tokens // self.format.page_size
        if limit is not None and wanted > limit:
            raise OutOfBlocks(f"max_tokens must hold {wanted} pages of {self.format.page_size}, got {limit}")
        self._grow(wanted, limit)
        new = torch.arange(self._num_pages, wanted, device=self._pages.device).view(batch, -1)
        self._pages = torch.cat((self._pages, new), dim=1)
        self._num_pages = wanted

    def _grow(self, num_pages: int, limit: int | None) -> None:
        """Make room for ``num_pages`` pages, at least doubling; stored bytes keep their slots."""
        if self._specs is None or self._pages is None:
            raise StateError("this cache has no batch yet")
        old = self._tensors
        capacity = 0 if old is None else old[0].shape[0]
        if old is not None and num_pages <= capacity:
            return
        capacity = max(num_pages, 2 * capacity)
        capacity = capacity if limit is None else min(capacity, limit)
        size, device = self.format.page_size, self._pages.device
        (key, key_scale), (value, value_scale) = (
            spec.empty(capacity * size, size, device=device) for spec in self._specs
        )
        if old is not None:
            for new_tensor, old_tensor in zip((key, value, key_scale, value_scale), old, strict=True):
                if new_tensor is not None and old_tensor is not None:
                    new_tensor[: old_tensor.shape[0]] = old_tensor
        self._tensors = (key, value, key_scale, value_scale)
