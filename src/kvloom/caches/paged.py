"""Keys and values of one attention layer in pages that are taken as a batch grows.

Letters: B sequences, Q new tokens of each, N stored tokens of each, H heads, D head dim.
"""

import torch
from torch import Tensor

from kvloom import ops
from kvloom.caches.storage import PagedFormat, PagedStorage
from kvloom.core.checks import expect
from kvloom.errors import OutOfBlocks, ShapeError, StateError


class PagedLayer:
    """Keys and values of B sequences of one length, in pages.

    Nothing is allocated before the first ``append``, which fixes B, H, both head dims and the device. Storage
    grows by doubling, so that appending n tokens moves O(n) bytes in all. A page belongs to one sequence.
    """

    def __init__(self, format: PagedFormat) -> None:
        self.format = format
        self.num_tokens = 0
        self._storage: PagedStorage | None = None
        self._slots = torch.empty(0, 0, dtype=torch.int64)  # [B, tokens in the pages taken]

    @property
    def nbytes(self) -> int:
        """Bytes allocated, scales included."""
        return 0 if self._storage is None else self._storage.nbytes

    @property
    def nbytes_per_token(self) -> float:
        """Bytes that one token of one sequence takes, scales included; 0 before the first ``append``."""
        return 0.0 if self._storage is None else self._storage.nbytes_per_token

    def append(self, key: Tensor, value: Tensor) -> None:
        """Store new tokens behind the ones that are there.

        Args:
            key: ``[B, H, Q, Dk]`` float32, float16 or bfloat16.
            value: ``[B, H, Q, Dv]``, dtype and device of ``key``.

        Raises:
            ShapeError: B, H, a head dim or the device differs from the first ``append``; nothing was written.
            OutOfBlocks: ``max_tokens`` is reached; nothing was written.
        """
        batch, heads, num_new, _ = expect("key", key, "B H Q Dk").values()
        expect("value", value, "B H Q Dv", dtype=key.dtype, device=key.device, B=batch, H=heads, Q=num_new)
        storage, slots = self._storage, self._slots
        if storage is None:
            key_spec = self.format.spec(heads, key.shape[3], key.dtype)
            value_spec = self.format.spec(heads, value.shape[3], key.dtype)
            storage = PagedStorage(key_spec, value_spec, self.format.page_size, key.device)
            slots = torch.empty(batch, 0, dtype=torch.int64, device=key.device)
        elif slots.shape[0] != batch:
            raise ShapeError(f"key must have the {slots.shape[0]} sequences of this cache, got {batch}")
        end = self.num_tokens + num_new
        if end > slots.shape[1]:
            slots = self._take(storage, slots, end)
        new = slots[:, self.num_tokens : end].flatten()
        ops.store(key.transpose(1, 2).flatten(0, 1), value.transpose(1, 2).flatten(0, 1), new, storage.view)
        self._storage, self._slots, self.num_tokens = storage, slots, end

    def gather(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Everything stored, dequantised: keys ``[B, H, N, Dk]`` and values ``[B, H, N, Dv]``."""
        if self._storage is None:
            raise StateError("gather needs a cache to which tokens were appended")
        slots = self._slots[:, : self.num_tokens]
        key, value = ops.load(slots.flatten(), self._storage.view, dtype=dtype)
        key, value = (x.unflatten(0, slots.shape).transpose(1, 2) for x in (key, value))
        return key, value

    def truncate(self, num_tokens: int) -> None:
        """Keep the first ``num_tokens`` of each sequence; their pages stay taken.

        Raises:
            StateError: there are fewer.
        """
        if not 0 <= num_tokens <= self.num_tokens:
            raise StateError(f"num_tokens must be in [0, {self.num_tokens}], got {num_tokens}")
        self.num_tokens = num_tokens

    def reset(self) -> None:
        """Forget all tokens, the batch and its shapes; the memory is given back."""
        self.num_tokens, self._storage, self._slots = 0, None, self._slots.new_empty(0, 0)

    def _take(self, storage: PagedStorage, slots: Tensor, num_tokens: int) -> Tensor:
        """Slots of all sequences with pages for ``num_tokens`` tokens each, all or none."""
        size, (batch, have) = self.format.page_size, slots.shape
        more = -(-num_tokens // size) - have // size
        first = batch * have // size
        wanted = first + batch * more
        limit = None if self.format.max_tokens is None else self.format.max_tokens // size
        if limit is not None and wanted > limit:
            raise OutOfBlocks(f"max_tokens must hold {wanted} pages of {size}, got {limit}")
        if wanted > storage.num_pages:
            doubled = max(wanted, 2 * storage.num_pages)
            storage.grow(doubled if limit is None else min(doubled, limit))
        new = torch.arange(first * size, wanted * size, device=slots.device).view(batch, -1)
        return torch.cat((slots, new), dim=1)
