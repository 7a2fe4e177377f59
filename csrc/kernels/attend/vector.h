// The compiler's vectors, as wide as the instruction set's registers, and their operations for softmax and horizontal
// sums.
#pragma once

#include "cache.h"

#include <utility>

#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace kvloom::KVLOOM_ISA {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float Vec __attribute__((vector_size(4 * kLanes)));
typedef std::int32_t IntVec __attribute__((vector_size(4 * kLanes)));

inline Vec load(const float* from) { return bit_copy<Vec>(from); }
inline void store(float* to, Vec x) { std::memcpy(to, &x, sizeof(Vec)); }
inline Vec splat(float x) { return x - Vec{}; }
inline IntVec splat_int(std::int32_t x) { return x - IntVec{}; }
inline Vec as_float(IntVec x) { return reinterpret_cast<Vec>(x); }
inline IntVec as_int(Vec x) { return reinterpret_cast<IntVec>(x); }

inline IntVec lane_numbers() {
  IntVec lanes{};
  for (int i = 0; i < kLanes; ++i) lanes[i] = i;
  return lanes;
}

inline Vec maximum(Vec a, Vec b) { return a > b ? a : b; }

// x * y + z, rounded once where the instruction set can. The compiler must not choose: some rows are computed by
// several copies of a function, and have the same bits in all of them.
inline Vec multiply_add(Vec x, Vec y, Vec z) {
#if defined(__AVX512F__)
  return reinterpret_cast<Vec>(_mm512_fmadd_ps(reinterpret_cast<__m512>(x), reinterpret_cast<__m512>(y),
                                               reinterpret_cast<__m512>(z)));
#elif defined(__FMA__)
  return reinterpret_cast<Vec>(_mm256_fmadd_ps(reinterpret_cast<__m256>(x), reinterpret_cast<__m256>(y),
                                               reinterpret_cast<__m256>(z)));
#elif defined(__FP_FAST_FMAF)  // ARM
  for (int i = 0; i < kLanes; ++i) z[i] = __builtin_fmaf(x[i], y[i], z[i]);
  return z;
#else
  return x * y + z;
#endif
}
inline Vec multiply_add(Vec x, float y, Vec z) { return multiply_add(x, splat(y), z); }
inline Vec multiply_add(Vec x, Vec y, float z) { return multiply_add(x, y, splat(z)); }

// Sum and maximum of the lanes, halves first: one fixed reduction tree.
template <int width, int... lane>
constexpr IntVec swapped_lanes(std::integer_sequence<int, lane...>) {
  return IntVec{(lane ^ width)...};
}
template <int width = kLanes / 2, class Combine>
inline float reduce_lanes(Vec x, Combine combine) {
  constexpr IntVec swapped = swapped_lanes<width>(std::make_integer_sequence<int, kLanes>());
  const Vec reduced = combine(x, __builtin_shuffle(x, swapped));
  if constexpr (width > 1) return reduce_lanes<width / 2>(reduced, combine);
  return reduced[0];
}
inline float sum_lanes(Vec x) {
  return reduce_lanes(x, [](Vec a, Vec b) { return a + b; });
}
inline float max_lane(Vec x) { return reduce_lanes(x, maximum); }

// e^x to about one unit in the last place; 0 far below the smallest normal number, exactly 1 at 0, NaN stays NaN.
inline Vec exp(Vec x) {
#if defined(__AVX512F__)
  const __m512 bounded = _mm512_max_ps(_mm512_set1_ps(-200.0f), reinterpret_cast<__m512>(x));
  const __m512 power_of_two = _mm512_roundscale_ps(bounded * 1.44269504f, _MM_FROUND_TO_NEAREST_INT);
  const Vec n = reinterpret_cast<Vec>(power_of_two), y = reinterpret_cast<Vec>(bounded);
#else
  const float round = 12582912.0f;  // 1.5 * 2^23: adding it drops the fraction
  const Vec bounded = x < splat(-88.0f) ? splat(-88.0f) : x > splat(88.0f) ? splat(88.0f) : x;
  const Vec n = (bounded * 1.44269504f + round) - round;
  const Vec y = bounded;
#endif
  const Vec f = multiply_add(n, 2.12194440e-4f, multiply_add(n, -0.693359375f, y));
  Vec p = splat(1.9875691500e-4f);
  p = multiply_add(p, f, 1.3981999507e-3f);
  p = multiply_add(p, f, 8.3334519073e-3f);
  p = multiply_add(p, f, 4.1665795894e-2f);
  p = multiply_add(p, f, 1.6666665459e-1f);
  p = multiply_add(p, f, 5.0000001201e-1f);
  p = multiply_add(p, f * f, f + 1.0f);
#if defined(__AVX512F__)
  return reinterpret_cast<Vec>(_mm512_scalef_ps(reinterpret_cast<__m512>(p), power_of_two));
#else
  const IntVec exponent = (__builtin_convertvector(n, IntVec) + 127) << 23;
  const Vec power = p * as_float(exponent);
  return x < splat(-87.3f) ? Vec{} : power;
#endif
}

inline float exp(float x) { return exp(splat(x))[0]; }

// tanh by a polynomial near 0, by e^2x elsewhere.
inline Vec tanh(Vec x) {
  const Vec size = as_float(as_int(x) & 0x7fffffff);
  const Vec square = x * x;
  Vec p = splat(-5.70498872745e-3f);
  p = p * square + 2.06390887954e-2f;
  p = p * square + -5.37397155531e-2f;
  p = p * square + 1.33314422036e-1f;
  p = p * square + -3.33332819422e-1f;
  const Vec near = p * square * x + x;
  const Vec far = 1.0f - 2.0f / (exp(2.0f * (size > splat(20.0f) ? splat(20.0f) : size)) + 1.0f);
  const Vec signed_far = as_float(as_int(far) | (as_int(x) & splat_int(INT32_MIN)));
  return size < splat(0.625f) ? near : signed_far;
}

// --- several vectors ---------------------------------------------------------------------------------------

// Which lanes of a pair of vectors are added when both are reduced to groups of `width` lanes.
template <int width, int... lane>
constexpr IntVec paired_lanes(std::integer_sequence<int, lane...>) {
  return IntVec{(lane / (2 * width) * 2 * width + lane % width + (lane % (2 * width) < width ? 0 : kLanes))...};
}

template <int width>
__attribute__((always_inline)) inline void add_pairs(Vec* sums) {
  constexpr IntVec low = paired_lanes<width>(std::make_integer_sequence<int, kLanes>());
#pragma GCC unroll 8
  for (int i = 0; i < width; ++i)
    sums[i] = __builtin_shuffle(sums[i], sums[i + width], low) +
              __builtin_shuffle(sums[i], sums[i + width], low + width);
}

// Lane i of the result is the sum of sums[i]: pairs of vectors are added in halves, then quarters, and so on.
__attribute__((always_inline)) inline Vec horizontal_sums(Vec* sums) {
  if constexpr (kLanes >= 16) add_pairs<8>(sums);
  if constexpr (kLanes >= 8) add_pairs<4>(sums);
  add_pairs<2>(sums);
  add_pairs<1>(sums);
  return sums[0];
}

// Vector i becomes lane i of all: pairs of vectors exchange halves, then quarters, and so on.
template <int width = kLanes / 2>
__attribute__((always_inline)) inline void transpose(Vec* x) {
  constexpr IntVec low = paired_lanes<width>(std::make_integer_sequence<int, kLanes>());
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) {
    if (i & width) continue;
    const Vec a = x[i], b = x[i + width];
    x[i] = __builtin_shuffle(a, b, low);
    x[i + width] = __builtin_shuffle(a, b, low + width);
  }
  if constexpr (width > 1) transpose<width / 2>(x);
}

// --- conversions of kLanes stored elements -----------------------------------------------------------------

inline Vec load_bf16(const Byte* from) {
  typedef std::uint16_t Halves __attribute__((vector_size(2 * kLanes)));
  return as_float(__builtin_convertvector(bit_copy<Halves>(from), IntVec) << 16);
}

inline Vec load_f16(const Byte* from) {
#if defined(__AVX512F__)
  return reinterpret_cast<Vec>(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
#elif defined(__F16C__)
  return reinterpret_cast<Vec>(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#else
  typedef std::uint16_t Halves __attribute__((vector_size(2 * kLanes)));
  const IntVec x = __builtin_convertvector(bit_copy<Halves>(from), IntVec);
  const IntVec sign = (x & 0x8000) << 16, magnitude = x & 0x7fff;
  const Vec finite = as_float(magnitude << 13) * 0x1p112f;  // from one exponent bias to the other
  return as_float(sign | (magnitude >= 0x7c00 ? magnitude << 13 | 0x7f800000 : as_int(finite)));
#endif
}

#if defined(__AVX2__)
inline Vec widen_codes(__m128i codes) {
#if defined(__AVX512F__)
  return reinterpret_cast<Vec>(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(codes)));
#else
  return reinterpret_cast<Vec>(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(codes)));
#endif
}

inline Vec load_int8(const Byte* from) {
  alignas(16) Byte codes[16] = {};
  std::memcpy(codes, from, kLanes);
  return widen_codes(_mm_load_si128(reinterpret_cast<const __m128i*>(codes)));
}

inline Vec load_int4(const Byte* from) {
  std::uint64_t bytes = 0;
  std::memcpy(&bytes, from, kLanes / 2);
  const __m128i pairs = _mm_cvtepu8_epi16(_mm_cvtsi64_si128(static_cast<long long>(bytes)));
  const __m128i nibbles = _mm_and_si128(_mm_or_si128(pairs, _mm_slli_epi16(pairs, 4)), _mm_set1_epi8(0x0f));
  return widen_codes(_mm_sub_epi8(_mm_xor_si128(nibbles, _mm_set1_epi8(8)), _mm_set1_epi8(8)));
}
#else
inline Vec load_int8(const Byte* from) {
  typedef std::int8_t Codes __attribute__((vector_size(kLanes)));
  return __builtin_convertvector(__builtin_convertvector(bit_copy<Codes>(from), IntVec), Vec);
}

inline Vec load_int4(const Byte* from) {
  IntVec codes{};
  for (int i = 0; i < kLanes; ++i) codes[i] = from[i / 2] << (i % 2 ? 24 : 28);
  return __builtin_convertvector(codes >> 28, Vec);
}
#endif

// Every lane rounded to a 16-bit type and back.
inline Vec round_lanes(DType dtype, Vec x) {
  if (dtype == DType::bf16) {
    const IntVec bits = as_int(x), rounded = bits + 0x7fff + (bits >> 16 & 1);
    return x != x ? x : as_float(rounded & splat_int(INT32_MIN >> 15));
  }
#if defined(__AVX512F__)
  const __m256i halves = _mm512_cvtps_ph(reinterpret_cast<__m512>(x), _MM_FROUND_TO_NEAREST_INT);
  return reinterpret_cast<Vec>(_mm512_cvtph_ps(halves));
#elif defined(__F16C__)
  const __m128i halves = _mm256_cvtps_ph(reinterpret_cast<__m256>(x), _MM_FROUND_TO_NEAREST_INT);
  return reinterpret_cast<Vec>(_mm256_cvtph_ps(halves));
#else
  for (int i = 0; i < kLanes; ++i) x[i] = round_to(dtype, x[i]);
  return x;
#endif
}

// Every element rounded to a 16-bit type and back.
inline void round_row(DType dtype, float* row, Index dim) {
  Index d = 0;
  for (; d + kLanes <= dim; d += kLanes) store(row + d, round_lanes(dtype, load(row + d)));
  for (; d < dim; ++d) row[d] = round_to(dtype, row[d]);
}

// Elements [first, first + count) of an array become `from`.
inline void write_floats(void* data, DType dtype, Index first, const float* from, Index count) {
  Index i = 0;
#if defined(__AVX512BF16__)
  std::uint16_t* to = static_cast<std::uint16_t*>(data) + first;
  if (dtype != DType::f32)
    for (; i + kLanes <= count; i += kLanes) {
      const __m512 x = reinterpret_cast<__m512>(load(from + i));
      const __m256i bits = dtype == DType::bf16 ? reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x))
                                                : _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i), bits);
    }
#endif
  for (; i < count; ++i) write_float(data, dtype, first + i, from[i]);
}

// Elements of an array with a stride, as float32.
inline void read_floats(const void* data, DType dtype, Index first, Index stride, float* to, Index count) {
  Index i = 0;
  const Byte* from = static_cast<const Byte*>(data) + first * bytes_of(dtype);
  if (stride == 1)
    for (; i + kLanes <= count; i += kLanes)
      store(to + i, dtype == DType::f32    ? bit_copy<Vec>(from + 4 * i)
                    : dtype == DType::bf16 ? load_bf16(from + 2 * i)
                                           : load_f16(from + 2 * i));
  for (; i < count; ++i) to[i] = read_float(data, dtype, first + i * stride);
}

}  // namespace kvloom::KVLOOM_ISA
