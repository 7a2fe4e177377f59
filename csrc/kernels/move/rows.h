// The layout of rows in memory, and copying them: contiguous, strided, and with non-temporal stores.
#pragma once

#include "../base/vectors.h"
#include "../base/views.h"

namespace kvloom::KVLOOM_ISA::rows {

// The rows of a view, in bytes. A row is one head's elements, or all heads' where they are contiguous.
struct RowLayout {
  Byte* data = nullptr;
  SlotOffsets slots;
  Index head = 0;  // stride of a head
  Index itemsize = 0;
  Index chunks = 1, chunk = 0;  // chunks of a row, and elements of a chunk
  Index chunk_stride = 0, item_stride = 0;
  bool is_contiguous = false;  // the elements of a row

  KVLOOM_INLINE Index row_bytes() const { return chunks * chunk * itemsize; }
  KVLOOM_INLINE Byte* at(Index slot) const { return data + slots.at(slot); }  // the first head
};

KVLOOM_INLINE RowLayout row_layout_of(const View& view) {
  RowLayout layout;
  layout.data = view.data;
  layout.itemsize = view.itemsize;
  layout.slots = SlotOffsets(view);
  layout.head = view.head_bytes();
  layout.chunks = view.size[4];
  layout.chunk = view.size[5];
  layout.chunk_stride = view.stride[4] * view.itemsize;
  layout.item_stride = view.stride[5] * view.itemsize;
  if (layout.chunk == 1) {  // chunks of one are elements
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

// Whether the rows of a head in neighboring slots are contiguous.
KVLOOM_INLINE bool is_one_run(const RowLayout& layout) {
  return layout.is_contiguous && layout.slots.stride() == layout.row_bytes();
}

// Whether all heads of a token are contiguous.
KVLOOM_INLINE bool heads_are_contiguous(const RowLayout& layout, Index num_heads) {
  return layout.is_contiguous && (num_heads == 1 || layout.head == layout.row_bytes());
}

// Whether all heads of a token can be one row, of chunks or elements at one stride.
KVLOOM_INLINE bool heads_can_join(const RowLayout& layout, Index num_heads) {
  const Index parts = layout.chunks == 1 ? layout.chunk : layout.chunks;
  const Index stride = layout.chunks == 1 ? layout.item_stride : layout.chunk_stride;
  return layout.is_contiguous || num_heads == 1 || layout.head == parts * stride;
}

KVLOOM_INLINE void join_heads(RowLayout& layout, Index num_heads) {
  if (layout.is_contiguous && !heads_are_contiguous(layout, num_heads)) {  // each head is a chunk
    layout.chunks = num_heads;
    layout.chunk_stride = layout.head;
    layout.item_stride = layout.itemsize;
    layout.is_contiguous = false;
  } else {
    (layout.chunks == 1 ? layout.chunk : layout.chunks) *= num_heads;
  }
}

// --- non-temporal stores -----------------------------------------------------------------------------------

// Copies a cache line to an aligned address, with non-temporal stores where the CPU has them.
KVLOOM_INLINE void stream_line(Byte* to, const Byte* from) {
#if defined(__AVX512F__)
  _mm512_stream_si512(reinterpret_cast<__m512i*>(to), _mm512_loadu_si512(from));
#elif defined(__AVX2__)
  for (int i = 0; i < 64; i += 32) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to + i),
                        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i)));
  }
#elif defined(__SSE2__)
  for (int i = 0; i < 64; i += 16) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(to + i),
                     _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i)));
  }
#else
  std::memcpy(to, from, 64);
#endif
}

// Makes streamed lines visible to other threads.
KVLOOM_INLINE void stream_fence() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

// --- contiguous rows ---------------------------------------------------------------------------------------

// Whether this is whole cache lines.
KVLOOM_INLINE bool is_whole_lines(const Byte* to, Index bytes) {
  return (reinterpret_cast<uintptr_t>(to) | static_cast<uintptr_t>(bytes)) % 64 == 0;
}

inline void copy_contiguous(Byte* to, const Byte* from, Index bytes, bool stream) {
  if (!stream || !is_whole_lines(to, bytes)) {
    std::memcpy(to, from, bytes);
    return;
  }
  for (Index i = 0; i < bytes; i += 64) stream_line(to + i, from + i);
}

// --- strided rows ------------------------------------------------------------------------------------------

// Copies `count` elements of a constant size, each side at its own stride.
template <int kBytes>
KVLOOM_INLINE void move_items(Byte* to, Index to_stride, const Byte* from, Index from_stride, Index count) {
  for (Index i = 0; i < count; ++i) std::memcpy(to + i * to_stride, from + i * from_stride, kBytes);
}

inline void move_strided(Byte* to, Index to_stride, const Byte* from, Index from_stride, Index count,
                         Index bytes) {
  switch (bytes) {
    case 1: return move_items<1>(to, to_stride, from, from_stride, count);
    case 2: return move_items<2>(to, to_stride, from, from_stride, count);
    case 4: return move_items<4>(to, to_stride, from, from_stride, count);
    case 8: return move_items<8>(to, to_stride, from, from_stride, count);
    case 16: return move_items<16>(to, to_stride, from, from_stride, count);
    case 32: return move_items<32>(to, to_stride, from, from_stride, count);
    case 64: return move_items<64>(to, to_stride, from, from_stride, count);
    default:
      for (Index i = 0; i < count; ++i) std::memcpy(to + i * to_stride, from + i * from_stride, bytes);
  }
}

// Gathers a strided row into contiguous memory.
inline void gather_row(const RowLayout& layout, const Byte* from, Byte* to) {
  const Index bytes = layout.chunk * layout.itemsize;
  if (layout.item_stride == layout.itemsize) {
    return move_strided(to, bytes, from, layout.chunk_stride, layout.chunks, bytes);
  }
  for (Index c = 0; c < layout.chunks; ++c) {
    move_strided(to + c * bytes, layout.itemsize, from + c * layout.chunk_stride, layout.item_stride,
                 layout.chunk, layout.itemsize);
  }
}

// The inverse of `gather_row`.
inline void scatter_row(const RowLayout& layout, Byte* to, const Byte* from, bool stream) {
  const Index bytes = layout.chunk * layout.itemsize;
  if (layout.item_stride == layout.itemsize) {
    if (stream && is_whole_lines(to, bytes)) {
      for (Index c = 0; c < layout.chunks; ++c) {
        copy_contiguous(to + c * layout.chunk_stride, from + c * bytes, bytes, stream);
      }
      return;
    }
    return move_strided(to, layout.chunk_stride, from, bytes, layout.chunks, bytes);
  }
  for (Index c = 0; c < layout.chunks; ++c) {
    move_strided(to + c * layout.chunk_stride, layout.item_stride, from + c * bytes, layout.itemsize,
                 layout.chunk, layout.itemsize);
  }
}

}  // namespace kvloom::KVLOOM_ISA::rows
