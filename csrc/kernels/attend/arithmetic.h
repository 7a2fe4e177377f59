// Arithmetic on vectors of float32: fused products, softmax's functions, sums across lanes.
#pragma once

#include "../base/floats.h"

namespace kvloom::KVLOOM_ISA {

// x * y + z, rounded once where the instruction set can. The compiler must not choose: some rows are computed
// by several copies of a function, and have the same bits in all of them.
inline Vec multiply_add(Vec x, Vec y, Vec z) {
#if defined(__AVX512F__)
  return as<Vec>(_mm512_fmadd_ps(as<__m512>(x), as<__m512>(y), as<__m512>(z)));
#elif defined(__FMA__)
  return as<Vec>(_mm256_fmadd_ps(as<__m256>(x), as<__m256>(y), as<__m256>(z)));
#elif defined(__aarch64__)
  return as<Vec>(vfmaq_f32(as<float32x4_t>(z), as<float32x4_t>(x), as<float32x4_t>(y)));
#elif defined(__FP_FAST_FMAF)
  for (int i = 0; i < kLanes; ++i) z[i] = __builtin_fmaf(x[i], y[i], z[i]);
  return z;
#else
  return x * y + z;
#endif
}
inline Vec multiply_add(Vec x, float y, Vec z) { return multiply_add(x, splat(y), z); }
inline Vec multiply_add(Vec x, Vec y, float z) { return multiply_add(x, y, splat(z)); }

// A polynomial by its coefficients, that of the highest power first.
template <int kCount>
KVLOOM_INLINE Vec polynomial(const float (&coefficients)[kCount], Vec x) {
  Vec p = splat(coefficients[0]);
  KVLOOM_UNROLL(8)
  for (int i = 1; i < kCount; ++i) p = multiply_add(p, x, coefficients[i]);
  return p;
}

// e^x: 0 far below the smallest normal number, 1 at 0, NaN for NaN. For x <= 0 it is within 2^-23 of e^x.
inline Vec exp(Vec x) {
#if defined(__AVX512F__)
  // 2^t by its fraction in [0, 1), of which the polynomial is within 2e-9 and exact at 0.
  const __m512 t = as<__m512>(x * 1.44269504f);
  const Vec f = as<Vec>(_mm512_reduce_ps(t, _MM_FROUND_TO_NEG_INF));  // of an infinity: 0
  constexpr float coefficients[] = {2.161292537e-4f,
                                    1.246784274e-3f,
                                    9.675452065e-3f,
                                    5.548528031e-2f,
                                    2.402293056e-1f,
                                    6.931470444e-1f,
                                    1.0f};
  const Vec p = polynomial(coefficients, f);
  return as<Vec>(_mm512_scalef_ps(as<__m512>(p), t));  // 2^floor(t) times that
#else
  const float round = 12582912.0f;  // 1.5 * 2^23: adding it drops the fraction
  const Vec bounded = x < splat(-88.0f) ? splat(-88.0f) : x > splat(88.0f) ? splat(88.0f) : x;
  const Vec n = (bounded * 1.44269504f + round) - round;
  const Vec f = multiply_add(n, 2.12194440e-4f, multiply_add(n, -0.693359375f, bounded));
  constexpr float coefficients[] = {1.9875691500e-4f, 1.3981999507e-3f, 8.3334519073e-3f,
                                    4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f};
  const Vec p = multiply_add(polynomial(coefficients, f), f * f, f + 1.0f);
  const IntVec exponent = (__builtin_convertvector(n, IntVec) + 127) << 23;
  const Vec power = p * as<Vec>(exponent);
  return x < splat(-87.3f) ? Vec{} : power;
#endif
}

inline float exp(float x) { return exp(splat(x))[0]; }

// tanh by a polynomial near 0, by e^2x elsewhere.
inline Vec tanh(Vec x) {
  const Vec size = as<Vec>(as<IntVec>(x) & 0x7fffffff);
  const Vec square = x * x;
  Vec p = splat(-5.70498872745e-3f);
  p = p * square + 2.06390887954e-2f;
  p = p * square + -5.37397155531e-2f;
  p = p * square + 1.33314422036e-1f;
  p = p * square + -3.33332819422e-1f;
  const Vec near = p * square * x + x;
  const Vec far = 1.0f - 2.0f / (exp(2.0f * (size > splat(20.0f) ? splat(20.0f) : size)) + 1.0f);
  const Vec signed_far = as<Vec>(as<IntVec>(far) | (as<IntVec>(x) & splat(INT32_MIN)));
  return size < splat(0.625f) ? near : signed_far;
}

// --- several vectors ---------------------------------------------------------------------------------------

// When two vectors are reduced to groups of `width` lanes, these lanes are added to those `width` later.
template <int width>
constexpr int paired_lane(int lane) {
  return lane / (2 * width) * 2 * width + lane % width + (lane % (2 * width) < width ? 0 : kLanes);
}
template <int width>
KVLOOM_INLINE Vec first_of_pairs(Vec a, Vec b) {
  return shuffle(a, b, [](int lane) { return paired_lane<width>(lane); });
}
template <int width>
KVLOOM_INLINE Vec second_of_pairs(Vec a, Vec b) {
  return shuffle(a, b, [](int lane) { return paired_lane<width>(lane) + width; });
}

// Combines the lanes of each of R vectors by one fixed tree, halves first: those of x[r] end in lane
// r * kLanes / R of the result. While there are several vectors, two of them are halved at once.
template <int R, int width = kLanes / 2, class Combine>
KVLOOM_INLINE Vec reduce_rows(Vec* x, Combine combine) {
  if constexpr (width == 0) {
    return x[0];
  } else if constexpr (R == 1) {
    x[0] = combine(x[0], shuffle(x[0], x[0], [](int lane) { return lane ^ width; }));
    return reduce_rows<1, width / 2>(x, combine);
  } else {
    KVLOOM_UNROLL(8)
    for (int i = 0; i < R / 2; ++i)
      x[i] = combine(first_of_pairs<width>(x[i], x[i + R / 2]), second_of_pairs<width>(x[i], x[i + R / 2]));
    return reduce_rows<R / 2, width / 2>(x, combine);
  }
}
template <int R>
KVLOOM_INLINE Vec sum_rows(Vec* x) {
  return reduce_rows<R>(x, [](Vec a, Vec b) { return a + b; });
}
template <int R>
KVLOOM_INLINE Vec max_rows(Vec* x) {
  return reduce_rows<R>(x, [](Vec a, Vec b) { return maximum(a, b); });
}
inline float sum_lanes(Vec x) { return sum_rows<1>(&x)[0]; }

// Vector i becomes lane i of all: pairs of vectors exchange halves, then quarters, and so on.
template <int width = kLanes / 2>
KVLOOM_INLINE void transpose(Vec* x) {
  KVLOOM_UNROLL(16)
  for (int i = 0; i < kLanes; ++i) {
    if (i & width) continue;
    const Vec a = x[i], b = x[i + width];
    x[i] = first_of_pairs<width>(a, b);
    x[i + width] = second_of_pairs<width>(a, b);
  }
  if constexpr (width > 1) transpose<width / 2>(x);
}

}  // namespace kvloom::KVLOOM_ISA
