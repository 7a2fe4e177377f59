// Keys of a chunk, packed (transposed) so that a lane is a token. Many rows share the packing, and need no
// horizontal sum for each score. A sum adds the same numbers in the same order as without packing, so it has
// the same bits.
#pragma once

#include "arithmetic.h"
#include "cache.h"

namespace kvloom::KVLOOM_ISA {

constexpr Index kManyRows = 48;  // rows of a tile from which on packing keys and values pays

// Scores says how rows are read and how two dwords are multiplied and accumulated.
template <class Scores>
class KeyPanel {
 public:
  // Packs the rows of the block of tokens from `first` on, of `width` elements.
  void pack(const Byte* const* rows, Index first, Index width) {
    for (Index t = 0; t < kBlock; t += kLanes)
      for (Index dword = 0; dword < width / Scores::kElements; dword += kLanes) {
        Vec x[kLanes];
        KVLOOM_UNROLL(16)
        for (int i = 0; i < kLanes; ++i) x[i] = Scores::at(rows[t + i], dword);
        transpose(x);
        KVLOOM_UNROLL(16)
        for (int i = 0; i < kLanes; ++i) store(dwords_[dword + i] + first + t, x[i]);
      }
  }

  // R rows by all tokens. Unpacked, a lane accumulates every kLanes-th dword, and a horizontal sum reduces
  // the lanes by halves, quarters and so on. Here those lanes are computed one after the other, in the order
  // of that reduction.
  template <int R, int W>
  void score(const Byte* query, Index any_width, float* scores) const {
    constexpr int V = kLanes == 16 ? 4 : 2;
    const Index width = W ? W : any_width, query_bytes = Scores::query_bytes(width);
    const Index steps = width / Scores::kElements / kLanes;
    for (Index t = 0; t < kChunk; t += V * kLanes) {
      Vec pending[kLevels + 1][R][V];  // sums by their level of the reduction
      for (unsigned n = 0; n < kLanes; ++n) {
        Vec sums[R][V] = {};
        const Index lane = reversed(n);
        KVLOOM_UNROLL(8)
        for (Index step = 0; step < steps; ++step) {
          const Index dword = step * kLanes + lane;
          Vec x[V];
          KVLOOM_UNROLL(4)
          for (int v = 0; v < V; ++v) x[v] = load(dwords_[dword] + t + v * kLanes);
          KVLOOM_UNROLL(4)
          for (int r = 0; r < R; ++r) {
            const Vec q = splat(bit_copy<float>(query + r * query_bytes + 4 * dword));
            KVLOOM_UNROLL(4)
            for (int v = 0; v < V; ++v) sums[r][v] = Scores::add(sums[r][v], x[v], q);
          }
        }
        int level = 0;
        for (; n >> level & 1; ++level) {
          KVLOOM_UNROLL(4)
          for (int r = 0; r < R; ++r) {
            KVLOOM_UNROLL(4)
            for (int v = 0; v < V; ++v) sums[r][v] += pending[level][r][v];
          }
        }
        std::memcpy(pending[level], sums, sizeof sums);
      }
      for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v) store(scores + r * kChunk + t + v * kLanes, pending[kLevels][r][v]);
    }
  }

 private:
  static constexpr int kLevels = kLanes == 16 ? 4 : kLanes == 8 ? 3 : 2;

  // The bits of n < kLanes in reverse order.
  static Index reversed(unsigned n) {
    Index from = 0;
    for (int level = 0; level < kLevels; ++level) from = 2 * from + (n >> level & 1);
    return from;
  }

  alignas(64) float dwords_[kMaxHeadDim][kChunk];
};

}  // namespace kvloom::KVLOOM_ISA
