"""Ragged sequences in one pool of pages, sharing every full page that begins with the same tokens.

Shapes: T new tokens, H key/value heads, Hq query heads, Dk and Dv head dims.
"""

from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import Tensor

from kvloom import ops
from kvloom.caches.format import CacheFormat
from kvloom.caches.pages import Pages
from kvloom.caches.saving import SavedStorage
from kvloom.caches.storage import Storage
from kvloom.core.checks import expect_range
from kvloom.core.indexing import CacheIndex
from kvloom.errors import ArgumentError, ConfigError, StateError
from kvloom.paging import PageRef, PageTable, PrefixTree, check


class Below(Protocol):
    """What lies below the pages of a cache, such as a store; ``salt`` is as in ``PrefixCache.begin``."""

    def fetch(self, tokens: Sequence[int], found: list[PageRef], salt: str) -> list[PageRef]:
        """The pages ``found`` of the first tokens, and those that could be read behind them, held."""

    def keep(self, tokens: Sequence[int], refs: Sequence[PageRef], salt: str) -> None:
        """Take the full pages of a text that were sealed."""


class PrefixSequence:
    """One sequence of a ``PrefixCache``; made by ``begin`` and ``fork``, used until ``end``.

    Attributes:
        tokens: Token ids, those included whose keys and values are still to come.
        salt: Only sequences of one salt share pages.
        num_cached: Tokens whose keys and values were found when it began, and need no compute.
    """

    __slots__ = ("num_cached", "salt", "stored", "table", "tokens")

    def __init__(self, tokens: list[int], salt: str, table: PageTable, num_layers: int) -> None:
        self.tokens = tokens
        self.salt = salt
        self.table = table
        self.num_cached = table.num_tokens
        self.stored = [table.num_tokens] * num_layers

    @property
    def num_pending(self) -> int:
        """Tokens whose keys and values some layer does not have yet."""
        return len(self.tokens) - min(self.stored)


class PrefixCache:
    """Keys and values of many sequences; full pages are found again by their tokens.

    The protocol of a step: ``begin`` (or ``extend``), ``append`` in every layer, ``commit``; then ``attend``
    at any time. Sharing is exact, never by a hash alone, and only within a salt. A page is copied when one of
    its holders writes it. When the pool is full, pages that nobody holds are given up, least recently used
    first if ``policy`` says no other.

    Args:
        format: How tokens are kept, ``max_tokens`` of them in each layer.
        num_layers: Attention layers.
        heads: Key/value heads.
        head_dim: Elements of a head vector of the keys and, without ``value_dim``, of the values.
        value_dim: Elements of a head vector of the values.
        dtype: That the model computes in: of unquantized tokens, unless ``format`` says another.
        device: Where the tensors live.
        policy: Which pages are given up, as of ``PagePool``.

    Attributes:
        below: Where sealed pages go and missing ones come from; ``kvloom.store.put_below`` sets it.

    Raises:
        ConfigError: ``format`` has no ``max_tokens``.
        ArgumentError: there is no such policy.
    """

    def __init__(
        self,
        format: CacheFormat,
        *,
        num_layers: int,
        heads: int,
        head_dim: int,
        value_dim: int | None = None,
        dtype: torch.dtype = torch.float16,
        device: torch.device | str = "cpu",
        policy: str = "lru",
    ) -> None:
        if format.max_tokens is None:
            raise ConfigError("format must have max_tokens, got None")
        if format.recent:
            raise ConfigError(f"format must have recent 0, as pages hold no others, got {format.recent}")
        expect_range("num_layers", num_layers, 1)
        self.pages = Pages(format, is_kept=True, policy=policy)
        self.tree = PrefixTree(self.pages.pool, format.page_size)
        key = format.spec(heads, head_dim, dtype)
        value = (format.values or format).spec(heads, head_dim if value_dim is None else value_dim, dtype)
        device = torch.device(device)
        for i in range(num_layers):
            storage = Storage(key, value, format.page_size, device, format.layout)
            self.pages.fit(storage)
            self.pages.storages[i] = storage
        self.below: Below | None = None
        self._sequences: list[PrefixSequence] = []

    def __getstate__(self) -> dict[str, Any]:
        """To be saved: the pages that hold something, and nothing below them."""
        pool = self.pages.pool
        pages = [page for page in range(pool.num_pages) if not pool.is_free(page)]
        saved = [SavedStorage.of(x, self.pages.slots(pages, x)) for x in self.layers]
        return vars(self) | {"_pool": pool, "_held": pages, "_saved": saved, "below": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        pool, pages, saved = (state.pop(name) for name in ("_pool", "_held", "_saved"))
        vars(self).update(state)
        self.pages.pool = pool
        for i, layer in enumerate(saved):
            self.pages.storages[i] = storage = layer.storage()
            self.pages.fit(storage)
            layer.write(storage, self.pages.slots(pages, storage))

    @property
    def layers(self) -> list[Storage]:
        """The tensors of each layer."""
        return list(self.pages.storages.values())

    def __enter__(self) -> "PrefixCache":  # noqa: PYI034 (Self is not in Python 3.10)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for sequence in self._sequences.copy():
            self.end(sequence)

    @property
    def nbytes(self) -> int:
        """Bytes allocated in all layers, scales included."""
        return sum(layer.nbytes for layer in self.layers)

    def begin(self, tokens: Iterable[int], salt: str = "") -> PrefixSequence:
        """A sequence of ``tokens``, of which the longest known prefix in whole pages is already cached.

        The last token is never taken from the cache, since its output must be computed.

        Raises:
            ArgumentError: ``tokens`` is empty.
        """
        ids = list(tokens)
        if not ids:
            raise ArgumentError("tokens must hold at least one token, got none")
        found = self.tree.match(ids, salt, max_tokens=len(ids) - 1)
        table = PageTable(self.pages.pool, self.pages.format.page_size)
        table.adopt(found if self.below is None else self.below.fetch(ids[:-1], found, salt))
        return self._keep(PrefixSequence(ids, salt, table, len(self.pages.storages)))

    def extend(self, sequence: PrefixSequence, tokens: Iterable[int]) -> None:
        """Add tokens whose keys and values come next."""
        self._expect_live(sequence)
        sequence.tokens += tokens

    def append(self, sequence: PrefixSequence, layer: int, key: Tensor, value: Tensor) -> None:
        """Store the next T pending tokens of a layer.

        Args:
            sequence: A live sequence with at least T pending tokens in this layer.
            layer: Index of the layer.
            key: ``[T, H, Dk]``.
            value: ``[T, H, Dv]``.

        Raises:
            ArgumentError: more tokens than pending, or no such layer; nothing was written.
            OutOfPages: every page is held; nothing was written.
            ShapeError: as ``ops.store``.
        """
        self._expect_live(sequence)
        expect_range("layer", layer, 0, len(self.pages.storages))
        start = sequence.stored[layer]
        end = start + key.shape[0]
        if end > len(sequence.tokens):
            raise ArgumentError(
                f"key must have at most the {len(sequence.tokens) - start} tokens that are pending in layer "
                f"{layer}, got {key.shape[0]}"
            )
        if end > sequence.table.num_tokens:
            self.pages.append([sequence.table], [end - sequence.table.num_tokens])
        storage = self.pages.storages[layer]
        position = torch.arange(start, end, device=storage.device)
        slots = self._index([sequence], storage).slots(torch.zeros_like(position), position)
        storage.store(key, value, slots)
        sequence.stored[layer] = end

    def commit(self, sequence: PrefixSequence) -> None:
        """Seal the full pages of a sequence, so that others find them.

        Raises:
            StateError: layers differ in the tokens they have.
        """
        self._settle(sequence)
        known = sequence.tokens[: sequence.table.num_tokens]
        sequence.table.claim()
        sequence.table.replace(self.tree.insert(known, sequence.table.pages, sequence.salt))
        if self.below is not None:
            self.below.keep(known, sequence.table.pages, sequence.salt)

    def attend(
        self,
        queries: Tensor,
        sequences: Sequence[PrefixSequence],
        layer: int,
        scores: ops.Scores | None = None,
    ) -> Tensor:
        """Attention of each sequence's last tokens over all it has in ``layer``.

        Args:
            queries: ``[sum of new tokens, Hq, Dk]``, the same number for each sequence.
            sequences: Live sequences with at least one token in this layer.
            layer: Index of the layer.
            scores: Masks and biases; causal if ``None``.

        Returns:
            ``[sum of new tokens, Hq, Dv]``.

        Raises:
            ArgumentError: the queries are not the same number for each sequence, or more than it has tokens.
        """
        expect_range("layer", layer, 0, len(self.pages.storages))
        for sequence in sequences:
            self._expect_live(sequence)
        if not sequences or queries.shape[0] % len(sequences):
            raise ArgumentError(
                f"queries must be shared out to {len(sequences)} sequences, got {queries.shape[0]}"
            )
        num_new = queries.shape[0] // len(sequences)
        lengths = [sequence.stored[layer] for sequence in sequences]
        if min(lengths) < max(num_new, 1):
            raise ArgumentError(f"queries must be at most {min(lengths)} for each sequence, got {num_new}")
        storage, where = self.pages.storages[layer], queries.device
        batch = ops.Batch(
            self._index(sequences, storage),
            torch.arange(len(sequences) + 1, device=where) * num_new,
            torch.tensor([0, *lengths], device=where).cumsum(0),
        )
        return storage.attend(queries, batch, ops.Scores() if scores is None else scores)

    def fork(self, sequence: PrefixSequence) -> PrefixSequence:
        """Another sequence of the same tokens on the same pages.

        Raises:
            StateError: layers differ in the tokens they have.
        """
        self._settle(sequence)
        other = PrefixSequence(
            sequence.tokens.copy(), sequence.salt, sequence.table.fork(), len(self.pages.storages)
        )
        other.stored = sequence.stored.copy()
        return self._keep(other)

    def truncate(self, sequence: PrefixSequence, num_tokens: int) -> None:
        """Keep the first ``num_tokens`` tokens, pending ones included.

        Raises:
            ArgumentError: there are fewer.
        """
        self._expect_live(sequence)
        expect_range("num_tokens", num_tokens, 0, len(sequence.tokens) + 1)
        del sequence.tokens[num_tokens:]
        sequence.stored = [min(n, num_tokens) for n in sequence.stored]
        sequence.table.truncate(min(num_tokens, sequence.table.num_tokens))

    def end(self, sequence: PrefixSequence) -> None:
        """Give up a sequence; its sealed pages stay findable until the pool needs them."""
        self._expect_live(sequence)
        self._sequences.remove(sequence)
        sequence.table.release()

    def check(self) -> None:
        """Recompute every invariant of the pages; raises ``StateError`` on the first that does not hold."""
        check(self.pages.pool, self.tree, [sequence.table for sequence in self._sequences])

    def report(self) -> dict[str, int]:
        """Sequences, and pages free, held and findable; the pages sum to ``num_pages``."""
        return {
            "sequences": len(self._sequences),
            "num_pages": self.pages.pool.num_pages,
            "free": self.pages.pool.num_free,
            "active": self.pages.pool.num_active,
            "evictable": self.pages.pool.num_evictable,
        }

    def _keep(self, sequence: PrefixSequence) -> PrefixSequence:
        self._sequences.append(sequence)
        return sequence

    def _expect_live(self, sequence: PrefixSequence) -> None:
        if not any(sequence is known for known in self._sequences):
            raise StateError("this sequence has ended, or belongs to another cache")

    def _settle(self, sequence: PrefixSequence) -> None:
        """Check that a step is whole, and give up room that was reserved and not written."""
        self._expect_live(sequence)
        if len(set(sequence.stored)) != 1:
            raise StateError(f"every layer must have the same tokens, got {sequence.stored}")
        sequence.table.truncate(sequence.stored[0])

    def _index(self, sequences: Sequence[PrefixSequence], storage: Storage) -> CacheIndex:
        """Slots of the tokens of some sequences."""
        table = self.pages.table([x.table for x in sequences], storage)
        return CacheIndex.pages(table, storage.page_size)
