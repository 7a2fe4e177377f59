"""Operators of ``pmx.dynamic_batching``: ragged batches, each sequence with its own place in the cache."""

from typing import NamedTuple

from torch import Tensor

from kvloom import ops
from kvloom.core.checks import FLOAT_DTYPES, INDEX_DTYPES, can_read, expect, expect_range, expect_tensor
from kvloom.core.indexing import CacheIndex, check_new, ragged_positions
from kvloom.core.layouts import CacheLayout
from kvloom.core.views import KVView
from kvloom.dialects.pmx.arguments import (
    CacheAttributes,
    expect_lengths,
    expect_new,
    flag,
    open_cache,
    open_index,
    scalar,
)
from kvloom.dialects.pmx.tracing import traceable
from kvloom.errors import ArgumentError, ShapeError
from kvloom.ops.expect import expect_loadable

_PACKED = CacheLayout("T H D")


@traceable("dynamic_batching.KeyValueCache")
def key_value_cache(
    current_key: Tensor,
    current_value: Tensor,
    seqstarts: Tensor,
    kvstarts: Tensor,
    cachestarts: Tensor,
    start_pos: Tensor,
    max_seqlen: int | Tensor,
    max_kvlen: int | Tensor,
    cache: Tensor,
    scale: Tensor | None = None,
    num_layer: int = 1,
    layer_idx: int = 0,
    quant_bit: int = 0,
    quant_group: int = 8,
    num_repeat: int = 1,
    cache_mode: int = 0,
    cache_layout: int = 0,
    page_size: int = 128,
) -> tuple[Tensor, Tensor]:
    """Store the new tokens of every sequence, then return all stored tokens, packed in batch order.

    All stores of a call happen before all loads, so sequences may share slots that one of them writes.

    Args:
        current_key: ``[seqstarts[B], H, D]`` float32, float16, bfloat16, or int8 with ``quant_bit`` 0.
        current_value: As ``current_key``.
        seqstarts: ``[B + 1]`` int64, prefix sums of new tokens. A sequence may have none.
        kvstarts: ``[B + 1]`` int64, prefix sums of stored tokens, the new ones included.
        cachestarts: int64. Mode 0: ``[B]``, first slot of each sequence. Mode 1: ``[B, P]``, first slot of
            each page (padding past the last page is never read), or ``[kvstarts[B]]``, the slot of each
            token.
        start_pos: ``[B]`` int64, position of the first new token; kvlen = start_pos + seqlen.
        max_seqlen: Longest new part, a hint that changes no result.
        max_kvlen: Longest sequence, a hint that changes no result.
        cache: Written in place; ``[T, L, 2, H, D]``, ``[L, T, 2, H, D]``, ``[L, 2, T, H, D]`` or ``[L, 2, H,
            T, D]`` by ``cache_layout``; a float dtype, int8 (``quant_bit`` 8) or uint8 with D / 2 last
            (``quant_bit`` 4).
        scale: Written in place; shape of ``cache`` with D / quant_group last. Untouched without
            ``quant_bit``.
        num_layer: L.
        layer_idx: Layer to write and read.
        quant_bit: 0, 8 or 4.
        quant_group: Elements along D that share a scale.
        num_repeat: Number of times that each head is repeated in a row in the result.
        cache_mode: 0 offset, 1 table.
        cache_layout: 0 to 3.
        page_size: Slots in a page of a page table.

    Returns:
        ``(key, value)``, each ``[kvstarts[B], H * num_repeat, D]`` in the dtype of ``current_key``. Their
        length is read from ``kvstarts``: in one ``torch.compile`` graph set
        ``torch._dynamo.config.capture_scalar_outputs``.

    Raises:
        KVError: an argument does not fit the document; nothing was written. Values of index tensors are
            checked on the CPU, elsewhere within ``kvloom.debug()``.

    Source: PMX operator ``dynamic_batching.KeyValueCache``.
    """
    layout = CacheLayout.of("pmx.dynamic_batching.KeyValueCache", cache_layout)
    expect_new(current_key, current_value, "T H D")
    attributes = CacheAttributes(num_layer, layer_idx, quant_bit, quant_group)
    kv = open_cache(layout, cache, scale, (current_key, current_value), attributes)
    batch = _Batch(seqstarts, kvstarts, cachestarts, start_pos, max_seqlen, max_kvlen, cache_mode, page_size)
    index, new = _plan(kv, current_key, batch)
    stored = index.slots(*ragged_positions(kvstarts))
    expect_loadable(stored.shape[0], kv, current_key.dtype, num_repeat)
    ops.store(current_key, current_value, new, kv)
    return ops.load(stored, kv, dtype=current_key.dtype, num_repeat=num_repeat)


@traceable("dynamic_batching.MultiHeadCacheAttention")
def multi_head_cache_attention(
    query: Tensor,
    current_key: Tensor,
    current_value: Tensor,
    seqstarts: Tensor,
    kvstarts: Tensor,
    cachestarts: Tensor,
    start_pos: Tensor,
    decoding_batches: int | Tensor,
    max_seqlen: int | Tensor,
    max_kvlen: int | Tensor,
    cache: Tensor,
    scale: Tensor | None = None,
    attn_mask: Tensor | None = None,
    *,
    num_heads: int,
    head_dim: int,
    is_causal: bool,
    num_kv_heads: int = 0,
    num_layer: int = 1,
    layer_idx: int = 0,
    quant_bit: int = 0,
    quant_group: int = 8,
    cache_mode: int = 0,
    cache_layout: int = 0,
    page_size: int = 128,
    is_alibi: bool = False,
    spec: str = "pmx",
) -> Tensor:
    """Store the new tokens of every sequence, then attend from them to all stored tokens.

    Equal to ``key_value_cache`` and then ``multi_head_attention``, without materializing keys and values.

    Args:
        query: ``[seqstarts[B], num_heads, head_dim]`` float32, float16 or bfloat16.
        current_key: ``[seqstarts[B], num_kv_heads, head_dim]``, dtype of ``query``.
        current_value: As ``current_key``.
        seqstarts, kvstarts, cachestarts, start_pos, max_seqlen, max_kvlen: As ``key_value_cache``.
        decoding_batches: Number of sequences at the front that get no causal mask.
        cache: Written in place; axes by ``cache_layout`` and ``spec``.
        scale: As ``key_value_cache``.
        attn_mask: Added to the scores, ``[sum(seqlen), >= sum(kvlen)]`` or with num_heads in front. An empty
            tensor means none.
        num_heads: Query heads.
        head_dim: D; scores are scaled by its inverse square root.
        is_causal: Hide later keys where a sequence has several new tokens, aligned bottom-right.
        num_kv_heads: H; 0 means ``num_heads``.
        num_layer, layer_idx, quant_bit, quant_group, cache_mode, page_size: As ``key_value_cache``.
        cache_layout: 0 to 3, numbered as in the document that ``spec`` names.
        is_alibi: Add ``slope * (j - position)`` and hide later keys from every sequence.
        spec: ``"pmx"``, the original document (2 is ``L H T 2 D``, 3 is ``2 L H T D``), or ``"opmx"``, the
            later upstream one (2 is ``L 2 T H D``, 3 is ``L 2 H T D``).

    Returns:
        ``[seqstarts[B], num_heads, head_dim]``, dtype of ``query``. A row that may see no key is 0.

    Raises:
        KVError: as ``key_value_cache``; nothing was written.

    Source: PMX operator ``dynamic_batching.MultiHeadCacheAttention``.
    """
    if spec not in ("pmx", "opmx"):
        raise ArgumentError(f"spec must be 'pmx' or 'opmx', got {spec!r}")
    layout = CacheLayout.of(f"{spec}.dynamic_batching.MultiHeadCacheAttention", cache_layout)
    kv_heads = _expect_heads(num_heads, num_kv_heads, head_dim)
    sizes = expect("query", query, "T Hq D", dtype=FLOAT_DTYPES, Hq=num_heads, D=head_dim)
    same = {"T": sizes["T"], "H": kv_heads, "D": head_dim}
    expect("current_key", current_key, "T H D", dtype=query.dtype, device=query.device, **same)
    expect("current_value", current_value, "T H D", dtype=query.dtype, device=query.device, **same)
    attributes = CacheAttributes(num_layer, layer_idx, quant_bit, quant_group)
    kv = open_cache(layout, cache, scale, (current_key, current_value), attributes)
    ragged = _Batch(seqstarts, kvstarts, cachestarts, start_pos, max_seqlen, max_kvlen, cache_mode, page_size)
    index, new = _plan(kv, current_key, ragged)
    batch = ops.Batch(index, seqstarts, kvstarts, _expect_decoding(decoding_batches, seqstarts))
    scores = _scores(query, kvstarts, attn_mask, num_heads, is_causal, is_alibi)
    ops.store(current_key, current_value, new, kv)
    return ops.attend(query, kv, batch, scores)


def multi_head_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seqstarts: Tensor,
    kvstarts: Tensor,
    decoding_batches: int | Tensor,
    max_seqlen: int | Tensor,
    max_kvlen: int | Tensor,
    attn_mask: Tensor | None = None,
    *,
    num_heads: int,
    head_dim: int,
    is_causal: bool,
    is_alibi: bool = False,
    num_kv_heads: int = 0,
) -> Tensor:
    """Attend from new tokens to packed keys and values, as ``key_value_cache`` returns them.

    Args:
        query: ``[seqstarts[B], num_heads, head_dim]`` float32, float16 or bfloat16.
        key: ``[kvstarts[B], num_kv_heads, head_dim]``, dtype of ``query``.
        value: As ``key``.
        seqstarts: As ``multi_head_cache_attention``, and so are ``kvstarts``, ``decoding_batches``,
            ``max_seqlen``, ``max_kvlen``, ``attn_mask``, ``num_heads``, ``head_dim``, ``is_causal``,
            ``is_alibi`` and ``num_kv_heads``.

    Returns:
        ``[seqstarts[B], num_heads, head_dim]``, dtype of ``query``. A row that may see no key is 0.

    Raises:
        KVError: an argument does not fit the document, or a sequence that is causal or has ALiBi has more new
            tokens than stored ones.

    Source: PMX operator ``dynamic_batching.MultiHeadAttention``.
    """
    kv_heads = _expect_heads(num_heads, num_kv_heads, head_dim)
    sizes = expect("query", query, "T Hq D", dtype=FLOAT_DTYPES, Hq=num_heads, D=head_dim)
    packed = expect("key", key, "Tkv H D", dtype=query.dtype, device=query.device, H=kv_heads, D=head_dim)
    expect("value", value, "Tkv H D", dtype=query.dtype, device=query.device, **packed)
    expect_lengths(seqstarts, kvstarts, sizes["T"], query.device)
    if can_read(kvstarts) and int(kvstarts[-1]) != packed["Tkv"]:
        raise ArgumentError(
            f"kvstarts must end with the number of keys {packed['Tkv']}, got {int(kvstarts[-1])}"
        )
    _expect_hints(max_seqlen, max_kvlen)
    index = CacheIndex.offset(kvstarts[:-1])
    batch = ops.Batch(index, seqstarts, kvstarts, _expect_decoding(decoding_batches, seqstarts))
    scores = _scores(query, kvstarts, attn_mask, num_heads, is_causal, is_alibi)
    if can_read(kvstarts) and (scores.is_causal or is_alibi):
        new, stored = seqstarts.diff().tolist(), kvstarts.diff().tolist()
        matters = [bool(is_alibi) or b >= batch.decoding_batches for b in range(len(new))]
        check_new("kvstarts", new, stored, matters)
    return ops.attend(query, KVView.split(_PACKED, key, value), batch, scores)


class _Batch(NamedTuple):
    """Arguments that place a ragged batch in the cache."""

    seqstarts: Tensor
    kvstarts: Tensor
    cachestarts: Tensor
    start_pos: Tensor
    max_seqlen: int | Tensor
    max_kvlen: int | Tensor
    cache_mode: int
    page_size: int


def _plan(kv: KVView, current_key: Tensor, batch: _Batch) -> tuple[CacheIndex, Tensor]:
    """Index of the batch and slots of its new tokens; checks every value."""
    seqstarts, kvstarts, start_pos = batch.seqstarts, batch.kvstarts, batch.start_pos
    num_sequences = expect_lengths(seqstarts, kvstarts, current_key.shape[0], kv.device)
    expect("start_pos", start_pos, "B", dtype=INDEX_DTYPES, device=kv.device, B=num_sequences)
    _expect_hints(batch.max_seqlen, batch.max_kvlen)
    if can_read(start_pos):
        seqlens, kvlens = seqstarts.diff(), kvstarts.diff()
        for b in ((start_pos < 0) | (kvlens != start_pos + seqlens)).nonzero().flatten().tolist()[:1]:
            raise ArgumentError(
                f"kvstarts must give sequence {b} start_pos + seqlen tokens, {int(start_pos[b])} + "
                f"{int(seqlens[b])}, and start_pos must be at least 0; got {int(kvlens[b])} tokens"
            )
    index = open_index(
        kv,
        batch.cachestarts,
        kvstarts,
        batch=num_sequences,
        cache_mode=batch.cache_mode,
        page_size=batch.page_size,
    )
    return index, index.slots(*ragged_positions(seqstarts, start_pos, total=current_key.shape[0]))


def _expect_hints(max_seqlen: int | Tensor, max_kvlen: int | Tensor) -> None:
    scalar("max_seqlen", max_seqlen)
    scalar("max_kvlen", max_kvlen)


def _expect_heads(num_heads: int, num_kv_heads: int, head_dim: int) -> int:
    expect_range("num_heads", num_heads, 1)
    expect_range("head_dim", head_dim, 1)
    kv_heads = expect_range("num_kv_heads", num_kv_heads, 0) or num_heads
    if num_heads % kv_heads:
        raise ArgumentError(f"num_kv_heads must divide num_heads {num_heads}, got {num_kv_heads}")
    return kv_heads


def _expect_decoding(decoding_batches: int | Tensor, seqstarts: Tensor) -> int:
    return expect_range(
        "decoding_batches", scalar("decoding_batches", decoding_batches), 0, seqstarts.shape[0]
    )


def _scores(
    query: Tensor, kvstarts: Tensor, attn_mask: Tensor | None, num_heads: int, is_causal: bool, is_alibi: bool
) -> ops.Scores:
    if attn_mask is not None:
        expect_tensor("attn_mask", attn_mask)
    mask = attn_mask if attn_mask is not None and attn_mask.numel() else None
    if mask is not None:
        axes = "Hq T Tkv" if mask.ndim == 3 else "T Tkv"
        sizes = {"Hq": num_heads, "T": query.shape[0]}
        width = expect("attn_mask", mask, axes, dtype=FLOAT_DTYPES, device=query.device, **sizes)["Tkv"]
        if can_read(kvstarts) and width < int(kvstarts[-1]):
            raise ShapeError(f"attn_mask must have at least {int(kvstarts[-1])} columns, got {width}")
    slopes = ops.alibi_slopes(num_heads, device=query.device) if flag("is_alibi", is_alibi) else None
    return ops.Scores(is_causal=flag("is_causal", is_causal), mask=mask, alibi_slopes=slopes)
