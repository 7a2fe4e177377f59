"""Cache formats and cache layers for a model's configuration."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NoReturn

import transformers
from transformers import DynamicCache, cache_utils
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from kvloom.caches import CacheFormat, FixedLayer, PagedLayer, Pages, Sequences
from kvloom.caches.format import kept_as
from kvloom.core.entries import LEAST_GROUP
from kvloom.core.specs import QuantSpec
from kvloom.core.spelling import is_plan, parse_kind, recent_of
from kvloom.errors import ArgumentError, ConfigError, UnsupportedError
from kvloom.integrations.transformers.bit_plan import BitPlan, config_digest
from kvloom.integrations.transformers.cache_argument import takes_cache
from kvloom.integrations.transformers.indexed_layers import IndexedKVCacheLayer, StaticIndexedKVCacheLayer
from kvloom.integrations.transformers.latents import answer_latents
from kvloom.integrations.transformers.layers import (
    THEIR_HYBRID_LAYERS,
    CrossLayer,
    HybridKVCacheLayer,
    KVCacheLayer,
    StaticKVCacheLayer,
)
from kvloom.integrations.transformers.mixers import watch_mixers
from kvloom.integrations.transformers.text_config import (
    has_latents,
    has_windows_of_keeping,
    head_dims_of,
    layers_of_later_passes,
    names_all_passes,
    text_config_of,
)

if TYPE_CHECKING:
    from kvloom.integrations.transformers.smoothing import LayerSmoothing

# Supported kinds of layers, as configurations name them.
_KINDS: Final = (
    None,
    "full_attention",
    "sliding_attention",
    "chunked_attention",
    "indexed_attention",
    "hybrid",
    "hybrid_sliding",
)

_BITS_OF_ROPE_KEYS: Final = 8

# Classes of transformers for layers with index keys, without keys of their own, with recurrent states alone,
# and with any recurrent states; ``NoneType`` where the installed version has no such class.
TheirIndexedLayer: Final = getattr(cache_utils, "DynamicIndexedLayer", type(None))
DummyLayer: Final = getattr(cache_utils, "DummyLayer", type(None))
TheirStatefulLayer: Final = getattr(cache_utils, "LinearAttentionLayer", type(None))
StatefulLayer: Final = getattr(cache_utils, "LinearAttentionCacheLayerMixin", type(None))


def cache_layers_of(model: Any) -> tuple[list[Any], list[int], set[int] | None]:
    """The layers of transformers' own cache for a model.

    Returns:
        Empty layers; for each the number of its layer in the configuration, which is its own except for later
        passes over a layer; and the numbers of those that the model updates, ``None`` for all.
    """
    config, used = text_config_of(model), layers_used(model)
    theirs = DynamicCache(config=config).layers
    theirs = theirs if used is None else theirs[: max(used) + 1]
    later = layers_of_later_passes(config)
    numbers = [*range(len(theirs)), *later]
    if used is not None:
        used |= {*range(len(theirs), len(numbers))}
    return [*theirs, *(copy.deepcopy(theirs[i]) for i in later)], numbers, used


def layers_used(model: Any) -> set[int] | None:
    """Numbers of the cache layers that the model updates; ``None`` for all that its configuration names."""
    if names_all_passes(text_config_of(model)):
        return None
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    modules = (model if decoder is None else decoder).modules()
    numbers = {getattr(module, "layer_idx", None) for module in modules}
    return {number for number in numbers if isinstance(number, int)} or None


def cache_format(
    config: Any,
    kv: str | Path = "auto",
    page_size: int = 16,
    max_tokens: int | None = None,
    values: str | None = None,
    layout: str = "auto",
    smoothing: "Sequence[LayerSmoothing]" = (),
) -> CacheFormat:
    """The format for arguments of ``KVCache.for_model``; raises the same errors.

    ``smoothing`` has one item per layer, as ``smoothing_for`` returns it.
    """
    if layout == "auto" and has_latents(config):
        layout = "HND"  # the layout of values, since latents are also values
    if is_plan(kv):
        if values is not None:
            raise ArgumentError(f"values must be None beside a plan, got {values!r}")
        plan = BitPlan.load(kv, "kv")
        if plan.config != config_digest(config):
            raise ArgumentError(f"kv must be a plan that was made for this model, got {str(kv)!r} of another")
        base = CacheFormat(None, None, page_size, max_tokens, layout=layout)
        format = plan.format("kv", base)
        return _smoothed(format, smoothing, [parse_kind("kv", keys).smooth for keys, _ in plan.layers])
    formats, kinds = [], []
    sides: tuple[tuple[str, Any, Literal["keys", "values"]], ...] = (
        ("kv", kv, "keys"),
        ("kv", kv, "values") if values is None else ("values", values, "values"),
    )
    dims = head_dims_of(config)
    for number, (name, text, side) in enumerate(sides):
        dtype, quant = kept_as(name, text, side)
        if side == "values" and values is None and has_latents(config):
            quant = _of_rope_keys(quant)
        if quant is not None:
            for head_dim in sorted({own[number] for own in dims}):
                _expect_divides(name, text, quant, head_dim)
        formats.append(CacheFormat(dtype, quant, page_size, max_tokens, layout=layout))
        kinds.append(parse_kind(name, text))
    said = [kind.recent for kind in kinds]
    if None not in said and said[0] != said[1]:
        raise ArgumentError(f"values must have the residual window of kv, recent={said[0]}, got {values!r}")
    recent = recent_of(*kinds)
    return _smoothed(replace(formats[0], values=formats[1], recent=recent), smoothing, [kinds[0].smooth])


def _of_rope_keys(quant: QuantSpec | None) -> QuantSpec | None:
    """Format of rope keys beside latents: at least 8 bits, since these few channels hold all positions."""
    if quant is None or quant.bits >= _BITS_OF_ROPE_KEYS:
        return quant
    return QuantSpec(_BITS_OF_ROPE_KEYS)


def _smoothed(
    format: CacheFormat, smoothing: "Sequence[LayerSmoothing]", smooth: Sequence[str]
) -> CacheFormat:
    """``format`` with smoothing of the layers for which ``smooth`` is not ``"none"``.

    ``smooth`` has one item per layer if ``format`` has layers, else one for all.
    """
    if not smoothing:
        return format
    own = format.layers or (format,) * len(smoothing)
    smooth = smooth if format.layers else [*smooth] * len(smoothing)
    layers = (
        replace(x, smoothing=layer.smoothing if y != "none" and x.quant is not None else None, layers=None)
        for x, y, layer in zip(own, smooth, smoothing, strict=True)
    )
    return replace(format, layers=tuple(layers))


def _expect_divides(name: str, text: Any, quant: QuantSpec, head_dim: int) -> None:
    """Raise ArgumentError unless the group divides the head dim."""
    try:
        quant.for_head_dim(head_dim)
    except ConfigError:
        why = "" if quant.group else f", which is no multiple of {LEAST_GROUP}"
        raise ArgumentError(
            f"{name} must have a group that divides the head dim {head_dim}{why}, got {text!r}"
        ) from None


def has_index(config: Any) -> bool:
    """Whether layers also keep index keys."""
    return "indexed_attention" in (getattr(config, "layer_types", None) or ())


def _own_streams(config: Any, index: int) -> dict[str, bool]:
    """Arguments of ``IndexedKVCacheLayer.keep``: whether a layer has keys and an index of its own."""
    sharing, indexers = getattr(config, "kv_sharing_modes", None), getattr(config, "indexer_types", None)
    return {
        "has_keys": sharing is None or sharing[index] != "reuse_but_indexer",
        "has_index": indexers is None or indexers[index] != "shared",
    }


def keeps_states_elsewhere(model: Any, layers: Sequence[Any]) -> bool:
    """Whether a model has recurrent states that no layer of its cache keeps.

    A class of hybrid models may have a configuration that names layers of attention alone, as Granite 4.0's
    dense models do.
    """
    if not getattr(model, "_is_stateful", False) or any(isinstance(x, StatefulLayer) for x in layers):
        return False
    kinds = getattr(text_config_of(model), "layer_types", None) or ["unknown"]
    return not all(kind in _KINDS for kind in kinds)


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
    by_window: dict[int | None, tuple[Sequences, Sequences | None]] = {}
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
        if kind not in _KINDS:
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
                sequences = Sequences(pages, window)
                by_window[window] = sequences, sequences.of_residual()
            paged = PagedLayer(format, by_window[window][0], index, by_window[window][1])
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
