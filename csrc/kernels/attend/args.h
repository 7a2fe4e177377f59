// The arguments of attention: pointers, sizes and strides, and no tensors.
//
// Shapes: B sequences or blocks, S slots in a block, H key/value heads, D head dim, P pages of a sequence.
#pragma once

#include "../base/slots.h"
#include "../base/views.h"

namespace kvloom {

constexpr Index kMaxHeadDim = 576;  // bounds what the kernels keep on the stack
constexpr Index kMaxPairs = 64;     // of a positional bias, as well
constexpr Index kTurnsBehind = 64;  // numbers that may be read after its last frequency

// Keys or values: x = code * scale where there are scales, whose group is D / (their last two sizes).
struct CacheSide {
  View cache;
  View scale;  // data is null where the cache holds floats
};

// A strided array of floats, or none where data is null.
struct FloatArray {
  const void* data;
  Index stride[3];
  DType dtype;
};

// A bias of each product of a query and a key: K cosines and K sines of the position of the key, whose
// frequencies are those of the key/value head.
struct PositionalBias {
  FloatArray coefficients;      // [Tq, Hq, 2K], of the cosines, then of the sines
  Index num_pairs;              // K
  const double* frequencies;    // [H, K], radians from one position to the next
  const uint64_t* turns;        // [H, K], the same in 2^-64 of a turn, and kTurnsBehind more numbers
  const Index* first_position;  // of token 0 of each sequence; 0 if null
};

struct AttendArgs {
  const void* query;  // [Tq, Hq, Dk]
  Index query_stride[3];
  DType query_dtype;
  void* out;        // [Tq, Hq, Dv], contiguous
  DType out_dtype;  // that of the query, or float32 of a part
  Index num_heads;  // Hq

  CacheSide key;
  CacheSide value;
  CacheSide rope;  // rope keys beside latents in `key`; data is null for none
  PageTable table;

  Index num_sequences;
  const Index* seqstarts;      // new tokens of sequence b are rows seqstarts[b] : seqstarts[b + 1]
  const Index* kvstarts;       // of its kvstarts[b + 1] - kvstarts[b] tokens the new ones come last
  const Index* first_visible;  // stored tokens before this one are hidden; none if null
  Index decoding_batches;

  float scale;
  bool is_causal;
  Index window;             // keys that a query sees, itself included; 0 for all
  float softcap;            // 0 for none
  FloatArray mask;          // [Hq, Tq, Tkv], stride 0 over heads where it has none
  FloatArray alibi_slopes;  // [Hq]
  FloatArray sinks;         // [Hq]
  PositionalBias bias;      // of no coefficients for none

  // A part of an attention: the logarithms of the sums of its weights, and an earlier part that is merged in.
  float* lse;              // [Tq, Hq], null of a whole attention
  const float* prior;      // [Tq, Hq, Dv], null for none
  const float* prior_lse;  // [Tq, Hq]
  Index skip;              // last tokens that a query leaves out, itself included; 0 for none
  const Index* skip_from;  // of sequence b only those from this one on are left out; null for all

  Index num_threads;      // that will run the items; no result depends on it
  bool prefetches_to_l2;  // stored keys and values, and not to the first-level cache
  bool in_tiles;          // prompts run in tiles of their own, as far as attend_in_tiles allows
};

// Work of one call. Items are independent of each other; merges are, once every item is done.
struct AttendPlan {
  Index num_items;
  Index num_merges;
  size_t workspace_bytes;
};

}  // namespace kvloom
