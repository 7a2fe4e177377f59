"""Ragged sequences in one pool of pages, sharing every full page that begins with the same tokens.

Letters: T new tokens, H key/value heads, Hq query heads, Dk and Dv head dims.
"""

from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from kvloom import ops
from kvloom.caches.saving import SavedStorage
from kvloom.caches.storage import PagedFormat, PagedStorage, copy_pages, page_ids
from kvloom.core.checks import expect_range
from kvloom.core.indexing import CacheIndex
from kvloom.core.specs import KVSpec
from kvloom.errors import ArgumentError, StateError
from kvloom.paging import Growth, PagePool, PageTable, PrefixTree, check


class PagedSequence:
    """One sequence of a ``PagedCache``; made by ``begin`` and ``fork``, used until ``end``.

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


class PagedCache:
    """Keys and values of many sequences; full pages are found again by their tokens.

    The protocol of a step: ``begin`` (or ``extend``), ``append`` in every layer, ``commit``; then ``attend``
    at any time. Sharing is exact, never by a hash alone, and only within a salt. A page is copied when one of
    its holders writes it. When the pool is full, pages that nobody holds are given up, least recently used
    first.

    Args:
        key: Spec of one layer's keys (``layers`` is 1); ``heads``, ``head_dim``, ``dtype`` and ``quant``
            count.
        value: Spec of the values, as ``key`` if ``None``.
        num_layers: Attention layers.
        num_pages: Pages in the pool.
        page_size: Token slots in a page.
        device: Where the tensors live.
        layout: Axis order of the pages, see ``PagedFormat``.
    """

    def __init__(
        self,
        key: KVSpec,
        value: KVSpec | None = None,
        *,
        num_layers: int,
        num_pages: int,
        page_size: int = 16,
        device: torch.device | str = "cpu",
        layout: str = "auto",
    ) -> None:
        expect_range("num_layers", num_layers, 1)
        expect_range("num_pages", num_pages, 1)
        self.page_size = PagedFormat(page_size=page_size).page_size
        self.pool = PagePool(num_pages)
        self.tree = PrefixTree(self.pool, page_size)
        self.layers = [
            PagedStorage(key, key if value is None else value, page_size, torch.device(device), layout)
            for _ in range(num_layers)
        ]
        self._device = self.layers[0].view.device
        for layer in self.layers:
            layer.grow(num_pages)
        self._sequences: list[PagedSequence] = []

    def __getstate__(self) -> dict[str, Any]:
        """To be saved: the pages that hold something."""
        pages = [page for page in range(self.pool.num_pages) if not self.pool.is_free(page)]
        return vars(self) | {"layers": [SavedStorage.of(x, pages) for x in self.layers], "_pages": pages}

    def __setstate__(self, state: dict[str, Any]) -> None:
        pages, saved = state.pop("_pages"), state.pop("layers")
        vars(self).update(state, layers=[x.storage() for x in saved])
        for storage, layer in zip(self.layers, saved, strict=True):
            storage.grow(self.pool.num_pages)
            layer.write(storage, pages)
        self._device = self.layers[0].view.device

    def __enter__(self) -> "PagedCache":  # noqa: PYI034 (Self is not in Python 3.10)
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

    def begin(self, tokens: Iterable[int], salt: str = "") -> PagedSequence:
        """A sequence of ``tokens``, of which the longest known prefix in whole pages is already cached.

        The last token is never taken from the cache, since its output must be computed.

        Raises:
            ArgumentError: ``tokens`` is empty.
        """
        ids = list(tokens)
        if not ids:
            raise ArgumentError("tokens must hold at least one token, got none")
        table = PageTable(self.pool, self.page_size)
        table.adopt(self.tree.match(ids, salt, max_tokens=len(ids) - 1))
        return self._keep(PagedSequence(ids, salt, table, len(self.layers)))

    def extend(self, sequence: PagedSequence, tokens: Iterable[int]) -> None:
        """Add tokens whose keys and values come next."""
        self._expect_live(sequence)
        sequence.tokens += tokens

    def append(self, sequence: PagedSequence, layer: int, key: Tensor, value: Tensor) -> None:
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
        expect_range("layer", layer, 0, len(self.layers))
        start = sequence.stored[layer]
        end = start + key.shape[0]
        if end > len(sequence.tokens):
            raise ArgumentError(
                f"key must have at most the {len(sequence.tokens) - start} tokens that are pending in layer "
                f"{layer}, got {key.shape[0]}"
            )
        self._reserve(sequence, end)
        slots = CacheIndex.blocks(self._table([sequence]), self.page_size)
        position = torch.arange(start, end, device=key.device)
        ops.store(key, value, slots.slots(torch.zeros_like(position), position), self.layers[layer].view)
        sequence.stored[layer] = end

    def commit(self, sequence: PagedSequence) -> None:
        """Seal the full pages of a sequence, so that others find them.

        Raises:
            StateError: layers differ in the tokens they have.
        """
        self._settle(sequence)
        known = sequence.tokens[: sequence.table.num_tokens]
        sequence.table.replace(self.tree.insert(known, sequence.table.pages, sequence.salt))

    def attend(
        self,
        queries: Tensor,
        sequences: Sequence[PagedSequence],
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
        expect_range("layer", layer, 0, len(self.layers))
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
        where = queries.device
        batch = ops.Batch(
            CacheIndex.blocks(self._table(sequences), self.page_size),
            torch.arange(len(sequences) + 1, device=where) * num_new,
            torch.tensor([0, *lengths], device=where).cumsum(0),
        )
        return ops.attend(queries, self.layers[layer].view, batch, ops.Scores() if scores is None else scores)

    def fork(self, sequence: PagedSequence) -> PagedSequence:
        """Another sequence of the same tokens on the same pages.

        Raises:
            StateError: layers differ in the tokens they have.
        """
        self._settle(sequence)
        other = PagedSequence(sequence.tokens.copy(), sequence.salt, sequence.table.fork(), len(self.layers))
        other.stored = sequence.stored.copy()
        return self._keep(other)

    def truncate(self, sequence: PagedSequence, num_tokens: int) -> None:
        """Keep the first ``num_tokens`` tokens, pending ones included.

        Raises:
            ArgumentError: there are fewer.
        """
        self._expect_live(sequence)
        expect_range("num_tokens", num_tokens, 0, len(sequence.tokens) + 1)
        del sequence.tokens[num_tokens:]
        sequence.stored = [min(n, num_tokens) for n in sequence.stored]
        sequence.table.truncate(min(num_tokens, sequence.table.num_tokens))

    def end(self, sequence: PagedSequence) -> None:
        """Give up a sequence; its sealed pages stay findable until the pool needs them."""
        self._expect_live(sequence)
        self._sequences.remove(sequence)
        sequence.table.release()

    def check(self) -> None:
        """Recompute every invariant of the pages; raises ``StateError`` on the first that does not hold."""
        check(self.pool, self.tree, [sequence.table for sequence in self._sequences])

    def report(self) -> dict[str, int]:
        """Sequences, and pages free, held and findable; the pages sum to ``num_pages``."""
        return {
            "sequences": len(self._sequences),
            "num_pages": self.pool.num_pages,
            "free": self.pool.num_free,
            "active": self.pool.num_active,
            "evictable": self.pool.num_evictable,
        }

    def _keep(self, sequence: PagedSequence) -> PagedSequence:
        self._sequences.append(sequence)
        return sequence

    def _expect_live(self, sequence: PagedSequence) -> None:
        if not any(sequence is known for known in self._sequences):
            raise StateError("this sequence has ended, or belongs to another cache")

    def _settle(self, sequence: PagedSequence) -> None:
        """Check that a step is whole, and give up room that was reserved and not written."""
        self._expect_live(sequence)
        if len(set(sequence.stored)) != 1:
            raise StateError(f"every layer must have the same tokens, got {sequence.stored}")
        sequence.table.truncate(sequence.stored[0])

    def _reserve(self, sequence: PagedSequence, num_tokens: int) -> None:
        """Pages for ``num_tokens`` tokens; pages that others hold are copied in every layer."""
        more = num_tokens - sequence.table.num_tokens
        if more > 0:
            with Growth([sequence.table], [more]).made() as copies:
                copy_pages(self.layers, copies, self.page_size)

    def _table(self, sequences: Sequence[PagedSequence]) -> Tensor:
        """Block ids ``[B, P]``, rows padded with -1."""
        return page_ids([sequence.table for sequence in sequences], self._device)
