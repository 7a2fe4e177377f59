// Codes of a native block, four bytes to a dword, widened to float32.
#pragma once

#include "arithmetic.h"

namespace kvloom::KVLOOM_ISA {

constexpr Index kManyRowsOfCodes = 8;  // rows of a tile from which on codes are widened once for all of them

// Codes of one position of each dword: of int8 there are four, of int4 eight.
template <bool is_int4, int position>
inline Vec widen_position(IntVec dwords) {
  constexpr int bits = is_int4 ? 4 : 8;
  return __builtin_convertvector((dwords << (32 - bits * (position + 1))) >> (32 - bits), Vec);
}

template <class Visit, int... position>
inline void for_positions(std::integer_sequence<int, position...>, Visit visit) {
  (visit.template operator()<position>(), ...);
}
template <bool is_int4>
using Positions = std::make_integer_sequence<int, is_int4 ? 8 : 4>;

// A dequantized number is rounded to the scale's type where that shows in the query's.
struct Unrounded {
  static constexpr bool kRounds = false;
  static Vec of(Vec x) { return x; }
};
template <class T>
struct RoundedTo {
  static constexpr bool kRounds = true;
  static Vec of(Vec x) { return round_to<T>(x); }
};

// Interleaves the vectors of even and odd elements.
inline void interleave(Vec* x) {
  const Vec even = x[0], odd = x[1];
  x[0] = interleave_low(even, odd);
  x[1] = interleave_high(even, odd);
}

}  // namespace kvloom::KVLOOM_ISA
