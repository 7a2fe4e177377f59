// Keys of a chunk, turned so that a lane is a token: for many rows, which would else add across lanes for each score.
// A sum is the same numbers in the same order, so that it has the same bits.
#pragma once

#include "attend_vector.h"

namespace kvloom::KVLOOM_ISA {

constexpr Index kManyRows = 48;  // from so many on it pays to turn keys, and to put values in order

// Scores are what is added up: how rows are read, and how two dwords multiply.
template <class Scores>
class KeyPanel {
 public:
  // Takes the rows of the block of tokens from `first` on, of `width` elements.
  void turn(const Byte* const* rows, Index first, Index width) {
    for (Index t = 0; t < kBlock; t += kLanes)
      for (Index dword = 0; dword < width / Scores::kElements; dword += kLanes) {
        Vec x[kLanes];
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) x[i] = Scores::at(rows[t + i], dword);
        transpose(x);
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) store(dwords_[dword + i] + first + t, x[i]);
      }
  }

  // R rows by all tokens. Where lanes are elements, each adds up every kLanes-th dword, and then they are folded in
  // halves, quarters and so on. Here these sums come one after the other, those next to each other that fold first.
  template <int R, int W>
  void score(const Byte* query, Index query_bytes, Index any_width, float* scores) const {
    constexpr int V = kLanes == 16 ? 4 : 2;
    const Index steps = (W ? W : any_width) / Scores::kElements / kLanes;
    for (Index t = 0; t < kChunk; t += V * kLanes) {
      Vec waiting[kLevels + 1][R][V];  // sums that were folded so often
      for (unsigned n = 0; n < kLanes; ++n) {
        Vec sums[R][V] = {};
        const Index lane = reversed(n);
#pragma GCC unroll 8
        for (Index step = 0; step < steps; ++step) {
          const Index dword = step * kLanes + lane;
          Vec x[V];
#pragma GCC unroll 4
          for (int v = 0; v < V; ++v) x[v] = load(dwords_[dword] + t + v * kLanes);
#pragma GCC unroll 4
          for (int r = 0; r < R; ++r) {
            const Vec q = splat(bit_copy<float>(query + r * query_bytes + 4 * dword));
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v) sums[r][v] = Scores::add(sums[r][v], x[v], q);
          }
        }
        int level = 0;
        for (; n >> level & 1; ++level)
#pragma GCC unroll 4
          for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v) sums[r][v] += waiting[level][r][v];
        std::memcpy(waiting[level], sums, sizeof sums);
      }
      for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v) store(scores + r * kChunk + t + v * kLanes, waiting[kLevels][r][v]);
    }
  }

 private:
  static constexpr int kLevels = kLanes == 16 ? 4 : kLanes == 8 ? 3 : 2;

  // The bits of n < kLanes from last to first.
  static Index reversed(unsigned n) {
    Index from = 0;
    for (int level = 0; level < kLevels; ++level) from = 2 * from + (n >> level & 1);
    return from;
  }

  alignas(64) float dwords_[kMaxHeadDim][kChunk];
};

}  // namespace kvloom::KVLOOM_ISA
