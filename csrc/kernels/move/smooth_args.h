// The arguments of smoothing: raw pointers, sizes and strides. No tensors.
#pragma once

#include "../base/types.h"

namespace kvloom {

constexpr int32_t kSecondPlace = 16;  // from which on a place is that of a second channel

// A vector of each head that turns with the position in some pairs of channels; no pairs for none. Arrays
// [H, K] have kTurnsBehind more numbers.
struct KeyOffset {
  Index num_pairs = 0;
  const float *first = nullptr, *second = nullptr;  // [H, K], the vector at position 0 in each pair
  const int64_t* channels = nullptr;                // [H, K, 2]
  const uint64_t* turns = nullptr;                  // [H, K] in 2^-64 of a turn
  const int32_t* places = nullptr;  // [H, D], the pair of a channel, kSecondPlace more of a second one; or -1
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
  Index head_dim = 0, heads_per_head = 1;                        // query heads of a head
  Index block = 0;  // the power of two that is rotated together; 0 for no rotation
  float root = 1;   // of block
  DType dtype = DType::f32;
  bool is_restored = false;       // keys as they were
  const float* factor = nullptr;  // [H, D]
  Positions positions;
  float* coefficients = nullptr;  // of queries: [T, Hq, 2K]
  KeyOffset offset;
};

}  // namespace kvloom
