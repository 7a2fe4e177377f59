// The slow path of a row whose result is not finite: a NaN or infinite value makes the result NaN where its
// weight is not 0, and has no effect where it is.
#pragma once

#include "plan.h"
#include "positional.h"
#include "softmax.h"
#include "two_bits.h"
#include "wide.h"

namespace kvloom::KVLOOM_ISA {

class NonFiniteRow {
 public:
  NonFiniteRow(const AttendArgs& args, const SequencePlan& plan, Index b)
      : args_(args),
        plan_(plan),
        key_(args.key, NativeOrder::none),
        value_(args.value, NativeOrder::none),
        rope_(has_rope(args) ? args.rope : args.key, NativeOrder::none),
        slots_(args.table, b),
        sequence_(b) {}

  void compute(Index new_token, Index query_head, const ScoreRow& row) {
    const Index query_row = plan_.first_row + new_token,
                head = query_head / (args_.num_heads / key_.cache.num_heads());
    query_row_ = query_row, query_head_ = query_head;
    const Index stride = args_.query_stride[2];
    const Index first = query_row * args_.query_stride[0] + query_head * args_.query_stride[1];
    read_floats(args_.query, args_.query_dtype, first, stride, query_,
                key_.dim + (has_rope(args_) ? rope_.dim : 0));
    float max_score =
        args_.sinks.data ? read_float(args_.sinks.data, args_.sinks.dtype, query_head * args_.sinks.stride[0])
                         : -INFINITY;
    const float sink = max_score;
    const Index out_row = query_row * args_.num_heads + query_head;
    const float* prior = args_.prior ? args_.prior + out_row * value_.dim : nullptr;
    const float prior_lse = prior ? args_.prior_lse[out_row] : -INFINITY;
    bool broken = prior_lse != prior_lse || prior_lse == INFINITY;
    max_score = prior_lse > max_score ? prior_lse : max_score;
    for (Index t = row.visible.begin; t < row.visible.end; ++t) {
      const float x = score(row, t, head);
      broken |= x != x || x == INFINITY;
      max_score = x > max_score ? x : max_score;
    }
    double sum = args_.sinks.data ? std::exp(double{sink} - finite_max(max_score)) : 0.0;
    for (Index d = 0; d < value_.dim; ++d) total_[d] = 0.0, is_nan_[d] = broken;
    const float prior_weight = prior ? std::exp(prior_lse - finite_max(max_score)) : 0.0f;
    sum += prior_weight;
    if (prior_weight != 0.0f) add(prior, prior_weight);
    for (Index t = row.visible.begin; !broken && t < row.visible.end; ++t) {
      const float weight = std::exp(score(row, t, head) - finite_max(max_score));
      sum += weight;
      if (weight == 0.0f) continue;
      read_row(value_, t, head, row_);
      add(row_, weight);
    }
    for (Index d = 0; d < value_.dim; ++d)
      row_[d] = is_nan_[d] ? NAN : sum == 0.0 ? 0.0f : static_cast<float>(total_[d] / sum);
    if (args_.lse) args_.lse[out_row] = broken ? NAN : log_sum(max_score, sum);
    write_floats(args_.out, args_.out_dtype, out_row * value_.dim, row_, value_.dim);
  }

 private:
  void add(const float* row, float weight) {
    for (Index d = 0; d < value_.dim; ++d) {
      const bool bad = row[d] - row[d] != 0.0f;
      is_nan_[d] |= bad;
      total_[d] += bad ? 0.0 : double{weight} * row[d];
    }
  }

  float score(const ScoreRow& row, Index t, Index head) {
    read_row(key_, t, head, row_);
    float x = 0.0f;
    for (Index d = 0; d < key_.dim; ++d) x += query_[d] * row_[d];
    if (has_rope(args_)) {
      read_row(rope_, t, head, row_);
      for (Index d = 0; d < rope_.dim; ++d) x += query_[key_.dim + d] * row_[d];
    }
    if (has_bias(args_))
      x += bias_of(args_.bias, query_row_, query_head_, head, position_of(args_.bias, sequence_, t));
    x *= args_.scale;
    if (args_.softcap > 0.0f) x = args_.softcap * std::tanh(x / args_.softcap);
    if (args_.mask.data)
      x += read_float(args_.mask.data, args_.mask.dtype, row.mask_row + t * args_.mask.stride[2]);
    if (args_.alibi_slopes.data) x += row.slope * static_cast<float>(t - row.position);
    return x;
  }

  void read_row(const SideLayout& side, Index token, Index head, float* out) {
    ChunkAddresses address;
    address.find(slots_, side, head, token, 1);
    const Byte* scales = address.scale[address.begin];
    if (side.scale.data) scales = copy_row(side.scale, scales, scales_);
    const Byte* codes = copy_row(side.cache, address.row[address.begin], cells_);
    if (side.is_expanded) expand_row(codes, side.stored_bytes, expanded_), codes = expanded_;
    widen_row(side, codes, scales, args_.query_dtype, out);
  }

  const AttendArgs& args_;
  const SequencePlan& plan_;
  SideLayout key_, value_, rope_;
  TokenSlots slots_;
  Index sequence_, query_row_ = 0, query_head_ = 0;
  float query_[2 * kMaxHeadDim], row_[kMaxHeadDim];
  alignas(4) Byte cells_[4 * kMaxHeadDim], scales_[4 * kMaxHeadDim], expanded_[kMaxHeadDim];
  double total_[kMaxHeadDim];
  bool is_nan_[kMaxHeadDim];
};

}  // namespace kvloom::KVLOOM_ISA
