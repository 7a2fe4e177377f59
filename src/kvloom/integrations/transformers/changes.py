"""Changes of rows and lengths beside those of the tokens: of positions of index keys, and of other layers.

They are planned for all layers before the first is made. A layer of transformers, or a recurrent state, that
raises may be left half changed.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch

from kvloom.caches import PagedLayer
from kvloom.errors import UnsupportedError
from kvloom.integrations.transformers.build import DummyLayer, StatefulLayer
from kvloom.integrations.transformers.indexed_layers import IndexedKVCacheLayer
from kvloom.integrations.transformers.layers import HybridKVCacheLayer, KVCacheLayer, num_kept

Changes: TypeAlias = list[Callable[[], Any]]


def changes_of_rows(layers: Iterable[Any], rows: Sequence[int]) -> tuple[Changes, Changes]:
    """Changes that make row i what row ``rows[i]`` was: of positions, and of other layers and states."""
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
        longest: Tokens of the longest layer; one that has fewer loses fewer.

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
    """Raise UnsupportedError if a layer has tokens elsewhere than in pages."""
    for layer in layers:
        is_paged = isinstance(layer, KVCacheLayer) and isinstance(layer.pages, PagedLayer)
        if not (is_paged or isinstance(layer, DummyLayer | StatefulLayer)):
            raise UnsupportedError(f"{type(layer).__name__} cannot be cropped row by row")
