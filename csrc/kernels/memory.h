// Where a row lies in memory, and moving it in, out and past the caches.
#pragma once

#include <cstdint>
#include <cstring>

#include "simd.h"

namespace kvloom::KVLOOM_ISA::rows {

/// The rows of a view, in bytes. A row is one head's items, or all heads' where they lie in one run.
struct Lines {
  char* data = nullptr;
  int64_t block_slots = 1, inner_slots = 1;  // slots in a block, and in its inner part
  int64_t block = 0, outer = 0, inner = 0;   // strides of the three parts of a slot
  int64_t head = 0;                          // stride of a head
  int64_t itemsize = 0;
  int64_t chunks = 1, chunk = 0;  // a row is so many chunks of so many items
  int64_t chunk_stride = 0, item_stride = 0;
  bool is_run = false;  // whether the items of a row follow one another

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

KVLOOM_INLINE Lines lines_of(const View& view) {
  Lines lines;
  lines.data = view.data;
  lines.itemsize = view.itemsize;
  lines.block_slots = view.size[1] * view.size[2];
  lines.inner_slots = view.size[2];
  lines.block = view.stride[0] * view.itemsize;
  lines.outer = view.stride[1] * view.itemsize;
  lines.inner = view.stride[2] * view.itemsize;
  lines.head = view.stride[3] * view.itemsize;
  lines.chunks = view.size[4];
  lines.chunk = view.size[5];
  lines.chunk_stride = view.stride[4] * view.itemsize;
  lines.item_stride = view.stride[5] * view.itemsize;
  if (lines.chunk == 1) {  // chunks of one are items
    lines.chunk = lines.chunks;
    lines.item_stride = lines.chunk_stride;
    lines.chunks = 1;
  }
  const bool chunk_is_run = lines.chunk == 1 || lines.item_stride == lines.itemsize;
  lines.is_run = chunk_is_run && (lines.chunks == 1 || lines.chunk_stride == lines.chunk * lines.itemsize);
  if (lines.is_run) {
    lines.chunk *= lines.chunks;
    lines.chunks = 1;
  }
  return lines;
}

/// Whether all heads of a token lie in one run.
KVLOOM_INLINE bool heads_are_run(const Lines& lines, int64_t num_heads) {
  return lines.is_run && (num_heads == 1 || lines.head == lines.row_bytes());
}

/// Whether all heads of a token can be one row, of chunks or items at one stride.
KVLOOM_INLINE bool heads_join(const Lines& lines, int64_t num_heads) {
  const int64_t parts = lines.chunks == 1 ? lines.chunk : lines.chunks;
  const int64_t stride = lines.chunks == 1 ? lines.item_stride : lines.chunk_stride;
  return lines.is_run || num_heads == 1 || lines.head == parts * stride;
}

KVLOOM_INLINE void join_heads(Lines& lines, int64_t num_heads) {
  if (lines.is_run && !heads_are_run(lines, num_heads)) {  // each head is a chunk
    lines.chunks = num_heads;
    lines.chunk_stride = lines.head;
    lines.item_stride = lines.itemsize;
    lines.is_run = false;
  } else {
    (lines.chunks == 1 ? lines.chunk : lines.chunks) *= num_heads;
  }
}

// --- runs -------------------------------------------------------------------------------------------------

/// Whether a run is whole cache lines.
KVLOOM_INLINE bool is_lines(const char* to, int64_t bytes) {
  return (reinterpret_cast<uintptr_t>(to) | static_cast<uintptr_t>(bytes)) % 64 == 0;
}

inline void move_run(char* to, const char* from, int64_t bytes, bool stream) {
  if (!stream || !is_lines(to, bytes)) {
    std::memcpy(to, from, bytes);
    return;
  }
  for (int64_t i = 0; i < bytes; i += 64) stream_line(to + i, from + i);
}

// --- rows with gaps ---------------------------------------------------------------------------------------

/// Moves `count` items of a size known here, each at a stride of its own.
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

/// Collects a row with gaps into a run.
inline void gather_row(const Lines& lines, const char* from, char* to) {
  const int64_t bytes = lines.chunk * lines.itemsize;
  if (lines.item_stride == lines.itemsize) {
    return move_strided(to, bytes, from, lines.chunk_stride, lines.chunks, bytes);
  }
  for (int64_t c = 0; c < lines.chunks; ++c) {
    move_strided(to + c * bytes, lines.itemsize, from + c * lines.chunk_stride, lines.item_stride,
                 lines.chunk, lines.itemsize);
  }
}

/// The inverse of `gather_row`.
inline void scatter_row(const Lines& lines, char* to, const char* from, bool stream) {
  const int64_t bytes = lines.chunk * lines.itemsize;
  if (lines.item_stride == lines.itemsize) {
    if (stream && is_lines(to, bytes)) {
      for (int64_t c = 0; c < lines.chunks; ++c) {
        move_run(to + c * lines.chunk_stride, from + c * bytes, bytes, stream);
      }
      return;
    }
    return move_strided(to, lines.chunk_stride, from, bytes, lines.chunks, bytes);
  }
  for (int64_t c = 0; c < lines.chunks; ++c) {
    move_strided(to + c * lines.chunk_stride, lines.item_stride, from + c * bytes, lines.itemsize,
                 lines.chunk, lines.itemsize);
  }
}

}  // namespace kvloom::KVLOOM_ISA::rows
