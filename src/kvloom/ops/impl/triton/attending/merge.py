"""Last step of attention over split sequences: merge the partial results of each row, in order.

They are added in groups of 16, so the order of sums does not depend on their number.
"""

import triton
import triton.language as tl

from kvloom.ops.impl.triton.attending.plan import MAX_SPLITS
from kvloom.ops.impl.triton.attending.softmax import exp_below
from kvloom.ops.impl.triton.launching import wait_for_earlier

_MAX_SPLITS: tl.constexpr = tl.constexpr(MAX_SPLITS)
_GROUP: tl.constexpr = tl.constexpr(16)


@triton.jit(do_not_specialize=["splits"])
def merge_kernel(
    partial, plan, sinks, joint, out, query_heads, splits,
    DIM: tl.constexpr, WIDTH: tl.constexpr, PLANES: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Merge one query head of one new token; ``WIDTH`` is the smallest power of two of at least ``DIM``."""
    wait_for_earlier(OVERLAPS, True)
    row, head = tl.program_id(0), tl.program_id(1)
    if row < tl.load(plan.num_rows):
        num_splits = tl.load(plan.row_splits + row)
        split = tl.arange(0, _MAX_SPLITS)
        at = (row.to(tl.int64) * query_heads + head) * splits
        tops = tl.load(partial.top + at + split, mask=split < num_splits, other=float("-inf"))
        weight_sums = tl.load(partial.weight_sum + at + split, mask=split < num_splits, other=0.0)
        top = tl.max(tops)
        if sinks is not None:
            sink = tl.load(sinks + head).to(tl.float32)
            top = tl.maximum(top, sink)
        token = tl.load(plan.row_query + row).to(tl.int64)
        place = token * query_heads + head
        if joint.prior is not None:
            prior_lse = tl.load(joint.prior_lse + place)
            top = tl.maximum(top, prior_lse)
        weight_sum = tl.sum(weight_sums * exp_below(tops, top))
        if sinks is not None:
            weight_sum += exp_below(sink, top)

        stored = tl.arange(0, WIDTH)
        is_in = stored < DIM
        result = tl.zeros((WIDTH,), tl.float32)
        for start in range(0, num_splits, _GROUP):
            some = start + tl.arange(0, _GROUP)
            is_there = some < num_splits
            rescale = exp_below(tl.load(partial.top + at + some, mask=is_there, other=float("-inf")), top)
            source = partial.weighted + (at + some)[:, None] * DIM + stored[None, :]
            weighted = tl.load(source, mask=is_there[:, None] & is_in[None, :], other=0.0)
            # A split whose rescaled weights are all 0 adds nothing, not even NaN.
            result += tl.sum(tl.where(rescale[:, None] == 0, 0.0, weighted * rescale[:, None]), axis=0)

        # Partial results lie plane by plane.
        element = stored % (DIM // PLANES) * PLANES + stored // (DIM // PLANES)
        if joint.prior is not None:
            theirs = exp_below(prior_lse, top)
            prior = tl.load(joint.prior + place * DIM + element, mask=is_in, other=0.0)
            weight_sum += theirs
            result += tl.where(theirs == 0, 0.0, prior * theirs)
        if joint.lse is not None:
            tl.store(joint.lse + place, top + tl.log(weight_sum))
        result /= tl.where(weight_sum == 0, 1.0, weight_sum)
        tl.store(out + place * DIM + element, result.to(out.dtype.element_ty), mask=is_in)
