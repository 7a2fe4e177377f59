// Head vectors into other axes and another order of RoPE's pairs, and their largest exponent, in one pass.
#pragma once

#include "../base/vectors.h"
#include "arrange_args.h"

namespace kvloom::KVLOOM_ISA {

template <class T>
constexpr T kMagnitude = static_cast<T>(~(T{1} << (sizeof(T) * 8 - 1)));  // all bits but the sign

// The larger of `largest` and the bits of a magnitude, which are in the order of magnitudes.
template <class T>
KVLOOM_INLINE T larger(T largest, T x) {
  const T magnitude = x & kMagnitude<T>;
  return magnitude > largest ? magnitude : largest;
}

// A vector whose elements are adjacent on both sides.
template <class T>
KVLOOM_INLINE T arrange_row(const T* __restrict from, T* __restrict to, Index head_dim, Index rotary,
                            bool to_adjacent, T largest) {
  const Index half = rotary / 2;
  if (to_adjacent) {
    for (Index i = 0; i < half; ++i) {
      const T first = from[i], second = from[half + i];
      to[2 * i] = first, to[2 * i + 1] = second;
      largest = larger(larger(largest, first), second);
    }
  } else {
    for (Index i = 0; i < half; ++i) {
      const T first = from[2 * i], second = from[2 * i + 1];
      to[i] = first, to[half + i] = second;
      largest = larger(larger(largest, first), second);
    }
  }
  for (Index i = rotary; i < head_dim; ++i) {
    to[i] = from[i];
    largest = larger(largest, from[i]);
  }
  return largest;
}

template <class T>
using Square [[gnu::vector_size(16)]] = T;  // a row of a square of 4, 8 or 16 elements on a side

// A square of elements, its rows and columns exchanged.
template <class T>
KVLOOM_INLINE T transpose_square(const T* from, Index from_stride, T* to, Index to_stride, T largest) {
  constexpr int kSide = 16 / sizeof(T);
  Square<T> rows[kSide], mixed[kSide], most{};
  KVLOOM_UNROLL(16)
  for (int i = 0; i < kSide; ++i) {
    __builtin_memcpy(&rows[i], from + i * from_stride, 16);
    const Square<T> magnitude = rows[i] & kMagnitude<T>;
    most = magnitude > most ? magnitude : most;
  }
  KVLOOM_UNROLL(4)
  for (int done = 1; done < kSide; done *= 2) {  // each step moves a bit of the row into the column
    KVLOOM_UNROLL(16)
    for (int i = 0; i < kSide / 2; ++i) {
      mixed[2 * i] = interleave_low(rows[i], rows[i + kSide / 2]);
      mixed[2 * i + 1] = interleave_high(rows[i], rows[i + kSide / 2]);
    }
    KVLOOM_UNROLL(16)
    for (int i = 0; i < kSide; ++i) rows[i] = mixed[i];
  }
  KVLOOM_UNROLL(16)
  for (int i = 0; i < kSide; ++i) __builtin_memcpy(to + i * to_stride, &rows[i], 16);
  for (int i = 0; i < kSide; ++i) largest = larger(largest, T(most[i]));
  return largest;
}

constexpr Index kTransposed = 32;  // rows and columns on a side of a tile: whole cache lines on either side

// Rows `[rows, columns]`, each of adjacent elements, become columns, in tiles of whole cache lines.
template <class T>
T transpose(const T* from, Index from_stride, T* to, Index to_stride, Index rows, Index columns, T largest) {
  constexpr Index kSide = 16 / sizeof(T);
  for (Index column = 0; column < columns; column += kTransposed) {
    const Index last_column = min(columns, column + kTransposed);
    for (Index row = 0; row < rows; row += kTransposed) {
      const Index last_row = min(rows, row + kTransposed);
      for (Index c = column; c < last_column; c += kSide) {
        for (Index r = row; r < last_row; r += kSide) {
          const T* source = from + r * from_stride + c;
          T* target = to + c * to_stride + r;
          if (r + kSide <= last_row && c + kSide <= last_column) {
            largest = transpose_square(source, from_stride, target, to_stride, largest);
            continue;
          }
          for (Index i = 0; i < min(kSide, last_row - r); ++i) {
            for (Index k = 0; k < min(kSide, last_column - c); ++k) {
              target[k * to_stride + i] = source[i * from_stride + k];
              largest = larger(largest, source[i * from_stride + k]);
            }
          }
        }
      }
    }
  }
  return largest;
}

// Vectors one element after the other, where the elements of either side are not adjacent and pairs move.
template <class T>
T arrange_elements(const ArrangeArgs& args, const T* from, T* to, T largest) {
  const Index half = args.rotary / 2;
  for (Index token = 0; token < args.size[0]; ++token) {
    for (Index i = 0; i < args.size[2]; ++i) {
      Index at = i;  // where it comes from
      if (i < args.rotary) at = args.to_adjacent ? i % 2 * half + i / 2 : i % half * 2 + i / half;
      const T x = from[token * args.from_stride[0] + at * args.from_stride[2]];
      to[token * args.to_stride[0] + i * args.to_stride[2]] = x;
      largest = larger(largest, x);
    }
  }
  return largest;
}

// Vectors whose elements are adjacent on both sides, in the order of the source, which is read ahead then.
template <class T>
T arrange_rows(const ArrangeArgs& args, const T* from, T* to, T largest) {
  const bool by_token = args.from_stride[0] >= args.from_stride[1];
  const int outer = by_token ? 0 : 1, inner = 1 - outer;
  for (Index i = 0; i < args.size[outer]; ++i) {
    for (Index k = 0; k < args.size[inner]; ++k) {
      largest = arrange_row(from + i * args.from_stride[outer] + k * args.from_stride[inner],
                            to + i * args.to_stride[outer] + k * args.to_stride[inner], args.size[2],
                            args.rotary, args.to_adjacent, largest);
    }
  }
  return largest;
}

// All tokens of one head.
template <class T>
T arrange_head(const ArrangeArgs& args, const T* from, T* to, T largest) {
  const Index tokens = args.size[0], head_dim = args.size[2];
  const Index *from_stride = args.from_stride, *to_stride = args.to_stride;
  if (args.rotary == 0 && from_stride[2] == 1 && to_stride[0] == 1) {
    return transpose(from, from_stride[0], to, to_stride[2], tokens, head_dim, largest);
  }
  if (args.rotary == 0 && from_stride[0] == 1 && to_stride[2] == 1) {
    return transpose(from, from_stride[2], to, to_stride[0], head_dim, tokens, largest);
  }
  return arrange_elements(args, from, to, largest);
}

template <class T>
T arrange_all(const ArrangeArgs& args) {
  const T* from = reinterpret_cast<const T*>(args.from);
  T* to = reinterpret_cast<T*>(args.to);
  T largest = 0;
  if (args.from_stride[2] == 1 && args.to_stride[2] == 1) return arrange_rows(args, from, to, largest);
  for (Index head = 0; head < args.size[1]; ++head) {
    largest = arrange_head(args, from + head * args.from_stride[1], to + head * args.to_stride[1], largest);
  }
  return largest;
}

// The bits of the largest magnitude.
inline int32_t arrange(const ArrangeArgs& args) {
  return args.itemsize == 4   ? arrange_all<int32_t>(args)
         : args.itemsize == 2 ? arrange_all<int16_t>(args)
                              : arrange_all<int8_t>(args);
}

}  // namespace kvloom::KVLOOM_ISA
