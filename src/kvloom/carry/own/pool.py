"""Prefixes of a ``KVPool`` as a ``CarriedCache``, and back."""

from collections.abc import Sequence
from typing import Any

import torch

from kvloom.carry.carried import CarriedCache
from kvloom.carry.first_layer import expect_first_layer
from kvloom.carry.geometry import expect_layers
from kvloom.carry.own.filling import expect_holds, fill, formats_of
from kvloom.carry.own.kv_cache import from_cache
from kvloom.carry.own.model_geometry import geometry_of
from kvloom.core.spelling import parse_kind
from kvloom.errors import ArgumentError, StateError, UnsupportedError
from kvloom.integrations.transformers.cache.formats import cache_format
from kvloom.integrations.transformers.exchange import known_prefix
from kvloom.integrations.transformers.models.text_config import text_config_of
from kvloom.integrations.transformers.pool.kv_pool import KVPool
from kvloom.paging.arguments import token_ids


def from_pool(pool: KVPool, tokens: Sequence[int], salt: str = "") -> CarriedCache:
    """The longest prefix of a text that a pool, or the store below it, has: whole pages.

    Args:
        pool: The pool.
        tokens: Ids of the text.
        salt: Salt with which it was committed.

    Raises:
        ArgumentError: the first page of the text is not known, or a token is no integer.
        StateError: the pool was loaded and has no model yet.
        UnsupportedError: as ``from_cache``.
    """
    ids = token_ids(tokens)
    cache = known_prefix(pool, ids, salt)
    if cache is None:
        raise ArgumentError("pool must have the first page of the text, has none of it")
    return from_cache(cache, pool.model, ids[: int(cache.get_seq_length())])


def to_pool(
    cache: CarriedCache,
    pool: KVPool,
    *,
    salt: str = "",
    bound: float | None = None,
    rounding: bool = False,
) -> int:
    """Let a pool, and the store below it, find what is carried: whole pages.

    Whoever finds them goes on from the numbers of another engine, which differ from the model's by rounding.
    So they are compared with the model's first layer before they can be found.

    Args:
        cache: What is carried, with the ids of its tokens.
        pool: The pool of the model that computed it, which must not promise batch invariance.
        salt: Salt for which the pages are found.
        bound: As of ``check_first_layer``.
        rounding: Whether numbers may be rounded to the pool's format.

    Returns:
        Number of tokens that are found.

    Raises:
        ArgumentError: tokens are not known, are fewer than those of a page, or the first layer is not that of
            this model and text; layers are not those of the model; the format does not hold what is carried
            without rounding; or there is a NaN. Nothing can be found of it then.
        OutOfPages: the pool has no room.
        StateError: pages of this text are not shared, as of one whose RoPE has frequencies of its own; or the
            pool was loaded and has no model yet.
        UnsupportedError: layers have windows, of which the tokens before are not there, so that a shorter
            prefix would be wrong; or the pool promises batch invariance.
    """
    model = pool.model
    expect_layers(cache, geometry_of(model))
    if cache.tokens is None:
        raise ArgumentError(f"cache must have the ids of its {cache.num_tokens} tokens for a pool, has none")
    if any(layer.window is not None for layer in cache.layers):
        raise UnsupportedError(
            "cache must hold all tokens in every layer for a pool, got layers with a window"
        )
    report = pool.report()
    if report["layers"]["batch_invariant"]:
        raise UnsupportedError(
            "pool must be without batch invariance, whose bits another engine's numbers have not: "
            "batch_invariant=False"
        )
    size = pool.page_size
    if cache.num_tokens < size:
        raise ArgumentError(f"cache must have at least the {size} tokens of a page, got {cache.num_tokens}")
    is_exact = _holds(report["kv"], cache, model, rounding)
    expect_first_layer(cache, model, bound=bound)
    ids = torch.tensor([cache.tokens], device=model.device)
    made = pool.begin_given(ids, salt)  # the first layer says that the model computed them
    fill(made, cache, model, is_exact)
    if why := made.refuses():
        raise StateError(f"pages of this text cannot be shared: {why}")
    pool.commit(made, ids, salt)
    return cache.num_tokens // size * size


def _holds(kind: str, cache: CarriedCache, model: Any, rounding: bool) -> bool:
    """Whether the format of a pool holds what is carried as it is; raises ArgumentError if it rounds."""
    config = text_config_of(model)
    keys, values = formats_of(cache)
    dims = [side.head_dim for _, side in cache.layers[0].sides]
    if kind == cache_format(config, keys, 1, None, values, "auto", ()).kind(*dims):
        return True
    sides = [] if kind == "plan" else kind.split("/")
    if sides and not any(parse_kind("kv", x).bits for x in sides):
        for x in sides:
            expect_holds(cache, model, "pool", x, rounding=rounding)
        return True
    if not rounding:
        raise ArgumentError(
            f"pool must hold {', '.join(cache.kinds)} without rounding, has {kind}: rounding was not asked "
            f"for"
        )
    return False
