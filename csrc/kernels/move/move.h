// Store, load and copy: one loop over rows. They differ in which side has slots, and how rows are converted.
#pragma once

#include "args.h"
#include "convert.h"
#include "rows.h"
#include "smooth.h"

namespace kvloom::KVLOOM_ISA::rows {

// The addresses at which one row is read and written.
struct RowPointers {
  const Byte* from;
  const Byte* from_scale;
  Byte* to;
  Byte* to_scale;
};

// The prefetch distance in rows.
constexpr int kPrefetchRows = 2;

// One `Move`, prepared once for a range of tokens.
struct Plan {
  RowLayout from, from_scale, to, to_scale;
  Convert convert = nullptr;
  Index rows = 0;              // of a token: its heads, or 1 where they are contiguous on both sides
  Index count = 0, group = 1;  // numbers or codes in a row, and those that share a scale
  Index repeat = 1, repeat_stride = 0;
  bool has_from_scale = false, has_to_scale = false;
  Index prefetch_bytes = 0;    // prefetch distance in bytes; 0 where the next slot's row is not read next
  bool is_head_major = false;  // whether slots are closer than heads where the rows are read
  bool joins_slots = false;    // whether rows of adjacent slots are contiguous on both sides
  Index tile = kTile;          // tokens that are moved head by head

  KVLOOM_INLINE RowPointers pointers(Index from_slot, Index to_slot) const {
    return {from.at(from_slot), from_scale.at(from_slot), to.at(to_slot), to_scale.at(to_slot)};
  }

  // Tokens from one on whose rows may be adjacent, if their slots are.
  KVLOOM_INLINE Index span(Index from_slot, Index to_slot) const {
    Index count = min(from.slots.span(from_slot), to.slots.span(to_slot));
    if (has_from_scale) count = min(count, from_scale.slots.span(from_slot));
    if (has_to_scale) count = min(count, to_scale.slots.span(to_slot));
    return count;
  }

  KVLOOM_INLINE RowPointers next_head(const RowPointers& at) const {
    return {at.from + from.head, at.from_scale + from_scale.head, at.to + to.head,
            at.to_scale + to_scale.head};
  }
};

inline Plan plan_of(const Move& move) {
  Plan plan;
  plan.from = row_layout_of(move.from);
  plan.to = row_layout_of(move.to);
  plan.has_from_scale = is_quantized(move.from.dtype);
  plan.has_to_scale = is_quantized(move.to.dtype);
  plan.rows = move.from.num_heads();
  plan.count = move.from.head_dim();
  plan.convert =
      find_convert(move.from.dtype, move.to.dtype,
                   plan.has_to_scale ? move.to_scale.dtype : move.from_scale.dtype, move.full_range);
  if (plan.has_from_scale) {
    plan.from_scale = row_layout_of(move.from_scale);
    plan.group = plan.count / move.from_scale.width();
  }
  if (plan.has_to_scale) {
    plan.to_scale = row_layout_of(move.to_scale);
    plan.group = plan.count / move.to_scale.width();
  }
  plan.is_head_major = plan.from.head > plan.from.slots.stride();
  plan.prefetch_bytes = plan.is_head_major ? 0 : kPrefetchRows * plan.from.slots.stride();
  plan.repeat = move.repeat;
  if (plan.repeat > 1) {
    plan.repeat_stride = plan.to.head;
    plan.to.head *= plan.repeat;  // from the first copy of one head to that of the next
  } else if (heads_are_contiguous(plan.from, plan.rows) && heads_can_join(plan.to, plan.rows) &&
             (!plan.has_from_scale || heads_are_contiguous(plan.from_scale, plan.rows)) &&
             (!plan.has_to_scale || heads_can_join(plan.to_scale, plan.rows))) {
    join_heads(plan.from, plan.rows);
    join_heads(plan.from_scale, plan.rows);
    join_heads(plan.to, plan.rows);
    join_heads(plan.to_scale, plan.rows);
    plan.count *= plan.rows;
    plan.rows = 1;
  }
  plan.joins_slots = plan.repeat == 1 && is_one_run(plan.from) && is_one_run(plan.to) &&
                     (!plan.has_from_scale || is_one_run(plan.from_scale)) &&
                     (!plan.has_to_scale || is_one_run(plan.to_scale));
  if (plan.joins_slots && plan.is_head_major)
    plan.tile = max(kTile, min(kLongTile, plan.from.head / max(1, plan.from.slots.stride())));
  return plan;
}

// The row if it is contiguous, or else a contiguous copy in `scratch`, which is advanced.
KVLOOM_INLINE const Byte* as_contiguous(const RowLayout& layout, const Byte* from, Byte*& scratch) {
  if (layout.is_contiguous) return from;
  Byte* copy = scratch;
  scratch += aligned(layout.row_bytes());
  gather_row(layout, from, copy);
  return copy;
}

// Writes a contiguous row to its layout.
KVLOOM_INLINE void write_row(const RowLayout& layout, Byte* to, const Byte* from, bool stream) {
  if (layout.is_contiguous) {
    if (to != from) copy_contiguous(to, from, layout.row_bytes(), stream);
  } else {
    scatter_row(layout, to, from, stream);
  }
}

KVLOOM_INLINE void move_row(const Plan& plan, const RowPointers& at, Byte* scratch, bool stream) {
  if (plan.convert == nullptr && plan.repeat == 1 && plan.to.is_contiguous && !plan.from.is_contiguous) {
    return gather_row(plan.from, at.from, at.to);
  }
  const Byte* in = as_contiguous(plan.from, at.from, scratch);
  const Byte* out = in;
  if (plan.convert != nullptr) {
    const Byte* in_scale =
        plan.has_from_scale ? as_contiguous(plan.from_scale, at.from_scale, scratch) : nullptr;
    const bool in_place = plan.to.is_contiguous && !(stream && is_whole_lines(at.to, plan.to.row_bytes()));
    Byte* codes = in_place ? at.to : scratch;
    if (!in_place) scratch += aligned(plan.to.row_bytes());
    Byte* scales = plan.to_scale.is_contiguous ? at.to_scale : scratch;
    plan.convert({in, in_scale, codes, scales, plan.count, plan.group, plan.prefetch_bytes});
    if (plan.has_to_scale) write_row(plan.to_scale, at.to_scale, scales, false);
    out = codes;
  }
  for (Index r = 0; r < plan.repeat; ++r) write_row(plan.to, at.to + r * plan.repeat_stride, out, stream);
}

// Prefetches the row of the next head, which no hardware prefetcher predicts.
KVLOOM_INLINE void prefetch_row(const Plan& plan, const RowPointers& at, bool stream) {
  const Index from_bytes = plan.from.row_bytes(), to_bytes = plan.to.row_bytes();
  for (Index i = 0; i < from_bytes; i += 64) __builtin_prefetch(at.from + plan.from.head + i, 0, 2);
  if (plan.has_from_scale) __builtin_prefetch(at.from_scale + plan.from_scale.head, 0, 2);
  if (stream || !plan.to.is_contiguous) return;
  for (Index i = 0; i < to_bytes; i += 64) __builtin_prefetch(at.to + plan.to.head + i, 1, 2);
}

// Prefetches the beginning of a run of the next head; hardware prefetches the rest of a long one.
KVLOOM_INLINE void prefetch_run(const Plan& plan, const RowPointers& at, int count, bool stream) {
  constexpr Index kBytes = 4096;
  const Index from_bytes = min(count * plan.from.row_bytes(), kBytes);
  for (Index i = 0; i < from_bytes; i += 64) __builtin_prefetch(at.from + plan.from.head + i, 0, 2);
  if (plan.has_from_scale) __builtin_prefetch(at.from_scale + plan.from_scale.head, 0, 2);
  if (stream || plan.convert != nullptr) return;
  const Index to_bytes = min(count * plan.to.row_bytes(), kBytes);
  for (Index i = 0; i < to_bytes; i += 64) __builtin_prefetch(at.to + plan.to.head + i, 1, 2);
}

// Moves the rows of a tile of tokens head by head, those of adjacent slots at once.
inline void move_runs(const Plan& plan, const Index* from, const Index* to, int num_tokens, bool stream) {
  RowPointers pointers[kLongTile];
  int counts[kLongTile], num_runs = 0;
  for (int i = 0, next; i < num_tokens; i = next) {
    const int end = i + static_cast<int>(min(num_tokens - i, plan.span(from[i], to[i])));
    for (next = i + 1; next < end; ++next)
      if (from[next] != from[next - 1] + 1 || to[next] != to[next - 1] + 1) break;
    pointers[num_runs] = plan.pointers(from[i], to[i]);
    counts[num_runs++] = next - i;
  }
  for (Index h = 0; h < plan.rows; ++h) {
    for (int i = 0; i < num_runs; ++i) {
      RowPointers& at = pointers[i];
      if (h + 1 < plan.rows) prefetch_run(plan, at, counts[i], stream);
      if (plan.convert == nullptr) {
        copy_contiguous(at.to, at.from, counts[i] * plan.from.row_bytes(), stream);
      } else {
        plan.convert({at.from, at.from_scale, at.to, at.to_scale, counts[i] * plan.count, plan.group, 0});
      }
      at = plan.next_head(at);
    }
  }
}

// Moves the rows of a tile of tokens in the order in which they are read: reading out of order costs more
// than writing so. Where a head's rows of adjacent slots are adjacent in memory, that is head by head.
inline void move_tile(const Plan& plan, RowPointers* pointers, int num_tokens, Byte* scratch, bool stream) {
  if (!plan.is_head_major) {
    for (int i = 0; i < num_tokens; ++i) {
      RowPointers at = pointers[i];
      for (Index h = 0; h < plan.rows; ++h, at = plan.next_head(at)) move_row(plan, at, scratch, stream);
    }
    return;
  }
  for (Index h = 0; h < plan.rows; ++h) {
    for (int i = 0; i < num_tokens; ++i) {
      if (h + 1 < plan.rows) prefetch_row(plan, pointers[i], stream);
      move_row(plan, pointers[i], scratch, stream);
      pointers[i] = plan.next_head(pointers[i]);
    }
  }
}

// --- rows that are smoothed first --------------------------------------------------------------------------

// The same move, of smoothed rows [kTile, H, D] in a buffer.
inline Move from_buffer(const Move& move, Byte* buffer) {
  const Index heads = move.from.num_heads(), width = move.from.width();
  const Index size[6] = {kTile, 1, 1, heads, 1, width}, stride[6] = {heads * width, 0, 0, width, 0, 1};
  Move result = move;
  result.from.data = buffer;
  for (int i = 0; i < 6; ++i) result.from.size[i] = size[i], result.from.stride[i] = stride[i];
  return result;
}

// Smooths tokens `[begin, end)` into the buffer, and prefetches the next ones, which are read at once, too.
inline void smooth_tile(SmoothArgs args, Index begin, Index end, Byte* buffer) {
  const Index row = args.size[1] * args.head_dim;
  args.to = buffer;
  args.to_first = begin * row;
  args.to_stride[0] = args.size[2] * row, args.to_stride[1] = args.head_dim, args.to_stride[2] = row;
  args.prefetch = (end - begin) * args.token_stride();
  smooth(args, begin, end);
}

// --- all of them -------------------------------------------------------------------------------------------

// Tokens `[begin, end)` of a store, a load or a copy.
inline void move(const MoveArgs& args, Index begin, Index end, Byte* scratch) {
  Plan plans[kMaxMoves];
  Index tile = kLongTile;
  for (int m = 0; m < args.num_moves; ++m) {
    const Move& move = args.moves[m];
    plans[m] = plan_of(move.smooth ? from_buffer(move, scratch) : move);
    tile = min(tile, plans[m].tile);
    if (!move.smooth) continue;
    plans[m].prefetch_bytes = 0;
    tile = min(tile, smoothed_at_once(move.from));
  }
  for (Index first = begin, last; first < end; first = last) {
    last = min(end, first + tile);
    Index from[kLongTile], within[kLongTile], to[kLongTile];
    int num_tokens = 0;
    for (Index t = first; t < last; ++t) {
      if (args.to_slots[t] < 0) continue;
      from[num_tokens] = args.from_slots[t];
      within[num_tokens] = t - first;
      to[num_tokens++] = args.to_slots[t];
    }
    for (int m = 0; m < args.num_moves && num_tokens; ++m) {
      const Plan& plan = plans[m];
      const SmoothArgs* smoothing = args.moves[m].smooth;
      if (plan.joins_slots && !smoothing && (plan.convert == nullptr || !args.stream)) {
        move_runs(plan, from, to, num_tokens, args.stream);
      } else {
        Byte* unused = scratch;
        if (smoothing) {
          smooth_tile(*smoothing, first, last, scratch);
          unused += smoothed_bytes(args.moves[m].from);
        }
        RowPointers pointers[kLongTile];
        for (int i = 0; i < num_tokens; ++i)
          pointers[i] = plan.pointers((smoothing ? within : from)[i], to[i]);
        move_tile(plan, pointers, num_tokens, unused, args.stream);
      }
      if (args.moves[m].restore) smooth(*args.moves[m].restore, first, last);
    }
  }
  if (args.stream) stream_fence();
}

}  // namespace kvloom::KVLOOM_ISA::rows
