// Stored tokens of one head as rows of bfloat16 numbers: in place, or copied and dequantized.
#pragma once

#include "kernels.h"
#include "tiles.h"
#include "two_bits.h"

namespace kvloom::KVLOOM_ISA {

constexpr Index kMaxTileDim = 256;
constexpr Index kPromptChunk = 256;  // tokens that are packed at a time

// Whether a side can be read as bfloat16 without rounding it any further than a load does.
inline bool is_read_in_tiles(const SideLayout& side, DType query_dtype) {
  if (query_dtype != DType::bf16 || side.dim % 32 != 0 || side.dim > kMaxTileDim) return false;
  return side.scale.data ? uses_code_kernels(side) && !is_coarser(side.scale.dtype, query_dtype)
                         : side.cache.dtype == DType::bf16;
}

// Prefetches the rows of some tokens of one head, a share at a time.
class TileRowPrefetcher {
 public:
  explicit TileRowPrefetcher(const SideLayout& side) : side_(side) {}

  // At most kPromptChunk.
  void find(const TokenSlots& slots, Index head, Tokens tokens) {
    count_ = 0;
    for (Index token = tokens.begin; token < tokens.end;) {
      const Index end = min(round_up(token + 1, kChunk), tokens.end);
      addresses_.find(slots, side_, head, token, end - token);
      const bool is_native = addresses_.in_blocks && side_.order != NativeOrder::none;
      for (Index t = addresses_.begin; t < addresses_.end; ++t) {
        const Index in_block = t % kBlock;
        rows_[count_++] = is_native
                              ? side_.block_of(addresses_.row[t], in_block) + in_block * side_.stored_bytes
                              : addresses_.row[t];
      }
      token = end;
    }
  }

  void prefetch_share(Index share, Index shares) const {
    for (Index t = share * count_ / shares; t < (share + 1) * count_ / shares; ++t)
      for (Index i = 0; i < side_.stored_bytes; i += 64) prefetch_to_l2(rows_[t] + i);
  }

 private:
  const SideLayout& side_;
  ChunkAddresses addresses_;
  const Byte* rows_[kPromptChunk];
  Index count_ = 0;
};

// Consecutive chunks of one head, in blocks of 16 rows.
class TileRows {
 public:
  explicit TileRows(const SideLayout& side) : side_(side) {
    rows_.side = &side;
    rows_.query_dtype = DType::bf16;
  }

  // The tokens [token, token + count) of a chunk.
  void find(const TokenSlots& slots, Index head, Index token, Index count) {
    addresses_.find(slots, side_, head, token, count);
    rows_.begin = addresses_.begin, rows_.end = addresses_.end;
    rows_.in_blocks = addresses_.in_blocks;
    rows_.is_native = addresses_.in_blocks && side_.order != NativeOrder::none;
    rows_.row = addresses_.row;
    rows_.scale = addresses_.scale;
    if (side_.is_expanded)
      rows_.row =
          expand_rows(side_, addresses_.row, rows_.begin, rows_.end, rows_.is_native, copies_, copied_);
    else if (!side_.is_contiguous && !rows_.is_native)
      rows_.row = copy_rows(addresses_.row, rows_.begin, rows_.end, side_.cache, copies_, copied_);
    if (side_.scale.data && !side_.scale_is_contiguous)
      rows_.scale =
          copy_rows(addresses_.scale, rows_.begin, rows_.end, side_.scale, scale_copies_, copied_scales_);
  }

  // Whether the block of tokens from `first` on has one.
  bool has_block(Index first) const { return first < rows_.end && first + kBlock > rows_.begin; }
  bool has_token(Index t) const { return t >= rows_.begin && t < rows_.end; }

  // The 16 rows of a block that has a token; valid until the next call but one. Rows without a token are
  // arbitrary.
  const Byte* const* block(Index first) {
    if (!side_.scale.data) return rows_.row + first;
    const Index which = first / kBlock % 2;
    auto* to = numbers_[which];
    for (Index t = 0; t < kBlock; ++t) dequantized_[which][t] = to[t];
    for_scales(rows_, side_.dim, [&]<class T, int W>() {
      if (side_.dtype == DType::int4)
        dequantize_block<true, T, W>(rows_, first, to);
      else
        dequantize_block<false, T, W>(rows_, first, to);
    });
    return dequantized_[which];
  }

 private:
  const SideLayout& side_;
  ChunkAddresses addresses_;
  ChunkRows rows_{};
  const Byte *copied_[kChunk], *copied_scales_[kChunk], *dequantized_[2][kBlock];
  alignas(64) Byte numbers_[2][kBlock][2 * kMaxHeadDim];
  alignas(64) Byte copies_[kChunk * kMaxTileDim * 2];
  alignas(64) Byte scale_copies_[kChunk * kMaxGroups * 4];
};

}  // namespace kvloom::KVLOOM_ISA
