"""``layers_of``: what each layer of a model's cache keeps, and which uses it allows.

This is read from the configuration and from the empty layers that transformers would make for it, so that one
place knows the kinds of layers of all families and versions.
"""

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, TypeAlias

import transformers
from transformers import DynamicCache, cache_utils
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from kvloom.core.entries import Entry
from kvloom.errors import UnsupportedError
from kvloom.integrations.transformers.models.cache_argument import takes_cache
from kvloom.integrations.transformers.models.text_config import (
    has_windows_of_keeping,
    layers_of_later_passes,
    names_all_passes,
    text_config_of,
    why_cuts_matter,
)

Use: TypeAlias = Literal["cache", "static", "pool", "session"]
"""A ``KVCache``, one in fixed storage, a ``KVPool``, and a session of continuous batching."""

# Classes of transformers for layers with index keys, without keys of their own, with recurrent states, and
# with these alone; ``NoneType`` where the installed version has no such class.
_Indexed: Final = getattr(cache_utils, "DynamicIndexedLayer", type(None))
DummyLayer: Final = getattr(cache_utils, "DummyLayer", type(None))
StatefulLayer: Final = getattr(cache_utils, "LinearAttentionCacheLayerMixin", type(None))
TheirStatefulLayer: Final = getattr(cache_utils, "LinearAttentionLayer", type(None))
_HYBRIDS: Final = tuple(
    getattr(cache_utils, name)
    for name in (
        "LinearAttentionAndFullAttentionLayer",
        "LinearAttentionAndSlidingWindowAttentionLayer",
    )
    if hasattr(cache_utils, name)
)

_OF_TOKENS: Final = (
    "full_attention",
    "sliding_attention",
    "chunked_attention",
    "indexed_attention",
    "hybrid",
    "hybrid_sliding",
)
"""Names that configurations have for layers of which transformers' classes keep all that they need."""

OF_PICTURES: Final = "keys and values of pictures"
"""What a layer keeps that attends to pictures, without tokens of the text."""
BESIDE_STATES: Final = "keys and values beside a recurrent state"
"""What a layer keeps that also has recurrent states."""
EARLIER_ALONE: Final = "model must attend to earlier tokens alone, or a prefix depends on what follows it"
"""Requirement of a model whose prefixes are kept."""


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What one layer of a model's cache keeps.

    Attributes:
        number: Number of the layer in the configuration. Later passes over it have layers of their own.
        kind: Its name in the configuration, ``"full_attention"`` if it has none.
        theirs: The empty layer that transformers would make.
        tokens: Whether it keeps keys and values of tokens.
        window: Tokens that a token sees, itself included; ``None`` for all before it.
        index: Whether it may have index keys, by which models choose the tokens they attend to.
        has_index: Whether it has an index of its own, and does not use another layer's choice.
        states: Whether it keeps a recurrent state.
        is_used: Whether the model updates it.
        keeps: What it keeps, in words.
        why_not: For each use that it does not allow, why, as a sentence.
        entry: Unquantized entry of a token; ``None`` if no forward was seen.
    """

    number: int
    kind: str
    theirs: Any
    tokens: bool = False
    window: int | None = None
    index: bool = False
    has_index: bool = False
    states: bool = False
    is_used: bool = True
    keeps: str = "nothing"
    why_not: Mapping[Use, str] = field(default_factory=dict)
    entry: Entry | None = None

    @property
    def is_foreign(self) -> bool:
        """Whether it keeps something else, in a layer of transformers' own."""
        return not (self.tokens or self.index or self.states or self.crosses or self.keeps == "nothing")

    @property
    def crosses(self) -> bool:
        """Whether it keeps keys and values of pictures, to which it attends instead of tokens."""
        return self.keeps == OF_PICTURES


def layers_of(model: Any) -> tuple[LayerSpec, ...]:
    """What each layer of a model's cache keeps, in the order of the cache.

    Layers that attend to the keys of another layer are in ``sources_of``; a cache has none for the last ones.

    Raises:
        UnsupportedError: transformers makes no cache of the configuration.
    """
    config, name, used = text_config_of(model), type(model).__name__, _layers_used(model)
    theirs = _their_layers(config, name)
    theirs = theirs if used is None else theirs[: max(used) + 1]
    later = layers_of_later_passes(config)
    numbers = [*range(len(theirs)), *later]
    kinds = [*(getattr(config, "layer_types", None) or ["full_attention"] * len(theirs))]
    if keeps_states_elsewhere(model):  # nobody knows what its layers need
        kinds = ["recurrent"] * len(kinds)
    across = getattr(config, "cross_attention_layers", None) or ()
    specs = []
    for i, layer in enumerate([*theirs, *(copy.deepcopy(theirs[i]) for i in later)]):
        number = numbers[i]
        kind = kinds[number] if number < len(kinds) else "unknown"
        spec = LayerSpec(number, kind, layer, is_used=used is None or number in used or i >= len(theirs))
        specs.append(_of_pictures(spec, name) if number in across else _of_their_class(config, spec, name))
    return tuple(specs)


def sources_of(config: Any) -> dict[int, int]:
    """For each layer that attends to keys and values of an earlier layer, the number of that layer.

    The earlier layer is the last one of the same kind that keeps its own, as in Gemma 3n and 4.
    ``kv_sharing_modes`` of a configuration names the layers that share; else they are the last
    ``num_kv_shared_layers``.

    Raises:
        UnsupportedError: there is no earlier layer, as in models that read the keys of another model.
    """
    modes = getattr(config, "kv_sharing_modes", None)
    if modes is None:
        num_shared = getattr(config, "num_kv_shared_layers", None) or 0
        modes = [None] * (config.num_hidden_layers - num_shared) + ["reuse"] * num_shared
    sources, last = dict[int, int](), dict[str, int]()
    if "reuse" in modes:
        for i, (kind, mode) in enumerate(zip(config.layer_types, modes, strict=True)):
            if mode != "reuse":
                last[kind] = i
            elif kind not in last:
                raise UnsupportedError(
                    f"model must have the keys that its layers read, got layer {i}, which has none before it"
                )
            else:
                sources[i] = last[kind]
    return sources


def keeps_states_elsewhere(model: Any) -> bool:
    """Whether a model has recurrent states that no layer of its cache keeps.

    A class of hybrid models may have a configuration that names layers of attention alone, as Granite 4.0's
    dense models do.
    """
    config = text_config_of(model)
    if not getattr(model, "_is_stateful", False):
        return False
    if any(isinstance(x, StatefulLayer) for x in _their_layers(config, type(model).__name__)):
        return False
    return not all(kind in _OF_TOKENS for kind in getattr(config, "layer_types", None) or ["unknown"])


def why_not(model: Any, use: Use, layers: Sequence[LayerSpec] | None = None) -> str:
    """Why a model does not allow a use, as a sentence; empty if its configuration and layers allow it.

    Whether it computes correctly from what a cache gives it is tried by those that use it.

    Args:
        model: A ``PreTrainedModel``.
        use: The use.
        layers: Its ``layers_of``, if they were made.
    """
    name, config = type(model).__name__, text_config_of(model)
    if not getattr(type(model), "_supports_default_dynamic_cache", lambda: True)():
        return f"model must work with a DynamicCache, got {name}, which has a cache of its own"
    if not takes_cache(model):
        return f"model must take a cache, which {name} does not"
    if use == "static" and has_windows_of_keeping(config):
        return f"static must be False for {name}, whose tokens see all of their own forward"
    if use in ("pool", "session"):
        why = _why_no_prefixes(model, config, use)
        if why:
            return why
    layers = layers_of(model) if layers is None else layers
    found = next((x.why_not[use] for x in layers if use in x.why_not), "")
    if found:
        return found
    if not any(x.tokens for x in layers):
        if use == "session":
            return f"model must keep keys and values in a layer, which {name} does in none"
        if use == "pool":
            return f"model must attend to keys and values in a layer, got {name} without any"
        kept = f"{name} with {dict(Counter(x.keeps for x in layers))}"
        return f"model must have layers that attend to keys and values, got {kept}"
    return ""


def expect_use(model: Any, use: Use, layers: Sequence[LayerSpec] | None = None) -> None:
    """Raise UnsupportedError if ``why_not`` says why."""
    if why := why_not(model, use, layers):
        raise UnsupportedError(why)


def _why_no_prefixes(model: Any, config: Any, use: Use) -> str:
    """Why keys and values of a prefix depend on more than the prefix, or on weights that nobody can watch."""
    name = type(model).__name__
    if any(map(_is_offloaded, model.modules())):
        return (
            f"model must keep its weights between forwards, or nobody knows whether they are the same, got "
            f"{name}, whose weights accelerate loads for each (cpu_offload, or a device_map with parts on "
            f"cpu or disk): use a KVCache"
        )
    if model.config.is_encoder_decoder and use == "session":
        return (
            f"model must be a decoder alone, as what a decoder keeps depends on what the encoder read, got "
            f"{name}"
        )
    if why := why_cuts_matter(config):
        return f"model must have the same keys and values however a text is cut, got {name}, in which {why}"
    sees_all = getattr(config, "use_bidirectional_attention", None) in (True, "all")
    sees_all |= getattr(config, "is_causal", None) is False
    # transformers before 5 does not say so in the configuration of paligemma.
    if sees_all or model.config.model_type == "paligemma":
        return f"{EARLIER_ALONE}, got {name}"
    return ""


def _is_offloaded(module: Any) -> bool:
    """Whether accelerate loads the weights of a module for each of its forwards."""
    hook = vars(module).get("_hf_hook")
    return any(getattr(x, "offload", False) for x in getattr(hook, "hooks", (hook,)))


def _layers_used(model: Any) -> set[int] | None:
    """Numbers of the cache layers that the model updates; ``None`` for all that its configuration names."""
    if names_all_passes(text_config_of(model)):
        return None
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    modules = (model if decoder is None else decoder).modules()
    numbers = {getattr(module, "layer_idx", None) for module in modules}
    return {number for number in numbers if isinstance(number, int)} or None


def _their_layers(config: Any, name: str) -> list[Any]:
    """Empty layers of transformers' own cache."""
    try:
        layers: list[Any] = DynamicCache(config=config).layers
    except (AttributeError, KeyError) as error:
        raise UnsupportedError(
            f"model must have a configuration from which transformers makes a DynamicCache, got that of "
            f"{name}: {error}"
        ) from error
    return layers


def _of_pictures(spec: LayerSpec, name: str) -> LayerSpec:
    """A layer that attends to pictures, without tokens of the text, as in Mllama."""
    return _refused(replace(spec, keeps=OF_PICTURES), name)


def _of_their_class(config: Any, spec: LayerSpec, name: str) -> LayerSpec:
    """A layer by the class that transformers has for it."""
    layer, kind = spec.theirs, spec.kind
    form, states = type(layer), isinstance(layer, StatefulLayer)
    if form not in (DynamicLayer, DynamicSlidingWindowLayer, _Indexed, *_HYBRIDS):
        spec = replace(spec, keeps="nothing" if form is DummyLayer else form.__name__, states=states)
        if form not in (DummyLayer, TheirStatefulLayer):
            spec = _refused(spec, name)
        if not layer.is_compileable:
            spec = _without(spec, _not_static(name, f"layers ({form.__name__}) grow with the text"), "static")
        return _with_known_states(spec)
    keeps = BESIDE_STATES if states else "keys and values"
    window = getattr(layer, "sliding_window", None)
    spec = replace(spec, tokens=True, states=states, window=window, keeps=keeps)
    if kind not in _OF_TOKENS:
        why = (
            f"model must have layers that this version's DynamicCache supports, got {kind!r} in {name} with "
            f"transformers {transformers.__version__}"
        )
        return _without(spec, why, "cache", "static", "pool", "session")
    if form is _Indexed:
        sharing, indexers = getattr(config, "kv_sharing_modes", None), getattr(config, "indexer_types", None)
        spec = replace(
            spec,
            index=True,
            tokens=sharing is None or sharing[spec.number] != "reuse_but_indexer",
            has_index=indexers is None or indexers[spec.number] != "shared",
            keeps="keys and values with index keys",
        )
    if states:
        why = _not_static(name, "layers keep recurrent states beside keys and values")
        spec = _without(spec, why, "static")
    if spec.index or kind == "chunked_attention":
        spec = _without(spec, _only(kind, name), "session")
    elif "sliding" in kind and not spec.window:
        spec = _without(spec, f"model must have a sliding_window above 0, got {spec.window!r}", "session")
    return _with_known_states(spec)


def _refused(spec: LayerSpec, name: str) -> LayerSpec:
    """A layer that keeps what neither pages of tokens nor copies of states can keep."""
    why = f"model must keep tokens or recurrent states in every layer, got {spec.keeps} in {name}"
    return _without(_without(spec, why, "pool"), _only(spec.keeps, name), "session")


def _with_known_states(spec: LayerSpec) -> LayerSpec:
    """A layer whose states, if it has any, can be copied as this library does it."""
    if not spec.states or isinstance(getattr(spec.theirs, "conv_states", None), dict):
        return spec
    why = f"transformers must keep recurrent states as 5.24 does, got {transformers.__version__}"
    return _without(spec, why, "pool", "session")


def _without(spec: LayerSpec, why: str, *uses: Use) -> LayerSpec:
    """A layer that does not allow some uses; earlier reasons stay."""
    return replace(spec, why_not={**dict.fromkeys(uses, why), **spec.why_not})


def _only(what: str, name: str) -> str:
    return f"model must have layers of attention or recurrent states only, got {what} in {name}"


def _not_static(name: str, why: str) -> str:
    return f"static must be False for {name}, whose {why}"
