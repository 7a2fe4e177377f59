// Cosines and sines of many angles at once. Angles are integers in 2^-64 of a turn; their multiples wrap at
// whole turns, so they are exact for any position.
#pragma once

#include "arithmetic.h"

namespace kvloom::KVLOOM_ISA {

struct Waves {
  Vec cos, sin;
};

// Waves of angles in 2^-32 of a turn, to about 2^-24.
inline Waves waves_of(Words angle) {
  const Words quarter = (angle + (1u << 29)) >> 30;
  const Vec x = __builtin_convertvector(as<IntVec>(angle - (quarter << 30)), Vec) * 1.4629180792671596e-9f;
  const Vec square = x * x;
  Vec s = splat(-1.9515295891e-4f), c = splat(2.443315711809948e-5f);
  s = multiply_add(s, square, 8.3321608736e-3f);
  c = multiply_add(c, square, -1.388731625493765e-3f);
  s = multiply_add(s, square, -1.6666654611e-1f);
  c = multiply_add(c, square, 4.166664568298827e-2f);
  s = multiply_add(s * square, x, x);
  c = multiply_add(c, square * square, multiply_add(square, -0.5f, splat(1.0f)));
  const auto is_odd = (quarter & 1) != 0;
  const Vec cos = is_odd ? s : c, sin = is_odd ? c : s;
  return {as<Vec>(as<Words>(cos) ^ (((quarter + 1) & 2) << 30)),
          as<Vec>(as<Words>(sin) ^ ((quarter & 2) << 30))};
}

// Angles in 2^-32 of a turn, made from kLanes frequencies.
template <class Angle>
KVLOOM_INLINE Words angles_of(const uint64_t* turns, Angle angle) {
  using Half = VectorOf<uint64_t, kLanes / 2>::type;
  const auto first = as<Words>(angle(bit_copy<Half>(turns)));
  return odd_lanes(first, as<Words>(angle(bit_copy<Half>(turns + kLanes / 2))));  // the upper half of each
}

// Waves of kLanes pairs at some position.
inline Waves waves_at(const uint64_t* turns, uint64_t position) {
  return waves_of(angles_of(turns, [&](auto x) { return x * position; }));
}

}  // namespace kvloom::KVLOOM_ISA
