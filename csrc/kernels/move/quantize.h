// Rows of numbers into codes and scales: the largest magnitude of each group, a vector of groups at a time,
// their scales, then the codes. The numerics of docs/decisions/0003.
#pragma once

#include "../base/codes.h"

namespace kvloom::KVLOOM_ISA::rows {

// `count` numbers or codes, in groups that share a scale.
struct Row {
  const void* in;
  const void* in_scale;
  void* out;
  void* out_scale;
  Index count, group;
  Index prefetch_bytes;  // distance from what is read to what is prefetched
};

// --- the largest magnitude of each group -------------------------------------------------------------------

// Bits without a sign are ordered as the floats are, and NaN comes last. Two 16-bit ones share a lane.

// Numbers in a register.
template <class In>
constexpr Index kWidth = kLanes * 4 / sizeof(In);

template <class In>
using MagnitudesOf = std::conditional_t<sizeof(In) == 2, Magnitudes, IntVec>;

template <class In>
KVLOOM_INLINE MagnitudesOf<In> load_magnitudes(const In* x) {
  if constexpr (sizeof(In) == 2)
    return bit_copy<Magnitudes>(x) & int16_t{0x7fff};
  else
    return bit_copy<IntVec>(x) & 0x7fffffff;
}

// The maximum of the numbers that share a lane.
KVLOOM_INLINE IntVec reduce_in_lane(IntVec x) { return x; }
KVLOOM_INLINE IntVec reduce_in_lane(Magnitudes x) {
  return maximum(as<IntVec>(x) & 0xffff, as<IntVec>(as<Words>(x) >> 16));
}

// The bits of magnitudes as those of float32.
template <class In>
KVLOOM_INLINE IntVec float_bits(IntVec magnitude) {
  if constexpr (std::is_same_v<In, Half>) {
    return as<IntVec>(widen(low_halves(as<Words>(magnitude)), Half{}));
  } else {
    return magnitude << (std::is_same_v<In, BFloat> ? 16 : 0);
  }
}

// Reduces `kCount` vectors to one: each lane is the maximum of `kCount` neighbors, in order. From `count` on,
// vectors count as 0.
template <int kCount, class Nth>
KVLOOM_INLINE IntVec reduce_pairs(Index first, Index count, Nth nth) {
  if constexpr (kCount == 1) {
    return nth(first);
  } else {
    const IntVec low = reduce_pairs<kCount / 2>(first, count, nth);
    const Index middle = first + kCount / 2;
    const IntVec high = middle < count ? reduce_pairs<kCount / 2>(middle, count, nth) : IntVec{};
    return maximum(even_lanes(low, high), odd_lanes(low, high));
  }
}

// Of `count` groups, in a lane each, where a group is whole registers or a register whole groups.
template <class In>
inline IntVec largest_of_groups(const In* x, Index group, Index count) {
  const Index step = group < kWidth<In> ? kWidth<In> : group;
  const auto nth = [=](Index n) KVLOOM_INLINE_LAMBDA {
    auto largest = load_magnitudes(x + n * step);
    for (Index i = kWidth<In>; i < group; i += kWidth<In>) {
      largest = maximum(largest, load_magnitudes(x + n * step + i));
    }
    return reduce_in_lane(largest);
  };
  const Index registers = group < kWidth<In> ? count * group / kWidth<In> : count;
  switch (group * kLanes / kWidth<In>) {  // lanes of a group
    case 1: return reduce_pairs<1>(0, registers, nth);
    case 2: return reduce_pairs<2>(0, registers, nth);
    case 4: return reduce_pairs<4>(0, registers, nth);
    case 8: return reduce_pairs<(kLanes < 8 ? kLanes : 8)>(0, registers, nth);
    default: return reduce_pairs<kLanes>(0, registers, nth);
  }
}

// Of `count` groups of any size.
template <class In>
[[gnu::noinline]] IntVec largest_of_any_groups(const In* x, Index group, Index count) {
  IntVec all{};
  for (Index g = 0; g < count; ++g, x += group) {
    IntVec largest{};
    for (Index i = 0; i < group; i += kLanes) {
      const Vec some = i + kLanes <= group ? load(x + i) : load_partial(x + i, group - i);
      largest = maximum(largest, as<IntVec>(some) & 0x7fffffff);
    }
    for (int i = 0; i < kLanes; ++i) all[g] = largest[i] > all[g] ? largest[i] : all[g];
  }
  return all;
}

// --- its scale ---------------------------------------------------------------------------------------------

// Scale of the group whose largest magnitude has the bits `amax`, as the type of the input rounds it; NaN if
// that is no finite number.
template <class In, int kBits>
KVLOOM_INLINE Vec scale_of(IntVec amax) {
  const Vec scale = round_to<In>(as<Vec>(amax) / float(kMaxScales<kBits>));
  const Vec least = round_to<In>(splat(1e-5f));
  return amax < 0x7f800000 ? maximum(scale, least) : as<Vec>(splat(0x7fc00000));
}

// --- its codes ---------------------------------------------------------------------------------------------

// What codes are made with: the factor that `quotient_of` takes, which is the scale or its reciprocal; for 2
// bits the magnitude from which on a number is 3 scales and not 1.
template <class In, int kBits>
KVLOOM_INLINE Vec factor_of(Vec scale) {
  if constexpr (kBits == 2) return scale + scale;
  return std::is_same_v<In, float> ? scale : 1.0f / scale;
}

// `x / scale` as the type of the input rounds it.
//
// A quotient of two numbers of p bits differs from the middle between two such numbers by more than
// 2^(-1-2p) of itself. That is 2^-23 for float16 and 2^-17 for bfloat16, and the product with a rounded
// reciprocal errs less: it rounds to the same 16 bits as the quotient. There are no ties, so half a unit
// added to the bits rounds them. What is subnormal in 16 bits is not rounded alike, but its code is 0 either
// way.
template <class In>
KVLOOM_INLINE Vec quotient_of(Vec x, Vec factor) {
  if constexpr (std::is_same_v<In, float>) return x / factor;
  constexpr int32_t unit = std::is_same_v<In, BFloat> ? 1 << 16 : 1 << 13;
  return as<Vec>((as<IntVec>(x * factor) + unit / 2) & -unit);
}

// Codes, in the low bits of each lane; 0 where the quotient is NaN.
template <class In, int kBits>
KVLOOM_INLINE IntVec codes_of(Vec x, Vec factor) {
  if constexpr (kBits == 2) {
    const IntVec bits = as<IntVec>(x), is_large = as<Vec>(bits & 0x7fffffff) >= factor;
    const IntVec codes = (is_large & 1) ^ (bits >> 31);
    return factor == factor ? codes : IntVec{};
  }
  Vec quotient = quotient_of<In>(x, factor);
  if constexpr (std::is_same_v<In, BFloat>) {  // which rounds to 127.5, and that to 128; the others never do
    const Vec most = splat(float(kMaxScales<kBits>));
    quotient = maximum(-most, minimum(most, quotient));
  }
  // Adding 1.5 * 2^23 leaves the nearest integer, ties to even, in the last bits of the sum.
  const IntVec codes = as<IntVec>(quotient + 12582912.0f);
  if constexpr (sizeof(In) == 2) return codes;  // the last bits of a NaN that comes from 16 are 0
  return quotient == quotient ? codes : IntVec{};
}

// Numbers whose codes are written together. Those of bfloat16 are taken apart into even and odd ones: that
// is cheaper than to widen them in order, and so is packing two codes that share a lane.
template <class In>
constexpr Index kStep = std::is_same_v<In, BFloat> ? 2 * kLanes : kLanes;

// Writes the codes of `kStep` numbers, each lane with its own factor, and prefetches.
template <class In, int kBits>
KVLOOM_INLINE void quantize_step(const In* x, Byte* to, Vec factor, Index prefetch_bytes) {
  __builtin_prefetch(reinterpret_cast<const Byte*>(x) + prefetch_bytes, 0, 2);
  if constexpr (std::is_same_v<In, BFloat>) {
    const Words both = bit_copy<Words>(x);
    const IntVec even = codes_of<In, kBits>(as<Vec>(both << 16), factor);
    const IntVec odd = codes_of<In, kBits>(as<Vec>(both & 0xffff0000), factor);
    store_pairs<kBits>(to, even, odd);
  } else {
    store_codes<kBits>(to, codes_of<In, kBits>(load(x), factor), kLanes);
  }
}

// Writes the codes of one group.
template <class In, int kBits>
KVLOOM_INLINE void quantize_group(const In* x, Byte* to, Vec factor, Index group, Index prefetch_bytes) {
  Index i = 0;
  for (; i + kStep<In> <= group; i += kStep<In>) {
    quantize_step<In, kBits>(x + i, to + i * kBits / 8, factor, prefetch_bytes);
  }
  for (; i < group; i += kLanes) {
    const Index count = group - i < kLanes ? group - i : kLanes;
    store_codes<kBits>(to + i * kBits / 8, codes_of<In, kBits>(load_partial(x + i, count), factor), count);
  }
}

// Writes the scales of `count` groups, up to a vector of them, and returns the factors of their codes.
template <class In, int kBits, class Scale>
KVLOOM_INLINE Vec quantize_scales(const In* x, Scale* to, Index group, Index count, bool fits_registers) {
  const IntVec amax = fits_registers ? float_bits<In>(largest_of_groups(x, group, count))
                                     : largest_of_any_groups(x, group, count);
  const Vec scale = scale_of<In, kBits>(amax), stored = saturate<Scale>(scale);
  if (count == kLanes) {
    store(to, stored);
  } else {
    store_partial(to, stored, count);
  }
  return factor_of<In, kBits>(scale);
}

template <class In, int kBits, class Scale>
void quantize_row(const Row& row) {
  constexpr Index kMaxGroupsAtOnce = 8 * kLanes;   // groups whose factors are kept
  constexpr Index kTogether = kStep<In> / kLanes;  // numbers that share a lane
  const Index group = row.group, num_groups = row.count / group, group_bytes = group * kBits / 8;
  const bool is_power = (group & (group - 1)) == 0;
  const bool fits_registers =
      group % kWidth<In> == 0 || (is_power && group * sizeof(In) >= 4 && row.count % kWidth<In> == 0);
  const bool shares_steps = is_power && group >= kTogether && group < kStep<In>;
  const Index groups_in_step = kStep<In> / group;
  const IntVec group_of_lane = lane_numbers() * int32_t(kTogether) >> __builtin_ctzll(group);

  for (Index first = 0; first < num_groups; first += kMaxGroupsAtOnce) {
    const Index count = num_groups - first < kMaxGroupsAtOnce ? num_groups - first : kMaxGroupsAtOnce;
    const In* x = static_cast<const In*>(row.in) + first * group;
    Byte* codes = static_cast<Byte*>(row.out) + first * group_bytes;
    Scale* scales = static_cast<Scale*>(row.out_scale) + first;

    // All scales before all codes: a scale has a long latency, but the next one does not depend on it.
    alignas(64) float factors[kMaxGroupsAtOnce];
    for (Index g = 0; g < count; g += kLanes) {
      const Index some = count - g < kLanes ? count - g : kLanes;
      store(factors + g, quantize_scales<In, kBits>(x + g * group, scales + g, group, some, fits_registers));
    }
    Index g = 0;
    for (; shares_steps && g + groups_in_step <= count; g += groups_in_step) {
      const Vec each = permute(load(factors + g / kLanes * kLanes), group_of_lane + int32_t(g % kLanes));
      quantize_step<In, kBits>(x + g * group, codes + g * group_bytes, each, row.prefetch_bytes);
    }
    for (; g < count; ++g) {
      const Vec factor = splat(factors[g]);
      quantize_group<In, kBits>(x + g * group, codes + g * group_bytes, factor, group, row.prefetch_bytes);
    }
  }
}

}  // namespace kvloom::KVLOOM_ISA::rows
