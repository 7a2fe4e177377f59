// Weighted sums of int8 and int4 values in float32, block by block of tokens.
#pragma once

#include "codes.h"
#include "scales.h"
#include "products.h"

namespace kvloom::KVLOOM_ISA {

// The blocks of values of which a chunk has tokens.
struct ValueBlocks {
  explicit ValueBlocks(const ChunkRows& chunk_rows)
      : chunk(chunk_rows), side(*chunk.side), begin(chunk.begin / kBlock), end(ceil_div(chunk.end, kBlock)) {
    for (Index b = begin; b < end; ++b) block[b] = value_block(chunk, b, copy + b * kBlock * side.row_bytes);
  }

  const ChunkRows& chunk;
  const SideLayout& side;
  Index begin, end;
  const Byte* block[kChunk / kBlock];
  alignas(64) Byte copy[kChunk * kMaxHeadDim];
};

// The groups of kLanes bytes from one on.
struct LaneGroups {
  LaneGroups(const SideLayout& side, Index byte)
      : first(side.group_of_byte[byte]),
        lanes(bit_copy<IntVec>(side.group_of_byte + byte) - splat(side.group_of_byte[byte])) {}

  Vec of(const float* scales) const { return look_up(scales + first, lanes); }

  Index first;
  IntVec lanes;  // counted from the first
};

// Codes of token i of each quad times their scales: of int4 the even elements, then the odd ones.
template <bool is_int4, int i, class Rounded>
KVLOOM_INLINE void scale_codes(IntVec dwords, Vec scales, Vec* x) {
  if constexpr (is_int4) {
    x[0] = Rounded::of(scales * widen_position<true, 2 * i>(dwords));
    x[1] = Rounded::of(scales * widen_position<true, 2 * i + 1>(dwords));
  } else {
    x[0] = Rounded::of(scales * widen_position<false, i>(dwords));
  }
}

// R rows by V vectors of bytes; scales[token] are those of the groups.
template <int R, bool is_int4, int V, class Rounded>
inline void add_codes(const ValueBlocks& values, const float* weights,
                      const float (*scales)[kMaxGroups + kLanes], float* accumulators, Index width,
                      Index byte, const RowPrefetcher& prefetcher) {
  constexpr int N = is_int4 ? 2 * V : V;  // of int4 the even and the odd elements
  const LaneGroups groups[2] = {{values.side, byte}, {values.side, byte + (V - 1) * kLanes}};
  Vec sums[R][N] = {};
  for (Index b = values.begin; b < values.end; ++b) {
    const BlockPrefetcher block_prefetcher(prefetcher, values.chunk, b * kBlock);
    for (Index quad = 0; quad < kBlock / 4; ++quad) {
      const Byte* at = values.block[b] + 4 * (quad * values.side.row_bytes + byte);
      IntVec dwords[V];
      KVLOOM_UNROLL(2)
      for (int v = 0; v < V; ++v) dwords[v] = bit_copy<IntVec>(at + 4 * v * kLanes);
      KVLOOM_UNROLL(2)
      for (Index offset = at - values.block[b], v = 0; v < V; ++v, offset += 4 * kLanes)
        if (offset % 64 == 0) block_prefetcher.prefetch_line(offset / 64);
      for_positions(std::make_integer_sequence<int, 4>{}, [&]<int i>() {
        const Index t = b * kBlock + 4 * quad + i;
        Vec x[N];
        KVLOOM_UNROLL(2)
        for (int v = 0; v < V; ++v)
          scale_codes<is_int4, i, Rounded>(dwords[v], groups[v].of(scales[t]), x + N / V * v);
        KVLOOM_UNROLL(4)
        for (int r = 0; r < R; ++r) {
          const Vec weight = splat(weights[r * kChunk + t]);
          KVLOOM_UNROLL(2)
          for (int n = 0; n < N; ++n) sums[r][n] = multiply_add(weight, x[n], sums[r][n]);
        }
      });
    }
  }
  for (int r = 0; r < R; ++r) {
    float* accumulator = accumulators + r * width + (is_int4 ? 2 * byte : byte);
    if constexpr (is_int4) interleave(sums[r]);
    for (int n = 0; n < N; ++n) store(accumulator + n * kLanes, load(accumulator + n * kLanes) + sums[r][n]);
  }
}

// Codes of a chunk times their scales, for many rows: token by element.
struct WideValues {
  template <bool is_int4, class Rounded>
  void read(const ValueBlocks& values, const float (*scales)[kMaxGroups + kLanes],
            const RowPrefetcher& prefetcher) {
    constexpr int N = is_int4 ? 2 : 1;
    for (Index b = values.begin; b < values.end; ++b) {
      const BlockPrefetcher block_prefetcher(prefetcher, values.chunk, b * kBlock);
      for (Index quad = 0; quad < kBlock / 4; ++quad)
        for (Index byte = 0; byte < values.side.row_bytes; byte += kLanes) {
          const Index offset = 4 * (quad * values.side.row_bytes + byte);
          if (offset % 64 == 0) block_prefetcher.prefetch_line(offset / 64);
          const LaneGroups groups(values.side, byte);
          const IntVec dwords = bit_copy<IntVec>(values.block[b] + offset);
          for_positions(std::make_integer_sequence<int, 4>{}, [&]<int i>() {
            const Index t = b * kBlock + 4 * quad + i;
            Vec x[N];
            scale_codes<is_int4, i, Rounded>(dwords, groups.of(scales[t]), x);
            if constexpr (is_int4) interleave(x);
            for (int n = 0; n < N; ++n) store(at[t] + N * byte + n * kLanes, x[n]);
          });
        }
    }
  }

  // Adds R rows of the tokens [begin, end).
  template <int R>
  void add(const float* weights, Index begin, Index end, Index width, float* accumulators) const {
    const Byte* rows[kChunk];
    for (Index t = begin; t < end; ++t) rows[t] = reinterpret_cast<const Byte*>(at[t]);
    alignas(64) float sums[R * kMaxHeadDim];
    std::memset(sums, 0, R * width * sizeof(float));
    value_block<float>({weights, nullptr, R, width, sums}, rows, RowPrefetcher(), 0, begin, end);
    for (Index i = 0; i < R * width; i += kLanes)
      store(accumulators + i, load(accumulators + i) + load(sums + i));
  }

  alignas(64) float at[kChunk][kMaxHeadDim];
};

template <bool is_int4, class Rounded>
inline void value_codes(const ChunkRows& chunk, const ValueTask& task) {
  const SideLayout& value = *chunk.side;
  alignas(64) float by_group[kMaxGroups][kChunk];
  alignas(64) float scales[kChunk][kMaxGroups + kLanes];
  read_scales(chunk, by_group);
  for (Index t = 0; t < kChunk; t += kLanes)
    for (Index g = 0; g < value.num_groups; g += kLanes) {
      Vec x[kLanes];
      for (Index i = 0; i < kLanes; ++i) x[i] = g + i < value.num_groups ? load(by_group[g + i] + t) : Vec{};
      transpose(x);
      for (Index i = 0; i < kLanes; ++i) store(scales[t + i] + g, x[i]);
    }
  chunk.prefetch_scales();
  const ValueBlocks blocks(chunk);
  rescale_accumulators(task);
  WideValues wide;
  const bool has_many = task.num_rows >= kManyRowsOfCodes;
  if (has_many) wide.read<is_int4, Rounded>(blocks, scales, chunk.prefetcher);
  for_rows(task.num_rows, [&]<int R>(Index r) {
    constexpr int V = is_int4 ? 1 : 2;
    const RowPrefetcher prefetcher = chunk.prefetcher.for_first_rows(r);
    const float* weights = task.weights + r * kChunk;
    float* accumulators = task.accumulators + r * task.width;
    if (has_many)
      return wide.add<R>(weights, blocks.begin * kBlock, blocks.end * kBlock, task.width, accumulators);
    Index byte = 0;
    for (; byte + V * kLanes <= value.row_bytes; byte += V * kLanes)
      add_codes<R, is_int4, V, Rounded>(blocks, weights, scales, accumulators, task.width, byte, prefetcher);
    for (; byte < value.row_bytes; byte += kLanes)
      add_codes<R, is_int4, 1, Rounded>(blocks, weights, scales, accumulators, task.width, byte, prefetcher);
  });
}

}  // namespace kvloom::KVLOOM_ISA
