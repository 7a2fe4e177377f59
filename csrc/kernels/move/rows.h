// The layout of rows in memory, and copying them: contiguous, strided, and with non-temporal stores.
#pragma once

#include <cstdint>
#include <cstring>

#include "../base/simd.h"

namespace kvloom::KVLOOM_ISA::rows {

/// The rows of a view, in bytes. A row is one head's items, or all heads' where they are contiguous.
struct RowLayout {
  char* data = nullptr;
  int64_t block_slots = 1, inner_slots = 1;  // slots in a block, and in its inner part
  int64_t block = 0, outer = 0, inner = 0;   // strides of the three parts of a slot
  int64_t head = 0;                          // stride of a head
  int64_t itemsize = 0;
  int64_t chunks = 1, chunk = 0;  // chunks of a row, and items of a chunk
  int64_t chunk_stride = 0, item_stride = 0;
  bool is_contiguous = false;  // the items of a row

  KVLOOM_INLINE int64_t row_bytes() const { return chunks * chunk * itemsize; }

  /// From one slot to the next, where both lie in one block or blocks are single slots.
  KVLOOM_INLINE int64_t slot_stride() const {
    return inner_slots > 1 ? inner : block_slots > 1 ? outer : block;
  }

  /// First head of a slot.
  KVLOOM_INLINE char* at(int64_t slot) const {
    if (block_slots == 1) return data + slot * block;
    const int64_t within = slot % block_slots;
    return data + slot / block_slots * block + within / inner_slots * outer + within % inner_slots * inner;
  }
};

KVLOOM_INLINE RowLayout row_layout_of(const View& view) {
  RowLayout layout;
  layout.data = view.data;
  layout.itemsize = view.itemsize;
  layout.block_slots = view.size[1] * view.size[2];
  layout.inner_slots = view.size[2];
  layout.block = view.stride[0] * view.itemsize;
  layout.outer = view.stride[1] * view.itemsize;
  layout.inner = view.stride[2] * view.itemsize;
  layout.head = view.stride[3] * view.itemsize;
  layout.chunks = view.size[4];
  layout.chunk = view.size[5];
  layout.chunk_stride = view.stride[4] * view.itemsize;
  layout.item_stride = view.stride[5] * view.itemsize;
  if (layout.chunk == 1) {  // chunks of one are items
    layout.chunk = layout.chunks;
    layout.item_stride = layout.chunk_stride;
    layout.chunks = 1;
  }
  const bool chunk_is_contiguous = layout.chunk == 1 || layout.item_stride == layout.itemsize;
  layout.is_contiguous =
      chunk_is_contiguous && (layout.chunks == 1 || layout.chunk_stride == layout.chunk * layout.itemsize);
  if (layout.is_contiguous) {
    layout.chunk *= layout.chunks;
    layout.chunks = 1;
  }
  return layout;
}

/// Whether all heads of a token are contiguous.
KVLOOM_INLINE bool heads_are_contiguous(const RowLayout& layout, int64_t num_heads) {
  return layout.is_contiguous && (num_heads == 1 || layout.head == layout.row_bytes());
}

/// Whether all heads of a token can be one row, of chunks or items at one stride.
KVLOOM_INLINE bool heads_can_join(const RowLayout& layout, int64_t num_heads) {
  const int64_t parts = layout.chunks == 1 ? layout.chunk : layout.chunks;
  const int64_t stride = layout.chunks == 1 ? layout.item_stride : layout.chunk_stride;
  return layout.is_contiguous || num_heads == 1 || layout.head == parts * stride;
}

KVLOOM_INLINE void join_heads(RowLayout& layout, int64_t num_heads) {
  if (layout.is_contiguous && !heads_are_contiguous(layout, num_heads)) {  // each head is a chunk
    layout.chunks = num_heads;
    layout.chunk_stride = layout.head;
    layout.item_stride = layout.itemsize;
    layout.is_contiguous = false;
  } else {
    (layout.chunks == 1 ? layout.chunk : layout.chunks) *= num_heads;
  }
}

// --- contiguous rows --------------------------------------------------------------------------------------

/// Whether this is whole cache lines.
KVLOOM_INLINE bool is_whole_lines(const char* to, int64_t bytes) {
  return (reinterpret_cast<uintptr_t>(to) | static_cast<uintptr_t>(bytes)) % 64 == 0;
}

inline void copy_contiguous(char* to, const char* from, int64_t bytes, bool stream) {
  if (!stream || !is_whole_lines(to, bytes)) {
    std::memcpy(to, from, bytes);
    return;
  }
  for (int64_t i = 0; i < bytes; i += 64) stream_line(to + i, from + i);
}

// --- strided rows -----------------------------------------------------------------------------------------

/// Copies `count` items of a constant size, each side at its own stride.
template <int kBytes>
KVLOOM_INLINE void move_items(char* to, int64_t to_stride, const char* from, int64_t from_stride,
                              int64_t count) {
  for (int64_t i = 0; i < count; ++i) std::memcpy(to + i * to_stride, from + i * from_stride, kBytes);
}

inline void move_strided(char* to, int64_t to_stride, const char* from, int64_t from_stride, int64_t count,
                         int64_t bytes) {
  switch (bytes) {
    case 1: return move_items<1>(to, to_stride, from, from_stride, count);
    case 2: return move_items<2>(to, to_stride, from, from_stride, count);
    case 4: return move_items<4>(to, to_stride, from, from_stride, count);
    case 8: return move_items<8>(to, to_stride, from, from_stride, count);
    case 16: return move_items<16>(to, to_stride, from, from_stride, count);
    case 32: return move_items<32>(to, to_stride, from, from_stride, count);
    case 64: return move_items<64>(to, to_stride, from, from_stride, count);
    default:
      for (int64_t i = 0; i < count; ++i) std::memcpy(to + i * to_stride, from + i * from_stride, bytes);
  }
}

/// Gathers a strided row into contiguous memory.
inline void gather_row(const RowLayout& layout, const char* from, char* to) {
  const int64_t bytes = layout.chunk * layout.itemsize;
  if (layout.item_stride == layout.itemsize) {
    return move_strided(to, bytes, from, layout.chunk_stride, layout.chunks, bytes);
  }
  for (int64_t c = 0; c < layout.chunks; ++c) {
    move_strided(to + c * bytes, layout.itemsize, from + c * layout.chunk_stride, layout.item_stride,
                 layout.chunk, layout.itemsize);
  }
}

/// The inverse of `gather_row`.
inline void scatter_row(const RowLayout& layout, char* to, const char* from, bool stream) {
  const int64_t bytes = layout.chunk * layout.itemsize;
  if (layout.item_stride == layout.itemsize) {
    if (stream && is_whole_lines(to, bytes)) {
      for (int64_t c = 0; c < layout.chunks; ++c) {
        copy_contiguous(to + c * layout.chunk_stride, from + c * bytes, bytes, stream);
      }
      return;
    }
    return move_strided(to, layout.chunk_stride, from, bytes, layout.chunks, bytes);
  }
  for (int64_t c = 0; c < layout.chunks; ++c) {
    move_strided(to + c * layout.chunk_stride, layout.item_stride, from + c * bytes, layout.itemsize,
                 layout.chunk, layout.itemsize);
  }
}

}  // namespace kvloom::KVLOOM_ISA::rows
