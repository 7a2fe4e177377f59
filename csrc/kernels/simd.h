// Vectors of the width that suits the instruction set, and the three float types in and out of float32.
//
// Arithmetic is the compiler's vector extension, which any CPU has; intrinsics only where it has no word for it.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "args.h"

namespace kvloom::KVLOOM_ISA {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

template <class T, int kCount = kLanes>
struct VectorOf {
  typedef T type __attribute__((vector_size(kCount * sizeof(T))));
};
using Floats = VectorOf<float>::type;
using Ints = VectorOf<int32_t>::type;
using Words = VectorOf<uint32_t>::type;  // bits that may carry over
using Shorts = VectorOf<uint16_t>::type;
using Codes = VectorOf<int8_t>::type;
using Pairs = VectorOf<uint64_t, kLanes / 2>::type;   // two neighbouring 32-bit lanes in one
using Packed = VectorOf<uint8_t, kLanes / 2>::type;

struct Half {
  uint16_t bits;
};
struct BFloat {
  uint16_t bits;
};

/// The bits of one vector as another of the same size.
template <class To, class From>
KVLOOM_INLINE To as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

KVLOOM_INLINE Floats splat(float x) { return x - Floats{}; }  // -0 stays -0
KVLOOM_INLINE Ints splat(int32_t x) { return x + Ints{}; }
KVLOOM_INLINE Floats select(Ints where, Floats a, Floats b) { return where ? a : b; }
KVLOOM_INLINE Ints select(Ints where, Ints a, Ints b) { return where ? a : b; }

/// Lane i of the result is lane `index[i]` of x.
KVLOOM_INLINE Ints permute(Ints x, Ints index) {
#if defined(__AVX512F__)
  return as<Ints>(_mm512_permutexvar_epi32(as<__m512i>(index), as<__m512i>(x)));
#elif defined(__AVX2__)
  return as<Ints>(_mm256_permutevar8x32_epi32(as<__m256i>(x), as<__m256i>(index)));
#else
  Ints moved{};
  for (int i = 0; i < kLanes; ++i) moved[i] = x[index[i]];
  return moved;
#endif
}

/// 0, 1, 2, ...
KVLOOM_INLINE Ints lane_numbers() {
  Ints numbers{};
  for (int i = 0; i < kLanes; ++i) numbers[i] = i;
  return numbers;
}

// --- float16 and bfloat16, to nearest even, whatever the CPU has ---------------------------------------------

KVLOOM_INLINE Floats widen(Shorts x, Half) {
#if defined(__AVX512F__)
  return as<Floats>(_mm512_cvtph_ps(as<__m256i>(x)));
#elif defined(__F16C__) && defined(__AVX2__)
  return as<Floats>(_mm256_cvtph_ps(as<__m128i>(x)));
#else
  const Ints bits = __builtin_convertvector(x, Ints);
  const Ints shifted = (bits & 0x7fff) << 13;
  const Ints exponent = shifted & (0x7c00 << 13);
  const Ints normal = shifted + ((127 - 15) << 23);
  const Ints special = shifted + ((255 - 31) << 23);
  // A subnormal is a whole number of 2^-24; its float32 is exact, and so is this difference.
  const Floats offset = splat(6.103515625e-05f);
  const Ints subnormal = as<Ints>(as<Floats>(normal + (1 << 23)) - offset);
  const Ints magnitude = select(exponent == (0x7c00 << 13), special, select(exponent == 0, subnormal, normal));
  return as<Floats>(magnitude | ((bits & 0x8000) << 16));
#endif
}

KVLOOM_INLINE Floats widen(Shorts x, BFloat) { return as<Floats>(__builtin_convertvector(x, Ints) << 16); }

KVLOOM_INLINE Shorts narrow(Floats x, Half) {
#if defined(__AVX512F__)
  return as<Shorts>(_mm512_cvtps_ph(as<__m512>(x), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(__F16C__) && defined(__AVX2__)
  return as<Shorts>(_mm256_cvtps_ph(as<__m256>(x), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#else
  const Ints bits = as<Ints>(x), magnitude = bits & 0x7fffffff;
  const Ints odd = (magnitude >> 13) & 1;
  const Ints normal = (magnitude - ((127 - 15) << 23) + 0xfff + odd) >> 13;
  // Adding 0.5 leaves the 2^-24ths as the last bits of the sum, rounded.
  const Ints subnormal = as<Ints>(as<Floats>(magnitude) + 0.5f) - as<Ints>(splat(0.5f));
  const Ints special = select(magnitude > 0x7f800000, splat(0x7e00), splat(0x7c00));
  const Ints half = select(magnitude >= 0x47800000, special,
                           select(magnitude < 0x38800000, subnormal, normal));
  return __builtin_convertvector(half | ((bits >> 16) & 0x8000), Shorts);
#endif
}

KVLOOM_INLINE Shorts narrow(Floats x, BFloat) {
  // Not the instruction of AVX512-BF16, which turns subnormals into zeros.
  const Words bits = as<Words>(x);
  const Words rounded = bits + 0x7fff + ((bits >> 16) & 1);
  const Words nan = bits | 0x400000;
  const Words wide = (bits & 0x7fffffff) > 0x7f800000 ? nan : rounded;
  return __builtin_convertvector(wide >> 16, Shorts);
}

// --- what the kernels are written in: float32 lanes, read from and rounded to a type T -------------------------

KVLOOM_INLINE Floats load(const float* from) {
  Floats x;
  std::memcpy(&x, from, sizeof x);
  return x;
}

template <class T>
KVLOOM_INLINE Floats load(const T* from) {
  Shorts x;
  std::memcpy(&x, from, sizeof x);
  return widen(x, T{});
}

KVLOOM_INLINE void store(float* to, Floats x) { std::memcpy(to, &x, sizeof x); }

template <class T>
KVLOOM_INLINE void store(T* to, Floats x) {
  const Shorts narrowed = narrow(x, T{});
  std::memcpy(to, &narrowed, sizeof narrowed);
}

/// The nearest value that a T holds.
template <class T>
KVLOOM_INLINE Floats round_to(Floats x) {
  if constexpr (sizeof(T) == sizeof(float)) {
    return x;
  } else {
    return widen(narrow(x, T{}), T{});
  }
}

template <class T>
constexpr float kLargest = 3.40282346638528859812e+38f;
template <>
inline constexpr float kLargest<Half> = 65504.0f;
template <>
inline constexpr float kLargest<BFloat> = 3.38953138925153547590e+38f;

/// What lies beyond the largest finite T becomes that. NaN stays NaN.
template <class T>
KVLOOM_INLINE Floats saturate(Floats x) {
  const Floats largest = splat(kLargest<T>);
  x = select(x > largest, largest, x);
  return select(x < -largest, -largest, x);
}

/// The first `count` lanes; the others are 0.
template <class T>
KVLOOM_INLINE Floats load_some(const T* from, int64_t count) {
  T some[kLanes] = {};
  std::memcpy(some, from, count * sizeof(T));
  return load(some);
}

template <class T>
KVLOOM_INLINE void store_some(T* to, Floats x, int64_t count) {
  T some[kLanes];
  store(some, x);
  std::memcpy(to, some, count * sizeof(T));
}

/// Copies a cache line to an aligned address, past the caches where the CPU can.
KVLOOM_INLINE void stream_line(char* to, const char* from) {
#if defined(__AVX512F__)
  _mm512_stream_si512(reinterpret_cast<__m512i*>(to), _mm512_loadu_si512(from));
#elif defined(__AVX2__)
  for (int i = 0; i < 64; i += 32) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to + i),
                        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i)));
  }
#elif defined(__SSE2__)
  for (int i = 0; i < 64; i += 16) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(to + i),
                     _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i)));
  }
#else
  std::memcpy(to, from, 64);
#endif
}

/// Makes streamed lines visible to other threads.
KVLOOM_INLINE void finish_stream() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

}  // namespace kvloom::KVLOOM_ISA
