// Rows of one head in one chunk, as kernels read them, and what they ask memory for meanwhile.
#pragma once

#include "attend_cache.h"

namespace kvloom::KVLOOM_ISA {

// Inlined early: GCC takes a function that only prefetches for one without effect, and drops its calls.
__attribute__((always_inline)) inline void prefetch(const Byte* at) { __builtin_prefetch(at); }
// Into the second-level cache, for what is read after something larger than the first.
__attribute__((always_inline)) inline void prefetch_soon(const Byte* at) { __builtin_prefetch(at, 0, 2); }

// Rows in the order in which kernels read them, and those that are to be asked for first. A processor drops what it
// is asked for while it waits for some fifty lines, so that one chance is not enough; codes take their time, and
// need two.
struct Reading {
  const Byte* const* rows = nullptr;  // none: nothing is asked for
  const Byte* const* later = nullptr;

  // Tokens between what is read and what is asked for first, of elements of so many bytes.
  static constexpr Index lead(Index bytes) { return bytes == 1 ? 2 * kChunk : 192 / bytes; }

  // Asks for what follows `lines` lines at `offset` of token t, whose elements have kBytes. A kernel calls this for
  // each line that it reads.
  template <Index kBytes>
  __attribute__((always_inline)) void ask(Index t, Index offset, Index lines) const {
    if (!rows) return;
    const Byte *near = rows[t + lead(kBytes) / 6], *soon = rows[t + lead(kBytes) / 2], *far = later[t];
#pragma GCC unroll 8
    for (Index end = offset + 64 * lines; offset < end; offset += 64) {
      prefetch(far + offset);
      prefetch(soon + offset);
      prefetch(near + offset);
    }
  }

  // What the rows of a tile from one on ask for: only the first ones do, since all read the same lines.
  Reading of_rows(Index first_row) const { return first_row == 0 ? *this : Reading(); }

  // Rows [first, last) of a tile of many, which take their time over these lines, ask for their share of the rows that
  // are listed next, `bytes` of each.
  __attribute__((always_inline)) void ask_share(Index first, Index last, Index num_rows, Index bytes) const {
    if (!rows) return;
    for (Index t = first * kChunk / num_rows; t < last * kChunk / num_rows; ++t)
      for (Index offset = 0; offset < bytes; offset += 64) prefetch_soon(rows[kChunk + t] + offset);
  }

  // For rows of so many bytes that are copied before a kernel reads them.
  __attribute__((always_inline)) void ask_row(Index t, Index bytes) const {
    if (!rows) return;
    for (Index offset = 0; offset < bytes; offset += 64) {
      prefetch(later[t] + offset);
      prefetch(rows[t + kChunk] + offset);
    }
  }
};

// Rows of one head in one chunk. Those of [begin, end) are read, the others point to one of these.
struct ChunkRows {
  const SidePlace* side;
  Index begin, end;
  const Byte* const* row;         // [kChunk]
  const Byte* const* scale;       // [kChunk]
  const Byte* const* next_scale;  // [kChunk], of the item's first head
  Index head, num_heads;          // of the item's heads
  Reading reading;
  DType query_dtype;
  bool in_blocks;               // as that of ChunkPlaces
  bool takes_codes, is_native;  // read in blocks of 16 tokens; where they are

  // The block that holds tokens from 16 * i on, of which [begin, end) has one.
  const Byte* block(Index i) const {
    const Index t = max(i * kBlock, begin);
    return side->block_of(row[t], t - i * kBlock);
  }

  // Whether the scales of kBlock tokens from one on lie in one piece.
  bool scales_touch(Index first) const {
    return side->scales_touch && in_blocks && first >= begin && first + kBlock <= end;
  }

  // Asks for the scales of the next chunk. Those of a block lie in one piece; or those of a token, and each head
  // asks for some tokens; or here and there.
  __attribute__((always_inline)) void prefetch_scales() const {
    const Index bytes = side->num_groups * bytes_of(side->scale.dtype), shift = head * side->scale_head_bytes();
    if (side->scale_heads_touch) {
      for (Index t = head * kChunk / num_heads; t < (head + 1) * kChunk / num_heads; ++t)
        for (Index i = 0; i < num_heads * bytes; i += 64) prefetch(next_scale[t] + i);
      return;
    }
    for (Index first = 0; first < kChunk; first += kBlock) {
      const Byte* const* rows = next_scale + first;
      if (rows[kBlock - 1] - rows[0] == (kBlock - 1) * bytes)
        for (Index i = 0; i < kBlock * bytes; i += 64) prefetch(rows[0] + shift + i);
      else
        for (Index t = 0; t < kBlock; ++t) prefetch(rows[t] + shift);
    }
  }
};

// What follows a block of codes, which lies in one piece or in rows. Rows are put in order before they are read,
// which takes so long that one chance is enough.
class BlockReading {
 public:
  BlockReading(const Reading& reading, const ChunkRows& chunk, Index first) {
    if (!reading.rows) return;
    const Byte *const *later = reading.later + first, *const *soon = reading.rows + first + kChunk;
    const auto in_one_piece = [&](const Byte* const* rows) {
      return chunk.is_native || rows[kBlock - 1] - rows[0] == (kBlock - 1) * chunk.side->row_bytes;
    };
    if (in_one_piece(later)) {
      later_ = *later, soon_ = in_one_piece(soon) ? *soon : nullptr;
    } else {
      later_rows_ = later, rows_in_line_ = chunk.side->rows_in_line;
    }
  }

  // A kernel calls this for each line of the block.
  __attribute__((always_inline)) void ask(Index line) const {
    if (later_) {
      prefetch(later_ + 64 * line);
      if (soon_) prefetch(soon_ + 64 * line);
    } else if (later_rows_) {
      const Index row = line * rows_in_line_;
      prefetch(later_rows_[row % kBlock] + row / kBlock * 64);
    }
  }

 private:
  const Byte *later_ = nullptr, *soon_ = nullptr, *const *later_rows_ = nullptr;
  Index rows_in_line_ = 1;
};

}  // namespace kvloom::KVLOOM_ISA
