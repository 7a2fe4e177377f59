// Conversions of the three float types to and from float32 lanes, on any CPU.
//
// Arithmetic is the compiler's vector extension; intrinsics only where it has no operation.
#pragma once

#include <type_traits>

#include "vectors.h"

namespace kvloom::KVLOOM_ISA {

struct Half {
  uint16_t bits;
};
struct BFloat {
  uint16_t bits;
};

// --- float16 and bfloat16, to nearest even, on any CPU -----------------------------------------------------

KVLOOM_INLINE Vec widen(Shorts x, Half) {
#if defined(__AVX512F__)
  return as<Vec>(_mm512_cvtph_ps(as<__m256i>(x)));
#elif defined(__F16C__) && defined(__AVX2__)
  return as<Vec>(_mm256_cvtph_ps(as<__m128i>(x)));
#elif defined(__aarch64__)
  return as<Vec>(vcvt_f32_f16(as<float16x4_t>(x)));
#else
  const IntVec bits = as<IntVec>(zero_extend(x)), magnitude = bits & 0x7fff;
  // 2^112 moves the exponent from one bias to the other, subnormals included.
  const IntVec finite = as<IntVec>(as<Vec>(magnitude << 13) * 0x1p112f);
  return as<Vec>((bits & 0x8000) << 16 | (magnitude < 0x7c00 ? finite : magnitude << 13 | 0x7f800000));
#endif
}

KVLOOM_INLINE Vec widen(Shorts x, BFloat) { return as<Vec>(zero_extend(x) << 16); }

KVLOOM_INLINE Shorts narrow(Vec x, Half) {
#if defined(__AVX512F__)
  return as<Shorts>(_mm512_cvtps_ph(as<__m512>(x), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(__F16C__) && defined(__AVX2__)
  return as<Shorts>(_mm256_cvtps_ph(as<__m256>(x), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(__aarch64__)
  return as<Shorts>(vcvt_f16_f32(as<float32x4_t>(x)));
#else
  const IntVec bits = as<IntVec>(x), magnitude = bits & 0x7fffffff;
  const IntVec odd = (magnitude >> 13) & 1;
  const IntVec normal = (magnitude - ((127 - 15) << 23) + 0xfff + odd) >> 13;
  // Adding 0.5 leaves the 2^-24ths as the last bits of the sum, rounded.
  const IntVec subnormal = as<IntVec>(as<Vec>(magnitude) + 0.5f) - as<IntVec>(splat(0.5f));
  const IntVec special = magnitude > 0x7f800000 ? splat(0x7e00) : splat(0x7c00);
  const IntVec half = magnitude >= 0x47800000 ? special : magnitude < 0x38800000 ? subnormal : normal;
  return low_halves(as<Words>(half | ((bits >> 16) & 0x8000)));
#endif
}

KVLOOM_INLINE Shorts narrow(Vec x, BFloat) {
  // Not the instruction of AVX512-BF16, which takes subnormals for zeros.
  const Words bits = as<Words>(x);
  const Words rounded = bits + 0x7fff + ((bits >> 16) & 1);
  const Words nan = bits | 0x400000;
  const Words wide = (bits & 0x7fffffff) > 0x7f800000 ? nan : rounded;
  return low_halves(wide >> 16);
}

// --- float32 lanes, loaded from and rounded to a type T ----------------------------------------------------

KVLOOM_INLINE Vec load(const float* from) { return bit_copy<Vec>(from); }

template <class T>
KVLOOM_INLINE Vec load(const T* from) {
  return widen(bit_copy<Shorts>(from), T{});
}

// Elements of a row of T from i on.
template <class T>
KVLOOM_INLINE Vec load_as(const Byte* row, Index i) {
  return load(reinterpret_cast<const T*>(row) + i);
}

KVLOOM_INLINE void store(float* to, Vec x) { std::memcpy(to, &x, sizeof x); }

template <class T>
KVLOOM_INLINE void store(T* to, Vec x) {
  const Shorts narrowed = narrow(x, T{});
  std::memcpy(to, &narrowed, sizeof narrowed);
}

// As `store`, where no lane is subnormal.
template <class T>
KVLOOM_INLINE void store_normal(T* to, Vec x) {
#if defined(__AVX512BF16__)
  if constexpr (std::is_same_v<T, BFloat>) {
    const __m256bh narrowed = _mm512_cvtneps_pbh(as<__m512>(x));
    std::memcpy(to, &narrowed, sizeof narrowed);
    return;
  }
#endif
  store(to, x);
}

// Whether `rounds_simply` ever says so.
template <class T>
constexpr bool kRoundsSimply = false;
#if defined(__AVX512BF16__)
template <>
inline constexpr bool kRoundsSimply<BFloat> = true;
#endif

// As `store`, where no lane is NaN.
template <class T>
KVLOOM_INLINE void store_finite(T* to, Vec x) {
  if constexpr (std::is_same_v<T, BFloat>) {
    const Words bits = as<Words>(x);
    const Shorts narrowed = low_halves((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
    std::memcpy(to, &narrowed, sizeof narrowed);
  } else {
    store(to, x);
  }
}

// Whether `store_normal` of these lanes, which may be anything, has the bits of `store` and is faster.
template <class T>
KVLOOM_INLINE bool rounds_simply(Vec x) {
#if defined(__AVX512BF16__)
  constexpr int kSubnormal = 0x20, kInfinite = 0x08 | 0x10, kNan = 0x01 | 0x80;
  if constexpr (std::is_same_v<T, BFloat>)
    return !_mm512_fpclass_ps_mask(as<__m512>(x), kSubnormal | kInfinite | kNan);
#endif
  static_cast<void>(x);
  return false;
}

// The nearest value that a T holds, or something larger than the largest. NaN stays NaN if it came from a T
// or from arithmetic, since its low bits are 0 then.
template <class T>
KVLOOM_INLINE Vec round_to(Vec x) {
  if constexpr (std::is_same_v<T, float>) {
    return x;
  } else if constexpr (std::is_same_v<T, BFloat>) {
    const Words bits = as<Words>(x);
    return as<Vec>((bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000);
  } else {
#if defined(__F16C__) || defined(__AVX512F__) || defined(__aarch64__)
    return widen(narrow(x, T{}), T{});
#else
    const Words bits = as<Words>(x), magnitude = bits & 0x7fffffff;
    const Words normal = (magnitude + 0xfff + ((magnitude >> 13) & 1)) & 0xffffe000;
    const Words subnormal = as<Words>((as<Vec>(magnitude) + 0.5f) - 0.5f);
    return as<Vec>((magnitude < 0x38800000 ? subnormal : normal) | (bits & 0x80000000));
#endif
  }
}

template <class T>
constexpr float kLargest = 3.40282346638528859812e+38f;
template <>
inline constexpr float kLargest<Half> = 65504.0f;
template <>
inline constexpr float kLargest<BFloat> = 3.38953138925153547590e+38f;

KVLOOM_INLINE float largest_finite(DType dtype) {
  return dtype == DType::f16 ? kLargest<Half> : dtype == DType::bf16 ? kLargest<BFloat> : kLargest<float>;
}

// Numbers beyond the largest finite value become that. NaN stays NaN.
KVLOOM_INLINE Vec saturate(Vec x, float largest) {
  return maximum(splat(-largest), minimum(splat(largest), x));
}

// As above, for a value that is finite in every T.
template <class... T>
KVLOOM_INLINE Vec saturate(Vec x) {
  float largest = kLargest<float>;
  ((largest = kLargest<T> < largest ? kLargest<T> : largest), ...);
  return saturate(x, largest);
}

// `bytes` bytes, and 0 after them.
template <class Vector>
KVLOOM_INLINE Vector load_bytes(const void* from, Index bytes) {
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

// The first `count` lanes; the others are 0.
KVLOOM_INLINE Vec load_partial(const float* from, Index count) {
  return load_bytes<Vec>(from, count * sizeof(float));
}

template <class T>
KVLOOM_INLINE Vec load_partial(const T* from, Index count) {
  return widen(load_bytes<Shorts>(from, count * sizeof(T)), T{});
}

template <class T>
KVLOOM_INLINE void store_partial(T* to, Vec x, Index count) {
  T some[kLanes];
  store(some, x);
  std::memcpy(to, some, count * sizeof(T));
}

// --- arrays ------------------------------------------------------------------------------------------------

template <class In, class Out>
KVLOOM_INLINE void cast(const In* from, Out* to, Index count) {
  Index i = 0;
  for (; i + kLanes <= count; i += kLanes) store(to + i, load(from + i));
  if (i < count) store_partial(to + i, load_partial(from + i, count - i), count - i);
}

// Calls `with` with a value of the float type that `dtype` names.
template <class With>
KVLOOM_INLINE auto for_float(DType dtype, With with) {
  switch (dtype) {
    case DType::f16: return with(Half{});
    case DType::bf16: return with(BFloat{});
    default: return with(float{});
  }
}

KVLOOM_INLINE float read_float(const void* data, DType dtype, Index i) {
  return for_float(dtype, [=]<class T>(T) { return load_partial(static_cast<const T*>(data) + i, 1)[0]; });
}

// Elements of an array with a stride, from `first` on.
inline void read_floats(const void* data, DType dtype, Index first, Index stride, float* to, Index count) {
  for_float(dtype, [=]<class T>(T) {
    const T* from = static_cast<const T*>(data) + first;
    if (stride == 1) return cast(from, to, count);
    for (Index i = 0; i < count; ++i) to[i] = load_partial(from + i * stride, 1)[0];
  });
}

// Elements [first, first + count) of an array become `from`.
inline void write_floats(void* data, DType dtype, Index first, const float* from, Index count) {
  for_float(dtype, [=]<class T>(T) { cast(from, static_cast<T*>(data) + first, count); });
}

}  // namespace kvloom::KVLOOM_ISA
