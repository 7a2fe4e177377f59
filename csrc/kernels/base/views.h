// Views of a cache, and addresses of their slots.
#pragma once

#include <cstring>

#include "types.h"

namespace kvloom {

// One layer's keys, values or scales as [B, S/s, s, H, D/d, d], sizes and strides in elements. New tokens
// [T, H, D] are such a view too: T blocks of one slot.
struct View {
  Byte* data = nullptr;
  Index size[6] = {};
  Index stride[6] = {};
  Index itemsize = 0;  // bytes of an element
  DType dtype = DType::bits;

  KVLOOM_INLINE Index num_slots() const { return size[0] * size[1] * size[2]; }
  KVLOOM_INLINE Index num_heads() const { return size[3]; }
  KVLOOM_INLINE Index width() const { return size[4] * size[5]; }  // elements of a head
  KVLOOM_INLINE Index head_dim() const { return width() * numbers_in(dtype); }
  KVLOOM_INLINE Index head_bytes() const { return stride[3] * itemsize; }  // from one head to the next
};

// Bytes of all heads of a token.
KVLOOM_INLINE Index token_bytes(const View& view) { return view.num_heads() * view.width() * view.itemsize; }

// The offset of each slot of a view in bytes: three slot axes, merged where two of them have one stride.
class SlotOffsets {
 public:
  SlotOffsets() = default;
  KVLOOM_INLINE explicit SlotOffsets(const View& view) {
    Index size[3] = {};
    int levels = 0;
    for (int axis = 2; axis >= 0; --axis) {
      if (view.size[axis] == 1 && (axis > 0 || levels > 0)) continue;
      const Index bytes = view.stride[axis] * view.itemsize;
      if (levels > 0 && bytes == size[levels - 1] * stride_[levels - 1]) {
        size[levels - 1] *= view.size[axis];
      } else {
        size[levels] = view.size[axis];
        stride_[levels++] = bytes;
      }
    }
    if (levels > 1) inner_ = Divisor(size[0]);
    if (levels > 2) middle_ = Divisor(size[1]);
  }

  KVLOOM_INLINE Index at(Index slot) const {
    const Index outer = inner_.quotient(slot), block = middle_.quotient(outer);
    return (slot - outer * inner_.size()) * stride_[0] + (outer - block * middle_.size()) * stride_[1] +
           block * stride_[2];
  }

  // Bytes from one slot to the next within a contiguous span.
  KVLOOM_INLINE Index stride() const { return stride_[0]; }

  // Slots from this one to the end of its contiguous span.
  KVLOOM_INLINE Index span(Index slot) const {
    return inner_.size() - (slot - inner_.quotient(slot) * inner_.size());
  }

  // Whether `count` slots, from each multiple of it on, are at a stride of `bytes`.
  KVLOOM_INLINE bool has_stride(Index count, Index bytes) const {
    return stride_[0] == bytes && inner_.size() % count == 0;
  }

  // Rows of `count` slots from `slot` on, where slot 0 is at `base`.
  KVLOOM_INLINE void fill(const Byte* base, Index slot, Index count, const Byte** rows) const {
    while (count > 0) {
      const Index run = min(count, span(slot));
      fill_run(base + at(slot), stride_[0], run, rows);
      rows += run;
      slot += run;
      count -= run;
    }
  }

 private:
  KVLOOM_INLINE static void fill_run(const Byte* at, Index step, Index count, const Byte** rows) {
    typedef Index Eight __attribute__((vector_size(64)));
    const Eight lanes = {0, step, 2 * step, 3 * step, 4 * step, 5 * step, 6 * step, 7 * step};
    for (; count >= 8; count -= 8, rows += 8, at += 8 * step) {
      const Eight addresses = lanes + reinterpret_cast<Index>(at);
      std::memcpy(rows, &addresses, sizeof(addresses));
    }
    for (; count > 0; --count, at += step) *rows++ = at;
  }

  Index stride_[3] = {};    // from the innermost level on
  Divisor inner_, middle_;  // the sizes of the inner two
};

}  // namespace kvloom
