"""Prefixes that the caches of one model share, found by their tokens."""

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvloom.caches import Pages, Sequences
from kvloom.caches.saving import hold, save_pages
from kvloom.core.checks import INDEX_DTYPES, expect
from kvloom.errors import ArgumentError, UnsupportedError
from kvloom.integrations.transformers.build import cache_format, make_layers, text_config_of
from kvloom.integrations.transformers.cache import KVCache
from kvloom.integrations.transformers.layers import KVCacheLayer
from kvloom.paging import Miss, PageRef, PageTable, PrefixTree, check
from kvloom.tracing.recorder import Recorded, Recorder

if TYPE_CHECKING:
    from kvloom.store import KVStore
    from kvloom.store.survey import Verdict


class KVPool(Recorder):
    """Pages of one size, in which a new cache finds what earlier ones computed for the same first tokens.

    Sharing is exact, by the tokens themselves, in whole pages, and only within a salt. When all pages are
    taken, those that no cache holds are given up, least recently used first or as ``policy`` says::

        pool = KVPool.for_model(model, max_tokens=100_000)
        cache = pool.begin(input_ids)
        output = model.generate(input_ids, past_key_values=cache)
        pool.commit(cache, output)

    With a store, what is committed is written behind, and what the pool lacks is read back if that takes less
    time than computing it: in this process or another, later or elsewhere.

    Args:
        model: A ``PreTrainedModel`` all of whose layers attend to the whole sequence.
        pages: Where they keep their tokens.
        store: What lies below the pages.
    """

    def __init__(self, model: Any, pages: Pages, store: "KVStore | None" = None) -> None:
        self._empty = KVCache(make_layers(model, pages.format, sequences=Sequences(pages)))
        self._states = torch.empty(0, dtype=model.dtype, device=model.device)
        self._pages = pages
        self._tree = PrefixTree(pages.pool, pages.format.page_size)
        self._num_asked = self._num_found = 0
        self._below = None
        if store is not None:
            from kvloom.integrations.transformers.identity import identify
            from kvloom.store.below import StoreBelow

            self._below = StoreBelow(store, pages, self._tree, *identify(model, pages.format))

    def __enter__(self) -> "KVPool":  # noqa: PYI034 (Self is not in Python 3.10)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        """To be saved: the pages that can be found, and no model and no store."""
        known = list(self._tree.sequences())
        places = save_pages(self._pages, (ref for *_, refs in known for ref in refs))
        saved = [(salt, tokens, [places[ref] for ref in refs]) for salt, tokens, refs in known]
        return vars(self) | {"_tree": saved, "_below": None}

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
        kv: str | Path = "auto",
        page_size: int = 16,
        *,
        max_tokens: int,
        values: str | None = None,
        layout: str = "auto",
        store: "KVStore | str | Sequence[str] | None" = None,
        policy: str = "lru",
    ) -> "KVPool":
        """An empty pool of ``max_tokens`` token slots in each layer, taken at the first update.

        The other arguments are those of ``KVCache.for_model``.

        Args:
            model: As above.
            kv: As above. The newest tokens of a prefix that is found are codes, so with int4 what follows it
                is what follows a computed one only with ``"int4,recent=0"``.
            page_size: As above.
            max_tokens: Token slots of each layer.
            values: As above.
            layout: As above.
            store: A ``KVStore``, or URLs as it takes them, such as ``"file:///var/cache/kvloom"``. The model
                then computes 128 tokens, and its weights are read once.
            policy: Which pages are given up: ``"lru"``, those that no cache held for longest, or ``"ours"``,
                those that are worth least by how pages were used so far.

        Raises:
            ArgumentError: as ``KVCache.for_model``, ``store`` is no URL of a store, or ``policy`` is none.
            ModuleNotFoundError: a library that the store needs is not installed.
            UnsupportedError: a layer has a window or a recurrent state, which a prefix of pages cannot give;
                or there is a store, and the weights are not in memory.
        """
        config = text_config_of(model)
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
        return cls(model, pages, store)

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
        found = [self._find(row[:-1], salt) for row in input_ids.tolist()]
        num_pages = min(map(len, found))
        last = 0 if self.events is None else self.events.num_requests
        requests = cache.sequences[0].requests = [max(last - i, 0) for i in range(len(found))][::-1]
        tables = [self._table(*x, num_pages) for x in zip(found, requests, strict=True)]
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
        rows = input_ids[:, :num_tokens].tolist()
        sequences.commit(self._tree, rows, salt)
        if self._below is not None:
            for row, table in zip(rows, sequences.tables, strict=True):
                self._below.keep(row, table.pages, salt)

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until everything committed is in the store, or could not be written.

        Args:
            timeout: Seconds to wait for; ``None`` waits for ever.

        Returns:
            Whether nothing is left to write.
        """
        return self._below is None or self._below.store.flush(timeout)

    def close(self) -> None:
        """``flush``, and write nothing more to the store; other pools of one ``KVStore`` neither."""
        if self._below is not None:
            self._below.store.close()

    def why(self, input_ids: Tensor, salt: str = "") -> list[Miss]:
        """Why ``begin`` would not find the full pages of a text now; it has none for those it would find.

        A store below is asked, too: what it would give is no miss, and what is damaged there, or of another
        model or format, says so. That reads the heads of all its runs.

        Args:
            input_ids: ``[1, T]``, as of ``begin``.
            salt: As of ``begin``.

        Raises:
            StateError: events are not recorded.
        """
        expect("input_ids", input_ids, "B T", dtype=INDEX_DTYPES, B=1)
        tokens = input_ids[0, :-1].tolist()
        misses = self._why(tokens, salt)
        if self._below is None or not misses:
            return misses
        return misses_in_store(misses, self._below.why(tokens, salt))

    def check(self) -> None:
        """Recompute the invariants of pages and prefixes; raises ``StateError`` on the first that fails."""
        check(self._pages.pool, self._tree, self._tables())

    def report(self) -> dict[str, Any]:
        """Pages by state, and how many of the tokens that ``begin`` looked up were found; and the store's."""
        pool = self._pages.pool
        return {
            "num_pages": pool.num_pages,
            "free": pool.num_free,
            "active": pool.num_active,
            "evictable": pool.num_evictable,
            "tokens_asked": self._num_asked,
            "tokens_found": self._num_found,
        } | ({} if self._below is None else {"store": self._below.report()})

    def _tables(self) -> list[PageTable]:
        """Those of all caches."""
        return [table for sequences in self._pages.users for table in sequences.tables]

    def _recorded(self) -> Recorded:
        size = sum(storage.nbytes_per_token for storage in self._pages.storages.values())
        bytes_per_page = round(size * self._pages.format.page_size)
        return Recorded(self._pages.pool, self._tree, self._tables, bytes_per_page, nullcontext())

    def _find(self, tokens: Sequence[int], salt: str) -> list[PageRef]:
        """Pages of the first tokens, in the pool or from the store, with one reference to each."""
        found = self._tree.match(tokens, salt)
        return found if self._below is None else self._below.fetch(tokens, found, salt)

    def _table(self, refs: Sequence[PageRef], request: int, num_pages: int) -> PageTable:
        """A table of a request that begins with the first of some pages; the others are released."""
        table = PageTable(self._pages.pool, self._pages.format.page_size)
        table.request = request
        table.claim()
        for ref in refs[num_pages:]:
            self._pages.pool.release(ref)
        table.adopt(refs[:num_pages])
        return table


def misses_in_store(misses: Sequence[Miss], verdicts: "Sequence[Verdict]") -> list[Miss]:
    """What is missed of a text in a pool and in the store below it, by what each says of its pages."""
    told: list[Miss] = []
    for miss in misses:
        for place in range(miss.first, miss.first + miss.num_pages):
            verdict = verdicts[place]
            kind, _, what = verdict.reason.partition(": ")
            if verdict.is_found:
                continue
            if kind == "another model":
                told.append(Miss("other format", place, what=what))
            elif verdict.reason.startswith("damaged"):
                told.append(Miss("damaged", place, what=verdict.reason))
            elif told and miss.cause == "below" and told[-1].cause == "below":
                told[-1] = told[-1]._replace(num_pages=told[-1].num_pages + 1)
            else:
                told.append(miss._replace(first=place, num_pages=1))
    return told
