// The tile operations of tiles.h in plain C++, with the bits of the hardware: for tests on machines without
// AMX.
//
// A product keeps two sums for an element, one of even and one of odd k, each a chain of fused multiply-adds
// in the order of k. It adds the two, then their sum to the element. Every step rounds to nearest, ties to
// even. Subnormal numbers count as zero where they are read, and become zero of their sign after every step;
// whether a result is subnormal is decided after rounding it to 24 bits with an unbounded exponent. A NaN may
// have any payload.
#pragma once

#include <cmath>

#include "tiles.h"

namespace kvloom::KVLOOM_ISA {

class EmulatedTiles {
 public:
  EmulatedTiles() = default;
  EmulatedTiles(const EmulatedTiles&) = delete;
  EmulatedTiles& operator=(const EmulatedTiles&) = delete;

  void configure() {}

  template <int T>
  [[gnu::noinline]] void zero() {
    std::memset(bytes_[T], 0, sizeof bytes_[T]);
  }
  template <int T>
  [[gnu::noinline]] void load(const void* from, std::ptrdiff_t stride) {
    for (int r = 0; r < 16; ++r) std::memcpy(bytes_[T][r], static_cast<const Byte*>(from) + r * stride, 64);
  }
  template <int T>
  [[gnu::noinline]] void store(void* to, std::ptrdiff_t stride) {
    for (int r = 0; r < 16; ++r) std::memcpy(static_cast<Byte*>(to) + r * stride, bytes_[T][r], 64);
  }

  template <int C, int A, int B>
  [[gnu::noinline]] void multiply() {
    float left[16][32], right[16][32];
    widen<A>(left), widen<B>(right);
    for (int m = 0; m < 16; ++m)
      for (int n = 0; n < 16; ++n) {
        float even = 0.0f, odd = 0.0f;
        for (int k = 0; k < 16; ++k) {
          even = fused(left[m][2 * k], right[k][2 * n], even);
          odd = fused(left[m][2 * k + 1], right[k][2 * n + 1], odd);
        }
        Byte* at = bytes_[C][m] + 4 * n;
        const float c = flush(flush(bit_copy<float>(at)) + flush(even + odd));
        std::memcpy(at, &c, 4);
      }
  }

 private:
  template <int T>
  void widen(float (*to)[32]) const {
    for (int r = 0; r < 16; ++r)
      for (int i = 0; i < 32; ++i)
        to[r][i] = flush(as<float>(uint32_t{bit_copy<uint16_t>(bytes_[T][r] + 2 * i)} << 16));
  }

  static float flush(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }

  // a * b + c, rounded once. Just below the smallest normal number float32 has fewer bits than the 24 that
  // decide: there the exact result, which double has room for, is asked.
  static float fused(float a, float b, float c) {
    const float sum = std::fma(a, b, c);
    if (std::fabs(sum) > 0x1p-126f || sum != sum) return sum;
    const double exact = double{a} * b + c;
    return std::fabs(exact) < 0x1p-126 - 0x1p-151 ? std::copysign(0.0f, sum) : sum;
  }

  Byte bytes_[8][16][64] = {};
};

}  // namespace kvloom::KVLOOM_ISA
