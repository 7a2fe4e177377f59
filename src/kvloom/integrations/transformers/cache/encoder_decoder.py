"""Caches of decoders that attend to an encoder: their own tokens, and the encoder's keys and values beside.

Shapes: B rows, N tokens of the encoder, H key/value heads, D head dim.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from torch import Tensor
from transformers import Cache, EncoderDecoderCache
from transformers.cache_utils import CacheLayerMixin

from kvloom.caches import CacheFormat
from kvloom.errors import ArgumentError, StateError
from kvloom.integrations.transformers.cache.encoder import EncoderKVCache, EncoderLayer
from kvloom.integrations.transformers.cache.kv_cache import KVCache
from kvloom.integrations.transformers.cache.layers import States
from kvloom.integrations.transformers.cache.lengths import lengths_of
from kvloom.integrations.transformers.cache.pairs import PairGuard
from kvloom.integrations.transformers.models.layer_specs import OF_PICTURES
from kvloom.integrations.transformers.reports import report_of
from kvloom.paging import whole
from kvloom.terminal import TableReport

_Cache = TypeVar("_Cache", bound="CrossedKVCache")


class CrossedKVCache(KVCache):
    """A cache with an encoder's keys and values beside the tokens; changes of rows are of both."""

    _encoder: EncoderKVCache

    def report(self) -> TableReport:
        """What both halves hold: ``text``, the decoder's tokens, and ``encoder``.

        Each has ``kv``, ``rows`` that attention sees, ``tokens`` of each row, ``nbytes`` allocated,
        ``nbytes_per_token``, ``nbytes_dynamic`` and ``nbytes_bfloat16``, the bytes of the same rows in a
        ``DynamicCache`` of the model's dtype and of bfloat16, and ``smoothed`` layers; ``encoder`` also
        ``stored_rows``, which rows with the same input share. Bytes stand for both halves, too.
        """
        halves = {
            "text": report_of(self._own_layers, self.num_rows, self._cache.nbytes),
            "encoder": self._encoder.report(),
        }
        names = ("nbytes", "nbytes_dynamic", "nbytes_bfloat16")
        return TableReport(halves | {name: sum(x[name] for x in halves.values()) for name in names})

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

    @property
    def nbytes(self) -> int:
        """Bytes allocated for keys and values, scales and those of the encoder included."""
        return self._cache.nbytes + self._encoder.nbytes

    @property
    def num_pages_held(self) -> int:
        """Pages that hold tokens of this cache or its forks, those of the encoder included."""
        return self._cache.num_pages_held + self._encoder.num_pages_held

    def freeze(self: _Cache) -> _Cache:  # noqa: PYI019 (not in Python 3.10)
        """Refuse every later change, so that forks start from the same tokens; returns the cache."""
        self._encoder.freeze()
        return super().freeze()

    @whole
    def reset(self) -> None:
        """Forget all tokens and the encoder; the next ones may be of another batch size."""
        super().reset()
        self._encoder.reset()

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


# What transformers' class asks its first half is what a cache without halves answers itself.
_Whole: Any = type(
    "_Whole",
    (EncoderDecoderCache,),
    {name: vars(Cache)[name] for name in vars(EncoderDecoderCache).keys() & vars(Cache).keys()},
)


class EncoderDecoderKVCache(CrossedKVCache, _Whole):  # type: ignore[misc]
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
        cache = cls(layers, EncoderKVCache.beside(layers[0]._config, format, range(len(layers))))
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

    def fork(self) -> "EncoderDecoderKVCache":
        """A cache of the same tokens and the same encoder, not frozen; the two are independent."""
        fork: EncoderDecoderKVCache = super().fork()
        fork._encoder, fork.is_updated = self._encoder.fork(), {**self.is_updated}
        return fork

    def to_legacy_cache(self) -> Any:
        """Key and value of each layer, as ``KVCache.to_legacy_cache``, and those of the encoder behind."""
        own, of_encoder = super().to_legacy_cache(), self._encoder.to_legacy_cache()
        return tuple((*a, *b) for a, b in zip(own, of_encoder, strict=True)) if own and of_encoder else own

    @whole
    def reset(self) -> None:
        """Forget all tokens and the encoder; the next ones may be of another batch size."""
        super().reset()
        self.is_updated = dict.fromkeys(self.is_updated, False)


class PictureLayer(CacheLayerMixin):  # type: ignore[misc]
    """A layer that attends to pictures and has no tokens of the text, as in Mllama.

    A crop of the text leaves the pictures.

    Args:
        encoder: Keys and values of pictures for all such layers.
        index: Number of this one among them.
    """

    keeps = OF_PICTURES
    is_compileable = is_sliding = False
    is_croppable = True

    def __init__(self, encoder: EncoderKVCache, index: int) -> None:
        self.encoder, self.index = encoder, index

    def __deepcopy__(self, memo: dict[int, Any]) -> "PictureLayer":
        return self  # the cache gives its copy layers of its own

    @property
    def own(self) -> EncoderLayer:
        """The layer that keeps them."""
        layer: EncoderLayer = self.encoder.layers[self.index]
        return layer

    @property
    def is_initialized(self) -> bool:
        """Whether there was a picture."""
        return self.own.is_initialized

    @property
    def keys(self) -> Any:
        """Keys ``[B, H, N, D]``; ``None`` without a picture."""
        return self.own.keys

    @keys.setter
    def keys(self, keys: Tensor) -> None:
        self.own.keys = keys

    @property
    def values(self) -> Any:
        """Values ``[B, H, N, D]``; ``None`` without a picture."""
        return self.own.values

    @values.setter
    def values(self, values: Tensor) -> None:
        self.own.values = values

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[States, States]:
        """Store ``[B, H, N, D]`` of more pictures; return those of all."""
        return self.encoder.update(key_states, value_states, self.index)

    def get_seq_length(self) -> Any:
        """N."""
        return self.own.get_seq_length()

    def get_max_length(self) -> int:
        """-1, for no bound."""
        return -1

    get_max_cache_shape = get_max_length  # its name in transformers 4

    def get_mask_sizes(self, query_length: Any) -> Any:
        """Length and first position of what follows ``query_length`` more keys."""
        return self.own.get_mask_sizes(query_length)

    def crop(self, tokens_to_remove: int) -> None:
        """Do nothing; nor do the next two, since the cache does it for all layers at once."""

    def reset(self) -> None:
        """Do nothing."""

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Do nothing."""


class PictureKVCache(CrossedKVCache):
    """A cache of a decoder in which some layers attend to pictures, with keys and values of these beside."""

    def __init__(self, layers: list[Any]) -> None:
        super().__init__(layers)
        self._encoder = next(x.encoder for x in layers if isinstance(x, PictureLayer))

    @classmethod
    def of(cls, layers: list[Any], format: CacheFormat) -> "PictureKVCache":
        """An empty cache of a model with these layers; those of pictures are replaced."""
        numbers = [i for i, x in enumerate(layers) if getattr(x, "keeps", "") == OF_PICTURES]
        config = next(x._config for i, x in enumerate(layers) if i not in numbers)
        encoder = EncoderKVCache.beside(config, format, numbers)
        encoder.grows = True
        return cls(
            [PictureLayer(encoder, numbers.index(i)) if i in numbers else x for i, x in enumerate(layers)]
        )

    def crop(self, tokens_to_remove: int | Tensor | Sequence[int]) -> None:
        """Remove the last tokens, as ``KVCache.crop``; and pictures that not all layers have."""
        super().crop(tokens_to_remove)
        lengths = lengths_of(self._encoder._own_layers)
        if len(lengths) > 1:  # a forward broke off
            self._encoder.crop(min(lengths) - max(lengths))

    def _forked_layers(self) -> list[Any]:
        encoder = self._encoder.fork()
        return [
            PictureLayer(encoder, x.index) if isinstance(x, PictureLayer) else x
            for x in super()._forked_layers()
        ]


KVCache.of_encoder_decoder = EncoderDecoderKVCache.of
KVCache.of_pictures = PictureKVCache.of
