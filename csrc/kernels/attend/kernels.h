// Choice of the kernel for each dtype, on this instruction set.
#pragma once

#include "code_keys.h"
#include "code_values.h"

#if defined(__AVX512BF16__) && defined(__AVX512VNNI__)
#include "bf16_codes.h"
#include "digits.h"
#define KVLOOM_HAS_BF16 1
#define KVLOOM_HAS_DIGITS 1
#ifdef KVLOOM_HAS_TILES
#include "tile_chunk.h"
#endif
#elif defined(__ARM_FEATURE_DOTPROD)
#include "neon_digits.h"
#define KVLOOM_HAS_DIGITS 1
#endif

namespace kvloom::KVLOOM_ISA {

struct ScoreKernel {
  void (*pack)(const SideLayout& side, const float* query, Index num_rows, Index width, Byte* packed);
  void (*run)(const ChunkRows& chunk, const ScoreTask& task);
};
using ValueKernel = void (*)(const ChunkRows& chunk, const ValueTask& task);

inline void pack_nothing(const SideLayout&, const float*, Index, Index, Byte*) {}

// Whether rows are read without a float32 copy: those of the query's own dtype, and all floats for a float32
// query, since nothing is rounded.
inline bool is_direct(const SideLayout& side, DType query_dtype) {
  return !side.scale.data && (side.cache.dtype == query_dtype || query_dtype == DType::f32) &&
         side.dim % kBlock == 0;
}

// Whether the kernels of codes support this side: groups begin with a column of keys, rows fill vectors.
inline bool uses_code_kernels(const SideLayout& side) {
  return side.scale.data && side.num_groups <= kMaxGroups && side.row_bytes % 16 == 0 &&
         side.row_bytes % (4 * side.num_groups) == 0;
}

// Calls choice.template operator()<is_int4, Rounded>() for the codes of `side`.
template <class Choice>
inline auto choose_codes(const SideLayout& side, DType query_dtype, Choice choice) {
  const bool is_int4 = side.dtype == DType::int4;
  const auto choose = [&]<class Rounded>(Rounded) {
    return is_int4 ? choice.template operator()<true, Rounded>()
                   : choice.template operator()<false, Rounded>();
  };
  if (!is_coarser(side.scale.dtype, query_dtype)) return choose(Unrounded{});
  return side.scale.dtype == DType::f16 ? choose(RoundedTo<Half>{}) : choose(RoundedTo<BFloat>{});
}

#ifdef KVLOOM_HAS_BF16
// Whether codes are dequantized to bfloat16: digits of weights, and scaling sums, pay only for long groups.
inline bool uses_bf16_code_kernels(const SideLayout& side, DType query_dtype) {
  return uses_code_kernels(side) && query_dtype == DType::bf16 && side.group % 32 != 0 && side.dim % 64 == 0;
}

// The kernels of bfloat16 numbers, and of codes that are dequantized to them.
#ifdef KVLOOM_HAS_TILES
template <bool is_int4>
constexpr ScoreKernel kScoreCodes{pack_in_tiles, score_in_tiles<DequantizedBlocks<is_int4>>};
template <bool is_int4>
constexpr ValueKernel kValueCodes = value_in_tiles<DequantizedBlocks<is_int4>>;
constexpr ScoreKernel kScoreBf16{pack_in_tiles, score_in_tiles<StoredBlocks>};
constexpr ValueKernel kValueBf16 = value_in_tiles<StoredBlocks>;
constexpr Index kValueBf16Dims = 32;
#else
template <bool is_int4>
constexpr ScoreKernel kScoreCodes{pack_bf16, score_codes_bf16<is_int4>};
template <bool is_int4>
constexpr ValueKernel kValueCodes = value_codes_bf16<is_int4>;
constexpr ScoreKernel kScoreBf16{pack_bf16, score_bf16};
constexpr ValueKernel kValueBf16 = value_bf16;
constexpr Index kValueBf16Dims = 64;
#endif
#endif

#ifdef KVLOOM_HAS_DIGITS
// Integer digits are finer than a 16-bit query.
inline bool uses_digit_kernels(const SideLayout& side, DType query_dtype) {
  return uses_code_kernels(side) && query_dtype != DType::f32 && !is_coarser(side.scale.dtype, query_dtype);
}
#endif

inline ScoreKernel choose_score(const SideLayout& key, DType query_dtype) {
#ifdef KVLOOM_HAS_BF16
  if (uses_bf16_code_kernels(key, query_dtype))
    return key.dtype == DType::int4 ? kScoreCodes<true> : kScoreCodes<false>;
  if (is_direct(key, query_dtype) && query_dtype == DType::bf16 && key.dim % 32 == 0) return kScoreBf16;
#endif
#ifdef KVLOOM_HAS_DIGITS
  if (uses_digit_kernels(key, query_dtype))
    return {pack_digits, key.dtype == DType::int4 ? score_digits<true> : score_digits<false>};
#endif
  if (uses_code_kernels(key))
    return choose_codes(key, query_dtype, []<bool is_int4, class Rounded>() {
      return ScoreKernel{pack_nothing, score_codes<is_int4, Rounded>};
    });
  if (!is_direct(key, query_dtype)) return {pack_nothing, score_wide};
  return for_float(key.cache.dtype, []<class T>(T) { return ScoreKernel{pack_nothing, score_direct<T>}; });
}

inline ValueKernel choose_value(const SideLayout& value, DType query_dtype) {
#ifdef KVLOOM_HAS_BF16
  if (is_direct(value, query_dtype) && query_dtype == DType::bf16 && value.dim % kValueBf16Dims == 0)
    return kValueBf16;
  if (uses_bf16_code_kernels(value, query_dtype))
    return value.dtype == DType::int4 ? kValueCodes<true> : kValueCodes<false>;
#endif
#ifdef KVLOOM_HAS_DIGITS
  if (uses_digit_kernels(value, query_dtype) && value.group % 32 == 0)
    return value.dtype == DType::int4 ? value_digits<true> : value_digits<false>;
#endif
  if (uses_code_kernels(value))
    return choose_codes(value, query_dtype, []<bool is_int4, class Rounded>() -> ValueKernel {
      return value_codes<is_int4, Rounded>;
    });
  if (!is_direct(value, query_dtype)) return value_wide;
  return for_float(value.cache.dtype, []<class T>(T) -> ValueKernel { return value_direct<T>; });
}

}  // namespace kvloom::KVLOOM_ISA
