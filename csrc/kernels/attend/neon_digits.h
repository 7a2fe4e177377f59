// Integer products of int8 and int4 codes, as NEON's dot products have them.
//
// The digits of queries and weights are those of digits.h, and so are the integers that come out: four tokens
// or four elements at a time. Keys are products of signed bytes. Weights are unsigned, and values become so
// by an offset, which the sum of the weights' digits takes away again.
#pragma once

#include "code_keys.h"
#include "code_values.h"

namespace kvloom::KVLOOM_ISA {

// Each dword of `sums` plus four products.
KVLOOM_INLINE IntVec add_signed(IntVec sums, IntVec codes, IntVec digits) {
  return as<IntVec>(vdotq_s32(as<int32x4_t>(sums), as<int8x16_t>(codes), as<int8x16_t>(digits)));
}
KVLOOM_INLINE IntVec add_unsigned(IntVec sums, IntVec codes, IntVec digits) {
  return as<IntVec>(vdotq_u32(as<uint32x4_t>(sums), as<uint8x16_t>(codes), as<uint8x16_t>(digits)));
}

KVLOOM_INLINE IntVec broadcast_dword(const void* from) { return splat(bit_copy<int32_t>(from)); }
KVLOOM_INLINE Vec size_of(Vec x) { return as<Vec>(as<IntVec>(x) & INT32_MAX); }
KVLOOM_INLINE float max_lane(Vec x) { return max_rows<1>(&x)[0]; }
// To nearest even.
KVLOOM_INLINE IntVec rounded(Vec x) { return as<IntVec>(vcvtnq_s32_f32(as<float32x4_t>(x))); }

// --- keys --------------------------------------------------------------------------------------------------

constexpr float kQueryLargest = 127.0f * 128.0f;  // of q = 128 * high + low

// A packed query row: its step, then the high digits of all elements and the low ones. Elements of the two
// nibbles of a byte are apart: for int4 the even elements come first, then the odd ones.
inline void pack_digits(const SideLayout& key, const float* query, Index num_rows, Index width,
                        Byte* packed) {
  const bool is_int4 = key.dtype == DType::int4;
  for (Index r = 0; r < num_rows; ++r, query += width, packed += kPackedRow) {
    Vec query_max{};
    IntVec is_finite = splat(-1);
    for (Index d = 0; d < width; d += kLanes) {
      const Vec size = size_of(load(query + d));
      is_finite &= size < INFINITY;
      query_max = maximum(size, query_max);
    }
    const float largest = max_lane(query_max) / kQueryLargest, step = has_any(~is_finite) ? NAN : largest;
    std::memcpy(packed, &step, sizeof step);
    const float inverse = largest > 0.0f ? 1.0f / largest : 0.0f;
    Byte *high = packed + kPackedHead, *low = high + kMaxHeadDim;
    for (Index d = 0; d < key.dim; d += kLanes) {
      const Vec bound = splat(kQueryLargest);
      const IntVec q = rounded(maximum(-bound, minimum(bound, load(query + d) * inverse)));
      const IntVec upper = (q + 64) >> 7;
      const Bytes digits[2] = {low_bytes(upper), low_bytes(q - (upper << 7))};
      KVLOOM_UNROLL(4)
      for (Index i = 0; i < kLanes; ++i) {
        const Index at = is_int4 ? (d + i) % 2 * key.dim / 2 + (d + i) / 2 : d + i;
        high[at] = static_cast<Byte>(digits[0][i]), low[at] = static_cast<Byte>(digits[1][i]);
      }
    }
  }
}

// R rows by a block of tokens, so many of them at a time that sums stay in registers.
template <int R, bool is_int4>
inline void score_digits_at(const Byte* block, const SideLayout& key, const Byte* packed, const float* scales,
                            float* scores, const BlockPrefetcher& prefetcher) {
  constexpr int N = R == 4 ? 2 : 4;  // vectors of tokens
  const Index per_group = key.row_bytes / 4 / key.num_groups;
  for (Index first = 0; first < kBlock; first += N * kLanes) {
    const Byte *at = block + 4 * first, *digits = packed + kPackedHead;
    Vec sums[R][N] = {};
    for (Index g = 0; g < key.num_groups; ++g) {
      IntVec high[R][N] = {}, low[R][N] = {};
      for (Index c = 0; c < per_group; ++c, at += kColumn, digits += 4) {
        if (first == 0) prefetcher.prefetch_line((at - block) / kColumn);
        IntVec codes[N];
        KVLOOM_UNROLL(4)
        for (int n = 0; n < N; ++n) codes[n] = bit_copy<IntVec>(at + 4 * n * kLanes);
        KVLOOM_UNROLL(2)
        for (int half = 0; half < (is_int4 ? 2 : 1);
             ++half) {  // of int4 the even elements, then the odd ones
          IntVec x[N];
          KVLOOM_UNROLL(4)
          for (int n = 0; n < N; ++n) {
            using Signed = VectorOf<int8_t, 4 * kLanes>::type;
            x[n] = codes[n];
            if constexpr (is_int4) x[n] = as<IntVec>(as<Signed>(half == 0 ? codes[n] << 4 : codes[n]) >> 4);
          }
          const Byte* from = digits + half * key.dim / 2;
          KVLOOM_UNROLL(4)
          for (int r = 0; r < R; ++r) {
            const IntVec h = broadcast_dword(from + r * kPackedRow);
            const IntVec l = broadcast_dword(from + r * kPackedRow + kMaxHeadDim);
            KVLOOM_UNROLL(4)
            for (int n = 0; n < N; ++n) {
              high[r][n] = add_signed(high[r][n], x[n], h);
              low[r][n] = add_signed(low[r][n], x[n], l);
            }
          }
        }
      }
      KVLOOM_UNROLL(4)
      for (int r = 0; r < R; ++r) {
        KVLOOM_UNROLL(4)
        for (int n = 0; n < N; ++n) {
          const Vec product = __builtin_convertvector((high[r][n] << 7) + low[r][n], Vec);
          sums[r][n] = multiply_add(product, load(scales + g * kChunk + first + n * kLanes), sums[r][n]);
        }
      }
    }
    KVLOOM_UNROLL(4)
    for (int r = 0; r < R; ++r) {
      const float step = bit_copy<float>(packed + r * kPackedRow);
      KVLOOM_UNROLL(4)
      for (int n = 0; n < N; ++n) store(scores + r * kChunk + first + n * kLanes, sums[r][n] * step);
    }
  }
}

template <bool is_int4>
inline void score_digits(const ChunkRows& chunk, const ScoreTask& task) {
  for_key_blocks(chunk, task.num_rows,
                 [&]<int R>(Index r, Index first, const Byte* const* blocks, const float* scales,
                            const BlockPrefetcher* prefetchers) {
                   float* scores = task.scores + r * kChunk + first;
                   for (Index i = 0; i < 2; ++i)
                     score_digits_at<R, is_int4>(blocks[i], *chunk.side, task.packed_row(r),
                                                 scales + i * kBlock, scores + i * kBlock, prefetchers[i]);
                 });
}

// --- values ------------------------------------------------------------------------------------------------

constexpr int32_t offset_of(bool is_int4) { return is_int4 ? 8 : 128; }  // of codes that are unsigned

// Rows' weights times the magnitudes of value scales as two unsigned digits, a byte for each token.
struct WeightDigits {
  alignas(64) Byte digit[4][2][kMaxGroups][kChunk];  // [row, which, group, token]
  float step[4][kMaxGroups];
  int32_t sum[4][kMaxGroups];  // of the integers that they are digits of

  void read(const float* weights, Index num_rows, const float (*scales)[kChunk], Index num_groups) {
    for (Index r = 0; r < num_rows; ++r)
      for (Index g = 0; g < num_groups; ++g) {
        alignas(64) float products[kChunk];
        Vec largest{};
        IntVec is_nan{};
        for (Index t = 0; t < kChunk; t += kLanes) {
          const Vec weight = load(weights + r * kChunk + t);
          // A weight of 0 hides any scale.
          const Vec w = weight == Vec{} ? Vec{} : weight * size_of(load(scales[g] + t));
          is_nan |= w != w;
          largest = maximum(w, largest);
          store(products + t, w);
        }
        const float weight_max = max_lane(largest);
        step[r][g] = has_any(is_nan) ? NAN : weight_max / 65535.0f;
        const float inverse = weight_max > 0.0f ? 65535.0f / weight_max : 0.0f;
        IntVec total{};
        for (Index t = 0; t < kChunk; t += kLanes) {
          const IntVec word = rounded(load(products + t) * inverse);  // at most 65535 times 1 + 2^-22
          total += word;
          const Bytes digits[2] = {low_bytes(word >> 8), low_bytes(word)};
          std::memcpy(digit[r][0][g] + t, digits, sizeof digits[0]);
          std::memcpy(digit[r][1][g] + t, digits + 1, sizeof digits[1]);
        }
        sum[r][g] = total[0] + total[1] + total[2] + total[3];
      }
  }
};

// Constants that make unsigned numbers of the nibbles of each token, by the sign of its scale: (nibble ^ x) -
// (x - 8) is 8 more than the code where x is 8, and than the code negated where it is -9.
struct CodeSigns {
  alignas(64) Byte x[kMaxGroups][kChunk];

  void read(const float (*scales)[kChunk], Index num_groups) {
    for (Index g = 0; g < num_groups; ++g)
      for (Index t = 0; t < kChunk; t += kLanes) {
        const Bytes signs = low_bytes(as<IntVec>(load(scales[g] + t)) < 0 ? splat(-9) : splat(8));
        std::memcpy(x[g] + t, &signs, sizeof signs);
      }
  }
};

// Codes of four tokens of kLanes bytes, unsigned: of int8 the bytes, of int4 the even or the odd elements.
template <bool is_int4>
KVLOOM_INLINE IntVec unsigned_codes(IntVec codes, int half, IntVec signs) {
  if constexpr (!is_int4) return codes ^ splat(static_cast<int32_t>(0x80808080));
  using Unsigned = VectorOf<uint8_t, 4 * kLanes>::type;
  const auto nibbles = half == 0 ? as<Unsigned>(codes) & 0x0f : as<Unsigned>(codes) >> 4;
  return as<IntVec>((nibbles ^ as<Unsigned>(signs)) - (as<Unsigned>(signs) - 8));
}

// R rows by V vectors of bytes of one group, over all quads of the chunk.
template <int R, bool is_int4, int V>
inline void add_digits(const ValueBlocks& values, const WeightDigits& weights, const CodeSigns& signs,
                       float* accumulators, Index width, Index byte, const RowPrefetcher& prefetcher) {
  constexpr int kHalves = is_int4 ? 2 : 1, N = V * kHalves;  // of int4 the even and the odd elements
  constexpr Index kDigit = kMaxGroups * kChunk;
  const Index group = values.side.group_of_byte[byte];
  IntVec high[R][N] = {}, low[R][N];
  KVLOOM_UNROLL(4)
  for (int r = 0; r < R; ++r) {
    KVLOOM_UNROLL(4)
    for (int n = 0; n < N; ++n) low[r][n] = splat(weights.sum[r][group] * -offset_of(is_int4));
  }
  for (Index b = values.begin; b < values.end; ++b) {
    const BlockPrefetcher block_prefetcher(prefetcher, values.chunk, b * kBlock);
    for (Index t = 0; t < kBlock; t += 4) {
      const Byte* at = values.block[b] + t * values.side.row_bytes + 4 * byte;
      const Byte* digits = weights.digit[0][0][group] + b * kBlock + t;
      const Index offset = at - values.block[b];
      const IntVec sign = is_int4 ? broadcast_dword(signs.x[group] + b * kBlock + t) : IntVec{};
      IntVec x[N];
      KVLOOM_UNROLL(4)
      for (int v = 0; v < V; ++v) {
        if (const Index from = offset + 4 * v * kLanes; from % 64 == 0)
          block_prefetcher.prefetch_line(from / 64);
        const IntVec codes = bit_copy<IntVec>(at + 4 * v * kLanes);
        KVLOOM_UNROLL(2)
        for (int half = 0; half < kHalves; ++half)
          x[kHalves * v + half] = unsigned_codes<is_int4>(codes, half, sign);
      }
      KVLOOM_UNROLL(4)
      for (int r = 0; r < R; ++r) {
        const IntVec h = broadcast_dword(digits + 2 * r * kDigit);
        const IntVec l = broadcast_dword(digits + (2 * r + 1) * kDigit);
        KVLOOM_UNROLL(4)
        for (int n = 0; n < N; ++n) {
          high[r][n] = add_unsigned(high[r][n], x[n], h);
          low[r][n] = add_unsigned(low[r][n], x[n], l);
        }
      }
    }
  }
  KVLOOM_UNROLL(4)
  for (int r = 0; r < R; ++r) {
    Vec out[N];
    KVLOOM_UNROLL(4)
    for (int n = 0; n < N; ++n)
      out[n] = weights.step[r][group] * __builtin_convertvector((high[r][n] << 8) + low[r][n], Vec);
    float* accumulator = accumulators + r * width + kHalves * byte;
    for (int v = 0; is_int4 && v < V; ++v) interleave(out + 2 * v);
    KVLOOM_UNROLL(4)
    for (int n = 0; n < N; ++n) store(accumulator + n * kLanes, load(accumulator + n * kLanes) + out[n]);
  }
}

inline bool has_negative(const float (*scales)[kChunk], Index num_groups) {
  IntVec is_negative{};
  for (Index g = 0; g < num_groups; ++g)
    for (Index t = 0; t < kChunk; t += kLanes) is_negative |= load(scales[g] + t) < Vec{};
  return has_any(is_negative);
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
  for_rows(task.num_rows, [&]<int R>(Index first) {
    weights.read(task.weights + first * kChunk, R, scales, value.num_groups);
    const RowPrefetcher prefetcher = chunk.prefetcher.for_first_rows(first);
    float* accumulators = task.accumulators + first * task.width;
    constexpr int V = (R == 4 ? 2 : 4) / (is_int4 ? 2 : 1);  // the most whose sums stay in registers
    for (Index byte = 0; byte < value.row_bytes; byte += V * kLanes)
      add_digits<R, is_int4, V>(blocks, weights, signs, accumulators, task.width, byte, prefetcher);
  });
}

}  // namespace kvloom::KVLOOM_ISA
