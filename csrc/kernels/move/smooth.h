// Smoothing of keys, and of queries for them: an offset that is rotated by the position, factors, a rotation.
// Everything is float32 and rounded once; a row's bits depend on nothing but the row, its head and position.
#pragma once

#include "../attend/waves.h"
#include "rotate.h"
#include "smooth_args.h"

namespace kvloom::KVLOOM_ISA {

constexpr Index kMaxSmoothed = 4096;  // elements of a row
constexpr Index kPairsAtOnce = 1024;  // pairs whose waves are kept
constexpr Index kTokensAtOnce = 32;

// --- the offset --------------------------------------------------------------------------------------------

// Rotated offsets, subtracted from the pairs of some heads at some positions.
struct TurnedPairs {
  alignas(64) float first[kPairsAtOnce + kLanes], second[kPairsAtOnce + kLanes];
};

// Rotates `count` pairs from `from` on to a position; `sign` is 1, or -1 where the offset is to be added.
inline void turn_pairs(const KeyOffset& offset, Index from, Index count, int64_t position, float sign,
                       float* first, float* second) {
  for (Index i = 0; i < count; i += kLanes) {
    const Waves waves = waves_at(offset.turns + from + i, static_cast<uint64_t>(position));
    const Vec a = load(offset.first + from + i), b = load(offset.second + from + i);
    store(first + i, (a * waves.cos - b * waves.sin) * sign);
    store(second + i, (a * waves.sin + b * waves.cos) * sign);
  }
}

// Lanes of two vectors in their places, at most kLanes pairs; 0 where the mask is.
KVLOOM_INLINE Vec placed(Vec first, Vec second, IntVec place, IntVec mask) {
#if defined(__AVX512F__)
  const Vec x = as<Vec>(_mm512_permutex2var_ps(as<__m512>(first), as<__m512i>(place), as<__m512>(second)));
#elif defined(__AVX2__)  // which reads three bits of a lane's index
  const Vec x = place < 0 ? permute(second, place) : permute(first, place);
#else
  const IntVec lane = place & (kLanes - 1);
  const Vec x = place < 0 ? permute(second, lane) : permute(first, lane);
#endif
  return as<Vec>(as<IntVec>(x) & mask);
}

// Coefficients of a query for the part that its products with stored keys miss: of cosines, then of sines.
template <class T>
void find_coefficients(const KeyOffset& offset, Index head, const T* x, float* to) {
  const Index pairs = offset.num_pairs, from = head * pairs;
  const int64_t* channels = offset.channels + 2 * from;
  for (Index i = 0; i < pairs; ++i) {
    const float a = offset.first[from + i], b = offset.second[from + i];
    const float first = load_partial(x + channels[2 * i], 1)[0];
    const float second = load_partial(x + channels[2 * i + 1], 1)[0];
    to[i] = first * a + second * b;
    to[pairs + i] = second * a - first * b;
  }
}

// --- a row -------------------------------------------------------------------------------------------------

// Rounded to T: what is finite stays finite.
template <class T>
KVLOOM_INLINE Vec finished(Vec x) {
  if constexpr (std::is_same_v<T, float>) return x;
  return x - x == 0 ? saturate<T>(x) : x;
}
template <class T>
KVLOOM_INLINE void store_finished(T* to, Vec x) {
  if (rounds_simply<T>(x)) return store_normal(to, saturate<T>(x));
  store(to, finished<T>(x));
}

// Writes `count` elements, whole vectors that `at` gives: what is finite stays finite. Beyond the largest T
// is hardly ever one, so a row is asked at once; not in place, where `at` gives each vector only once.
template <class T, class At>
KVLOOM_INLINE void store_row(T* to, Index count, bool in_place, At at) {
  if (std::is_same_v<T, float> || kRoundsSimply<T> || in_place) {
    for (Index i = 0; i < count; i += kLanes) store_finished(to + i, at(i));
  } else {
    IntVec largest{};
    for (Index i = 0; i < count; i += kLanes) {
      const Vec x = at(i);
      largest = maximum(largest, as<IntVec>(x) & 0x7fffffff);
      store_finite(to + i, x);
    }
    if (!has_any(largest > bit_copy<int32_t>(&kLargest<T>))) return;
    for (Index i = 0; i < count; i += kLanes) store_finished(to + i, at(i));
  }
}

// A row of one head, and what it is made with.
template <class T>
struct SmoothRow {
  const T* from;
  T* to;
  const float* factor;
  Index head;
  const float *first, *second;  // of each pair of the head, to be subtracted
};

// Prefetches the elements at a distance after the row.
template <class T>
KVLOOM_INLINE void prefetch_row(const SmoothRow<T>& row, Index count, Index distance) {
  const Byte* at = reinterpret_cast<const Byte*>(row.from + distance);
  for (Index i = 0; i < count * Index(sizeof(T)); i += 64) __builtin_prefetch(at + i, 0, 2);
}

// Smooths a row of whole vectors, in registers.
template <bool kIsRestored, bool kHasOffset, class T>
KVLOOM_INLINE void smooth_vectors(const SmoothArgs& args, const SmoothRow<T>& row) {
  const Vec first = kHasOffset ? load(row.first) : Vec{}, second = kHasOffset ? load(row.second) : Vec{};
  const Vec root = splat(args.root);
  const Index count = args.head_dim;
  const Index of_head = row.head * count;
  const auto at = [=](Index i) KVLOOM_INLINE_LAMBDA { return load(row.from + i); };
  const auto without_offset = [=, &args](Vec x, Index i) KVLOOM_INLINE_LAMBDA {
    if constexpr (!kHasOffset) return x;
    const auto mask = bit_copy<IntVec>(args.offset.masks + of_head + i);
    if (!has_any(mask)) return x;
    return x - placed(first, second, bit_copy<IntVec>(args.offset.places + of_head + i), mask);
  };
  const auto smoothed = [=](Index i)
                            KVLOOM_INLINE_LAMBDA { return without_offset(at(i), i) * load(row.factor + i); };
  const auto restored = [=](Vec x, Index i)
                            KVLOOM_INLINE_LAMBDA { return without_offset(x * load(row.factor + i), i); };
  if constexpr (kIsRestored) {
    if (args.block) {
      rotate_blocks(count, args.block, at, [=](Index i, Vec sum) KVLOOM_INLINE_LAMBDA {
        store_finished(row.to + i, restored(rotated<float>(sum, root), i));
      });
    } else {
      store_row(row.to, count, row.to == row.from,
                [=](Index i) KVLOOM_INLINE_LAMBDA { return restored(at(i), i); });
    }
  } else if (args.block) {
    rotate_blocks(count, args.block, smoothed,
                  [=](Index i, Vec sum) KVLOOM_INLINE_LAMBDA { store_rotated(row.to + i, sum, root); });
  } else {
    store_row(row.to, count, row.to == row.from, smoothed);
  }
}

// Smooths a row of any number of elements and pairs.
template <class T>
void smooth_any(const SmoothArgs& args, const SmoothRow<T>& row) {
  alignas(64) float x[kMaxSmoothed];
  const Index count = args.head_dim, pairs = row.first ? args.offset.num_pairs : 0;
  const int64_t* channels = args.offset.channels + 2 * row.head * pairs;
  const auto subtract_offset = [&] {
    for (Index i = 0; i < pairs; ++i) {
      x[channels[2 * i]] -= row.first[i];
      x[channels[2 * i + 1]] -= row.second[i];
    }
  };
  cast(row.from, x, count);
  if (args.is_restored && args.block) rotate_row(x, x, count, args.block, args.root);
  if (!args.is_restored) subtract_offset();
  for (Index i = 0; i < count; ++i) x[i] *= row.factor[i];
  if (args.is_restored) subtract_offset();
  if (!args.is_restored && args.block) return rotate_row(x, row.to, count, args.block, args.root);
  Index i = 0;
  for (; i + kLanes <= count; i += kLanes) store_finished(row.to + i, load(x + i));
  if (i < count) store_partial(row.to + i, finished<T>(load_partial(x + i, count - i)), count - i);
}

// --- all of them -------------------------------------------------------------------------------------------

// Smooths tokens `[begin, end)` of all sequences: computes waves of some tokens and of the heads that fit,
// then these rows in the order in which they are read.
template <class T, class SmoothOne>
void smooth_tokens(const SmoothArgs& args, Index begin, Index end, SmoothOne smooth_one) {
  const bool has_offset = args.positions.data != nullptr;
  const Index heads = args.size[1], pairs = has_offset ? args.offset.num_pairs : 0;
  const Index heads_at_once = pairs ? min(heads, kPairsAtOnce / pairs) : heads;
  const Index pairs_of_token = round_up(heads_at_once * pairs, kLanes);
  const Index tokens_at_once =
      pairs ? max(1, min(kTokensAtOnce, kPairsAtOnce / pairs_of_token)) : kTokensAtOnce;
  const bool is_by_head = args.stride[1] > args.token_stride();
  const float sign = args.is_restored ? -1.0f : 1.0f;
  TurnedPairs turned;
  for (Index token = begin; token < end; token += tokens_at_once) {
    const Index count = min(end - token, tokens_at_once);
    Index from[kTokensAtOnce], to[kTokensAtOnce];
    int64_t positions[kTokensAtOnce];
    for (Index t = 0; t < count; ++t) {
      const Index b = (token + t) / args.size[2], n = (token + t) % args.size[2];
      from[t] = b * args.stride[0] + n * args.stride[2];
      to[t] = b * args.to_stride[0] + n * args.to_stride[2] - args.to_first;
      positions[t] = has_offset ? args.positions.at(b, n) : 0;
    }
    for (Index head = 0; head < heads; head += heads_at_once) {
      const Index num_heads = min(heads - head, heads_at_once);
      for (Index t = 0; t < count && pairs; ++t) {
        turn_pairs(args.offset, head * pairs, num_heads * pairs, positions[t], sign,
                   turned.first + t * pairs_of_token, turned.second + t * pairs_of_token);
      }
      const auto smooth_at = [&](Index t, Index h) KVLOOM_INLINE_LAMBDA {
        const Index of_keys = args.heads_per_head == 1 ? head + h : (head + h) / args.heads_per_head;
        const Index place = t * pairs_of_token + h * pairs;
        const T* row = reinterpret_cast<const T*>(args.from) + from[t] + (head + h) * args.stride[1];
        if (args.coefficients) {
          find_coefficients(args.offset, of_keys, row,
                            args.coefficients + ((token + t) * heads + head + h) * 2 * args.offset.num_pairs);
        }
        const SmoothRow<T> of_row{row,
                                  reinterpret_cast<T*>(args.to) + to[t] + (head + h) * args.to_stride[1],
                                  args.factor + of_keys * args.factor_stride,
                                  of_keys,
                                  has_offset ? turned.first + place : nullptr,
                                  turned.second + place};
        if (args.prefetch) prefetch_row(of_row, args.head_dim, args.prefetch);
        smooth_one(of_row);
      };
      if (is_by_head) {
        for (Index h = 0; h < num_heads; ++h)
          for (Index t = 0; t < count; ++t) smooth_at(t, h);
      } else {
        for (Index t = 0; t < count; ++t)
          for (Index h = 0; h < num_heads; ++h) smooth_at(t, h);
      }
    }
  }
}

// Tokens `[begin, end)` of all sequences.
inline void smooth(const SmoothArgs& args, Index begin, Index end) {
  const bool has_offset = args.positions.data != nullptr;
  const bool is_whole = args.head_dim % kLanes == 0 && args.block % kLanes == 0 &&
                        (!has_offset || args.offset.num_pairs <= kLanes);
  for_float(args.dtype, [&]<class T>(T) {
    const auto with = [&](auto smooth_one) { smooth_tokens<T>(args, begin, end, smooth_one); };
    const auto whole = [&]<bool kIsRestored, bool kHasOffset>() {
      with([&](const SmoothRow<T>& row)
               KVLOOM_INLINE_LAMBDA { smooth_vectors<kIsRestored, kHasOffset>(args, row); });
    };
    if (!is_whole) return with([&](const SmoothRow<T>& row) { smooth_any(args, row); });
    if (args.is_restored) {
      return has_offset ? whole.template operator()<true, true>() : whole.template operator()<true, false>();
    }
    return has_offset ? whole.template operator()<false, true>() : whole.template operator()<false, false>();
  });
}

}  // namespace kvloom::KVLOOM_ISA
