// Rows of numbers into rows of other numbers or codes, both without gaps. The numerics of
// docs/decisions/0003.
#pragma once

#include "simd.h"

namespace kvloom::KVLOOM_ISA::rows {

/// `count` numbers or codes, in groups that share a scale.
struct Row {
  const void* in;
  const void* in_scale;
  void* out;
  void* out_scale;
  int64_t count, group;
};

using Convert = void (*)(const Row&);

template <class In, class Out>
void cast_row(const Row& row) {
  const In* in = static_cast<const In*>(row.in);
  Out* out = static_cast<Out*>(row.out);
  int64_t i = 0;
  for (; i + kLanes <= row.count; i += kLanes) store(out + i, load(in + i));
  if (i < row.count) store_some(out + i, load_some(in + i, row.count - i), row.count - i);
}

// --- codes in memory --------------------------------------------------------------------------------------

template <int kBits>
constexpr int kMaxCode = (1 << (kBits - 1)) - 1;

/// Writes the low bits of the first `count` lanes; int4 codes two to a byte, the even one in the low nibble.
template <int kBits>
KVLOOM_INLINE void store_codes(char* to, Ints codes, int64_t count) {
  if constexpr (kBits == 8) {
    const Bytes bytes = low_bytes(codes);
    std::memcpy(to, &bytes, count);
  } else {
    const Nibbles bytes = pack_nibbles(low_bytes(codes));
    std::memcpy(to, &bytes, count / 2);
  }
}

/// Reads `count` codes; the other lanes are 0.
template <int kBits>
KVLOOM_INLINE Floats load_codes(const char* from, int64_t count) {
  Bytes bytes;
  if constexpr (kBits == 8) {
    bytes = load_bytes<Bytes>(from, count);
  } else {
    bytes = unpack_nibbles(load_bytes<Nibbles>(from, count / 2));
  }
  return __builtin_convertvector(sign_extend(bytes), Floats);
}

// --- quantise ---------------------------------------------------------------------------------------------

/// Largest lane within each run of `run` lanes, in all of them. `run` is a power of two.
KVLOOM_INLINE Ints max_within(Ints x, int64_t run) {
  const Ints lanes = lane_numbers();
  for (int distance = 1; distance < run; distance *= 2) {
    const Ints other = permute(x, lanes ^ distance);
    x = larger(x, other);
  }
  return x;
}

/// Scale of the group whose largest magnitude has the bits `amax`, as the type of the input rounds it.
template <class In, int kBits>
KVLOOM_INLINE Floats scale_of(Ints amax) {
  const Floats scale = round_to<In>(as<Floats>(amax) / float(kMaxCode<kBits>));
  const Floats least = round_to<In>(splat(1e-5f));
  return larger(scale, least);
}

/// The whole group is NaN, and its codes 0, if its largest magnitude is no finite number.
KVLOOM_INLINE Ints is_finite(Ints amax) { return amax < 0x7f800000; }

/// `round_to`, but a subnormal may become 0: its code is 0 either way.
template <class In>
KVLOOM_INLINE Floats round_quotient(Floats x) {
#if defined(__AVX512BF16__)
  if constexpr (std::is_same_v<In, BFloat>)
    return widen(as<Shorts>(_mm512_cvtneps_pbh(as<__m512>(x))), BFloat{});
#endif
  return round_to<In>(x);
}

/// Codes, in the low bits of each lane.
template <class In, int kBits>
KVLOOM_INLINE Ints codes_of(Floats x, Floats scale, Ints finite) {
  Floats quotient = round_quotient<In>(x / scale);
  if constexpr (std::is_same_v<In, BFloat>) {  // which rounds to 127.5, and that to 128; the others never do
    const Floats most = splat(float(kMaxCode<kBits>));
    quotient = larger(-most, smaller(most, quotient));
  }
  // Adding 1.5 * 2^23 leaves the nearest integer, ties to even, in the last bits of the sum.
  return as<Ints>(quotient + 12582912.0f) & finite;
}

/// What is stored of a scale.
template <class Scale>
KVLOOM_INLINE Floats stored_scale(Floats scale, Ints finite) {
  return finite ? saturate<Scale>(scale) : as<Floats>(splat(0x7fc00000));
}

KVLOOM_INLINE Ints magnitude_bits(Floats x) { return as<Ints>(x) & 0x7fffffff; }

/// Bits of the largest magnitude among `count` numbers, in all lanes. Bits of floats without a sign are
/// ordered as the floats are, and NaN comes last.
template <class In>
KVLOOM_INLINE Ints largest_magnitude(const In* x, int64_t count) {
  Ints largest{};
  int64_t i = 0;
  if constexpr (sizeof(In) == 2) {  // two lanes in one
    Magnitudes both{};
    for (; i + 2 * kLanes <= count; i += 2 * kLanes) {
      Magnitudes bits;
      std::memcpy(&bits, x + i, sizeof bits);
      both = larger(both, bits & 0x7fff);
    }
    largest = larger(as<Ints>(widen(low_part(both), In{})), as<Ints>(widen(high_part(both), In{})));
  }
  for (; i + kLanes <= count; i += kLanes) largest = larger(largest, magnitude_bits(load(x + i)));
  if (i < count) largest = larger(largest, magnitude_bits(load_some(x + i, count - i)));
  return max_within(largest, kLanes);
}

template <class In, int kBits, class Scale>
void quantize_row(const Row& row) {
  const In* in = static_cast<const In*>(row.in);
  char* out = static_cast<char*>(row.out);
  Scale* scales = static_cast<Scale*>(row.out_scale);
  const int64_t group = row.group;

  if (group < kLanes && kLanes % group == 0) {  // several groups in a vector
    const auto step = [&](int64_t i, int64_t count, int64_t groups) KVLOOM_INLINE_LAMBDA {
      const Floats x = count == kLanes ? load(in + i) : load_some(in + i, count);
      const Ints amax = max_within(magnitude_bits(x), group);
      const Ints finite = is_finite(amax);
      const Floats scale = scale_of<In, kBits>(amax);
      Scale each[kLanes];
      store(each, stored_scale<Scale>(scale, finite));
      for (int64_t g = 0; g < groups; ++g) *scales++ = each[g * group];
      store_codes<kBits>(out + i * kBits / 8, codes_of<In, kBits>(x, scale, finite), count);
    };
    const int64_t rest = row.count % kLanes, whole = row.count - rest, groups = kLanes / group;
    for (int64_t i = 0; i < whole; i += kLanes) step(i, kLanes, groups);
    if (rest != 0) step(whole, rest, rest / group);
    return;
  }

  for (int64_t first = 0; first < row.count; first += group) {
    const int64_t whole = group / kLanes * kLanes, rest = group - whole;
    const In* x = in + first;
    const Ints amax = largest_magnitude(x, group);
    const Ints finite = is_finite(amax);
    const Floats scale = scale_of<In, kBits>(amax);
    store_some(scales++, stored_scale<Scale>(scale, finite), 1);
    char* codes = out + first * kBits / 8;
    for (int64_t i = 0; i < whole; i += kLanes) {
      store_codes<kBits>(codes + i * kBits / 8, codes_of<In, kBits>(load(x + i), scale, finite), kLanes);
    }
    if (rest != 0) {
      const Floats last = load_some(x + whole, rest);
      store_codes<kBits>(codes + whole * kBits / 8, codes_of<In, kBits>(last, scale, finite), rest);
    }
  }
}

// --- dequantise -------------------------------------------------------------------------------------------

/// The product is rounded to the type of the scale, then to that of the result; neither makes it infinite.
template <class Scale, class Out>
KVLOOM_INLINE Floats value_of(Floats code, Floats scale) {
  return saturate<Scale, Out>(round_to<Scale>(code * scale));
}

template <class Scale, class Out>
KVLOOM_INLINE void store_value(Out* to, Floats x) {
  if constexpr (std::is_same_v<Scale, Half>) {
    store_normal(to, x);  // what is subnormal in float16 is not in float32
  } else {
    store(to, x);
  }
}

template <int kBits, class Scale, class Out>
void dequantize_row(const Row& row) {
  const char* in = static_cast<const char*>(row.in);
  const Scale* scales = static_cast<const Scale*>(row.in_scale);
  Out* out = static_cast<Out*>(row.out);
  const int64_t group = row.group;

  if (group < kLanes && kLanes % group == 0) {  // several groups in a vector
    const Ints group_of_lane = lane_numbers() >> __builtin_ctzll(group);
    const auto step = [&](int64_t i, int64_t count, int64_t groups) KVLOOM_INLINE_LAMBDA {
      const Floats scale = as<Floats>(permute(as<Ints>(load_some(scales, groups)), group_of_lane));
      scales += groups;
      const Floats x = value_of<Scale, Out>(load_codes<kBits>(in + i * kBits / 8, count), scale);
      if (count == kLanes) {
        store_value<Scale>(out + i, x);
      } else {
        store_some(out + i, x, count);
      }
    };
    const int64_t rest = row.count % kLanes, whole = row.count - rest, groups = kLanes / group;
    for (int64_t i = 0; i < whole; i += kLanes) step(i, kLanes, groups);
    if (rest != 0) step(whole, rest, rest / group);
    return;
  }

  for (int64_t first = 0; first < row.count; first += group) {
    const int64_t whole = group / kLanes * kLanes, rest = group - whole;
    const Floats scale = splat(load_some(scales++, 1)[0]);
    const char* codes = in + first * kBits / 8;
    Out* x = out + first;
    for (int64_t i = 0; i < whole; i += kLanes) {
      store_value<Scale>(x + i,
                         value_of<Scale, Out>(load_codes<kBits>(codes + i * kBits / 8, kLanes), scale));
    }
    if (rest != 0) {
      const Floats last = load_codes<kBits>(codes + whole * kBits / 8, rest);
      store_some(x + whole, value_of<Scale, Out>(last, scale), rest);
    }
  }
}

// --- which of them ----------------------------------------------------------------------------------------

template <int kBits>
struct Bits {
  static constexpr int value = kBits;
};

/// Calls `with` with a value of the float type that `type` names.
template <class With>
KVLOOM_INLINE Convert for_float(Type type, With with) {
  switch (type) {
    case Type::float32: return with(float{});
    case Type::float16: return with(Half{});
    case Type::bfloat16: return with(BFloat{});
    default: return nullptr;
  }
}

/// The conversion between the rows of a move, `nullptr` where the bits stay as they are.
inline Convert find_convert(Type from, Type to, Type scale) {
  if (from == to) return nullptr;
  const auto quantizing = [=](auto bits) {
    return for_float(from, [=](auto in) {
      return for_float(scale, [=](auto s) -> Convert {
        return quantize_row<decltype(in), decltype(bits)::value, decltype(s)>;
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
  if (to == Type::int8) return quantizing(Bits<8>{});
  if (to == Type::int4) return quantizing(Bits<4>{});
  if (from == Type::int8) return dequantizing(Bits<8>{});
  if (from == Type::int4) return dequantizing(Bits<4>{});
  return for_float(from, [=](auto in) {
    return for_float(to, [=](auto out) -> Convert { return cast_row<decltype(in), decltype(out)>; });
  });
}

}  // namespace kvloom::KVLOOM_ISA::rows
