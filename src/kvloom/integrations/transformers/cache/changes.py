"""Changes of rows and lengths of states other than tokens: positions of index keys, and other layers.

They are planned for all layers before the first is made. If a layer of transformers or a recurrent state
raises, it may be half changed.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch

from kvloom.caches import PagedLayer
from kvloom.errors import UnsupportedError
from kvloom.integrations.transformers.cache.indexed_layers import IndexedKVCacheLayer
from kvloom.integrations.transformers.cache.layers import HybridKVCacheLayer, KVCacheLayer, kept_by, num_kept
from kvloom.integrations.transformers.models.layer_specs import OF_PICTURES, DummyLayer, StatefulLayer

Changes: TypeAlias = list[Callable[[], Any]]


def changes_of_rows(layers: Iterable[Any], rows: Sequence[int]) -> tuple[Changes, Changes]:
    """Changes that replace row i by row ``rows[i]``: of positions, and of other layers and states."""
    positions: Changes = []
    others: Changes = []
    for layer in layers:
        if isinstance(layer, IndexedKVCacheLayer):
            positions.append(partial(layer.select_positions, torch.tensor(rows)))
        elif isinstance(layer, HybridKVCacheLayer):
            others.append(partial(layer.select_states, torch.tensor(rows)))
        elif not isinstance(layer, KVCacheLayer | DummyLayer):
            others.append(partial(layer.reorder_cache, torch.tensor(rows)))
    return positions, others


def changes_of_length(layers: Sequence[Any], tokens_to_remove: Any, longest: int) -> tuple[Changes, Changes]:
    """Changes that remove the last tokens: of positions, and of other layers, but not of recurrent states.

    Args:
        layers: All layers.
        tokens_to_remove: As ``KVCache.crop``.
        longest: Number of tokens of the longest layer; a shorter one loses fewer.

    Raises:
        UnsupportedError: positions cannot be cropped row by row.
    """
    positions: Changes = []
    others: Changes = []
    for layer in layers:
        if isinstance(layer, IndexedKVCacheLayer):
            if isinstance(tokens_to_remove, int):
                positions.append(partial(layer.crop_positions, num_kept(tokens_to_remove, longest)))
            else:
                layer.expect_croppable_by_row()
        elif not isinstance(layer, KVCacheLayer | DummyLayer | StatefulLayer):
            others.append(partial(layer.crop, tokens_to_remove))
    return positions, others


def expect_pages(layers: Iterable[Any]) -> None:
    """Raise UnsupportedError if a layer stores tokens outside of pages."""
    for layer in layers:
        is_paged = isinstance(layer, KVCacheLayer) and isinstance(layer.pages, PagedLayer)
        is_of_tokens = not isinstance(layer, DummyLayer | StatefulLayer) and kept_by(layer) != OF_PICTURES
        if is_of_tokens and not is_paged:
            raise UnsupportedError(f"{kept_by(layer)} cannot be cropped row by row")
