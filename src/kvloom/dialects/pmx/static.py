"""``pmx.KeyValueCache``: one start position for the whole batch, batch entry n in batch slot n."""

import torch
from torch import Tensor

from kvloom import ops
from kvloom.core.layouts import CacheLayout
from kvloom.dialects.pmx.arguments import CacheAttributes, expect_new, open_cache, scalar
from kvloom.dialects.pmx.tracing import traceable
from kvloom.errors import ArgumentError, ShapeError
from kvloom.ops.expect import expect_loadable


@traceable("KeyValueCache")
def key_value_cache(
    current_key: Tensor,
    current_value: Tensor,
    start_pos: int | Tensor,
    cache: Tensor,
    scale: Tensor | None = None,
    num_layer: int = 1,
    layer_idx: int = 0,
    quant_bit: int = 0,
    quant_group: int = 8,
    num_repeat: int = 1,
    cache_layout: int = 0,
) -> tuple[Tensor, Tensor]:
    """Store new keys and values at ``start_pos`` and return all tokens stored so far.

    Args:
        current_key: ``[B, S, H, D]`` float32, float16, bfloat16, or int8 with ``quant_bit`` 0.
        current_value: As ``current_key``.
        start_pos: Position of the first new token, int, 0-d or one-element tensor. It may go back.
        cache: Written in place. ``[MaxB, L, 2, MaxS, H, D]`` (layout 0) or ``[L, MaxB, 2, H, MaxS, D]``
            (layout 1); a float dtype, int8 (``quant_bit`` 8) or uint8 with D / 2 last (``quant_bit`` 4).
        scale: Written in place; shape of ``cache`` with D / quant_group last; float32, float16 or bfloat16.
            Needed with ``quant_bit``, untouched without.
        num_layer: L.
        layer_idx: Layer to write and read.
        quant_bit: 0, 8 or 4.
        quant_group: Elements along D that share a scale.
        num_repeat: Number of times that each head is repeated in a row in the result.
        cache_layout: 0 or 1.

    Returns:
        ``(key, value)``, each ``[B, start_pos + S, H * num_repeat, D]`` in the dtype of ``current_key``.
        Tokens just written are dequantized, too.

    Raises:
        KVError: an argument does not fit the document; nothing was written.

    Source: PMX operator ``KeyValueCache``.
    """
    layout = CacheLayout.of("pmx.KeyValueCache", cache_layout)
    sizes = expect_new(current_key, current_value, "B S H D")
    attributes = CacheAttributes(num_layer, layer_idx, quant_bit, quant_group)
    kv = open_cache(layout, cache, scale, (current_key, current_value), attributes)
    batch, start = sizes["B"], scalar("start_pos", start_pos)
    end, max_batch, max_len = start + sizes["S"], kv.num_blocks, kv.block_size
    if batch > max_batch:
        raise ShapeError(f"cache must have at least {batch} batch slots, got {max_batch}")
    if start < 0 or end > max_len:
        raise ArgumentError(
            f"start_pos must be in [0, {max_len - sizes['S']}] for {sizes['S']} tokens, got {start}"
        )
    expect_loadable(batch * end, kv, current_key.dtype, num_repeat)
    rows = torch.arange(batch, device=cache.device).unsqueeze(1) * max_len + torch.arange(
        end, device=cache.device
    )
    ops.store(current_key.flatten(0, 1), current_value.flatten(0, 1), rows[:, start:].flatten(), kv)
    key, value = ops.load(rows.flatten(), kv, dtype=current_key.dtype, num_repeat=num_repeat)
    return key.unflatten(0, (batch, end)), value.unflatten(0, (batch, end))
