"""Cache layers for a model."""

from collections.abc import Sequence
from typing import Any

from kvloom.caches import CacheFormat, FixedLayer, PagedLayer, Pages, Sequences
from kvloom.integrations.transformers.attention.latents import answer_latents
from kvloom.integrations.transformers.cache.indexed_layers import (
    IndexedKVCacheLayer,
    StaticIndexedKVCacheLayer,
)
from kvloom.integrations.transformers.cache.layers import (
    CrossLayer,
    HybridKVCacheLayer,
    KVCacheLayer,
    StaticKVCacheLayer,
)
from kvloom.integrations.transformers.models.layer_specs import LayerSpec, expect_use, layers_of
from kvloom.integrations.transformers.models.text_config import has_latents, text_config_of
from kvloom.integrations.transformers.states.mixers import watch_mixers


def make_layers(
    model: Any,
    format: CacheFormat,
    static: bool = False,
    *,
    is_kept: bool = False,
    policy: str = "lru",
    specs: Sequence[LayerSpec] | None = None,
) -> list[Any]:
    """Cache layers for a model; layers with keys and values are ours, the others those of transformers.

    Layers with the same window share new sequences, and so do layers without one.

    Args:
        model: A ``PreTrainedModel``.
        format: Cache format of the tokens.
        static: Whether layers use fixed storage.
        is_kept: Argument of ``Pages``.
        policy: Argument of ``Pages``, for layers without a window.
        specs: ``layers_of`` the model, if they were made.

    Raises:
        UnsupportedError: the model takes no cache, this version of transformers describes it wrongly, or
            ``static`` is true and a layer has recurrent states beside keys and values, or storage of its own
            that grows.
    """
    config, specs = text_config_of(model), layers_of(model) if specs is None else specs
    expect_use(model, "static" if static else "cache", specs)
    if has_latents(config):
        answer_latents(model)
    # The configuration that layers read; of an old encoder-decoder model ``config`` is a copy.
    live = model.config if type(config) is type(model.config) else config
    by_window: dict[int | None, tuple[Sequences, Sequences | None]] = {}
    layers: list[Any] = []
    for index, spec in enumerate(specs):
        if not (spec.tokens or spec.index):
            layers.append(CrossLayer() if spec.crosses else spec.theirs)
            continue
        if static:
            layer = _static_layer(spec, FixedLayer(format.of_layer(index), spec.window), live)
        else:
            if spec.window not in by_window:
                pages = Pages(format, is_kept, policy if spec.window is None else "lru")
                sequences = Sequences(pages, spec.window)
                by_window[spec.window] = sequences, sequences.of_residual()
            sequences, residual = by_window[spec.window]
            layer = _paged_layer(spec, PagedLayer(format, sequences, index, residual), live)
        layer.is_used = spec.is_used
        if spec.index:
            layer.keep(has_keys=spec.tokens, has_index=spec.has_index)
        layers.append(layer)
    if any(x.states for x in specs) and any(x.tokens for x in specs):  # others are refused, unchanged
        watch_mixers(model)
    return layers


def _static_layer(spec: LayerSpec, fixed: FixedLayer, config: Any) -> KVCacheLayer:
    return (StaticIndexedKVCacheLayer if spec.index else StaticKVCacheLayer)(fixed, config)


def _paged_layer(spec: LayerSpec, paged: PagedLayer, config: Any) -> KVCacheLayer:
    if not spec.states:
        return (IndexedKVCacheLayer if spec.index else KVCacheLayer)(paged, config)
    # Only some versions of transformers have this argument.
    numbered = hasattr(spec.theirs, "number_of_states")
    states = {"number_of_states": spec.theirs.number_of_states} if numbered else {}
    return HybridKVCacheLayer(paged, config, **states)
