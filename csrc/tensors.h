// What the bindings share: tensors through torch's stable ABI.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <stdexcept>

namespace kvloom {

using torch::stable::Tensor;
using MaybeTensor = std::optional<Tensor>;

/// Python has checked what it is given and says it better; this keeps a direct call within its tensors.
inline void require(bool fits, const char* otherwise) {
  if (!fits) throw std::invalid_argument(otherwise);
}

inline int32_t dtype_of(const Tensor& x) {
  int32_t dtype = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(x.get(), &dtype));
  return dtype;
}

/// `[rows, heads, width]`, contiguous.
inline Tensor empty_tokens(int64_t rows, int64_t heads, int64_t width, int32_t dtype) {
  const int64_t sizes[3] = {rows, heads, width}, strides[3] = {heads * width, width, 1};
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(
      aoti_torch_empty_strided(3, sizes, strides, dtype, aoti_torch_device_type_cpu(), 0, &handle));
  return Tensor(handle);
}

}  // namespace kvloom
