"""Layers of a session that keep keys and values, and sizes of their pages."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

import torch

from kvloom.caches import CacheFormat
from kvloom.core.entries import Entry
from kvloom.errors import UnsupportedError
from kvloom.integrations.transformers.fingerprint.per_state import once_per_state
from kvloom.integrations.transformers.models.cache_argument import argument_of
from kvloom.integrations.transformers.models.layer_specs import layers_of
from kvloom.integrations.transformers.models.seen import entries_seen


class TokenLayer(NamedTuple):
    """A layer of a session that keeps keys and values.

    Attributes:
        window: Tokens that a token sees, itself included; ``None`` for all before it.
        entry: Unquantized entry of a token.
    """

    window: int | None
    entry: Entry


TokenLayers: TypeAlias = Mapping[int, TokenLayer]


def token_layers_of(model: Any) -> TokenLayers:
    """Layers of a model that keep keys and values of their own, by their numbers."""
    entries = once_per_state(model, entries_seen)
    return {
        x.number: TokenLayer(x.window, entries[x.number]) for x in layers_of(model) if x.number in entries
    }


def specs_of(layers: TokenLayers, index: int, format: CacheFormat, dtype: torch.dtype) -> tuple[Any, Any]:
    """Specs of the keys and values of layer ``index``; ``format`` is that of all layers."""
    format, entry = format.of_layer(index), layers[index].entry
    value = entry.key if entry.value is None else entry.value
    return (
        format.spec(entry.heads, entry.key.head_dim, dtype),
        (format.values or format).spec(entry.heads, value.head_dim, dtype),
    )


def page_bytes(
    layers: TokenLayers, format: CacheFormat, dtype: torch.dtype, numbers: Iterable[int] | None = None
) -> int:
    """Bytes of a page in the layers of some numbers, or in all layers, scales included."""
    size = format.page_size
    sides = [specs_of(layers, i, format, dtype) for i in (layers if numbers is None else numbers)]
    specs = [replace(spec, layout="B S H D") for pair in sides for spec in pair]
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
