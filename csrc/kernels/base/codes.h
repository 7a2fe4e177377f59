// int8 and int4 codes in and out of 32-bit lanes.
#pragma once

#include "floats.h"

namespace kvloom::KVLOOM_ISA {

template <int kBits>
constexpr int kMaxCode = (1 << (kBits - 1)) - 1;

// Writes the low bits of the first `count` lanes; int4 codes two to a byte, the even one in the low nibble.
template <int kBits>
KVLOOM_INLINE void store_codes(Byte* to, IntVec codes, Index count) {
  if constexpr (kBits == 8) {
    const Bytes bytes = low_bytes(codes);
    std::memcpy(to, &bytes, count);
  } else {
    const Nibbles bytes = pack_nibbles(low_bytes(codes));
    std::memcpy(to, &bytes, count / 2);
  }
}

// Writes the low bits of all lanes, each odd code behind its even one.
template <int kBits>
KVLOOM_INLINE void store_pairs(Byte* to, IntVec even, IntVec odd) {
  const IntVec both = (even & ((1 << kBits) - 1)) | odd << kBits;
  if constexpr (kBits == 8) {
    const Shorts pairs = low_halves(as<Words>(both));
    std::memcpy(to, &pairs, sizeof pairs);
  } else {
    const Bytes pairs = low_bytes(both);
    std::memcpy(to, &pairs, sizeof pairs);
  }
}

// Reads `count` codes; the other lanes are 0.
template <int kBits>
KVLOOM_INLINE Vec load_codes(const Byte* from, Index count) {
  IntVec codes;
  if constexpr (kBits == 8) {
    codes = sign_extend(load_bytes<Bytes>(from, count));
  } else {
    codes = sign_extend(load_bytes<Nibbles>(from, count / 2));
  }
  return __builtin_convertvector(codes, Vec);
}

}  // namespace kvloom::KVLOOM_ISA
