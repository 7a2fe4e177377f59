"""A layer of fixed storage in any format, for which a decode step compiles once: its length is a tensor.

Letters: B sequences, Q new tokens of each, H heads, Dk and Dv head dims.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvloom import ops
from kvloom.caches.layers import outside_inference_mode
from kvloom.caches.storage import PagedFormat, PagedStorage
from kvloom.caches.stored import Placement, StoredTokens
from kvloom.core.checks import FLOAT_DTYPES, expect
from kvloom.core.indexing import CacheIndex
from kvloom.errors import ConfigError, StateError


class StaticPagedLayer:
    """Keys and values of B sequences of at most ``format.max_tokens`` tokens each, in one page of each.

    ``append`` and ``stored`` tell of all columns; those behind the stored tokens hold finite values, and
    attention in place does not see them. Outside ``torch.compile`` each append reads the length, which waits
    for an accelerator.

    Args:
        format: How tokens are kept.
        window: Tokens that a token sees, itself included; all the same are kept.
    """

    def __init__(self, format: PagedFormat, window: int | None = None) -> None:
        if format.max_tokens is None:
            raise ConfigError("max_tokens must be given for fixed storage, got None")
        self.format = format
        self.window = window
        self.max_tokens = format.max_tokens
        self.storage: PagedStorage | None = None
        self._index = CacheIndex.offset(torch.zeros(0, dtype=torch.int64))
        with outside_inference_mode():
            self.length = torch.zeros((), dtype=torch.int64)

    @property
    def num_tokens(self) -> int:
        """Tokens of each sequence; reads the tensor."""
        return int(self.length)

    @property
    def size(self) -> int:
        """B; 0 before ``allocate``."""
        return 0 if self.storage is None else self.storage.num_pages

    @property
    def nbytes(self) -> int:
        """Bytes allocated, scales included."""
        return 0 if self.storage is None else self.storage.nbytes

    @property
    def nbytes_per_token(self) -> float:
        """Bytes that one token of one sequence takes, scales included; 0 before ``allocate``."""
        return 0.0 if self.storage is None else self.storage.nbytes_per_token

    def allocate(self, key: Tensor, value: Tensor) -> None:
        """Take the memory, zeroed, for keys and values such as these, ``[B, H, any, D]``.

        Call it before the first compiled ``append``.
        """
        rows, heads, *_ = expect("key", key, "B H Q Dk", dtype=FLOAT_DTYPES).values()
        expect("value", value, "B H Q Dv", dtype=key.dtype, device=key.device, B=rows, H=heads)
        self._hold(PagedStorage.of(self.format, key, value, self.max_tokens), rows)

    def append(self, key: Tensor, value: Tensor) -> StoredTokens:
        """Store new tokens ``[B, H, Q, D]`` behind the ones that are there, and return all columns.

        Raises:
            ShapeError: B, H, a head dim or the device is not as allocated; nothing was written.
            StateError: they do not fit (compiled: ArgumentError of ``store``); nothing was written.
        """
        compiling = torch.compiler.is_compiling()
        if self.storage is None or (not compiling and key.shape[0] != self.size and self.num_tokens == 0):
            self.allocate(key, value)
        storage, rows, num_new = self._allocated(), self.size, key.shape[2]
        storage.expect_fits(key, value, rows)
        if not compiling and (length := self.num_tokens) + num_new > self.max_tokens:
            raise StateError(
                f"max_tokens must hold {num_new} more tokens, got {self.max_tokens} with {length} taken"
            )
        position = self.length + torch.arange(num_new, device=key.device)
        # Sequences are full together: then the slots of the last one are nobody's, and nothing is stored.
        slots = self._index.table + position
        storage.store(key, value, slots)
        self.length.add_(num_new)
        return self.stored()

    def stored(self) -> StoredTokens:
        """All columns.

        Raises:
            StateError: nothing is allocated yet.
        """
        storage = self._allocated()
        placement = Placement(self._index, self.length.repeat(self.size), self.max_tokens)
        return StoredTokens(storage.view, placement, self.window)

    def truncate(self, num_tokens: int) -> None:
        """Keep the first ``num_tokens`` of each sequence.

        Raises:
            StateError: there are fewer.
        """
        if not 0 <= num_tokens <= self.num_tokens:
            raise StateError(f"num_tokens must be in [0, {self.num_tokens}], got {num_tokens}")
        self.length.fill_(num_tokens)

    def reset(self) -> None:
        """Forget all tokens; the memory stays."""
        self.length.zero_()

    def select(self, rows: Sequence[int]) -> None:
        """Make sequence i what sequence ``rows[i]`` was; as many as before keep their memory."""
        if self.storage is not None:
            old, length = self.storage, self.num_tokens
            if len(rows) != self.size:
                self._hold(old.like(self.max_tokens), len(rows))
            self._take(old, rows, length)

    def fork(self) -> "StaticPagedLayer":
        """A copy of the layer, in memory of its own."""
        other = StaticPagedLayer(self.format, self.window)
        if self.storage is not None:
            other._hold(self.storage.like(self.max_tokens), self.size)
            other._take(self.storage, range(self.size), self.num_tokens)
        return other

    def _allocated(self) -> PagedStorage:
        if self.storage is None:
            raise StateError("gather needs a cache to which tokens were appended")
        return self.storage

    def _take(self, source: PagedStorage, rows: Sequence[int], length: int) -> None:
        """Copy the first ``length`` tokens of some sequences of ``source``."""
        column = torch.arange(length, device=source.view.device)
        first = torch.tensor(rows, device=source.view.device).unsqueeze(1) * self.max_tokens
        ops.copy(
            source.view,
            (first + column).flatten(),
            self._allocated().view,
            (self._index.table + column).flatten(),
        )
        self.length.fill_(length)

    def _hold(self, storage: PagedStorage, rows: int) -> None:
        storage.grow(rows)
        device = storage.view.device
        with outside_inference_mode():
            starts = torch.arange(rows, device=device) * self.max_tokens
            self.length = torch.zeros((), dtype=torch.int64, device=device)
        self.storage, self._index = storage, CacheIndex.pages(starts.unsqueeze(1), self.max_tokens)
        for x in (*storage.tensors, self._index.table, self.length):
            if x is not None:
                torch._dynamo.mark_static_address(x)
