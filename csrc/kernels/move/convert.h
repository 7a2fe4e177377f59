// Rows of numbers or codes into rows of other numbers, and which conversion a move needs:
// docs/decisions/0003.
#pragma once

#include <cmath>

#include "quantize.h"

namespace kvloom::KVLOOM_ISA::rows {

using Convert = void (*)(const Row&);

template <class In, class Out>
void cast_row(const Row& row) {
  cast(static_cast<const In*>(row.in), static_cast<Out*>(row.out), row.count);
}

// --- dequantize --------------------------------------------------------------------------------------------

// The product is rounded to the type of the scale, then to that of the result; neither makes it infinite.
template <class Scale, class Out>
KVLOOM_INLINE Vec value_of(Vec code, Vec scale) {
  return saturate<Scale, Out>(round_to<Scale>(code * scale));
}

// Whether no code by this scale is beyond the largest finite number of the scale and of the result.
template <int kBits, class Scale, class Out>
KVLOOM_INLINE bool is_small(float scale) {
  constexpr float largest = kLargest<Scale> < kLargest<Out> ? kLargest<Scale> : kLargest<Out>;
  return std::fabs(scale) <= largest / (kBits == 8 ? 128 : 8);  // not NaN
}

template <class Scale, class Out>
KVLOOM_INLINE void store_value(Out* to, Vec x) {
  if constexpr (std::is_same_v<Scale, Half>) {
    store_normal(to, x);  // what is subnormal in float16 is not in float32
  } else {
    store(to, x);
  }
}

template <int kBits, class Scale, class Out>
void dequantize_row(const Row& row) {
  const Byte* in = static_cast<const Byte*>(row.in);
  const Scale* scales = static_cast<const Scale*>(row.in_scale);
  Out* out = static_cast<Out*>(row.out);
  const Index group = row.group;

  if (group < kLanes && kLanes % group == 0) {  // several groups in a vector
    const IntVec group_of_lane = lane_numbers() >> __builtin_ctzll(group);
    const auto step = [&](Index i, Index count, Index groups) KVLOOM_INLINE_LAMBDA {
      const Vec scale = permute(load_partial(scales, groups), group_of_lane);
      scales += groups;
      const Vec x = value_of<Scale, Out>(load_codes<kBits>(in + i * kBits / 8, count), scale);
      if (count == kLanes) {
        store_value<Scale>(out + i, x);
      } else {
        store_partial(out + i, x, count);
      }
    };
    const Index rest = row.count % kLanes, whole = row.count - rest, groups = kLanes / group;
    for (Index i = 0; i < whole; i += kLanes) step(i, kLanes, groups);
    if (rest != 0) step(whole, rest, rest / group);
    return;
  }

  for (Index first = 0; first < row.count; first += group) {
    const Index whole = group / kLanes * kLanes, rest = group - whole;
    const float number = load_partial(scales++, 1)[0];
    const Vec scale = splat(number);
    const Byte* codes = in + first * kBits / 8;
    Out* x = out + first;
    const auto convert = [&](auto value_at) KVLOOM_INLINE_LAMBDA {
      for (Index i = 0; i < whole; i += kLanes) store_value<Scale>(x + i, value_at(codes + i * kBits / 8));
    };
    if constexpr (kFitVector<kBits>) {
      const Vec values = value_of<Scale, Out>(numbers_of_codes<kBits>(), scale);
      convert([&](const Byte* from) { return permute(values, load_lanes<kBits>(from)); });
    } else if (is_small<kBits, Scale, Out>(number)) {
      convert([&](const Byte* from) { return round_to<Scale>(load_codes<kBits>(from, kLanes) * scale); });
    } else {
      convert([&](const Byte* from) { return value_of<Scale, Out>(load_codes<kBits>(from, kLanes), scale); });
    }
    if (rest != 0) {
      const Vec last = load_codes<kBits>(codes + whole * kBits / 8, rest);
      store_partial(x + whole, value_of<Scale, Out>(last, scale), rest);
    }
  }
}

// --- which of them -----------------------------------------------------------------------------------------

// The conversion between the rows of a move, `nullptr` where bits are copied. Codes of 4 and 2 bits may be
// written in full range.
inline Convert find_convert(DType from, DType to, DType scale, bool full_range) {
  if (from == to) return nullptr;
  const auto quantizing = [=](auto bits) {
    return for_float(from, [=](auto in) {
      return for_float(scale, [=](auto s) -> Convert {
        constexpr int kBits = decltype(bits)::value;
        if (kBits < 8 && full_range) return quantize_row<decltype(in), kBits, decltype(s), (kBits < 8)>;
        return quantize_row<decltype(in), kBits, decltype(s), false>;
      });
    });
  };
  const auto dequantizing = [=](auto bits) {
    return for_float(scale, [=](auto s) {
      return for_float(to, [=](auto out) -> Convert {
        return dequantize_row<decltype(bits)::value, decltype(s), decltype(out)>;
      });
    });
  };
  if (is_quantized(to)) return for_codes(to, quantizing);
  if (is_quantized(from)) return for_codes(from, dequantizing);
  return for_float(from, [=](auto in) {
    return for_float(to, [=](auto out) -> Convert { return cast_row<decltype(in), decltype(out)>; });
  });
}

}  // namespace kvloom::KVLOOM_ISA::rows
