// The three float types in and out of float32 lanes, whatever the CPU has; and non-temporal stores.
//
// Arithmetic is the compiler's vector extension, which any CPU has; intrinsics only where it has no
// operation.
#pragma once

#include <type_traits>

#include "lanes.h"

namespace kvloom::KVLOOM_ISA::rows {

struct Half {
  uint16_t bits;
};
struct BFloat {
  uint16_t bits;
};

// --- float16 and bfloat16, to nearest even, whatever the CPU has ------------------------------------------

KVLOOM_INLINE Floats widen(Shorts x, Half) {
#if defined(__AVX512F__)
  return as<Floats>(_mm512_cvtph_ps(as<__m256i>(x)));
#elif defined(__F16C__) && defined(__AVX2__)
  return as<Floats>(_mm256_cvtph_ps(as<__m128i>(x)));
#else
  const Ints bits = as<Ints>(zero_extend(x));
  const Ints shifted = (bits & 0x7fff) << 13;
  const Ints exponent = shifted & (0x7c00 << 13);
  const Ints normal = shifted + ((127 - 15) << 23);
  const Ints special = shifted + ((255 - 31) << 23);
  // A subnormal is a whole number of 2^-24; its float32 is exact, and so is this difference.
  const Floats offset = splat(6.103515625e-05f);
  const Ints subnormal = as<Ints>(as<Floats>(normal + (1 << 23)) - offset);
  const Ints magnitude = exponent == (0x7c00 << 13) ? special : exponent == 0 ? subnormal : normal;
  return as<Floats>(magnitude | ((bits & 0x8000) << 16));
#endif
}

KVLOOM_INLINE Floats widen(Shorts x, BFloat) { return as<Floats>(zero_extend(x) << 16); }

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
  const Ints special = magnitude > 0x7f800000 ? splat(0x7e00) : splat(0x7c00);
  const Ints half = magnitude >= 0x47800000 ? special : magnitude < 0x38800000 ? subnormal : normal;
  return low_halves(as<Words>(half | ((bits >> 16) & 0x8000)));
#endif
}

KVLOOM_INLINE Shorts narrow(Floats x, BFloat) {
  // Not the instruction of AVX512-BF16, which takes subnormals for zeros.
  const Words bits = as<Words>(x);
  const Words rounded = bits + 0x7fff + ((bits >> 16) & 1);
  const Words nan = bits | 0x400000;
  const Words wide = (bits & 0x7fffffff) > 0x7f800000 ? nan : rounded;
  return low_halves(wide >> 16);
}

// --- float32 lanes, loaded from and rounded to a type T -----------------------------------------------------

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

/// As `store`, where no lane is subnormal.
template <class T>
KVLOOM_INLINE void store_normal(T* to, Floats x) {
#if defined(__AVX512BF16__)
  if constexpr (std::is_same_v<T, BFloat>) {
    const __m256bh narrowed = _mm512_cvtneps_pbh(as<__m512>(x));
    std::memcpy(to, &narrowed, sizeof narrowed);
    return;
  }
#endif
  store(to, x);
}

/// The nearest value that a T holds, or something larger than the largest. NaN stays NaN if it came from a T
/// or from arithmetic, since its low bits are 0 then.
template <class T>
KVLOOM_INLINE Floats round_to(Floats x) {
  if constexpr (std::is_same_v<T, float>) {
    return x;
  } else if constexpr (std::is_same_v<T, BFloat>) {
    const Words bits = as<Words>(x);
    return as<Floats>((bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000);
  } else {
#if defined(__F16C__) || defined(__AVX512F__)
    return widen(narrow(x, T{}), T{});
#else
    const Words bits = as<Words>(x), magnitude = bits & 0x7fffffff;
    const Words normal = (magnitude + 0xfff + ((magnitude >> 13) & 1)) & 0xffffe000;
    const Words subnormal = as<Words>((as<Floats>(magnitude) + 0.5f) - 0.5f);
    return as<Floats>((magnitude < 0x38800000 ? subnormal : normal) | (bits & 0x80000000));
#endif
  }
}

template <class T>
constexpr float kLargest = 3.40282346638528859812e+38f;
template <>
inline constexpr float kLargest<Half> = 65504.0f;
template <>
inline constexpr float kLargest<BFloat> = 3.38953138925153547590e+38f;

/// What lies beyond the largest value that is finite in every T becomes that. NaN stays NaN.
template <class... T>
KVLOOM_INLINE Floats saturate(Floats x) {
  float largest = kLargest<float>;
  ((largest = kLargest<T> < largest ? kLargest<T> : largest), ...);
  return maximum(splat(-largest), minimum(splat(largest), x));
}

/// `bytes` bytes, and 0 behind them.
template <class Vector>
KVLOOM_INLINE Vector load_bytes(const void* from, int64_t bytes) {
  uint64_t bits = 0;
  switch (bytes) {  // in a register: a vector load would wait for the store of these bytes
    case 1: std::memcpy(&bits, from, 1); break;
    case 2: std::memcpy(&bits, from, 2); break;
    case 4: std::memcpy(&bits, from, 4); break;
    case 8: std::memcpy(&bits, from, 8); break;
    default: {
      Vector some{};
      std::memcpy(&some, from, bytes);
      return some;
    }
  }
  if constexpr (sizeof(Vector) > sizeof bits) {
    const typename VectorOf<uint64_t, sizeof(Vector) / sizeof bits>::type wide = {bits};
    return as<Vector>(wide);
  } else {
    return as<Vector>(bits);
  }
}

/// The first `count` lanes; the others are 0.
KVLOOM_INLINE Floats load_partial(const float* from, int64_t count) {
  return load_bytes<Floats>(from, count * sizeof(float));
}

template <class T>
KVLOOM_INLINE Floats load_partial(const T* from, int64_t count) {
  return widen(load_bytes<Shorts>(from, count * sizeof(T)), T{});
}

template <class T>
KVLOOM_INLINE void store_partial(T* to, Floats x, int64_t count) {
  T some[kLanes];
  store(some, x);
  std::memcpy(to, some, count * sizeof(T));
}

/// Copies a cache line to an aligned address, with non-temporal stores where the CPU has them.
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
KVLOOM_INLINE void stream_fence() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

}  // namespace kvloom::KVLOOM_ISA::rows
