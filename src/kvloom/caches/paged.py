"""Keys and values of one attention layer in pages that are taken as a batch grows.

Letters: B sequences, Q new tokens of each, N stored tokens of each, H heads, D head dim.
"""

import torch
from torch import Tensor

from kvloom import ops
from kvloom.caches.batch import PagedBatch
from kvloom.caches.storage import PagedFormat, PagedStorage
from kvloom.core.checks import FLOAT_DTYPES, expect
from kvloom.errors import ShapeError, StateError


class PagedLayer:
    """Keys and values of B sequences of one length, in pages.

    Nothing is allocated before the first ``append``, which fixes B, H, both head dims and the device. Storage
    grows by doubling, so that appending n tokens moves O(n) bytes in all.

    Args:
        format: How tokens are kept.
        batch: The sequences, shared with the other layers of a cache; sequences of its own if ``None``.
        index: Number of this layer among those that share ``batch``.
    """

    def __init__(self, format: PagedFormat, batch: PagedBatch | None = None, index: int = 0) -> None:
        self.format = format
        self.batch = PagedBatch(format) if batch is None else batch
        self.index = index
        self.num_tokens = 0

    @property
    def storage(self) -> PagedStorage | None:
        """The tensors of this layer; ``None`` before the first ``append``."""
        return self.batch.storages.get(self.index)

    @property
    def nbytes(self) -> int:
        """Bytes allocated, scales included."""
        return 0 if self.storage is None else self.storage.nbytes

    @property
    def nbytes_per_token(self) -> float:
        """Bytes that one token of one sequence takes, scales included; 0 before the first ``append``."""
        return 0.0 if self.storage is None else self.storage.nbytes_per_token

    def append(self, key: Tensor, value: Tensor) -> None:
        """Store new tokens behind the ones that are there.

        Args:
            key: ``[B, H, Q, Dk]`` float32, float16 or bfloat16.
            value: ``[B, H, Q, Dv]``, dtype and device of ``key``.

        Raises:
            ShapeError: B, H, a head dim or the device differs from the first ``append``; nothing was written.
            OutOfBlocks: ``max_tokens`` is reached; nothing was written.
        """
        rows, heads, num_new, _ = expect("key", key, "B H Q Dk", dtype=FLOAT_DTYPES).values()
        expect("value", value, "B H Q Dv", dtype=key.dtype, device=key.device, B=rows, H=heads, Q=num_new)
        storage = self._storage_for(key, value)
        end = self.num_tokens + num_new
        self.batch.reserve(rows, end)
        storage.grow(self.batch.num_pages)
        self.batch.storages[self.index] = storage
        slots = self.batch.slots(self.num_tokens, end, key.device).flatten()
        ops.store(key.transpose(1, 2).flatten(0, 1), value.transpose(1, 2).flatten(0, 1), slots, storage.view)
        self.num_tokens = end

    def gather(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Everything stored, dequantised: keys ``[B, H, N, Dk]`` and values ``[B, H, N, Dv]``.

        Raises:
            StateError: nothing was appended yet.
        """
        storage = self.storage
        if storage is None:
            raise StateError("gather needs a cache to which tokens were appended")
        slots = self.batch.slots(0, self.num_tokens, storage.view.device)
        key, value = ops.load(slots.flatten(), storage.view, dtype=dtype)
        key, value = (x.unflatten(0, slots.shape).transpose(1, 2) for x in (key, value))
        return key, value

    def truncate(self, num_tokens: int) -> None:
        """Keep the first ``num_tokens`` of each sequence.

        Raises:
            StateError: there are fewer.
        """
        if not 0 <= num_tokens <= self.num_tokens:
            raise StateError(f"num_tokens must be in [0, {self.num_tokens}], got {num_tokens}")
        self.num_tokens = num_tokens
        self.batch.truncate(num_tokens)

    def reset(self) -> None:
        """Forget all tokens, the batch and its shapes; the memory is given back."""
        self.num_tokens = 0
        self.batch.clear()

    def _storage_for(self, key: Tensor, value: Tensor) -> PagedStorage:
        """The storage of this layer, of the shapes and on the device of new tokens."""
        storage = self.storage
        if storage is None:
            key_spec, value_spec = (self.format.spec(x.shape[1], x.shape[3], key.dtype) for x in (key, value))
            return PagedStorage(key_spec, value_spec, self.format.page_size, key.device)
        held = [(spec.heads, spec.head_dim) for spec in storage.specs]
        for name, x, shape in (("key", key, held[0]), ("value", value, held[1])):
            if (x.shape[1], x.shape[3]) != shape:
                raise ShapeError(f"{name} must have {shape[0]} heads of {shape[1]}, got {list(x.shape)}")
        if key.device != storage.view.device:
            raise ShapeError(f"key must be on {storage.view.device}, got {key.device}")
        return storage
