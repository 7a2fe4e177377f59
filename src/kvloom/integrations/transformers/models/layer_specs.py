"""What the layers of a model's cache keep, as transformers and the configuration say it."""

import copy
from collections.abc import Sequence
from typing import Any, Final

from transformers import DynamicCache, cache_utils

from kvloom.integrations.transformers.models.text_config import (
    layers_of_later_passes,
    names_all_passes,
    text_config_of,
)

# Supported kinds of layers, as configurations name them.
KINDS: Final = (
    None,
    "full_attention",
    "sliding_attention",
    "chunked_attention",
    "indexed_attention",
    "hybrid",
    "hybrid_sliding",
)

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


def has_index(config: Any) -> bool:
    """Whether layers also keep index keys."""
    return "indexed_attention" in (getattr(config, "layer_types", None) or ())


def keeps_states_elsewhere(model: Any, layers: Sequence[Any]) -> bool:
    """Whether a model has recurrent states that no layer of its cache keeps.

    A class of hybrid models may have a configuration that names layers of attention alone, as Granite 4.0's
    dense models do.
    """
    if not getattr(model, "_is_stateful", False) or any(isinstance(x, StatefulLayer) for x in layers):
        return False
    kinds = getattr(text_config_of(model), "layer_types", None) or ["unknown"]
    return not all(kind in KINDS for kind in kinds)
