"""What a model's configuration says of what its layers keep: heads, head dims, bytes, windows."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from kvloom.caches import CacheFormat
from kvloom.errors import UnsupportedError
from kvloom.integrations.transformers.text_config import has_latents, head_dim_of, head_dims_of


def heads_of(config: Any) -> int:
    """Heads that are kept, which not every configuration states; latents are one."""
    if has_latents(config):
        return 1
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


def specs_of(config: Any, format: CacheFormat, dtype: torch.dtype) -> tuple[Any, Any]:
    """Keys and values of one layer."""
    heads, (key_dim, value_dim) = heads_of(config), head_dims_of(config) or (head_dim_of(config),) * 2
    return format.spec(heads, key_dim, dtype), (format.values or format).spec(heads, value_dim, dtype)


def page_bytes(
    config: Any, format: CacheFormat, dtype: torch.dtype, layers_of_page: Iterable[int] | None = None
) -> int:
    """Bytes of a page in some layers, or in all, scales included."""
    size = format.page_size
    numbers = range(config.num_hidden_layers) if layers_of_page is None else layers_of_page
    layers = [specs_of(config, format.of_layer(i), dtype) for i in numbers]
    specs = [replace(spec, layout="B S H D") for sides in layers for spec in sides]
    return int(sum(spec.nbytes(size, size) for spec in specs))


def windows_of(config: Any) -> list[int | None]:
    """The window of each layer.

    Raises:
        UnsupportedError: a layer has a window of no size.
    """
    window = getattr(config, "sliding_window", None)
    kind = "full_attention" if window is None else "sliding_attention"
    kinds = getattr(config, "layer_types", None) or [kind] * config.num_hidden_layers
    if "sliding_attention" in kinds and not (isinstance(window, int) and window > 0):
        raise UnsupportedError(f"model must have a sliding_window above 0, got {window!r}")
    return [window if kind == "sliding_attention" else None for kind in kinds]
