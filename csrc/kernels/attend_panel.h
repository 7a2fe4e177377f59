// Keys of a chunk, turned so that a lane is a token: for many rows, which would else add across lanes for each score.
// A sum is the same numbers in the same order, so that it has the same bits.
#pragma once

#include "attend_vector.h"

namespace kvloom::KVLOOM_ISA {

constexpr Index kManyRows = 48;  // from so many on it pays to turn keys, or to put values in order

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
  // halves, quarters and so on. Here these sums come one after the other, four that are folded together at a time.
  template <int R, int W>
  void score(const Byte* query, Index query_bytes, Index any_width, float* scores) const {
    const Index dwords = (W ? W : any_width) / Scores::kElements;
    constexpr int kFours = kLanes / 4;
    for (Index t = 0; t < kChunk; t += kVectors * kLanes) {
      Sums<R> fours[kFours];
      for (int lane = 0; lane < kFours; ++lane) {
        Sums<R> a, b, c, d;
        add_up<R>(query, query_bytes, dwords, t, lane, a);
        add_up<R>(query, query_bytes, dwords, t, lane + 2 * kFours, b);
        fold<R>(a, b);
        add_up<R>(query, query_bytes, dwords, t, lane + kFours, c);
        add_up<R>(query, query_bytes, dwords, t, lane + 3 * kFours, d);
        fold<R>(c, d);
        fold<R>(a, c);
        for_sums<R>([&](int r, int v) { fours[lane][r][v] = a[r][v]; });
      }
      for (int width = kFours / 2; width > 0; width /= 2)
        for (int lane = 0; lane < width; ++lane) fold<R>(fours[lane], fours[lane + width]);
      for_sums<R>([&](int r, int v) { store(scores + r * kChunk + t + v * kLanes, fours[0][r][v]); });
    }
  }

 private:
  static constexpr int kVectors = 2;  // of tokens that are summed side by side
  template <int R>
  using Sums = Vec[R][kVectors];

  template <int R, class Visit>
  __attribute__((always_inline)) static void for_sums(Visit visit) {
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) visit(r, v);
  }

  template <int R>
  __attribute__((always_inline)) static void fold(Sums<R>& sums, const Sums<R>& others) {
    for_sums<R>([&](int r, int v) { sums[r][v] += others[r][v]; });
  }

  // Every kLanes-th dword from one on.
  template <int R>
  __attribute__((always_inline)) void add_up(const Byte* query, Index query_bytes, Index dwords, Index first_token,
                                             Index first, Sums<R>& sums) const {
    for_sums<R>([&](int r, int v) { sums[r][v] = Vec{}; });
#pragma GCC unroll 8
    for (Index dword = first; dword < dwords; dword += kLanes) {
      Vec x[kVectors];
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) x[v] = load(dwords_[dword] + first_token + v * kLanes);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const Vec q = splat(bit_copy<float>(query + r * query_bytes + 4 * dword));
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) sums[r][v] = Scores::add(sums[r][v], x[v], q);
      }
    }
  }

  alignas(64) float dwords_[kMaxHeadDim][kChunk];
};

}  // namespace kvloom::KVLOOM_ISA
