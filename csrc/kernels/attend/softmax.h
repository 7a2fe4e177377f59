// Online softmax: dot products become weights, one chunk of tokens at a time; and merging partial results.
#pragma once

#include <cmath>

#include "arithmetic.h"
#include "plan.h"

namespace kvloom::KVLOOM_ISA {

// Window, mask and slope of one query head of one new token.
struct ScoreRow {
  Index position;  // of the query among the stored tokens
  Tokens visible;
  Index mask_row;  // offset of its row in the mask, at the sequence's first column
  float slope;
};

inline ScoreRow score_row(const AttendArgs& args, const SequencePlan& plan, Index new_token,
                          Index query_head) {
  const FloatArray &mask = args.mask, &slopes = args.alibi_slopes;
  return {plan.num_stored - plan.num_new + new_token, plan.visible(args, new_token, new_token + 1),
          mask.data ? query_head * mask.stride[0] + (plan.first_row + new_token) * mask.stride[1] +
                          plan.first_column * mask.stride[2]
                    : 0,
          slopes.data ? read_float(slopes.data, slopes.dtype, query_head * slopes.stride[0]) : 0.0f};
}

// The running maximum and sum of one row.
struct OnlineSoftmax {
  float max = -INFINITY;
  float sum = 0.0f;
};

// 0 in place of the maximum of nothing, so that -inf minus it is -inf and not NaN.
inline float finite_max(float x) { return x == -INFINITY ? 0.0f : x; }
inline Vec finite_max(Vec x) { return x == splat(-INFINITY) ? Vec{} : x; }

// Running maxima and sums of the rows of a tile. A vector may be read from any row on.
struct SoftmaxRows {
  float max[kTileRows + kLanes] = {}, sum[kTileRows + kLanes] = {};

  OnlineSoftmax operator[](Index r) const { return {max[r], sum[r]}; }
  void start(Index rows) {
    for (Index r = 0; r < rows; ++r) max[r] = OnlineSoftmax().max, sum[r] = OnlineSoftmax().sum;
  }
};

// Scales dot products of the tokens [first, first + kCount), in place, and applies softcap, mask and ALiBi;
// those of hidden tokens become -inf. Returns the maximum of each lane.
template <Index kCount = kChunk>
inline Vec adjust_scores(const AttendArgs& args, const ScoreRow& row, Index first, Index stored,
                         float* scores) {
  const Index begin = max(row.visible.begin - first, 0), end = min(row.visible.end - first, kCount);
  Vec lane_max = splat(-INFINITY);
  const IntVec lanes = lane_numbers();
  alignas(64) float mask[kCount];
  if (args.mask.data) {
    const Index columns = max(min(stored - first, kCount), 0), column = args.mask.stride[2];
    read_floats(args.mask.data, args.mask.dtype, row.mask_row + first * column, column, mask, columns);
    for (Index i = columns; i < kCount; ++i) mask[i] = 0.0f;
  }
  for (Index i = 0; i < kCount; i += kLanes) {
    Vec x = load(scores + i) * args.scale;
    if (args.softcap > 0.0f) x = args.softcap * tanh(x / args.softcap);
    if (args.mask.data) x = x + load(mask + i);
    if (args.alibi_slopes.data) {
      const IntVec distance = lanes + static_cast<int32_t>(first + i - row.position);
      x = x + row.slope * __builtin_convertvector(distance, Vec);
    }
    if (begin > i || end < i + kLanes) {
      const IntVec at = lanes + static_cast<int32_t>(i);
      const IntVec seen = (at >= static_cast<int32_t>(begin)) & (at < static_cast<int32_t>(end));
      x = seen ? x : splat(-INFINITY);
    }
    store(scores + i, x);
    lane_max = maximum(x, lane_max);
  }
  return lane_max;
}

// Whether all that the dot products of a chunk need is to be scaled, which keeps their order.
inline bool are_only_scaled(const AttendArgs& args, const ScoreRow& row, Index first) {
  return row.visible.begin <= first && row.visible.end >= first + kChunk && args.softcap <= 0.0f &&
         !args.mask.data && !args.alibi_slopes.data && args.scale > 0.0f && args.scale < INFINITY;
}

// The largest of each lane.
inline Vec largest_scores(const float* scores) {
  Vec largest = splat(-INFINITY);
  for (Index i = 0; i < kChunk; i += kLanes) largest = maximum(load(scores + i), largest);
  return largest;
}

// Computes weights from the dot products of R rows from `first_row` on, in place; hidden tokens get exactly
// 0. Earlier accumulators must be multiplied by `factors`. Each step is done for all rows before the next
// one: rows are independent, steps are not. Lane r of what is one number of each row is row r's.
template <int R>
inline void update_softmax(const AttendArgs& args, const ScoreRow* rows, Index first, Index stored,
                           float* scores, SoftmaxRows& softmax, Index first_row, float* factors) {
  const auto by_row = [](Vec x) {  // what reduce_rows gives
    return shuffle(x, x, [](int lane) { return lane % R * (kLanes / R); });
  };
  const auto store_rows = [](float* to, Vec x) { std::memcpy(to, &x, R * sizeof(float)); };
  float *max = softmax.max + first_row, *sum = softmax.sum + first_row;
  Vec lane_max[R], lane_sum[R];
  float scale[R];
  KVLOOM_UNROLL(4)
  for (int r = 0; r < R; ++r) {
    const bool is_later = are_only_scaled(args, rows[r], first);  // when they are read again
    scale[r] = is_later ? args.scale : 1.0f;
    lane_max[r] = is_later ? largest_scores(scores + r * kChunk) * args.scale
                           : adjust_scores(args, rows[r], first, stored, scores + r * kChunk);
  }
  const Vec old_max = load(max), old_sum = load(sum);
  const Vec new_max = maximum(by_row(max_rows<R>(lane_max)), old_max), finite = finite_max(new_max);
  const Vec change = old_sum == splat(0.0f) ? Vec{} : finite_max(old_max) - finite;
  const Vec factor = exp(change);  // exactly 1 where the maximum stays
  alignas(64) float subtracted[kLanes];
  store(subtracted, finite);
  KVLOOM_UNROLL(4)
  for (int r = 0; r < R; ++r) {
    lane_sum[r] = Vec{};
    KVLOOM_UNROLL(4)
    for (Index i = r * kChunk; i < (r + 1) * kChunk; i += kLanes) {
      const Vec weight = exp(load(scores + i) * scale[r] - subtracted[r]);
      store(scores + i, weight);
      lane_sum[r] += weight;
    }
  }
  store_rows(max, new_max);
  store_rows(sum, old_sum * factor + by_row(sum_rows<R>(lane_sum)));
  store_rows(factors, factor);
}

// Merges a later partial result into an earlier one. An empty one changes nothing.
inline void merge_partial(OnlineSoftmax& softmax, float* accumulator, OnlineSoftmax other, const float* part,
                          Index width) {
  const float new_max = softmax.max > other.max ? softmax.max : other.max;
  const float mine = softmax.sum == 0.0f ? 0.0f : exp(finite_max(softmax.max) - finite_max(new_max));
  const float theirs = other.sum == 0.0f ? 0.0f : exp(finite_max(other.max) - finite_max(new_max));
  for (Index d = 0; d < width; d += kLanes)
    store(accumulator + d, load(accumulator + d) * mine + load(part + d) * theirs);
  softmax = {new_max, softmax.sum * mine + other.sum * theirs};
}

// The end of a row: its softmax with the sink in it, and what its accumulator has become smaller by since.
struct FinalSoftmax {
  OnlineSoftmax softmax;
  float factor = 1.0f;

  FinalSoftmax(const AttendArgs& args, Index query_head, OnlineSoftmax without) : softmax(without) {
    if (!args.sinks.data) return;
    const float sink = read_float(args.sinks.data, args.sinks.dtype, query_head * args.sinks.stride[0]);
    softmax.max = sink > without.max ? sink : without.max;
    const float new_max = finite_max(softmax.max);
    factor = without.sum == 0.0f ? 0.0f : exp(finite_max(without.max) - new_max);
    softmax.sum = without.sum * factor + exp(sink - new_max);
  }

  // Final factor of an accumulator: 1 by the sum; 0 if that is of nothing.
  float scale() const { return softmax.sum == 0.0f ? 0.0f : factor / softmax.sum; }
};

// The logarithm of a sum of weights, which are relative to a maximum.
inline float log_sum(float max, double sum) {
  return sum == 0.0 ? -INFINITY : static_cast<float>(double{finite_max(max)} + std::log(sum));
}

// Merges the row of the part that came before, if there is one, into this one's.
inline void merge_prior(const AttendArgs& args, OnlineSoftmax& softmax, float* accumulator, Index dim,
                        Index out_row) {
  if (!args.prior) return;
  alignas(64) float prior[kMaxHeadDim];
  std::memcpy(prior, args.prior + out_row * dim, dim * sizeof(float));
  for (Index d = dim; d < round_up(dim, kBlock); ++d) prior[d] = 0.0f;
  const float lse = args.prior_lse[out_row];
  merge_partial(softmax, accumulator, {lse, lse == -INFINITY ? 0.0f : 1.0f}, prior, round_up(dim, kBlock));
}

// Writes the row of the result. Returns whether it is finite.
inline bool finish_row(const AttendArgs& args, Index query_head, OnlineSoftmax softmax, float* accumulator,
                       Index dim, Index out_row) {
  merge_prior(args, softmax, accumulator, dim, out_row);
  const FinalSoftmax last(args, query_head, softmax);
  const float scale = last.scale();
  if (args.lse) args.lse[out_row] = log_sum(last.softmax.max, last.softmax.sum);
  Vec differences{};  // x - x: 0 where x is finite, else NaN
  for (Index d = 0; d < round_up(dim, kBlock); d += kLanes) {
    const Vec x = load(accumulator + d) * scale;
    store(accumulator + d, x);
    differences += x - x;
  }
  write_floats(args.out, args.out_dtype, out_row * dim, accumulator, dim);
  return sum_lanes(differences) == 0.0f;
}

}  // namespace kvloom::KVLOOM_ISA
