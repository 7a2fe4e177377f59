// Codes of 2 bits as the codes of 4 bits that kernels read: -3, -1, 1 and 3 in nibbles. Rows become rows, and
// blocks in native order blocks in that order.
#pragma once

#include "cache.h"

namespace kvloom::KVLOOM_ISA {

// The numbers 2 * code + 1 of the two codes in the low nibble of each byte, in two nibbles.
template <class V>
KVLOOM_INLINE V expand_nibbles(V x) {
  x = (x | x << 2) & 0x33333333u;
  return x << 1 | (x & 0x22222222u) << 2 | 0x11111111u;
}

// As expand_nibbles, of the two low bytes of each dword.
template <class V>
KVLOOM_INLINE V expand_half(V x) {
  x = (x | x << 8) & 0x00ff00ffu;
  return expand_nibbles((x | x << 4) & 0x0f0f0f0fu);
}

// The dwords that follow one another from each dword of `x`.
template <class V>
KVLOOM_INLINE void store_expanded(V x, Byte* to) {
  const V low = expand_half(x & 0xffffu), high = expand_half(x >> 16);
  const V both[2] = {interleave_low(low, high), interleave_high(low, high)};
  std::memcpy(to, both, sizeof both);
}

inline void expand_row(const Byte* row, Index bytes, Byte* to) {
  using Dwords = VectorOf<uint32_t, 4>::type;
  Index i = 0;
  for (; i + 16 <= bytes; i += 16) store_expanded(bit_copy<Dwords>(row + i), to + 2 * i);
  if (i == bytes) return;
  alignas(16) Byte last[16] = {}, expanded[32];
  std::memcpy(last, row + i, bytes - i);
  store_expanded(bit_copy<Dwords>(last), expanded);
  std::memcpy(to + 2 * i, expanded, 2 * (bytes - i));
}

// One block of keys, whose columns of four bytes become two.
inline void expand_columns(const Byte* block, Index bytes, Byte* to) {
  constexpr Index kColumnBytes = 4 * kBlock, kStep = sizeof(Words);
  for (Index column = 0; column < bytes / 4; ++column)
    for (Index i = 0; i < kColumnBytes; i += kStep) {
      const Words x = bit_copy<Words>(block + column * kColumnBytes + i);
      const Words low = expand_half(x & 0xffffu), high = expand_half(x >> 16);
      std::memcpy(to + 2 * column * kColumnBytes + i, &low, kStep);
      std::memcpy(to + (2 * column + 1) * kColumnBytes + i, &high, kStep);
    }
}

// One block of values, whose bytes of four tokens become two.
inline void expand_quads(const Byte* block, Index bytes, Byte* to) {
  constexpr Index kStep = sizeof(Words);
  for (Index i = 0; i < kBlock * bytes; i += kStep) {
    const Words x = bit_copy<Words>(block + i);
    const Words low = expand_nibbles(x & 0x0f0f0f0fu), high = expand_nibbles(x >> 4 & 0x0f0f0f0fu);
    const Words both[2] = {interleave_low(low, high), interleave_high(low, high)};
    std::memcpy(to + 2 * i, both, sizeof both);
  }
}

// Expanded copies of the rows [begin, end) of a chunk, or of the native blocks that hold them, as
// `SideLayout::block_of` finds them. The others get one that may be read.
inline const Byte* const* expand_rows(const SideLayout& side, const Byte* const* rows, Index begin, Index end,
                                      bool is_native, Byte* to, const Byte** copies) {
  for (Index t = 0; t < kChunk; ++t) copies[t] = to;
  if (!is_native) {
    alignas(16) Byte row[kMaxHeadDim];
    for (Index t = begin; t < end; ++t, to += side.row_bytes) {
      const Byte* stored = side.is_contiguous ? rows[t] : copy_row(side.cache, rows[t], row);
      expand_row(stored, side.stored_bytes, to);
      copies[t] = to;
    }
    return copies;
  }
  for (Index first = begin / kBlock * kBlock; first < end; first += kBlock, to += kBlock * side.row_bytes) {
    const Index t = max(first, begin);
    const auto expand = side.order == NativeOrder::columns ? expand_columns : expand_quads;
    expand(side.block_of(rows[t], t - first), side.stored_bytes, to);
    for (Index i = t; i < min(first + kBlock, end); ++i) copies[i] = to + side.in_block(i - first);
  }
  return copies;
}

}  // namespace kvloom::KVLOOM_ISA
