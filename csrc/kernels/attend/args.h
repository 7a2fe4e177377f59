// The arguments of attention: pointers, sizes and strides, and no tensors.
//
// Letters: B sequences or blocks, S slots in a block, H key/value heads, D head dim, P pages of a sequence.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvloom {

constexpr std::int64_t kMaxHeadDim = 576;  // bounds what the kernels keep on the stack

enum class DType : std::int32_t { f32, f16, bf16, int8, int4 };

// A canonical view [B, S/s, s, H, D/d, d] of keys, values or scales. Sizes and strides count stored elements:
// of int4 these are bytes of two codes, the even element in the low nibble, two's complement.
struct CacheView {
  const void* data;
  std::int64_t size[6];
  std::int64_t stride[6];
  DType dtype;
};

// Keys or values: x = code * scale where there are scales, whose group is D / (their last two sizes).
struct CacheSide {
  CacheView cache;
  CacheView scale;  // data is null where the cache holds floats
};

// slot(b, t) = entries[rows[b] + t / page_size] + t % page_size.
struct PageTable {
  const std::int64_t* entries;
  const std::int64_t* rows;
  std::int64_t page_size;
};

// A strided array of floats, or none where data is null.
struct FloatArray {
  const void* data;
  std::int64_t stride[3];
  DType dtype;
};

struct AttendArgs {
  const void* query;  // [Tq, Hq, Dk]
  std::int64_t query_stride[3];
  DType query_dtype;
  void* out;  // [Tq, Hq, Dv], contiguous, dtype of the query
  std::int64_t num_heads;  // Hq

  CacheSide key;
  CacheSide value;
  PageTable table;

  std::int64_t num_sequences;
  const std::int64_t* seqstarts;      // new tokens of sequence b are rows seqstarts[b] : seqstarts[b + 1]
  const std::int64_t* kvstarts;       // of its kvstarts[b + 1] - kvstarts[b] tokens the new ones come last
  const std::int64_t* first_visible;  // stored tokens before this one are hidden; none if null
  std::int64_t decoding_batches;

  float scale;
  bool is_causal;
  std::int64_t window;  // keys that a query sees, itself included; 0 for all
  float softcap;        // 0 for none
  FloatArray mask;      // [Hq, Tq, Tkv], stride 0 over heads where it has none
  FloatArray alibi_slopes;  // [Hq]
  FloatArray sinks;         // [Hq]

  std::int64_t num_threads;  // that will run the items; no result depends on it
};

// Work of one call. Items are independent of each other; merges are, once every item is done.
struct AttendPlan {
  std::int64_t num_items;
  std::int64_t num_merges;
  std::size_t workspace_bytes;
};

}  // namespace kvloom
