// A positional bias: products of queries and keys get K cosines and K sines of the key's position.
//
//   a cos(f p) + b sin(f p) = a' cos(f j) + b' sin(f j),  where p is the j-th position of a chunk,
//
// and (a', b') is (a, b) turned by the angle of the chunk's first one. So a row turns its coefficients once a
// chunk, and cosines and sines of f j come from a table that serves all chunks, rows and sequences.
#pragma once

#include <cmath>

#include "arithmetic.h"
#include "plan.h"

namespace kvloom::KVLOOM_ISA {

inline bool has_bias(const AttendArgs& args) { return args.bias.coefficients.data; }

struct Waves {
  Vec cos, sin;
};

// Of angles in 2^-32 of a turn, to about 2^-24.
inline Waves waves_of(Words angle) {
  const Words quarter = (angle + (1u << 29)) >> 30;
  const Vec x = __builtin_convertvector(as<IntVec>(angle - (quarter << 30)), Vec) * 1.4629180792671596e-9f;
  const Vec square = x * x;
  Vec s = splat(-1.9515295891e-4f), c = splat(2.443315711809948e-5f);
  s = multiply_add(s, square, 8.3321608736e-3f);
  c = multiply_add(c, square, -1.388731625493765e-3f);
  s = multiply_add(s, square, -1.6666654611e-1f);
  c = multiply_add(c, square, 4.166664568298827e-2f);
  s = multiply_add(s * square, x, x);
  c = multiply_add(c, square * square, multiply_add(square, -0.5f, splat(1.0f)));
  const auto is_odd = (quarter & 1) != 0;
  const Vec cos = is_odd ? s : c, sin = is_odd ? c : s;
  return {as<Vec>(as<Words>(cos) ^ (((quarter + 1) & 2) << 30)),
          as<Vec>(as<Words>(sin) ^ ((quarter & 2) << 30))};
}

// Waves of an angle and of another one together.
inline Waves turned(const Waves& x, const Waves& by) {
  return {multiply_add(x.cos, by.cos, -(x.sin * by.sin)), multiply_add(x.sin, by.cos, x.cos * by.sin)};
}

// Waves of kLanes pairs at some position.
inline Waves waves_at(const uint64_t* turns, uint64_t position) {
  using Half = VectorOf<uint64_t, kLanes / 2>::type;
  const auto multiples = [&](Index i) { return as<Words>(bit_copy<Half>(turns + i) * position); };
  return waves_of(odd_lanes(multiples(0), multiples(kLanes / 2)));  // the upper half of each
}

// Waves of all pairs at the positions of a chunk that begins with 0, [H, K, 2, kChunk]. A frequency that is
// not finite makes NaN of its bias.
inline void fill_wave_tables(const AttendArgs& args, float* to) {
  constexpr int kVectors = kChunk / kLanes;
  const PositionalBias& bias = args.bias;
  const Index count = args.key.cache.num_heads() * bias.num_pairs;
  for (Index first = 0; first < count; first += kLanes) {
    Waves shift[kVectors];  // of a lane's pair, by the number of vectors
    for (int n = 1; n < kVectors; ++n) shift[n] = waves_at(bias.turns + first, n * kLanes);
    for (Index i = first; i < min(first + kLanes, count); ++i, to += 2 * kChunk) {
      const auto step = static_cast<uint32_t>((bias.turns[i] + (uint64_t{1} << 31)) >> 32);
      Waves waves = waves_of(as<Words>(lane_numbers()) * step);
      const float broken = static_cast<float>(bias.frequencies[i] - bias.frequencies[i]);
      waves.cos += broken, waves.sin += broken;
      store(to, waves.cos), store(to + kChunk, waves.sin);
      for (int n = 1; n < kVectors; ++n) {
        const Waves by{splat(shift[n].cos[i - first]), splat(shift[n].sin[i - first])};
        const Waves later = turned(waves, by);
        store(to + n * kLanes, later.cos), store(to + kChunk + n * kLanes, later.sin);
      }
    }
  }
}

inline uint64_t position_of(const PositionalBias& bias, Index sequence, Index token) {
  const Index first = bias.first_position ? bias.first_position[sequence] : 0;
  return static_cast<uint64_t>(first) + static_cast<uint64_t>(token);
}

// Where the coefficients of a row begin, in elements.
inline Index coefficients_at(const PositionalBias& bias, Index query_row, Index query_head) {
  return query_row * bias.coefficients.stride[0] + query_head * bias.coefficients.stride[1];
}

// The coefficients of a row; those behind the last pair are 0.
struct BiasRow {
  alignas(64) float cos[kMaxPairs], sin[kMaxPairs];

  void read(const PositionalBias& bias, Index query_row, Index query_head) {
    const FloatArray& from = bias.coefficients;
    const Index at = coefficients_at(bias, query_row, query_head), stride = from.stride[2];
    read_floats(from.data, from.dtype, at, stride, cos, bias.num_pairs);
    read_floats(from.data, from.dtype, at + bias.num_pairs * stride, stride, sin, bias.num_pairs);
    for (Index i = bias.num_pairs; i < round_up(bias.num_pairs, kLanes); ++i) cos[i] = sin[i] = 0.0f;
  }
};

// The waves of the pairs of some heads at one position, head by head; kLanes may be read from any pair on.
struct ChunkWaves {
  alignas(64) float cos[(kTileHeads + 1) * kMaxPairs], sin[(kTileHeads + 1) * kMaxPairs];

  void find(const PositionalBias& bias, Index first_head, Index num_heads, uint64_t position) {
    const uint64_t* turns = bias.turns + first_head * bias.num_pairs;
    for (Index i = 0; i < num_heads * bias.num_pairs + kLanes; i += kLanes) {
      const Waves waves = waves_at(turns + i, position);
      store(cos + i, waves.cos);
      store(sin + i, waves.sin);
    }
  }
};

// Adds the bias of R rows to their products with kCount tokens: `cos` and `sin` are the waves of the head at
// the first one, `table` those of the others from there.
template <int R, Index kCount = kChunk>
inline void add_bias(const BiasRow* rows, Index num_pairs, const float* first_cos, const float* first_sin,
                     const float* table, float* scores) {
  constexpr int kVectors = kCount / kLanes, N = R == 4 || kVectors < 4 ? 2 : 4;
  alignas(64) float by_row[R][2][kMaxPairs];  // turned coefficients
  for (int r = 0; r < R; ++r)
    for (Index i = 0; i < num_pairs; i += kLanes) {
      const Vec a = load(rows[r].cos + i), b = load(rows[r].sin + i);
      const Vec cos = load(first_cos + i), sin = load(first_sin + i);
      store(by_row[r][0] + i, multiply_add(a, cos, b * sin));
      store(by_row[r][1] + i, multiply_add(b, cos, -(a * sin)));
    }
  for (Index t = 0; t < kCount; t += N * kLanes) {
    Vec sums[R][N];
    KVLOOM_UNROLL(4)
    for (int r = 0; r < R; ++r) {
      KVLOOM_UNROLL(4)
      for (int n = 0; n < N; ++n) sums[r][n] = load(scores + r * kCount + t + n * kLanes);
    }
    for (Index i = 0; i < num_pairs; ++i) {
      KVLOOM_UNROLL(2)
      for (int wave = 0; wave < 2; ++wave) {
        const float* from = table + (2 * i + wave) * kChunk + t;
        KVLOOM_UNROLL(4)
        for (int r = 0; r < R; ++r) {
          const Vec coefficient = splat(by_row[r][wave][i]);
          KVLOOM_UNROLL(4)
          for (int n = 0; n < N; ++n)
            sums[r][n] = multiply_add(load(from + n * kLanes), coefficient, sums[r][n]);
        }
      }
    }
    KVLOOM_UNROLL(4)
    for (int r = 0; r < R; ++r) {
      KVLOOM_UNROLL(4)
      for (int n = 0; n < N; ++n) store(scores + r * kCount + t + n * kLanes, sums[r][n]);
    }
  }
}

// The bias of one product, as a float64 sum.
inline float bias_of(const PositionalBias& bias, Index query_row, Index query_head, Index head,
                     uint64_t position) {
  const FloatArray& from = bias.coefficients;
  const Index at = coefficients_at(bias, query_row, query_head), stride = from.stride[2];
  const auto coefficient = [&](Index i) {
    return double{read_float(from.data, from.dtype, at + i * stride)};
  };
  double sum = 0.0;
  for (Index i = 0; i < bias.num_pairs; ++i) {
    const double angle =
        bias.frequencies[head * bias.num_pairs + i] * static_cast<double>(static_cast<Index>(position));
    sum += coefficient(i) * std::cos(angle) + coefficient(bias.num_pairs + i) * std::sin(angle);
  }
  return static_cast<float>(sum);
}

}  // namespace kvloom::KVLOOM_ISA
