// The arguments of smoothing: raw pointers, sizes and strides. No tensors.
#pragma once

#include "../base/types.h"

namespace kvloom {

constexpr Index kMaxPlaces = 16;                  // pairs of a head that have places
constexpr int32_t kSecondPlace = INT32_MIN | 16;  // in the place of a second channel

// A vector of each head that is rotated by the position in some pairs of channels; no pairs for none. Arrays
// [H, K] have kTurnsBehind more numbers.
struct KeyOffset {
  Index num_pairs = 0;
  const float *first = nullptr, *second = nullptr;  // [H, K], the vector at position 0 in each pair
  const int64_t* channels = nullptr;                // [H, K, 2]
  const uint64_t* turns = nullptr;                  // [H, K] in 2^-64 of a turn
  const int32_t* places = nullptr;  // [H, D], the pair of a channel, of a second one with kSecondPlace
  const int32_t* masks = nullptr;   // [H, D], -1 of a channel that is in a pair, otherwise 0
};

// A position of each token, int64 or int32; none for keys without an offset.
struct Positions {
  const void* data = nullptr;
  Index stride[2] = {};  // of sequences and tokens, in elements
  bool is_64 = true;

  KVLOOM_INLINE int64_t at(Index b, Index n) const {
    const Index i = b * stride[0] + n * stride[1];
    return is_64 ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
  }
};

// Rows of `head_dim` elements, of three axes: sequences, heads and tokens.
struct SmoothArgs {
  const Byte* from = nullptr;
  Byte* to = nullptr;
  Index size[3] = {1, 1, 1}, stride[3] = {}, to_stride[3] = {};  // in elements
  Index to_first = 0;                                            // element of the result that is at `to`
  Index prefetch = 0;                      // elements from what is read to what is prefetched; 0 for nothing
  Index head_dim = 0, heads_per_head = 1;  // query heads of a head
  Index block = 0;                         // the power of two that is rotated together; 0 for no rotation
  float root = 1;                          // of block
  DType dtype = DType::f32;
  bool is_restored = false;       // whether smoothing is undone
  const float* factor = nullptr;  // [H, D], with `factor_stride` between heads
  Index factor_stride = 0;
  Positions positions;
  float* coefficients = nullptr;  // of queries: [T, Hq, 2K]
  KeyOffset offset;

  // From a token to the next one, of other sequences where each has one.
  KVLOOM_INLINE Index token_stride() const { return stride[size[2] > 1 ? 2 : 0]; }
};

}  // namespace kvloom
