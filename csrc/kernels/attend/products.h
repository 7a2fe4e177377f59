// The two products of attention over one chunk of tokens: scores = q.k, accumulator += weight * v.
//
// Every row's sums run over d (scores) and over tokens (accumulators) in one order: a row's bits do not
// depend on the other rows of its tile.
#pragma once

#include "panel.h"
#include "wide.h"

namespace kvloom::KVLOOM_ISA {

#ifdef KVLOOM_TILES
#define KVLOOM_HAS_TILES 1
#else
#define KVLOOM_TILES NoTiles
struct NoTiles {};
#endif

// Bytes of a packed query row: room for a few numbers, then two for each element.
constexpr Index kPackedHead = 320, kPackedRow = kPackedHead + 2 * kMaxHeadDim;

struct ScoreTask {
  const float* query;  // [rows, width], zero from dim on
  const Byte* packed;  // the queries of the item as the kernel wants them, kPackedRow bytes a row
  Index first_row;     // of the task, among these
  Index num_rows, width;
  float* scores;  // [rows, kChunk]
  KVLOOM_TILES* tiles = nullptr;

  const Byte* packed_row(Index r) const { return packed + (first_row + r) * kPackedRow; }
};

struct ValueTask {
  const float* weights;  // [rows, kChunk], 0 outside [begin, end)
  const float* factors;  // [rows], by which accumulators are rescaled first
  Index num_rows, width;
  float* accumulators;  // [rows, width]
  KVLOOM_TILES* tiles = nullptr;
};

// --- scores ------------------------------------------------------------------------------------------------

// Calls kernel.template operator()<W>() with the width as a constant where it is a common one, else with 0.
template <class Kernel>
inline void for_width(Index width, Kernel kernel) {
  switch (width) {
    case 64: return kernel.template operator()<64>();
    case 128: return kernel.template operator()<128>();
    default: return kernel.template operator()<0>();
  }
}

// Calls kernel.template operator()<R>(first row) for runs of 4, 2 and 1 rows.
template <class Kernel>
inline void for_rows(Index num_rows, Kernel kernel) {
  Index r = 0;
  for (; r + 4 <= num_rows; r += 4) kernel.template operator()<4>(r);
  if (r + 2 <= num_rows) kernel.template operator()<2>(r), r += 2;
  if (r < num_rows) kernel.template operator()<1>(r);
}

// Multiplication of keys and queries: kLanes dwords of a key by kLanes of a query. Here both are floats, one
// to a dword.
struct FloatProducts {
  static constexpr Index kElements = 1;  // of a dword
  static Vec add(Vec sum, Vec x, Vec y) { return multiply_add(x, y, sum); }
  static const Byte* query(const ScoreTask& task) { return reinterpret_cast<const Byte*>(task.query); }
  static constexpr Index query_bytes(Index width) { return width * 4; }  // from row to row
};

// The same of keys that are stored as T.
template <class T>
struct FloatScores : FloatProducts {
  using Products = FloatProducts;
  static constexpr Index kBytes = sizeof(T);  // of a stored element
  static Vec at(const Byte* row, Index dword) { return load_as<T>(row, dword); }
};

// R rows by kLanes / R tokens, token by token, so that memory is read in the order of its addresses.
template <class Scores, int R, int W>
inline void score_tokens(const Byte* query, Index any_width, const Byte* const* keys,
                         const RowPrefetcher& prefetcher, Index first, float* scores) {
  constexpr int kTokens = kLanes / R;
  const Index width = W ? W : any_width, query_bytes = Scores::query_bytes(width);
  Vec sums[kLanes];
  KVLOOM_UNROLL(16)
  for (int t = 0; t < kTokens; ++t) {
    const Byte* key = keys[t];
    Vec sum[R];
    KVLOOM_UNROLL(16)
    for (int r = 0; r < R; ++r) sum[r] = Vec{};
    KVLOOM_UNROLL(8)
    for (Index dword = 0; dword < width / Scores::kElements; dword += kLanes) {
      const Index offset = dword * Scores::kElements * Scores::kBytes;
      if (offset % 64 == 0) prefetcher.prefetch_lines<Scores::kBytes>(first + t, offset, 1);
      const Vec x = Scores::at(key, dword);
      KVLOOM_UNROLL(16)
      for (int r = 0; r < R; ++r)
        sum[r] = Scores::add(sum[r], x, bit_copy<Vec>(query + r * query_bytes + 4 * dword));
    }
    KVLOOM_UNROLL(16)
    for (int r = 0; r < R; ++r) sums[r * kTokens + t] = sum[r];
  }
  alignas(64) float found[kLanes];
  store(found, sum_rows<kLanes>(sums));
  KVLOOM_UNROLL(16)
  for (int r = 0; r < R; ++r) std::memcpy(scores + r * kChunk, found + r * kTokens, kTokens * sizeof(float));
}

// Scores of the chunk; rows_of(first) are the keys of the block of tokens from there on.
template <class Scores, int W, class RowsOf>
inline void score_blocks(const ChunkRows& chunk, const ScoreTask& task, const RowPrefetcher& prefetcher,
                         RowsOf rows_of) {
  using Panel = KeyPanel<typename Scores::Products>;
  Panel panel;
  const Index width = W ? W : task.width, query_bytes = Scores::query_bytes(width);
  const bool has_many = task.num_rows >= kManyRows;
  for (Index first = chunk.begin / kBlock * kBlock; first < chunk.end; first += kBlock) {
    const Byte* const* keys = rows_of(first);
    if (has_many) {
      panel.template pack<Scores>(keys, first, width);
      continue;
    }
    for_rows(task.num_rows, [&]<int R>(Index r) {
      const RowPrefetcher row_prefetcher = prefetcher.for_first_rows(r);
      float* scores = task.scores + r * kChunk + first;
      for (Index t = 0; t < kBlock; t += kLanes / R)
        score_tokens<Scores, R, W>(Scores::query(task) + r * query_bytes, width, keys + t, row_prefetcher,
                                   first + t, scores + t);
    });
  }
  if (!has_many) return;
  constexpr Index kScored = Panel::kScored;
  const Index begin = chunk.begin / kScored * kScored, end = round_up(chunk.end, kScored);
  for (Index first = begin; first < end; first += kScored)
    for_rows(task.num_rows, [&]<int R>(Index r) {
      const Index share = (first - begin) / kScored * task.num_rows + r;
      prefetcher.prefetch_share(share, share + R, (end - begin) / kScored * task.num_rows,
                                chunk.side->row_bytes);
      panel.template score<R>(Scores::query(task) + r * query_bytes, width, first, task.scores + r * kChunk);
    });
}

template <class T>
inline void score_direct(const ChunkRows& chunk, const ScoreTask& task) {
  for_width(task.width, [&]<int W>() {
    score_blocks<FloatScores<T>, W>(chunk, task, chunk.prefetcher,
                                    [&](Index first) { return chunk.row + first; });
  });
}

inline void score_wide(const ChunkRows& chunk, const ScoreTask& task) {
  WideRows rows;
  if (chunk.side->scale.data) chunk.prefetch_scales();
  const auto rows_of = [&](Index first) { return rows.of(chunk, first); };
  score_blocks<FloatScores<float>, 0>(chunk, task, RowPrefetcher(), rows_of);
}

// --- values ------------------------------------------------------------------------------------------------

// R rows by N vectors of d.
template <class T, int R, int N>
inline void add_values(const float* weights, const Byte* const* values, const RowPrefetcher& prefetcher,
                       Index first, Index begin, Index end, float* accumulators, Index width, Index d) {
  constexpr Index kBytes = sizeof(T);
  Vec sums[R][N];
  KVLOOM_UNROLL(4)
  for (int r = 0; r < R; ++r) {
    KVLOOM_UNROLL(4)
    for (int n = 0; n < N; ++n) sums[r][n] = load(accumulators + r * width + d + n * kLanes);
  }
  for (Index t = begin; t < end; ++t) {
    if (d * kBytes % 64 == 0)
      prefetcher.prefetch_lines<kBytes>(first + t, d * kBytes, max(N * kLanes * kBytes / 64, 1));
    Vec value[N];
    KVLOOM_UNROLL(4)
    for (int n = 0; n < N; ++n) value[n] = load_as<T>(values[t], d + n * kLanes);
    KVLOOM_UNROLL(4)
    for (int r = 0; r < R; ++r) {
      const Vec weight = splat(weights[r * kChunk + t]);
      KVLOOM_UNROLL(4)
      for (int n = 0; n < N; ++n) sums[r][n] = multiply_add(weight, value[n], sums[r][n]);
    }
  }
  KVLOOM_UNROLL(4)
  for (int r = 0; r < R; ++r) {
    KVLOOM_UNROLL(4)
    for (int n = 0; n < N; ++n) store(accumulators + r * width + d + n * kLanes, sums[r][n]);
  }
}

inline void rescale_accumulators(const ValueTask& task) {
  for (Index r = 0; r < task.num_rows; ++r) {
    if (task.factors[r] == 1.0f) continue;
    float* accumulator = task.accumulators + r * task.width;
    for (Index d = 0; d < task.width; d += kLanes)
      store(accumulator + d, load(accumulator + d) * task.factors[r]);
  }
}

// Calls kernel.template operator()<N>(d) for runs of N vectors of d, those that add_values takes at once and
// then single ones.
template <class Kernel>
inline void for_columns(Index width, Kernel kernel) {
  constexpr int N = kLanes == 16 ? 4 : 2;
  Index d = 0;
  for (; d + N * kLanes <= width; d += N * kLanes) kernel.template operator()<N>(d);
  for (; d < width; d += kLanes) kernel.template operator()<1>(d);
}

// Adds the tokens [begin, end) of rows that begin at token `first` of the chunk.
template <class T>
inline void value_block(const ValueTask& task, const Byte* const* values, const RowPrefetcher& prefetcher,
                        Index first, Index begin, Index end) {
  for_rows(task.num_rows, [&]<int R>(Index r) {
    const RowPrefetcher row_prefetcher = prefetcher.for_first_rows(r);
    const float* weights = task.weights + r * kChunk + first;
    float* accumulators = task.accumulators + r * task.width;
    for_columns(task.width, [&]<int N>(Index d) {
      add_values<T, R, N>(weights, values, row_prefetcher, first, begin, end, accumulators, task.width, d);
    });
  });
}

// The same for many rows, N vectors of d at a time: rows of a page may be so far apart that they would take
// the place of each other in the first-level cache.
template <class T, int N>
inline void add_columns(const ValueTask& task, const Byte* const* values, Index begin, Index end, Index d) {
  alignas(64) float copy[kChunk][N * kLanes];
  const Byte* rows[kChunk];
  for (Index t = begin; t < end; ++t) {
    KVLOOM_UNROLL(4)
    for (int n = 0; n < N; ++n) store(copy[t] + n * kLanes, load_as<T>(values[t], d + n * kLanes));
    rows[t] = reinterpret_cast<const Byte*>(copy[t]);
  }
  for_rows(task.num_rows, [&]<int R>(Index r) {
    add_values<float, R, N>(task.weights + r * kChunk, rows, RowPrefetcher(), 0, begin, end,
                            task.accumulators + r * task.width + d, task.width, 0);
  });
}

template <class T>
[[gnu::noinline]] void add_many_values(const ValueTask& task, const Byte* const* values,
                                       const RowPrefetcher& prefetcher, Index begin, Index end) {
  for_columns(task.width, [&]<int N>(Index d) {
    prefetcher.prefetch_share(d, d + N * kLanes, task.width, task.width * sizeof(T));
    add_columns<T, N>(task, values, begin, end, d);
  });
}

template <class T>
inline void value_direct(const ChunkRows& chunk, const ValueTask& task) {
  rescale_accumulators(task);
  if (task.num_rows >= kManyRows)
    return add_many_values<T>(task, chunk.row, chunk.prefetcher, chunk.begin, chunk.end);
  value_block<T>(task, chunk.row, chunk.prefetcher, 0, chunk.begin, chunk.end);
}

inline void value_wide(const ChunkRows& chunk, const ValueTask& task) {
  WideRows rows;
  if (chunk.side->scale.data) chunk.prefetch_scales();
  rescale_accumulators(task);
  for (Index first = chunk.begin / kBlock * kBlock; first < chunk.end; first += kBlock) {
    const Byte* const* values = rows.of(chunk, first);
    const Index begin = max(chunk.begin - first, 0), end = min(chunk.end - first, kBlock);
    value_block<float>(task, values, RowPrefetcher(), first, begin, end);
  }
}

}  // namespace kvloom::KVLOOM_ISA
