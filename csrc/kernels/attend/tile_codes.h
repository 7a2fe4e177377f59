// The two products of a chunk in tiles, for the few rows of a decode step and codes that are dequantized to
// bfloat16 numbers. 16 rows of 32 dims are a tile as they are.
//
// scores = keys * queries: tokens by rows; queries lie in pairs of dims.
//
// sums = weights * values: a dword of a row has two dims of one token, and a tile multiplies pairs of
// numbers. So a weight w stands as the pair (w, 0) in one row of a tile, which gives the even dims, and as
// (0, w) in another, which gives the odd ones. Half of the products are by zero; that costs less than
// rearranging values, of which each is used for a few rows only.
#pragma once

#include "bf16_codes.h"
#include "tile_vectors.h"
#include "tiles.h"

namespace kvloom::KVLOOM_ISA {

// Dequantizes the blocks that have a token; rows of tokens that these lack are 0.
template <bool is_int4>
inline void dequantize_tiles(const ChunkRows& chunk, DequantizedRows& to) {
  dequantize_chunk<is_int4>(chunk, to);
  const auto clear = [&](Index first, Index last) {
    for (Index t = first; t < last; ++t) std::memset(to[t], 0, 2 * chunk.side->dim);
  };
  clear(chunk.begin / kBlock * kBlock, chunk.begin);
  clear(chunk.end, round_up(chunk.end, kBlock));
}

template <bool is_int4>
inline void score_codes_in_tiles(const ChunkRows& chunk, const ScoreTask& task) {
  constexpr Index kRows = 16;  // columns of a tile
  alignas(64) Byte queries[kMaxHeadDim / 32][1024];
  alignas(64) Byte scores[kChunk / kBlock][1024], by_row[1024];
  alignas(64) static constexpr Byte zeros[2 * kMaxHeadDim] = {};
  KVLOOM_TILES& tiles = *task.tiles;
  tiles.configure();
  alignas(64) DequantizedRows keys;
  dequantize_tiles<is_int4>(chunk, keys);
  for (Index r = 0; r < task.num_rows; r += kRows) {
    const Index count = min(task.num_rows - r, kRows);
    const Byte* rows[kRows];
    for (Index i = 0; i < kRows; ++i)
      rows[i] = i < count ? task.packed + (r + i) * kPackedRow + kPackedHead : zeros;
    for (Index d = 0; d < task.width; d += 32) transpose_dwords(rows, 2 * d, queries[d / 32]);
    const Index begin = chunk.begin / kBlock, end = ceil_div(chunk.end, kBlock);
    for (Index b = begin; b < end; ++b) {
      tiles.template zero<0>();
      for (Index d = 0; d < task.width; d += 32) {
        tiles.template load<6>(queries[d / 32], 64);
        tiles.template load<5>(keys[b * kBlock] + 2 * d, sizeof keys[0]);
        tiles.template multiply<0, 5, 6>();
      }
      tiles.template store<0>(scores[b], 64);
    }
    for (Index b = begin; b < end; ++b) {  // later: what a tile stores cannot be loaded at once
      const Byte* tokens[kBlock];
      for (Index t = 0; t < kBlock; ++t) tokens[t] = scores[b] + 64 * t;
      transpose_dwords(tokens, 0, by_row);
      for (Index i = 0; i < count; ++i)
        std::memcpy(task.scores + (r + i) * kChunk + b * kBlock, by_row + 64 * i, 64);
    }
  }
}

// The weights of up to eight rows and a chunk, block by block, as value_codes_in_tiles has them.
struct TileWeights {
  static constexpr Index kRows = 8;

  void read(const float* weights, Index num_rows) {
    const __m512 zero = _mm512_setzero_ps();
    for (Index r = 0; r < num_rows; ++r)
      for (Index b = 0; b < kChunk / kBlock; ++b) {
        const __m512 weight = _mm512_loadu_ps(weights + r * kChunk + b * kBlock);
        _mm512_store_si512(pairs[b][r], pair_rounded(weight, zero));
        _mm512_store_si512(pairs[b][kRows + r], pair_rounded(zero, weight));
      }
  }

  alignas(64) uint32_t pairs[kChunk / kBlock][2 * kRows][16] = {};
};

template <bool is_int4>
inline void value_codes_in_tiles(const ChunkRows& chunk, const ValueTask& task) {
  constexpr Index kRows = TileWeights::kRows, kWidth = 128;  // dims whose sums fit into four tiles
  alignas(64) float sums[4][2 * kRows][16];
  KVLOOM_TILES& tiles = *task.tiles;
  tiles.configure();
  rescale_accumulators(task);
  alignas(64) DequantizedRows values;
  dequantize_tiles<is_int4>(chunk, values);
  TileWeights weights;
  for (Index r = 0; r < task.num_rows; r += kRows) {
    const Index count = min(task.num_rows - r, kRows);
    weights.read(task.weights + r * kChunk, count);
    for (Index d = 0; d < task.width; d += kWidth) {
      tiles.template zero<0>(), tiles.template zero<1>(), tiles.template zero<2>(), tiles.template zero<3>();
      const Index pieces = min(task.width - d, kWidth) / 32;
      for (Index first = chunk.begin / kBlock * kBlock; first < chunk.end; first += kBlock) {
        const auto add = [&]<int piece>() KVLOOM_INLINE_LAMBDA {
          if (piece >= pieces) return;
          tiles.template load<4 + piece % 2>(values[first] + 2 * d + 64 * piece, sizeof values[0]);
          tiles.template multiply<piece, 7, 4 + piece % 2>();
        };
        tiles.template load<7>(weights.pairs[first / kBlock], 64);
        add.template operator()<0>();
        add.template operator()<1>();
        add.template operator()<2>();
        add.template operator()<3>();
      }
      tiles.template store<0>(sums[0], 64), tiles.template store<1>(sums[1], 64);
      tiles.template store<2>(sums[2], 64), tiles.template store<3>(sums[3], 64);
      for (Index i = 0; i < count; ++i)
        for (Index piece = 0; piece < pieces; ++piece) {
          const Vec even = load(sums[piece][i]), odd = load(sums[piece][kRows + i]);
          float* accumulator = task.accumulators + (r + i) * task.width + d + 32 * piece;
          add_to(accumulator, as<__m512>(interleave_low(even, odd)));
          add_to(accumulator + 16, as<__m512>(interleave_high(even, odd)));
        }
    }
  }
}

}  // namespace kvloom::KVLOOM_ISA
