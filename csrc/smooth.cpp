// Smoothing as torch calls it: tensors into plain arguments, work spread over threads.
#include <tuple>

#include "kernels.h"
#include "smoothing.h"

namespace kvloom {
namespace {

constexpr int64_t kBytesPerThread = 64 << 10;  // less is not worth waking a thread

void run(const SmoothArgs& args) {
  if (args.head_dim == 0 || std::count(args.size, args.size + 3, 0)) return;
  const int64_t tokens = args.size[0] * args.size[2];
  const int64_t bytes = args.size[1] * args.head_dim * (args.dtype == DType::f32 ? 4 : 2);
  const auto work = [&](int64_t begin, int64_t end) { kernels().movement->smooth(args, begin, end); };
  if (bytes * tokens > kBytesPerThread) {
    torch::stable::parallel_for(0, tokens, std::max<int64_t>(1, kBytesPerThread / bytes), work);
  } else {
    work(0, tokens);
  }
}

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
  smoothing.set_keys(key, positions, factor, mean, channels, frequencies, block);
  args.is_restored = is_restored;
  Tensor out = empty_as(key, args);
  args.to = static_cast<Byte*>(out.mutable_data_ptr());
  run(args);
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
  run(args);
  return {out, coefficients};
}

STABLE_TORCH_LIBRARY_IMPL(kvloom, CPU, m) {
  m.impl("smooth", KVLOOM_BOX(&smooth));
  m.impl("smooth_query", KVLOOM_BOX(&smooth_query));
}

}  // namespace
}  // namespace kvloom
