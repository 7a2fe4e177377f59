// Vectors as wide as the registers of the instruction set, and what compilers do badly or not at all with
// their vector extension: changing the width of lanes, permuting lanes, minimum and maximum.
#pragma once

#include <cstring>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "types.h"

#ifndef KVLOOM_ISA
#error "define KVLOOM_ISA, the namespace of this instruction set, before including the kernels"
#endif

// One namespace for each instruction set: the linker must not pick one unit's copy of a function for another.
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
using Vec = VectorOf<float>::type;
using IntVec = VectorOf<int32_t>::type;
using Words = VectorOf<uint32_t>::type;               // bits that may carry over
using Shorts = VectorOf<uint16_t>::type;              // kLanes 16-bit floats
using Halves = VectorOf<int16_t, kLanes * 2>::type;   // a register of integers of that width
using Bytes = VectorOf<int8_t>::type;                 // kLanes 8-bit codes
using Nibbles = VectorOf<uint8_t, kLanes / 2>::type;  // kLanes 4-bit codes, two to a byte

// Object at an address, aligned or not.
template <class T>
KVLOOM_INLINE T bit_copy(const void* from) {
  T to;
  std::memcpy(&to, from, sizeof(T));
  return to;
}

// The bits of one vector or number as another type; excess bits are 0 or cut off.
template <class To, class From>
KVLOOM_INLINE To as(From from) {
  if constexpr (sizeof(From) == sizeof(To)) {
    return __builtin_bit_cast(To, from);
  } else if constexpr (sizeof(From) <= 8 && sizeof(To) == 16) {  // in a register, not through memory
    uint64_t bits = 0;
    std::memcpy(&bits, &from, sizeof from);
    return as<To>(VectorOf<uint64_t, 2>::type{bits, 0});
  } else {
    To to{};
    std::memcpy(&to, &from, sizeof to < sizeof from ? sizeof to : sizeof from);
    return to;
  }
}

KVLOOM_INLINE Vec splat(float x) { return x - Vec{}; }  // -0 stays -0
KVLOOM_INLINE IntVec splat(int32_t x) { return x + IntVec{}; }

// 0, 1, 2, ...
KVLOOM_INLINE IntVec lane_numbers() {
  IntVec numbers{};
  for (int i = 0; i < kLanes; ++i) numbers[i] = i;
  return numbers;
}

// Whether a lane is not 0.
KVLOOM_INLINE bool has_any(IntVec x) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask(as<__m512i>(x), as<__m512i>(x)) != 0;
#elif defined(__AVX2__)
  return !_mm256_testz_si256(as<__m256i>(x), as<__m256i>(x));
#elif defined(__aarch64__)
  return vmaxvq_u32(as<uint32x4_t>(x)) != 0;
#endif
  const auto words = as<VectorOf<uint64_t, kLanes / 2>::type>(x);
  uint64_t any = 0;
  for (int i = 0; i < kLanes / 2; ++i) any |= words[i];
  return any != 0;
}

template <class V>
constexpr int kLanesOf = sizeof(V) / sizeof(V{}[0]);

// Lane i of the result is lane Order(i) of both vectors, where those of b follow those of a.
template <class V, class Order>
KVLOOM_INLINE V shuffle(V a, V b, Order) {
  return [&]<int... lane>(std::integer_sequence<int, lane...>) KVLOOM_INLINE_LAMBDA {
    return __builtin_shufflevector(a, b, Order{}(lane)...);
  }(std::make_integer_sequence<int, kLanesOf<V>>{});
}

// Every other lane of both.
template <class V>
KVLOOM_INLINE V even_lanes(V a, V b) {
  return shuffle(a, b, [](int lane) { return 2 * lane; });
}
template <class V>
KVLOOM_INLINE V odd_lanes(V a, V b) {
  return shuffle(a, b, [](int lane) { return 2 * lane + 1; });
}

// Alternating lanes of both: of their first halves, or of the second.
template <class V>
KVLOOM_INLINE V interleave_low(V a, V b) {
  return shuffle(a, b, [](int lane) { return lane / 2 + lane % 2 * kLanesOf<V>; });
}
template <class V>
KVLOOM_INLINE V interleave_high(V a, V b) {
  return shuffle(a, b, [](int lane) { return (lane + kLanesOf<V>) / 2 + lane % 2 * kLanesOf<V>; });
}

// `maximum` and `minimum` give the second operand where one is NaN; lane i of `permute` is lane index[i] of
// x, that of `look_up` from[index[i]], where kLanes numbers may be read. Widths: `zero_extend` and
// `sign_extend` to 32 bits, `low_halves` and `low_bytes` of 32 bits.

#if defined(__AVX512F__)

KVLOOM_INLINE Vec maximum(Vec a, Vec b) { return as<Vec>(_mm512_max_ps(as<__m512>(a), as<__m512>(b))); }
KVLOOM_INLINE Vec minimum(Vec a, Vec b) { return as<Vec>(_mm512_min_ps(as<__m512>(a), as<__m512>(b))); }
KVLOOM_INLINE IntVec maximum(IntVec a, IntVec b) {
  return as<IntVec>(_mm512_max_epi32(as<__m512i>(a), as<__m512i>(b)));
}
KVLOOM_INLINE Halves maximum(Halves a, Halves b) {
  return as<Halves>(_mm512_max_epi16(as<__m512i>(a), as<__m512i>(b)));
}
KVLOOM_INLINE Vec permute(Vec x, IntVec index) {
  return as<Vec>(_mm512_permutexvar_ps(as<__m512i>(index), as<__m512>(x)));
}
KVLOOM_INLINE Words zero_extend(Shorts x) { return as<Words>(_mm512_cvtepu16_epi32(as<__m256i>(x))); }
KVLOOM_INLINE IntVec sign_extend(Bytes x) { return as<IntVec>(_mm512_cvtepi8_epi32(as<__m128i>(x))); }
KVLOOM_INLINE Shorts low_halves(Words x) { return as<Shorts>(_mm512_cvtepi32_epi16(as<__m512i>(x))); }
KVLOOM_INLINE Bytes low_bytes(IntVec x) { return as<Bytes>(_mm512_cvtepi32_epi8(as<__m512i>(x))); }

#elif defined(__AVX2__)

KVLOOM_INLINE Vec maximum(Vec a, Vec b) { return as<Vec>(_mm256_max_ps(as<__m256>(a), as<__m256>(b))); }
KVLOOM_INLINE Vec minimum(Vec a, Vec b) { return as<Vec>(_mm256_min_ps(as<__m256>(a), as<__m256>(b))); }
KVLOOM_INLINE IntVec maximum(IntVec a, IntVec b) {
  return as<IntVec>(_mm256_max_epi32(as<__m256i>(a), as<__m256i>(b)));
}
KVLOOM_INLINE Halves maximum(Halves a, Halves b) {
  return as<Halves>(_mm256_max_epi16(as<__m256i>(a), as<__m256i>(b)));
}
KVLOOM_INLINE Vec permute(Vec x, IntVec index) {
  return as<Vec>(_mm256_permutevar8x32_ps(as<__m256>(x), as<__m256i>(index)));
}
KVLOOM_INLINE Words zero_extend(Shorts x) { return as<Words>(_mm256_cvtepu16_epi32(as<__m128i>(x))); }
KVLOOM_INLINE IntVec sign_extend(Bytes x) { return as<IntVec>(_mm256_cvtepi8_epi32(as<__m128i>(x))); }
KVLOOM_INLINE Shorts low_halves(Words x) {
  const __m256i low = as<__m256i>(x & 0xffff);
  const __m256i packed = _mm256_packus_epi32(low, low);  // within each half of the register
  return as<Shorts>(_mm256_permute4x64_epi64(packed, 0b1000));
}
KVLOOM_INLINE Bytes low_bytes(IntVec x) {
  const __m128i halves = as<__m128i>(low_halves(as<Words>(x & 0xff)));
  return as<Bytes>(_mm_packus_epi16(halves, halves));
}

#else

KVLOOM_INLINE Vec maximum(Vec a, Vec b) { return a > b ? a : b; }
KVLOOM_INLINE Vec minimum(Vec a, Vec b) { return a < b ? a : b; }
KVLOOM_INLINE IntVec maximum(IntVec a, IntVec b) { return a > b ? a : b; }
KVLOOM_INLINE Halves maximum(Halves a, Halves b) { return a > b ? a : b; }

#if defined(__aarch64__)

KVLOOM_INLINE Vec permute(Vec x, IntVec index) {
  const IntVec bytes = index * 0x04040404 + 0x03020100;  // of each lane
  return as<Vec>(vqtbl1q_u8(as<uint8x16_t>(x), as<uint8x16_t>(bytes)));
}

#else

KVLOOM_INLINE Vec look_up(const float* from, IntVec index) {
  Vec found{};
  for (int i = 0; i < kLanes; ++i) found[i] = from[index[i]];
  return found;
}
KVLOOM_INLINE Vec permute(Vec x, IntVec index) {
  float lanes[kLanes];
  std::memcpy(lanes, &x, sizeof x);
  return look_up(lanes, index);
}

#endif

#if defined(__SSE2__)

KVLOOM_INLINE Words zero_extend(Shorts x) {
  return as<Words>(_mm_unpacklo_epi16(as<__m128i>(x), _mm_setzero_si128()));
}
KVLOOM_INLINE IntVec sign_extend(Bytes x) {
  const __m128i twice = _mm_unpacklo_epi8(as<__m128i>(x), as<__m128i>(x));
  return as<IntVec>(_mm_unpacklo_epi16(twice, twice)) >> 24;
}
KVLOOM_INLINE Shorts low_halves(Words x) {
  const __m128i extended = as<__m128i>(as<IntVec>(x << 16) >> 16);  // or the instruction would saturate
  return as<Shorts>(_mm_packs_epi32(extended, extended));
}
KVLOOM_INLINE Bytes low_bytes(IntVec x) {
  const __m128i halves = _mm_packs_epi32(as<__m128i>(x & 0xff), _mm_setzero_si128());
  return as<Bytes>(_mm_packus_epi16(halves, halves));
}

#elif defined(__aarch64__)

KVLOOM_INLINE Words zero_extend(Shorts x) { return as<Words>(vmovl_u16(as<uint16x4_t>(x))); }
KVLOOM_INLINE IntVec sign_extend(Bytes x) {
  return as<IntVec>(vmovl_s16(vget_low_s16(vmovl_s8(as<int8x8_t>(x)))));
}
KVLOOM_INLINE Shorts low_halves(Words x) { return as<Shorts>(vmovn_u32(as<uint32x4_t>(x))); }
KVLOOM_INLINE Bytes low_bytes(IntVec x) {
  const uint16x4_t halves = vmovn_u32(as<uint32x4_t>(x));
  return as<Bytes>(vmovn_u16(vcombine_u16(halves, halves)));
}

#else

KVLOOM_INLINE Words zero_extend(Shorts x) { return __builtin_convertvector(x, Words); }
KVLOOM_INLINE IntVec sign_extend(Bytes x) { return __builtin_convertvector(x, IntVec); }
KVLOOM_INLINE Shorts low_halves(Words x) { return __builtin_convertvector(x, Shorts); }
KVLOOM_INLINE Bytes low_bytes(IntVec x) { return __builtin_convertvector(x, Bytes); }

#endif
#endif

#if defined(__AVX2__) || defined(__aarch64__)
KVLOOM_INLINE Vec look_up(const float* from, IntVec index) { return permute(bit_copy<Vec>(from), index); }
#endif

// Not a comparison, of which the compiler makes two instructions.
KVLOOM_INLINE Bytes minimum(Bytes a, Bytes b) {
#if defined(__AVX2__)
  return as<Bytes>(_mm_min_epi8(as<__m128i>(a), as<__m128i>(b)));
#elif defined(__aarch64__)
  return as<Bytes>(vmin_s8(as<int8x8_t>(a), as<int8x8_t>(b)));
#else
  return a < b ? a : b;
#endif
}

// --- two 4-bit codes in a byte, the even one low -----------------------------------------------------------

KVLOOM_INLINE Nibbles pack_nibbles(Bytes codes) {
#if defined(__SSE2__)
  const __m128i pairs = as<__m128i>(codes);
  const __m128i even = _mm_and_si128(pairs, _mm_set1_epi16(0x0f));
  const __m128i odd = _mm_and_si128(_mm_srli_epi16(pairs, 4), _mm_set1_epi16(0xf0));
  return as<Nibbles>(_mm_packus_epi16(_mm_or_si128(even, odd), _mm_setzero_si128()));
#elif defined(__aarch64__)  // four codes, in a register of integers
  uint32_t pairs = as<uint32_t>(codes) & 0x0f0f0f0f;
  pairs |= pairs >> 4;
  return as<Nibbles>(static_cast<uint16_t>((pairs & 0xff) | (pairs >> 8 & 0xff00)));
#else
  Nibbles packed{};
  for (int i = 0; i < kLanes / 2; ++i) packed[i] = (codes[2 * i] & 0xf) | codes[2 * i + 1] << 4;
  return packed;
#endif
}

KVLOOM_INLINE IntVec sign_extend(Nibbles packed) {
#if defined(__AVX2__)
#if defined(__AVX512F__)
  const __m512i bytes = _mm512_cvtepu8_epi64(as<__m128i>(packed));
  const IntVec twice = as<IntVec>(_mm512_shuffle_epi32(bytes, _MM_PERM_CCAA));
#else
  const __m256i bytes = _mm256_cvtepu8_epi64(as<__m128i>(packed));
  const IntVec twice = as<IntVec>(_mm256_shuffle_epi32(bytes, 0b10100000));
#endif
  const IntVec above = 28 - (lane_numbers() & 1) * 4;  // bits above the nibble of a lane
  return twice << above >> 28;
#elif defined(__SSE2__)
  const __m128i wide = _mm_unpacklo_epi8(as<__m128i>(packed), _mm_setzero_si128());
  const __m128i even = _mm_and_si128(wide, _mm_set1_epi16(0x0f));
  const __m128i odd = _mm_slli_epi16(_mm_and_si128(wide, _mm_set1_epi16(0xf0)), 4);
  const __m128i bits = _mm_xor_si128(_mm_or_si128(even, odd), _mm_set1_epi8(8));
  return sign_extend(as<Bytes>(_mm_sub_epi8(bits, _mm_set1_epi8(8))));
#elif defined(__aarch64__)
  const IntVec above = 28 - lane_numbers() * 4;  // bits above the nibble of a lane
  return splat(int32_t{as<uint16_t>(packed)}) << above >> 28;
#else
  IntVec codes{};
  for (int i = 0; i < kLanes / 2; ++i) {
    codes[2 * i] = ((packed[i] & 0xf) ^ 8) - 8;
    codes[2 * i + 1] = ((packed[i] >> 4) ^ 8) - 8;
  }
  return codes;
#endif
}

}  // namespace kvloom::KVLOOM_ISA
