// The types of stored elements, and the arithmetic of sizes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "compiler.h"

namespace kvloom {

using Index = int64_t;
using Byte = unsigned char;

// An element of int4 or int2 is a byte of two or four codes in two's complement, the first in the lowest
// bits. `bits` are copied unchanged.
enum class DType : int32_t { f32, f16, bf16, int8, int4, int2, bits };

// Bits of a code; 0 for elements that are no codes.
KVLOOM_INLINE constexpr int bits_of(DType dtype) {
  return dtype == DType::int8 ? 8 : dtype == DType::int4 ? 4 : dtype == DType::int2 ? 2 : 0;
}

template <int kBits>
struct Bits {
  static constexpr int value = kBits;
};

// Calls f(Bits<kBits>{}) for elements that are codes.
template <class F>
KVLOOM_INLINE auto for_codes(DType dtype, F f) {
  const int bits = bits_of(dtype);
  return bits == 8 ? f(Bits<8>{}) : bits == 4 ? f(Bits<4>{}) : f(Bits<2>{});
}

// Whether elements are codes, which have scales.
KVLOOM_INLINE constexpr bool is_quantized(DType dtype) { return bits_of(dtype) != 0; }

// Numbers in an element: codes in a byte, or one.
KVLOOM_INLINE constexpr Index numbers_in(DType dtype) { return is_quantized(dtype) ? 8 / bits_of(dtype) : 1; }

KVLOOM_INLINE constexpr Index min(Index a, Index b) { return a < b ? a : b; }
KVLOOM_INLINE constexpr Index max(Index a, Index b) { return a > b ? a : b; }
KVLOOM_INLINE constexpr Index ceil_div(Index a, Index b) { return (a + b - 1) / b; }
KVLOOM_INLINE constexpr Index round_up(Index a, Index b) { return ceil_div(a, b) * b; }

// Division by a number that is a power of two more often than not, which a shift does ten times faster.
class Divisor {
 public:
  KVLOOM_INLINE Divisor() : Divisor(Index{1} << 62) {}  // more than any x: the quotient is 0
  KVLOOM_INLINE explicit Divisor(Index by)
      : by_(by), shift_(63 - __builtin_clzll(by | 1)), is_power_(Index{1} << shift_ == by) {}

  KVLOOM_INLINE Index quotient(Index x) const { return is_power_ ? x >> shift_ : x / by_; }  // of x >= 0
  KVLOOM_INLINE Index size() const { return by_; }

 private:
  Index by_;
  int shift_;
  bool is_power_;
};

}  // namespace kvloom
