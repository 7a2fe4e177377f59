// Rows of numbers into codes and scales: the largest of each group, a vector of groups at a time, their
// scales, then the codes. The numerics of docs/decisions/0003 and, of codes in full range, 0043 and 0051.
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

// --- the largest of each group -----------------------------------------------------------------------------

// Keys are integers in the order of magnitudes, with NaN last. They are the bits without a sign or, for codes
// in full range, the bits rotated left so that the sign is last; of a number and its negative, the positive
// one is larger. Two keys of 16 bits share a lane.

constexpr uint32_t kTurned = 1u << 31 | 1;  // makes signed integers of rotated bits, and positive ones larger

// Numbers in a register.
template <class In>
constexpr Index kWidth = kLanes * 4 / sizeof(In);

template <class In>
using KeysOf = std::conditional_t<sizeof(In) == 2, Halves, IntVec>;

template <bool kFull>
KVLOOM_INLINE IntVec keys_of(Words bits) {
  return as<IntVec>(kFull ? (bits << 1 | bits >> 31) ^ kTurned : bits & 0x7fffffff);
}

template <class In, bool kFull>
KVLOOM_INLINE KeysOf<In> load_keys(const In* x) {
  if constexpr (sizeof(In) == 4) return keys_of<kFull>(bit_copy<Words>(x));
  using Bits = VectorOf<uint16_t, kLanes * 2>::type;
  const Bits bits = bit_copy<Bits>(x);
  return as<KeysOf<In>>(kFull ? (bits << 1 | bits >> 15) ^ uint16_t(kTurned >> 16 | 1) : bits & 0x7fff);
}

// The maximum of the keys that share a lane, in its upper half.
KVLOOM_INLINE IntVec reduce_in_lane(IntVec x) { return x; }
KVLOOM_INLINE IntVec reduce_in_lane(Halves x) {
  return maximum(as<IntVec>(x) << 16, as<IntVec>(x) & splat(INT32_MIN >> 15));
}

// The numbers that have these keys.
template <class In, bool kFull>
KVLOOM_INLINE Vec number_of(IntVec keys) {
  constexpr bool is_half = sizeof(In) == 2;
  Words bits = as<Words>(keys);
  if constexpr (kFull) {
    bits ^= is_half ? kTurned << 16 | 1u << 31 : kTurned;
    bits = (bits >> 1 | bits << (is_half ? 15 : 31)) & (is_half ? 0xffff0000u : ~0u);
  }
  if constexpr (std::is_same_v<In, Half>) return widen(low_halves(bits >> 16), Half{});
  return as<Vec>(bits);
}

// Reduces `kCount` vectors to one: each lane is the maximum of `kCount` adjacent lanes, in order. Vectors
// from `count` on are arbitrary.
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

// Largest numbers of `count` groups, in a lane each, where a group is whole registers or a register whole
// groups.
template <class In, bool kFull>
inline Vec largest_of_groups(const In* x, Index group, Index count) {
  const Index step = group < kWidth<In> ? kWidth<In> : group;
  const auto nth = [=](Index n) KVLOOM_INLINE_LAMBDA {
    auto largest = load_keys<In, kFull>(x + n * step);
    for (Index i = kWidth<In>; i < group; i += kWidth<In>) {
      largest = maximum(largest, load_keys<In, kFull>(x + n * step + i));
    }
    return reduce_in_lane(largest);
  };
  const Index registers = group < kWidth<In> ? count * group / kWidth<In> : count;
  const auto number = number_of<In, kFull>;
  switch (group * kLanes / kWidth<In>) {  // lanes of a group
    case 1: return number(reduce_pairs<1>(0, registers, nth));
    case 2: return number(reduce_pairs<2>(0, registers, nth));
    case 4: return number(reduce_pairs<4>(0, registers, nth));
    case 8: return number(reduce_pairs<(kLanes < 8 ? kLanes : 8)>(0, registers, nth));
    default: return number(reduce_pairs<kLanes>(0, registers, nth));
  }
}

// Largest numbers of `count` groups of any size.
template <class In, bool kFull>
[[gnu::noinline]] Vec largest_of_any_groups(const In* x, Index group, Index count) {
  IntVec all = splat(INT32_MIN);
  for (Index g = 0; g < count; ++g, x += group) {
    IntVec largest = splat(INT32_MIN);
    for (Index i = 0; i < group; i += kLanes) {
      const Vec some = i + kLanes <= group ? load(x + i) : load_partial(x + i, group - i);
      largest = maximum(largest, keys_of<kFull>(as<Words>(some)));
    }
    for (int i = 0; i < kLanes; ++i) all[g] = largest[i] > all[g] ? largest[i] : all[g];
  }
  return number_of<float, kFull>(all);
}

// --- its scale ---------------------------------------------------------------------------------------------

// Scale of the group with this largest number, as the type of the input rounds it; NaN if that is not finite.
template <class In, int kBits, bool kFull>
KVLOOM_INLINE Vec scale_of(Vec largest) {
  const Vec scale = round_to<In>(largest / (kFull ? -8.0f : float(kMaxScales<kBits>)));
  const Vec least = round_to<In>(splat(1e-5f));
  const IntVec no_sign = splat(INT32_MAX);
  const Vec raised = as<Vec>(as<IntVec>(scale) & no_sign) < least ? least : scale;
  return (as<IntVec>(largest) & no_sign) < 0x7f800000 ? raised : as<Vec>(splat(0x7fc00000));
}

// Scales with which codes of 2 bits keep the length of a group, of `count` groups with these largest
// magnitudes and scales. Sums are of integers, 255 for the largest, and so the same in any order.
template <class In>
inline Vec length_kept(const In* x, Index group, Index count, Vec largest, Vec scale) {
  const Vec parts_of = 255.0f / largest, least_large = scale + scale;
  Vec ratio{};
  for (Index g = 0; g < count; ++g, x += group) {
    Words squares{}, products{};
    for (Index first = 0; first < group; first += kLanes) {
      const Index rest = group - first;
      const Vec some = rest >= kLanes ? load(x + first) : load_partial(x + first, rest);
      const Vec magnitude = as<Vec>(as<IntVec>(some) & INT32_MAX);
      const Words part = as<Words>(magnitude * parts_of[g] + 12582912.0f) & 0xff;
      squares += part * part;
      products += part * as<Words>(1 + ((magnitude >= splat(least_large[g])) & 2));
    }
    uint32_t sum_of_squares = 0, sum_of_products = 0;
    for (int i = 0; i < kLanes; ++i) {
      sum_of_squares += squares[i];
      sum_of_products += products[i];
    }
    ratio[g] = float(sum_of_squares) / float(sum_of_products);
  }
  const Vec kept = largest / 255.0f * ratio, least = splat(1e-5f);
  return scale > round_to<In>(least) ? maximum(kept, least) : scale;
}

// --- its codes ---------------------------------------------------------------------------------------------

// Factor to make codes with, an argument of `quotient_of`: the scale or its reciprocal; for 2 bits the
// magnitude from which on a number is 3 scales and not 1.
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
template <class In, int kBits, bool kFull>
KVLOOM_INLINE IntVec codes_of(Vec x, Vec factor) {
  if constexpr (kBits == 2) {
    const IntVec bits = as<IntVec>(x), is_large = as<Vec>(bits & 0x7fffffff) >= factor;
    const IntVec codes = (is_large & 1) ^ (bits >> 31);
    return factor == factor ? codes : IntVec{};
  }
  Vec quotient = quotient_of<In>(x, factor);
  if constexpr (kFull) {
    if constexpr (std::is_same_v<In, BFloat>) quotient = minimum(splat(7.0f), quotient);  // 8 is no code
  } else if constexpr (std::is_same_v<In, BFloat>) {  // rounds to 127.5, and that to 128; the others never do
    const Vec most = splat(float(kMaxScales<kBits>));
    quotient = maximum(-most, minimum(most, quotient));
  }
  // Adding 1.5 * 2^23 leaves the nearest integer, ties to even, in the last bits of the sum.
  const IntVec codes = as<IntVec>(quotient + 12582912.0f);
  if constexpr (sizeof(In) == 2) return codes;  // the last bits of a NaN that comes from 16 are 0
  return quotient == quotient ? codes : IntVec{};
}

// Writes the codes of `count` lanes. In full range a quotient of 8 has the code 7, cut off in bytes since
// that is cheaper than in floats.
template <int kBits, bool kFull>
KVLOOM_INLINE void write_codes(Byte* to, IntVec codes, Index count) {
  if constexpr (kFull && kBits == 4) {
    const Nibbles packed = pack_nibbles(minimum(low_bytes(codes), Bytes{} + int8_t{7}));
    std::memcpy(to, &packed, count / 2);
  } else {
    store_codes<kBits>(to, codes, count);
  }
}

// Numbers whose codes are written together. Those of bfloat16 are taken apart into even and odd ones: that
// is cheaper than to widen them in order, and so is packing two codes that share a lane.
template <class In>
constexpr Index kStep = std::is_same_v<In, BFloat> ? 2 * kLanes : kLanes;

// Writes the codes of `kStep` numbers, each lane with its own factor, and prefetches.
template <class In, int kBits, bool kFull>
KVLOOM_INLINE void quantize_step(const In* x, Byte* to, Vec factor, Index prefetch_bytes) {
  __builtin_prefetch(reinterpret_cast<const Byte*>(x) + prefetch_bytes, 0, 2);
  if constexpr (std::is_same_v<In, BFloat>) {
    const Words both = bit_copy<Words>(x);
    const IntVec even = codes_of<In, kBits, kFull>(as<Vec>(both << 16), factor);
    const IntVec odd = codes_of<In, kBits, kFull>(as<Vec>(both & 0xffff0000), factor);
    store_pairs<kBits>(to, even, odd);
  } else {
    write_codes<kBits, kFull>(to, codes_of<In, kBits, kFull>(load(x), factor), kLanes);
  }
}

// Writes the codes of one group.
template <class In, int kBits, bool kFull>
KVLOOM_INLINE void quantize_group(const In* x, Byte* to, Vec factor, Index group, Index prefetch_bytes) {
  Index i = 0;
  for (; i + kStep<In> <= group; i += kStep<In>) {
    quantize_step<In, kBits, kFull>(x + i, to + i * kBits / 8, factor, prefetch_bytes);
  }
  for (; i < group; i += kLanes) {
    const Index count = group - i < kLanes ? group - i : kLanes;
    const IntVec codes = codes_of<In, kBits, kFull>(load_partial(x + i, count), factor);
    write_codes<kBits, kFull>(to + i * kBits / 8, codes, count);
  }
}

// Writes the scales of `count` groups, up to a vector of them, and returns the factors of their codes.
template <class In, int kBits, bool kFull, class Scale>
KVLOOM_INLINE Vec quantize_scales(const In* x, Scale* to, Index group, Index count, bool fits_registers) {
  constexpr bool kSigned = kFull && kBits == 4;
  const Vec largest = fits_registers ? largest_of_groups<In, kSigned>(x, group, count)
                                     : largest_of_any_groups<In, kSigned>(x, group, count);
  const Vec scale = scale_of<In, kBits, kSigned>(largest);
  Vec kept = scale;
  if constexpr (kFull && kBits == 2) kept = length_kept<In>(x, group, count, largest, scale);
  const Vec stored = saturate<Scale>(kept);
  if (count == kLanes) {
    store(to, stored);
  } else {
    store_partial(to, stored, count);
  }
  return factor_of<In, kBits>(scale);
}

template <class In, int kBits, class Scale, bool kFull>
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
      store(factors + g,
            quantize_scales<In, kBits, kFull>(x + g * group, scales + g, group, some, fits_registers));
    }
    Index g = 0;
    for (; shares_steps && g + groups_in_step <= count; g += groups_in_step) {
      const Vec each = permute(load(factors + g / kLanes * kLanes), group_of_lane + int32_t(g % kLanes));
      quantize_step<In, kBits, kFull>(x + g * group, codes + g * group_bytes, each, row.prefetch_bytes);
    }
    for (; g < count; ++g) {
      const Vec factor = splat(factors[g]);
      quantize_group<In, kBits, kFull>(x + g * group, codes + g * group_bytes, factor, group,
                                       row.prefetch_bytes);
    }
  }
}

}  // namespace kvloom::KVLOOM_ISA::rows
