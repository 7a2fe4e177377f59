// The arguments of store, load and copy: raw pointers, sizes and strides. No tensors.
#pragma once

#include "../base/slots.h"
#include "../base/views.h"

namespace kvloom {

// Rows of one tensor become rows of another. Codes, on either side, have scales.
struct Move {
  View from, from_scale;
  View to, to_scale;
  Index repeat = 1;         // how many times in a row each head is written
  bool full_range = false;  // whether 4-bit codes that are written reach -8
};

// Sides of keys, values and their scales.
constexpr int kMaxMoves = 4;

// Bytes up to the next cache line.
KVLOOM_INLINE constexpr Index aligned(Index bytes) { return round_up(bytes, 64); }

// to[to_slots[t]] = from[from_slots[t]]; a token with a negative target is skipped.
struct MoveArgs {
  const Move* moves = nullptr;
  int num_moves = 0;
  TokenSlots from_slots, to_slots;
  bool stream = false;  // write whole cache lines with non-temporal stores
};

}  // namespace kvloom
