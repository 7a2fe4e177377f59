// Codes whose groups are short, as bfloat16 numbers for products of bfloat16: what dequantizing gives for
// such a query. Integer products would cost a scaling for each group.
#pragma once

#include "bf16.h"
#include "scales.h"

namespace kvloom::KVLOOM_ISA {

// Sixteen scales from one on; those past `count` are 0 and not read.
template <class T>
inline __m512 load_scales(const Byte* from, Index count) {
  const __mmask16 mask = static_cast<__mmask16>(count < 16 ? (1 << count) - 1 : 0xffff);
  if constexpr (std::is_same_v<T, float>)
    return _mm512_maskz_loadu_ps(mask, from);
  else
    return as<__m512>(widen(as<Shorts>(_mm256_maskz_loadu_epi16(mask, from)), T{}));
}

// The scales of sixteen bytes of codes from `byte` on. Permutations see the last four bits of a group.
inline __m512 scales_of(const SideLayout& side, Index byte, __m512 scales) {
  return _mm512_permutexvar_ps(_mm512_loadu_si512(side.group_of_byte + byte), scales);
}

// 32 codes of a row from element d on, times their scales, as bfloat16.
template <bool is_int4>
inline __m512i dequantize_32(const SideLayout& side, const Byte* codes, Index d, __m512 scales) {
  const auto scaled = [](__m512i code, __m512 scale) {
    return _mm512_mul_ps(_mm512_cvtepi32_ps(code), scale);
  };
  const auto sixteen = [&](Index byte) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + byte));
  };
  if constexpr (!is_int4) {
    const __m512 low = scaled(_mm512_cvtepi8_epi32(sixteen(d)), scales_of(side, d, scales));
    const __m512 high = scaled(_mm512_cvtepi8_epi32(sixteen(d + 16)), scales_of(side, d + 16, scales));
    return as<__m512i>(_mm512_cvtne2ps_pbh(high, low));
  }
  const __m512i bytes = _mm512_cvtepu8_epi32(sixteen(d / 2));
  const __m512 scale = scales_of(side, d / 2, scales);
  const __m512 even = scaled(_mm512_srai_epi32(_mm512_slli_epi32(bytes, 28), 28), scale);
  const __m512 odd = scaled(_mm512_srai_epi32(_mm512_slli_epi32(bytes, 24), 28), scale);
  alignas(64) static constexpr uint16_t interleaved[32] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,
                                                           21, 6,  22, 7,  23, 8,  24, 9,  25, 10, 26,
                                                           11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  return _mm512_permutexvar_epi16(_mm512_load_si512(interleaved),
                                  as<__m512i>(_mm512_cvtne2ps_pbh(odd, even)));
}

// Elements [begin, end) of a row of codes as bfloat16, whose scales follow one another from one of sixteen
// groups on; updates `max_scale`, the largest of each lane.
template <bool is_int4, class T>
KVLOOM_INLINE void dequantize_span(const SideLayout& side, const Byte* codes, const Byte* scales,
                                   Index num_groups, Index begin, Index end, __m512& max_scale, Byte* to) {
  const __m512 scale = load_scales<T>(scales, num_groups);
  max_scale = _mm512_max_ps(_mm512_abs_ps(scale), max_scale);  // unchanged by a NaN
  KVLOOM_UNROLL(4)
  for (Index d = begin; d < end; d += 32)
    _mm512_store_si512(to + 2 * d, dequantize_32<is_int4>(side, codes, d, scale));
}

// A row of codes. Sixteen groups fill whole pairs of vectors, since a group has an even number of elements.
template <bool is_int4, class T, int W>
inline void dequantize_row(const SideLayout& side, const Byte* codes, const Byte* scales, __m512& max_scale,
                           Byte* to) {
  if (W && side.num_groups <= 16)  // the common case, with a constant length
    return dequantize_span<is_int4, T>(side, codes, scales, side.num_groups, 0, W, max_scale, to);
  for (Index g = 0; g < side.num_groups; g += 16)
    dequantize_span<is_int4, T>(side, codes, scales + g * sizeof(T), side.num_groups - g, g * side.group,
                                min((g + 16) * side.group, side.dim), max_scale, to);
}

// Calls kernel.template operator()<T, W>() with the type of the scales and the width as constants.
template <class Kernel>
inline void for_scales(const ChunkRows& chunk, Index width, Kernel kernel) {
  for_width(width, [&]<int W>() {
    for_float(chunk.side->scale.dtype, [&]<class T>(T) { kernel.template operator()<T, W>(); });
  });
}

// Dequantizes a block of tokens from `first` on.
template <bool is_int4, class T, int W>
inline void dequantize_block(const ChunkRows& chunk, Index first, Byte (*to)[2 * kMaxHeadDim]) {
  const SideLayout& side = *chunk.side;
  alignas(64) Byte unpacked[kBlock][kMaxHeadDim];
  if (chunk.is_native) {
    const BlockPrefetcher block_prefetcher(chunk.prefetcher, chunk, first);
    for (Index line = 0; line < kBlock * side.row_bytes / 64; ++line) block_prefetcher.prefetch_line(line);
    const auto unpack = side.order == NativeOrder::columns ? unpack_columns : unpack_quads;
    unpack(chunk.block(first / kBlock), side.row_bytes, unpacked);
  }
  __m512 max_scale = _mm512_setzero_ps();
  for (Index t = 0; t < kBlock; ++t) {
    if (!chunk.is_native) chunk.prefetcher.prefetch_row(first + t, side.row_bytes);
    const Byte* codes = chunk.is_native ? unpacked[t] : chunk.row[first + t];
    dequantize_row<is_int4, T, W>(side, codes, chunk.scale[first + t], max_scale, to[t]);
  }
  // As with checked_scales. A NaN makes its products NaN anyway.
  if (_mm512_reduce_max_ps(max_scale) > largest_scale(chunk))
    for (Index t = 0; t < kBlock; ++t) std::memset(to[t], 0xff, 2 * side.dim);
}

// The rows of a chunk, dequantized.
using DequantizedRows = Byte[kChunk][2 * kMaxHeadDim];

// Dequantizes the blocks that have a token.
template <bool is_int4>
inline void dequantize_chunk(const ChunkRows& chunk, DequantizedRows& to) {
  for_scales(chunk, chunk.side->dim, [&]<class T, int W>() {
    for (Index first = chunk.begin / kBlock * kBlock; first < chunk.end; first += kBlock) {
      chunk.prefetch_scales_of(first);
      dequantize_block<is_int4, T, W>(chunk, first, to + first);
    }
  });
}

// No template of the codes: a pointer to what dequantizes them, so that the products are compiled once.
template <int W>
inline void score_dequantized(const ChunkRows& chunk, const ScoreTask& task,
                              void (*dequantize)(const ChunkRows&, Index, Byte (*)[2 * kMaxHeadDim])) {
  alignas(64) Byte block[kBlock][2 * kMaxHeadDim];
  const Byte* keys[kBlock];
  for (Index t = 0; t < kBlock; ++t) keys[t] = block[t];
  score_blocks<PairScores, W>(chunk, task, RowPrefetcher(), [&](Index first) {
    chunk.prefetch_scales_of(first);
    dequantize(chunk, first, block);
    return keys;
  });
}

template <bool is_int4>
inline void score_codes_bf16(const ChunkRows& chunk, const ScoreTask& task) {
  for_scales(chunk, task.width,
             [&]<class T, int W>() { score_dequantized<W>(chunk, task, dequantize_block<is_int4, T, W>); });
}

template <bool is_int4>
inline void value_codes_bf16(const ChunkRows& chunk, const ValueTask& task) {
  alignas(64) DequantizedRows rows;
  const Byte* values[kChunk];
  for (Index t = 0; t < kChunk; ++t) values[t] = rows[t];
  dequantize_chunk<is_int4>(chunk, rows);
  add_rows_bf16(task, values, RowPrefetcher(), chunk.begin, chunk.end);
}

}  // namespace kvloom::KVLOOM_ISA
