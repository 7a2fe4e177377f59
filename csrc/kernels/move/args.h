// The arguments of store, load and copy: raw pointers, sizes and strides. No tensors.
#pragma once

#include "../base/slots.h"
#include "../base/views.h"
#include "smooth_args.h"

namespace kvloom {

// Rows of one tensor become rows of another. Codes, on either side, have scales.
struct Move {
  View from, from_scale;
  View to, to_scale;
  Index repeat = 1;                     // how many times in a row each head is written
  bool full_range = false;              // of codes of 4 and 2 bits that are written
  const SmoothArgs* smooth = nullptr;   // of rows that are smoothed before they are converted
  const SmoothArgs* restore = nullptr;  // of rows that are changed in place after they were written
};

// Sides of keys, values and their scales.
constexpr int kMaxMoves = 4;

// Bytes up to the next cache line.
KVLOOM_INLINE constexpr Index aligned(Index bytes) { return round_up(bytes, 64); }

// Tokens whose addresses are computed together.
constexpr Index kTile = 16;
// The same where more rows of a head are adjacent.
constexpr Index kLongTile = 256;

// Bytes of tokens that are smoothed at once: their rows stay in a first-level cache until they are converted.
constexpr Index kSmoothedBytes = 16 << 10;
KVLOOM_INLINE Index smoothed_at_once(const View& from) {
  return max(1, min(kTile, kSmoothedBytes / max(1, token_bytes(from))));
}
// Scratch for these rows.
KVLOOM_INLINE Index smoothed_bytes(const View& from) {
  return aligned(smoothed_at_once(from) * token_bytes(from));
}

// to[to_slots[t]] = from[from_slots[t]]; a token with a negative target is skipped.
struct MoveArgs {
  const Move* moves = nullptr;
  int num_moves = 0;
  TokenSlots from_slots, to_slots;
  bool stream = false;  // write whole cache lines with non-temporal stores
};

}  // namespace kvloom
