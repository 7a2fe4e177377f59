"""Writes to pages as vLLM, FlashInfer and ONNX describe them: plain loops over tokens, bits copied."""

from __future__ import annotations

import torch
from torch import Tensor

WORD = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def words(x: Tensor) -> Tensor:
    """View of ``x`` as integers of its width, through which a copy keeps every bit."""
    return x.view(WORD[x.element_size()])


def reshape_and_cache(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Write keys to ``[nb, H, D / x, bs, x]``, values to ``[nb, H, D, bs]``; negative slots skip tokens."""
    size, piece = key_cache.shape[3], key_cache.shape[4]
    for t, slot in enumerate(slot_mapping.tolist()):
        if slot < 0:
            continue
        for h in range(key.shape[1]):
            for d in range(key.shape[2]):
                words(key_cache)[slot // size, h, d // piece, slot % size, d % piece] = words(key)[t, h, d]
                words(value_cache)[slot // size, h, d, slot % size] = words(value)[t, h, d]


def reshape_and_cache_flash(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Write keys and values to ``[nb, bs, H, D]``; slots may be fewer than padded tokens."""
    size = key_cache.shape[1]
    for t, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            words(key_cache)[slot // size, slot % size] = words(key)[t]
            words(value_cache)[slot // size, slot % size] = words(value)[t]


def copy_blocks(key_caches: list[Tensor], value_caches: list[Tensor], block_mapping: Tensor) -> None:
    """Copy blocks, pairs (from, to), in every layer; all sources are read before the call's writes."""
    for cache in (*key_caches, *value_caches):
        before = words(cache).clone()
        for source, target in block_mapping.tolist():
            words(cache)[target] = before[source]


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
    """Write token t of request ``batch_indices[t]`` to position ``positions[t]`` of its pages, in CSR."""
    size = paged_kv_cache.shape[2 if kv_layout == "NHD" else 3]
    for t, (b, position) in enumerate(zip(batch_indices.tolist(), positions.tolist(), strict=True)):
        page = int(kv_indices[int(kv_indptr[b]) + position // size])
        for side, new in enumerate((append_key, append_value)):
            for h in range(new.shape[1]):
                at = (position % size, h) if kv_layout == "NHD" else (h, position % size)
                words(paged_kv_cache)[(page, side) + at] = words(new)[t, h]  # noqa: RUF005


def paged_attention_write(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    cumulative_sequence_length: Tensor,
    past_seqlens: Tensor,
    block_table: Tensor,
) -> None:
    """Write new token i of sequence b to position ``past_seqlens[b] + i`` of blocks ``[nb, bs, H, D]``."""
    starts = cumulative_sequence_length.tolist()
    size = key_cache.shape[1]
    for b, past in enumerate(past_seqlens.tolist()):
        for i in range(starts[b + 1] - starts[b]):
            block, offset = int(block_table[b, (past + i) // size]), (past + i) % size
            for new, cache in ((key, key_cache), (value, value_cache)):
                words(cache)[block, offset] = words(new)[starts[b] + i].reshape(cache.shape[2:])


def tensor_scatter(
    past_cache: Tensor, update: Tensor, write_indices: Tensor | None, mode: str = "linear", axis: int = -2
) -> Tensor:
    """Copy of ``past_cache`` with ``update`` at ``write_indices[b]`` of ``axis``."""
    present = past_cache.clone()
    out, new = words(present).movedim(axis, 1), words(update).movedim(axis, 1)
    first = [0] * len(update) if write_indices is None else write_indices.tolist()
    for b in range(len(update)):
        for i in range(new.shape[1]):
            place = first[b] + i
            out[b, place % out.shape[1] if mode == "circular" else place] = new[b, i]
    return present


def concatenated(parts: list[Tensor], axis: int) -> Tensor:
    """Concatenate ``parts`` bit by bit."""
    return torch.cat([words(part) for part in parts], dim=axis).view(parts[0].dtype)
