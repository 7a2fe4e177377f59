// An arrangement as torch calls it: tensors into plain arguments.
#include "kernels.h"
#include "tensors.h"

namespace kvloom {
namespace {

// Bits of an infinity; more than any for dtypes that have none.
int64_t infinity_of(const Tensor& x) {
  switch (type_of(x)) {
    case DType::f32: return 0x7f800000;
    case DType::f16: return 0x7c00;
    case DType::bf16: return 0x7f80;
    default: return int64_t{1} << 31;
  }
}

bool arrange(const Tensor& x, int64_t rotary, bool to_adjacent, const Tensor& out) {
  ArrangeArgs args;
  require(x.dim() == 3 && out.dim() == 3, "x and out must have 3 dimensions");
  const auto sizes = x.sizes(), strides = x.strides(), out_sizes = out.sizes(), out_strides = out.strides();
  require(std::equal(sizes.begin(), sizes.end(), out_sizes.begin()) && dtype_of(x) == dtype_of(out),
          "out must have the shape and dtype of x");
  args.itemsize = static_cast<int64_t>(aoti_torch_dtype_element_size(dtype_of(x)));
  require(args.itemsize == 1 || args.itemsize == 2 || args.itemsize == 4, "x must have 1, 2 or 4 bytes");
  require(rotary >= 0 && rotary <= sizes[2] && rotary % 2 == 0, "rotary must be even and within a vector");
  require(!Span(x).meets(Span(out)), "out must lie before or after x");
  std::copy_n(sizes.begin(), 3, args.size);
  std::copy_n(strides.begin(), 3, args.from_stride);
  std::copy_n(out_strides.begin(), 3, args.to_stride);
  args.rotary = rotary, args.to_adjacent = to_adjacent;
  args.from = static_cast<const Byte*>(x.const_data_ptr());
  args.to = static_cast<Byte*>(out.mutable_data_ptr());
  return kernels().movement->arrange(args) < infinity_of(x);
}

STABLE_TORCH_LIBRARY_IMPL(kvloom, CPU, m) { m.impl("arrange", KVLOOM_BOX(&arrange)); }

}  // namespace
}  // namespace kvloom
