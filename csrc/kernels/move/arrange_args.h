// The arguments of an arrangement: raw pointers, sizes and strides. No tensors.
#pragma once

#include "../base/types.h"

namespace kvloom {

// Head vectors `[T, H, D]` become others of the same shape, which do not overlap them.
struct ArrangeArgs {
  const Byte* from = nullptr;
  Byte* to = nullptr;
  Index size[3] = {};                            // T, H, D
  Index from_stride[3] = {}, to_stride[3] = {};  // in elements
  Index itemsize = 0;                            // 1, 2 or 4
  Index rotary = 0;                              // the first elements of a vector, whose pairs change places
  bool to_adjacent = false;  // from pairs i and i + rotary / 2 to 2 i and 2 i + 1, or back
};

}  // namespace kvloom
