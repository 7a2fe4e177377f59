// Integer products of int8 and int4 codes by AVX-512 VNNI.
//
// Codes are multiplied by integer digits, so that a product costs no conversion. A 16-bit query is split into
// two signed digits of 7 and 8 bits (15 bits of the row's largest element), weights times magnitudes of value
// scales into two unsigned ones (16 bits of the chunk's largest); the sign of a scale goes to the codes. Both
// are finer than the query's own type; a float32 query is not supported here.
#pragma once

#include "code_keys.h"
#include "code_values.h"
#include "panel.h"

namespace kvloom::KVLOOM_ISA {

// --- keys --------------------------------------------------------------------------------------------------

constexpr float kQueryLargest = 127.0f * 128.0f;  // of q = 128 * high + low

// The header of a packed query row, before its digits.
struct QueryHead {
  float step;
  int32_t offset[kMaxGroups];  // what unsigned codes add to each group's product
};
static_assert(sizeof(QueryHead) <= kPackedHead);

// Elements of the two nibbles of a byte are apart: for int4 the even elements come first, then the odd ones.
inline void pack_digits(const SideLayout& key, const float* query, Index num_rows, Index width,
                        Byte* packed) {
  const bool is_int4 = key.dtype == DType::int4;
  alignas(64) int32_t whole[kMaxHeadDim];
  for (Index r = 0; r < num_rows; ++r, query += width, packed += kPackedRow) {
    __m512 query_max = _mm512_setzero_ps();
    __mmask16 finite = 0xffff;
    for (Index d = 0; d < width; d += 16) {
      const __m512 size = _mm512_abs_ps(_mm512_loadu_ps(query + d));
      finite &= _mm512_cmp_ps_mask(size, _mm512_set1_ps(INFINITY), _CMP_LT_OQ);
      query_max = _mm512_max_ps(size, query_max);
    }
    QueryHead head;
    const float step = _mm512_reduce_max_ps(query_max) / kQueryLargest;
    head.step = finite == 0xffff ? step : NAN;
    const __m512 inverse = _mm512_set1_ps(step > 0.0f ? 1.0f / step : 0.0f);
    const __m512i bound = _mm512_set1_epi32(static_cast<int>(kQueryLargest));
    alignas(64) int8_t digits[2][kMaxHeadDim];
    for (Index d = 0; d < width; d += 16) {
      __m512i q = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(query + d), inverse));
      q = _mm512_max_epi32(_mm512_min_epi32(q, bound), _mm512_sub_epi32(__m512i{}, bound));
      const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(q, _mm512_set1_epi32(64)), 7);
      _mm512_store_si512(whole + d, q);
      _mm_store_si128(reinterpret_cast<__m128i*>(digits[0] + d), _mm512_cvtepi32_epi8(high));
      _mm_store_si128(reinterpret_cast<__m128i*>(digits[1] + d),
                      _mm512_cvtepi32_epi8(_mm512_sub_epi32(q, _mm512_slli_epi32(high, 7))));
    }
    int8_t* to = reinterpret_cast<int8_t*>(packed + kPackedHead);
    for (Index digit = 0; digit < 2; ++digit, to += kMaxHeadDim) {
      if (!is_int4) std::memcpy(to, digits[digit], key.dim);
      for (Index d = 0; is_int4 && d < key.dim; d += 32) {
        const __m512i pairs =
            _mm512_cvtepi16_epi32(_mm256_load_si256(reinterpret_cast<const __m256i*>(digits[digit] + d)));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to + d / 2), _mm512_cvtepi32_epi8(pairs));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to + key.dim / 2 + d / 2),
                         _mm512_cvtepi32_epi8(_mm512_srli_epi32(pairs, 8)));
      }
    }
    for (Index g = 0; g < key.num_groups; ++g) {
      int32_t sum = 0;
      for (Index d = g * key.group; d < (g + 1) * key.group; ++d) sum += whole[d];
      head.offset[g] = sum * (is_int4 ? -8 : -128);
    }
    std::memcpy(packed, &head, sizeof(head));
  }
}

// Each dword of `sums` plus four products. The intrinsic makes GCC 12 copy every sum in every step.
inline void add_products(__m512i& sums, __m512i unsigned_bytes, __m512i signed_bytes) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(unsigned_bytes), "v"(signed_bytes));
}

inline __m512i broadcast_dword(const void* from) { return _mm512_set1_epi32(bit_copy<int32_t>(from)); }

// Codes of a column as unsigned bytes, by their flipped sign bit: of int4 the even elements or the odd ones.
template <bool is_int4>
KVLOOM_INLINE __m512i unsigned_codes(__m512i codes, int half) {
  const __m512i sign = _mm512_set1_epi32(static_cast<int>(is_int4 ? 0x88888888u : 0x80808080u));
  const __m512i flipped = _mm512_xor_si512(codes, sign);
  if (!is_int4) return flipped;
  return _mm512_and_si512(_mm512_srli_epi32(flipped, static_cast<unsigned>(4 * half)),
                          _mm512_set1_epi32(0x0f0f0f0f));
}

// Two blocks of keys as unsigned bytes, for many rows: of int4 each column becomes two.
template <bool is_int4>
struct UnsignedColumns {
  void read(const Byte* const* blocks, const SideLayout& key, const BlockPrefetcher* prefetchers) {
    for (Index at = 0; at < key.row_bytes * kBlock; at += kColumn)
      for (int n = 0; n < 2; ++n) {
        prefetchers[n].prefetch_line(at / 64);
        const __m512i codes = _mm512_loadu_si512(blocks[n] + at);
        KVLOOM_UNROLL(2)
        for (int half = 0; half < kHalves; ++half)
          _mm512_store_si512(block[n] + kHalves * at + half * kColumn, unsigned_codes<is_int4>(codes, half));
      }
  }

  static constexpr int kHalves = is_int4 ? 2 : 1;
  alignas(64) Byte block[2][kMaxHeadDim * kBlock];
};

// R rows by two blocks of tokens: of UnsignedColumns, or as they are stored.
template <int R, bool is_int4, bool are_unsigned>
inline void score_digits_at(const Byte* const* blocks, const SideLayout& key, const Byte* packed,
                            const float* scales, float* scores, const BlockPrefetcher* prefetchers) {
  constexpr int kHalves = is_int4 ? 2 : 1;
  const Index per_group = key.row_bytes / 4 / key.num_groups;
  Index at = 0;
  const Byte* digits = packed + kPackedHead;
  for (Index g = 0; g < key.num_groups; ++g) {
    __m512i high[R][2], low[R][2];
    KVLOOM_UNROLL(4)
    for (int r = 0; r < R; ++r) {
      high[r][0] = high[r][1] = _mm512_setzero_si512();
      low[r][0] = low[r][1] = broadcast_dword(packed + r * kPackedRow + offsetof(QueryHead, offset) + 4 * g);
    }
    for (Index c = 0; c < per_group; ++c, at += kColumn, digits += 4) {
      if (!are_unsigned) prefetchers[0].prefetch_line(at / 64), prefetchers[1].prefetch_line(at / 64);
      KVLOOM_UNROLL(2)
      for (int half = 0; half < kHalves; ++half) {
        __m512i x[2];
        KVLOOM_UNROLL(2)
        for (int n = 0; n < 2; ++n)
          x[n] = are_unsigned ? _mm512_load_si512(blocks[n] + kHalves * at + half * kColumn)
                              : unsigned_codes<is_int4>(_mm512_loadu_si512(blocks[n] + at), half);
        const Byte* from = digits + half * key.dim / 2;
        KVLOOM_UNROLL(4)
        for (int r = 0; r < R; ++r) {
          const __m512i h = broadcast_dword(from + r * kPackedRow);
          const __m512i l = broadcast_dword(from + r * kPackedRow + kMaxHeadDim);
          add_products(high[r][0], x[0], h);
          add_products(high[r][1], x[1], h);
          add_products(low[r][0], x[0], l);
          add_products(low[r][1], x[1], l);
        }
      }
    }
    KVLOOM_UNROLL(2)
    for (int block = 0; block < 2; ++block) {
      const __m512 scale = _mm512_load_ps(scales + g * kChunk + block * kBlock);
      KVLOOM_UNROLL(4)
      for (int r = 0; r < R; ++r) {  // sums stay in memory: the products need the registers
        float* sum = scores + r * kChunk + block * kBlock;
        const __m512 product =
            _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(high[r][block], 7), low[r][block]));
        const __m512 before = g == 0 ? _mm512_setzero_ps() : _mm512_loadu_ps(sum);
        _mm512_storeu_ps(sum, _mm512_fmadd_ps(product, scale, before));
      }
    }
  }
  KVLOOM_UNROLL(4)
  for (int r = 0; r < R; ++r) {
    const __m512 step = _mm512_set1_ps(bit_copy<float>(packed + r * kPackedRow));
    float* sum = scores + r * kChunk;
    _mm512_storeu_ps(sum, _mm512_mul_ps(_mm512_loadu_ps(sum), step));
    _mm512_storeu_ps(sum + kBlock, _mm512_mul_ps(_mm512_loadu_ps(sum + kBlock), step));
  }
}

// In a function of its own: a decode step runs on a smaller stack, which stays in the first-level cache.
template <bool is_int4>
[[gnu::noinline]] void score_many_digits(const ChunkRows& chunk, const ScoreTask& task) {
  UnsignedColumns<is_int4> columns;
  const Byte* const both[2] = {columns.block[0], columns.block[1]};
  for_key_blocks(chunk, task.num_rows,
                 [&]<int R>(Index r, Index first, const Byte* const* blocks, const float* scales,
                            const BlockPrefetcher* prefetchers) {
                   if (r == 0) columns.read(blocks, *chunk.side, prefetchers);
                   score_digits_at<R, is_int4, true>(both, *chunk.side, task.packed_row(r), scales,
                                                     task.scores + r * kChunk + first, prefetchers);
                 });
}

template <bool is_int4>
inline void score_digits(const ChunkRows& chunk, const ScoreTask& task) {
  if (task.num_rows >= kManyRows) return score_many_digits<is_int4>(chunk, task);
  for_key_blocks(chunk, task.num_rows,
                 [&]<int R>(Index r, Index first, const Byte* const* blocks, const float* scales,
                            const BlockPrefetcher* prefetchers) {
                   score_digits_at<R, is_int4, false>(blocks, *chunk.side, task.packed_row(r), scales,
                                                      task.scores + r * kChunk + first, prefetchers);
                 });
}

// --- values ------------------------------------------------------------------------------------------------

// A byte for each token of a chunk, four tokens to a dword: quad i of block b is dword 4 * i + b, as packing
// leaves them.
constexpr Index dword_offset(Index block, Index quad) { return 4 * (4 * quad + block); }

// Rows' weights times the magnitudes of value scales as two unsigned digits.
struct WeightDigits {
  alignas(64) Byte digit[4][2][kMaxGroups][kChunk];  // [row, which, group, dword]
  float step[4][kMaxGroups];

  void read(const float* weights, Index num_rows, const float (*scales)[kChunk], Index num_groups) {
    for (Index r = 0; r < num_rows; ++r)
      for (Index g = 0; g < num_groups; ++g) {
        __m512 w[4], lane_max = _mm512_setzero_ps();
        __mmask16 is_nan = 0;
        KVLOOM_UNROLL(4)
        for (int i = 0; i < 4; ++i) {
          const __m512 weight = _mm512_loadu_ps(weights + r * kChunk + 16 * i);
          // A weight of 0 hides any scale.
          const __mmask16 seen = _mm512_cmp_ps_mask(weight, _mm512_setzero_ps(), _CMP_NEQ_UQ);
          w[i] = _mm512_maskz_mul_ps(seen, weight, _mm512_abs_ps(_mm512_load_ps(scales[g] + 16 * i)));
          is_nan |= _mm512_cmp_ps_mask(w[i], w[i], _CMP_UNORD_Q);
          lane_max = _mm512_max_ps(w[i], lane_max);
        }
        const float weight_max = _mm512_reduce_max_ps(lane_max);
        step[r][g] = is_nan ? NAN : weight_max / 65535.0f;
        const __m512 inverse = _mm512_set1_ps(weight_max > 0.0f ? 65535.0f / weight_max : 0.0f);
        __m512i words[2];
        KVLOOM_UNROLL(2)
        for (int i = 0; i < 2; ++i)
          words[i] = _mm512_packus_epi32(_mm512_cvtps_epi32(_mm512_mul_ps(w[2 * i], inverse)),
                                         _mm512_cvtps_epi32(_mm512_mul_ps(w[2 * i + 1], inverse)));
        const __m512i low = _mm512_set1_epi16(0xff);
        _mm512_store_si512(digit[r][0][g], _mm512_packus_epi16(_mm512_srli_epi16(words[0], 8),
                                                               _mm512_srli_epi16(words[1], 8)));
        _mm512_store_si512(digit[r][1][g], _mm512_packus_epi16(_mm512_and_si512(words[0], low),
                                                               _mm512_and_si512(words[1], low)));
      }
  }
};

// Constants that make numbers of the nibbles of each token, by the sign of its scale: (nibble ^ x) - x is the
// code where x is 8, and the code negated where it is -9.
struct CodeSigns {
  alignas(64) Byte x[kMaxGroups][kChunk];  // [group, dword]

  void read(const float (*scales)[kChunk], Index num_groups) {
    for (Index g = 0; g < num_groups; ++g) {
      __m512i of_token[4];
      KVLOOM_UNROLL(4)
      for (int i = 0; i < 4; ++i)
        of_token[i] = _mm512_mask_mov_epi32(_mm512_set1_epi32(8),
                                            _mm512_movepi32_mask(as<__m512i>(load(scales[g] + 16 * i))),
                                            _mm512_set1_epi32(0xf7));
      _mm512_store_si512(x[g], _mm512_packus_epi16(_mm512_packus_epi32(of_token[0], of_token[1]),
                                                   _mm512_packus_epi32(of_token[2], of_token[3])));
    }
  }
};

// Four codes of each lane, two in a byte, as bytes: the even or the odd elements, with the signs of scales.
inline __m512i signed_codes(__m512i nibbles, __m512i x) {
  constexpr int kAndThenXor = 0x6a;
  return _mm512_sub_epi8(_mm512_ternarylogic_epi32(nibbles, _mm512_set1_epi8(0x0f), x, kAndThenXor), x);
}

// Values of int4 as bytes with the signs of their scales, for many rows: each 16 bytes of four tokens become
// their even elements, then their odd ones.
struct SignedValues {
  void read(const ValueBlocks& values, const CodeSigns& signs, const RowPrefetcher& prefetcher) {
    const Index row_bytes = values.side.row_bytes;
    for (Index b = values.begin; b < values.end; ++b) {
      const BlockPrefetcher block_prefetcher(prefetcher, values.chunk, b * kBlock);
      Byte* to = block(row_bytes, b);
      for (Index quad = 0, at = 0; quad < kBlock / 4; ++quad)
        for (Index byte = 0; byte < row_bytes; byte += 16, at += 64) {
          block_prefetcher.prefetch_line(at / 64);
          const __m512i codes = _mm512_loadu_si512(values.block[b] + at);
          const __m512i of_tokens =
              broadcast_dword(signs.x[values.side.group_of_byte[byte]] + dword_offset(b, quad));
          _mm512_store_si512(to + 2 * at, signed_codes(codes, of_tokens));
          _mm512_store_si512(to + 2 * at + 64, signed_codes(_mm512_srli_epi32(codes, 4), of_tokens));
        }
    }
  }

  Byte* block(Index row_bytes, Index b) { return bytes + 2 * b * kBlock * row_bytes; }

  alignas(64) Byte bytes[kChunk * kMaxHeadDim];
};

// R rows by V vectors of 16 bytes of one group, over all quads of the chunk; of `wide` values, if there are.
template <int R, bool is_int4, int V, bool is_wide = false, bool prefetches = true>
inline void add_digits(const ValueBlocks& values, const WeightDigits& weights, const CodeSigns& signs,
                       float* accumulators, Index width, Index byte, const RowPrefetcher& prefetcher,
                       SignedValues* wide = nullptr) {
  constexpr int N = is_int4 ? 2 * V : V;  // of int4 the even and the odd elements
  constexpr Index kDigit = kMaxGroups * kChunk;
  const Index group = values.side.group_of_byte[byte];
  __m512i sums[R][2][N];
  KVLOOM_UNROLL(4)
  for (int r = 0; r < R; ++r) {
    KVLOOM_UNROLL(2)
    for (int n = 0; n < N; ++n) sums[r][0][n] = sums[r][1][n] = _mm512_setzero_si512();
  }
  for (Index b = values.begin; b < values.end; ++b) {
    const Byte* at = values.block[b] + 4 * byte;
    const Byte* digits = weights.digit[0][0][group] + dword_offset(b, 0);
    const Byte* sign = signs.x[group] + dword_offset(b, 0);
    const BlockPrefetcher block_prefetcher(prefetcher, values.chunk, b * kBlock);
    KVLOOM_UNROLL(1)
    for (Index quad = 0; quad < kBlock / 4;
         ++quad, at += 4 * values.side.row_bytes, digits += dword_offset(0, 1), sign += dword_offset(0, 1)) {
      __m512i x[N];
      KVLOOM_UNROLL(2)
      for (int v = 0; v < V; ++v) {
        if constexpr (is_wide) {
          const Byte* of_v = wide->block(values.side.row_bytes, b) + 2 * (at - values.block[b]) + 128 * v;
          x[2 * v] = _mm512_load_si512(of_v);
          x[2 * v + 1] = _mm512_load_si512(of_v + 64);
          continue;
        }
        if (prefetches) block_prefetcher.prefetch_line((at - values.block[b]) / 64 + v);
        const __m512i codes = _mm512_loadu_si512(at + 64 * v);
        if constexpr (is_int4) {
          const __m512i of_tokens = broadcast_dword(sign);
          x[2 * v] = signed_codes(codes, of_tokens);
          x[2 * v + 1] = signed_codes(_mm512_srli_epi32(codes, 4), of_tokens);
        } else {
          x[v] = codes;
        }
      }
      KVLOOM_UNROLL(4)
      for (int r = 0; r < R; ++r) {
        KVLOOM_UNROLL(2)
        for (int which = 0; which < 2; ++which) {
          const __m512i w = broadcast_dword(digits + (2 * r + which) * kDigit);
          KVLOOM_UNROLL(2)
          for (int n = 0; n < N; ++n) add_products(sums[r][which][n], w, x[n]);
        }
      }
    }
  }
  KVLOOM_UNROLL(4)
  for (int r = 0; r < R; ++r) {
    Vec out[N];
    const __m512 step = _mm512_set1_ps(weights.step[r][group]);
    KVLOOM_UNROLL(2)
    for (int n = 0; n < N; ++n) {
      const __m512i sum = _mm512_add_epi32(_mm512_slli_epi32(sums[r][0][n], 8), sums[r][1][n]);
      out[n] = as<Vec>(_mm512_mul_ps(step, _mm512_cvtepi32_ps(sum)));
    }
    float* accumulator = accumulators + r * width + (is_int4 ? 2 * byte : byte);
    if constexpr (is_int4) interleave(out);
    KVLOOM_UNROLL(2)
    for (int n = 0; n < N; ++n) store(accumulator + n * kLanes, load(accumulator + n * kLanes) + out[n]);
  }
}

inline bool has_negative(const float (*scales)[kChunk], Index num_groups) {
  __mmask16 negative = 0;
  for (Index g = 0; g < num_groups; ++g)
    for (Index t = 0; t < kChunk; t += 16)
      negative |= _mm512_cmp_ps_mask(_mm512_load_ps(scales[g] + t), _mm512_setzero_ps(), _CMP_LT_OQ);
  return negative != 0;
}

template <bool is_int4>
inline void value_digits(const ChunkRows& chunk, const ValueTask& task) {
  const SideLayout& value = *chunk.side;
  alignas(64) float scales[kMaxGroups][kChunk];
  read_scales(chunk, scales);
  // Codes of 8 bits have no room for the sign of a scale, which no store makes.
  if (!is_int4 && has_negative(scales, value.num_groups)) return value_codes<is_int4, Unrounded>(chunk, task);
  const ValueBlocks blocks(chunk);
  WeightDigits weights;
  CodeSigns signs;
  if constexpr (is_int4) signs.read(scales, value.num_groups);
  rescale_accumulators(task);
  chunk.prefetch_scales();
  SignedValues wide;
  const bool is_wide = is_int4 && task.num_rows >= kManyRows;
  if (is_wide) wide.read(blocks, signs, chunk.prefetcher);
  for_rows(task.num_rows, [&]<int R>(Index first) {
    weights.read(task.weights + first * kChunk, R, scales, value.num_groups);
    const RowPrefetcher prefetcher = chunk.prefetcher.for_first_rows(first);
    float* accumulators = task.accumulators + first * task.width;
    constexpr int V = is_int4 ? 1 : 2;
    Index byte = 0;
    if constexpr (is_int4)
      for (; is_wide && byte < value.row_bytes; byte += 16)
        add_digits<R, true, 1, true>(blocks, weights, signs, accumulators, task.width, byte, prefetcher,
                                     &wide);
    if constexpr (!is_int4)
      for (; first > 0 && byte + 32 <= value.row_bytes; byte += 32)
        add_digits<R, false, 2, false, false>(blocks, weights, signs, accumulators, task.width, byte,
                                              prefetcher);
    for (; byte + 16 * V <= value.row_bytes; byte += 16 * V)
      add_digits<R, is_int4, V>(blocks, weights, signs, accumulators, task.width, byte, prefetcher);
    for (; byte < value.row_bytes; byte += 16)
      add_digits<R, is_int4, 1>(blocks, weights, signs, accumulators, task.width, byte, prefetcher);
  });
}

}  // namespace kvloom::KVLOOM_ISA
