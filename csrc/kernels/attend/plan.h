// Plan of one call: its work items, and the places of partial results (split-KV). Bits never depend on it:
// partial results belong to fixed splits of the stored tokens and are always merged in order.
#pragma once

#include "cache.h"

namespace kvloom::KVLOOM_ISA {

constexpr Index kTileFloats = 16384;  // of queries or accumulators in one item
constexpr Index kTileRows = 128;
constexpr Index kTileHeads = 8;  // their rows of a page are adjacent in memory, and are prefetched together
constexpr Index kMaxNewTokensToSplit = 16;  // up to here each split of a sequence is an item
constexpr Index kPromptFloats = 65536;      // of queries in an item that runs in tiles
constexpr Index kPartial = 16;              // floats before a partial accumulator: maximum, sum, padding
constexpr Index kMaxPartialFloats = Index{16} << 20;  // of all partial results of a call

// A row is one query head of one new token; row r of a key/value head is head r % group of token r / group.
struct Item {
  Index sequence;
  Index first_head, num_heads;  // key/value heads
  Index first_row, num_rows;    // of each of these heads
  Index split;                  // -1: all of them, merged in order
};

struct Tokens {
  Index begin, end;
};

// Rows of an item that runs in tiles.
constexpr Index prompt_rows(Index width) { return kPromptFloats / (width <= 128 ? 128 : 256); }

// Whether keys are latents, which are the values, too, and have a rest with positions.
inline bool has_rope(const AttendArgs& args) { return args.rope.cache.data; }

inline Index partial_floats(const AttendArgs& args) {
  return kPartial + round_up(head_dim(args.value), kBlock);
}

// Waves of a positional bias, at the end of the workspace.
inline Index wave_floats(const AttendArgs& args) {
  return args.bias.coefficients.data ? args.key.cache.num_heads() * args.bias.num_pairs * kChunk : 0;
}

// Sizes of one sequence and the number of its parts.
struct SequencePlan {
  SequencePlan(const AttendArgs& args, Index b) {
    const Index heads = args.key.cache.num_heads();
    first_row = args.seqstarts[b];
    first_column = args.kvstarts[b];
    num_new = args.seqstarts[b + 1] - first_row;
    num_stored = args.kvstarts[b + 1] - first_column;
    first_visible = args.first_visible ? max(args.first_visible[b], 0) : 0;
    skip_from = args.skip_from ? args.skip_from[b] : 0;
    hides_later = (args.is_causal && b >= args.decoding_batches) || args.alibi_slopes.data;

    const Index group = args.num_heads / heads, rows = num_new * group;
    const Index of_rope = has_rope(args) ? head_dim(args.rope) : 0;
    const Index width = round_up(max(max(head_dim(args.key), head_dim(args.value)), of_rope), kBlock);
    is_prompt = args.in_tiles && num_new > kMaxNewTokensToSplit;
    const Index room = is_prompt ? prompt_rows(width) : max(min(kTileFloats / width, kTileRows), 1);
    tile_rows = max(min(rows, room), 1);
    num_tiles = ceil_div(rows, tile_rows);
    const Tokens seen = visible(args, 0, num_new);
    first_split = seen.begin / kSplit;
    num_splits = seen.begin < seen.end ? ceil_div(seen.end, kSplit) - first_split : 0;
    const Index rows_of_all = max(num_new * args.num_heads * args.num_sequences, 1);
    const Index max_splits = kMaxPartialFloats / partial_floats(args) / rows_of_all;
    is_split = num_splits > 1 && num_new <= kMaxNewTokensToSplit && num_splits <= max_splits;

    // The most heads per item that leave an item for every thread.
    const Index single = args.num_sequences * heads * num_tiles * (is_split ? num_splits : 1);
    const Index spare = single / max(args.num_threads, 1);
    tile_heads =
        rows <= room && !is_prompt ? max(min(min(kTileHeads, spare), min(room / tile_rows, heads)), 1) : 1;
    head_tiles = ceil_div(heads, tile_heads);
    num_items = num_tiles * head_tiles * (is_split ? num_splits : 1);
    num_merges = is_split ? num_new * args.num_heads : 0;
  }

  // Stored tokens that some of the new tokens [first, last) see.
  Tokens visible(const AttendArgs& args, Index first, Index last) const {
    const Index offset = num_stored - num_new;
    const Index begin =
        args.window > 0 ? max(first_visible, offset + first - args.window + 1) : first_visible;
    Index end = hides_later ? min(num_stored, offset + last) : num_stored;
    if (args.skip > 0) end = min(end, max(offset + last - args.skip, skip_from));
    return {min(begin, max(end, 0)), max(end, 0)};
  }

  Item item(const AttendArgs& args, Index i) const {
    const Index heads = args.key.cache.num_heads(), rows = num_new * (args.num_heads / heads);
    Index tile = i % num_tiles, head = i / num_tiles % head_tiles * tile_heads;
    if (is_prompt) head = i % heads, tile = num_tiles - 1 - i / heads;  // those of later tokens take longest
    const Index row = tile * tile_rows;
    const Index split = is_split ? first_split + i / (num_tiles * head_tiles) : -1;
    return {0, head, min(tile_heads, heads - head), row, min(tile_rows, rows - row), split};
  }

  Index first_row, first_column, num_new, num_stored, first_visible, skip_from;
  bool hides_later, is_split, is_prompt;
  Index tile_rows, num_tiles, tile_heads, head_tiles;
  Index first_split, num_splits;
  Index num_items, num_merges;
};

// Totals of the sequences before each sequence, at the start of the workspace.
struct WorkOffsets {
  Index items, merges, partials;
};

inline AttendPlan attend_plan(const AttendArgs& args, WorkOffsets* offsets = nullptr) {
  WorkOffsets sum{0, 0, 0};
  for (Index b = 0; b < args.num_sequences; ++b) {
    if (offsets) offsets[b] = sum;
    const SequencePlan plan(args, b);
    sum.items += plan.num_items;
    sum.merges += plan.num_merges;
    if (plan.is_split) sum.partials += plan.num_splits * plan.num_merges;
  }
  if (offsets) offsets[args.num_sequences] = sum;
  const Index head = round_up((args.num_sequences + 1) * static_cast<Index>(sizeof(WorkOffsets)), 64);
  const Index floats = sum.partials * partial_floats(args) + wave_floats(args);
  return {sum.items, sum.merges, static_cast<size_t>(head + 4 * floats)};
}

// The workspace of one call, 64-byte aligned.
class Workspace {
 public:
  Workspace(const AttendArgs& args, void* data)
      : args_(args),
        offsets_(static_cast<WorkOffsets*>(data)),
        partials_(reinterpret_cast<float*>(
            static_cast<Byte*>(data) +
            round_up((args.num_sequences + 1) * static_cast<Index>(sizeof(WorkOffsets)), 64))) {}

  // The sequence of an item or merge.
  Index sequence_of(Index WorkOffsets::* counter, Index i) const {
    Index low = 0, high = args_.num_sequences;
    while (high - low > 1) {
      const Index middle = (low + high) / 2;
      (offsets_[middle].*counter <= i ? low : high) = middle;
    }
    return low;
  }

  // Maximum, sum and accumulator of a split for one row; splits count from the sequence's first.
  float* partial(const SequencePlan& plan, Index b, Index split, Index new_token, Index head) const {
    const Index at = offsets_[b].partials + (split * plan.num_new + new_token) * args_.num_heads + head;
    return partials_ + at * partial_floats(args_);
  }

  // Stored after all partial results.
  float* wave_tables() const {
    return partials_ + offsets_[args_.num_sequences].partials * partial_floats(args_);
  }

  const WorkOffsets& offsets(Index b) const { return offsets_[b]; }

 private:
  const AttendArgs& args_;
  WorkOffsets* offsets_;
  float* partials_;
};

}  // namespace kvloom::KVLOOM_ISA
