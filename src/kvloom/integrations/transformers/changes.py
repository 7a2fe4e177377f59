"""Changes of rows and lengths in layers that are not in pages, one after the other.

A change is planned for all layers before the first one is made. Ours change as a whole or not at all. A layer
of transformers, or a recurrent state, may be left half changed when it raises.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch

from kvloom.caches import FixedLayer, PagedLayer, Sequences
from kvloom.errors import UnsupportedError
from kvloom.integrations.transformers.build import DummyLayer, StatefulLayer
from kvloom.integrations.transformers.indexed_layers import IndexedKVCacheLayer
from kvloom.integrations.transformers.layers import HybridKVCacheLayer, KVCacheLayer, num_kept

Changes: TypeAlias = list[Callable[[], Any]]


def changes_of_rows(layers: Iterable[Any], rows: Sequence[int]) -> tuple[Changes, Changes]:
    """What makes row i what row ``rows[i]`` was: in our layers, and in others.

    Raises:
        StateError: a layer cannot be changed now.
    """
    own: Changes = []
    others: Changes = []
    for layer in layers:
        if isinstance(layer, KVCacheLayer):
            layer.expect_changeable()
            fixed = [x for x in layer.streams if isinstance(x, FixedLayer)]
            own += [partial(x.select, torch.tensor(rows)) for x in fixed]
        if isinstance(layer, IndexedKVCacheLayer):
            own.append(partial(layer.select_positions, torch.tensor(rows)))
        if isinstance(layer, HybridKVCacheLayer):
            others.append(partial(layer.select_states, torch.tensor(rows)))
        elif not isinstance(layer, KVCacheLayer | DummyLayer):
            others.append(partial(layer.reorder_cache, torch.tensor(rows)))
    return own, others


def changes_of_length(layers: Sequence[Any], tokens_to_remove: Any, longest: int) -> tuple[Changes, Changes]:
    """What removes the last tokens: in our layers, and in others; not in recurrent states.

    Args:
        layers: All layers.
        tokens_to_remove: As ``KVCache.crop``.
        longest: Tokens of the longest layer; one that has fewer loses fewer.

    Raises:
        StateError: a layer cannot be changed now, or the next token would see what a window has evicted.
    """
    own: Changes = []
    others: Changes = []
    for layer in layers:
        if isinstance(layer, KVCacheLayer):
            layer.expect_changeable()
            for stream in layer.streams:
                if isinstance(stream, FixedLayer):
                    length = stream.num_tokens
                    kept = min(num_kept(tokens_to_remove, longest), length)
                    stream.expect_truncatable(kept)
                    own.append(partial(stream.truncate, kept))
            if isinstance(layer, IndexedKVCacheLayer) and isinstance(tokens_to_remove, int):
                own.append(partial(layer.crop_positions, num_kept(tokens_to_remove, longest)))
            elif isinstance(layer, IndexedKVCacheLayer):
                layer.expect_croppable_by_row()
        elif not isinstance(layer, DummyLayer | StatefulLayer):
            others.append(partial(layer.crop, tokens_to_remove))
    return own, others


def plan_of_crop(
    groups: Sequence[Sequences],
    removed: Mapping[Sequences, int],
    tokens_to_remove: int | Sequence[int],
    longest: int,
) -> dict[Sequences, tuple[list[int], int]]:
    """What a crop removes from the pages of each group of layers.

    Args:
        groups: Their sequences.
        removed: Of each, tokens that its layers have seen and no longer hold.
        tokens_to_remove: As ``KVCache.crop``, or for each row the number of tokens, positive.
        longest: Tokens of the longest layer, those included that a forward had begun when it broke off.

    Returns:
        Of each group, tokens to remove from each row, and what ``removed`` is afterwards.

    Raises:
        StateError: tokens that follow would see some that a window has evicted.
    """
    kept, counts = {}, {}
    for x in groups:
        # Tokens that it would have, were there no forward that broke off before its layers.
        whole = longest - removed[x]
        if isinstance(tokens_to_remove, int):
            kept[x] = num_kept(tokens_to_remove, whole)
            counts[x] = [max(x.num_positions - kept[x], 0)] * x.size
        else:
            kept[x] = max(whole - min(tokens_to_remove, default=0), 0)
            counts[x] = list(tokens_to_remove)
    for x, num_removed in counts.items():
        x.expect_removable(num_removed)
    most = max(kept.values(), default=0)
    return {x: (counts[x], most - kept[x]) for x in groups}


def expect_pages(layers: Iterable[Any]) -> None:
    """Raise UnsupportedError if a layer has tokens elsewhere than in pages."""
    for layer in layers:
        is_paged = isinstance(layer, KVCacheLayer) and isinstance(layer.pages, PagedLayer)
        if not (is_paged or isinstance(layer, DummyLayer | StatefulLayer)):
            raise UnsupportedError(f"{type(layer).__name__} cannot be cropped row by row")
