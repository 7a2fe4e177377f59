// Frequencies for the kernels: integers whose multiples wrap at whole turns.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "kernels/attend/args.h"
#include "tensors.h"

namespace kvloom {

// An angle in 2^-64 of a turn; 0 of what is not finite.
inline uint64_t turns_of(double radians) {
  const double turns = radians * 0.15915494309189535;
  // Adding 1.5 * 2^52 leaves the nearest integer, where turns are few enough.
  const bool is_small = std::fabs(turns) < 0x1p51;
  const double part =
      turns - (is_small ? turns + 0x1.8p52 - 0x1.8p52 : std::nearbyint(turns));  // in [-1/2, 1/2]
  if (!std::isfinite(part)) return 0;
  return static_cast<uint64_t>(static_cast<int64_t>(part * 0x1p63)) << 1;
}

// Copies of frequencies [H, K].
struct Frequencies {
  int64_t num_pairs = 0;
  std::vector<double> radians;
  std::vector<uint64_t> turns;  // and kTurnsBehind more numbers

  void copy(const Tensor& from, int64_t num_heads) {
    const int32_t dtype = dtype_of(from);
    const bool is_double = dtype == aoti_torch_dtype_float64();
    require(
        from.dim() == 2 && from.size(0) == num_heads && (is_double || dtype == aoti_torch_dtype_float32()),
        "frequencies must be float64 or float32, [H, K]");
    num_pairs = from.size(1);
    require(num_pairs > 0 && num_pairs <= kMaxPairs, "frequencies must be of 1 to 64 pairs");
    radians.resize(num_heads * num_pairs);
    turns.resize(num_heads * num_pairs + kTurnsBehind);
    const int64_t head_stride = from.stride(0), stride = from.stride(1);
    const void* data = from.const_data_ptr();
    for (int64_t h = 0, i = 0; h < num_heads; ++h) {
      for (int64_t at = h * head_stride, last = i + num_pairs; i < last; ++i, at += stride) {
        radians[i] = is_double ? static_cast<const double*>(data)[at] : static_cast<const float*>(data)[at];
        turns[i] = turns_of(radians[i]);
      }
    }
  }
};

}  // namespace kvloom
