"""Prefixes that the caches of one model share, found by their tokens."""

import logging
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor

from kvloom.caches import Pages, Sequences
from kvloom.caches.residual import Residuals
from kvloom.caches.saving import hold, save_pages
from kvloom.core.checks import INDEX_DTYPES, expect
from kvloom.errors import ArgumentError, StateError, UnsupportedError
from kvloom.integrations.transformers.build import cache_format, make_layers, text_config_of
from kvloom.integrations.transformers.cache import KVCache
from kvloom.integrations.transformers.content import is_within
from kvloom.integrations.transformers.invariance import NO_WISH, Wish, expect_wish
from kvloom.integrations.transformers.layers import KVCacheLayer
from kvloom.integrations.transformers.loading import head_dims_of
from kvloom.integrations.transformers.origin import PoolCache, scope_in
from kvloom.integrations.transformers.pool_model import PoolModel, expect_prefixes
from kvloom.paging import Miss, PageRef, PageTable, PrefixTree, check
from kvloom.tracing.recorder import Recorded, Recorder

if TYPE_CHECKING:
    from kvloom.store import KVStore
    from kvloom.store.below import StoreBelow

_LOG: Final = logging.getLogger("kvloom")


class KVPool(Recorder):
    """Pages of one size, in which a new cache finds what earlier ones computed for the same first tokens.

    Sharing is exact, by the tokens themselves, in whole pages, and only within a salt. When all pages are
    taken, those that no cache holds are given up, least recently used first or as ``policy`` says::

        pool = KVPool.for_model(model, max_tokens=100_000)
        cache = pool.begin(input_ids)
        output = model.generate(input_ids, past_key_values=cache)
        pool.commit(cache, output)

    What decides keys and values beside the tokens is part of what pages are found by: the state of the model
    (weights, adapters, hooks, attributes), the ``content`` behind placeholder tokens, and the frequencies of
    a RoPE that depends on the length of the text. A cache whose tokens were computed otherwise, such as while
    the model changed, is never found by another.

    With a store, what is committed is written behind, and what the pool lacks is read back if that takes less
    time than computing it: in this process or another, later or elsewhere.

    A pool and the caches that it began belong to one thread at a time.

    Args:
        model: A ``PreTrainedModel`` all of whose layers attend to the whole sequence.
        pages: Where they keep their tokens.
        store: What lies below the pages.
        wish: What the layers of the model are until the pool is closed.
    """

    def __init__(
        self, model: Any, pages: Pages, store: "KVStore | None" = None, wish: Wish = NO_WISH
    ) -> None:
        self._wish = wish
        self._empty = PoolCache(make_layers(model, pages.format, sequences=Sequences(pages)))
        self._model: PoolModel | None = PoolModel(model, wish)
        self._saved_digest = ""
        self._pages = pages
        self._head_dims = head_dims_of(text_config_of(model)) or ()
        self._tree = PrefixTree(pages.pool, pages.format.page_size)
        self._residuals = Residuals(pages)
        self._num_asked = self._num_found = 0
        self._logged: set[str] = set()
        self._below: StoreBelow | None = None
        self._stored_state = ""
        if store is not None:
            from kvloom.store import below

            identity = self._model.identity(pages.format)
            self._below = below.StoreBelow(store, pages, self._tree, *identity, residuals=self._residuals)

    def __enter__(self) -> "KVPool":  # noqa: PYI034 (Self is not in Python 3.10)
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        """To be saved: the pages that can be found now, what tells their model from others, and no store."""
        model, digest = self._model, self._saved_digest
        known = [*self._tree.sequences()]
        if model is not None:
            state, digest = model.watch.state(), model.digest()
            scopes = [(scope_in(salt, state), tokens, refs) for salt, tokens, refs in known]
            known = [(salt, tokens, refs) for salt, tokens, refs in scopes if salt is not None]
        places = save_pages(self._pages, (ref for *_, refs in known for ref in refs))
        saved = [(salt, tokens, [places[ref] for ref in refs]) for salt, tokens, refs in known]
        gone = {"_model": None, "_below": None, "_stored_state": "", "_residuals": None}
        return vars(self) | gone | {"_tree": saved, "_saved_digest": digest}

    def __setstate__(self, state: dict[str, Any]) -> None:
        saved = state.pop("_tree")
        self.__dict__.update(state)
        pages = self._pages
        pages.keep()
        self._tree = PrefixTree(pages.pool, pages.format.page_size)
        self._residuals = Residuals(pages)
        for salt, tokens, places in saved:
            for ref in self._tree.insert(tokens, hold(pages, places), salt):
                pages.pool.release(ref)

    def bind(self, model: Any) -> "KVPool":
        """Let a pool that was loaded go on with its model.

        Args:
            model: The model of the pool that was saved, or another with the same weights, configuration,
                attributes and hooks.

        Returns:
            The pool.

        Raises:
            ArgumentError: it is another model; nothing was changed.
            StateError: the pool has its model; nothing was changed.
            UnsupportedError: its weights are not in memory.
        """
        if self._model is not None:
            raise StateError("a pool has one model, only one that was loaded must be given it")
        bound = PoolModel(model, self._wish)
        if bound.digest() != self._saved_digest:
            bound.release()
            raise ArgumentError(
                f"model must be the one whose pages were saved, got another {type(model).__name__}"
            )
        self._model = bound
        return self

    @classmethod
    def for_model(
        cls,
        model: Any,
        kv: str | Path = "auto",
        page_size: int = 16,
        *,
        max_tokens: int,
        values: str | None = None,
        layout: str = "auto",
        store: "KVStore | str | Sequence[str] | None" = None,
        policy: str = "lru",
        batch_invariant: bool | None = None,
        pack: bool | str = False,
    ) -> "KVPool":
        """An empty pool of ``max_tokens`` token slots in each layer, taken at the first update.

        The other arguments are those of ``KVCache.for_model``.

        Args:
            model: As above.
            kv: As above. With a residual window, which int4 has by default, what follows a prefix that is
                found is what follows a computed one where a text that was committed ended there.
            page_size, values, layout: As above.
            max_tokens: Token slots of each layer.
            store: A ``KVStore``, or URLs as it takes them, such as ``"file:///var/cache/kvloom"``. The model
                then computes 128 tokens, and its weights are read once.
            policy: Which pages are given up: ``"lru"``, those that no cache held for longest, or ``"ours"``,
                those that are worth least by how pages were used so far.
            batch_invariant: As of ``enable``, until the pool is closed: what follows a prefix that is found
                has the bits of what follows one that is computed.
            pack: The same.

        Raises:
            ArgumentError: as ``KVCache.for_model``, ``store`` is no URL of a store, or ``policy`` is none.
            ModuleNotFoundError: a library that the store needs is not installed.
            UnsupportedError: a layer has a window or a recurrent state, which a prefix of pages cannot give;
                the model has an encoder, or attends to later tokens, too; or there is a store, and the
                weights are not in memory.
        """
        config, wish = text_config_of(model), expect_wish(model, batch_invariant, pack)
        expect_prefixes(model)
        format = cache_format(config, kv, page_size, max_tokens, values, layout)
        pages = Pages(format, is_kept=True, policy=policy)
        for layer in make_layers(model, format):
            if type(layer) is not KVCacheLayer or layer.is_sliding:
                raise UnsupportedError(
                    f"model must attend to the whole sequence in every layer, got {type(layer).__name__} in "
                    f"{type(model).__name__}"
                )
        if store is not None:
            from kvloom.store.store import open_store

            store = open_store(store)
        return cls(model, pages, store, wish)

    def begin(
        self, input_ids: Tensor, salt: str = "", content: str | Sequence[str] | None = None
    ) -> PoolCache:
        """A cache that holds the longest first part of every row that is known, in whole pages.

        The last token is always left to compute. Rows are of one length, so the shortest match counts. What
        stands for one picture is found as a whole or not at all: of what ``generate`` is given beside tokens,
        leave out what belongs to placeholders that were found.

        Args:
            input_ids: ``[B, T]`` int64 or int32 without padding.
            salt: Only caches of one salt share pages. The cache remembers it.
            content: A digest of what decides keys and values beside tokens: pictures, audio, embeddings,
                other positions or masks, as ``content_of`` makes it; or one for each row. Only caches of one
                content share pages. Without it a forward of the cache takes tokens alone.

        Raises:
            ArgumentError: ``input_ids`` has a placeholder token of the model and there is no ``content``.
            StateError: the pool was loaded and has no model yet.
        """
        expect("input_ids", input_ids, "B T", dtype=INDEX_DTYPES)
        if not input_ids.numel():
            raise ArgumentError(f"input_ids must hold at least one token, got {list(input_ids.shape)}")
        rows, model, size = input_ids.tolist(), self._bound(), self._pages.format.page_size
        origin = model.origin(rows, salt, content)
        cache = self._empty.fork()
        cache.origin = origin
        if origin.refusal:
            found: list[list[PageRef]] = [[] for _ in rows]
        else:
            below = self._store_of(origin.state)
            scopes = zip(rows, origin.scopes(), origin.stored_scopes(), strict=True)
            found = [self._find(row[:-1], below, *scope) for row, *scope in scopes]
        num_pages = min(map(len, found))
        while any(is_within(model.placeholders, row, num_pages * size) for row in rows):
            num_pages -= 1
        last = 0 if self.events is None else self.events.num_requests
        requests = cache.sequences[0].requests = [max(last - i, 0) for i in range(len(found))][::-1]
        tables = [self._table(*x, num_pages) for x in zip(found, requests, strict=True)]
        self._num_asked += input_ids.numel()
        if num_pages == 0:
            return cache
        sequences = cache.sequences[0]
        sequences.adopt(tables, [self._residuals.find(table.pages[-1]) for table in tables])
        for layer in cache.layers:
            layer.pages.num_tokens = sequences.num_positions
            layer.lazy_initialization(model.states)
        origin.num_found = sequences.num_positions
        self._num_found += sequences.num_positions * sequences.size
        return cache

    def commit(self, cache: KVCache, input_ids: Tensor, salt: str | None = None) -> None:
        """Let later caches find the full pages of this one, under the salt and content with which it began.

        Pages of a cache whose tokens were not all computed in one state of the model, in training mode, or
        were assigned, stay unknown, which is logged once.

        Args:
            cache: One that ``begin`` made.
            input_ids: ``[B, T]``, row by row the tokens that the cache holds, such as what ``generate``
                returned; the last one, which was sampled and not computed, may be among them. After beam
                search rows are no longer the cache's.
            salt: That of ``begin``, which the cache remembers.

        Raises:
            ArgumentError: the cache is of another pool, began under another salt, or holds other numbers of
                rows or tokens.
            StateError: an update broke off; or pages of a row are known under other tokens, then that row and
                those after it stay unknown.
        """
        origin = cache.origin if isinstance(cache, PoolCache) else None
        if origin is None or not cache.is_of(self._pages):
            raise ArgumentError("cache must be one that this pool began, got another's")
        if salt is not None and salt != origin.salt:
            raise ArgumentError(
                f"salt must be that with which the cache began, {origin.salt!r}, got {salt!r}"
            )
        cache.expect_whole()
        if refusal := cache.refuses():
            if refusal not in self._logged:
                self._logged.add(refusal)
                _LOG.warning("pages of a cache are not shared: %s", refusal)
            return
        sequences = cache.sequences[0]
        num_tokens = sequences.num_positions
        sizes = expect("input_ids", input_ids, "B T", dtype=INDEX_DTYPES, B=sequences.size)
        if not num_tokens <= sizes["T"] <= num_tokens + 1:
            raise ArgumentError(
                f"input_ids must be the {num_tokens} tokens of the cache, or one more, got {sizes['T']}"
            )
        rows = input_ids[:, :num_tokens].tolist()
        sequences.commit(self._tree, rows, origin.scopes())
        self._residuals.keep_ends(sequences)
        below = self._store_of(origin.state)
        if below is not None:
            for row, table, scope in zip(rows, sequences.tables, origin.stored_scopes(), strict=True):
                below.keep(row, table.pages, scope)

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until everything committed is in the store, or could not be written.

        Args:
            timeout: Seconds to wait for; ``None`` waits for ever.

        Returns:
            Whether nothing is left to write.
        """
        return self._below is None or self._below.store.flush(timeout)

    def close(self) -> None:
        """``flush``, and write nothing more to the store; other pools of one ``KVStore`` neither.

        The layers of the model are as they were before the pool.
        """
        if self._below is not None:
            self._below.store.close()
        if self._model is not None:
            self._model.release()

    def why(
        self, input_ids: Tensor, salt: str = "", content: str | Sequence[str] | None = None
    ) -> list[Miss]:
        """Why ``begin`` would not find the full pages of a text now; it has none for those it would find.

        A store below is asked, too: what it would give is no miss, and what is damaged there, or of another
        model or format, says so. That reads the heads of all its runs.

        Args:
            input_ids: ``[1, T]``, as of ``begin``.
            salt: As of ``begin``.
            content: As of ``begin``.

        Raises:
            ArgumentError: as of ``begin``.
            StateError: events are not recorded.
        """
        expect("input_ids", input_ids, "B T", dtype=INDEX_DTYPES, B=1)
        origin = self._bound().origin(input_ids.tolist(), salt, content)
        tokens = input_ids[0, :-1].tolist()
        misses = self._why(tokens, *origin.scopes())
        below = self._store_of(origin.state)
        if below is None or not misses:
            return misses
        return below.misses(misses, tokens, *origin.stored_scopes())

    def check(self) -> None:
        """Recompute the invariants of pages and prefixes; raises ``StateError`` on the first that fails."""
        check(self._pages.pool, self._tree, self._tables())

    def report(self) -> dict[str, Any]:
        """Pages by state, and how many of the tokens that ``begin`` looked up were found; and the store's.

        ``kv`` is how keys and values are kept, with the group of their scales, such as ``"int8:g32"``, and
        ``residual_bytes`` what is kept unquantized for the ends of committed texts. ``layers`` is a
        ``LayerReport`` with numbers in the place of names, as a dictionary.
        """
        pool = self._pages.pool
        return {
            "kv": self._pages.kind(*self._head_dims),
            "num_pages": pool.num_pages,
            "free": pool.num_free,
            "active": pool.num_active,
            "evictable": pool.num_evictable,
            "tokens_asked": self._num_asked,
            "tokens_found": self._num_found,
            "residual_bytes": self._residuals.nbytes,
            "layers": None if self._model is None else self._model.layers(),
        } | ({} if self._below is None else {"store": self._below.report()})

    def _tables(self) -> list[PageTable]:
        """Those of all caches."""
        return [table for sequences in self._pages.users for table in sequences.tables]

    def _recorded(self) -> Recorded:
        pages = self._pages
        nbytes = round(pages.format.page_size * sum(x.nbytes_per_token for x in pages.storages.values()))
        return Recorded(pages.pool, self._tree, self._tables, nbytes, nullcontext())

    def _bound(self) -> PoolModel:
        if self._model is None:
            raise StateError("a pool that was loaded must have its model: pool.bind(model)")
        return self._model

    def _store_of(self, state: str) -> "StoreBelow | None":
        """The store below, under the fingerprint of the model in its present state."""
        if self._below is not None and state != self._stored_state:
            self._below.become(*self._bound().identity(self._pages.format))
            self._stored_state = state
        return self._below

    def _find(
        self, tokens: Sequence[int], below: "StoreBelow | None", scope: str, stored_scope: str
    ) -> list[PageRef]:
        """Pages of the first tokens, in the pool or from the store, with one reference to each."""
        found = self._tree.match(tokens, scope)
        return found if below is None else below.fetch(tokens, found, stored_scope, scope)

    def _table(self, refs: Sequence[PageRef], request: int, num_pages: int) -> PageTable:
        """A table of a request that begins with the first of some pages; the others are released."""
        table = PageTable(self._pages.pool, self._pages.format.page_size)
        table.request = request
        table.claim()
        for ref in refs[num_pages:]:
            self._pages.pool.release(ref)
        table.adopt(refs[:num_pages])
        return table
