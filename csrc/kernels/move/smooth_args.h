// The arguments of smoothing: raw pointers, sizes and strides. No tensors.
#pragma once

#include "../base/types.h"

namespace kvloom {

// A vector of each head that turns with the position in some pairs of channels; no pairs for none.
struct KeyOffset {
  Index num_pairs = 0;
  const float* mean = nullptr;        // [H, K, 2]
  const int64_t* channels = nullptr;  // [H, K, 2]
  const uint64_t* turns = nullptr;    // [H, K] in 2^-64 of a turn, and kTurnsBehind more numbers
};

// Rows of `head_dim` elements: of three axes, of which `head_axis` counts heads.
struct SmoothArgs {
  const Byte* from = nullptr;
  Byte* to = nullptr;
  Index size[3] = {1, 1, 1}, stride[3] = {}, to_stride[3] = {};  // in elements
  Index head_dim = 0, head_axis = 1, heads_per_head = 1;         // query heads of a head
  Index block = 0;  // the power of two that is rotated together; 0 for no rotation
  float root = 1;   // of block
  DType dtype = DType::f32;
  bool is_restored = false;            // keys as they were
  const float* factor = nullptr;       // [H, D]
  const int64_t* positions = nullptr;  // of the rows of one head, in order; of keys
  float* coefficients = nullptr;       // of queries: [rows, 2K]
  KeyOffset offset;
};

}  // namespace kvloom
