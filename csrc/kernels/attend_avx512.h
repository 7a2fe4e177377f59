// Kernels for AVX-512 with BF16 and VNNI: bfloat16 dot products, and integer ones for int8 and int4 codes.
//
// Codes meet integer digits, so that a product costs no conversion. A 16-bit query is split into two signed
// digits of 7 and 8 bits (15 bits of the row's largest element), weights times value scales into two unsigned
// ones (16 bits of the chunk's largest). Both are finer than the query's own type; a float32 query is
// not served here.
#pragma once

#include "attend_tile.h"

#include <immintrin.h>

namespace kvloom::KVLOOM_ISA {

// --- bfloat16 keys -----------------------------------------------------------------------------------------

inline void pack_bf16(const SidePlace&, const float* query, Index num_rows, Index width, Byte* packed) {
  for (Index r = 0; r < num_rows; ++r, query += width, packed += kPackedRow(width))
    for (Index d = 0; d < width; d += 16)
      _mm256_store_si256(reinterpret_cast<__m256i*>(packed + kPackedHead + 2 * d),
                         reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(_mm512_loadu_ps(query + d))));
}

inline __m512bh load_pairs(const Byte* from) { return reinterpret_cast<__m512bh>(_mm512_loadu_si512(from)); }

// R rows by 16 / R tokens, token by token, 32 elements at a time.
template <int R, int W>
inline void score_tokens_bf16(const Byte* query, Index stride, Index any_width, const Byte* const* keys,
                              const Byte* const* next, Index shift, float* scores) {
  constexpr int T = 16 / R;
  const Index width = W ? W : any_width;
  Vec sums[16];
#pragma GCC unroll 16
  for (int t = 0; t < T; ++t) {
    const Byte *key = keys[t], *ahead = next[t] + shift;
    __m512 sum[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) sum[r] = _mm512_setzero_ps();
#pragma GCC unroll 4
    for (Index d = 0; d < width; d += 32) {
      prefetch(ahead + 2 * d);
      const __m512bh x = load_pairs(key + 2 * d);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) sum[r] = _mm512_dpbf16_ps(sum[r], load_pairs(query + r * stride + 2 * d), x);
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) sums[r * T + t] = reinterpret_cast<Vec>(sum[r]);
  }
  alignas(64) float found[16];
  store(found, add_across(sums));
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) std::memcpy(scores + r * kChunk, found + r * T, T * sizeof(float));
}

inline void score_bf16(const ChunkRows& chunk, const ScoreTask& task) {
  const Index stride = kPackedRow(task.width);
  for_width(task.width, [&]<int W>() {
    for (Index first = chunk.begin / kBlock * kBlock; first < chunk.end; first += kBlock)
      for_rows(task.num_rows, [&]<int R>(Index r) {
        for (Index t = first; t < first + kBlock; t += 16 / R)
          score_tokens_bf16<R, W>(task.packed + r * stride + kPackedHead, stride, task.width, chunk.row + t,
                                  chunk.next_row + t, chunk.next_shift, task.scores + r * kChunk + t);
      });
  });
}

// --- bfloat16 values ---------------------------------------------------------------------------------------

// R rows by 64 elements. A dword holds two of them: its high half is one as it stands, its low half the other
// once it is shifted up; they are put in order when the chunk is done.
template <int R>
inline void add_values_bf16(const float* weights, const Byte* const* values, const Byte* const* next, Index shift,
                            Index begin, Index end, float* totals, Index width, Index d) {
  const __m512i high_half = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  const __m512i first = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
  __m512 even[R][2], odd[R][2];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) even[r][0] = even[r][1] = odd[r][0] = odd[r][1] = _mm512_setzero_ps();
  for (Index t = begin; t < end; ++t) {
#pragma GCC unroll 2
    for (int n = 0; n < 2; ++n) {
      prefetch(next[t] + shift + 2 * (d + 32 * n));
      const __m512i x = _mm512_loadu_si512(values[t] + 2 * (d + 32 * n));
      const __m512 low = _mm512_castsi512_ps(_mm512_slli_epi32(x, 16));
      const __m512 high = _mm512_castsi512_ps(_mm512_and_si512(x, high_half));
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const __m512 weight = _mm512_set1_ps(weights[r * kChunk + t]);
        even[r][n] = _mm512_fmadd_ps(weight, low, even[r][n]);
        odd[r][n] = _mm512_fmadd_ps(weight, high, odd[r][n]);
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int n = 0; n < 2; ++n) {
      float* total = totals + r * width + d + 32 * n;
      const __m512 a = _mm512_permutex2var_ps(even[r][n], first, odd[r][n]);
      const __m512 b = _mm512_permutex2var_ps(even[r][n], second, odd[r][n]);
      _mm512_storeu_ps(total, _mm512_add_ps(_mm512_loadu_ps(total), a));
      _mm512_storeu_ps(total + 16, _mm512_add_ps(_mm512_loadu_ps(total + 16), b));
    }
}

inline void value_bf16(const ChunkRows& chunk, const ValueTask& task) {
  shrink_totals(task);
  for_rows(task.num_rows, [&]<int R>(Index r) {
    for (Index d = 0; d < task.width; d += 64)
      add_values_bf16<R>(task.weights + r * kChunk, chunk.row, chunk.next_row, chunk.next_shift, chunk.begin,
                         chunk.end, task.totals + r * task.width, task.width, d);
  });
}

// --- codes -------------------------------------------------------------------------------------------------

// Scales of one chunk by group and token, as they are stored.
template <class Bits>
inline void transpose_scales(const ChunkRows& chunk, float (*scales)[kChunk]) {
  for (Index t = 0; t < kChunk; ++t)
    for (Index g = 0; g < chunk.side->num_groups; ++g)
      std::memcpy(reinterpret_cast<Byte*>(scales[g]) + t * static_cast<Index>(sizeof(Bits)),
                  chunk.scale[t] + g * static_cast<Index>(sizeof(Bits)), sizeof(Bits));
}

// The same for rows of two 16-bit scales, as is usual: halves of dwords.
template <>
inline void transpose_scales<std::uint16_t>(const ChunkRows& chunk, float (*scales)[kChunk]) {
  if (chunk.side->num_groups != 2) {
    for (Index t = 0; t < kChunk; ++t)
      for (Index g = 0; g < chunk.side->num_groups; ++g)
        std::memcpy(reinterpret_cast<Byte*>(scales[g]) + 2 * t, chunk.scale[t] + 2 * g, 2);
    return;
  }
  alignas(64) std::uint32_t pairs[kChunk];
  for (Index t = 0; t < kChunk; ++t) std::memcpy(pairs + t, chunk.scale[t], 4);
  for (Index t = 0; t < kChunk; t += 16) {
    const __m512i pair = _mm512_load_si512(pairs + t);
    const __m512i second = _mm512_srli_epi32(pair, 16);
    _mm256_store_si256(reinterpret_cast<__m256i*>(scales[0]) + t / 16, _mm512_cvtepi32_epi16(pair));
    _mm256_store_si256(reinterpret_cast<__m256i*>(scales[1]) + t / 16, _mm512_cvtepi32_epi16(second));
  }
}

// Scales of one chunk by group and token, in float32. Returns whether none is negative.
inline bool read_scales(const ChunkRows& chunk, float (*scales)[kChunk]) {
  const DType dtype = chunk.side->scale.dtype;
  if (dtype == DType::f32)
    transpose_scales<std::uint32_t>(chunk, scales);
  else
    transpose_scales<std::uint16_t>(chunk, scales);
  __mmask16 negative = 0;
  for (Index g = 0; g < chunk.side->num_groups; ++g) {
    const Byte* bits = reinterpret_cast<const Byte*>(scales[g]);
    for (Index t = kChunk - kLanes; t >= 0; t -= kLanes) {  // widened in place, from the back
      const Vec x = dtype == DType::f32   ? load(scales[g] + t)
                    : dtype == DType::f16 ? load_f16(bits + 2 * t)
                                          : load_bf16(bits + 2 * t);
      store(scales[g] + t, x);
      negative |= _mm512_cmp_ps_mask(reinterpret_cast<__m512>(x), _mm512_setzero_ps(), _CMP_LT_OQ);
    }
  }
  return negative == 0;
}

constexpr Index kMaxGroups = kMaxHeadDim / 8;
constexpr float kQueryLargest = 127.0f * 128.0f;  // of q = 128 * high + low

// What stands before the digits of a packed query row.
struct QueryHead {
  float step;
  std::int32_t offset[kMaxGroups];  // what unsigned codes add to each group's product
};
static_assert(sizeof(QueryHead) <= kPackedHead);

// Elements of one byte's nibble lie apart: of int4 the even elements come first, then the odd ones.
inline void pack_digits(const SidePlace& key, const float* query, Index num_rows, Index width, Byte* packed) {
  const bool is_int4 = key.cache.dtype == DType::int4;
  alignas(64) std::int32_t whole[kMaxHeadDim];
  for (Index r = 0; r < num_rows; ++r, query += width, packed += kPackedRow(width)) {
    __m512 top = _mm512_setzero_ps();
    __mmask16 finite = 0xffff;
    for (Index d = 0; d < width; d += 16) {
      const __m512 size = _mm512_abs_ps(_mm512_loadu_ps(query + d));
      finite &= _mm512_cmp_ps_mask(size, _mm512_set1_ps(INFINITY), _CMP_LT_OQ);
      top = _mm512_max_ps(size, top);
    }
    QueryHead head;
    const float step = _mm512_reduce_max_ps(top) / kQueryLargest;
    head.step = finite == 0xffff ? step : NAN;
    const __m512 inverse = _mm512_set1_ps(step > 0.0f ? 1.0f / step : 0.0f);
    const __m512i bound = _mm512_set1_epi32(static_cast<int>(kQueryLargest));
    alignas(64) std::int8_t digits[2][kMaxHeadDim];
    for (Index d = 0; d < width; d += 16) {
      __m512i q = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(query + d), inverse));
      q = _mm512_max_epi32(_mm512_min_epi32(q, bound), _mm512_sub_epi32(__m512i{}, bound));
      const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(q, _mm512_set1_epi32(64)), 7);
      _mm512_store_si512(whole + d, q);
      _mm_store_si128(reinterpret_cast<__m128i*>(digits[0] + d), _mm512_cvtepi32_epi8(high));
      _mm_store_si128(reinterpret_cast<__m128i*>(digits[1] + d),
                      _mm512_cvtepi32_epi8(_mm512_sub_epi32(q, _mm512_slli_epi32(high, 7))));
    }
    std::int8_t* to = reinterpret_cast<std::int8_t*>(packed + kPackedHead);
    for (Index digit = 0; digit < 2; ++digit, to += width) {
      if (!is_int4) std::memcpy(to, digits[digit], static_cast<std::size_t>(key.dim));
      for (Index i = 0; is_int4 && i < key.dim / 2; ++i) {
        to[i] = digits[digit][2 * i];
        to[key.dim / 2 + i] = digits[digit][2 * i + 1];
      }
    }
    for (Index g = 0; g < key.num_groups; ++g) {
      std::int32_t sum = 0;
      for (Index d = g * key.group; d < (g + 1) * key.group; ++d) sum += whole[d];
      head.offset[g] = sum * (is_int4 ? -8 : -128);
    }
    std::memcpy(packed, &head, sizeof(head));
  }
}

// 16 rows of 16 dwords become 16 columns.
inline void transpose_dwords(__m512i* x) {
  __m512i y[16];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
    y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    x[i] = _mm512_unpacklo_epi64(y[i], y[i + 2]);
    x[i + 1] = _mm512_unpackhi_epi64(y[i], y[i + 2]);
    x[i + 2] = _mm512_unpacklo_epi64(y[i + 1], y[i + 3]);
    x[i + 3] = _mm512_unpackhi_epi64(y[i + 1], y[i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    y[i] = _mm512_shuffle_i32x4(x[i], x[i + 4], 0x88);
    y[i + 4] = _mm512_shuffle_i32x4(x[i], x[i + 4], 0xdd);
    y[i + 8] = _mm512_shuffle_i32x4(x[i + 8], x[i + 12], 0x88);
    y[i + 12] = _mm512_shuffle_i32x4(x[i + 8], x[i + 12], 0xdd);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    x[i] = _mm512_shuffle_i32x4(y[i], y[i + 8], 0x88);
    x[i + 8] = _mm512_shuffle_i32x4(y[i], y[i + 8], 0xdd);
    x[i + 4] = _mm512_shuffle_i32x4(y[i + 4], y[i + 12], 0x88);
    x[i + 12] = _mm512_shuffle_i32x4(y[i + 4], y[i + 12], 0xdd);
  }
}

inline __m512i broadcast_dword(const void* from) { return _mm512_set1_epi32(bit_copy<std::int32_t>(from)); }

// Columns of four bytes of two blocks of tokens, codes made unsigned by their flipped sign bit.
struct KeyColumns {
  alignas(64) std::int32_t column[kMaxHeadDim / 4][2][kBlock];

  void read(const Byte* const* rows, Index block, Index row_bytes, std::uint32_t sign_bits, LineWalk& ahead) {
    const __m512i sign = _mm512_set1_epi32(static_cast<int>(sign_bits));
    for (Index at = 0; at < row_bytes; at += 64) {
      const Index dwords = min(row_bytes - at, 64) / 4;
      const __mmask16 mask = static_cast<__mmask16>((1u << dwords) - 1);
      __m512i x[16];
#pragma GCC unroll 16
      for (int t = 0; t < 16; ++t) x[t] = _mm512_xor_si512(_mm512_maskz_loadu_epi32(mask, rows[t] + at), sign);
      ahead.ask(16);
      transpose_dwords(x);
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i)
        if (i < dwords) _mm512_store_si512(column[at / 4 + i][block], x[i]);
    }
  }
};

// R rows by two blocks of tokens.
template <int R, bool is_int4>
inline void score_columns(const KeyColumns& keys, const SidePlace& key, const Byte* packed, Index width,
                          const float* scales, float* scores) {
  const Index columns = key.row_bytes / 4, per_group = columns / key.num_groups, stride = kPackedRow(width);
  const __m512i nibbles = _mm512_set1_epi32(0x0f0f0f0f);
  __m512 sums[R][2];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) sums[r][0] = sums[r][1] = _mm512_setzero_ps();
  for (Index g = 0, c = 0; g < key.num_groups; ++g) {
    __m512i high[R][2], low[R][2];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      high[r][0] = high[r][1] = _mm512_setzero_si512();
      low[r][0] = low[r][1] =
          broadcast_dword(packed + r * stride + offsetof(QueryHead, offset) + 4 * static_cast<std::size_t>(g));
    }
    for (const Index end = c + per_group; c < end; ++c) {
      const Byte* digits = packed + kPackedHead + 4 * c;
      const __m512i codes[2] = {_mm512_load_si512(keys.column[c][0]), _mm512_load_si512(keys.column[c][1])};
      const auto multiply = [&](const __m512i* x, const Byte* from) {
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
          const __m512i h = broadcast_dword(from + r * stride), l = broadcast_dword(from + r * stride + width);
          high[r][0] = _mm512_dpbusd_epi32(high[r][0], x[0], h);
          high[r][1] = _mm512_dpbusd_epi32(high[r][1], x[1], h);
          low[r][0] = _mm512_dpbusd_epi32(low[r][0], x[0], l);
          low[r][1] = _mm512_dpbusd_epi32(low[r][1], x[1], l);
        }
      };
      if constexpr (is_int4) {
        const __m512i even[2] = {_mm512_and_si512(codes[0], nibbles), _mm512_and_si512(codes[1], nibbles)};
        const __m512i odd[2] = {_mm512_and_si512(_mm512_srli_epi32(codes[0], 4), nibbles),
                                _mm512_and_si512(_mm512_srli_epi32(codes[1], 4), nibbles)};
        multiply(even, digits);
        multiply(odd, digits + key.dim / 2);
      } else {
        multiply(codes, digits);
      }
    }
#pragma GCC unroll 2
    for (int block = 0; block < 2; ++block) {
      const __m512 scale = _mm512_load_ps(scales + g * kChunk + block * kBlock);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const __m512i product = _mm512_add_epi32(_mm512_slli_epi32(high[r][block], 7), low[r][block]);
        sums[r][block] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(product), scale, sums[r][block]);
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    const __m512 step = _mm512_set1_ps(bit_copy<float>(packed + r * stride));
    _mm512_storeu_ps(scores + r * kChunk, _mm512_mul_ps(sums[r][0], step));
    _mm512_storeu_ps(scores + r * kChunk + kBlock, _mm512_mul_ps(sums[r][1], step));
  }
}

template <bool is_int4>
inline void score_codes(const ChunkRows& chunk, const ScoreTask& task) {
  constexpr Index kTokens = 2 * kBlock;
  const SidePlace& key = *chunk.side;
  alignas(64) float scales[kMaxGroups][kChunk];
  KeyColumns keys;
  LineWalk ahead(chunk);
  read_scales(chunk, scales);
  chunk.prefetch_scales();
  for (Index first = chunk.begin / kTokens * kTokens; first < chunk.end; first += kTokens) {
    for (Index block = 0; block < 2; ++block)
      keys.read(chunk.row + first + block * kBlock, block, key.row_bytes, is_int4 ? 0x88888888u : 0x80808080u, ahead);
    for_rows(task.num_rows, [&]<int R>(Index r) {
      score_columns<R, is_int4>(keys, key, task.packed + r * kPackedRow(task.width), task.width, scales[0] + first,
                                task.scores + r * kChunk + first);
    });
  }
}

// --- values in codes ---------------------------------------------------------------------------------------

constexpr Index kQuads = kChunk / 4;

// Rows' weights times value scales as two unsigned digits, four tokens to a dword.
struct WeightDigits {
  alignas(64) Byte dword[4][2][kMaxGroups][kQuads * 4];  // [row, digit, group, quad]
  float step[4][kMaxGroups];

  void read(const float* weights, Index num_rows, const float (*scales)[kChunk], Index num_groups) {
    for (Index r = 0; r < num_rows; ++r)
      for (Index g = 0; g < num_groups; ++g) {
        __m512 w[4], largest = _mm512_setzero_ps();
        __mmask16 is_nan = 0;
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
          const __m512 weight = _mm512_loadu_ps(weights + r * kChunk + 16 * i);
          // A weight of 0 hides the scale, whatever it is.
          const __mmask16 seen = _mm512_cmp_ps_mask(weight, _mm512_setzero_ps(), _CMP_NEQ_UQ);
          w[i] = _mm512_maskz_mul_ps(seen, weight, _mm512_load_ps(scales[g] + 16 * i));
          is_nan |= _mm512_cmp_ps_mask(w[i], w[i], _CMP_UNORD_Q);
          largest = _mm512_max_ps(w[i], largest);
        }
        const float top = _mm512_reduce_max_ps(largest);
        step[r][g] = is_nan ? NAN : top / 65535.0f;
        const __m512 inverse = _mm512_set1_ps(top > 0.0f ? 65535.0f / top : 0.0f);
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
          const __m512i digits = _mm512_cvtps_epi32(_mm512_mul_ps(w[i], inverse));
          __m128i* high = reinterpret_cast<__m128i*>(dword[r][0][g]) + i;
          __m128i* low = reinterpret_cast<__m128i*>(dword[r][1][g]) + i;
          _mm_store_si128(high, _mm512_cvtepi32_epi8(_mm512_srli_epi32(digits, 8)));
          _mm_store_si128(low, _mm512_cvtepi32_epi8(digits));
        }
      }
  }
};

// 64 bytes of each row of a chunk: dword i of lane L of vector j is byte 16 L + 4 j + i of four tokens. Of int4
// the even elements of vector j come first, then the odd ones.
template <bool is_int4>
struct ValueQuads {
  static constexpr int kVectors = is_int4 ? 8 : 4;
  __m512i vector[kQuads][kVectors];

  void read(const Byte* const* rows, Index begin, Index end, Index at, Index bytes, LineWalk& ahead) {
    const __mmask16 mask = static_cast<__mmask16>((1u << bytes / 4) - 1);
    for (Index q = begin; q < end; ++q) {
      __m512i x[4], y[4];
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) x[i] = _mm512_maskz_loadu_epi32(mask, rows[4 * q + i] + at);
      ahead.ask(4);
      y[0] = _mm512_unpacklo_epi8(x[0], x[1]);
      y[1] = _mm512_unpacklo_epi8(x[2], x[3]);
      y[2] = _mm512_unpackhi_epi8(x[0], x[1]);
      y[3] = _mm512_unpackhi_epi8(x[2], x[3]);
      x[0] = _mm512_unpacklo_epi16(y[0], y[1]);
      x[1] = _mm512_unpackhi_epi16(y[0], y[1]);
      x[2] = _mm512_unpacklo_epi16(y[2], y[3]);
      x[3] = _mm512_unpackhi_epi16(y[2], y[3]);
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        if constexpr (is_int4) {
          vector[q][2 * j] = sign_extend(x[j]);
          vector[q][2 * j + 1] = sign_extend(_mm512_srli_epi32(x[j], 4));
        } else {
          vector[q][j] = x[j];
        }
      }
    }
  }

 private:
  static __m512i sign_extend(__m512i nibbles) {
    const __m128i values = _mm_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1);
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(values), _mm512_and_si512(nibbles, _mm512_set1_epi8(0x0f)));
  }
};

// A value of each of four groups, one for each lane of 128 bits.
template <class Broadcast>
inline __m512i by_lane(const Index* groups, Broadcast broadcast) {
  __m512i x = broadcast(groups[0]);
  x = _mm512_mask_mov_epi32(x, 0x00f0, broadcast(groups[1]));
  x = _mm512_mask_mov_epi32(x, 0x0f00, broadcast(groups[2]));
  return _mm512_mask_mov_epi32(x, 0xf000, broadcast(groups[3]));
}

// The digits of some rows spread over the lanes of vectors whose lanes lie in different groups.
struct SpreadDigits {
  __m512i vector[4][2][kQuads];

  void read(const WeightDigits& weights, Index num_rows, const Index* groups, Index begin, Index end) {
    for (Index r = 0; r < num_rows; ++r)
      for (Index digit = 0; digit < 2; ++digit)
        for (Index q = begin; q < end; ++q)
          vector[r][digit][q] =
              by_lane(groups, [&](Index g) { return broadcast_dword(weights.dword[r][digit][g] + 4 * q); });
  }
};

// Each dword of `sums` plus four products. The intrinsic makes GCC 12 copy every sum in every step.
inline void add_products(__m512i& sums, __m512i unsigned_bytes, __m512i signed_bytes) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(unsigned_bytes), "v"(signed_bytes));
}

// R rows by two vectors, over all quads of the chunk: digits of one group, or spread over the lanes.
template <int R, bool is_spread>
inline void add_pair(const WeightDigits& weights, const SpreadDigits& spread, const __m512i* values, Index vectors,
                     Index begin, Index end, const Index* groups, __m512 (*out)[2]) {
  __m512i sums[R][2][2];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) sums[r][0][0] = sums[r][0][1] = sums[r][1][0] = sums[r][1][1] = _mm512_setzero_si512();
  for (Index q = begin; q < end; ++q) {
    const __m512i a = values[q * vectors], b = values[q * vectors + 1];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
      for (int digit = 0; digit < 2; ++digit) {
        const __m512i w = is_spread ? spread.vector[r][digit][q]
                                    : broadcast_dword(weights.dword[r][digit][groups[0]] + 4 * q);
        add_products(sums[r][digit][0], w, a);
        add_products(sums[r][digit][1], w, b);
      }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    const __m512i steps = by_lane(groups, [&](Index g) { return broadcast_dword(&weights.step[r][g]); });
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      const __m512i sum = _mm512_add_epi32(_mm512_slli_epi32(sums[r][0][i], 8), sums[r][1][i]);
      out[r][i] = _mm512_mul_ps(_mm512_castsi512_ps(steps), _mm512_cvtepi32_ps(sum));
    }
  }
}

// Adds the first lanes of four floats each to places that lie `apart` floats from each other.
inline void add_lanes(float* total, __m512 x, Index lanes, Index apart) {
  const auto add = [&](Index lane, __m128 part) {
    _mm_storeu_ps(total + apart * lane, _mm_add_ps(_mm_loadu_ps(total + apart * lane), part));
  };
  if (lanes > 0) add(0, _mm512_castps512_ps128(x));
  if (lanes > 1) add(1, _mm512_extractf32x4_ps(x, 1));
  if (lanes > 2) add(2, _mm512_extractf32x4_ps(x, 2));
  if (lanes > 3) add(3, _mm512_extractf32x4_ps(x, 3));
}

// Adds one pair of vectors of ValueQuads to the elements that they stand for.
inline void add_to_row(float* total, const __m512* sums, Index byte, Index pair, Index width, bool is_int4) {
  if (is_int4) {
    const Index first = 2 * byte + 8 * pair;
    add_lanes(total + first, _mm512_unpacklo_ps(sums[0], sums[1]), ceil_div(width - first, 32), 32);
    add_lanes(total + first + 4, _mm512_unpackhi_ps(sums[0], sums[1]), ceil_div(width - first, 32), 32);
    return;
  }
  for (Index i = 0; i < 2; ++i) {
    const Index first = byte + 8 * pair + 4 * i;
    add_lanes(total + first, sums[i], ceil_div(width - first, 16), 16);
  }
}

template <bool is_int4>
inline void value_codes(const ChunkRows& chunk, const ValueTask& task) {
  const SidePlace& value = *chunk.side;
  alignas(64) float scales[kMaxGroups][kChunk];
  if (!read_scales(chunk, scales)) return value_wide(chunk, task);  // digits of weights are unsigned
  const Index per_group = value.row_bytes / value.num_groups, begin = chunk.begin / 4, end = ceil_div(chunk.end, 4);
  const bool is_spread = per_group % 64 != 0 && value.num_groups > 1;
  constexpr Index kPairs = is_int4 ? 4 : 2, kPairBytes = is_int4 ? 4 : 8;
  WeightDigits weights;
  SpreadDigits spread;
  ValueQuads<is_int4> quads;
  LineWalk ahead(chunk);
  shrink_totals(task);
  chunk.prefetch_scales();
  for_rows(task.num_rows, [&]<int R>(Index first) {
    weights.read(task.weights + first * kChunk, R, scales, value.num_groups);
    for (Index at = 0; at < value.row_bytes; at += 64) {
      quads.read(chunk.row, begin, end, at, min(value.row_bytes - at, 64), ahead);
      for (Index pair = 0; pair < kPairs; ++pair) {
        Index groups[4];
        for (Index lane = 0; lane < 4; ++lane)
          groups[lane] = min((at + 16 * lane + kPairBytes * pair) / per_group, value.num_groups - 1);
        if (is_spread && (pair == 0 || per_group % 16 != 0)) spread.read(weights, R, groups, begin, end);
        __m512 sums[R][2];
        const auto add = is_spread ? add_pair<R, true> : add_pair<R, false>;
        add(weights, spread, &quads.vector[0][2 * pair], quads.kVectors, begin, end, groups, sums);
        for (int r = 0; r < R; ++r)
          add_to_row(task.totals + (first + r) * task.width, sums[r], at, pair, task.width, is_int4);
      }
    }
  });
}

}  // namespace kvloom::KVLOOM_ISA
