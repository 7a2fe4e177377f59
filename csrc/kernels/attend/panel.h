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
  // Vectors of tokens whose sums are in registers, those of four rows. Where there are 32 registers, few
  // loads for many products are worth more than what is added up last staying in them.
  static constexpr int kVectors = kLanes == 16 ? 4 : 2;

 public:
  static constexpr Index kScored = kVectors * kLanes;

  // Packs the rows of the block of tokens from `first` on, of `width` elements.
  void pack(const Byte* const* rows, Index first, Index width) {
    for (Index t = 0; t < kBlock; t += kLanes)
      for (Index dword = 0; dword < width / Scores::kElements; dword += kLanes) {
        Vec x[kLanes];
        KVLOOM_UNROLL(16)
        for (int i = 0; i < kLanes; ++i) x[i] = Scores::at(rows[t + i], dword);
        transpose(x);
        KVLOOM_UNROLL(16)
        for (int i = 0; i < kLanes; ++i) store(at(dword + i, first + t), x[i]);
      }
  }

  // R rows by kScored tokens from `first` on. Unpacked, a lane accumulates every kLanes-th dword, and a
  // horizontal sum reduces the lanes by halves, quarters and so on. Here those lanes are computed in
  // sequence, and added in the order of that reduction.
  template <int R, int W>
  void score(const Byte* query, Index any_width, Index first, float* scores) const {
    Vec sums[R][kVectors];
    add_lanes<R, W>(query, any_width, first, 0, sums);
    KVLOOM_UNROLL(4)
    for (int r = 0; r < R; ++r) {
      KVLOOM_UNROLL(4)
      for (int v = 0; v < kVectors; ++v) store(scores + r * kChunk + first + v * kLanes, sums[r][v]);
    }
  }

 private:
  float* at(Index dword, Index t) { return dwords_[t / kScored][dword] + t % kScored; }
  const float* at(Index dword, Index t) const { return dwords_[t / kScored][dword] + t % kScored; }

  // Sums of the lanes lane, lane + distance, lane + 2 * distance and so on, of R rows by tokens from t on.
  template <int R, int W, int distance = 1>
  KVLOOM_INLINE void add_lanes(const Byte* query, Index any_width, Index t, Index lane,
                               Vec (*sums)[kVectors]) const {
    if constexpr (distance < kLanes) {
      Vec others[R][kVectors];
      add_lanes<R, W, 2 * distance>(query, any_width, t, lane, sums);
      add_lanes<R, W, 2 * distance>(query, any_width, t, lane + distance, others);
      KVLOOM_UNROLL(4)
      for (int r = 0; r < R; ++r) {
        KVLOOM_UNROLL(4)
        for (int v = 0; v < kVectors; ++v) sums[r][v] += others[r][v];
      }
    } else {
      const Index width = W ? W : any_width;
      KVLOOM_UNROLL(4)
      for (int r = 0; r < R; ++r) {
        KVLOOM_UNROLL(4)
        for (int v = 0; v < kVectors; ++v) sums[r][v] = Vec{};
      }
      KVLOOM_UNROLL(2)
      for (Index dword = lane; dword < width / Scores::kElements; dword += kLanes) {
        Vec x[kVectors];
        KVLOOM_UNROLL(4)
        for (int v = 0; v < kVectors; ++v) x[v] = load(at(dword, t) + v * kLanes);
        KVLOOM_UNROLL(4)
        for (int r = 0; r < R; ++r) {
          const Vec q = splat(bit_copy<float>(query + r * Scores::query_bytes(width) + 4 * dword));
          KVLOOM_UNROLL(4)
          for (int v = 0; v < kVectors; ++v) sums[r][v] = Scores::add(sums[r][v], x[v], q);
        }
      }
    }
  }

  alignas(64) float dwords_[kChunk / kScored][kMaxHeadDim][kScored];
};

}  // namespace kvloom::KVLOOM_ISA
