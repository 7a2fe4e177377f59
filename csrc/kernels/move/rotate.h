// Head vectors times a Hadamard matrix, in float32, with the bits of the reference: sums in its order.
#pragma once

#include "../attend/arithmetic.h"
#include "../base/floats.h"
#include "rotate_args.h"

namespace kvloom::KVLOOM_ISA {

// Sums and differences of lanes `kStep` apart.
template <int kStep>
KVLOOM_INLINE Vec butterfly(Vec x) {
  const Vec signs = (lane_numbers() & kStep) == 0 ? splat(1.0f) : splat(-1.0f);
  return multiply_add(x, signs, shuffle(x, x, [](int lane) { return lane ^ kStep; }));  // exact: by 1 or -1
}

KVLOOM_INLINE Vec butterflies_within(Vec x) {
  x = butterfly<2>(butterfly<1>(x));
  if constexpr (kLanes > 4) x = butterfly<4>(x);
  if constexpr (kLanes > 8) x = butterfly<8>(x);
  return x;
}

// Sums and differences of `count` elements, a power of two, 1, 2, 4 and so on apart.
template <class X, class Count>
KVLOOM_INLINE void butterflies_between(X* x, Count count) {
  for (Index step = 1; step < count; step *= 2) {
    for (Index i = 0; i < count; ++i) {
      if (i & step) continue;
      const X a = x[i], b = x[i + step];
      x[i] = a + b;
      x[i + step] = a - b;
    }
  }
}

// NaN where a sum is not finite: dividing first, no sum of finite numbers overflows.
template <class T>
KVLOOM_INLINE Vec rotated(Vec sum, Vec root) {
  return sum - sum == 0 ? saturate<T>(sum * root) : splat(__builtin_nanf(""));
}

// Writes `rotated` numbers.
template <class T>
KVLOOM_INLINE void store_rotated(T* to, Vec sum, Vec root) {
  if (Vec x = sum * root; rounds_simply<T>(x)) return store_normal(to, saturate<T>(x));
  store(to, rotated<T>(sum, root));
}

// `count` vectors, a power of two, in registers if their number is known.
template <class Load, class Store, class Count>
KVLOOM_INLINE void rotate_vectors(Index first, Vec* x, Count count, Vec part, Load load, Store store) {
  for (Index i = 0; i < count; ++i) x[i] = butterflies_within(load(first + i * kLanes) * part);
  butterflies_between(x, count);
  for (Index i = 0; i < count; ++i) store(first + i * kLanes, x[i]);
}

// Blocks of whole vectors, which `load` gives and whose sums `store` takes, both by their first element.
template <class Load, class Store>
KVLOOM_INLINE void rotate_blocks(Index head_dim, Index block, Load load, Store store) {
  alignas(64) Vec x[kMaxRotated / kLanes];
  const Index count = block / kLanes;
  const Vec part = splat(1.0f / block);
  for (Index i = 0; i < head_dim; i += block) {
    switch (count) {
      case 4: rotate_vectors(i, x, 4, part, load, store); break;
      case 8: rotate_vectors(i, x, 8, part, load, store); break;
      default: rotate_vectors(i, x, count, part, load, store);
    }
  }
}

// A block that is shorter than a vector.
template <class From, class T>
KVLOOM_INLINE void rotate_few(const From* from, T* to, Index block, Vec part, Vec root) {
  float x[kLanes] = {};
  store(x, load_partial(from, block) * part);
  butterflies_between(x, block);
  store_partial(to, rotated<T>(load(x), root), block);
}

// A row, block by block. A block may take the place of what it is made from.
template <class From, class T>
KVLOOM_INLINE void rotate_row(const From* from, T* to, Index head_dim, Index block, float root_of_block) {
  const Vec part = splat(1.0f / block), root = splat(root_of_block);
  if (block < kLanes) {
    for (Index i = 0; i < head_dim; i += block) rotate_few(from + i, to + i, block, part, root);
    return;
  }
  rotate_blocks(
      head_dim, block, [=](Index i) KVLOOM_INLINE_LAMBDA { return load(from + i); },
      [=](Index i, Vec sum) KVLOOM_INLINE_LAMBDA { store_rotated(to + i, sum, root); });
}

template <class T>
void rotate_rows(const RotateArgs& args, Index begin, Index end) {
  for (Index row = begin; row < end; ++row) {
    const Index inner = row % args.size[2], outer = row / args.size[2];
    const T* from = reinterpret_cast<const T*>(args.from) + inner * args.stride[2] +
                    outer % args.size[1] * args.stride[1] + outer / args.size[1] * args.stride[0];
    T* to = reinterpret_cast<T*>(args.to) + row * args.head_dim;
    rotate_row(from, to, args.head_dim, args.block, args.root);
  }
}

// Rows `[begin, end)`.
inline void rotate(const RotateArgs& args, Index begin, Index end) {
  for_float(args.dtype, [&]<class T>(T) { rotate_rows<T>(args, begin, end); });
}

}  // namespace kvloom::KVLOOM_ISA
