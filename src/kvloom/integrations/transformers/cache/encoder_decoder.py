"""Caches of encoder-decoder models: tokens of the decoder, and beside them the keys and values of an encoder.

Shapes: B rows, R stored rows, N tokens of the encoder, H key/value heads, D head dim.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final, cast

import torch
from torch import Tensor
from transformers import Cache, EncoderDecoderCache

from kvloom.caches import CacheFormat, PagedLayer, Sequences
from kvloom.errors import ArgumentError, StateError
from kvloom.integrations.transformers.attention.crossed import CrossStates, Sources
from kvloom.integrations.transformers.attention.lazy_states import LazyStates
from kvloom.integrations.transformers.cache.encoder_input import EncoderInput
from kvloom.integrations.transformers.cache.encoder_report import report_of
from kvloom.integrations.transformers.cache.kv_cache import KVCache
from kvloom.integrations.transformers.cache.layers import KVCacheLayer, States
from kvloom.integrations.transformers.cache.pairs import PairGuard
from kvloom.paging import whole

_PAGE: Final = 16
"""Tokens in a page where the decoder's tokens are in fixed storage."""


def format_beside(format: CacheFormat) -> CacheFormat:
    """Format of an encoder's tokens beside a decoder's tokens of ``format``."""
    layers = None
    if format.layers is not None:
        layers = tuple(replace(x, smoothing=None) for x in format.layers)
    size = _PAGE if format.page_size == 1 else format.page_size
    return replace(format, page_size=size, max_tokens=None, recent=0, smoothing=None, layers=layers)


class EncoderLayer(KVCacheLayer):
    """Keys and values of an encoder that one layer attends to, stored once.

    Attributes:
        sources: The stored row of each row of the batch.
    """

    keeps = "keys and values of the encoder"

    def __init__(self, pages: PagedLayer, config: Any) -> None:
        self.sources = Sources()
        self._pair: tuple[CrossStates, CrossStates] | None = None  # of keys that were read, for their values
        super().__init__(pages, config)

    def gathered(self) -> tuple[Tensor, Tensor] | None:
        """Keys and values ``[B, H, N, D]``, gathered."""
        pair = super().gathered()
        return None if pair is None else (self.sources.spread(pair[0]), self.sources.spread(pair[1]))

    def _side(self, side: int) -> Any:
        if self._dtype is None or not self.is_in_place or self.pages.assignment.get(side) is not None:
            return super()._side(side)
        pair, self._pair = self._pair, None
        if pair is None or side == 0:
            pair = CrossStates.of(self.pages.stored(), self._dtype, self.sources)
            self._pair = pair if side == 0 else None
        return pair[side]


class EncoderKVCache(KVCache):
    """Keys and values of encoders, for the cross-attention of a decoder; rows with equal ones share them.

    Args:
        layers: The layers; ``None`` for none, as transformers makes a cache of this class.
        theirs: Arguments of transformers, which are not used.

    Attributes:
        input: What the encoder read.
    """

    def __init__(self, layers: list[Any] | None = None, **theirs: Any) -> None:
        super().__init__(layers or [])
        self._sources, self.input = Sources(), EncoderInput()

    @classmethod
    def beside(cls, decoder: Sequence[Any], format: CacheFormat) -> "EncoderKVCache":
        """An empty one beside the layers of a decoder, whose tokens have this format."""
        own = format_beside(format)
        sequences = Sequences(own)
        return cls([EncoderLayer(PagedLayer(own, sequences, i), x._config) for i, x in enumerate(decoder)])

    @property
    def num_rows(self) -> int:
        """B; 0 before the first update."""
        return len(self._sources.rows)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[States, States]:
        """Store ``[B, H, N, D]`` of an encoder in an empty layer; return them for attention.

        Rows that follow one another share one stored row if their keys and values are equal in all layers.

        Raises:
            StateError: the layer has the keys of an encoder already.
        """
        if torch.compiler.is_compiling():
            return super().update(key_states, value_states, layer_idx)
        self._expect_usable()
        if 0 <= layer_idx < len(self.layers) and self.layers[layer_idx].pages.num_tokens:
            raise StateError(
                f"layer {layer_idx} must be empty before the keys of an encoder are stored, got "
                f"{self.layers[layer_idx].pages.num_tokens} tokens: reset the cache before another input"
            )
        is_first = not self.num_rows
        if is_first:
            self._set_sources(Sources.of(key_states, value_states))
        elif not self._sources.fit(key_states, value_states):
            self._part()
        taken, spread = self._sources.taken, self._sources.spread
        try:
            keys, values = super().update(taken(key_states), taken(value_states), layer_idx)
        except BaseException:
            if is_first:
                self._set_sources(Sources())
            raise
        self.layers[layer_idx].pages.stored()  # finds slots, which no compiler can
        if not isinstance(keys, LazyStates) or not isinstance(values, LazyStates):
            return spread(cast(Tensor, keys)), spread(cast(Tensor, values))
        pair = CrossStates.of(keys.tokens, keys.dtype, self._sources)
        pair[0].untrained, pair[1].untrained = keys.untrained, values.untrained
        return pair

    def report(self) -> dict[str, Any]:
        """``report_of`` the encoder's half, and ``stored_rows``."""
        found = report_of(self._own_layers, self.num_rows, self.nbytes)
        return found | {"stored_rows": len(self._sources.firsts)}

    def fork(self) -> "EncoderKVCache":
        """A cache of the same keys and values on the same pages."""
        fork: EncoderKVCache = super().fork()
        fork._set_sources(self._sources)
        fork.input = self.input.fork()
        return fork

    def reset(self) -> None:
        """Forget all; the next input may be of another batch size."""
        super().reset()
        self._set_sources(Sources())

    @whole
    def _select(self, rows: Sequence[int]) -> None:
        """Replace row i by row ``rows[i]``; stored rows that no row has any more are released."""
        chosen = [self._sources.rows[i] for i in rows]
        kept = sorted({*chosen})
        if kept != sorted({*self._sources.rows}):
            super()._select(kept)
        self._set_sources(Sources([kept.index(r) for r in chosen]))
        self.input.select(rows)

    @whole
    def _part(self) -> None:
        """Give each row a stored row of its own, since another layer has different keys for them."""
        super()._select(self._sources.rows)
        for sequences in self.sequences:
            sequences.own_pages()
        self._set_sources(Sources(range(self.num_rows)))

    def _set_sources(self, sources: Sources) -> None:
        self._sources = sources
        for layer in self.layers:
            layer.sources, layer._pair = sources, None


# What transformers' class asks its first half is what a cache without halves answers itself.
_Whole: Any = type(
    "_Whole",
    (EncoderDecoderCache,),
    {name: vars(Cache)[name] for name in vars(EncoderDecoderCache).keys() & vars(Cache).keys()},
)


class EncoderDecoderKVCache(KVCache, _Whole):  # type: ignore[misc]
    """Both halves of an encoder-decoder's cache in kvloom pages; an ``EncoderDecoderCache`` of transformers.

    It is the cache of the decoder's tokens itself, ``self_attention_cache``, with the cache of the encoder's
    keys and values beside it, ``cross_attention_cache``. Lengths and ``crop`` are of the decoder's tokens,
    and changes of rows are of both.

    Attributes:
        is_updated: Whether a layer has the keys and values of the encoder, by its number.
    """

    def __init__(self, layers: list[Any], encoder: EncoderKVCache | None = None) -> None:
        KVCache.__init__(self, layers)
        self._encoder = EncoderKVCache() if encoder is None else encoder
        self.is_updated: dict[int, bool] = {}

    @classmethod
    def of(cls, model: Any, layers: list[Any], format: CacheFormat) -> "EncoderDecoderKVCache":
        """An empty cache of a model, whose decoder has these layers."""
        cache = cls(layers, EncoderKVCache.beside(layers, format))
        cache.pair_guard = cache._encoder.pair_guard = PairGuard(model)
        return cache

    @property
    def self_attention_cache(self) -> "EncoderDecoderKVCache":
        """The cache itself."""
        return self

    @property
    def cross_attention_cache(self) -> EncoderKVCache:
        """Keys and values of the encoder."""
        return self._encoder

    @cross_attention_cache.setter
    def cross_attention_cache(self, cache: Any) -> None:
        # T5Gemma makes an empty one of the same class, without windows, which this one has none of.
        if not isinstance(cache, EncoderKVCache) or cache.layers:
            raise ArgumentError(
                f"cross_attention_cache must stay that of the cache, got another {type(cache).__name__}: use "
                f"EncoderDecoderCache(cache, another)"
            )

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        """Yield what ``DynamicCache`` yields for each layer, of both halves."""
        for own, of_encoder in zip(super().__iter__(), self._encoder, strict=True):
            yield (*own, *of_encoder)

    @property
    def nbytes(self) -> int:
        """Bytes allocated for keys and values, scales and those of the encoder included."""
        return self._cache.nbytes + self._encoder.nbytes

    @property
    def num_pages_held(self) -> int:
        """Pages that hold tokens of this cache or its forks, those of the encoder included."""
        return self._cache.num_pages_held + self._encoder.num_pages_held

    def report(self) -> dict[str, Any]:
        """What both halves hold: ``text``, the decoder's tokens, and ``encoder``.

        Each has ``kv``, ``rows`` that attention sees, ``tokens`` of each row, ``nbytes`` allocated, and
        ``nbytes_dynamic``, the bytes of the same rows in transformers' ``DynamicCache``; ``encoder`` also
        ``stored_rows``, which rows with the same input share. ``nbytes`` and ``nbytes_dynamic`` are of both.
        """
        halves = {
            "text": report_of(self._own_layers, self.num_rows, self._cache.nbytes),
            "encoder": self._encoder.report(),
        }
        sums = {name: sum(x[name] for x in halves.values()) for name in ("nbytes", "nbytes_dynamic")}
        return {**halves, **sums}

    def __repr__(self) -> str:
        """Rows, tokens and bytes of both halves."""
        found = self.report()
        text, read = found["text"], found["encoder"]
        kv, stored = text["kv"] or read["kv"], read["stored_rows"]
        own, of_encoder = (f"{x['rows']} rows x {x['tokens']:,}" for x in (text, read))
        return (
            f"{type(self).__name__}(kv={kv!r}, {own} tokens, beside {stored} for {of_encoder} of the "
            f"encoder, {found['nbytes']:,} bytes)"
        )

    def fork(self) -> "EncoderDecoderKVCache":
        """A cache of the same tokens and the same encoder, not frozen; the two are independent."""
        fork: EncoderDecoderKVCache = super().fork()
        fork._encoder, fork.is_updated = self._encoder.fork(), {**self.is_updated}
        return fork

    def freeze(self) -> "EncoderDecoderKVCache":
        """Refuse every later change, so that forks start from the same tokens; returns the cache."""
        self._encoder.freeze()
        return super().freeze()

    @whole
    def reset(self) -> None:
        """Forget all tokens and the encoder; the next ones may be of another batch size."""
        super().reset()
        self._encoder.reset()
        self.is_updated = dict.fromkeys(self.is_updated, False)

    def _choose(self, rows_of: Callable[[Any, int], list[int]], given: Any) -> None:
        self._expect_usable()
        counts = {x for x in (self.num_rows, self._encoder.num_rows) if x}
        if len(counts) > 1:
            raise StateError(
                f"the decoder's tokens must have the {self._encoder.num_rows} rows of the encoder, got "
                f"{self.num_rows}"
            )
        for num_rows in counts:
            self._select(rows_of(given, num_rows))

    @whole
    def _select(self, rows: Sequence[int]) -> None:
        if self.num_rows:
            super()._select(rows)
        if self._encoder.num_rows:
            self._encoder._select(rows)


KVCache.of_encoder_decoder = EncoderDecoderKVCache.of
