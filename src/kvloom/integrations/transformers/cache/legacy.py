"""The legacy format: a tuple of keys and values for each layer, and of an encoder's, if there is one.

Shapes: B sequences, H key/value heads, N tokens, D head dim.
"""

from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any, Final

from torch import Tensor

from kvloom.caches import PagedLayer, Sequences
from kvloom.errors import ArgumentError, UnsupportedError
from kvloom.integrations.transformers.cache.formats import cache_format
from kvloom.integrations.transformers.cache.layers import KVCacheLayer

_OF_BOTH: Final = 4
"""Tensors of a layer of an encoder-decoder: key and value of its tokens, and those of the encoder."""


def expect_pairs(past_key_values: Iterable[Sequence[Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """Check keys and values in the legacy format, ``[B, H, N, D]`` of each layer.

    Raises:
        ArgumentError: a layer does not have two tensors, or has other numbers of rows or tokens than the
            rest.
    """
    pairs: list[tuple[Tensor, Tensor]] = []
    for layer_idx, entry in enumerate(past_key_values):
        if len(entry) != 2 or not all(isinstance(x, Tensor) and x.ndim == 4 for x in entry):
            raise ArgumentError(
                f"past_key_values[{layer_idx}] must be a key and a value [B, H, N, D], got "
                f"{[list(x.shape) if isinstance(x, Tensor) else type(x).__name__ for x in entry]}"
            )
        pairs.append((entry[0], entry[1]))
    sizes = {(x.shape[0], x.shape[2]) for pair in pairs for x in pair}
    if len(sizes) > 1:
        raise ArgumentError(
            f"past_key_values must have one number of rows and tokens in every layer, got {sorted(sizes)}: "
            "what a window has evicted is gone"
        )
    return pairs


def split_halves(
    past_key_values: Iterable[Sequence[Tensor]],
) -> tuple[list[tuple[Tensor, Tensor]], list[tuple[Tensor, Tensor]]]:
    """Keys and values of the tokens, and, if entries have four tensors, those of an encoder; both checked.

    Raises:
        ArgumentError: as ``expect_pairs``, or the halves have other numbers of layers or rows.
    """
    entries = [*past_key_values]
    of_encoder = [x[2:] for x in entries if len(x) == _OF_BOTH]
    if not of_encoder:
        return expect_pairs(entries), []
    if len(of_encoder) != len(entries):
        raise ArgumentError(
            f"past_key_values must have an encoder's key and value in every layer or in none, got "
            f"{len(of_encoder)} of {len(entries)}"
        )
    halves = expect_pairs([x[:2] for x in entries]), expect_pairs(of_encoder)
    rows = [half[0][0].shape[0] for half in halves]
    if rows[0] != rows[1]:
        raise ArgumentError(f"past_key_values must have one number of rows, got {rows}")
    return halves


def plain_layers(pairs: Sequence[tuple[Tensor, Tensor]], **options: Any) -> list[KVCacheLayer]:
    """Layers that keep all tokens, for pairs of an unknown model; options as of ``cache_format``."""
    # The attributes of a configuration that layers read. Head dims are checked at the update.
    config = SimpleNamespace(_attn_implementation="sdpa", kv_lora_rank=None)
    sequences = Sequences(cache_format(config, **options))
    residual = sequences.of_residual()
    layers = [PagedLayer(sequences.format, sequences, i, residual) for i in range(len(pairs))]
    return [KVCacheLayer(layer, config) for layer in layers]


def legacy_pairs(layers: Sequence[Any]) -> tuple[tuple[Tensor, Tensor], ...]:
    """Keys and values ``[B, H, N, D]`` of each layer, gathered; of a window only the last tokens.

    Raises:
        UnsupportedError: a layer has no keys and values of its own.
    """
    if not all(isinstance(layer, KVCacheLayer) for layer in layers):
        raise UnsupportedError("the legacy format has keys and values of every layer, this model has not")
    lengths = [int(layer.get_seq_length()) for layer in layers]
    pairs = [layer.gathered() for layer in layers]
    found = [(pair, n) for pair, n in zip(pairs, lengths, strict=True) if pair is not None]
    return tuple((key[:, :, :n], value[:, :, :n]) for (key, value), n in found)
