"""Sizes of a model's cache by its configuration: heads, head dims, bytes, windows."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Final, cast

import torch
from transformers import DynamicCache

from kvloom.caches import CacheFormat
from kvloom.errors import UnsupportedError
from kvloom.integrations.transformers.models.cache_argument import argument_of
from kvloom.integrations.transformers.models.layer_specs import StatefulLayer
from kvloom.integrations.transformers.models.text_config import (
    has_latents,
    head_dim_of,
    layer_config,
    only_head_dims,
    text_config_of,
)


def heads_of(config: Any) -> int:
    """Number of key/value heads of a layer; 1 for latents."""
    if has_latents(config):
        return 1
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


def specs_of(config: Any, index: int, format: CacheFormat, dtype: torch.dtype) -> tuple[Any, Any]:
    """Specs of the keys and values of layer ``index``; ``format`` is that of all layers."""
    own, format = layer_config(config, index), format.of_layer(index)
    heads, (key_dim, value_dim) = heads_of(own), only_head_dims(own) or (head_dim_of(own),) * 2
    return format.spec(heads, key_dim, dtype), (format.values or format).spec(heads, value_dim, dtype)


def page_bytes(
    config: Any, format: CacheFormat, dtype: torch.dtype, layers_of_page: Iterable[int] | None = None
) -> int:
    """Bytes of a page in the given layers, or in all layers, scales included."""
    size = format.page_size
    numbers = windows_of(config) if layers_of_page is None else layers_of_page
    layers = [specs_of(config, i, format, dtype) for i in numbers]
    specs = [replace(spec, layout="B S H D") for sides in layers for spec in sides]
    return int(sum(spec.nbytes(size, size) for spec in specs))


_WINDOWS: Final = ("sliding_attention", "hybrid_sliding")
KINDS: Final = ("full_attention", "hybrid", *_WINDOWS)
"""Kinds of layers that keep keys and values."""
STATEFUL: Final = ("linear_attention", "conv", "hybrid", "hybrid_sliding")
"""Kinds of layers that keep recurrent states."""
EMPTY: Final = ("mlp", "moe")
"""Kinds of layers that keep nothing."""


def windows_of(config: Any) -> dict[int, int | None]:
    """The window of each layer that keeps keys and values of its own, by its number.

    Raises:
        UnsupportedError: a layer has a window without a size.
    """
    kinds = getattr(config, "layer_types", None) or [None] * config.num_hidden_layers
    windows, sources = dict[int, int | None](), sources_of(config)
    for i, kind in enumerate(kinds):
        window = getattr(layer_config(config, i), "sliding_window", None)
        if kind is None:
            kind = "full_attention" if window is None else "sliding_attention"
        if kind in _WINDOWS and not (isinstance(window, int) and window > 0):
            raise UnsupportedError(f"model must have a sliding_window above 0, got {window!r}")
        if kind in KINDS and i not in sources:
            windows[i] = window if kind in _WINDOWS else None
    return windows


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


def stateful_layers_of(model: Any) -> list[Any] | None:
    """Layers of an empty cache of transformers for a model; ``None`` if no layer has recurrent states.

    Raises:
        UnsupportedError: a layer has states, and the model does not take its cache as ``cache``.
    """
    layers: list[Any] = DynamicCache(config=text_config_of(model)).layers
    if not any(isinstance(x, cast(Any, StatefulLayer)) for x in layers):
        return None
    if (name := argument_of(model)) != "cache":
        raise UnsupportedError(
            "model must take its cache as `cache` where it has recurrent states, as those of transformers "
            f"5.24 do, got {type(model).__name__}, which takes `{name}`"
        )
    return layers
