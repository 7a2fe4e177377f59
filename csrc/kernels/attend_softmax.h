// From dot products to weights, one chunk of tokens at a time, and the folding of partial results.
#pragma once

#include "attend_vector.h"

namespace kvloom::KVLOOM_ISA {

// What one query head of one new token does to its scores.
struct ScoreRow {
  Index position;  // of the query among the stored tokens
  Tokens visible;
  Index mask_row;  // offset of its row in the mask, at the sequence's first column
  float slope;
};

// Maximum and sum of a running softmax.
struct Running {
  float top = -INFINITY;
  float sum = 0.0f;
};

// A finite stand-in for the maximum of nothing, so that -inf - top is -inf and not NaN.
inline float finite_top(float top) { return top == -INFINITY ? 0.0f : top; }

// Scales dot products of the tokens [first, first + kChunk), in place, and adds what the call asks for; those of
// hidden tokens become -inf. Returns the largest of each lane.
inline Vec adjust_scores(const AttendArgs& args, const ScoreRow& row, Index first, Index stored, float* scores) {
  const Index begin = max(row.visible.begin - first, 0), end = min(row.visible.end - first, kChunk);
  Vec top = splat(-INFINITY);
  if (begin == 0 && end == kChunk && args.softcap <= 0.0f && !args.mask.data && !args.alibi_slopes.data) {
    for (Index i = 0; i < kChunk; i += kLanes) {
      const Vec x = load(scores + i) * args.scale;
      store(scores + i, x);
      top = larger(x, top);
    }
    return top;
  }
  const IntVec lanes = lane_numbers();
  alignas(64) float mask[kChunk];
  if (args.mask.data) {
    const Index columns = min(stored - first, kChunk);
    for (Index i = 0; i < kChunk; ++i)
      mask[i] = i < columns ? read_float(args.mask.data, args.mask.dtype,
                                         row.mask_row + (first + i) * args.mask.stride[2])
                            : 0.0f;
  }
  for (Index i = 0; i < kChunk; i += kLanes) {
    Vec x = load(scores + i) * args.scale;
    if (args.softcap > 0.0f) x = args.softcap * tanh(x / args.softcap);
    if (args.mask.data) x = x + load(mask + i);
    if (args.alibi_slopes.data) {
      const IntVec distance = lanes + static_cast<std::int32_t>(first + i - row.position);
      x = x + row.slope * __builtin_convertvector(distance, Vec);
    }
    if (begin > i || end < i + kLanes) {
      const IntVec at = lanes + static_cast<std::int32_t>(i);
      const IntVec seen = (at >= static_cast<std::int32_t>(begin)) & (at < static_cast<std::int32_t>(end));
      x = seen ? x : splat(-INFINITY);
    }
    store(scores + i, x);
    top = larger(x, top);
  }
  return top;
}

// Turns dot products of R rows into weights, in place; hidden tokens get exactly 0. Earlier sums must be
// multiplied by `factors`. Each step is done for all rows before the next: they wait for nothing but their own.
template <int R>
inline void weigh_rows(const AttendArgs& args, const ScoreRow* rows, Index first, Index stored, float* scores,
                       Running* running, float* factors) {
  Vec top[R], sum[R];
  float new_top[R];
  Vec change{};
  for (int r = 0; r < R; ++r) top[r] = adjust_scores(args, rows[r], first, stored, scores + r * kChunk);
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    const float largest = largest_lane(top[r]), old_top = finite_top(running[r].top);
    running[r].top = largest > running[r].top ? largest : running[r].top;
    new_top[r] = finite_top(running[r].top);
    change[r] = running[r].sum == 0.0f ? 0.0f : old_top - new_top[r];
  }
  const Vec factor = exp(change);  // exactly 1 where the maximum stays
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    sum[r] = Vec{};
    for (Index i = r * kChunk; i < (r + 1) * kChunk; i += kLanes) {
      const Vec weight = exp(load(scores + i) - new_top[r]);
      store(scores + i, weight);
      sum[r] += weight;
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    running[r].sum = running[r].sum * factor[r] + sum_lanes(sum[r]);
    factors[r] = factor[r];
  }
}

// Adds a later partial result to an earlier one. An empty one changes nothing.
inline void fold_partial(Running& running, float* total, Running other, const float* part, Index width) {
  const float top = running.top > other.top ? running.top : other.top;
  const float mine = running.sum == 0.0f ? 0.0f : exp(finite_top(running.top) - finite_top(top));
  const float theirs = other.sum == 0.0f ? 0.0f : exp(finite_top(other.top) - finite_top(top));
  for (Index d = 0; d < width; d += kLanes)
    store(total + d, load(total + d) * mine + load(part + d) * theirs);
  running = {top, running.sum * mine + other.sum * theirs};
}

// Divides by the sum, in which a head's sink takes part. Returns whether the result is finite; a sum of
// nothing gives 0.
inline bool finish_row(const AttendArgs& args, Index query_head, Running running, float* total, Index dim,
                       Index out_row) {
  float sum = running.sum, factor = 1.0f;
  if (args.sinks.data) {
    const float sink = read_float(args.sinks.data, args.sinks.dtype, query_head * args.sinks.stride[0]);
    const float top = finite_top(sink > running.top ? sink : running.top);
    factor = running.sum == 0.0f ? 0.0f : exp(finite_top(running.top) - top);
    sum = running.sum * factor + exp(sink - top);
  }
  const float scale = sum == 0.0f ? 0.0f : factor / sum;
  Vec differences{};  // of numbers and themselves: 0 where they are finite, else NaN
  for (Index d = 0; d < round_up(dim, kBlock); d += kLanes) {
    const Vec x = load(total + d) * scale;
    store(total + d, x);
    differences += x - x;
  }
  write_floats(args.out, args.query_dtype, out_row * dim, total, dim);
  return sum_lanes(differences) == 0.0f;
}

}  // namespace kvloom::KVLOOM_ISA
