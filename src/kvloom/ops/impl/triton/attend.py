"""Attend: plan, attention of each item, merge. At most four launches, without synchronization.

Shapes: B sequences, Tq new tokens, H key/value heads, Hq query heads, Dk and Dv head dims.
"""

from collections.abc import Sequence
from typing import Any, Final

import torch
import triton
from torch import Tensor

from kvloom.core.checks import can_read
from kvloom.core.entries import OF_BITS
from kvloom.core.indexing import ENDLESS, CacheIndex, check_index, check_new, check_starts
from kvloom.core.views import Side, head_dim_of
from kvloom.errors import ArgumentError, ShapeError
from kvloom.ops.impl.triton.attend_merge import merge_kernel
from kvloom.ops.impl.triton.attend_plan import FEW, Lengths, make_plan, most_rows, most_splits
from kvloom.ops.impl.triton.attend_tile import (
    AttendForm,
    Bias,
    Joint,
    Partial,
    Query,
    SideForm,
    Table,
    attend_kernel,
)
from kvloom.ops.impl.triton.configs import Case, Config, config_for
from kvloom.ops.impl.triton.launching import num_multiprocessors, on_device, overlap
from kvloom.ops.impl.triton.numerics import LARGEST
from kvloom.ops.impl.triton.places import describe
from kvloom.ops.impl.triton.sides import SideViews

NUM_SHARED: Final = 18
"""Number of arguments after the query that all attention operators have."""

MAX_HEAD_DIM: Final = 256
"""Largest head dim: several tiles of keys and of values must fit in the memory of a multiprocessor."""

LEAST_WIDTH: Final = 16
"""Minimum number of elements of a product on tensor cores; 8 along one axis, to which fewer rows go."""

LEAST_SHARED_ROWS: Final = 64
"""Rows from which on products read keys from shared memory, where transposing them again is free."""

MAX_CHUNKS: Final = 8
"""Number of groups up to which each has its own product, so that its scale can multiply scores."""


def why_not(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
    *_: object,
) -> str | None:
    """Reason why these kernels cannot attend over a cache, or ``None``."""
    head_dim = max(head_dim_of(key_cache, key_scale), head_dim_of(value_cache, value_scale))
    if head_dim > MAX_HEAD_DIM:
        return f"attends over head dims up to {MAX_HEAD_DIM}, got {head_dim}"
    if min(head_dim_of(key_cache, key_scale), head_dim_of(value_cache, value_scale)) == 0:
        return "attends over head dims from 1 on, got 0"
    return None


def attend(query: Tensor, *arguments: Any) -> Tensor:
    """Same contract as the reference; lengths and tables are checked if that needs no synchronization."""
    return launch_attend(query, *arguments[:NUM_SHARED], positional=arguments[NUM_SHARED:])[0]


def launch_attend(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
    table: Tensor,
    row_starts: Tensor | None,
    page_size: int,
    seqstarts: Tensor,
    kvstarts: Tensor,
    decoding_batches: int,
    first_visible: Tensor | None,
    scale: float,
    is_causal: bool,
    mask: Tensor | None,
    alibi_slopes: Tensor | None,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    skip: int | None = None,
    skip_from: Tensor | None = None,
    prior: Tensor | None = None,
    prior_lse: Tensor | None = None,
    *,
    positional: Sequence[Any] = (),
    is_part: bool = False,
    is_latent: bool = False,
) -> tuple[Tensor, Tensor]:
    """Result of attention, and for a part, which is float32, the logarithms of its sums ``[Tq, Hq]``.

    Latents are keys and values; then the rope keys are in the arguments of the values.
    """
    num_new, query_heads = query.shape[:2]
    sequences, heads = seqstarts.shape[0] - 1, key_cache.shape[3]
    num_slots = key_cache.shape[:3].numel()
    if can_read(kvstarts):
        always = alibi_slopes is not None or window is not None or skip is not None
        first_positioned = 0 if always else decoding_batches if is_causal else sequences
        index = CacheIndex(table, row_starts, page_size)
        _check_values(index, seqstarts, kvstarts, num_new, num_slots, mask, first_positioned)
    key, value = Side(key_cache, key_scale), Side(value_cache, value_scale)
    ropes, rope_form = _arguments(value, query.dtype) if is_latent else (None, None)
    rope_dim = value.head_dim if is_latent else 0
    value = key if is_latent else value
    out_dtype = torch.float32 if is_part else query.dtype
    out = query.new_empty((num_new, query_heads, value.head_dim), dtype=out_dtype)
    lse = query.new_empty((num_new, query_heads), dtype=torch.float32)
    if out.numel() == 0:
        return out, lse
    joint = Joint(lse, prior, prior_lse) if is_part else Joint()
    lengths = Lengths(
        seqstarts.contiguous(),
        kvstarts.contiguous(),
        None if first_visible is None else first_visible.contiguous(),
        ENDLESS if window is None else min(window, ENDLESS),
        None if skip is None else min(skip, ENDLESS),
        None if skip_from is None else skip_from.contiguous(),
    )
    row_stride, page_stride = (0, table.stride(0)) if table.ndim == 1 else table.stride()
    ragged = None if row_starts is None else row_starts.contiguous()
    places = Table(table, ragged, page_stride, num_slots)
    mask_row = 0 if mask is None else mask.stride(-2)
    mask_head = 0 if mask is None or mask.ndim == 2 else mask.stride(0)
    bias = _bias(mask, alibi_slopes, sinks, *(positional or (None, None, None)))
    pairs = positional[1].shape[1] if positional else 0
    ratio = query_heads // heads
    keys, key_form = _arguments(key, query.dtype)
    width = triton.next_power_of_2(max(key.head_dim, value.head_dim))
    few, many = (
        config_for(Case(is_split, query.itemsize, key.bits or value.bits, width, ratio, rope_dim))
        for is_split in (True, False)
    )
    splits = most_splits(_most_stored(table, page_size, num_slots))
    rows = most_rows(num_new, sequences)

    def launch(config: Config, is_split: bool) -> int:
        few_rows = is_split and not is_latent  # values of latents are read by many heads
        values, value_form = _arguments(value, query.dtype, of_values=True, few_rows=few_rows)
        is_shared = config.reads_once or config.rows >= LEAST_SHARED_ROWS
        reads_once = is_latent and key.bits == 0 and is_shared
        forms = [form for form in (key_form, rope_form, value_form) if form is not None]
        is_wide = any(x.is_wide for form in forms for x in (form.cache, form.scale))
        form = AttendForm(
            key_form, rope_form, value_form, heads, ratio, page_size, is_causal, softcap is not None, pairs,
            is_split, reads_once, 0 if config.rows < LEAST_WIDTH else 1, config.rows, config.tokens,
            config.num_stages, is_wide, LARGEST[query.dtype],
        )  # fmt: skip
        attend_kernel[(config.programs * num_multiprocessors(query.device),)](
            Query(query, *query.stride()),
            keys,
            ropes,
            values,
            places,
            lengths,
            plan.few if is_split else plan.many,
            bias,
            scale,
            softcap or 0.0,
            plan.first_row,
            partial,
            joint,
            out,
            splits,
            row_stride,
            decoding_batches,
            mask_head,
            mask_row,
            FORM=form,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            enable_fp_fusion=True,
            **overlap(query.device),
        )
        return value_form.planes

    with on_device(query):
        plan = make_plan(lengths, sequences, num_new, ratio, splits, (few.rows, many.rows), query.device)
        partial = Partial(None, None, None)
        if num_new > FEW:
            launch(many, is_split=False)
        if sequences > 1 or num_new <= FEW:
            shape = (rows, query_heads, splits)
            top, weight_sum = query.new_empty((2, *shape), dtype=torch.float32)
            weighted = query.new_empty((*shape, out.shape[2]), dtype=torch.float32)
            partial = Partial(top, weight_sum, weighted)
            planes = launch(few, is_split=True)
            merge_kernel[(rows, query_heads)](
                partial,
                plan,
                bias.sinks,
                joint,
                out,
                query_heads,
                splits,
                DIM=out.shape[2],
                WIDTH=_width(out.shape[2]),
                PLANES=planes,
                num_warps=max(1, width // 128),
                enable_fp_fusion=True,
                **overlap(query.device),
            )
    return out, lse


def _check_values(
    index: CacheIndex,
    seqstarts: Tensor,
    kvstarts: Tensor,
    num_new: int,
    num_slots: int,
    mask: Tensor | None,
    first_positioned: int,
) -> None:
    """Make the reference's checks; positions matter in sequences from ``first_positioned`` on."""
    seq, kv = seqstarts.tolist(), kvstarts.tolist()
    check_starts("seqstarts", seq)
    check_starts("kvstarts", kv)
    if seq[-1] != num_new:
        raise ArgumentError(f"seqstarts must end with the {num_new} rows of query, got {seq[-1]}")
    if mask is not None and mask.shape[-1] < kv[-1]:
        raise ShapeError(f"mask must have at least {kv[-1]} columns, got {mask.shape[-1]}")
    new, stored = seqstarts.diff().tolist(), kvstarts.diff().tolist()
    check_new("kvstarts", new, stored, [b >= first_positioned for b in range(len(new))])
    check_index("index", index, kvstarts.diff(), num_slots)


def _most_stored(table: Tensor, page_size: int, num_slots: int) -> int:
    """Maximum number of stored tokens of a sequence, by shapes alone. Slots of one page do not repeat."""
    if table.ndim == 1:
        return table.shape[0]
    return num_slots if page_size >= ENDLESS else table.shape[1] * page_size


def _bias(
    mask: Tensor | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    coefficients: Tensor | None,
    frequencies: Tensor | None,
    first_position: Tensor | None,
) -> Bias:
    """Arguments for masks, biases and sinks."""
    slopes, logits, radians, first = (
        None if x is None else x.contiguous() for x in (alibi_slopes, sinks, frequencies, first_position)
    )
    of_token, of_head, of_wave = (0, 0, 0) if coefficients is None else coefficients.stride()
    return Bias(
        mask,
        0 if mask is None else mask.stride(-1),
        slopes,
        logits,
        coefficients,
        of_token,
        of_head,
        of_wave,
        radians,
        first,
    )


def _arguments(
    side: Side, dtype: torch.dtype, *, of_values: bool = False, few_rows: bool = False
) -> tuple[SideViews, SideForm]:
    """Arguments for keys or values, with the choice of what their scales multiply.

    "products": one product for each group, if its rounding is no worse than that of the query's dtype.
    "numbers": values that many rows share, multiplied in the dtype of the scales, as the reference rounds
    them. "one by one": codes are dequantized, as in the reference.
    """
    cache, scale, bits = side.cache, side.scale, side.bits
    dim = cache.shape[-2] * cache.shape[-1]
    if scale is None:
        view, shape = describe(cache)
        form = SideForm(0, dim, _width(dim), 1, 1, 1, dim, False, "", shape, shape, 1, False, 0.0)
        return SideViews(view, None), form
    groups = scale.shape[-2] * scale.shape[-1]
    planes, group = OF_BITS[bits].per_byte, dim // groups
    # All but the way of reading depends only on the kind, so that all layouts have the same bits.
    has_words = bits > 2 and group % (2 * LEAST_WIDTH) == 0
    scaling = "one by one"
    if groups <= MAX_CHUNKS and dtype != torch.float32:
        # Weights times scales exceed the range of float16.
        is_coarse = dtype == torch.bfloat16 or (dtype == scale.dtype and not of_values)
        is_exact = has_words and of_values and scale.dtype in (dtype, torch.float16)
        if is_exact and not (few_rows and is_coarse):
            scaling = "numbers"
        # Four planes of bytes for each group would spill registers.
        elif is_coarse and group == _width(group) and planes <= 2:
            scaling = "products"
    words = None
    if has_words := has_words and scaling != "one by one":
        dim, group, planes = dim // 2, group // 2, planes * 2
        words = _words_of(cache, torch.int16)
    two = _words_of(scale, torch.int32) if scale.itemsize == 2 and scaling != "one by one" else None
    view, shape = describe(cache if words is None else words, bits=True)
    scale_view, scale_shape = describe(scale if two is None else two)
    chunks, width = (groups, group) if scaling == "products" else (1, _width(dim))
    form = SideForm(
        bits, dim, width, chunks, planes, chunks * planes, group, has_words and words is None, scaling,
        shape, scale_shape, 1 if two is None else 2, scale.dtype == torch.float16, LARGEST[scale.dtype],
    )  # fmt: skip
    return SideViews(view, scale_view), form


def _words_of(x: Tensor, dtype: torch.dtype) -> Tensor | None:
    """View of pairs of adjacent elements of head vectors, as integers; ``None`` if they are not adjacent."""
    chunks = x.transpose(-1, -2) if x.shape[-1] == 1 else x
    is_even = all(n % 2 == 0 for n in (chunks.shape[-1], *chunks.stride()[:-1]))
    if chunks.stride(-1) != 1 or not is_even or x.data_ptr() % dtype.itemsize:
        return None
    return chunks.view(dtype)


def _width(dim: int) -> int:
    """Smallest power of two of at least ``dim`` and ``LEAST_WIDTH``."""
    width: int = triton.next_power_of_2(dim)
    return max(width, LEAST_WIDTH)
