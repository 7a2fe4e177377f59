// Vector operations beside tiles: exponentials, and the pairs of numbers that tiles multiply.
//
// While tiles multiply, most operations on floats have one vector port; additions and integers have two. So
// of two expressions with the same result, the one with additions and integers is used.
#pragma once

#include <immintrin.h>

#include "cache.h"

namespace kvloom::KVLOOM_ISA {

// 2^x: 0 for what is far below, infinity far above, NaN for NaN and for -infinity.
template <int kDegree>
KVLOOM_INLINE __m512 exp2_of(__m512 x) {
  static_assert(kDegree == 3 || kDegree == 5);
  // Minimax on [-1/2, 1/2], relative errors 7.5e-5 (less than rounding to bfloat16 has, 2e-3) and 2e-7.
  constexpr float third[] = {0.9999280729f, 0.6932609864f, 0.2426111328f, 0.05517166876f};
  constexpr float fifth[] = {1.0f,           0.6931469671f,   0.2402211972f,
                             0.05550713275f, 0.009675541503f, 0.001327647196f};
  const __m512 round = _mm512_set1_ps(12582912.0f);  // 1.5 * 2^23: adding it drops the fraction
  const __m512 whole = _mm512_sub_ps(_mm512_add_ps(x, round), round);
  const __m512 fraction = _mm512_sub_ps(x, whole);
  const float* c = kDegree == 3 ? third : fifth;
  __m512 p = _mm512_set1_ps(c[kDegree]);
  KVLOOM_UNROLL(5)
  for (int i = kDegree - 1; i >= 0; --i) p = _mm512_fmadd_ps(p, fraction, _mm512_set1_ps(c[i]));
  return _mm512_scalef_ps(p, whole);
}

// Two vectors of float32 as bfloat16 pairs, one number of each, rounded to nearest, ties away from zero. NaN
// stays NaN if a bit of its upper half says so, as that of every arithmetic result does.
KVLOOM_INLINE __m512i pair_rounded(__m512 first, __m512 second) {
  const __m512i half = _mm512_set1_epi32(0x8000), upper = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  const __m512i low = _mm512_srli_epi32(_mm512_add_epi32(_mm512_castps_si512(first), half), 16);
  const __m512i high = _mm512_add_epi32(_mm512_castps_si512(second), half);
  return _mm512_ternarylogic_epi32(low, high, upper, 0xd8);  // upper ? high : low
}

// Two rows of 32 bfloat16 numbers as pairs, one number of each: those of even dims, and those of odd ones.
struct RowPairs {
  KVLOOM_INLINE RowPairs(__m512i first, __m512i second) {
    constexpr __mmask32 upper = 0xaaaaaaaa;
    even = _mm512_mask_mov_epi16(first, upper, _mm512_slli_epi32(second, 16));
    odd = _mm512_mask_mov_epi16(_mm512_srli_epi32(first, 16), upper, second);
  }
  __m512i even, odd;
};

// Rows of 16 dwords as columns: to[i] has dword i of all rows. Loads of 16 bytes into their lane do one half
// of the work, shuffles the other.
KVLOOM_INLINE void transpose_dwords(const Byte* const* rows, Index at, Byte* to) {
  KVLOOM_UNROLL(4)
  for (int piece = 0; piece < 4; ++piece) {
    const auto quarter = [&](int row) {
      return _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[row] + at + 16 * piece));
    };
    __m512i x[4];
    KVLOOM_UNROLL(4)
    for (int r = 0; r < 4; ++r) {
      x[r] = _mm512_castsi128_si512(quarter(r));
      x[r] = _mm512_inserti32x4(x[r], quarter(r + 4), 1);
      x[r] = _mm512_inserti32x4(x[r], quarter(r + 8), 2);
      x[r] = _mm512_inserti32x4(x[r], quarter(r + 12), 3);
    }
    const __m512i low01 = _mm512_unpacklo_epi32(x[0], x[1]), high01 = _mm512_unpackhi_epi32(x[0], x[1]);
    const __m512i low23 = _mm512_unpacklo_epi32(x[2], x[3]), high23 = _mm512_unpackhi_epi32(x[2], x[3]);
    Byte* out = to + 256 * piece;
    _mm512_store_si512(out, _mm512_unpacklo_epi64(low01, low23));
    _mm512_store_si512(out + 64, _mm512_unpackhi_epi64(low01, low23));
    _mm512_store_si512(out + 128, _mm512_unpacklo_epi64(high01, high23));
    _mm512_store_si512(out + 192, _mm512_unpackhi_epi64(high01, high23));
  }
}

}  // namespace kvloom::KVLOOM_ISA
