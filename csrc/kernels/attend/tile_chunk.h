// The two products of a chunk in tiles, for the few rows of a decode step. 16 rows of 32 dims are a tile, as
// stored if bfloat16, or dequantized to it.
//
// scores = keys * queries: tokens by rows; queries are in pairs of dims.
//
// sums = weights * values: a dword of a row has two dims of one token, and a tile multiplies pairs of
// numbers. So a weight w is the pair (w, 0) in one row of a tile, which gives the even dims, and as
// (0, w) in another, which gives the odd ones. Half of the products are by zero; that costs less than
// rearranging values, of which each is used for a few rows only.
#pragma once

#include "bf16_codes.h"
#include "tile_vectors.h"
#include "tiles.h"

namespace kvloom::KVLOOM_ISA {

// First row of a block, and the distance between its rows.
struct BlockRows {
  const Byte* first;
  Index stride;
};

// The blocks of a chunk of bfloat16 numbers: where they are stored, or copied if rows are not evenly spaced
// or some of their tokens are none of the chunk's. The rows of those are 0.
class StoredBlocks {
 public:
  explicit StoredBlocks(const ChunkRows& chunk)
      : chunk_(chunk), are_even_(chunk.in_blocks && chunk.side->block_rows_are_even) {
    for (Index first = chunk.begin / kBlock * kBlock; first < chunk.end; first += kBlock)
      if (!is_in_place(first)) copy(first);
  }

  BlockRows operator[](Index first) const {
    if (!is_in_place(first)) return {copy_[first], sizeof copy_[0]};
    return {chunk_.row[first], chunk_.row[first + 1] - chunk_.row[first]};
  }

  // One of `shares` shares of the rows that follow the chunk in the list, whole rows in the order of
  // addresses.
  KVLOOM_INLINE void prefetch_share(Index first, Index share, Index shares) const {
    if (!chunk_.prefetcher.rows) return;
    for (Index t = first + share * kBlock / shares; t < first + (share + 1) * kBlock / shares; ++t)
      for (Index i = 0; i < chunk_.side->row_bytes; i += 64) prefetch(chunk_.prefetcher.rows[t + kChunk] + i);
  }

 private:
  bool is_in_place(Index first) const {
    return are_even_ && first >= chunk_.begin && first + kBlock <= chunk_.end;
  }
  void copy(Index first) {
    const Index bytes = 2 * chunk_.side->dim;
    for (Index t = first; t < first + kBlock; ++t) {
      if (t >= chunk_.begin && t < chunk_.end)
        std::memcpy(copy_[t], chunk_.row[t], bytes);
      else
        std::memset(copy_[t], 0, bytes);
    }
  }

  const ChunkRows& chunk_;
  const bool are_even_;
  alignas(64) Byte copy_[kChunk][2 * kMaxHeadDim];
};

// The blocks of a chunk of codes, dequantized. Rows of tokens that are none of the chunk's are 0.
template <bool is_int4>
class DequantizedBlocks {
 public:
  explicit DequantizedBlocks(const ChunkRows& chunk) {
    dequantize_chunk<is_int4>(chunk, rows_);
    const auto clear = [&](Index first, Index last) {
      for (Index t = first; t < last; ++t) std::memset(rows_[t], 0, 2 * chunk.side->dim);
    };
    clear(chunk.begin / kBlock * kBlock, chunk.begin);
    clear(chunk.end, round_up(chunk.end, kBlock));
  }

  BlockRows operator[](Index first) const { return {rows_[first], sizeof rows_[0]}; }
  void prefetch_share(Index, Index, Index) const {}  // dequantizing did

 private:
  alignas(64) DequantizedRows rows_;
};

constexpr Index kColumns = 16;  // of a tile of queries, a row in each

// Queries as tiles of 16 pairs of dims by 16 rows.
inline void pack_in_tiles(const SideLayout& side, const float* query, Index num_rows, Index width,
                          Byte* packed) {
  alignas(64) Byte rounded[kColumns][kPackedRow];
  for (Index r = 0; r < num_rows; r += kColumns) {
    const Index count = min(num_rows - r, kColumns);
    pack_bf16(side, query + r * width, count, width, rounded[0]);
    const Byte* rows[kColumns];
    for (Index i = 0; i < kColumns; ++i) rows[i] = rounded[min(i, count - 1)] + kPackedHead;
    for (Index d = 0; d < width; d += 32) transpose_dwords(rows, 2 * d, packed + r * kPackedRow + 32 * d);
  }
}

template <class Blocks>
inline void score_in_tiles(const ChunkRows& chunk, const ScoreTask& task) {
  alignas(64) Byte scores[kChunk / kBlock][1024], by_row[1024];
  KVLOOM_TILES& tiles = *task.tiles;
  tiles.configure();
  const Blocks blocks(chunk);
  const Index begin = chunk.begin / kBlock, end = ceil_div(chunk.end, kBlock);
  const Index last = task.first_row + task.num_rows;
  for (Index r = task.first_row; r < last;) {
    const Index column = r % kColumns, count = min(last - r, kColumns - column);
    const Byte* queries = task.packed + (r - column) * kPackedRow;
    for (Index b = begin; b < end; ++b) {
      const BlockRows keys = blocks[b * kBlock];
      tiles.template zero<0>();
      for (Index d = 0; d < task.width; d += 32) {
        tiles.template load<6>(queries + 32 * d, 64);
        tiles.template load<5>(keys.first + 2 * d, keys.stride);
        tiles.template multiply<0, 5, 6>();
        if (r == task.first_row) blocks.prefetch_share(b * kBlock, d / 32, task.width / 32);
      }
      tiles.template store<0>(scores[b], 64);
    }
    for (Index b = begin; b < end; ++b) {  // later: what a tile stores cannot be loaded at once
      const Byte* tokens[kBlock];
      for (Index t = 0; t < kBlock; ++t) tokens[t] = scores[b] + 64 * t;
      transpose_dwords(tokens, 0, by_row);
      for (Index i = 0; i < count; ++i)
        std::memcpy(task.scores + (r - task.first_row + i) * kChunk + b * kBlock, by_row + 64 * (column + i),
                    64);
    }
    r += count;
  }
}

// The weights of up to eight rows and a chunk, block by block, as value_in_tiles has them.
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

template <class Blocks>
inline void value_in_tiles(const ChunkRows& chunk, const ValueTask& task) {
  constexpr Index kRows = TileWeights::kRows, kWidth = 128;  // dims whose sums fit into four tiles
  alignas(64) float sums[4][2 * kRows][16];
  KVLOOM_TILES& tiles = *task.tiles;
  tiles.configure();
  rescale_accumulators(task);
  const Blocks blocks(chunk);
  TileWeights weights;
  for (Index r = 0; r < task.num_rows; r += kRows) {
    const Index count = min(task.num_rows - r, kRows);
    weights.read(task.weights + r * kChunk, count);
    for (Index d = 0; d < task.width; d += kWidth) {
      tiles.template zero<0>(), tiles.template zero<1>(), tiles.template zero<2>(), tiles.template zero<3>();
      const Index pieces = min(task.width - d, kWidth) / 32;
      for (Index first = chunk.begin / kBlock * kBlock; first < chunk.end; first += kBlock) {
        const BlockRows values = blocks[first];
        const auto add = [&]<int piece>() KVLOOM_INLINE_LAMBDA {
          if (piece >= pieces) return;
          const Index at = 2 * d + 64 * piece;
          tiles.template load<4 + piece % 2>(values.first + at, values.stride);
          tiles.template multiply<piece, 7, 4 + piece % 2>();
          if (r == 0) blocks.prefetch_share(first, d / 32 + piece, task.width / 32);
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
