// Shared by the bindings: tensors through torch's stable ABI.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels/base/views.h"
#include "refusals.h"

namespace kvloom {

using torch::stable::Tensor;
using MaybeTensor = std::optional<Tensor>;

// Keeps a direct call of the operator within its tensors. Python repeats a refused check, with more words.
inline void require(bool fits, const char* message) {
  if (!fits) throw std::invalid_argument(message);
}

inline int32_t dtype_of(const Tensor& x) {
  int32_t dtype = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(x.get(), &dtype));
  return dtype;
}

// The product; where it does not fit 64 bits, a ShapeError.
template <class Factors = std::initializer_list<int64_t>>
int64_t checked_product(const Factors& factors, const char* what) {
  int64_t product = 1;
  for (const int64_t factor : factors) {
    if (__builtin_mul_overflow(product, factor, &product)) {
      throw std::out_of_range(std::string(what) + " must fit 64 bits");
    }
  }
  return product;
}

// Refuses sizes whose bytes, of the largest elements there are, do not fit 64 bits.
template <class Sizes>
void check_sizes(const Sizes& sizes, const char* what) {
  checked_product({checked_product(sizes, what), 16}, what);
}

constexpr int64_t kMaxIntegers = int64_t{1} << 40;  // an expanded tensor may have any number

// A strided array of integers in a tensor's memory, which another thread may change at any time.
struct Integers {
  const void* data = nullptr;
  int64_t stride = 0;
  bool is_64 = true;

  int64_t operator[](int64_t i) const {
    return is_64 ? static_cast<const int64_t*>(data)[i * stride]
                 : static_cast<const int32_t*>(data)[i * stride];
  }

  // A copy of the first `count`, so that the values that are checked are those that are used.
  std::vector<int64_t> copied(int64_t count) const {
    if (count >= kMaxIntegers) throw std::out_of_range("integers must be fewer than 2^40 in one tensor");
    std::vector<int64_t> copy(count);
    for (int64_t i = 0; i < count; ++i) copy[i] = (*this)[i];
    return copy;
  }
};

// Integers along the last dimension of a tensor. The only definition of which dtypes are integers.
inline Integers integers_of(const Tensor& x, int64_t rank, const char* message) {
  const int32_t dtype = dtype_of(x);
  const bool is_64 = dtype == aoti_torch_dtype_int64();
  require(x.dim() == rank && (is_64 || dtype == aoti_torch_dtype_int32()), message);
  return {x.const_data_ptr(), x.stride(rank - 1), is_64};
}

// All slots of `[T]`, or of a contiguous `[B, N]` row by row.
inline Integers slots_of(const Tensor& x) {
  if (x.dim() != 2) return integers_of(x, 1, "slots must be int64 or int32, [T]");
  Integers slots = integers_of(x, 2, "slots must be int64 or int32, [B, N]");
  require(x.is_contiguous(), "slots [B, N] must be contiguous");
  slots.stride = 1;
  return slots;
}

template <size_t kRank>
Tensor empty_contiguous(const std::array<int64_t, kRank>& sizes, int32_t dtype) {
  check_sizes(sizes, "the bytes of the result");
  std::array<int64_t, kRank> strides;
  int64_t stride = 1;
  for (size_t i = kRank; i-- > 0; stride *= sizes[i]) strides[i] = stride;
  AtenTensorHandle handle = nullptr;
  const bool is_made = aoti_torch_empty_strided(kRank, sizes.data(), strides.data(), dtype,
                                                aoti_torch_device_type_cpu(), 0, &handle) == TORCH_SUCCESS;
  if (!is_made) throw std::bad_alloc();
  return Tensor(handle);
}

// `[rows, heads, width]`, contiguous.
inline Tensor empty_tokens(int64_t rows, int64_t heads, int64_t width, int32_t dtype) {
  return empty_contiguous(std::array{rows, heads, width}, dtype);
}

// `[rows, heads]`, contiguous.
inline Tensor empty_heads(int64_t rows, int64_t heads, int32_t dtype) {
  return empty_contiguous(std::array{rows, heads}, dtype);
}

// Addresses from the first byte of a tensor to after its last.
struct Span {
  explicit Span(const Tensor& x) : begin(static_cast<const Byte*>(x.const_data_ptr())), end(begin) {
    const auto sizes = x.sizes(), strides = x.strides();
    int64_t last = 0;
    for (size_t i = 0; i < sizes.size(); ++i) {
      if (sizes[i] == 0) return;
      last += (sizes[i] - 1) * strides[i];
    }
    end += (last + 1) * static_cast<int64_t>(aoti_torch_dtype_element_size(dtype_of(x)));
  }
  bool meets(const Span& other) const { return begin < other.end && other.begin < end; }

  const Byte *begin, *end;
};

// `DType::bits` for dtypes that values are not cast from or to.
inline DType type_of(const Tensor& x) {
  const int32_t dtype = dtype_of(x);
  if (dtype == aoti_torch_dtype_float32()) return DType::f32;
  if (dtype == aoti_torch_dtype_float16()) return DType::f16;
  if (dtype == aoti_torch_dtype_bfloat16()) return DType::bf16;
  return DType::bits;
}

// A view without sizes and strides.
inline View base_view(const Tensor& x, const void* data) {
  View view;
  view.data = static_cast<Byte*>(const_cast<void*>(data));
  view.itemsize = static_cast<int64_t>(aoti_torch_dtype_element_size(dtype_of(x)));
  view.dtype = type_of(x);
  return view;
}

// Kind of the codes of a dtype; `DType::bits` if there are no such codes.
inline DType codes_of(int32_t dtype) {
  if (dtype == aoti_torch_dtype_int8()) return DType::int8;
  if (dtype == aoti_torch_dtype_uint8()) return DType::int4;
  if (dtype == static_cast<int32_t>(torch::headeronly::ScalarType::Bits2x4)) return DType::int2;
  return DType::bits;
}

// A canonical view [B, S/s, s, H, D/d, d]; the dtype tells codes apart.
inline View view_of(const Tensor& x, const void* data, bool has_scale) {
  require(x.dim() == 6, "a canonical view must have 6 dimensions");
  View view = base_view(x, data);
  const auto sizes = x.sizes(), strides = x.strides();
  check_sizes(sizes, "the bytes of a canonical view");
  for (size_t i = 0; i < 6; ++i) {
    view.size[i] = sizes[i];
    view.stride[i] = strides[i];
  }
  if (has_scale) {
    view.dtype = codes_of(dtype_of(x));
    require(is_quantized(view.dtype), "codes must have a dtype of codes");
  }
  return view;
}

inline View source_view(const Tensor& x, bool has_scale = false) {
  return view_of(x, x.const_data_ptr(), has_scale);
}

inline void check_scale(const View& codes, const View& scale) {
  const int64_t numbers = codes.head_dim(), groups = scale.width();
  require(std::equal(codes.size, codes.size + 4, scale.size) && groups > 0 && numbers > 0 &&
              numbers % groups == 0 && numbers / groups % numbers_in(codes.dtype) == 0 &&
              scale.dtype != DType::bits,
          "scales must have the axes of their cache, floats, and groups of whole bytes");
}

}  // namespace kvloom
