// Shared by store and smoothing: tensors that say how rows are smoothed, into plain arguments.
#pragma once

#include <cmath>
#include <vector>

#include "kernels/move/rotate_args.h"
#include "kernels/move/smooth_args.h"
#include "tensors.h"
#include "turns.h"

namespace kvloom {

constexpr int64_t kMaxElements = 4096;  // of a head vector
constexpr int64_t kMaxHeads = 1 << 30;  // which of an empty tensor may be any number

// Contiguous numbers of a type, of so many heads.
inline const void* data_of(const Tensor& x, int64_t num_heads, int64_t count, int32_t dtype,
                           const char* message) {
  require(dtype_of(x) == dtype && x.size(0) == num_heads && x.is_contiguous(), message);
  int64_t size = 1;
  for (const int64_t n : x.sizes()) size *= n;
  require(size == num_heads * count, message);
  return x.const_data_ptr();
}

// Arguments of smoothing, and the copies that they point to. Positions may be any numbers, also
// if another thread changes them, so they are not copied.
class Smoothing {
 public:
  SmoothArgs args;

  // Keys of tokens at `positions`, smoothed or restored.
  void set_keys(const Tensor& key, const MaybeTensor& positions, const Tensor& factor,
                const MaybeTensor& mean, const MaybeTensor& channels, const MaybeTensor& frequencies,
                int64_t block) {
    set_rows(key, factor, block);
    require(args.size[1] == num_heads_, "key must have the heads of factor");
    if (!positions) return;
    require(mean && channels && frequencies, "mean, channels and frequencies must be there with positions");
    set_positions(*positions, *frequencies, key.dim() - 2);
    set_offset(*mean, *channels, frequencies_.num_pairs);
    set_places();
  }

  // Rows that are rotated and nothing else.
  void set_rotated(const Tensor& x, int64_t block) {
    set_sizes(x, block);
    ones_.assign(args.head_dim + 1, 1.0f);  // of any head; never empty
    args.factor = ones_.data();
  }

  void set_rows(const Tensor& x, const Tensor& factor, int64_t block) {
    set_sizes(x, block);
    num_heads_ = factor.dim() ? factor.size(0) : 0;
    const char* message = "factor or gain must be float32 [H, D], contiguous";
    require(factor.dim() == 2 && num_heads_ > 0 && num_heads_ <= kMaxHeads, message);
    args.factor = static_cast<const float*>(
        data_of(factor, num_heads_, args.head_dim, aoti_torch_dtype_float32(), message));
    args.factor_stride = args.head_dim;
  }

  void set_offset(const Tensor& mean, const Tensor& channels, int64_t num_pairs) {
    const char* message = "mean and channels must be float32 and int64 [H, K, 2], contiguous";
    require(num_pairs > 0 && num_pairs <= kMaxPairs, "mean must be of 1 to 64 pairs");
    args.offset.num_pairs = num_pairs;
    const auto* numbers = static_cast<const float*>(
        data_of(mean, num_heads_, 2 * num_pairs, aoti_torch_dtype_float32(), message));
    const auto* from = static_cast<const int64_t*>(
        data_of(channels, num_heads_, 2 * num_pairs, aoti_torch_dtype_int64(), message));
    const int64_t count = num_heads_ * num_pairs;
    channels_.assign(from, from + 2 * count);
    for (const int64_t channel : channels_)
      require(channel >= 0 && channel < args.head_dim, "channels must be in the head dim");
    args.offset.channels = channels_.data();
    numbers_.resize(2 * (count + kTurnsBehind));
    float *first = numbers_.data(), *second = first + count + kTurnsBehind;
    for (int64_t i = 0; i < count; ++i) first[i] = numbers[2 * i], second[i] = numbers[2 * i + 1];
    args.offset.first = first, args.offset.second = second;
  }

  // Arguments to change the rows of `x`, from which they were set, in place; none if they were not set.
  const SmoothArgs* in_place(Tensor& x) {
    if (!args.factor) return nullptr;
    args.to = static_cast<Byte*>(x.mutable_data_ptr());
    std::copy(args.stride, args.stride + 3, args.to_stride);
    return &args;
  }

  int64_t num_heads() const { return num_heads_; }

 private:
  // Sizes of rows, and what does not depend on heads.
  void set_sizes(const Tensor& x, int64_t block) {
    const auto sizes = x.sizes(), strides = x.strides();
    const int64_t rank = x.dim();
    require(rank == 3 || rank == 4, "key must have 3 or 4 dimensions");
    args.head_dim = sizes[rank - 1], args.dtype = type_of(x), args.block = block;
    require(args.head_dim <= 1 || strides[rank - 1] == 1,
            "key or query must be contiguous along the last dimension");
    require(args.dtype != DType::bits, "key or query must be float32, float16 or bfloat16");
    require(args.head_dim <= kMaxElements, "key or query must have head vectors of at most 4096 elements");
    require(block == 0 || (block >= 1 && block <= kMaxRotated && (block & (block - 1)) == 0 &&
                           args.head_dim % block == 0),
            "block must be 0, or a power of two of at most 1024 that divides the last dimension");
    args.root = static_cast<float>(std::sqrt(static_cast<double>(block)));
    for (int64_t i = 0; i + 1 < rank; ++i) args.size[i] = sizes[i], args.stride[i] = strides[i];
    args.from = static_cast<const Byte*>(x.const_data_ptr());
  }

  // Sets the place of each pair, by channels; after `set_offset`.
  void set_places() {
    const int64_t num_pairs = args.offset.num_pairs;
    if (num_pairs > kMaxPlaces) return;  // no vector holds so many
    const int64_t count = num_heads_ * args.head_dim;
    places_.assign(2 * count, 0);
    int32_t *places = places_.data(), *masks = places + count;
    for (int64_t i = 0; i < num_heads_ * num_pairs; ++i) {
      const int64_t of_head = i / num_pairs * args.head_dim;
      const auto pair = static_cast<int32_t>(i % num_pairs);
      const int64_t first = of_head + channels_[2 * i], second = of_head + channels_[2 * i + 1];
      places[first] = pair;
      places[second] = pair | kSecondPlace;
      masks[first] = masks[second] = -1;
    }
    args.offset.places = places, args.offset.masks = masks;
  }

  void set_positions(const Tensor& positions, const Tensor& frequencies, int64_t rank) {
    frequencies_.copy(frequencies, num_heads_);
    args.offset.turns = frequencies_.turns.data();
    const Integers tokens = integers_of(positions, rank, "positions must be int64 or int32, [B, N] or [T]");
    require(positions.size(0) == args.size[0] && (rank == 1 || positions.size(1) == args.size[2]),
            "positions must be one for each token");
    args.positions = {tokens.data, {positions.stride(0), tokens.stride}, tokens.is_64};
  }

  int64_t num_heads_ = 0;
  Frequencies frequencies_;
  std::vector<int64_t> channels_;
  std::vector<float> numbers_, ones_;
  std::vector<int32_t> places_;
};

}  // namespace kvloom
