"""Presses, which evict tokens layer by layer, and what they are tried with.

kvpress 0.5 needs a transformers below 5.3, so it is no dependency here; ``make test-clients`` has it
in an environment of its own. The presses here do what its own do: a hook of each attention layer takes keys
and values from the cache and assigns those that it keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from kvloom.integrations.transformers import KVCache
from kvloom.integrations.transformers.models.cache_argument import given_cache
from oracles.language_models import FakeQuantCache

LENGTH = 40
Compress = Callable[[Any, Tensor, Tensor], tuple[Tensor, Tensor]]


def text(length: int, seed: int = 0, rows: int = 1) -> Tensor:
    return torch.randint(3, 99, (rows, length), generator=torch.Generator().manual_seed(seed))


def keep(*fractions: float) -> Compress:
    """Keep a fraction of each layer, by the norms of its keys, in each head its own, as KnormPress does."""

    def compress(module: Any, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        count = int(keys.shape[2] * fractions[module.layer_idx % len(fractions)])
        where = (
            (-keys.norm(dim=-1)).topk(count, dim=-1).indices.unsqueeze(-1).expand(-1, -1, -1, keys.shape[3])
        )
        return keys.gather(2, where), values.gather(2, where)

    return compress


def pyramid(module: Any, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Keep fewer tokens of each further layer, as PyramidKVPress does."""
    return keep(0.8, 0.5, 0.2)(module, keys, values)


def think(module: Any, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Set the weakest half of the channels of keys to 0, in place, as ThinKPress does."""
    weakest = keys.pow(2).mean(dim=2).topk(keys.shape[3] // 2, largest=False).indices
    return keys.scatter_(-1, weakest.unsqueeze(2).expand(-1, -1, keys.shape[2], -1), 0), values


@contextmanager
def press(model: Any, compress: Compress, layers: Sequence[int] = (0, 1, 2)) -> Iterator[None]:
    """Compress what each layer holds after a forward, as BasePress does."""

    def hook(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        cache: Any = given_cache(kwargs)
        layer = cache.layers[module.layer_idx]
        keys, values = compress(module, layer.keys, layer.values)
        if isinstance(cache, FakeQuantCache):  # as a cache of codes keeps what is assigned
            keys, values = map(cache.round_trip, (keys, values))
        layer.keys = keys
        layer.values = values

    found = [model.model.layers[i].self_attn for i in layers]
    hooks = [x.register_forward_hook(hook, with_kwargs=True) for x in found]
    try:
        yield
    finally:
        for x in hooks:
            x.remove()


def pressed(model: Any, cache: Any, compress: Compress = pyramid, rows: int = 1, **options: Any) -> Any:
    """The cache, with a text of which a press kept some."""
    with press(model, compress, **options):
        model(text(LENGTH, rows=rows), past_key_values=cache)
    return cache


def filled(model: Any, compress: Compress = pyramid, rows: int = 1, **options: Any) -> KVCache:
    cache: KVCache = pressed(model, KVCache.for_model(model, page_size=4, **options), compress, rows)
    return cache


def step(model: Any, cache: Any, tokens: Tensor, position: int = LENGTH) -> Tensor:
    """Logits of the last of some tokens, which are read one by one."""
    for i in range(tokens.shape[1]):
        where = torch.full((tokens.shape[0], 1), position + i)
        logits = model(tokens[:, i : i + 1], position_ids=where, past_key_values=cache).logits
    found: Tensor = logits
    return found


def greedy(model: Any, cache: Any, count: int = 12) -> tuple[Tensor, Tensor]:
    """Tokens that follow, one by one, and the last logits."""
    tokens = [torch.full((cache.layers[0].keys.shape[0], 1), 5)]
    for i in range(count):
        logits = step(model, cache, tokens[-1], LENGTH + i)
        tokens.append(logits[:, -1:].argmax(-1))
    return torch.cat(tokens, 1), logits


def lengths(cache: Any) -> list[int]:
    return [int(layer.get_seq_length()) for layer in cache.layers]
