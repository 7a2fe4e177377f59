"""Arguments of attention: checks, and conversion to those of the operators."""

import math
from typing import Any, Final

import torch
from torch import Tensor

from kvloom.core.checks import FLOAT_DTYPES, INDEX_DTYPES, INT64_END, expect, expect_range, expect_tensor
from kvloom.core.views import KVView
from kvloom.errors import ArgumentError, ShapeError, UnsupportedError
from kvloom.ops.expect import expect_dtype
from kvloom.ops.scores import MAX_PAIRS, Batch, PositionalBias, Scores

OF_BIAS: Final = tuple(f"positional_bias.{x}" for x in ("coefficients", "frequencies", "first_position"))
"""Names of the arguments of a positional bias in errors."""


def latent_view(kv: KVView) -> tuple[KVView, bool]:
    """View of latents for ``attend``, and whether it has rope keys: without these, values are the keys."""
    has_rope = kv.value is not None and kv.value.head_dim > 0
    return (kv, True) if has_rope or kv.num_heads != 1 else (KVView(kv.key, kv.key), False)


def attend_arguments(
    query: Tensor, kv: KVView, batch: Batch, scores: Scores, head_dim: int
) -> tuple[Any, ...]:
    """Arguments of the operator."""
    return (
        query,
        *kv.tensors,
        batch.index.table,
        batch.index.row_starts,
        batch.index.page_size,
        batch.seqstarts,
        batch.kvstarts,
        batch.decoding_batches,
        batch.first_visible,
        1.0 / math.sqrt(head_dim) if scores.scale is None else scores.scale,
        scores.is_causal,
        scores.mask,
        scores.alibi_slopes,
        scores.window,
        scores.softcap,
        scores.sinks,
    )


def bias_arguments(scores: Scores) -> tuple[Tensor | None, ...]:
    """Last arguments of overloads with a positional bias; empty without one."""
    bias = scores.positional_bias
    return () if bias is None else (bias.coefficients, bias.frequencies, bias.first_position)


def expect_attend(
    query: Tensor, kv: KVView, batch: Batch, scores: Scores, is_latent: bool = False
) -> dict[str, int]:
    """Check the arguments of ``attend``; returns the sizes Tq, Hq, Dk of a query, and Dv of the result."""
    if kv.value is None:
        raise ArgumentError("kv must have values, got a cache of keys only")
    head_dim = kv.key.head_dim
    if head_dim == 0:
        raise ShapeError(f"kv must have keys of a head dim of at least 1, got {list(kv.key.cache.shape)}")
    if is_latent:
        if kv.num_heads != 1 or kv.value.head_dim == 0:
            raise ShapeError(
                f"kv must have latents and rope keys of one head, got {kv.num_heads} of {head_dim} and "
                f"{kv.value.head_dim} elements"
            )
        if scores.positional_bias is not None:
            raise UnsupportedError("attention to latents has no positional_bias")
        head_dim += kv.value.head_dim
    sizes = expect("query", query, "Tq Hq Dk", dtype=FLOAT_DTYPES, device=kv.device, Dk=head_dim)
    if sizes["Hq"] % kv.num_heads:
        raise ShapeError(f"query must have a multiple of {kv.num_heads} heads, got {sizes['Hq']}")
    for name, side in (("key", kv.key), ("value", kv.value)):
        expect_dtype(f"query (for the {name} cache)", query.dtype, side)
    _expect_batch(batch, kv.device)
    _expect_scores(scores, sizes, kv.device)
    if scores.positional_bias is not None:
        sequences = batch.kvstarts.shape[0] - 1
        _expect_bias(scores.positional_bias, sizes | {"H": kv.num_heads, "B": sequences}, kv.device)
    return sizes | {"Dv": (kv.key if is_latent else kv.value).head_dim}


def _expect_batch(batch: Batch, device: torch.device) -> None:
    expect("seqstarts", batch.seqstarts, "B+1", dtype=INDEX_DTYPES, device=device)
    sizes = expect("kvstarts", batch.kvstarts, "B+1", dtype=INDEX_DTYPES, device=device)
    if batch.seqstarts.shape != batch.kvstarts.shape or sizes["B+1"] == 0:
        raise ShapeError(
            f"kvstarts must be {list(batch.seqstarts.shape)} as seqstarts, got {list(batch.kvstarts.shape)}"
        )
    index = batch.index
    expect(
        "index", index.table, "B P" if index.row_starts is None else "N", dtype=INDEX_DTYPES, device=device
    )
    if index.row_starts is not None:
        expect("row_starts", index.row_starts, "B", dtype=INDEX_DTYPES, device=device)
    expect_range("page_size", index.page_size, 1, INT64_END)
    rows = index.table if index.row_starts is None else index.row_starts
    if rows.shape[0] < sizes["B+1"] - 1:
        raise ShapeError(
            f"index must have a row for each of {sizes['B+1'] - 1} sequences, got {rows.shape[0]}"
        )
    expect_range("decoding_batches", batch.decoding_batches, 0, INT64_END)
    if batch.first_visible is not None:
        expect(
            "first_visible", batch.first_visible, "B", dtype=INDEX_DTYPES, device=device, B=sizes["B+1"] - 1
        )


def _expect_scores(scores: Scores, sizes: dict[str, int], device: torch.device) -> None:
    heads, rows = sizes["Hq"], sizes["Tq"]
    if scores.mask is not None:
        expect_tensor("mask", scores.mask)
        axes = "Hq Tq Tkv" if scores.mask.ndim == 3 else "Tq Tkv"
        expect("mask", scores.mask, axes, dtype=FLOAT_DTYPES, device=device, Hq=heads, Tq=rows)
    for name in ("alibi_slopes", "sinks"):
        x = getattr(scores, name)
        if x is not None:
            expect(name, x, "Hq", dtype=FLOAT_DTYPES, device=device, Hq=heads)
    if scores.window is not None:
        expect_range("window", scores.window, 1, INT64_END)
    for name in ("scale", "softcap"):
        x = getattr(scores, name)
        if x is not None and not isinstance(x, int | float):
            raise ArgumentError(f"{name} must be a number, got {x!r}")
    if scores.softcap is not None and not 0 < scores.softcap < math.inf:
        raise ArgumentError(f"softcap must be positive and finite, got {scores.softcap}")


def _expect_bias(bias: PositionalBias, sizes: dict[str, int], device: torch.device) -> None:
    if not isinstance(bias, PositionalBias):
        raise ArgumentError(f"positional_bias must be a PositionalBias, got {type(bias).__name__}")
    of_coefficients, of_frequencies, of_position = OF_BIAS
    dtypes = (torch.float64, torch.float32)
    pairs = expect(of_frequencies, bias.frequencies, "H K", dtype=dtypes, device=device, H=sizes["H"])["K"]
    if not 1 <= pairs <= MAX_PAIRS:
        raise ShapeError(f"{of_frequencies} must be [H, K] with K from 1 to {MAX_PAIRS}, got K={pairs}")
    known = {"Tq": sizes["Tq"], "Hq": sizes["Hq"], "2K": 2 * pairs}
    expect(of_coefficients, bias.coefficients, "Tq Hq 2K", dtype=FLOAT_DTYPES, device=device, **known)
    if bias.first_position is not None:
        expect(of_position, bias.first_position, "B", dtype=INDEX_DTYPES, device=device, B=sizes["B"])
