// Codes block by block of 16 tokens in a native order, rows of a multiple of 16 bytes. A cache in this order
// is read in place; blocks of any other are packed into it first. Either way the arithmetic is the same.
#pragma once

#include "prefetch.h"

namespace kvloom::KVLOOM_ISA {

using Bytes16 = VectorOf<Byte, 16>::type;
using Pairs16 = VectorOf<uint16_t, 8>::type;
using Dwords16 = VectorOf<uint32_t, 4>::type;
using Qwords16 = VectorOf<uint64_t, 2>::type;

// Stores elements of both vectors alternately, as elements of V: the first halves at `low`, the second at
// `high`.
template <class V, class From>
KVLOOM_INLINE void store_interleaved(From first, From second, Byte* low, Byte* high) {
  const V a = interleave_low(as<V>(first), as<V>(second)), b = interleave_high(as<V>(first), as<V>(second));
  std::memcpy(low, &a, sizeof a);
  std::memcpy(high, &b, sizeof b);
}

// 16 bytes of each of four rows become 16 dwords of a byte of each row.
inline void interleave_bytes(const Byte* const* rows, Index at, Byte* to) {
  Bytes16 x[4];
  KVLOOM_UNROLL(4)
  for (int i = 0; i < 4; ++i) x[i] = bit_copy<Bytes16>(rows[i] + at);
  store_interleaved<Pairs16>(interleave_low(x[0], x[1]), interleave_low(x[2], x[3]), to, to + 16);
  store_interleaved<Pairs16>(interleave_high(x[0], x[1]), interleave_high(x[2], x[3]), to + 32, to + 48);
}

// Four dwords of each of four rows become four dwords of each row's first, second, third and fourth.
inline void transpose_four(const Byte* const* rows, Index at, Byte* to, Index stride) {
  Dwords16 x[4];
  KVLOOM_UNROLL(4)
  for (int i = 0; i < 4; ++i) x[i] = bit_copy<Dwords16>(rows[i] + at);
  store_interleaved<Qwords16>(interleave_low(x[0], x[1]), interleave_low(x[2], x[3]), to, to + stride);
  to += 2 * stride;
  store_interleaved<Qwords16>(interleave_high(x[0], x[1]), interleave_high(x[2], x[3]), to, to + stride);
}

constexpr Index kColumn = 4 * kBlock;  // bytes of a column: four of each token of a block

// One block of keys, [row_bytes / 4, 16, 4]: in place, or as `copy` with room for it.
inline const Byte* key_block(const ChunkRows& chunk, Index block, Byte* copy) {
  if (chunk.is_native) return chunk.block(block);
  const Byte* const* rows = chunk.row + block * kBlock;
  const Index bytes = chunk.side->row_bytes;
  for (Index at = 0; at < bytes; at += 16)
    for (Index t = 0; t < kBlock; t += 4)
      transpose_four(rows + t, at, copy + at / 4 * kColumn + 4 * t, kColumn);
  return copy;
}

// One block of values, [4, row_bytes, 4]: in place, or as `copy` with room for it.
inline const Byte* value_block(const ChunkRows& chunk, Index block, Byte* copy) {
  if (chunk.is_native) return chunk.block(block);
  const Index bytes = chunk.side->row_bytes;
  for (Index quad = 0; quad < kBlock / 4; ++quad) {
    const Byte* const* rows = chunk.row + block * kBlock + 4 * quad;
    for (Index at = 0; at < bytes; at += 16) interleave_bytes(rows, at, copy + 4 * (quad * bytes + at));
  }
  return copy;
}

// Rows of a block in native order: from columns, then from quads.
inline void unpack_columns(const Byte* block, Index bytes, Byte (*rows)[kMaxHeadDim]) {
  for (Index at = 0; at < bytes; at += 16)
    for (Index t = 0; t < kBlock; t += 4) {
      const Byte* columns[4];
      for (Index i = 0; i < 4; ++i) columns[i] = block + (at / 4 + i) * kColumn + 4 * t;
      transpose_four(columns, 0, rows[t] + at, kMaxHeadDim);
    }
}

inline void unpack_quads(const Byte* block, Index bytes, Byte (*rows)[kMaxHeadDim]) {
  for (Index t = 0; t < kBlock; t += 4)
    for (Index at = 0; at < bytes; at += 16) {
      Bytes16 quads[4];
      const Byte* from[4];
      for (Index i = 0; i < 4; ++i) {
        const Bytes16 quad = bit_copy<Bytes16>(block + t * bytes + 4 * at + 16 * i);
        quads[i] = shuffle(quad, quad, [](int byte) { return byte % 4 * 4 + byte / 4; });  // by token
        from[i] = reinterpret_cast<const Byte*>(quads + i);
      }
      transpose_four(from, 0, rows[t] + at, kMaxHeadDim);
    }
}

}  // namespace kvloom::KVLOOM_ISA
