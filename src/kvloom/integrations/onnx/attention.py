"""Attention of a ragged batch in standard operators, computed in float32.

One score matrix has all new tokens by all stored ones, and tokens of other sequences are masked. ONNX's own
``Attention`` has no ragged batch, and lets a masked NaN through.
"""

import math

from kvloom.integrations.onnx.builder import BOOL, FLOAT, Builder
from kvloom.ops.alibi import alibi_slopes


def append_attention(
    b: Builder,
    attributes: dict[str, int],
    tensors: tuple[str, str, str],
    queries: tuple[str, str],
    keys: tuple[str, str],
    mask_rank: int,
) -> str:
    """Append attention; returns the name of its result ``[Tq, Hq, D]`` float32.

    Args:
        b: Builder of the nodes.
        attributes: Attributes of the operator.
        tensors: Query ``[Tq, Hq, D]``, key and value ``[Tkv, H, D]``, float32.
        queries: Sequence and position of each row, ``[Tq]``.
        keys: Sequence and position of each stored token, ``[Tkv]``.
        mask_rank: Rank of ``attn_mask``, 0 if there is none.
    """
    query, key, value = tensors
    heads, head_dim = attributes["num_heads"], attributes["head_dim"]
    kv_heads = attributes["num_kv_heads"] or heads
    repeat = heads // kv_heads
    rows, columns = b.size(query, 0), b.size(key, 0)
    # One matrix product per key/value head, for all query heads that share it. The reshapes also keep ONNX
    # Runtime from fusing the transpositions into the product, which then divides by zero without tokens.
    q_HRqD = b.Transpose(b.reshape(query, rows, kv_heads, repeat, head_dim), perm=[1, 2, 0, 3])
    shared = b.Mul(rows, [repeat])
    q_HqD = b.reshape(q_HRqD, kv_heads, shared, head_dim)
    k_HDk = b.reshape(b.Transpose(key, perm=[1, 2, 0]), kv_heads, head_dim, columns)
    v_HkD = b.reshape(b.Transpose(value, perm=[1, 0, 2]), kv_heads, columns, head_dim)
    scores = b.Mul(b.MatMul(q_HqD, k_HDk), 1.0 / math.sqrt(head_dim))
    scores = b.reshape(scores, kv_heads, repeat, rows, columns)
    if mask_rank:
        mask = _mask(b, mask_rank, rows, columns)
        if mask_rank == 3:
            mask = b.reshape(mask, kv_heads, repeat, rows, columns)
        scores = b.Add(scores, mask)
    (q_sequence, q_position), (k_sequence, k_position) = (
        tuple(b.unsqueeze(x, axis) for x in pair) for pair, axis in ((queries, 1), (keys, 0))
    )
    distance = b.Sub(k_position, q_position)
    later = b.Greater(distance, 0)
    hidden = b.Not(b.Equal(q_sequence, k_sequence))
    if attributes["is_alibi"]:
        slopes = b.tensor(alibi_slopes(heads).tolist(), [kv_heads, repeat, 1, 1])
        scores = b.Add(scores, b.Mul(slopes, b.cast(distance, FLOAT)))
        hidden = b.Or(hidden, later)
    elif attributes["is_causal"]:
        masked = b.GreaterOrEqual(q_sequence, b.as_scalar("decoding_batches"))
        hidden = b.Or(hidden, b.And(later, masked))
    probs = _softmax(b, b.Where(hidden, -math.inf, scores))
    out = _weighted_sum(b, b.reshape(probs, kv_heads, shared, columns), v_HkD)
    out = b.Transpose(b.reshape(out, kv_heads, repeat, rows, head_dim), perm=[2, 0, 1, 3])
    return b.reshape(out, rows, heads, head_dim)


def _mask(b: Builder, rank: int, rows: str, columns: str) -> str:
    """The mask without its padding; zeros for a mask without elements."""
    lead = [b.size("query", 1)] if rank == 3 else []

    def zeros(inner: Builder) -> str:
        return inner.ConstantOfShape(inner.shape(*lead, rows, columns))

    def sliced(inner: Builder) -> str:
        used = inner.Slice("attn_mask", [0], columns, [-1])
        return inner.cast(used, FLOAT)

    is_empty = b.Equal(b.Size("attn_mask"), 0)
    return b.if_else(is_empty, zeros, sliced)


def _softmax(b: Builder, scores: str) -> str:
    """Softmax over the last axis; a row of -inf only gives zeros."""
    last = [3]  # not -1, which fails in ONNX Runtime without elements
    top = b.ReduceMax(scores, last, keepdims=1)
    top = b.Where(b.IsInf(top, detect_positive=0), 0.0, top)
    weights = b.Exp(b.Sub(scores, top))
    total = b.ReduceSum(weights, last, keepdims=1)
    return b.Div(weights, b.Where(b.Equal(total, 0.0), 1.0, total))


def _weighted_sum(b: Builder, probs: str, value: str) -> str:
    """``probs @ value``, but a weight of 0 hides even NaN. A row that sees a NaN or an infinity is NaN."""
    nonfinite = b.is_nonfinite(value)
    out = b.MatMul(probs, b.Where(nonfinite, 0.0, value))
    counted = b.MatMul(b.cast(b.cast(probs, BOOL), FLOAT), b.cast(nonfinite, FLOAT))
    return b.Where(b.Greater(counted, 0.0), math.nan, out)
