// Rows of any dtype as float32.
#pragma once

#include "../base/codes.h"
#include "prefetch.h"

namespace kvloom::KVLOOM_ISA {

// Whether rounding to the scale's type, as dequantizing is defined, shows in the query's type.
inline bool is_coarser(DType scale, DType query) {
  return query == DType::f32 ? scale != DType::f32 : query == DType::f16 && scale == DType::bf16;
}

// Every element rounded to a type and back.
inline void round_row(DType dtype, float* row, Index width) {
  for_float(dtype, [=]<class T>(T) {
    if constexpr (!std::is_same_v<T, float>)
      for (Index d = 0; d < width; d += kLanes) store(row + d, widen(narrow(load(row + d), T{}), T{}));
  });
}

// `count` codes from one on, times their scale.
template <int kBits>
inline void widen_group(const Byte* codes, Index first, Index count, float scale, float largest, float* out) {
  const auto value = [=](Index d, Index some) KVLOOM_INLINE_LAMBDA {
    return saturate(load_codes<kBits>(codes + (first + d) * kBits / 8, some) * scale, largest);
  };
  Index d = 0;
  for (; d + kLanes <= count; d += kLanes) store(out + first + d, value(d, kLanes));
  if (d < count) store_partial(out + first + d, value(d, count - d), count - d);
}

// Row that a load of `side` as query_dtype gives, element by element; zero from dim on.
inline void widen_row(const SideLayout& side, const Byte* row, const Byte* scale_row, DType query_dtype,
                      float* out) {
  const DType dtype = side.dtype, scale_dtype = side.scale.dtype;
  const Index width = round_up(side.dim, kBlock);
  for (Index d = side.dim; d < width; ++d) out[d] = 0.0f;
  if (!side.scale.data) {
    read_floats(row, dtype, 0, 1, out, side.dim);
    if (dtype != query_dtype) round_row(query_dtype, out, width);
    return;
  }
  const float largest = largest_finite(query_dtype == DType::f16 ? query_dtype : scale_dtype);
  for (Index g = 0; g < side.num_groups; ++g) {
    const auto widen = dtype == DType::int8 ? widen_group<8> : widen_group<4>;
    widen(row, g * side.group, side.group, read_float(scale_row, scale_dtype, g), largest, out);
  }
  if (is_coarser(scale_dtype, query_dtype)) round_row(scale_dtype, out, width);
}

// Float32 copies of the rows of one block of tokens.
class WideRows {
 public:
  const Byte* const* of(const ChunkRows& chunk, Index first) {
    const SideLayout& side = *chunk.side;
    for (Index t = 0; t < kBlock; ++t) {
      row_[t] = reinterpret_cast<const Byte*>(copy_[t]);
      chunk.prefetcher.prefetch_row(first + t, side.row_bytes);
      if (first + t >= chunk.begin && first + t < chunk.end)
        widen_row(side, chunk.row[first + t], chunk.scale[first + t], chunk.query_dtype, copy_[t]);
      else
        std::memset(copy_[t], 0, round_up(side.dim, kBlock) * sizeof(float));
    }
    return row_;
  }

 private:
  const Byte* row_[kBlock];
  alignas(64) float copy_[kBlock][kMaxHeadDim];
};

}  // namespace kvloom::KVLOOM_ISA
