// The arguments of a rotation: raw pointers, sizes and strides. No tensors.
#pragma once

#include "../base/types.h"

namespace kvloom {

constexpr Index kMaxRotated = 1024;  // elements that one matrix rotates together

// Rows of `head_dim` elements: of three axes, the last one the fastest; those of the result are contiguous.
struct RotateArgs {
  const Byte* from = nullptr;
  Byte* to = nullptr;
  Index size[3] = {1, 1, 1}, stride[3] = {};  // in elements
  Index head_dim = 0, block = 0;              // the power of two that is rotated together
  float root = 1;                             // of block
  DType dtype = DType::f32;
};

}  // namespace kvloom
