"""Sizes of the pages of a session by the model's configuration."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from kvloom.caches import CacheFormat
from kvloom.errors import UnsupportedError
from kvloom.integrations.transformers.models.cache_argument import argument_of
from kvloom.integrations.transformers.models.layer_specs import heads_of, layers_of, windows_of


def specs_of(config: Any, index: int, format: CacheFormat, dtype: torch.dtype) -> tuple[Any, Any]:
    """Specs of the keys and values of layer ``index``; ``format`` is that of all layers."""
    format, (heads, key_dim, value_dim) = format.of_layer(index), heads_of(config, index)
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


def stateful_layers_of(model: Any) -> list[Any] | None:
    """Layers of an empty cache of transformers for a model; ``None`` if no layer has recurrent states.

    Raises:
        UnsupportedError: a layer has states, and the model does not take its cache as ``cache``.
    """
    layers = layers_of(model)
    if not any(x.states for x in layers):
        return None
    if (name := argument_of(model)) != "cache":
        raise UnsupportedError(
            "model must take its cache as `cache` where it has recurrent states, as those of transformers "
            f"5.24 do, got {type(model).__name__}, which takes `{name}`"
        )
    return [x.theirs for x in layers]
