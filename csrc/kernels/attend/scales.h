// The scales of a chunk in float32, by group and token.
#pragma once

#include "arithmetic.h"
#include "blocks.h"

namespace kvloom::KVLOOM_ISA {

constexpr Index kMaxGroups = kMaxHeadDim / 8;

// kLanes 16-bit scales of a column of dwords, in float32: the low half of each, or the high one.
inline Vec widen_halves(DType dtype, IntVec pairs, bool high) {
  if (dtype == DType::bf16) return as<Vec>(high ? pairs & splat(INT32_MIN >> 15) : pairs << 16);
  return widen(low_halves(as<Words>(high ? pairs >> 16 : pairs)), Half{});
}

// Scales of the tokens [first, first + kBlock), `dwords` of them to a token, from byte `at` of a row on;
// whether these are all of a row.
inline void read_columns(const ChunkRows& chunk, Index first, Index at, Index dwords, bool are_all,
                         uint32_t (*to)[kBlock]) {
  const Byte* const* rows = chunk.scale + first;
  if (dwords == 1 && are_all && chunk.scales_are_contiguous(first)) {
    std::memcpy(to[0], rows[0], sizeof to[0]);
  } else if (dwords == 4) {
    for (Index t = 0; t < kBlock; t += 4)
      transpose_four(rows + t, at, reinterpret_cast<Byte*>(to[0] + t), sizeof to[0]);
  } else {
    for (Index t = 0; t < kBlock; ++t)
      for (Index i = 0; i < dwords; ++i) std::memcpy(to[i] + t, rows[t] + at + 4 * i, 4);
  }
}

// NaN in place of scales whose products with codes may be beyond the largest finite number that dequantizing
// gives. A row that is not finite in the end is computed again by NonFiniteRow.
inline Vec checked_scales(Vec scales, float limit) {
  const Vec size = as<Vec>(as<IntVec>(scales) & splat(INT32_MAX));
  return size > splat(limit) ? splat(NAN) : scales;
}

inline float largest_scale(const ChunkRows& chunk) {
  return largest_finite(chunk.query_dtype == DType::f16 ? chunk.query_dtype : chunk.side->scale.dtype) /
         128.0f;
}

// Scales of one chunk by group and token; those of tokens outside [begin, end) are some of the others.
inline void read_scales(const ChunkRows& chunk, float (*scales)[kChunk]) {
  const DType dtype = chunk.side->scale.dtype;
  const Index groups = chunk.side->num_groups, bytes = groups * chunk.side->scale.itemsize;
  const float limit = largest_scale(chunk);
  const auto put_scales = [&](Index g, Index t, Vec x) { store(scales[g] + t, checked_scales(x, limit)); };
  for (Index first = 0; first < kChunk; first += kBlock) {
    if (groups == 1 && dtype != DType::f32 && chunk.scales_are_contiguous(first)) {
      alignas(64) float some[kBlock];
      read_floats(chunk.scale[first], dtype, 0, 1, some, kBlock);
      for (Index t = 0; t < kBlock; t += kLanes) put_scales(0, first + t, load(some + t));
      continue;
    }
    if (bytes % 4 != 0) {
      for (Index g = 0; g < groups; ++g) {
        for (Index t = first; t < first + kBlock; ++t) scales[g][t] = read_float(chunk.scale[t], dtype, g);
        for (Index t = first; t < first + kBlock; t += kLanes) put_scales(g, t, load(scales[g] + t));
      }
      continue;
    }
    alignas(64) uint32_t columns[4][kBlock];
    for (Index at = 0; at < bytes; at += 16) {
      const Index dwords = min(bytes - at, 16) / 4;
      read_columns(chunk, first, at, dwords, dwords * 4 == bytes, columns);
      for (Index i = 0; i < dwords; ++i)
        for (Index t = 0; t < kBlock; t += kLanes) {
          const IntVec column = bit_copy<IntVec>(columns[i] + t);
          if (dtype == DType::f32) {
            put_scales(at / 4 + i, first + t, as<Vec>(column));
          } else {
            put_scales(at / 2 + 2 * i, first + t, widen_halves(dtype, column, false));
            put_scales(at / 2 + 2 * i + 1, first + t, widen_halves(dtype, column, true));
          }
        }
    }
  }
}

}  // namespace kvloom::KVLOOM_ISA
