// Floats of any type, and the address of each stored token.
#pragma once

#include "args.h"

#include <cmath>
#include <cstring>

#ifndef KVLOOM_ISA
#error "define KVLOOM_ISA, the namespace of this instruction set, before including the kernels"
#endif

// One namespace for each instruction set: the linker must not pick one unit's copy of a function for another.
namespace kvloom::KVLOOM_ISA {

using Index = std::int64_t;
using Byte = unsigned char;

constexpr Index kChunk = 64;        // tokens of one softmax step; chunks begin at multiples of it
constexpr Index kSplit = 512;       // tokens of one partial result; splits begin at multiples of it
constexpr Index kBlock = 16;        // tokens that are converted together

inline Index min(Index a, Index b) { return a < b ? a : b; }
inline Index max(Index a, Index b) { return a > b ? a : b; }
inline Index ceil_div(Index a, Index b) { return (a + b - 1) / b; }
inline Index round_up(Index a, Index b) { return ceil_div(a, b) * b; }

// --- floats of three types ---------------------------------------------------------------------------------

template <class T>
inline T bit_copy(const void* from) {
  T to;
  std::memcpy(&to, from, sizeof(T));
  return to;
}

inline float float_of_bits(std::uint32_t bits) { return bit_copy<float>(&bits); }
inline std::uint32_t bits_of_float(float x) { return bit_copy<std::uint32_t>(&x); }
inline float float_of_bf16(std::uint16_t x) { return float_of_bits(std::uint32_t{x} << 16); }

inline float float_of_f16(std::uint16_t x) {
  const std::uint32_t sign = std::uint32_t{x & 0x8000u} << 16, magnitude = x & 0x7fffu;
  if (magnitude >= 0x7c00u) return float_of_bits(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
  // 2^112 moves the exponent from one bias to the other, subnormals included.
  return float_of_bits(sign | bits_of_float(float_of_bits(magnitude << 13) * 0x1p112f));
}

inline std::uint16_t bf16_of_float(float x) {
  const std::uint32_t bits = bits_of_float(x);
  if (x != x) return 0x7fc0;
  return static_cast<std::uint16_t>((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);  // to nearest, ties to even
}

inline std::uint16_t f16_of_float(float x) {
  const std::uint32_t bits = bits_of_float(x), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<std::uint16_t>(sign | 0x7e00u);
  if (magnitude >= 0x477ff000u) return static_cast<std::uint16_t>(sign | 0x7c00u);  // 65520 and above
  if (magnitude < 0x38800000u) {  // below 2^-14: adding 0.5 leaves the subnormal's bits in the last place
    const float shifted = float_of_bits(magnitude) + 0.5f;
    return static_cast<std::uint16_t>(sign | (bits_of_float(shifted) - 0x3f000000u));
  }
  const std::uint32_t rounded = magnitude + 0xfffu + (magnitude >> 13 & 1);
  return static_cast<std::uint16_t>(sign | (rounded - 0x38000000u) >> 13);
}

inline float read_float(const void* data, DType dtype, Index i) {
  switch (dtype) {
    case DType::f16: return float_of_f16(static_cast<const std::uint16_t*>(data)[i]);
    case DType::bf16: return float_of_bf16(static_cast<const std::uint16_t*>(data)[i]);
    default: return static_cast<const float*>(data)[i];
  }
}

inline void write_float(void* data, DType dtype, Index i, float x) {
  switch (dtype) {
    case DType::f16: static_cast<std::uint16_t*>(data)[i] = f16_of_float(x); break;
    case DType::bf16: static_cast<std::uint16_t*>(data)[i] = bf16_of_float(x); break;
    default: static_cast<float*>(data)[i] = x;
  }
}

inline float read_code(const void* row, DType dtype, Index i) {
  if (dtype == DType::int8) return static_cast<const std::int8_t*>(row)[i];
  const int nibble = static_cast<const Byte*>(row)[i / 2] >> (i % 2 * 4) & 0xf;
  return static_cast<float>((nibble ^ 8) - 8);
}

inline float largest_finite(DType dtype) {
  return dtype == DType::f16 ? 65504.0f : float_of_bits(dtype == DType::bf16 ? 0x7f7f0000u : 0x7f7fffffu);
}

// x rounded to a type and back.
inline float round_to(DType dtype, float x) {
  if (dtype == DType::f16) return float_of_f16(f16_of_float(x));
  return dtype == DType::bf16 ? float_of_bf16(bf16_of_float(x)) : x;
}

// As round_to, but a finite product stays finite; NaN stays NaN.
inline float saturate_to(DType dtype, float x) {
  const float largest = largest_finite(dtype);
  return round_to(dtype, x > largest ? largest : x < -largest ? -largest : x);
}

// --- addresses ------------------------------------------------------------------------------------------------

inline Index bytes_of(DType dtype) {
  return dtype == DType::f32 ? 4 : dtype == DType::f16 || dtype == DType::bf16 ? 2 : 1;
}
inline Index stored_width(const CacheView& view) { return view.size[4] * view.size[5]; }
inline Index head_dim(const CacheSide& side) {
  return stored_width(side.cache) * (side.cache.dtype == DType::int4 ? 2 : 1);
}

// Division by a number that is a power of two more often than not, which a shift does ten times faster.
class Divisor {
 public:
  Divisor() = default;
  explicit Divisor(Index by) : by_(by) {
    while (shift_ < 62 && Index{1} << shift_ < by) ++shift_;
    is_power_ = Index{1} << shift_ == by;
  }
  Index quotient(Index x) const { return is_power_ ? x >> shift_ : x / by_; }  // of x >= 0
  Index size() const { return by_; }

 private:
  Index by_ = 1;
  int shift_ = 0;
  bool is_power_ = true;
};

inline bool row_is_contiguous(const CacheView& view) {
  const Index inner = view.size[5], outer = view.size[4];
  if (inner == 1) return outer == 1 || view.stride[4] == 1;
  return view.stride[5] == 1 && (outer == 1 || view.stride[4] == inner);
}

// The offset of each slot of a view: the three slot axes, merged where one stride serves two of them.
class SlotOffsets {
 public:
  SlotOffsets() = default;
  explicit SlotOffsets(const CacheView& view) {
    const Index width = bytes_of(view.dtype);
    for (int axis = 0; axis < 3; ++axis) {
      if (view.size[axis] == 1) continue;
      const Index size = view.size[axis], stride = view.stride[axis] * width;
      if (levels_ > 0 && stride_[levels_ - 1] == size * stride) {
        size_[levels_ - 1] *= size;
        stride_[levels_ - 1] = stride;
      } else {
        size_[levels_] = size;
        stride_[levels_++] = stride;
      }
    }
    if (levels_ > 1) inner_ = Divisor(size_[levels_ - 1]);
    if (levels_ > 2) middle_ = Divisor(size_[1]);
  }

  // Whether `count` slots, from each multiple of it on, lie at a stride of `bytes`.
  bool has_stride(Index count, Index bytes) const {
    return levels_ > 0 && stride_[levels_ - 1] == bytes && (levels_ == 1 || size_[levels_ - 1] % count == 0);
  }

  // Rows of `count` slots from `slot` on, where slot 0 is at `base`.
  void fill(const Byte* base, Index slot, Index count, const Byte** rows) const {
    const Index step = levels_ == 0 ? 0 : stride_[levels_ - 1];
    while (count > 0) {
      Index offset = slot * step, run = count;
      if (levels_ > 1) {
        const Index outer = inner_.quotient(slot), within = slot - outer * inner_.size();
        run = min(count, inner_.size() - within);
        offset = within * step;
        if (levels_ == 2) {
          offset += outer * stride_[0];
        } else {
          const Index block = middle_.quotient(outer);
          offset += block * stride_[0] + (outer - block * middle_.size()) * stride_[1];
        }
      }
      fill_run(base + offset, step, run, rows);
      rows += run;
      slot += run;
      count -= run;
    }
  }

 private:
  static void fill_run(const Byte* at, Index step, Index count, const Byte** rows) {
    typedef Index Eight __attribute__((vector_size(64)));
    const Eight lanes = {0, step, 2 * step, 3 * step, 4 * step, 5 * step, 6 * step, 7 * step};
    for (; count >= 8; count -= 8, rows += 8, at += 8 * step) {
      const Eight addresses = lanes + reinterpret_cast<Index>(at);
      std::memcpy(rows, &addresses, sizeof(addresses));
    }
    for (; count > 0; --count, at += step) *rows++ = at;
  }

  int levels_ = 0;
  Index size_[3] = {1, 1, 1};
  Index stride_[3] = {0, 0, 0};
  Divisor inner_, middle_;
};

// Codes in the order of integer dot products, a contiguous block for 16 tokens: keys as columns of four bytes of
// each token's vector, [.., D/4, 16, 4], values as quads of four tokens for each byte of a vector, [4, D, 4].
enum class NativeOrder { none, columns, quads };

inline NativeOrder native_order(const CacheView& view) {
  if (bytes_of(view.dtype) != 1) return NativeOrder::none;
  const std::int64_t *size = view.size, *stride = view.stride;
  const bool is_columns = size[5] == 4 && stride[5] == 1 && size[2] % kBlock == 0 && stride[2] == 4 &&
                          (size[4] == 1 || stride[4] == 4 * kBlock);
  const bool is_quads = size[5] == 1 && stride[4] == 4 && size[2] == 4 && stride[2] == 1 && size[1] % 4 == 0 &&
                        stride[1] == 4 * size[4];
  return is_columns ? NativeOrder::columns : is_quads ? NativeOrder::quads : NativeOrder::none;
}

// The stored tokens of one sequence, as runs of consecutive slots.
class TokenSlots {
 public:
  TokenSlots(const PageTable& table, Index sequence)
      : entries_(table.entries + table.rows[sequence]), page_size_(table.page_size) {}

  Index page_size() const { return page_size_.size(); }

  template <class Visit>  // Visit(token, slot, count)
  void runs(Index token, Index count, Visit visit) const {
    Index page = page_size_.quotient(token), within = token - page * page_size_.size();
    while (count > 0) {
      const Index run = min(count, page_size_.size() - within);
      visit(token, entries_[page] + within, run);
      token += run;
      count -= run;
      within = 0;
      ++page;
    }
  }

 private:
  const Index* entries_;
  Divisor page_size_;
};

// The layout of the keys or values of one call.
struct SideLayout {
  // `native` is the order that the kernels of this side read in place.
  SideLayout(const CacheSide& side, NativeOrder native)
      : cache(side.cache), scale(side.scale), dim(head_dim(side)), offsets(side.cache) {
    row_bytes = stored_width(cache) * bytes_of(cache.dtype);
    rows_in_line = max(64 / row_bytes, 1);
    order = native_order(cache) == native ? native : NativeOrder::none;
    is_contiguous = row_is_contiguous(cache);
    scale_is_contiguous = !scale.data || row_is_contiguous(scale);
    heads_are_contiguous = head_bytes() == row_bytes;
    if (scale.data) {
      num_groups = stored_width(scale);
      group = dim / num_groups;
      scale_offsets = SlotOffsets(scale);
      const Index bytes = num_groups * bytes_of(scale.dtype);
      block_scales_are_contiguous = scale_is_contiguous && scale_offsets.has_stride(kBlock, bytes);
      head_scales_are_contiguous = scale_is_contiguous && scale_head_bytes() == bytes;
      const Index per_group = row_bytes / num_groups;
      for (Index g = 0; g < num_groups; ++g)
        for (Index i = g * per_group; i < (g + 1) * per_group; ++i) group_of_byte[i] = static_cast<std::int32_t>(g);
    }
  }

  Index head_bytes() const { return cache.stride[3] * bytes_of(cache.dtype); }
  Index scale_head_bytes() const { return scale.stride[3] * bytes_of(scale.dtype); }
  // The beginning of the native block whose token number `i` is at `row`.
  const Byte* block_of(const Byte* row, Index i) const {
    return row - (order == NativeOrder::columns ? 4 * i : i / 4 * 4 * row_bytes + i % 4);
  }
  // The offset of stored element i in its row, in elements.
  static Index element(const CacheView& view, Index i) {
    return i / view.size[5] * view.stride[4] + i % view.size[5] * view.stride[5];
  }

  const CacheView& cache;
  const CacheView& scale;
  Index dim, row_bytes, rows_in_line;
  Index num_groups = 0, group = 0;
  alignas(64) std::int32_t group_of_byte[kMaxHeadDim + kBlock];
  NativeOrder order;
  bool is_contiguous, scale_is_contiguous;   // a row
  bool heads_are_contiguous;                 // the rows of a token
  bool head_scales_are_contiguous = false;   // the scales of a token
  bool block_scales_are_contiguous = false;  // the scales of a block of tokens
  SlotOffsets offsets, scale_offsets;
};

// Rows of one head for the tokens [begin, end) of one chunk.
struct ChunkAddresses {
  Index begin = 0, end = 0;
  bool in_blocks = false;  // slots of each block of tokens follow one another, from a multiple of kBlock on
  const Byte* row[kChunk];
  const Byte* scale[kChunk] = {};

  void find(const TokenSlots& slots, const SideLayout& side, Index head, Index token, Index tokens) {
    begin = token % kChunk, end = begin + tokens;
    const Byte* codes = static_cast<const Byte*>(side.cache.data) + head * side.head_bytes();
    const Byte* scales = static_cast<const Byte*>(side.scale.data);
    if (scales) scales += head * side.scale_head_bytes();
    in_blocks = slots.page_size() % kBlock == 0;
    slots.runs(token, tokens, [&](Index at, Index slot, Index run) {
      in_blocks &= (slot - at) % kBlock == 0;
      side.offsets.fill(codes, slot, run, row + (at - token + begin));
      if (scales) side.scale_offsets.fill(scales, slot, run, scale + (at - token + begin));
    });
    // Kernels may read the others, too.
    for (Index t = 0; t < kChunk; ++t)
      if (t < begin || t >= end) row[t] = row[begin], scale[t] = scale[begin];
  }

  void repeat(const ChunkAddresses& other) {
    begin = end = 0;
    in_blocks = other.in_blocks;
    std::memcpy(row, other.row, sizeof row);
    std::memcpy(scale, other.scale, sizeof scale);
  }
};

}  // namespace kvloom::KVLOOM_ISA
