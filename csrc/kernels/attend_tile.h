// The two products of attention over one chunk of tokens: scores = q.k, total += weight * v.
//
// Every row's sums run over d (scores) and over tokens (totals) in one order, whatever rows share its tile:
// a row's bits do not depend on its neighbours.
#pragma once

#include "attend_vector.h"

namespace kvloom::KVLOOM_ISA {

// Walks the rows of the next chunk in address order and asks for their lines ahead of time, into L2.
class Prefetch {
 public:
  void add_row(const Byte* row) { rows_[count_++] = row; }
  void reset(Index row_bytes) {
    lines_ = ceil_div(row_bytes, 64);
    count_ = row_ = line_ = 0;
    last_ = nullptr;
  }
  Index lines_per_row() const { return lines_; }

  void advance(Index lines) {
    for (; lines > 0 && row_ < count_; --lines) {
      const Byte* at = rows_[row_] + 64 * line_;
      if (++line_ == lines_) line_ = 0, ++row_;
      // Short rows, such as scales, share lines.
      if (lines_ == 1 && reinterpret_cast<std::uintptr_t>(at) / 64 == reinterpret_cast<std::uintptr_t>(last_) / 64)
        continue;
      last_ = at;
      __builtin_prefetch(at, 0, 2);
    }
  }

 private:
  const Byte* rows_[kChunk];
  const Byte* last_ = nullptr;
  Index lines_ = 0, count_ = 0, row_ = 0, line_ = 0;
};

// Rows of one head in one chunk. Those of [begin, end) are read, the others point to one of these.
struct ChunkRows {
  const SidePlace* side;
  Index begin, end;
  const Byte* row[kChunk];
  const Byte* scale[kChunk];
  Prefetch* ahead;
  Prefetch* scales_ahead;
  Index share;  // so many heads walk through the rows ahead together
  DType query_dtype;

  // To be called once for each four tokens.
  void prefetch(Index part = 1) const {
    ahead->advance(ceil_div(4 * ahead->lines_per_row(), share * part));
    if (side->scale.data) scales_ahead->advance(ceil_div(4 * scales_ahead->lines_per_row(), share * part));
  }
};

struct ScoreTask {
  const float* query;  // [rows, width], zero from dim on
  const void* packed;  // the query as the kernel wants it
  Index num_rows, width;
  float* scores;  // [rows, kChunk]
};

struct ValueTask {
  const float* weights;  // [rows, kChunk], 0 outside [begin, end)
  const float* factors;  // [rows], by which totals shrink first
  Index num_rows, width;
  float* totals;  // [rows, width]
};

// --- any dtype to float32 ----------------------------------------------------------------------------------

// What a load of `side` as query_dtype gives, element by element; zero from dim on.
inline void widen_row(const SidePlace& side, const Byte* row, const Byte* scale_row, DType query_dtype,
                      float* out) {
  const DType dtype = side.cache.dtype;
  Index d = 0;
  if (!side.scale.data) {
    if (dtype == DType::f32 && query_dtype == DType::f32) {
      std::memcpy(out, row, static_cast<std::size_t>(side.dim) * 4);
      d = side.dim;
    } else {
      if (dtype == query_dtype)
        for (; d + kLanes <= side.dim; d += kLanes)
          store(out + d, dtype == DType::bf16 ? load_bf16(row + 2 * d) : load_f16(row + 2 * d));
      for (; d < side.dim; ++d) out[d] = round_to(query_dtype, read_float(row, dtype, d));
    }
  } else {
    const float top = largest_finite(query_dtype == DType::f16 ? query_dtype : side.scale.dtype);
    const bool rounds = query_dtype == DType::f32 && side.scale.dtype != DType::f32;
    for (Index g = 0; g < side.num_groups; ++g) {
      const float scale = read_float(scale_row, side.scale.dtype, g);
      const Index end = d + side.group;
      if (side.group % kLanes == 0)
        for (; d < end; d += kLanes) {
          const Vec x = (dtype == DType::int8 ? load_int8(row + d) : load_int4(row + d / 2)) * scale;
          store(out + d, x > splat(top) ? splat(top) : x < splat(-top) ? splat(-top) : x);
        }
      for (; d < end; ++d) {
        const float x = read_code(row, dtype, d) * scale;
        out[d] = x > top ? top : x < -top ? -top : x;
      }
    }
    if (rounds) round_row(side.scale.dtype, out, side.dim);
  }
  for (const Index width = round_up(side.dim, kBlock); d < width; ++d) out[d] = 0.0f;
}

// Float32 rows of one block of tokens: those of the cache, or converted copies.
class WideRows {
 public:
  const float* const* of(const ChunkRows& chunk, Index first) {
    const SidePlace& side = *chunk.side;
    const bool as_is = side.cache.dtype == DType::f32 && chunk.query_dtype == DType::f32 &&
                       !side.scale.data && side.dim % kBlock == 0;
    for (Index t = 0; t < kBlock; ++t) {
      row_[t] = copy_[t];
      if (as_is)
        row_[t] = reinterpret_cast<const float*>(chunk.row[first + t]);
      else if (first + t >= chunk.begin && first + t < chunk.end)
        widen_row(side, chunk.row[first + t], chunk.scale[first + t], chunk.query_dtype, copy_[t]);
      else
        std::memset(copy_[t], 0, static_cast<std::size_t>(round_up(side.dim, kBlock)) * sizeof(float));
    }
    return row_;
  }

 private:
  const float* row_[kBlock];
  alignas(64) float copy_[kBlock][kMaxHeadDim];
};

// --- float32 -----------------------------------------------------------------------------------------------

// Lane i of the result is the sum of sums[i]: pairs of vectors are added in halves, then quarters, and so on.
inline Vec add_across(Vec* sums) {
#pragma GCC unroll 8
  for (int width = kLanes / 2; width > 0; width /= 2) {
    IntVec low{}, high{};
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) {
      const int at = i / (2 * width) * 2 * width + i % width;
      low[i] = at + (i % (2 * width) < width ? 0 : kLanes);
      high[i] = low[i] + width;
    }
#pragma GCC unroll 8
    for (int i = 0; i < width; ++i)
      sums[i] = __builtin_shuffle(sums[i], sums[i + width], low) + __builtin_shuffle(sums[i], sums[i + width], high);
  }
  return sums[0];
}

// R rows by kLanes / R tokens.
template <int R>
inline void score_tokens(const float* query, Index width, const float* const* keys, float* scores) {
  constexpr int T = kLanes / R;
  Vec sums[kLanes] = {};
  for (Index d = 0; d < width; d += kLanes) {
    Vec key[T];
#pragma GCC unroll 16
    for (int t = 0; t < T; ++t) key[t] = load(keys[t] + d);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const Vec q = load(query + r * width + d);
#pragma GCC unroll 16
      for (int t = 0; t < T; ++t) sums[r * T + t] += q * key[t];
    }
  }
  alignas(64) float found[kLanes];
  store(found, add_across(sums));
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) std::memcpy(scores + r * kChunk, found + r * T, T * sizeof(float));
}

template <int R>
inline void score_block(const float* query, Index width, const float* const* keys, float* scores) {
  for (Index t = 0; t < kBlock; t += kLanes / R) score_tokens<R>(query, width, keys + t, scores + t);
}

// Calls kernel.template operator()<R>(first row) for runs of 4, 2 and 1 rows.
template <class Kernel>
inline void for_rows(Index num_rows, Kernel kernel) {
  Index r = 0;
  for (; r + 4 <= num_rows; r += 4) kernel.template operator()<4>(r);
  if (r + 2 <= num_rows) kernel.template operator()<2>(r), r += 2;
  if (r < num_rows) kernel.template operator()<1>(r);
}

inline void score_wide(const ChunkRows& chunk, const ScoreTask& task) {
  WideRows rows;
  for (Index first = chunk.begin / kBlock * kBlock; first < chunk.end; first += kBlock) {
    const float* const* keys = rows.of(chunk, first);
    for (Index t = 0; t < kBlock; t += 4) chunk.prefetch();
    for_rows(task.num_rows, [&]<int R>(Index r) {
      score_block<R>(task.query + r * task.width, task.width, keys, task.scores + r * kChunk + first);
    });
  }
}

// R rows by N vectors of d, over the tokens of one block.
template <int R, int N>
inline void add_values(const float* weights, const float* const* values, Index begin, Index end, float* totals,
                       Index width, Index d) {
  Vec sums[R][N];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) sums[r][n] = load(totals + r * width + d + n * kLanes);
  for (Index t = begin; t < end; ++t) {
    Vec value[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) value[n] = load(values[t] + d + n * kLanes);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const Vec weight = splat(weights[r * kChunk + t]);
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) sums[r][n] += weight * value[n];
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) store(totals + r * width + d + n * kLanes, sums[r][n]);
}

inline void shrink_totals(const ValueTask& task) {
  for (Index r = 0; r < task.num_rows; ++r) {
    if (task.factors[r] == 1.0f) continue;
    float* total = task.totals + r * task.width;
    for (Index d = 0; d < task.width; d += kLanes) store(total + d, load(total + d) * task.factors[r]);
  }
}

inline void value_wide(const ChunkRows& chunk, const ValueTask& task) {
  constexpr int N = kLanes == 16 ? 4 : 2;
  WideRows rows;
  shrink_totals(task);
  for (Index first = chunk.begin / kBlock * kBlock; first < chunk.end; first += kBlock) {
    const float* const* values = rows.of(chunk, first);
    for (Index t = 0; t < kBlock; t += 4) chunk.prefetch();
    const Index begin = max(chunk.begin - first, 0), end = min(chunk.end - first, kBlock);
    for_rows(task.num_rows, [&]<int R>(Index r) {
      const float* weights = task.weights + r * kChunk + first;
      float* totals = task.totals + r * task.width;
      Index d = 0;
      for (; d + N * kLanes <= task.width; d += N * kLanes)
        add_values<R, N>(weights, values, begin, end, totals, task.width, d);
      for (; d < task.width; d += kLanes) add_values<R, 1>(weights, values, begin, end, totals, task.width, d);
    });
  }
}

}  // namespace kvloom::KVLOOM_ISA
