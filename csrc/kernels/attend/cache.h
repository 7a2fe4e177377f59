// The layout of keys or values, and the address of each stored token.
#pragma once

#include <cmath>

#include "../base/vectors.h"
#include "args.h"

namespace kvloom::KVLOOM_ISA {

constexpr Index kChunk = 64;   // tokens of one softmax step; chunks begin at multiples of it
constexpr Index kSplit = 512;  // tokens of one partial result; splits begin at multiples of it
constexpr Index kBlock = 16;   // tokens that are converted together

inline Index head_dim(const CacheSide& side) { return side.cache.head_dim(); }

inline bool row_is_contiguous(const View& view) {
  const Index inner = view.size[5], outer = view.size[4];
  if (inner == 1) return outer == 1 || view.stride[4] == 1;
  return view.stride[5] == 1 && (outer == 1 || view.stride[4] == inner);
}

// A copy of a row, its elements one after another.
inline const Byte* copy_row(const View& view, const Byte* row, Byte* to) {
  for (Index i = 0, bytes = view.itemsize; i < view.width(); ++i) {
    const Index element = i / view.size[5] * view.stride[4] + i % view.size[5] * view.stride[5];
    std::memcpy(to + i * bytes, row + element * bytes, bytes);
  }
  return to;
}

// Copies of the rows [begin, end) of a chunk; the others get one that may be read.
inline const Byte* const* copy_rows(const Byte* const* rows, Index begin, Index end, const View& view,
                                    Byte* to, const Byte** copies) {
  const Index bytes = view.width() * view.itemsize;
  for (Index t = 0; t < kChunk; ++t) copies[t] = to;
  for (Index t = begin; t < end; ++t, to += bytes) copies[t] = copy_row(view, rows[t], to);
  return copies;
}

// Codes in the order of integer dot products, a contiguous block for 16 tokens: keys as columns of four bytes
// of each token's vector, [.., D/4, 16, 4], values as quads of four tokens for each byte of a vector,
// [4, D, 4].
enum class NativeOrder { none, columns, quads };

inline NativeOrder native_order(const View& view) {
  if (view.itemsize != 1) return NativeOrder::none;
  const Index *size = view.size, *stride = view.stride;
  const bool is_columns = size[5] == 4 && stride[5] == 1 && size[2] % kBlock == 0 && stride[2] == 4 &&
                          (size[4] == 1 || stride[4] == 4 * kBlock);
  const bool is_quads = size[5] == 1 && stride[4] == 4 && size[2] == 4 && stride[2] == 1 &&
                        size[1] % 4 == 0 && stride[1] == 4 * size[4];
  return is_columns ? NativeOrder::columns : is_quads ? NativeOrder::quads : NativeOrder::none;
}

// The layout of the keys or values of one call.
struct SideLayout {
  // `native` is the order that the kernels of this side read in place.
  SideLayout(const CacheSide& side, NativeOrder native)
      : cache(side.cache), scale(side.scale), dim(head_dim(side)), offsets(side.cache) {
    is_expanded = cache.dtype == DType::int2;
    dtype = is_expanded ? DType::int4 : cache.dtype;
    stored_bytes = cache.width() * cache.itemsize;
    row_bytes = is_expanded ? 2 * stored_bytes : stored_bytes;
    rows_in_line = max(64 / row_bytes, 1);
    order = native_order(cache) == native ? native : NativeOrder::none;
    is_contiguous = row_is_contiguous(cache);
    block_rows_are_even = is_contiguous && offsets.has_stride(kBlock, offsets.stride());
    scale_is_contiguous = !scale.data || row_is_contiguous(scale);
    heads_are_contiguous = head_bytes() == stored_bytes;
    if (scale.data) {
      num_groups = scale.width();
      group = dim / num_groups;
      scale_offsets = SlotOffsets(scale);
      const Index bytes = num_groups * scale.itemsize;
      block_scales_are_contiguous = scale_is_contiguous && scale_offsets.has_stride(kBlock, bytes);
      head_scales_are_contiguous = scale_is_contiguous && scale_head_bytes() == bytes;
      const Index per_group = row_bytes / num_groups;
      for (Index g = 0; g < num_groups; ++g)
        for (Index i = g * per_group; i < (g + 1) * per_group; ++i)
          group_of_byte[i] = static_cast<int32_t>(g);
    }
  }

  Index head_bytes() const { return cache.head_bytes(); }
  Index scale_head_bytes() const { return scale.head_bytes(); }
  // Offset of token number `i` in a native block.
  Index in_block(Index i) const {
    return order == NativeOrder::columns ? 4 * i : i / 4 * 4 * stored_bytes + i % 4;
  }
  // The beginning of the native block whose token number `i` is at `row`.
  const Byte* block_of(const Byte* row, Index i) const { return row - in_block(i); }

  const View& cache;
  const View& scale;
  DType dtype;       // of the elements that kernels read
  bool is_expanded;  // whether these are copies: codes of 2 bits become codes of 4
  Index dim, row_bytes, rows_in_line;
  Index stored_bytes;  // of a row; row_bytes are those that kernels read
  Index num_groups = 0, group = 0;
  alignas(64) int32_t group_of_byte[kMaxHeadDim + kBlock];
  NativeOrder order;
  bool is_contiguous, scale_is_contiguous;   // a row
  bool heads_are_contiguous;                 // the rows of a token
  bool block_rows_are_even;                  // the rows of a block of tokens have one stride
  bool head_scales_are_contiguous = false;   // the scales of a token
  bool block_scales_are_contiguous = false;  // the scales of a block of tokens
  SlotOffsets offsets, scale_offsets;
};

// Rows of one head for the tokens [begin, end) of one chunk.
struct ChunkAddresses {
  Index begin = 0, end = 0;
  bool in_blocks = false;  // slots of each block of tokens follow one another, from a multiple of kBlock on
  const Byte* row[kChunk];
  const Byte* scale[kChunk] = {};

  void find(const TokenSlots& slots, const SideLayout& side, Index head, Index token, Index tokens) {
    begin = token % kChunk, end = begin + tokens;
    const Byte* codes = side.cache.data + head * side.head_bytes();
    const Byte* scales = side.scale.data;
    if (scales) scales += head * side.scale_head_bytes();
    in_blocks = slots.page_size() % kBlock == 0;
    slots.runs(token, tokens, [&](Index at, Index slot, Index run) {
      in_blocks &= (slot - at) % kBlock == 0;
      side.offsets.fill(codes, slot, run, row + (at - token + begin));
      if (scales) side.scale_offsets.fill(scales, slot, run, scale + (at - token + begin));
    });
    // Kernels may read the others, too.
    for (Index t = 0; t < kChunk; ++t)
      if (t < begin || t >= end) row[t] = row[begin], scale[t] = scale[begin];
  }

  void repeat(const ChunkAddresses& other) {
    begin = end = 0;
    in_blocks = other.in_blocks;
    std::memcpy(row, other.row, sizeof row);
    std::memcpy(scale, other.scale, sizeof scale);
  }
};

}  // namespace kvloom::KVLOOM_ISA
