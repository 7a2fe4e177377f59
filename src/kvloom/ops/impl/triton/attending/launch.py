"""Launches of attention: what follows from shapes and lengths alone, and then a launch for each layer.

Shapes: B sequences, Tq new tokens, H key/value heads, R query heads for each of them, Dk and Dv head dims.
"""

from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from kvloom.ops.impl.triton.attending.cache import LEAST_WIDTH, CacheKind, CacheViews, width_of
from kvloom.ops.impl.triton.attending.merge import merge_kernel
from kvloom.ops.impl.triton.attending.plan import FEW, AttendPlan, Items, Lengths, make_plan, most_rows
from kvloom.ops.impl.triton.attending.tile import (
    AttendForm,
    Bias,
    Joint,
    Partial,
    Query,
    Table,
    attend_kernel,
)
from kvloom.ops.impl.triton.configs import Case, Config, config_for
from kvloom.ops.impl.triton.launching import (
    LAUNCHED_EARLY,
    Launcher,
    num_multiprocessors,
    on_device,
    overlaps,
)
from kvloom.ops.impl.triton.numerics import LARGEST
from kvloom.ops.impl.triton.sides import SideViews

LEAST_SHARED_ROWS: Final = 64
"""Rows from which on products read keys from shared memory, where transposing them again is free."""

_NOTHING: Final = Partial(None, None, None)


class Formula(NamedTuple):
    """What decides the scores of a call beside its tensors.

    Attributes:
        scale: Factor of the products.
        is_causal: Whether a query sees no later token.
        softcap: Bound of the scores; 0.0 for none.
        decoding_batches: Number of sequences at the front that get no causal mask.
        pairs: K of a positional bias, 0 without one.
        mask_head: Stride of a mask between heads.
        mask_row: The same between rows.
    """

    scale: float
    is_causal: bool
    softcap: float
    decoding_batches: int
    pairs: int
    mask_head: int
    mask_row: int


class Sizes(NamedTuple):
    """Sizes of a call.

    Attributes:
        sequences: B.
        num_new: Tq.
        query_heads: H * R.
        page_size: Slots of a page.
        splits: Maximum number of runs of a sequence.
        row_stride: Stride of the table between sequences.
    """

    sequences: int
    num_new: int
    query_heads: int
    page_size: int
    splits: int
    row_stride: int


class _Tiles(NamedTuple):
    """Launch of one kernel: its items, form and number of programs."""

    items: Items
    form: AttendForm
    programs: int
    launch: Launcher


class AttendLaunch:
    """Attention of one batch over caches of one kind; its plan is launched here.

    Args:
        kind: Kind of the caches.
        shape: Sizes of the call.
        formula: Scores.
        lengths: Lengths of the sequences.
        table: Slots of their tokens.
        dtype: Dtype of the queries.
        device: Device of all tensors.
    """

    def __init__(
        self,
        kind: CacheKind,
        shape: Sizes,
        formula: Formula,
        lengths: Lengths,
        table: Table,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._kind, self._shape, self._formula = kind, shape, formula
        self._lengths, self._table = lengths, table
        ratio = shape.query_heads // kind.heads
        few, many = (
            config_for(Case(is_split, dtype.itemsize, kind.bits, kind.width, ratio, kind.rope_dim))
            for is_split in (True, False)
        )
        self._overlaps = overlaps(device)
        with on_device(table.data):
            self._plan: AttendPlan = make_plan(
                lengths, shape.sequences, shape.num_new, ratio, shape.splits, (few.rows, many.rows), device
            )
        has_few = shape.sequences > 1 or shape.num_new <= FEW
        self._few = self._tiles(few, dtype, device, is_split=True) if has_few else None
        self._many = self._tiles(many, dtype, device, is_split=False) if shape.num_new > FEW else None
        warps = max(1, kind.width // 128)
        self._merge = Launcher(
            merge_kernel, num_warps=warps, enable_fp_fusion=True, **LAUNCHED_EARLY[self._overlaps]
        )

    def __call__(self, query: Tensor, cache: CacheViews, bias: Bias, joint: Joint, out: Tensor) -> None:
        """Compute ``out`` ``[Tq, Hq, Dv]``, and what ``joint`` is for."""
        shape, partial = self._shape, _NOTHING
        own = Query(query, *query.stride())
        with on_device(query):
            if self._many is not None:
                self._attend(self._many, own, cache, cache.many_values, bias, partial, joint, out)
            if self._few is not None:
                rows = most_rows(shape.num_new, shape.sequences)
                sizes = rows, shape.query_heads, shape.splits
                top, weight_sum = query.new_empty((2, *sizes), dtype=torch.float32)
                weighted = query.new_empty((*sizes, self._kind.value_dim), dtype=torch.float32)
                partial = Partial(top, weight_sum, weighted)
                self._attend(self._few, own, cache, cache.few_values, bias, partial, joint, out)
                dim, planes = self._kind.value_dim, self._kind.few_values.planes
                self._merge(
                    (rows, shape.query_heads, 1), partial, self._plan, bias.sinks, joint, out,
                    shape.query_heads, shape.splits, dim, width_of(dim), planes, self._overlaps,
                )  # fmt: skip

    def _attend(
        self,
        tiles: _Tiles,
        query: Query,
        cache: CacheViews,
        values: SideViews,
        bias: Bias,
        partial: Partial,
        joint: Joint,
        out: Tensor,
    ) -> None:
        shape, formula = self._shape, self._formula
        tiles.launch(
            (tiles.programs, 1, 1),
            query,
            cache.keys,
            cache.ropes,
            values,
            self._table,
            self._lengths,
            tiles.items,
            bias,
            formula.scale,
            formula.softcap,
            self._plan.first_row,
            partial,
            joint,
            out,
            shape.splits,
            shape.row_stride,
            formula.decoding_batches,
            formula.mask_head,
            formula.mask_row,
            tiles.form,
            self._overlaps,
        )

    def _tiles(self, config: Config, dtype: torch.dtype, device: torch.device, *, is_split: bool) -> _Tiles:
        kind, shape, formula = self._kind, self._shape, self._formula
        value_form = kind.few_values if is_split else kind.many_values
        is_shared = config.reads_once or config.rows >= LEAST_SHARED_ROWS
        forms: Any = [form for form in (kind.key, kind.rope, value_form) if form is not None]
        form = AttendForm(
            key_side=kind.key,
            rope_side=kind.rope,
            value_side=value_form,
            heads=kind.heads,
            ratio=shape.query_heads // kind.heads,
            page_size=shape.page_size,
            is_causal=formula.is_causal,
            has_softcap=formula.softcap != 0.0,
            pairs=formula.pairs,
            is_split=is_split,
            reads_once=kind.rope is not None and kind.key.bits == 0 and is_shared,
            token_axis=0 if config.rows < LEAST_WIDTH else 1,
            rows=config.rows,
            tokens=config.tokens,
            stages=config.num_stages,
            is_wide=any(x.is_wide for side in forms for x in (side.cache, side.scale)),
            largest=LARGEST[dtype],
        )
        items = self._plan.few if is_split else self._plan.many
        launch = Launcher(
            attend_kernel,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            enable_fp_fusion=True,
            **LAUNCHED_EARLY[self._overlaps],
        )
        return _Tiles(items, form, config.programs * num_multiprocessors(device), launch)
