"""The caches that benchmarks compare, and how they are built and filled.

Peers are transformers' own caches; those that need a package which is not installed are named, not measured.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache
from transformers.cache_utils import QuantizedCache

from kvloom.integrations.transformers import KVCache

STOCK = "DynamicCache"
RESIDUAL = 128
"""Tokens that transformers' int4 caches keep unquantized before they requantize all: their default."""


@dataclass(frozen=True, slots=True)
class Contender:
    """A cache and the attention that reads it.

    Attributes:
        name: As the tables show it.
        make: From the model and an upper bound of tokens to an empty cache.
        attention: Name of the attention implementation of transformers.
        residual: Tokens after which the cache requantizes everything; 0 if it never does.
    """

    name: str
    make: Callable[[Any, int], Any]
    attention: str = "sdpa"
    residual: int = 0


def stock() -> Contender:
    """The default cache of ``generate``."""
    return Contender(STOCK, lambda model, _: DynamicCache(config=model.config))


def static() -> Contender:
    """Tensors of the final length from the start."""
    return Contender("StaticCache", lambda model, bound: StaticCache(model.config, max_cache_len=bound))


def quantized(backend: str, bits: int, group: int = 64, residual: int = RESIDUAL) -> Contender:
    """QuantizedCache, on the axes that transformers' documentation recommends for each backend."""
    if backend == "fp8":
        return Contender("fp8", lambda model, _: QuantizedCache("fp8", model.config))
    axis = 1 if backend == "hqq" else 0
    return Contender(
        f"{backend} int{bits}",
        lambda model, _: QuantizedCache(
            backend,
            model.config,
            nbits=bits,
            axis_key=axis,
            axis_value=axis,
            q_group_size=group,
            residual_length=residual,
        ),
        residual=residual,
    )


def kvloom(
    kv: str,
    values: str | None = None,
    *,
    group: int | None = None,
    recent: int = 0,
    in_place: bool = False,
    bounded: bool = False,
) -> Contender:
    """KVCache, read through tensors that it gathers or in place, growing or with ``max_tokens`` known.

    Keys and values are codes if they have a group, with a residual window of ``recent`` tokens.
    """
    name = " ".join(
        ("kvloom", kv if values is None else f"{kv}/{values}", *(("in place",) if in_place else ()))
    )
    if group is not None:
        kv, values = (f"{x}:g{group},recent={recent}" for x in (kv, values or kv))
    return Contender(
        name,
        lambda model, bound: KVCache.for_model(
            model, kv, max_tokens=bound if bounded else None, values=values
        ),
        "kvloom" if in_place else "sdpa",
    )


def installed(contenders: Iterable[Contender], model: Any) -> tuple[list[Contender], list[str]]:
    """Contenders that can be built here, and the names of the others."""
    found, missing = [], []
    for contender in contenders:
        try:
            contender.make(model, 64)
        except (ImportError, ValueError) as error:
            if contender.name.startswith("kvloom"):
                raise
            reason = f"{contender.name}: {str(error).strip().splitlines()[0]}"
            missing += [reason] if reason not in missing else []
        else:
            found.append(contender)
    return found, missing


def llama(kv_heads: int, *, layers: int = 4) -> LlamaForCausalLM:
    """Random weights, 8 query heads of 64: latency and bytes do not depend on what a model has learnt."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=512,
        intermediate_size=1376,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=kv_heads,
        vocab_size=1024,
        max_position_embeddings=16384,
    )
    return LlamaForCausalLM(config).eval()


@torch.no_grad()
def fill(cache: Any, model: Any, num_tokens: int, rows: int = 1, attention: str = "sdpa") -> None:
    """Store random keys and values, the same in every cache: what a prompt leaves, without computing it.

    KVCache chooses the order of its pages by the attention that reads the first tokens.
    """
    model.set_attn_implementation(attention)
    config = model.config
    generator = torch.Generator().manual_seed(num_tokens)
    for layer in range(config.num_hidden_layers):
        shape = (rows, config.num_key_value_heads, num_tokens, config.head_dim)
        key, value = (torch.randn(shape, generator=generator) for _ in range(2))
        cache.update(key, value, layer)


@torch.no_grad()
def step(model: Any, contender: Contender, cache: Any, num_new: int = 1, rows: int = 1) -> float:
    """Milliseconds of the forward pass of new tokens, for the logits of the last; ``None`` keeps no cache."""
    tokens = torch.full((rows, num_new), 3)
    model.set_attn_implementation(contender.attention)
    start = time.perf_counter()
    model(tokens, cache=cache, use_cache=cache is not None, logits_to_keep=1)
    return (time.perf_counter() - start) * 1e3
