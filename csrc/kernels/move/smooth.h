// Smoothing of keys, and of queries for them: an offset that turns with the position, factors, a rotation.
// Everything is float32 and rounded once; a row's bits depend on nothing but the row, its head and position.
#pragma once

#include "../attend/waves.h"
#include "rotate.h"
#include "smooth_args.h"

namespace kvloom::KVLOOM_ISA {

constexpr Index kMaxSmoothed = 4096;  // elements of a row
constexpr Index kMaxSmoothedPairs = 64;

// Adds `sign` times the offset at a position.
inline void add_offset(const KeyOffset& offset, Index head, int64_t position, float sign, float* x) {
  alignas(64) float cos[kMaxSmoothedPairs], sin[kMaxSmoothedPairs];
  const Index pairs = offset.num_pairs;
  for (Index i = 0; i < pairs; i += kLanes) {
    const Waves waves = waves_at(offset.turns + head * pairs + i, static_cast<uint64_t>(position));
    store(cos + i, waves.cos);
    store(sin + i, waves.sin);
  }
  const float* mean = offset.mean + 2 * head * pairs;
  const int64_t* channels = offset.channels + 2 * head * pairs;
  for (Index i = 0; i < pairs; ++i) {
    const float a = mean[2 * i], b = mean[2 * i + 1];
    x[channels[2 * i]] += sign * (a * cos[i] - b * sin[i]);
    x[channels[2 * i + 1]] += sign * (a * sin[i] + b * cos[i]);
  }
}

// Of a query, what its products with stored keys lack: coefficients of cosines, then of sines.
inline void find_coefficients(const KeyOffset& offset, Index head, const float* x, float* to) {
  const Index pairs = offset.num_pairs;
  const float* mean = offset.mean + 2 * head * pairs;
  const int64_t* channels = offset.channels + 2 * head * pairs;
  for (Index i = 0; i < pairs; ++i) {
    const float a = mean[2 * i], b = mean[2 * i + 1];
    const float first = x[channels[2 * i]], second = x[channels[2 * i + 1]];
    to[i] = first * a + second * b;
    to[pairs + i] = second * a - first * b;
  }
}

inline void multiply(float* x, const float* factor, Index count) {
  Index i = 0;
  for (; i + kLanes <= count; i += kLanes) store(x + i, load(x + i) * load(factor + i));
  for (; i < count; ++i) x[i] *= factor[i];
}

// Rounded to T: what is finite stays finite.
template <class T>
KVLOOM_INLINE Vec finished(Vec x) {
  return x - x == 0 ? saturate<T>(x) : x;
}
template <class T>
inline void finish(const float* x, T* to, Index count) {
  Index i = 0;
  for (; i + kLanes <= count; i += kLanes) store(to + i, finished<T>(load(x + i)));
  if (i < count) store_partial(to + i, finished<T>(load_partial(x + i, count - i)), count - i);
}

template <class T>
void smooth_rows(const SmoothArgs& args, Index begin, Index end) {
  alignas(64) float x[kMaxSmoothed];
  const KeyOffset& offset = args.offset;
  const Index count = args.head_dim;
  for (Index row = begin; row < end; ++row) {
    const Index at[3] = {row / args.size[2] / args.size[1], row / args.size[2] % args.size[1],
                         row % args.size[2]};
    Index from = 0, to = 0;
    for (int i = 0; i < 3; ++i) from += at[i] * args.stride[i], to += at[i] * args.to_stride[i];
    const Index head = at[args.head_axis] / args.heads_per_head;
    const float* factor = args.factor + head * count;
    T* result = reinterpret_cast<T*>(args.to) + to;
    cast(reinterpret_cast<const T*>(args.from) + from, x, count);
    if (args.is_restored && args.block) rotate_row(x, x, count, args.block, args.root);
    if (args.coefficients) find_coefficients(offset, head, x, args.coefficients + row * 2 * offset.num_pairs);
    const int64_t position = args.positions ? args.positions[at[0] * args.size[2] + at[2]] : 0;
    const bool has_offset = args.positions && offset.num_pairs;
    if (has_offset && !args.is_restored) add_offset(offset, head, position, -1.0f, x);
    multiply(x, factor, count);
    if (has_offset && args.is_restored) add_offset(offset, head, position, 1.0f, x);
    if (!args.is_restored && args.block) {
      rotate_row(x, result, count, args.block, args.root);
    } else {
      finish(x, result, count);
    }
  }
}

// Rows `[begin, end)`.
inline void smooth(const SmoothArgs& args, Index begin, Index end) {
  for_float(args.dtype, [&]<class T>(T) { smooth_rows<T>(args, begin, end); });
}

}  // namespace kvloom::KVLOOM_ISA
