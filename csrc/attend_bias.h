// The numbers of a positional bias, copied once: frequencies, and the positions that sequences begin at.
#pragma once

#include <vector>

#include "turns.h"

namespace kvloom {

class AttendBias {
 public:
  void copy(const Tensor& frequencies, const MaybeTensor& first_position, int64_t num_heads,
            int64_t num_sequences) {
    frequencies_.copy(frequencies, num_heads);
    if (!first_position) return;
    const Integers first = integers_of(*first_position, 1, "first_position must be integers, [B]");
    require(first_position->size(0) == num_sequences, "first_position must have an entry for each sequence");
    first_position_ = first.copied(num_sequences);
    has_first_position_ = true;
  }

  int64_t num_pairs() const { return frequencies_.num_pairs; }

  // Points `bias` at the copies, which live as long as this object.
  void assign_to(PositionalBias& bias) const {
    bias.num_pairs = frequencies_.num_pairs;
    bias.frequencies = frequencies_.radians.data();
    bias.turns = frequencies_.turns.data();
    bias.first_position = has_first_position_ ? first_position_.data() : nullptr;
  }

 private:
  bool has_first_position_ = false;
  Frequencies frequencies_;
  std::vector<int64_t> first_position_;
};

}  // namespace kvloom
