// The numbers of a positional bias, copied once: frequencies, and the positions that sequences begin at.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "kernels/attend/args.h"
#include "tensors.h"

namespace kvloom {

class AttendBias {
 public:
  void copy(const Tensor& frequencies, const MaybeTensor& first_position, int64_t num_heads,
            int64_t num_sequences) {
    const int32_t dtype = dtype_of(frequencies);
    const bool is_double = dtype == aoti_torch_dtype_float64();
    require(frequencies.dim() == 2 && frequencies.size(0) == num_heads &&
                (is_double || dtype == aoti_torch_dtype_float32()),
            "frequencies must be float64 or float32, [H, K]");
    num_pairs_ = frequencies.size(1);
    require(num_pairs_ > 0 && num_pairs_ <= kMaxPairs, "frequencies must be of 1 to 64 pairs");
    frequencies_.resize(num_heads * num_pairs_);
    turns_.resize(num_heads * num_pairs_ + kTurnsBehind);
    const int64_t head_stride = frequencies.stride(0), stride = frequencies.stride(1);
    const void* data = frequencies.const_data_ptr();
    for (int64_t h = 0, i = 0; h < num_heads; ++h) {
      for (int64_t at = h * head_stride, last = i + num_pairs_; i < last; ++i, at += stride) {
        frequencies_[i] =
            is_double ? static_cast<const double*>(data)[at] : static_cast<const float*>(data)[at];
        turns_[i] = turns_of(frequencies_[i]);
      }
    }
    if (!first_position) return;
    const Integers first = integers_of(*first_position, 1, "first_position must be integers, [B]");
    require(first_position->size(0) == num_sequences, "first_position must have an entry for each sequence");
    first_position_ = first.copied(num_sequences);
    has_first_position_ = true;
  }

  int64_t num_pairs() const { return num_pairs_; }

  // Points `bias` at the copies, which live as long as this object.
  void assign_to(PositionalBias& bias) const {
    bias.num_pairs = num_pairs_;
    bias.frequencies = frequencies_.data();
    bias.turns = turns_.data();
    bias.first_position = has_first_position_ ? first_position_.data() : nullptr;
  }

 private:
  // An angle in 2^-64 of a turn, whose multiples wrap where turns do; 0 of what is not finite.
  static uint64_t turns_of(double radians) {
    const double turns = radians * 0.15915494309189535;
    const double part = turns - std::nearbyint(turns);  // in [-1/2, 1/2]
    if (!std::isfinite(part)) return 0;
    return static_cast<uint64_t>(static_cast<int64_t>(part * 0x1p63)) << 1;
  }

  int64_t num_pairs_ = 0;
  bool has_first_position_ = false;
  std::vector<double> frequencies_;
  std::vector<uint64_t> turns_;
  std::vector<int64_t> first_position_;
};

}  // namespace kvloom
