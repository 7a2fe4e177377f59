// Contiguous rows of numbers and of codes, and the conversion of codes from and to 32-bit lanes.
#pragma once

#include "../base/simd.h"

namespace kvloom::KVLOOM_ISA::rows {

/// `count` numbers or codes, in groups that share a scale.
struct Row {
  const void* in;
  const void* in_scale;
  void* out;
  void* out_scale;
  int64_t count, group;
  int64_t prefetch_bytes;  // distance from what is read to what is prefetched
};

template <int kBits>
constexpr int kMaxCode = (1 << (kBits - 1)) - 1;

/// Writes the low bits of the first `count` lanes; int4 codes two to a byte, the even one in the low nibble.
template <int kBits>
KVLOOM_INLINE void store_codes(char* to, Ints codes, int64_t count) {
  if constexpr (kBits == 8) {
    const Bytes bytes = low_bytes(codes);
    std::memcpy(to, &bytes, count);
  } else {
    const Nibbles bytes = pack_nibbles(low_bytes(codes));
    std::memcpy(to, &bytes, count / 2);
  }
}

/// Writes the low bits of all lanes, each odd code behind its even one.
template <int kBits>
KVLOOM_INLINE void store_pairs(char* to, Ints even, Ints odd) {
  const Ints both = (even & ((1 << kBits) - 1)) | odd << kBits;
  if constexpr (kBits == 8) {
    const Shorts pairs = low_halves(as<Words>(both));
    std::memcpy(to, &pairs, sizeof pairs);
  } else {
    const Bytes pairs = low_bytes(both);
    std::memcpy(to, &pairs, sizeof pairs);
  }
}

/// Reads `count` codes; the other lanes are 0.
template <int kBits>
KVLOOM_INLINE Floats load_codes(const char* from, int64_t count) {
  Ints codes;
  if constexpr (kBits == 8) {
    codes = sign_extend(load_bytes<Bytes>(from, count));
  } else {
    codes = sign_extend(load_bytes<Nibbles>(from, count / 2));
  }
  return __builtin_convertvector(codes, Floats);
}

}  // namespace kvloom::KVLOOM_ISA::rows
