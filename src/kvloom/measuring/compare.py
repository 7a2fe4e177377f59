"""Comparison of kinds of caches with that of transformers: bytes, speed, tokens and logits."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from kvloom.errors import UnsupportedError
from kvloom.integrations.transformers import KVCache
from kvloom.integrations.transformers.attention.in_place import IMPLEMENTATION
from kvloom.integrations.transformers.models.cache_argument import CACHE_ARGUMENT, as_argument, given_cache
from kvloom.integrations.transformers.models.positions import expect_positions
from kvloom.integrations.transformers.models.text_config import text_config_of

STOCK = "DynamicCache"


@dataclass(frozen=True, slots=True)
class Comparison:
    """Results of one kind of cache on one prompt.

    Attributes:
        kind: ``"DynamicCache"`` or a ``kv`` of ``KVCache.for_model``.
        nbytes_per_token: Cache bytes of one token in all layers.
        tokens_per_s: New tokens divided by the time of a whole ``generate``, median of its runs.
        num_same: Number of new tokens equal to those of DynamicCache before the first that differs.
        num_agreed: Number of positions with the same next token, with DynamicCache's tokens fed to both.
        num_tokens: Number of new tokens of DynamicCache.
        mean_kl: Mean over the same positions of KL(DynamicCache || kind) of the next-token distributions, in
            nats, with the same tokens fed to both.
    """

    kind: str
    nbytes_per_token: float
    tokens_per_s: float
    num_same: int
    num_agreed: int
    num_tokens: int
    mean_kl: float


def compare(
    model: Any,
    input_ids: Tensor,
    kinds: list[str],
    *,
    max_new_tokens: int,
    num_runs: int,
    in_place: bool = False,
) -> list[Comparison]:
    """Continue ``input_ids`` greedily with DynamicCache and with each kind in turn.

    Runs of all kinds alternate, so that a change in the machine's speed affects all of them.

    Args:
        model: A ``PreTrainedModel`` that generates; DynamicCache is read by the attention it has.
        input_ids: ``[1, N]`` int64.
        kinds: Values of ``kv`` of ``KVCache.for_model``.
        max_new_tokens: New tokens of each run.
        num_runs: Number of timed runs of each kind.
        in_place: Whether kvloom's attention reads a kind in place, or the model's own attention reads it.

    Raises:
        UnsupportedError: the model has an encoder, or does not generate.
    """
    expect_decoder(model)
    expect_positions("input_ids and max_new_tokens", model, input_ids.shape[1] + max_new_tokens)
    rows = [STOCK, *kinds]
    tokens: dict[str, Tensor] = {}
    caches: dict[str, Any] = {}
    times: dict[str, list[float]] = {kind: [] for kind in rows}
    for _ in range(num_runs):
        for kind in rows:
            with attention_for(model, kind, in_place=in_place):
                start = time.perf_counter()
                out = model.generate(
                    input_ids,
                    **{CACHE_ARGUMENT: cache_of(model, kind)},
                    max_new_tokens=max_new_tokens,
                    do_sample=False,
                    return_dict_in_generate=True,
                )
                times[kind].append(time.perf_counter() - start)
            tokens[kind], caches[kind] = out.sequences[0, input_ids.shape[1] :], given_cache(out)
    stock = tokens[STOCK]
    logits = {}
    for kind in rows:
        with attention_for(model, kind, in_place=in_place):
            logits[kind] = _forced_logits(model, input_ids, stock, kind)
    return [
        Comparison(
            kind,
            _nbytes_per_token(caches[kind]),
            len(tokens[kind]) / median(times[kind]),
            _common_prefix(stock, tokens[kind]),
            int((logits[kind].argmax(-1) == logits[STOCK].argmax(-1)).sum()),
            len(stock),
            _mean_kl(logits[STOCK], logits[kind]),
        )
        for kind in rows
    ]


def expect_generating(model: Any) -> None:
    """Raise UnsupportedError unless a model generates; ArgumentError if it is none."""
    text_config_of(model)
    if not model.can_generate():
        raise UnsupportedError(f"model must be one that generates, got {type(model).__name__}")


def expect_decoder(model: Any) -> None:
    """Raise UnsupportedError unless a model generates by a decoder alone; ArgumentError if it is none."""
    expect_generating(model)
    if model.config.is_encoder_decoder:
        raise UnsupportedError(f"model must be without an encoder, got {type(model).__name__}")


def cache_of(model: Any, kind: str) -> KVCache | None:
    """Make an empty cache of a kind; ``None`` for ``STOCK``, so that the model makes its own."""
    return None if kind == STOCK else KVCache.for_model(model, kv=kind)


@contextmanager
def attention_for(model: Any, kind: str, *, in_place: bool) -> Iterator[None]:
    """Context with kvloom's attention, if a kind other than ``STOCK`` is read in place."""
    before = model.config._attn_implementation
    chosen = IMPLEMENTATION if in_place and kind != STOCK else before
    if chosen != before:
        model.set_attn_implementation(chosen)
    try:
        yield
    finally:
        if chosen != before:
            model.set_attn_implementation(before)


@torch.no_grad()
def _forced_logits(model: Any, input_ids: Tensor, tokens: Tensor, kind: str) -> Tensor:
    """Next-token logits ``[len(tokens), V]`` while ``tokens`` are fed one by one through a cache."""
    out = model(input_ids, use_cache=True, **as_argument(model, cache_of(model, kind)))
    rows = [out.logits[0, -1]]
    for token in tokens[:-1]:
        out = model(token.view(1, 1), use_cache=True, **as_argument(model, given_cache(out)))
        rows.append(out.logits[0, -1])
    return torch.stack(rows).float()


def _mean_kl(expected: Tensor, actual: Tensor) -> float:
    p, q = expected.double().log_softmax(-1), actual.double().log_softmax(-1)
    kl = (p.exp() * (p - q)).sum(-1).mean()
    return max(0.0, float(kl))


def _common_prefix(a: Tensor, b: Tensor) -> int:
    shared = min(len(a), len(b))
    return int((a[:shared] == b[:shared]).cumprod(0).sum())


def _nbytes_per_token(cache: Any) -> float:
    if isinstance(cache, KVCache):
        return float(cache.nbytes_per_token)
    layers = cache.layers
    return float(sum((x.keys.nbytes + x.values.nbytes) / x.keys.shape[-2] for x in layers))
