"""What plain torch makes of the same attention, and the error that it justifies."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvloom.conform.oracles import pmx as pmx_golden


def plain_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seqstarts: Tensor,
    kvstarts: Tensor,
    decoding_batches: int | Tensor,
    attn_mask: Tensor | None = None,
    *,
    num_heads: int,
    is_causal: bool,
    is_alibi: bool = False,
    **_ignored: object,
) -> Tensor:
    """softmax(QK^T) V with every step in the dtype of ``query``."""
    seq, kv = seqstarts.tolist(), kvstarts.tolist()
    dtype, head_dim = query.dtype, query.shape[-1]
    slopes = torch.tensor(pmx_golden.alibi_slopes(num_heads)).to(dtype)
    out = torch.zeros_like(query)
    has_mask = attn_mask is not None and attn_mask.numel() > 0
    for b in range(len(seq) - 1):
        rows, columns = slice(seq[b], seq[b + 1]), slice(kv[b], kv[b + 1])
        num_rows, num_columns = seq[b + 1] - seq[b], kv[b + 1] - kv[b]
        distance = torch.arange(num_columns) - (torch.arange(num_rows)[:, None] + num_columns - num_rows)
        hidden = (
            (distance > 0)
            if is_alibi or (is_causal and num_rows > 1 and b >= int(decoding_batches))
            else None
        )
        for g in range(num_heads):
            h = g * key.shape[1] // num_heads
            scores = (query[rows, g] @ key[columns, h].T) / math.sqrt(head_dim)
            if has_mask:
                assert attn_mask is not None
                scores = scores + (attn_mask if attn_mask.dim() == 2 else attn_mask[g])[rows, columns]
            if is_alibi:
                scores = scores + slopes[g] * distance.to(dtype)
            if hidden is not None:
                scores = scores.masked_fill(hidden, -math.inf)
            weights = scores.softmax(-1)
            out[rows, g] = torch.where(weights.isnan(), 0.0, weights).to(dtype) @ value[columns, h]
    return out


def assert_as_good_as_plain(actual: Tensor, golden: Tensor, plain: Tensor, justified: float = 0.0) -> None:
    """At most twice the error of plain torch in the same dtype, plus its rounding of the result.

    Or what is ``justified`` by the arithmetic: plain torch is luckier on one machine than on another, where
    its sums have another order.
    """
    assert actual.dtype == plain.dtype, f"attn_output has dtype {actual.dtype}, expected {plain.dtype}"
    assert actual.shape == golden.shape, f"attn_output is {list(actual.shape)}, expected {list(golden.shape)}"
    if golden.numel() == 0:
        return
    assert not bool(actual.isnan().any()), "attn_output has NaN"
    error = float((actual.double() - golden).abs().max())
    plain_error = float((plain.double() - golden).abs().max())
    allowed = 2.0 * (plain_error + torch.finfo(actual.dtype).eps * float(golden.abs().max()))
    allowed = max(allowed, justified)
    assert error <= allowed, f"attn_output is off by {error:.3e}, allowed are {allowed:.3e}"
