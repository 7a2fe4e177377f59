// A positional bias: products of queries and keys get K cosines and K sines of the key's position.
//
//   a cos(f p) + b sin(f p) = a' cos(f m) + b' sin(f m),  where p is m after the middle of a chunk,
//
// and (a', b') is (a, b) rotated by the angle of the middle. So a row rotates its coefficients once a chunk;
// cosines and sines of f m come from one table for all chunks, rows and sequences, and for the token m before
// the middle, too, whose sines have the other sign. The middle of an even number of tokens is
// between two: m is 1/2, 3/2, 5/2 and so on.
#pragma once

#include "plan.h"
#include "waves.h"

namespace kvloom::KVLOOM_ISA {

inline bool has_bias(const AttendArgs& args) { return args.bias.coefficients.data; }

// Waves of kLanes pairs half a position after some position.
inline Waves waves_behind(const uint64_t* turns, uint64_t position) {
  return waves_of(angles_of(turns, [&](auto x) { return x * position + (x >> 1); }));
}

constexpr Index kWaves = kChunk / 2;

// Waves of all pairs at the distances 1/2, 3/2, ..., [H, K, 2, kWaves]. A frequency that is not finite makes
// NaN of its bias.
inline void fill_wave_tables(const AttendArgs& args, float* to) {
  const PositionalBias& bias = args.bias;
  for (Index i = 0; i < args.key.cache.num_heads() * bias.num_pairs; ++i, to += 2 * kWaves) {
    const auto step = static_cast<uint32_t>((bias.turns[i] + (uint64_t{1} << 31)) >> 32);
    const auto half = static_cast<uint32_t>(bias.turns[i] >> 33);
    const float broken = static_cast<float>(bias.frequencies[i] - bias.frequencies[i]);
    for (Index n = 0; n < kWaves; n += kLanes) {
      const Waves waves = waves_of((as<Words>(lane_numbers()) + static_cast<uint32_t>(n)) * step + half);
      store(to + n, waves.cos + broken);
      store(to + kWaves + n, waves.sin + broken);
    }
  }
}

inline uint64_t position_of(const PositionalBias& bias, Index sequence, Index token) {
  const Index first = bias.first_position ? bias.first_position[sequence] : 0;
  return static_cast<uint64_t>(first) + static_cast<uint64_t>(token);
}

// Offset of the coefficients of a row, in elements.
inline Index coefficients_at(const PositionalBias& bias, Index query_row, Index query_head) {
  return query_row * bias.coefficients.stride[0] + query_head * bias.coefficients.stride[1];
}

// A few pairs at once: there are seldom enough to fill all lanes.
constexpr int kFew = 4;
using Few = VectorOf<float, kFew>::type;

// Floats of the coefficients of a row: cosines, sines, each filled up with zeros.
inline Index padded_pairs(const PositionalBias& bias) { return round_up(bias.num_pairs, kFew); }

inline void read_coefficients(const PositionalBias& bias, Index query_row, Index query_head, float* to) {
  const FloatArray& from = bias.coefficients;
  const Index at = coefficients_at(bias, query_row, query_head), stride = from.stride[2];
  const Index pairs = bias.num_pairs, padded = padded_pairs(bias);
  std::memset(to, 0, 2 * padded * sizeof(float));
  if (from.dtype == DType::f32) {  // one by one: vectors of so few wait for their own stores
    const float* data = static_cast<const float*>(from.data) + at;
    for (Index i = 0; i < pairs; ++i) to[i] = data[i * stride], to[padded + i] = data[(pairs + i) * stride];
    return;
  }
  read_floats(from.data, from.dtype, at, stride, to, pairs);
  read_floats(from.data, from.dtype, at + pairs * stride, stride, to + padded, pairs);
}

// The waves of the pairs of some heads in the middle of a chunk, head by head; kLanes may be read from any
// pair on.
struct MiddleWaves {
  alignas(64) float cos[(kTileHeads + 1) * kMaxPairs], sin[(kTileHeads + 1) * kMaxPairs];

  void find(const PositionalBias& bias, Index first_head, Index num_heads, uint64_t first, Index count) {
    const uint64_t* turns = bias.turns + first_head * bias.num_pairs;
    for (Index i = 0; i < num_heads * bias.num_pairs + kLanes; i += kLanes) {
      const Waves waves = waves_behind(turns + i, first + count / 2 - 1);
      store(cos + i, waves.cos);
      store(sin + i, waves.sin);
    }
  }
};

// Bias of the products of some rows of a head with a chunk.
struct ChunkBias {
  const float* rows;  // their coefficients
  Index num_pairs, padded;
  const float *cos, *sin;  // the waves of the head in the middle of the chunk
  const float* table;      // and of the head at all distances from there
};

// Adds the bias of R rows to their products with kCount tokens.
template <int R, Index kCount = kChunk>
inline void add_bias(const ChunkBias& bias, float* products) {
  constexpr Index kMiddle = kCount / 2;
  alignas(64) float turned[R][2][kMaxPairs];
  for (int r = 0; r < R; ++r)
    for (Index i = 0; i < bias.num_pairs; i += kFew) {
      const float* row = bias.rows + 2 * r * bias.padded + i;
      const auto a = bit_copy<Few>(row), b = bit_copy<Few>(row + bias.padded);
      const auto cos = bit_copy<Few>(bias.cos + i), sin = bit_copy<Few>(bias.sin + i);
      const Few of_cos = a * cos + b * sin, of_sin = b * cos - a * sin;
      std::memcpy(turned[r][0] + i, &of_cos, sizeof of_cos);
      std::memcpy(turned[r][1] + i, &of_sin, sizeof of_sin);
    }
  for (Index n = 0; n < kMiddle; n += kLanes) {
    Vec even[R], odd[R];  // sums of cosines, and of sines, which change sign before the middle
    KVLOOM_UNROLL(4)
    for (int r = 0; r < R; ++r) even[r] = odd[r] = Vec{};
    for (Index i = 0; i < bias.num_pairs; ++i) {
      const float* from = bias.table + 2 * i * kWaves + n;
      const Vec cos = load(from), sin = load(from + kWaves);
      KVLOOM_UNROLL(4)
      for (int r = 0; r < R; ++r) {
        even[r] = multiply_add(cos, turned[r][0][i], even[r]);
        odd[r] = multiply_add(sin, turned[r][1][i], odd[r]);
      }
    }
    KVLOOM_UNROLL(4)
    for (int r = 0; r < R; ++r) {
      const Vec before = even[r] - odd[r];
      float *low = products + r * kCount + kMiddle - kLanes - n, *high = products + r * kCount + kMiddle + n;
      store(low, load(low) + shuffle(before, before, [](int lane) { return kLanes - 1 - lane; }));
      store(high, load(high) + (even[r] + odd[r]));
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
