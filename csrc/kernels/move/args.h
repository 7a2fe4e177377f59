// The arguments of store, load and copy: raw pointers, sizes and strides. No tensors.
#pragma once

#include <cstdint>

#include "../base/compiler.h"

namespace kvloom {

/// The type of an item of memory. `bits` is moved as it is.
enum class Type : uint8_t { bits, float32, float16, bfloat16, int8, int4 };

/// One layer's keys, values or scales as `[B, S/s, s, H, D/d, d]`, sizes and strides in items.
///
/// An int4 item is a byte of two codes. New tokens `[T, H, D]` are such a view too: T blocks of one slot.
struct View {
  char* data = nullptr;
  int64_t size[6] = {};
  int64_t stride[6] = {};
  int64_t itemsize = 0;
  Type type = Type::bits;

  KVLOOM_INLINE int64_t num_slots() const { return size[0] * size[1] * size[2]; }
  KVLOOM_INLINE int64_t num_heads() const { return size[3]; }
  KVLOOM_INLINE int64_t width() const { return size[4] * size[5]; }
};

/// Slot of each token; without data, token t is in slot t.
struct Slots {
  const int64_t* data = nullptr;

  KVLOOM_INLINE int64_t operator[](int64_t token) const { return data == nullptr ? token : data[token]; }
};

/// Whether items are codes, which have scales.
KVLOOM_INLINE constexpr bool is_quantized(Type type) { return type == Type::int8 || type == Type::int4; }

/// Rows of one tensor become rows of another. Codes, on either side, have scales.
struct Move {
  View from, from_scale;
  View to, to_scale;
  int64_t repeat = 1;  // how many times in a row each head is written
};

/// Sides of keys, values and their scales.
constexpr int kMaxMoves = 4;

/// Bytes up to the next cache line.
KVLOOM_INLINE constexpr int64_t aligned(int64_t bytes) { return (bytes + 63) / 64 * 64; }

/// `to[to_slots[t]] = from[from_slots[t]]`; a token with a negative target is skipped.
struct MoveArgs {
  const Move* moves = nullptr;
  int num_moves = 0;
  Slots from_slots, to_slots;
  bool stream = false;  // write whole cache lines with non-temporal stores
};

}  // namespace kvloom
