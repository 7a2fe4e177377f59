// Codes of 8, 4 and 2 bits in and out of 32-bit lanes.
#pragma once

#include "floats.h"

namespace kvloom::KVLOOM_ISA {

// The largest magnitude of a group in scales: of 8 and 4 bits the largest code.
template <int kBits>
constexpr int kMaxScales = kBits == 2 ? 4 : (1 << (kBits - 1)) - 1;

// The low two bits of each lane, four to a byte.
KVLOOM_INLINE auto pack_quarters(IntVec codes) {
  auto x = as<VectorOf<uint32_t, kLanes / 4>::type>(low_bytes(codes)) & 0x03030303u;
  x |= x >> 6;
  x |= x >> 12;
  return __builtin_convertvector(x, VectorOf<uint8_t, kLanes / 4>::type);
}

// Writes the low bits of the first `count` lanes; of several to a byte the first in its lowest bits.
template <int kBits>
KVLOOM_INLINE void store_codes(Byte* to, IntVec codes, Index count) {
  if constexpr (kBits == 8) {
    const Bytes bytes = low_bytes(codes);
    std::memcpy(to, &bytes, count);
  } else if constexpr (kBits == 4) {
    const Nibbles bytes = pack_nibbles(low_bytes(codes));
    std::memcpy(to, &bytes, count / 2);
  } else {
    const auto bytes = pack_quarters(codes);
    std::memcpy(to, &bytes, count / 4);
  }
}

// Writes the low bits of all lanes, each odd code after its even one.
template <int kBits>
KVLOOM_INLINE void store_pairs(Byte* to, IntVec even, IntVec odd) {
  const IntVec both = (even & ((1 << kBits) - 1)) | odd << kBits;
  if constexpr (kBits == 8) {
    const Shorts pairs = low_halves(as<Words>(both));
    std::memcpy(to, &pairs, sizeof pairs);
  } else if constexpr (kBits == 4) {
    const Bytes pairs = low_bytes(both);
    std::memcpy(to, &pairs, sizeof pairs);
  } else {
    store_codes<4>(to, both, kLanes);
  }
}

// The numbers of `count` codes; the other lanes are arbitrary.
template <int kBits>
KVLOOM_INLINE Vec load_codes(const Byte* from, Index count) {
  IntVec codes;
  if constexpr (kBits == 8) {
    codes = sign_extend(load_bytes<Bytes>(from, count));
  } else if constexpr (kBits == 4) {
    codes = sign_extend(load_bytes<Nibbles>(from, count / 2));
  } else {  // all are in one dword; a number is twice its code and 1
    int32_t dword = 0;
    std::memcpy(&dword, from, count / 4);
    codes = splat(dword) << (30 - 2 * lane_numbers()) >> 29 | 1;
  }
  return __builtin_convertvector(codes, Vec);
}

// Whether one vector holds the numbers of all codes of so many bits, to be looked up by `permute`.
template <int kBits>
constexpr bool kFitVector = kLanes == 16 && kBits <= 4;

// The number of each code, in the lane of the code and, of fewer than 4 bits, again in those after it.
template <int kBits>
KVLOOM_INLINE Vec numbers_of_codes() {
  static_assert(kFitVector<kBits>);
  const IntVec code = lane_numbers() << (32 - kBits) >> (32 - kBits);
  return __builtin_convertvector(kBits == 2 ? 2 * code + 1 : code, Vec);
}

// Lanes of which the low bits are kLanes codes. The bits above four are arbitrary: `permute` ignores them.
template <int kBits>
KVLOOM_INLINE IntVec load_lanes(const Byte* from) {
  static_assert(kFitVector<kBits>);
  const IntVec lane = lane_numbers(), low = splat(bit_copy<int32_t>(from));
  if constexpr (kBits == 2) return low >> 2 * lane;
  return (lane < 8 ? low : splat(bit_copy<int32_t>(from + 4))) >> 4 * (lane & 7);
}

}  // namespace kvloom::KVLOOM_ISA
