"""Layers of different lengths, for example after a press has evicted different numbers of tokens."""

from collections.abc import Iterable, Sequence
from typing import Any, Final

import torch
from transformers.cache_utils import Cache

from kvloom.caches import PagedLayer
from kvloom.errors import ArgumentError, StateError, UnsupportedError
from kvloom.integrations.transformers.attention.in_place import IMPLEMENTATION
from kvloom.integrations.transformers.cache.layers import KVCacheLayer

_OFFSET_IS_OF_A_LAYER: Final = hasattr(Cache, "get_query_offset")


def lengths_of(layers: Iterable[KVCacheLayer]) -> set[int]:
    """Numbers of tokens seen by layers that the model uses; waits for an accelerator if they are tensors."""
    found, lengths = set[int](), []
    for layer in layers:
        if layer.is_used:
            for stream in layer.streams:
                if isinstance(stream, PagedLayer):
                    found.add(stream.num_tokens + stream.num_removed)
                else:
                    lengths.append(stream.length)
    return found | set(torch.stack(lengths).tolist()) if lengths else found


def expect_one_length(lengths: set[int], layers: Sequence[Any]) -> None:
    """Raise StateError unless the ``lengths`` of the ``layers`` of a cache are all the same."""
    if len(lengths) > 1:
        unused = [i for i, x in enumerate(layers) if not getattr(x, "is_initialized", True)]
        why = f", or the model has no layers {unused}, which the cache has" if unused else ""
        raise StateError(
            f"layers must have one length, got {sorted(lengths)}: an earlier forward broke off (crop or "
            f"reset the cache){why}"
        )


def counts_of_rows(tokens_to_remove: Any, num_rows: int, removed: Iterable[int]) -> list[int]:
    """Numbers of tokens to remove of each row, at least 0, from the argument of ``KVCache.crop``.

    Args:
        tokens_to_remove: A number of at most 0 for each row.
        num_rows: Number of rows.
        removed: Numbers of tokens that the layers have lost so far.

    Raises:
        ArgumentError: there is not one int for each row, or one is positive.
        UnsupportedError: layers have lost different numbers of tokens, and rows are to lose different ones.
    """
    counts = tokens_to_remove.tolist() if hasattr(tokens_to_remove, "tolist") else tokens_to_remove
    if (
        not isinstance(counts, Sequence)
        or len(counts) != num_rows
        or any(isinstance(n, bool) or not isinstance(n, int) or n > 0 for n in counts)
    ):
        raise ArgumentError(
            f"tokens_to_remove must be one number of at most 0 for each of {num_rows} rows, got {counts!r}"
        )
    if len(set(counts)) > 1 and len(set(removed)) > 1:
        raise UnsupportedError(
            f"tokens_to_remove must be one number for all rows where layers have different lengths, got "
            f"{counts}"
        )
    return [-n for n in counts]


def expect_maskable(cache: Any, num_columns: int, layer_idx: int) -> None:
    """Check that the mask of one layer is right for every layer without a window.

    A model makes one mask, from the length of the first layer. Attention in place accepts a mask that hides
    no token from those after it for any number of columns. sdpa and flash attention get no mask for a single
    token without padding; any other mask is a tensor with the columns of one layer.

    Args:
        cache: A ``KVCache``.
        num_columns: Number of columns of the mask, new tokens included.
        layer_idx: Number of the layer whose sizes the mask has.

    Raises:
        UnsupportedError: the mask is not right for all; nothing was changed.
    """
    asked = cache.layers[layer_idx]
    if not isinstance(asked, KVCacheLayer) or asked.is_in_place or asked.is_sliding or not asked.is_used:
        return
    layers = [x for x in cache.layers if isinstance(x, KVCacheLayer) and x.is_used and not x.is_sliding]
    length = int(asked.get_seq_length())
    lengths = {int(x.get_seq_length()) for x in layers}
    offset = length if _OFFSET_IS_OF_A_LAYER else int(cache.get_seq_length())
    name, num_new = asked.attn_implementation, num_columns - length
    is_without_mask = num_new == 1 and (name == "sdpa" or name.startswith("flash_attention"))
    if len(lengths | {offset}) > 1 and not is_without_mask:
        raise UnsupportedError(
            f"attn_implementation must be {IMPLEMENTATION!r}, or with 'sdpa' input_ids one token at a time, "
            f"for layers of different lengths {sorted(lengths)}, got {name!r} with {num_new} tokens: the "
            "mask of one layer fits no other"
        )
