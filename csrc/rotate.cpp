// Rotation as torch calls it: a tensor into plain arguments, work spread over threads.
#include <cmath>

#include "kernels.h"
#include "tensors.h"

namespace kvloom {
namespace {

constexpr int64_t kBytesPerThread = 64 << 10;  // less is not worth waking a thread

Tensor rotate(const Tensor& x, int64_t block) {
  RotateArgs args;
  const auto sizes = x.sizes(), strides = x.strides();
  const int64_t rank = x.dim();
  require(rank == 3 || rank == 4, "x must have 3 or 4 dimensions");
  require(sizes[rank - 1] <= 1 || strides[rank - 1] == 1, "x must be contiguous along the last dimension");
  args.dtype = type_of(x), args.head_dim = sizes[rank - 1], args.block = block;
  require(args.dtype != DType::bits, "x must be float32, float16 or bfloat16");
  require(block >= 1 && block <= kMaxRotated && (block & (block - 1)) == 0 && args.head_dim % block == 0,
          "block must be a power of two of at most 1024 that divides the last dimension");
  args.root = static_cast<float>(std::sqrt(static_cast<double>(block)));
  int64_t rows = 1;
  for (int64_t i = 0; i + 1 < rank; ++i) {
    args.size[4 - rank + i] = sizes[i];
    args.stride[4 - rank + i] = strides[i];
    rows *= sizes[i];
  }
  const int32_t dtype = dtype_of(x);
  Tensor out = rank == 3 ? empty_tokens(sizes[0], sizes[1], sizes[2], dtype)
                         : empty_contiguous(std::array{sizes[0], sizes[1], sizes[2], sizes[3]}, dtype);
  args.from = static_cast<const Byte*>(x.const_data_ptr());
  args.to = static_cast<Byte*>(out.mutable_data_ptr());
  const int64_t bytes = args.head_dim * static_cast<int64_t>(aoti_torch_dtype_element_size(dtype));
  const auto work = [&](int64_t begin, int64_t end) { kernels().movement->rotate(args, begin, end); };
  if (bytes * rows > kBytesPerThread) {
    torch::stable::parallel_for(0, rows, std::max<int64_t>(1, kBytesPerThread / bytes), work);
  } else if (bytes * rows > 0) {
    work(0, rows);
  }
  return out;
}

STABLE_TORCH_LIBRARY_IMPL(kvloom, CPU, m) { m.impl("rotate", KVLOOM_BOX(&rotate)); }

}  // namespace
}  // namespace kvloom
