"""Prefixes that the caches of one model share, found by their tokens."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from torch import Tensor

from kvloom.caches.prefixes.group import PrefixGroup
from kvloom.core.checks import INDEX_DTYPES, expect
from kvloom.errors import ArgumentError, StateError
from kvloom.integrations.transformers.cache.build import make_layers
from kvloom.integrations.transformers.cache.encoder import EncoderKVCache
from kvloom.integrations.transformers.cache.formats import cache_format
from kvloom.integrations.transformers.cache.kv_cache import KVCache
from kvloom.integrations.transformers.cache.trial import expect_causal
from kvloom.integrations.transformers.fingerprint.scopes import scope_in
from kvloom.integrations.transformers.invariance import NO_WISH, Wish, expect_wish
from kvloom.integrations.transformers.models.content import is_within
from kvloom.integrations.transformers.models.layer_specs import expect_use, layers_of
from kvloom.integrations.transformers.models.text_config import only_head_dims, text_config_of
from kvloom.integrations.transformers.pool.encoders import (
    EncoderDecoderPoolCache,
    PoolEncoders,
    encoder_for,
)
from kvloom.integrations.transformers.pool.fed_tokens import FedTokens
from kvloom.integrations.transformers.pool.model import PoolModel
from kvloom.integrations.transformers.pool.origin import Origin, PoolCache
from kvloom.integrations.transformers.pool.prefixes import PoolPrefixes, rows_of
from kvloom.integrations.transformers.pool.remembered import PoolMemory
from kvloom.integrations.transformers.pool.states import PADDED, PoolStates, states_for
from kvloom.integrations.transformers.reports import Shown
from kvloom.integrations.transformers.smoothing import smoothing_for, smoothing_report
from kvloom.paging import Miss
from kvloom.terminal import TableReport
from kvloom.tracing.recorder import Recorded, Recorder

if TYPE_CHECKING:
    from kvloom.store import KVStore

_LOG: Final = logging.getLogger("kvloom")


class KVPool(Recorder, Shown):
    """Pages of one size, in which a new cache finds the prefix that earlier caches computed.

    Sharing is exact, by the tokens themselves, in whole pages, and only within a salt. When all pages are
    in use, pages that no cache holds are evicted, least recently used first or as ``policy`` says::

        pool = KVPool.for_model(model, max_tokens=100_000)
        cache = pool.begin(input_ids)
        output = model.generate(input_ids, past_key_values=cache)
        pool.commit(cache, output)

    Pages are found by tokens and by everything else that decides keys and values: the state of the model
    (weights, adapters, hooks, attributes), the ``content`` of placeholder tokens, and the frequencies of a
    RoPE that depends on the length of the text. Pages of a cache whose tokens were computed otherwise, such
    as while the model changed, are never found.

    With a store, committed pages are written to it in the background. Pages that the pool does not have are
    read from the store, if reading takes less time than computing, in this process or any other. A pool and
    its caches may be used by one thread at a time.

    Args:
        model: A ``PreTrainedModel`` all of whose layers keep their tokens in pages.
        layers: Layers of an empty cache for it, in pages that are kept.
        store: Store below the pages.
        wish: Changes of the model's layers until the pool is closed.
        smoothing: Part of the report on the smoothing of keys.
        states: Pages of recurrent states; ``None`` if the model has none.
        encoder: An empty cache of the encoder's keys, in pages that are kept; ``None`` without an encoder.
    """

    def __init__(
        self,
        model: Any,
        layers: list[Any],
        store: "KVStore | None" = None,
        wish: Wish = NO_WISH,
        smoothing: dict[str, list[int]] | None = None,
        states: PoolStates | None = None,
        encoder: EncoderKVCache | None = None,
    ) -> None:
        self._wish, self._states = wish, states
        self._smoothing = smoothing or {}
        self._empty = PoolCache(layers) if encoder is None else EncoderDecoderPoolCache(layers, encoder)
        self._encoders = None if encoder is None else PoolEncoders(encoder)
        self._model: PoolModel | None = PoolModel(model, wish, self._empty.needs_attention(states))
        self._empty.pair_guard = self._model.guard
        self._memory = PoolMemory(self._model.memory)
        self._saved_digest = self._stored_state = ""
        self._prefixes = self._empty_prefixes()
        self._head_dims = only_head_dims(text_config_of(model))
        self._num_asked = self._num_found = 0
        self._logged: set[str] = set()
        self._store = store
        if store is not None:
            from kvloom.store.below import StoreBelow

            for group, identity in zip(self._prefixes.groups, self._identities(), strict=True):
                group.below = StoreBelow(store, group.pages, group.tree, *identity)

    def __enter__(self) -> "KVPool":  # noqa: PYI034 (Self is not in Python 3.10)
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        """State for saving: pages that can be found now and a digest of their model, without the store."""
        digest, rename = self._saved_digest, None
        if self._model is not None:
            digest, rename = self._model.digest(), partial(scope_in, state=self._model.watch.state())
        kept = {"_prefixes": self._prefixes.saved(rename), "_memory": self._memory.renamed(rename)}
        kept["_encoders"] = None if self._encoders is None else self._encoders.saved(rename)
        gone = {"_model": None, "_store": None, "_stored_state": ""}
        return vars(self) | gone | kept | {"_saved_digest": digest}

    def __setstate__(self, state: dict[str, Any]) -> None:
        saved, encoders = state.pop("_prefixes"), state.pop("_encoders", None)
        self.__dict__.update(state)
        for sequences in self._empty.sequences:
            sequences.pages.keep()
        self._prefixes = self._empty_prefixes()
        self._prefixes.load(saved)
        self._encoders = None
        if isinstance(self._empty, EncoderDecoderPoolCache):
            self._encoders = PoolEncoders(self._empty.cross_attention_cache)
            self._encoders.load(encoders)

    @property
    def model(self) -> Any:
        """The model; raises ``StateError`` if the pool was loaded and has none yet."""
        return self._bound().watch.model

    @property
    def page_size(self) -> int:
        """Tokens in a page."""
        return self._prefixes.page_size

    def bind(self, model: Any) -> "KVPool":
        """Attach the model to a pool that was loaded.

        Args:
            model: The model of the pool that was saved, or another with the same weights, configuration,
                attributes and hooks.

        Returns:
            The pool.

        Raises:
            ArgumentError: the model is another one; nothing was changed.
            StateError: the pool already has its model; nothing was changed.
            UnsupportedError: weights are not in memory.
        """
        if self._model is not None:
            raise StateError("a pool has one model, only one that was loaded must be given it")
        bound = PoolModel(model, self._wish, self._empty.needs_attention(self._states))
        if bound.digest() != self._saved_digest:
            bound.release()
            raise ArgumentError(
                f"model must be the one whose pages were saved, got another {type(model).__name__}"
            )
        self._model, self._empty.pair_guard = bound, bound.guard
        vars(self).setdefault("_memory", PoolMemory(bound.memory))  # of earlier releases
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
        state_interval: int | None = None,
        max_state_bytes: int | None = None,
        max_encoder_tokens: int | None = None,
    ) -> "KVPool":
        """An empty pool of ``max_tokens`` token slots in each layer, allocated at the first update.

        Texts of a model with recurrent states are fed in pieces of ``state_interval`` tokens. Prefixes are
        found after the last piece of a committed text, and at the piece after which two texts differ. Tokens
        after a found prefix have the same bits as after a computed one.

        The other arguments are those of ``KVCache.for_model``.

        Args:
            model: As above.
            kv: As above. With a residual window, which int4 has by default, tokens after a found prefix equal
                those after a computed one only where a committed text ended. The model then attends in place
                until the pool is closed, as ``enable`` makes it, unless it has recurrent states.
            page_size, values, layout: The same.
            max_tokens: Token slots of each layer, rounded up to whole pages.
            store: A ``KVStore``, or URLs as it takes them, such as ``"file:///var/cache/kvloom"``. The model
                then computes 128 tokens, and its weights are read once.
            policy: Which pages are evicted: ``"lru"``, those that no cache held for longest, or ``"ours"``,
                those of least worth by the use of pages so far. Layers with a window always evict pages
                before their window first, and then by ``"lru"``.
            batch_invariant: As in ``enable``, until the pool is closed. With ``True`` the model also attends
                in place until then, as ``enable`` makes it, so that tokens after a found prefix have the same
                bits as after a computed one.
            pack: As in ``enable``.
            state_interval: As above, a multiple of ``page_size``; ``None`` for 256, or the next multiple.
            max_state_bytes: Bytes that recurrent states may take, at least the states of one text; ``None``
                for as many as the pages of keys and values take, and at least eight texts.
            max_encoder_tokens: Token slots of each layer for the keys and values of encoders, of an
                encoder-decoder alone; ``None`` for ``max_tokens``.

        Raises:
            ArgumentError: as ``KVCache.for_model``, ``store`` is no URL of a store, ``policy`` is unknown, or
                ``state_interval``, ``max_state_bytes`` or ``max_encoder_tokens`` is invalid.
            ModuleNotFoundError: a library that the store needs is not installed.
            UnsupportedError: the model computes a text in pieces differently than as a whole, or attends to
                later tokens; or there is a store, and the weights are not in memory, or the model has an
                encoder.
        """
        config, wish = text_config_of(model), expect_wish(model, batch_invariant, pack)
        specs = layers_of(model)
        expect_use(model, "pool", specs)
        expect_causal(model)
        smoothing = smoothing_for(model, kv)
        format = cache_format(config, kv, page_size, max_tokens, values, layout, smoothing)
        layers = make_layers(model, format, is_kept=True, policy=policy, specs=specs)
        states = states_for(model, layers, format, state_interval, max_state_bytes)
        encoder = encoder_for(model, layers, format, max_encoder_tokens, has_store=store is not None)
        if store is not None:
            from kvloom.store.store import open_store

            store = open_store(store)
        return cls(model, layers, store, wish, smoothing_report(format, smoothing), states, encoder)

    def content_of(self, inputs: Mapping[str, Any]) -> str | list[str]:
        """The ``content`` of ``begin`` for a processor's outputs, or other arguments of ``model.forward``.

        Of an encoder-decoder it is a list with a digest, for each row, of what the encoder reads; arguments
        of the decoder are ignored. Of other models it is ``content_of(inputs)``.

        Raises:
            ArgumentError: ``inputs`` has nothing that the encoder reads, or only tokens that stand for it; or
                as ``content_of``.
        """
        return self._bound().content_of(inputs)

    def begin(
        self,
        input_ids: Tensor,
        salt: str = "",
        content: str | Sequence[str] | None = None,
        attention_mask: Tensor | None = None,
    ) -> PoolCache:
        """A cache that holds the longest known prefix of the batch.

        Each row finds its longest prefix in whole pages; the last token is always left to compute. All rows
        compute the same columns, as many as the row with the most tokens to compute. The placeholders of one
        picture are found all or none; do not pass ``generate`` the pictures whose placeholders were found.

        Args:
            input_ids: ``[B, T]`` int64 or int32, rows of different lengths padded on the left; of an
                encoder-decoder the decoder's, with the token that it starts with.
            salt: Only caches with the same salt share pages. The cache remembers it.
            content: A digest by ``content_of`` of the inputs beside tokens that decide keys and values, such
                as pictures, audio, embeddings, other positions or masks; or one for each row. Only rows with
                the same content share pages. Without it forwards of the cache accept tokens alone. An
                encoder-decoder needs that of ``pool.content_of``, and finds the encoder's keys by it.
            attention_mask: ``[B, T]`` as a tokenizer makes it, 0 for padding; ``None`` for no padding. It is
                no part of ``content``. Forwards must be given it, too, with positions that count from the
                first token of each row, as ``generate`` makes them.

        Raises:
            ArgumentError: ``input_ids`` has a placeholder token of the model and there is no ``content``; or
                ``attention_mask`` has padding elsewhere than on the left.
            StateError: the pool was loaded and has no model yet.
            UnsupportedError: there is padding, and the model takes no ``position_ids``.
        """
        model, prefixes = self._bound(), self._prefixes
        rows, begins = model.rows(input_ids, attention_mask)
        cache, origin = self._fork(model, rows, salt, content)
        self._num_asked += sum(map(len, rows))
        if self._states is not None and any(begins):
            origin.refusal = PADDED
        if origin.refusal:
            end = prefixes.begin_with_none(cache, begins, model.states)
            origin.fed = FedTokens(input_ids, end)
            return cache
        self._follow_state(origin.state)
        recalled = self._memory.recall(rows, origin, begins)

        def is_hidden(row: int, end: int) -> bool:
            return is_within(model.placeholders, rows[row], end) or recalled[row].hides(end)

        end = prefixes.begin_cache(cache, rows, begins, model.states, is_hidden)
        origin.fed = FedTokens(input_ids, end)
        self._memory.restore(cache.remembered, recalled, [end - x for x in begins])
        found = [max(end - x, 0) for x in begins]
        origin.num_found = end if any(found) else 0
        self._num_found += sum(found)
        if self._encoders is not None:
            self._encoders.begin(cast(EncoderDecoderPoolCache, cache), model)
        return cache

    def begin_given(self, input_ids: Tensor, salt: str = "") -> PoolCache:
        """An empty cache for keys and values of a text that were computed elsewhere, for ``cache.update``.

        ``commit`` shares them as if the model had computed them now: the caller answers for that.

        Args:
            input_ids: ``[1, T]``, the tokens that will be given.
            salt: As in ``begin``.

        Raises:
            ArgumentError: as ``begin``.
            StateError: the pool was loaded and has no model yet.
        """
        expect("input_ids", input_ids, "B T", dtype=INDEX_DTYPES, B=1)
        model = self._bound()
        rows, begins = model.rows(input_ids, None)
        cache, origin = self._fork(model, rows, salt, None)
        self._prefixes.begin_with_none(cache, begins, model.states)
        origin.fed, origin.num_seen = FedTokens(input_ids, 0), input_ids.shape[1]
        return cache

    def _fork(
        self, model: PoolModel, rows: list[list[int]], salt: str, content: str | Sequence[str] | None
    ) -> tuple[PoolCache, Origin]:
        """An empty cache of this pool, and what its pages will be found by."""
        cache = self._empty.fork()
        cache.remembered.memory = model.memory
        cache.origin = origin = model.origin(rows, salt, content)
        return cache, origin

    def commit(self, cache: KVCache, input_ids: Tensor | None = None, salt: str | None = None) -> None:
        """Let later caches find the full pages of this one, under the salt and content with which it began.

        Pages are not shared, and a warning says so once, if the tokens were computed in several states of the
        model or in training mode, or were assigned. Of a cache without tokens, as of a text that broke off
        before its first forward, nothing is shared.

        Args:
            cache: A cache made by ``begin``.
            input_ids: ``[B, T]``, the tokens of the cache row by row, with the padding it began with, such as
                the result of ``generate``. One more token may follow, which was sampled and not computed.
                After beam search, whose rows have another order, what the cache computed is shared. ``None``
                for the tokens that the model was given.
            salt: Salt of ``begin``; ``None`` for the one that the cache remembers.

        Raises:
            ArgumentError: the cache is of another pool, began with another salt, has other tokens, or its
                rows were cropped by different numbers of tokens.
            StateError: an update broke off; or pages of a row are known under other tokens, and then this row
                and the rows after it are not shared.
        """
        origin = cache.origin if isinstance(cache, PoolCache) else None
        if origin is None or not cache.is_of([group.pages for group in self._prefixes.groups]):
            raise ArgumentError("cache must be one that this pool began, got another's")
        if salt is not None and (not isinstance(salt, str) or salt != origin.salt):
            raise ArgumentError(
                f"salt must be that with which the cache began, {origin.salt!r}, got {salt!r}"
            )
        cache.expect_whole()
        why = "" if self._store is None else self._bound().why_unidentified(origin.state)
        if refusal := cache.refuses() or why:
            if refusal not in self._logged:
                self._logged.add(refusal)
                _LOG.warning("pages of a cache are not shared: %s", refusal)
            return
        rows = rows_of(cache, input_ids)
        if not cache.begins:  # nothing was computed
            return
        self._follow_state(origin.state)
        self._prefixes.commit(cache, rows)
        if self._encoders is not None:
            self._encoders.commit(cast(EncoderDecoderPoolCache, cache))
        self._memory.keep(cache.remembered, rows, origin, cache.begins)

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until all committed pages are in the store, or could not be written.

        Args:
            timeout: Seconds to wait for; ``None`` waits for ever.

        Returns:
            Whether all writes are done.
        """
        return self._store is None or self._store.flush(timeout)

    def close(self) -> None:
        """``flush``, close the store, and restore the model's layers.

        Other pools with the same ``KVStore`` can no longer write to it, either.
        """
        if self._store is not None:
            self._store.close()
        if self._model is not None:
            self._model.release()

    def why(
        self, input_ids: Tensor, salt: str = "", content: str | Sequence[str] | None = None
    ) -> list[Miss]:
        """Reasons why ``begin`` would not find full pages of a text now; empty if it would find all.

        A store below is asked, too. Pages that it has are no miss; damaged pages, and pages of another model
        or format, are named as such. This reads the headers of all stored segments.

        Args:
            input_ids: ``[1, T]``, as in ``begin``.
            salt, content: The same.

        Raises:
            ArgumentError: as ``begin``.
            StateError: events are not recorded.
        """
        expect("input_ids", input_ids, "B T", dtype=INDEX_DTYPES, B=1)
        origin = self._bound().origin(input_ids.tolist(), salt, content)
        self._follow_state(origin.state)
        tokens, [scope] = input_ids[0, :-1].tolist(), origin.scopes()
        [recalled] = self._memory.recall(input_ids.tolist(), origin, [0])
        misses = self._why(tokens, scope)
        misses = self._prefixes.with_hidden(misses, tokens, scope, recalled.hides)
        below: Any = self._prefixes.main.below
        if below is None or not misses:
            return misses
        return list(below.misses(misses, tokens, *origin.stored_scopes()))

    def check(self) -> None:
        """Check the invariants of pages and prefixes; raises ``StateError`` at the first that fails."""
        self._prefixes.check()
        if self._encoders is not None:
            self._encoders.check()

    def __repr__(self) -> str:
        found = self.report()
        held = f"{found['active']:,} pages held of {found['num_pages']:,}"
        tokens = f"{found['tokens_found']:,} tokens found of {found['tokens_asked']:,}"
        return f"{type(self).__name__}(kv={found['kv']!r}, {held}, {tokens})"

    def report(self) -> TableReport:
        """Numbers of pages by state, of tokens that ``begin`` looked up and found, and the store's report.

        ``kv`` is the format string of keys and values with the group of their scales, such as ``"int8:g32"``.
        Pages are those of the layers without a window, if there are any. ``windows`` has the pages of other
        layers by their windows; ``nbytes`` are allocated for all of them. ``states`` has the pages of
        recurrent states, ``encoders`` those of encoders. ``residual_bytes`` are the bytes of residual
        windows, in caches and in committed texts. ``layers`` is a ``LayerReport`` as a dictionary, with
        numbers instead of names. ``smoothing`` names the layers whose keys are smoothed, and why others
        are not.
        """
        main, store = self._prefixes.main, cast(Any, self._prefixes.main.below)
        groups = self._empty.sequences
        numbers = {
            "kv": main.pages.kind(*self._head_dims),
            **main.pages.pool.report(),
            "windows": {x.window: x.pages.pool.report() for x in groups if x.is_required and x.window},
            "nbytes": sum(x.pages.nbytes for x in groups),
            "nbytes_per_token": sum(x.nbytes_per_token for x in main.pages.storages.values()),
            "tokens_asked": self._num_asked,
            "tokens_found": self._num_found,
            "residual_bytes": sum(x.pages.nbytes for x in groups if not x.is_required),
            "states": None if self._states is None else self._states.report(),
            "encoders": None if self._encoders is None else self._encoders.report(),
            "smoothing": self._smoothing,
            "layers": None if self._model is None else self._model.layers(),
        }
        return TableReport(numbers | ({} if store is None else {"store": store.report()}))

    def _empty_prefixes(self) -> PoolPrefixes:
        return PoolPrefixes([PrefixGroup(x.pages, x.reach) for x in self._empty.sequences], self._states)

    def _recorded(self) -> Recorded:
        pages, tree = self._prefixes.main.pages, self._prefixes.main.tree
        nbytes = round(self._prefixes.page_size * sum(x.nbytes_per_token for x in pages.storages.values()))
        record = self._states.record if self._states else None
        return Recorded(pages.pool, tree, pages.all_tables, nbytes, nullcontext(), record)

    def _bound(self) -> PoolModel:
        if self._model is None:
            raise StateError("a pool that was loaded must have its model: pool.bind(model)")
        return self._model

    def _identities(self) -> Iterator[tuple[Any, ...]]:
        """Arguments of ``StoreBelow.become`` for each group of layers of the present model."""
        identity = self._bound().identity(self._prefixes.main.pages.format, self._states)
        for fingerprint, storages in zip(identity.fingerprints, identity.storages, strict=True):
            yield fingerprint, storages, identity.seconds_per_token, identity.probe

    def _follow_state(self, state: str) -> None:
        """Switch the stores below to the present state of the model."""
        if self._store is not None and state != self._stored_state:
            for group, identity in zip(self._prefixes.groups, self._identities(), strict=True):
                below: Any = group.below
                below.become(*identity)
            self._stored_state = state
