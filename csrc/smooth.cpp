// Smoothing as torch calls it: tensors into plain arguments, work spread over threads.
#include <cmath>
#include <tuple>

#include "kernels.h"
#include "tensors.h"
#include "turns.h"

namespace kvloom {
namespace {

constexpr int64_t kBytesPerThread = 64 << 10;  // less is not worth waking a thread
constexpr int64_t kMaxElements = 4096;         // of a head vector
constexpr int64_t kMaxHeads = 1 << 30;         // which of an empty tensor may be any number

// Contiguous numbers of a type, of so many heads.
const void* data_of(const Tensor& x, int64_t num_heads, int64_t count, int32_t dtype, const char* message) {
  require(dtype_of(x) == dtype && x.size(0) == num_heads && x.is_contiguous(), message);
  int64_t size = 1;
  for (const int64_t n : x.sizes()) size *= n;
  require(size == num_heads * count, message);
  return x.const_data_ptr();
}

// What keys and queries have in common; keeps copies as long as it lives. Positions may be any numbers, also
// if another thread changes them, so they are not copied.
class Smoothing {
 public:
  SmoothArgs args;

  void set_rows(const Tensor& x, const Tensor& factor, int64_t block) {
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
    num_heads_ = factor.dim() ? factor.size(0) : 0;
    const char* message = "factor or gain must be float32 [H, D], contiguous";
    require(factor.dim() == 2 && num_heads_ > 0 && num_heads_ <= kMaxHeads, message);
    args.factor = static_cast<const float*>(
        data_of(factor, num_heads_, args.head_dim, aoti_torch_dtype_float32(), message));
    args.from = static_cast<const Byte*>(x.const_data_ptr());
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

  // Where pairs are, by channels; after `set_offset`.
  void set_places() {
    const int64_t num_pairs = args.offset.num_pairs;
    if (num_pairs > kSecondPlace) return;  // no vector holds so many
    places_.assign(num_heads_ * args.head_dim, -1);
    for (int64_t i = 0; i < num_heads_ * num_pairs; ++i) {
      int32_t* of_head = places_.data() + i / num_pairs * args.head_dim;
      of_head[channels_[2 * i]] = static_cast<int32_t>(i % num_pairs);
      of_head[channels_[2 * i + 1]] = static_cast<int32_t>(i % num_pairs) + kSecondPlace;
    }
    args.offset.places = places_.data();
  }

  void set_positions(const Tensor& positions, const Tensor& frequencies, int64_t rank) {
    frequencies_.copy(frequencies, num_heads_);
    args.offset.turns = frequencies_.turns.data();
    const Integers tokens = integers_of(positions, rank, "positions must be int64 or int32, [B, N] or [T]");
    require(positions.size(0) == args.size[0] && (rank == 1 || positions.size(1) == args.size[2]),
            "positions must be one for each token");
    args.positions = {tokens.data, {positions.stride(0), tokens.stride}, tokens.is_64};
  }

  int64_t num_heads() const { return num_heads_; }
  int64_t num_pairs() const { return frequencies_.num_pairs; }

  void run() const {
    if (args.head_dim == 0 || std::count(args.size, args.size + 3, 0)) return;
    const int64_t tokens = args.size[0] * args.size[2];
    const int64_t bytes = args.size[1] * args.head_dim * (args.dtype == DType::f32 ? 4 : 2);
    const auto work = [&](int64_t begin, int64_t end) { kernels().smooth(args, begin, end); };
    if (bytes * tokens > kBytesPerThread) {
      torch::stable::parallel_for(0, tokens, std::max<int64_t>(1, kBytesPerThread / bytes), work);
    } else {
      work(0, tokens);
    }
  }

 private:
  int64_t num_heads_ = 0;
  Frequencies frequencies_;
  std::vector<int64_t> channels_;
  std::vector<float> numbers_;
  std::vector<int32_t> places_;
};

// The result has heads and tokens in the order of `x`.
Tensor empty_as(const Tensor& x, SmoothArgs& args) {
  const int32_t dtype = dtype_of(x);
  const auto& size = args.size;
  const int64_t width = args.head_dim;
  const bool by_token = x.dim() == 4 && size[2] > 1 && args.stride[1] < args.stride[2];
  checked_product({checked_product({size[0], size[1], size[2], width}, "the bytes of the result"), 16},
                  "the bytes of the result");
  const int64_t strides[4] = {size[1] * size[2] * width, by_token ? width : size[2] * width,
                              by_token ? size[1] * width : width, 1};
  std::copy(strides, strides + 3, args.to_stride);
  const int64_t sizes[4] = {size[0], size[1], size[2], width};
  const int64_t three[3] = {size[0], size[1], width}, three_strides[3] = {size[1] * width, width, 1};
  AtenTensorHandle handle = nullptr;
  const bool is_batch = x.dim() == 4;
  const bool is_made =
      aoti_torch_empty_strided(is_batch ? 4 : 3, is_batch ? sizes : three, is_batch ? strides : three_strides,
                               dtype, aoti_torch_device_type_cpu(), 0, &handle) == TORCH_SUCCESS;
  if (!is_made) throw std::bad_alloc();
  return Tensor(handle);
}

Tensor smooth(const Tensor& key, const MaybeTensor& positions, const Tensor& factor, const MaybeTensor& mean,
              const MaybeTensor& channels, const MaybeTensor& frequencies, int64_t block, bool is_restored) {
  Smoothing smoothing;
  SmoothArgs& args = smoothing.args;
  smoothing.set_rows(key, factor, block);
  require(args.size[1] == smoothing.num_heads(), "key must have the heads of factor");
  if (positions) {
    require(mean && channels && frequencies, "mean, channels and frequencies must be there with positions");
    smoothing.set_positions(*positions, *frequencies, key.dim() - 2);
    smoothing.set_offset(*mean, *channels, smoothing.num_pairs());
    smoothing.set_places();
  }
  args.is_restored = is_restored;
  Tensor out = empty_as(key, args);
  args.to = static_cast<Byte*>(out.mutable_data_ptr());
  smoothing.run();
  return out;
}

std::tuple<Tensor, Tensor> smooth_query(const Tensor& query, const Tensor& gain, const MaybeTensor& mean,
                                        const MaybeTensor& channels, int64_t block) {
  Smoothing smoothing;
  SmoothArgs& args = smoothing.args;
  require(query.dim() == 3, "query must have 3 dimensions");
  smoothing.set_rows(query, gain, block);
  const int64_t heads = smoothing.num_heads();
  require(args.size[1] % heads == 0, "query must have a multiple of the heads of gain");
  args.heads_per_head = std::max<int64_t>(args.size[1] / heads, 1);
  int64_t num_pairs = 0;
  if (mean) {
    require(bool(channels) && mean->dim() == 3, "mean must be [H, K, 2], with channels");
    num_pairs = mean->size(1);
    smoothing.set_offset(*mean, *channels, num_pairs);
  }
  Tensor out = empty_as(query, args);
  Tensor coefficients = empty_tokens(args.size[0], args.size[1], 2 * num_pairs, aoti_torch_dtype_float32());
  args.to = static_cast<Byte*>(out.mutable_data_ptr());
  if (num_pairs) args.coefficients = static_cast<float*>(coefficients.mutable_data_ptr());
  smoothing.run();
  return {out, coefficients};
}

STABLE_TORCH_LIBRARY_IMPL(kvloom, CPU, m) {
  m.impl("smooth", KVLOOM_BOX(&smooth));
  m.impl("smooth_query", KVLOOM_BOX(&smooth_query));
}

}  // namespace
}  // namespace kvloom
