"""Targets for ``kvloom conform run``: kvloom's operators, and those of transformers."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvloom import ops
from kvloom.core.checks import expect, expect_range
from kvloom.core.layouts import CacheLayout
from kvloom.core.views import KVView
from kvloom.dialects import ascend, onnx, pmx
from kvloom.errors import ArgumentError

key_value_cache = pmx.key_value_cache
dynamic_key_value_cache = pmx.dynamic_batching.key_value_cache
gather_pa_kv_cache = ascend.gather_pa_kv_cache
linear_attention = onnx.linear_attention
causal_conv_with_state = onnx.causal_conv_with_state


def scatter_pa_kv_cache(**call: Any) -> None:
    """kvloom's ScatterPaKvCache, all scenarios; keys only if there are no values."""
    given: dict[str, Any] = {"value": None, "value_cache": None, **call}
    ascend.scatter_pa_kv_cache(**given)


def multi_head_cache_attention(**call: Any) -> Tensor:
    """The fused operator of the document of 2023."""
    return _fused("pmx", call)


def opmx_multi_head_cache_attention(**call: Any) -> Tensor:
    """The fused operator of the later documents."""
    return _fused("opmx", call)


def _fused(spec: str, call: dict[str, Any]) -> Tensor:
    for name in ("is_causal", "is_alibi"):
        expect_range(name, call.get(name, 0), 0, 2)
        if name in call:
            call[name] = bool(call[name])
    return pmx.dynamic_batching.multi_head_cache_attention(**call, spec=spec)


def reshape_and_cache(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    """vLLM's chunked layout, by ``ops.store``."""
    keys = CacheLayout(f"B H D/{key_cache.shape[-1]} S D%{key_cache.shape[-1]}")
    kv = KVView.split(keys, key_cache, value_cache, value_layout="B H D S")
    ops.store(key, value, slot_mapping, kv)


def reshape_and_cache_flash(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    """vLLM's pages, by ``ops.store``; padded tokens have no slot."""
    count = slot_mapping.shape[0]
    kv = KVView.split("B S H D", key_cache, value_cache)
    ops.store(key[:count], value[:count], slot_mapping, kv)
    if value.shape != key.shape:
        raise ArgumentError(f"value must be {list(key.shape)} as key, got {list(value.shape)}")


def copy_blocks(key_caches: list[Tensor], value_caches: list[Tensor], block_mapping: Tensor) -> None:
    """Blocks of every layer, by ``ops.copy``."""
    expect("block_mapping", block_mapping, "N 2")
    views = [KVView.split("B S H D", k, v) for k, v in zip(key_caches, value_caches, strict=True)]
    for kv in views:
        within = torch.arange(kv.block_size)
        source, target = ((block_mapping[:, i : i + 1] * kv.block_size + within).flatten() for i in (0, 1))
        ops.copy(kv, source, kv, target)


def cache_update(
    key_states: list[Tensor], value_states: list[Tensor], kind: str, max_length: int
) -> dict[str, list[Tensor]]:
    """Layers of transformers."""
    from transformers import cache_utils

    makers: dict[str, Callable[[], Any]] = {
        "dynamic": cache_utils.DynamicLayer,
        "static": partial(cache_utils.StaticLayer, max_cache_len=max_length),
        "sliding": partial(cache_utils.DynamicSlidingWindowLayer, sliding_window=max_length),
    }
    return _updated(makers, kind, key_states, value_states)


def kvloom_cache_update(
    key_states: list[Tensor], value_states: list[Tensor], kind: str, max_length: int
) -> dict[str, list[Tensor]]:
    """kvloom's layers, which replace those of transformers."""
    from kvloom import caches

    makers: dict[str, Callable[[], Any]] = {
        "dynamic": caches.DynamicLayer,
        "static": partial(caches.StaticLayer, max_length),
        "sliding": partial(caches.SlidingWindowLayer, max_length),
    }
    return _updated(makers, kind, key_states, value_states)


def _updated(
    makers: Mapping[str, Callable[[], Any]], kind: str, keys: list[Tensor], values: list[Tensor]
) -> dict[str, list[Tensor]]:
    """What the updates of a new layer of a kind return, each as it was then."""
    if kind not in makers:
        raise ArgumentError(f"kind must be one of {', '.join(makers)}, got {kind!r}")
    layer = makers[kind]()
    found: dict[str, list[Tensor]] = {"keys": [], "values": []}
    for key, value in zip(keys, values, strict=True):
        for name, x in zip(found, layer.update(key, value), strict=True):
            found[name].append(x.clone())
    return found


def append_paged_kv_cache(
    append_key: Tensor,
    append_value: Tensor,
    batch_indices: Tensor,
    positions: Tensor,
    paged_kv_cache: Tensor,
    kv_indices: Tensor,
    kv_indptr: Tensor,
    kv_last_page_len: Tensor,
    kv_layout: str = "NHD",
) -> None:
    """FlashInfer's pages, by ``ops.store``."""
    if kv_layout not in ("NHD", "HND"):
        raise ArgumentError(f"kv_layout must be NHD or HND, got {kv_layout!r}")
    kv = KVView.joint("B 2 S H D" if kv_layout == "NHD" else "B 2 H S D", paged_kv_cache)
    batch = kv_last_page_len.shape[0]
    expect("kv_indptr", kv_indptr, "n", dtype=torch.int32, n=batch + 1)
    expect("kv_last_page_len", kv_last_page_len, "B", dtype=torch.int32)
    sizes = expect("positions", positions, "T", dtype=torch.int32)
    expect("batch_indices", batch_indices, "T", dtype=torch.int32, T=sizes["T"])
    expect("kv_indices", kv_indices, "N", dtype=torch.int32)
    pages = kv_indptr.diff()
    if kv_indptr[0] != 0 or bool((pages < 0).any()) or kv_indptr[-1] > kv_indices.shape[0]:
        raise ArgumentError(f"kv_indptr must be prefix sums of pages, got {kv_indptr.tolist()}")
    if bool(((kv_indices < 0) | (kv_indices >= kv.num_blocks)).any()):
        raise ArgumentError(f"kv_indices must be in [0, {kv.num_blocks}), got {kv_indices.tolist()}")
    if bool(((batch_indices < 0) | (batch_indices >= batch)).any()):
        raise ArgumentError(f"batch_indices must be in [0, {batch}), got {batch_indices.tolist()}")
    column = positions // kv.block_size
    if bool(((positions < 0) | (column >= pages[batch_indices])).any()):
        raise ArgumentError(f"positions must be in the pages of their request, got {positions.tolist()}")
    page = kv_indices[kv_indptr[batch_indices] + column]
    ops.store(append_key, append_value, page.long() * kv.block_size + positions % kv.block_size, kv)


def paged_attention(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    cumulative_sequence_length: Tensor,
    past_seqlens: Tensor,
    block_table: Tensor,
) -> None:
    """The cache update of ONNX Runtime's ``PagedAttention``, by ``ops.store``."""
    kv = KVView.split("B S H D", key_cache, value_cache)
    sizes = expect("block_table", block_table, "B C", dtype=torch.int32)
    batch = sizes["B"]
    expect("past_seqlens", past_seqlens, "B", dtype=torch.int32, B=batch)
    starts = cumulative_sequence_length
    expect("cumulative_sequence_length", starts, "n", dtype=torch.int32, n=batch + 1)
    expect("key", key, "T F", F=kv.num_heads * kv.key.head_dim)
    expect("value", value, "T F", T=key.shape[0], F=key.shape[1])
    new = starts.diff()
    if starts[0] != 0 or bool((new < 0).any()) or starts[-1] != key.shape[0]:
        raise ArgumentError(f"cumulative_sequence_length must be prefix sums, got {starts.tolist()}")
    if bool(((past_seqlens < 0) | (past_seqlens + new > sizes["C"] * kv.block_size)).any()):
        raise ArgumentError(f"past_seqlens must leave room in the table, got {past_seqlens.tolist()}")
    row = torch.repeat_interleave(torch.arange(batch), new)
    position = past_seqlens[row] + torch.arange(key.shape[0]) - starts[row]
    block = block_table[row, position // kv.block_size].long()
    if bool((block < 0).any()):
        raise ArgumentError("block_table must have a block for each new token")
    rows = [x.unflatten(1, (kv.num_heads, -1)) for x in (key, value)]
    ops.store(rows[0], rows[1], block * kv.block_size + position % kv.block_size, kv)
