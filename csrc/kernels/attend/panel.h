// Keys of a chunk, packed (transposed) so that a lane is a token. Many rows share the packing, and need no
// horizontal sum for each score. A sum adds the same numbers in the same order as without packing, so it has
// the same bits: unpacked, a lane accumulates every kLanes-th dword, and a horizontal sum reduces the lanes
// by halves, quarters and so on. Here the chain of each of those lanes is a loop, and their results are added
// in the order of that reduction. Its functions are not inlined, so that all callers share one copy.
#pragma once

#include "arithmetic.h"
#include "cache.h"

namespace kvloom::KVLOOM_ISA {

constexpr Index kManyRows = 48;  // rows of a tile from which on packing keys and values pays

// Products says how two dwords are multiplied and accumulated.
template <class Products>
class KeyPanel {
  // Sums of four rows by kVectors vectors of tokens are in registers; where there are 32, those of two
  // chains, which are added before they leave them.
  static constexpr int kVectors = 2, kChains = kLanes == 16 ? 2 : 1;

 public:
  static constexpr Index kScored = kVectors * kLanes;

  // Packs the rows of the block of tokens from `first` on, of `width` elements, as Scores reads them.
  template <class Scores>
  [[gnu::noinline]] void pack(const Byte* const* rows, Index first, Index width) {
    const Index length = chain_length(width);
    for (Index t = 0; t < kBlock; t += kLanes)
      for (Index i = 0; i < length; ++i) {
        Vec x[kLanes];
        KVLOOM_UNROLL(16)
        for (int lane = 0; lane < kLanes; ++lane) x[lane] = Scores::at(rows[t + lane], i * kLanes);
        transpose(x);
        KVLOOM_UNROLL(16)
        for (int lane = 0; lane < kLanes; ++lane) store(at(lane * length + i, first + t), x[lane]);
      }
  }

  // R rows by kScored tokens from `first` on.
  template <int R>
  [[gnu::noinline]] void score(const Byte* query, Index width, Index first, float* scores) const {
    Vec sums[R][kVectors];
    add_lanes<R>(query, width, first, 0, sums);
    KVLOOM_UNROLL(4)
    for (int r = 0; r < R; ++r) {
      KVLOOM_UNROLL(2)
      for (int v = 0; v < kVectors; ++v) store(scores + r * kChunk + first + v * kLanes, sums[r][v]);
    }
  }

 private:
  static constexpr Index chain_length(Index width) { return width / Products::kElements / kLanes; }
  float* at(Index dword, Index t) { return dwords_[t / kScored][dword] + t % kScored; }
  const float* at(Index dword, Index t) const { return dwords_[t / kScored][dword] + t % kScored; }

  // Sums of the lanes lane, lane + distance, lane + 2 * distance and so on, of R rows by tokens from t on.
  template <int R, int distance = 1>
  KVLOOM_INLINE void add_lanes(const Byte* query, Index width, Index t, Index lane,
                               Vec (*sums)[kVectors]) const {
    if constexpr (distance * kChains < kLanes) {
      Vec others[R][kVectors];
      add_lanes<R, 2 * distance>(query, width, t, lane, sums);
      add_lanes<R, 2 * distance>(query, width, t, lane + distance, others);
      KVLOOM_UNROLL(4)
      for (int r = 0; r < R; ++r) {
        KVLOOM_UNROLL(2)
        for (int v = 0; v < kVectors; ++v) sums[r][v] += others[r][v];
      }
    } else {
      add_chains<R, distance>(query, width, t, lane, sums);
    }
  }

  // The same of the kChains last ones.
  template <int R, int distance>
  KVLOOM_INLINE void add_chains(const Byte* query, Index width, Index t, Index lane,
                                Vec (*sums)[kVectors]) const {
    const Index length = chain_length(width);
    Vec chain[kChains][R][kVectors];
    KVLOOM_UNROLL(2)
    for (int c = 0; c < kChains; ++c) {
      KVLOOM_UNROLL(4)
      for (int r = 0; r < R; ++r) {
        KVLOOM_UNROLL(2)
        for (int v = 0; v < kVectors; ++v) chain[c][r][v] = Vec{};
      }
    }
    KVLOOM_UNROLL(2)
    for (Index i = 0; i < length; ++i) {
      KVLOOM_UNROLL(2)
      for (int c = 0; c < kChains; ++c) {
        const Index from = lane + c * distance;
        const Byte* q = query + 4 * (i * kLanes + from);
        Vec x[kVectors];
        KVLOOM_UNROLL(2)
        for (int v = 0; v < kVectors; ++v) x[v] = load(at(from * length + i, t) + v * kLanes);
        KVLOOM_UNROLL(4)
        for (int r = 0; r < R; ++r) {
          const Vec y = splat(bit_copy<float>(q + r * Products::query_bytes(width)));
          KVLOOM_UNROLL(2)
          for (int v = 0; v < kVectors; ++v) chain[c][r][v] = Products::add(chain[c][r][v], x[v], y);
        }
      }
    }
    KVLOOM_UNROLL(4)
    for (int r = 0; r < R; ++r) {
      KVLOOM_UNROLL(2)
      for (int v = 0; v < kVectors; ++v)
        sums[r][v] = kChains == 2 ? chain[0][r][v] + chain[kChains - 1][r][v] : chain[0][r][v];
    }
  }

  alignas(64) float dwords_[kChunk / kScored][kMaxHeadDim][kScored];
};

}  // namespace kvloom::KVLOOM_ISA
