"""Last step of attention over split sequences: merge the partial results of each row, in order.

All are in one tile of ``MAX_SPLITS``, so the order of sums does not depend on their number.
"""

import triton
import triton.language as tl

from kvloom.ops.impl.triton.attend_plan import MAX_SPLITS
from kvloom.ops.impl.triton.attend_softmax import exp_below

_MAX_SPLITS: tl.constexpr = tl.constexpr(MAX_SPLITS)


@triton.jit(do_not_specialize=["splits"])
def merge_kernel(
    partial, plan, sinks, joint, out, query_heads, splits, DIM: tl.constexpr, WIDTH: tl.constexpr
):
    """Merge one query head of one new token; ``WIDTH`` is the smallest power of two of at least ``DIM``."""
    row, head = tl.program_id(0), tl.program_id(1)
    if row < tl.load(plan.num_rows):
        split = tl.arange(0, _MAX_SPLITS)
        is_there = split < tl.load(plan.row_splits + row)
        at = (row.to(tl.int64) * query_heads + head) * splits + split
        tops = tl.load(partial.top + at, mask=is_there, other=float("-inf"))
        weight_sums = tl.load(partial.weight_sum + at, mask=is_there, other=0.0)
        element = tl.arange(0, WIDTH)
        is_in = is_there[:, None] & (element < DIM)[None, :]
        weighted = tl.load(partial.weighted + at[:, None] * DIM + element[None, :], mask=is_in, other=0.0)

        top = tl.max(tops)
        if sinks is not None:
            sink = tl.load(sinks + head).to(tl.float32)
            top = tl.maximum(top, sink)
        token = tl.load(plan.row_query + row).to(tl.int64)
        place = token * query_heads + head
        if joint.prior is not None:
            prior_lse = tl.load(joint.prior_lse + place)
            top = tl.maximum(top, prior_lse)
        rescale = exp_below(tops, top)
        weight_sum = tl.sum(weight_sums * rescale)
        if sinks is not None:
            weight_sum += exp_below(sink, top)
        # A split whose rescaled weights are all 0 adds nothing, not even NaN.
        result = tl.sum(tl.where(rescale[:, None] == 0, 0.0, weighted * rescale[:, None]), axis=0)
        if joint.prior is not None:
            theirs = exp_below(prior_lse, top)
            prior = tl.load(joint.prior + place * DIM + element, mask=element < DIM, other=0.0)
            weight_sum += theirs
            result += tl.where(theirs == 0, 0.0, prior * theirs)
        if joint.lse is not None:
            tl.store(joint.lse + place, top + tl.log(weight_sum))
        result /= tl.where(weight_sum == 0, 1.0, weight_sum)
        target = out + place * DIM + element
        tl.store(target, result.to(out.dtype.element_ty), mask=element < DIM)
