"""Cache layers for a model."""

from typing import Any, NoReturn

import transformers
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from kvloom.caches import CacheFormat, FixedLayer, PagedLayer, Pages, Sequences
from kvloom.errors import UnsupportedError
from kvloom.integrations.transformers.attention.latents import answer_latents
from kvloom.integrations.transformers.cache.indexed_layers import (
    IndexedKVCacheLayer,
    StaticIndexedKVCacheLayer,
)
from kvloom.integrations.transformers.cache.layers import (
    THEIR_HYBRID_LAYERS,
    CrossLayer,
    HybridKVCacheLayer,
    KVCacheLayer,
    StaticKVCacheLayer,
)
from kvloom.integrations.transformers.models.cache_argument import takes_cache
from kvloom.integrations.transformers.models.layer_specs import (
    KINDS,
    StatefulLayer,
    TheirIndexedLayer,
    cache_layers_of,
    keeps_states_elsewhere,
)
from kvloom.integrations.transformers.models.text_config import (
    has_latents,
    has_windows_of_keeping,
    text_config_of,
)
from kvloom.integrations.transformers.states.mixers import watch_mixers


def _own_streams(config: Any, index: int) -> dict[str, bool]:
    """Arguments of ``IndexedKVCacheLayer.keep``: whether a layer has keys and an index of its own."""
    sharing, indexers = getattr(config, "kv_sharing_modes", None), getattr(config, "indexer_types", None)
    return {
        "has_keys": sharing is None or sharing[index] != "reuse_but_indexer",
        "has_index": indexers is None or indexers[index] != "shared",
    }


def _refuse_static(model: Any, why: str) -> NoReturn:
    raise UnsupportedError(f"static must be False for {type(model).__name__}, whose {why}")


def make_layers(
    model: Any, format: CacheFormat, static: bool = False, *, is_kept: bool = False, policy: str = "lru"
) -> list[Any]:
    """Cache layers for a model; layers with keys and values are ours, the others those of transformers.

    Layers with the same window share new sequences, and so do layers without one.

    Args:
        model: A ``PreTrainedModel``.
        format: Cache format of the tokens.
        static: Whether layers use fixed storage.
        is_kept: Argument of ``Pages``.
        policy: Argument of ``Pages``, for layers without a window.

    Raises:
        UnsupportedError: the model takes no cache, this version of transformers describes it wrongly, or
            ``static`` is true and a layer has recurrent states beside keys and values, or storage of its own
            that grows.
    """
    config = text_config_of(model)
    if not getattr(type(model), "_supports_default_dynamic_cache", lambda: True)():
        raise UnsupportedError(
            f"model must work with a DynamicCache, got {type(model).__name__}, which has a cache of its own"
        )
    if not takes_cache(model):
        raise UnsupportedError(f"model must take a cache, which {type(model).__name__} does not")
    if static and has_windows_of_keeping(config):
        _refuse_static(model, "tokens see all of their own forward")
    if has_latents(config):
        answer_latents(model)
    # The configuration that layers read; of an old encoder-decoder model ``config`` is a copy.
    live = model.config if type(config) is type(model.config) else config
    theirs, numbers, used = cache_layers_of(model)
    kinds = getattr(config, "layer_types", None) or [None] * len(theirs)
    kinds = [kinds[number] for number in numbers if number < len(kinds)]
    if keeps_states_elsewhere(model, theirs):
        kinds = ["recurrent"] * len(theirs)
    across = getattr(config, "cross_attention_layers", None) or ()
    by_window: dict[int | None, Sequences] = {}
    layers: list[Any] = []
    for index, (layer, kind) in enumerate(zip(theirs, kinds, strict=False)):
        if numbers[index] in across:
            layers.append(CrossLayer())
            continue
        hybrid = type(layer) in THEIR_HYBRID_LAYERS
        indexed = type(layer) is TheirIndexedLayer
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer) and not (hybrid or indexed):
            if static and not layer.is_compileable:
                _refuse_static(model, f"layers ({type(layer).__name__}) grow with the text")
            layers.append(layer)
            continue
        if static and hybrid:
            _refuse_static(model, "layers keep recurrent states beside keys and values")
        if kind not in KINDS:
            raise UnsupportedError(
                f"model must have layers that this version's DynamicCache supports, got {kind!r} in "
                f"{type(model).__name__} with transformers {transformers.__version__}"
            )
        window = getattr(layer, "sliding_window", None)
        if static:
            fixed = FixedLayer(format.of_layer(index), window)
            layers.append((StaticIndexedKVCacheLayer if indexed else StaticKVCacheLayer)(fixed, live))
        else:
            if window not in by_window:
                pages = Pages(format, is_kept, policy if window is None else "lru")
                by_window[window] = Sequences(pages, window)
            paged = PagedLayer(format, by_window[window], index)
            own = HybridKVCacheLayer if hybrid else IndexedKVCacheLayer if indexed else KVCacheLayer
            # Only some versions of transformers have this argument.
            numbered = hybrid and hasattr(layer, "number_of_states")
            states = {"number_of_states": layer.number_of_states} if numbered else {}
            layers.append(own(paged, live, **states))
        layers[-1].is_used = used is None or index in used
        if indexed:
            layers[-1].keep(**_own_streams(config, numbers[index]))
    has_states = any(isinstance(x, StatefulLayer) for x in theirs)
    if has_states and any(isinstance(x, KVCacheLayer) for x in layers):  # others are refused, unchanged
        watch_mixers(model)
    return [*layers, *theirs[len(layers) :]]
