// Products of bfloat16 numbers, two to a lane, as AVX-512 BF16 has them.
#pragma once

#include "products.h"

namespace kvloom::KVLOOM_ISA {

// --- keys --------------------------------------------------------------------------------------------------

inline void pack_bf16(const SideLayout&, const float* query, Index num_rows, Index width, Byte* packed) {
  for (Index r = 0; r < num_rows; ++r, query += width, packed += kPackedRow)
    for (Index d = 0; d < width; d += 16)
      _mm256_store_si256(reinterpret_cast<__m256i*>(packed + kPackedHead + 2 * d),
                         as<__m256i>(_mm512_cvtneps_pbh(_mm512_loadu_ps(query + d))));
}

// As FloatScores, for elements that are two to a dword.
struct PairScores {
  using Products = PairScores;
  static constexpr Index kElements = 2, kBytes = 2;
  static Vec at(const Byte* row, Index dword) { return bit_copy<Vec>(row + 4 * dword); }
  static Vec add(Vec sum, Vec x, Vec y) {
    return as<Vec>(_mm512_dpbf16_ps(as<__m512>(sum), as<__m512bh>(x), as<__m512bh>(y)));
  }
  static const Byte* query(const ScoreTask& task) { return task.packed_row(0) + kPackedHead; }
  static constexpr Index query_bytes(Index) { return kPackedRow; }
};

inline void score_bf16(const ChunkRows& chunk, const ScoreTask& task) {
  for_width(task.width, [&]<int W>() {
    score_blocks<PairScores, W>(chunk, task, chunk.prefetcher,
                                [&](Index first) { return chunk.row + first; });
  });
}

// --- values ------------------------------------------------------------------------------------------------

// Weights of two tokens to a dword, rounded to bfloat16 as torch rounds them.
struct WeightPairs {
  alignas(64) uint32_t pair[4][kChunk / 2];

  void read(const float* weights, Index num_rows) {
    for (Index r = 0; r < num_rows; ++r, weights += kChunk)
      for (Index t = 0; t < kChunk; t += 32)
        _mm512_store_si512(pair[r] + t / 2, as<__m512i>(_mm512_cvtne2ps_pbh(_mm512_loadu_ps(weights + t + 16),
                                                                            _mm512_loadu_ps(weights + t))));
  }
};

// 32 elements of two tokens, a dword of each pair: the lower four of each eight, and the upper four.
struct TokenPairs {
  TokenPairs(const Byte* first, const Byte* second) {
    const __m512i x = _mm512_loadu_si512(first), y = _mm512_loadu_si512(second);
    lower = _mm512_unpacklo_epi16(x, y);
    upper = _mm512_unpackhi_epi16(x, y);
  }

  __m512i lower, upper;
};

// Dwords of TokenPairs in the order of elements: the first 16, or the second.
inline __m512i deinterleaved(__m512i lower, __m512i upper, bool second) {
  const __m512i index = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  return _mm512_permutex2var_epi32(lower, _mm512_add_epi32(index, _mm512_set1_epi32(second ? 8 : 0)), upper);
}

inline void add_to(float* accumulator, __m512 x) {
  _mm512_storeu_ps(accumulator, _mm512_add_ps(_mm512_loadu_ps(accumulator), x));
}

inline __m512bh weight_pair(const WeightPairs& weights, int r, Index pair) {
  return as<__m512bh>(_mm512_set1_epi32(static_cast<int>(weights.pair[r][pair])));
}

// R rows by 64 elements, two tokens at a time. The accumulators are deinterleaved when the chunk is done.
template <int R>
inline void add_values_bf16(const WeightPairs& weights, const Byte* const* values,
                            const RowPrefetcher& prefetcher, Index begin, Index end, float* accumulators,
                            Index width, Index d) {
  __m512 lower[R][2], upper[R][2];
  KVLOOM_UNROLL(4)
  for (int r = 0; r < R; ++r) lower[r][0] = lower[r][1] = upper[r][0] = upper[r][1] = _mm512_setzero_ps();
  for (Index t = begin / 2 * 2; t < end; t += 2) {
    KVLOOM_UNROLL(2)
    for (int n = 0; n < 2; ++n) {
      const Index at = 2 * (d + 32 * n);
      prefetcher.prefetch_lines<2>(t, at, 1);
      prefetcher.prefetch_lines<2>(t + 1, at, 1);
      const TokenPairs x(values[t] + at, values[t + 1] + at);
      KVLOOM_UNROLL(4)
      for (int r = 0; r < R; ++r) {
        const __m512bh w = weight_pair(weights, r, t / 2);
        lower[r][n] = _mm512_dpbf16_ps(lower[r][n], as<__m512bh>(x.lower), w);
        upper[r][n] = _mm512_dpbf16_ps(upper[r][n], as<__m512bh>(x.upper), w);
      }
    }
  }
  KVLOOM_UNROLL(4)
  for (int r = 0; r < R; ++r) {
    KVLOOM_UNROLL(2)
    for (int n = 0; n < 2; ++n) {
      const __m512i low = as<__m512i>(lower[r][n]), high = as<__m512i>(upper[r][n]);
      float* accumulator = accumulators + r * width + d + 32 * n;
      add_to(accumulator, as<__m512>(deinterleaved(low, high, false)));
      add_to(accumulator + 16, as<__m512>(deinterleaved(low, high, true)));
    }
  }
}

// The values of a chunk, packed in pairs of tokens once for many rows.
class ValuePanel {
 public:
  ValuePanel(const Byte* const* values, Index begin, Index end, Index width)
      : begin_(begin / 2), end_(ceil_div(end, 2)) {
    for (Index pair = begin_; pair < end_; ++pair)
      for (Index d = 0; d < width; d += 32) {
        const TokenPairs x(values[2 * pair] + 2 * d, values[2 * pair + 1] + 2 * d);
        uint32_t* to = pairs_[d / 64][pair] + d % 64;
        _mm512_store_si512(to, deinterleaved(x.lower, x.upper, false));
        _mm512_store_si512(to + 16, deinterleaved(x.lower, x.upper, true));
      }
  }

  // Adds R rows by 64 elements.
  template <int R>
  void add(const WeightPairs& weights, float* accumulators, Index width, Index d) const {
    __m512 sums[R][4];
    KVLOOM_UNROLL(4)
    for (int r = 0; r < R; ++r) sums[r][0] = sums[r][1] = sums[r][2] = sums[r][3] = _mm512_setzero_ps();
    for (Index pair = begin_; pair < end_; ++pair) {
      __m512bh x[4];
      KVLOOM_UNROLL(4)
      for (int n = 0; n < 4; ++n) x[n] = as<__m512bh>(_mm512_load_si512(pairs_[d / 64][pair] + 16 * n));
      KVLOOM_UNROLL(4)
      for (int r = 0; r < R; ++r) {
        KVLOOM_UNROLL(4)
        for (int n = 0; n < 4; ++n)
          sums[r][n] = _mm512_dpbf16_ps(sums[r][n], x[n], weight_pair(weights, r, pair));
      }
    }
    KVLOOM_UNROLL(4)
    for (int r = 0; r < R; ++r) {
      KVLOOM_UNROLL(4)
      for (int n = 0; n < 4; ++n) add_to(accumulators + r * width + d + 16 * n, sums[r][n]);
    }
  }

 private:
  Index begin_, end_;
  alignas(64) uint32_t pairs_[kMaxHeadDim / 64][kChunk / 2][64];  // by 64 elements
};

// Adds the tokens [begin, end) of a chunk.
inline void add_rows_bf16(const ValueTask& task, const Byte* const* values, const RowPrefetcher& prefetcher,
                          Index begin, Index end) {
  rescale_accumulators(task);
  WeightPairs weights;
  if (task.num_rows >= kManyRows) {
    const ValuePanel panel(values, begin, end, task.width);
    return for_rows(task.num_rows, [&]<int R>(Index r) {
      prefetcher.prefetch_share(r, r + R, task.num_rows, 2 * task.width);
      weights.read(task.weights + r * kChunk, R);
      float* accumulators = task.accumulators + r * task.width;
      for (Index d = 0; d < task.width; d += 64) panel.add<R>(weights, accumulators, task.width, d);
    });
  }
  for_rows(task.num_rows, [&]<int R>(Index r) {
    const RowPrefetcher row_prefetcher = prefetcher.for_first_rows(r);
    float* accumulators = task.accumulators + r * task.width;
    weights.read(task.weights + r * kChunk, R);
    for (Index d = 0; d < task.width; d += 64)
      add_values_bf16<R>(weights, values, row_prefetcher, begin, end, accumulators, task.width, d);
  });
}

inline void value_bf16(const ChunkRows& chunk, const ValueTask& task) {
  add_rows_bf16(task, chunk.row, chunk.prefetcher, chunk.begin, chunk.end);
}

}  // namespace kvloom::KVLOOM_ISA
