"""A kvloom cache for Hugging Face ``generate()``."""

import copy
import logging
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Final, SupportsIndex, cast

import torch
from torch import Tensor

from kvloom.caches import CacheFormat, FixedLayer, PagedLayer, Sequences
from kvloom.caches.layer_set import LayerSet
from kvloom.caches.layers.fixed import too_long_for
from kvloom.caches.rows.selection import repeated, selected
from kvloom.errors import ArgumentError, OutOfPages
from kvloom.integrations.transformers.cache.build import make_layers
from kvloom.integrations.transformers.cache.changes import (
    changes_of_length,
    changes_of_rows,
    expect_pages,
)
from kvloom.integrations.transformers.cache.formats import cache_format
from kvloom.integrations.transformers.cache.layers import KVCacheLayer, States, expect_thawed, num_kept
from kvloom.integrations.transformers.cache.legacy import legacy_pairs, plain_layers, split_halves
from kvloom.integrations.transformers.cache.lengths import (
    counts_of_rows,
    expect_maskable,
    expect_one_length,
    lengths_of,
)
from kvloom.integrations.transformers.cache.stateful_cache import StatefulCache
from kvloom.integrations.transformers.cache.trial import record_past
from kvloom.integrations.transformers.models.cache_argument import attends_to_encoder
from kvloom.integrations.transformers.models.layer_specs import layers_of
from kvloom.integrations.transformers.models.remembered import memory_of
from kvloom.integrations.transformers.models.text_config import text_config_of
from kvloom.integrations.transformers.reports import ReportedCache
from kvloom.integrations.transformers.smoothing import smoothing_for
from kvloom.paging import uninterrupted, whole

_LOG: Final = logging.getLogger("kvloom")


class KVCache(ReportedCache, StatefulCache):
    """A cache for ``generate(past_key_values=...)`` and ``model(past_key_values=...)`` kept in kvloom pages.

    With ``attn_implementation="kvloom"`` attention reads the pages in place; any other one receives the same
    tensors as from ``DynamicCache``, dequantized where the cache is quantized. Tensors are stored detached:
    the cache is for inference. Beams, forks and repeated rows share pages; a page is copied when one of its
    holders writes it, so reordering and forking move no keys or values.
    """

    of_encoder_decoder: "ClassVar[Callable[[Any, list[Any], CacheFormat], KVCache]]"
    of_pictures: "ClassVar[Callable[[list[Any], CacheFormat], KVCache]]"
    """Make caches of what else a decoder attends to, of classes that are made of this one."""

    def __init__(self, layers: list[Any]) -> None:
        super().__init__(layers)
        self._cache = LayerSet(stream for layer in self._own_layers for stream in layer.streams)

    @property
    def sequences(self) -> list[Sequences]:
        """Page tables of each group of layers: those of one window and one number of tokens."""
        return self._cache.sequences

    @classmethod
    def for_model(
        cls,
        model: Any,
        kv: str | Path = "auto",
        page_size: int = 16,
        max_tokens: int | None = None,
        *,
        values: str | None = None,
        layout: str = "auto",
        static: bool = False,
        rollback: int = 0,
    ) -> "KVCache":
        """An empty cache for ``model``.

        Args:
            model: A ``PreTrainedModel`` that generates. Keys and values are stored in kvloom pages, those of
                sliding windows only as long as they are seen; recurrent states stay in transformers' own
                layers, and so do layers of an unknown kind, which a WARNING names. For an encoder-decoder
                model, and a decoder that is given what an encoder made, the result is an
                ``EncoderDecoderKVCache``, with the encoder's keys and values beside;
                of a model with layers that attend to pictures, as Mllama, theirs are beside, too.
            kv: Format of keys and values, one of ``STORAGE``, or the path of a plan. ``"int8:g32"`` has a
                float16 scale for each 32 elements of a head vector; ``"int8"`` for each gcd(64, head dim).
                Codes of fewer bits have the same, and rotated keys unless it is ``"int4,rotate=none"``.
                ``"int8,recent=32"`` has a residual window: a token attends to the last 32, itself included,
                unquantized. With fewer bits the default is 64; ``recent=0`` is none.
            page_size: Tokens in a page.
            max_tokens: Token slots of each layer, all sequences together, rounded up to whole pages;
                ``None`` grows on demand.
            values: Format of the values, as ``kv``, if it differs from that of the keys.
            layout: Axis order of the pages, see ``CacheFormat``; ``"auto"`` keeps rows where attention is not
                ``"kvloom"`` when the first tokens are stored.
            static: Allocate all memory at the first update and keep lengths in tensors, so that a decode step
                compiles once; ``max_tokens`` is then the largest length of each sequence.
            rollback: Number of tokens that ``crop`` can remove from recurrent states. Up to four copies of
                them and the inputs of their layers since are kept for it; the model is tried with a short
                text once. Without such states ``crop`` can remove any number.

        Raises:
            ArgumentError: ``model`` is none, ``kv`` or ``values`` is unknown, its group does not divide the
                head dim, no group is given and the head dim is no multiple of 8, ``static`` without
                ``max_tokens``, or ``rollback`` is negative.
            ConfigError: ``layout`` is unknown.
            UnsupportedError: no layer of the model has keys and values.
        """
        config = text_config_of(model)
        if static and max_tokens is None:
            raise ArgumentError("max_tokens must be given for a static cache, got None")
        size = 1 if static else page_size
        smoothing = smoothing_for(model, kv)
        format = cache_format(config, kv, size, max_tokens, values, layout, smoothing)
        specs = layers_of(model)
        layers = make_layers(model, format, static, specs=specs)
        others = Counter(x.keeps for x in specs if x.is_foreign)
        if others:
            said = others.total(), len(layers), dict(others)
            _LOG.warning("%d of %d layers keep transformers' own storage: %s", *said)
        if attends_to_encoder(model):
            cache = cls.of_encoder_decoder(model, layers, format)
        else:
            cache = cls.of_pictures(layers, format) if any(x.crosses for x in specs) else cls(layers)
        cache.remembered.memory = memory_of(model)
        if rollback:
            record_past(model, cache, rollback)
        return cache

    @classmethod
    def from_legacy_cache(
        cls,
        past_key_values: Iterable[Sequence[Tensor]] | None = None,
        model: Any = None,
        **options: Any,
    ) -> "KVCache":
        """A cache of copies of ``(key, value)`` pairs ``[B, H, N, D]``, one pair for each layer.

        Args:
            past_key_values: The pairs; ``None`` for none. Of a model that attends to an encoder a layer may
                have four tensors, of which the last two are the encoder's.
            model: As ``for_model``. Without it every layer keeps all tokens, as in a ``DynamicCache`` without
                a model, and ``update`` returns tensors.
            options: The other arguments of ``for_model``.

        Raises:
            ArgumentError: the pairs do not have one length or do not fit the layers of ``model``, or as
                ``for_model``.
        """
        pairs, of_encoder = split_halves(past_key_values or ())
        is_known = model is not None
        cache: Any = cls.for_model(model, **options) if is_known else cls(plain_layers(pairs, **options))
        if of_encoder and not hasattr(cache, "cross_attention_cache"):
            raise ArgumentError(
                f"model must be given, and attend to an encoder, for keys of an encoder, got "
                f"{'none' if model is None else type(model).__name__}"
            )
        if len(pairs) > len(cache.layers):
            raise ArgumentError(
                f"past_key_values must be of the {len(cache.layers)} layers of model, got {len(pairs)}"
            )
        for layer_idx, (key, value) in enumerate(pairs):
            cache.update(key, value, layer_idx)
        for layer_idx, (key, value) in enumerate(of_encoder):
            cache.cross_attention_cache.update(key, value, layer_idx)
            cache.is_updated[layer_idx] = True
        return cast(KVCache, cache)

    def to_legacy_cache(self) -> tuple[tuple[Tensor, Tensor], ...]:
        """Keys and values ``[B, H, N, D]`` of each layer, gathered; of a window only the last tokens.

        Raises:
            UnsupportedError: a layer has no keys and values of its own.
        """
        return legacy_pairs(self.layers)

    @property
    def nbytes(self) -> int:
        """Bytes allocated for keys and values, scales included."""
        return self._cache.nbytes

    @property
    def nbytes_per_token(self) -> float:
        """Bytes of one token in the layers that hold it, without ``nbytes_recent``; 0 if empty."""
        return sum(layer.nbytes_per_token for layer in self._cache.layers)

    @property
    def nbytes_recent(self) -> int:
        """Bytes of residual windows among ``nbytes``: the last tokens, stored unquantized beside codes."""
        return sum(layer.nbytes_recent for layer in self._cache.layers)

    @property
    def num_pages_held(self) -> int:
        """Pages that hold tokens of this cache or its forks; a shared page counts once."""
        return self._cache.num_pages_held

    @property
    def num_rows(self) -> int:
        """B; 0 before the first update."""
        return self._cache.num_rows

    @property
    def is_compileable(self) -> bool:
        """Whether layers have fixed storage; transformers makes masks that hide its free slots only if so."""
        for layer in self._own_layers:
            if isinstance(layer.pages, FixedLayer):
                return True
        return False

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[States, States]:
        """Store ``[B, H, Q, D]`` in a layer; return keys and values for attention, ``[B, H, N, D]``."""
        if torch.compiler.is_compiling() and not _is_traceable(self.layers[layer_idx], key_states):
            pair: tuple[States, States] = _update_between_graphs(
                self, key_states, value_states, layer_idx, *args, **kwargs
            )
            return pair
        if self._cache.is_inconsistent or self.is_frozen:
            self._expect_usable()
        if not 0 <= layer_idx < len(self.layers):
            raise ArgumentError(
                f"layer_idx must be in [0, {len(self.layers)}), got {layer_idx}: of a model of fewer layers"
            )
        layer = self.layers[layer_idx]
        if not isinstance(layer, KVCacheLayer):
            keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
            return keys, values
        pages = layer.pages
        if isinstance(pages, FixedLayer):
            try:
                return layer.update(key_states, value_states)
            except OutOfPages as error:
                layers = [x.pages for x in self._own_layers if isinstance(x.pages, FixedLayer)]
                raise too_long_for(layers, key_states, value_states) from error
        end = pages.num_tokens + key_states.shape[2]
        if pages.sequences.num_positions >= end or self._cache.sequences == pages.all_sequences:
            return layer.update(key_states, value_states)
        with self._cache.reserving(pages, key_states.shape[0], end):
            return layer.update(key_states, value_states)

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        """Store index keys ``[B, Q, D]`` of a layer and return all of them, ``[B, N, D]``."""
        self._expect_usable()
        update: Callable[[Tensor], Tensor] = self.layers[layer_idx].update_indexer
        index = getattr(self.layers[layer_idx], "index_keys", None)
        if not isinstance(index, PagedLayer):
            return update(indexer_key_states)
        end = index.num_tokens + indexer_key_states.shape[1]
        with self._cache.reserving(index, len(indexer_key_states), end):
            return update(indexer_key_states)

    def get_mask_sizes(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """Number of tokens that a layer will return, and position of the first; called before each forward.

        Raises:
            StateError: as ``expect_whole``.
            UnsupportedError: layers have different lengths, and one mask does not fit them all.
        """
        layer_idx = kwargs["layer_idx"] if "layer_idx" in kwargs else args[-1]
        is_of_all = not self._has_begun(layer_idx)
        if is_of_all:
            self.expect_whole()
            if self._stateful and not torch.compiler.is_compiling():
                self._begin_forward()
        length, offset = super().get_mask_sizes(*args, **kwargs)
        if is_of_all and len(self._cache.sequences) > 1:
            expect_maskable(self, length, layer_idx)
        return length, offset

    def begin_forward(self) -> None:
        """Note that a forward of a model begins; raises StateError if the last one broke off."""
        if self._begun:
            self.expect_whole()
        self._begin_forward()
        self._is_watched = True

    def expect_whole(self) -> None:
        """Check that all layers have the same rows and lengths.

        Raises:
            StateError: they do not, for example after an exception within a forward.
        """
        self._cache.expect_consistent()
        for layer in self._own_layers:
            if layer.pages.assignment.waiting is not None:
                layer.pages.expect_settled()
        if torch.compiler.is_compiling():  # lengths are tensors
            return
        lengths = lengths_of(self._own_layers) | self._cache.lengths
        expect_one_length(lengths, self.layers)
        if self._begun:
            self._expect_states_of(max(lengths, default=0))

    def _forked_layers(self) -> list[Any]:
        """Layers of the same tokens on the same pages, and copies of other layers."""
        self._cache.expect_consistent()
        forks = self._cache.forks()
        return [x.fork(forks) if isinstance(x, KVCacheLayer) else copy.deepcopy(x) for x in self.layers]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace row i by row ``beam_idx[i]``."""
        self._choose(selected, beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row ``repeats`` times in a row."""
        self._choose(repeated, repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows at ``indices``, or where a bool mask is true."""
        self._choose(selected, indices)

    def crop(self, tokens_to_remove: int | Tensor | Sequence[int]) -> None:
        """Remove the last tokens: the same number from all rows, or a number from each.

        Their pages are free for the next tokens of this cache and its forks. ``nbytes`` stays as it is until
        ``reset``, or until nothing uses the cache and its forks; a saved cache has room for its tokens alone.

        Args:
            tokens_to_remove: ``-n`` removes n tokens; with transformers 4 a positive number is the number
                kept. Or one number of at most 0 for each row: rows still end together, so a row that lost
                more than another begins with empty positions, which the attention mask must hide like left
                padding. ``get_seq_length()`` is the length of the longest row.

        Raises:
            ArgumentError: a number is positive (see above), or there is not one for each row.
            StateError: the cache is frozen, the next token would see tokens that a window has evicted, or
                recurrent states are not kept that far back.
            UnsupportedError: a layer cannot go back: one with a recurrent state and no ``rollback``, or, row
                by row, one that is static or has another length than others. Nothing was changed in any of
                these cases.
        """
        self._expect_usable()
        longest = max(self._longest, *self._cache.lengths, 0)
        if isinstance(tokens_to_remove, SupportsIndex) and not getattr(tokens_to_remove, "shape", ()):
            tokens_to_remove = operator.index(tokens_to_remove)
            ends = [num_kept(tokens_to_remove, longest)]
            change = self._cache.change_of_length(partial(num_kept, tokens_to_remove), longest)
        else:
            self.expect_whole()
            counts = counts_of_rows(tokens_to_remove, self.num_rows, self._cache.num_removed)
            expect_pages(self.layers)
            ends = [longest - n for n in counts]
            change = self._cache.change_of_length(
                lambda length: max(length - min(counts, default=0), 0), longest, counts
            )
        positions, others = changes_of_length(
            self.layers, tokens_to_remove, max(lengths_of(self._own_layers), default=0)
        )
        change.layers.extend(positions)
        past = self._past(ends)
        with uninterrupted():
            self._cache.make(change, others)
            self._return_to(past)
            self.remembered.truncate(max(ends, default=0))

    @whole
    def reset(self) -> None:
        """Forget all tokens; the next ones may be of another batch size."""
        expect_thawed(self)
        super().reset()
        self.remembered.truncate(0)
        self._begin_forward()
        if self._rollback is not None:
            self._rollback.restart(0)
        self._cache.regroup()

    def _choose(self, rows_of: Callable[[Any, int], list[int]], given: Any) -> None:
        self._expect_usable()
        if self.num_rows:
            self._select(rows_of(given, self.num_rows))

    @whole
    def _select(self, rows: Sequence[int]) -> None:
        """Replace row i by row ``rows[i]``: in page tables, and in tensors of other layers."""
        num_rows = self.num_rows
        change = self._cache.change_of_rows(rows)
        positions, others = changes_of_rows(self.layers, rows)
        change.layers.extend(positions)
        self._cache.make(change, others)
        self.remembered.select(rows, num_rows)
        if self._rollback is not None:
            self._rollback.select(rows)

    def _expect_usable(self) -> None:
        expect_thawed(self)
        self._cache.expect_consistent()


def _is_traceable(layer: Any, key_states: Tensor) -> bool:
    """Whether an update of a layer can be a part of a graph: fixed storage that has its memory can."""
    pages = getattr(layer, "pages", None)
    return pages is None or (isinstance(pages, FixedLayer) and pages.size == key_states.shape[0])


@torch.compiler.disable(  # type: ignore[untyped-decorator]
    reason="kvloom takes pages, and allocates fixed storage, outside of graphs: use fullgraph=True with a "
    "KVCache of static=True that has seen the prompt"
)
def _update_between_graphs(cache: KVCache, *args: Any, **kwargs: Any) -> tuple[States, States]:
    return type(cache).update(cache, *args, **kwargs)
