// The rows of one head in one chunk, and the prefetching of those that kernels read next.
#pragma once

#include "cache.h"

namespace kvloom::KVLOOM_ISA {

// Inlined early: GCC takes a function that only prefetches for one without effect, and drops its calls.
KVLOOM_INLINE void prefetch(const Byte* at) { __builtin_prefetch(at); }
// Prefetch of lines that are read only after more data than the first-level cache holds.
KVLOOM_INLINE void prefetch_to_l2(const Byte* at) { __builtin_prefetch(at, 0, 2); }

// Rows in the order in which kernels read them, and the rows at the farthest prefetch distance. A processor
// that already waits for about fifty lines drops further prefetches, so each line is prefetched at three
// distances. Codes take longer to process, and need two. Where the second-level cache can wait for more lines
// than the first, once into that one is faster: `to_l2`.
struct RowPrefetcher {
  const Byte* const* rows = nullptr;  // null: prefetch nothing
  const Byte* const* far_rows = nullptr;
  bool to_l2 = false;

  // The farthest prefetch distance in tokens, for elements of `bytes` bytes.
  static constexpr Index distance(Index bytes) { return bytes == 1 ? 2 * kChunk : 192 / bytes; }

  // Prefetches what follows `lines` lines at `offset` of token t, whose elements have kBytes bytes. A kernel
  // calls this for each line that it reads.
  template <Index kBytes>
  KVLOOM_INLINE void prefetch_lines(Index t, Index offset, Index lines) const {
    if (!rows) return;
    const Byte *near = rows[t + distance(kBytes) / 6], *middle = rows[t + distance(kBytes) / 2],
               *far = far_rows[t];
    KVLOOM_UNROLL(8)
    for (Index end = offset + 64 * lines; offset < end; offset += 64) {
      if (to_l2) {
        prefetch_to_l2(far + offset);
        continue;
      }
      prefetch(far + offset);
      prefetch(middle + offset);
      prefetch(near + offset);
    }
  }

  // The prefetcher for the tile's rows from one on: only the first prefetch, since all read the same lines.
  RowPrefetcher for_first_rows(Index first_row) const { return first_row == 0 ? *this : RowPrefetcher(); }

  // A tile of many rows takes long over each line. Its rows [first, last) prefetch their share of the next
  // rows in the list, `bytes` of each.
  KVLOOM_INLINE void prefetch_share(Index first, Index last, Index num_rows, Index bytes) const {
    if (!rows) return;
    for (Index t = first * kChunk / num_rows; t < last * kChunk / num_rows; ++t)
      for (Index offset = 0; offset < bytes; offset += 64) prefetch_to_l2(rows[kChunk + t] + offset);
  }

  // Prefetches a row of `bytes` bytes that is copied before a kernel reads it.
  KVLOOM_INLINE void prefetch_row(Index t, Index bytes) const {
    if (!rows) return;
    for (Index offset = 0; offset < bytes; offset += 64) {
      if (to_l2) {
        prefetch_to_l2(far_rows[t] + offset);
        continue;
      }
      prefetch(far_rows[t] + offset);
      prefetch(rows[t + kChunk] + offset);
    }
  }
};

// Rows of one head in one chunk. Those of [begin, end) are read, the others point to one of these.
struct ChunkRows {
  const SideLayout* side;
  Index begin, end;
  const Byte* const* row;         // [kChunk]
  const Byte* const* scale;       // [kChunk]
  const Byte* const* next_scale;  // [kChunk], of the item's first head
  Index head = 0, num_heads = 1;  // of the item's heads
  RowPrefetcher prefetcher;
  DType query_dtype;
  bool in_blocks;                     // as that of ChunkAddresses
  bool uses_code_kernels, is_native;  // whether kernels read blocks of 16 tokens; whether they do so in place

  // The block that holds tokens from 16 * i on, of which [begin, end) has one.
  const Byte* block(Index i) const {
    const Index t = max(i * kBlock, begin);
    return side->block_of(row[t], t - i * kBlock);
  }

  // Whether the scales of kBlock tokens from `first` on are contiguous.
  bool scales_are_contiguous(Index first) const {
    return side->block_scales_are_contiguous && in_blocks && first >= begin && first + kBlock <= end;
  }

  // Prefetches the scales of the next chunk.
  KVLOOM_INLINE void prefetch_scales() const {
    for (Index first = 0; first < kChunk; first += kBlock) prefetch_scales_of(first);
  }

  // The same for the block of tokens from `first` on; scales of short groups are many lines. Either the heads
  // of a token are contiguous, and each head prefetches some tokens; or the tokens of a block are; or
  // neither.
  KVLOOM_INLINE void prefetch_scales_of(Index first) const {
    const Index bytes = side->num_groups * side->scale.itemsize, shift = head * side->scale_head_bytes();
    if (side->head_scales_are_contiguous) {
      for (Index t = max(first, head * kChunk / num_heads);
           t < min(first + kBlock, (head + 1) * kChunk / num_heads); ++t)
        for (Index i = 0; i < num_heads * bytes; i += 64) prefetch_scale(next_scale[t] + i);
      return;
    }
    const Byte* const* rows = next_scale + first;
    if (rows[kBlock - 1] - rows[0] == (kBlock - 1) * bytes)
      for (Index i = 0; i < kBlock * bytes; i += 64) prefetch_scale(rows[0] + shift + i);
    else
      for (Index t = 0; t < kBlock; ++t) prefetch_scale(rows[t] + shift);
  }
  KVLOOM_INLINE void prefetch_scale(const Byte* at) const {
    prefetcher.to_l2 ? prefetch_to_l2(at) : prefetch(at);
  }
};

// Prefetches what follows a block of codes, which is contiguous or in rows. Rows are packed first, which
// takes so long that one distance is enough.
class BlockPrefetcher {
 public:
  BlockPrefetcher(const RowPrefetcher& prefetcher, const ChunkRows& chunk, Index first) {
    if (!prefetcher.rows) return;
    const Byte *const *far = prefetcher.far_rows + first, *const *near = prefetcher.rows + first + kChunk;
    const auto is_contiguous = [&](const Byte* const* rows) {
      return chunk.is_native || rows[kBlock - 1] - rows[0] == (kBlock - 1) * chunk.side->row_bytes;
    };
    if (!is_contiguous(far)) {
      far_rows_ = far, rows_in_line_ = chunk.side->rows_in_line;
    } else if (prefetcher.to_l2) {
      to_l2_ = *far;
    } else {
      far_ = *far, near_ = is_contiguous(near) ? *near : nullptr;
    }
  }

  // A kernel calls this for each line of the block.
  KVLOOM_INLINE void prefetch_line(Index line) const {
    if (to_l2_) {
      prefetch_to_l2(to_l2_ + 64 * line);
    } else if (far_) {
      prefetch(far_ + 64 * line);
      if (near_) prefetch(near_ + 64 * line);
    } else if (far_rows_) {
      const Index row = line * rows_in_line_;
      prefetch(far_rows_[row % kBlock] + row / kBlock * 64);
    }
  }

 private:
  const Byte *to_l2_ = nullptr, *far_ = nullptr, *near_ = nullptr, *const *far_rows_ = nullptr;
  Index rows_in_line_ = 1;
};

}  // namespace kvloom::KVLOOM_ISA
