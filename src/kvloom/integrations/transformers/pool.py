"""Prefixes that the caches of one model share, found by their tokens."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvloom.caches import Pages, Sequences
from kvloom.caches.saving import hold, save_pages
from kvloom.core.checks import INDEX_DTYPES, expect
from kvloom.errors import ArgumentError, UnsupportedError
from kvloom.integrations.transformers.build import cache_format, make_layers, text_config_of
from kvloom.integrations.transformers.cache import KVCache
from kvloom.integrations.transformers.layers import KVCacheLayer
from kvloom.paging import PageRef, PageTable, PrefixTree, check


class KVPool:
    """Pages of one size, in which a new cache finds what earlier ones computed for the same first tokens.

    Sharing is exact, by the tokens themselves, in whole pages, and only within a salt. When all pages are
    taken, those that no cache holds are given up, least recently used first::

        pool = KVPool.for_model(model, max_tokens=100_000)
        cache = pool.begin(input_ids)
        output = model.generate(input_ids, past_key_values=cache)
        pool.commit(cache, output)

    Args:
        model: A ``PreTrainedModel`` all of whose layers attend to the whole sequence.
        pages: Where they keep their tokens.
    """

    def __init__(self, model: Any, pages: Pages) -> None:
        self._empty = KVCache(make_layers(model, pages.format, sequences=Sequences(pages)))
        self._states = torch.empty(0, dtype=model.dtype, device=model.device)
        self._pages = pages
        self._tree = PrefixTree(pages.pool, pages.format.page_size)
        self._num_asked = self._num_found = 0

    def __getstate__(self) -> dict[str, Any]:
        """To be saved: the pages that can be found, and no model."""
        known = list(self._tree.sequences())
        places = save_pages(self._pages, (ref for *_, refs in known for ref in refs))
        saved = [(salt, tokens, [places[ref] for ref in refs]) for salt, tokens, refs in known]
        return vars(self) | {"_tree": saved}

    def __setstate__(self, state: dict[str, Any]) -> None:
        saved = state.pop("_tree")
        self.__dict__.update(state)
        pages = self._pages
        pages.keep()
        self._tree = PrefixTree(pages.pool, pages.format.page_size)
        for salt, tokens, places in saved:
            for ref in self._tree.insert(tokens, hold(pages, places), salt):
                pages.pool.release(ref)

    @classmethod
    def for_model(
        cls,
        model: Any,
        kv: str = "auto",
        page_size: int = 16,
        *,
        max_tokens: int,
        values: str | None = None,
        layout: str = "auto",
    ) -> "KVPool":
        """An empty pool of ``max_tokens`` token slots in each layer, taken at the first update.

        The other arguments are those of ``KVCache.for_model``.

        Raises:
            ArgumentError: as ``KVCache.for_model``.
            UnsupportedError: a layer has a window or a recurrent state, which a prefix of pages cannot give.
        """
        config = text_config_of(model)
        format = cache_format(config, kv, page_size, max_tokens, values, layout)
        for layer in make_layers(model, format):
            if type(layer) is not KVCacheLayer or layer.is_sliding:
                raise UnsupportedError(
                    f"model must attend to the whole sequence in every layer, got {type(layer).__name__} in "
                    f"{type(model).__name__}"
                )
        return cls(model, Pages(format, is_kept=True))

    def begin(self, input_ids: Tensor, salt: str = "") -> KVCache:
        """A cache that holds the longest first part of every row that is known, in whole pages.

        The last token is always left to compute. Rows are of one length, so the shortest match counts.

        Args:
            input_ids: ``[B, T]`` int64 or int32 without padding.
            salt: Only caches of one salt share pages.
        """
        expect("input_ids", input_ids, "B T", dtype=INDEX_DTYPES)
        if not input_ids.numel():
            raise ArgumentError(f"input_ids must hold at least one token, got {list(input_ids.shape)}")
        cache = self._empty.fork()
        found = [self._tree.match(row, salt, max_tokens=len(row) - 1) for row in input_ids.tolist()]
        num_pages = min(map(len, found))
        tables = [self._table(refs, num_pages) for refs in found]
        self._num_asked += input_ids.numel()
        if num_pages == 0:
            return cache
        sequences = cache.sequences[0]
        sequences.adopt(tables)
        for layer in cache.layers:
            layer.pages.num_tokens = sequences.num_positions
            layer.lazy_initialization(self._states)
        self._num_found += sequences.num_positions * sequences.size
        return cache

    def commit(self, cache: KVCache, input_ids: Tensor, salt: str = "") -> None:
        """Let later caches find the full pages of this one.

        Args:
            cache: One that ``begin`` made.
            input_ids: ``[B, T]``, row by row the tokens that the cache holds, such as what ``generate``
                returned; the last one, which was sampled and not computed, may be among them. After beam
                search rows are no longer the cache's.
            salt: As for ``begin``.

        Raises:
            ArgumentError: the cache is of another pool, or holds other numbers of rows or tokens.
            StateError: an update broke off; or pages of a row are known under other tokens, then that row and
                those after it stay unknown.
        """
        if [sequences.pages for sequences in cache.sequences] != [self._pages]:
            raise ArgumentError("cache must be one that this pool began, got another's")
        cache.expect_whole()
        sequences = cache.sequences[0]
        num_tokens = sequences.num_positions
        sizes = expect("input_ids", input_ids, "B T", dtype=INDEX_DTYPES, B=sequences.size)
        if not num_tokens <= sizes["T"] <= num_tokens + 1:
            raise ArgumentError(
                f"input_ids must be the {num_tokens} tokens of the cache, or one more, got {sizes['T']}"
            )
        sequences.commit(self._tree, input_ids[:, :num_tokens].tolist(), salt)

    def check(self) -> None:
        """Recompute the invariants of pages and prefixes; raises ``StateError`` on the first that fails."""
        tables = [table for sequences in self._pages.users for table in sequences.tables]
        check(self._pages.pool, self._tree, tables)

    def report(self) -> dict[str, int]:
        """Pages by state, and how many of the tokens that ``begin`` looked up were found."""
        pool = self._pages.pool
        return {
            "num_pages": pool.num_pages,
            "free": pool.num_free,
            "active": pool.num_active,
            "evictable": pool.num_evictable,
            "tokens_asked": self._num_asked,
            "tokens_found": self._num_found,
        }

    def _table(self, refs: Sequence[PageRef], num_pages: int) -> PageTable:
        """A table that begins with the first of some pages; the others are released."""
        for ref in refs[num_pages:]:
            self._pages.pool.release(ref)
        table = PageTable(self._pages.pool, self._pages.format.page_size)
        table.adopt(refs[:num_pages])
        return table
