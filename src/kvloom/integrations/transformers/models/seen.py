"""What a model gives its cache: keys and values of each layer, seen in a forward of one token."""

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from kvloom.core.entries import Entry
from kvloom.core.specs import entry_of
from kvloom.integrations.transformers.models.cache_argument import as_argument
from kvloom.integrations.transformers.models.text_config import text_config_of
from kvloom.integrations.transformers.models.trials import undisturbed


class Watched(DynamicCache):  # type: ignore[misc]
    """Cache that records which layers are called, and keys and values of one token in each."""

    def __init__(self, config: Any) -> None:
        super().__init__(config=config)
        self.seen: dict[int, tuple[Tensor, Tensor]] = {}
        self.indexed: dict[int, Tensor] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Any:
        """``DynamicCache.update``, which records the layer."""
        self.seen[layer_idx] = key_states, value_states
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Any:
        """``DynamicCache.update_indexer``, which records the layer."""
        self.indexed[layer_idx] = indexer_key_states
        return super().update_indexer(indexer_key_states, layer_idx)


def entries_seen(model: Any) -> dict[int, Entry]:
    """Unquantized entries of each layer that is given keys and values, by its number.

    Configurations do not tell: layers with a window may have other heads, and values another head dim.
    """
    cache = Watched(text_config_of(model))
    one = torch.ones(1, 1, dtype=torch.int64, device=model.device)
    with undisturbed(model):
        model(input_ids=one, use_cache=True, **as_argument(model, cache))
    return {number: entry_of(key, value) for number, (key, value) in cache.seen.items()}
