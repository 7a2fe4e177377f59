// int8 and int4 codes, block by block of 16 tokens in a native order. A cache in this order is read in place; blocks
// of any other are packed into it first. Either way the arithmetic is the same.
#pragma once

#include "tile.h"

namespace kvloom::KVLOOM_ISA {

constexpr Index kMaxGroups = kMaxHeadDim / 8;
constexpr Index kManyRowsOfCodes = 8;  // rows of a tile from which on codes are widened once for all of them

// --- blocks in native order, of rows that are a multiple of 16 bytes ----------------------------------------

using Bytes16 = VectorOf<Byte, 16>::type;
using Pairs16 = VectorOf<uint16_t, 8>::type;
using Dwords16 = VectorOf<uint32_t, 4>::type;
using Qwords16 = VectorOf<uint64_t, 2>::type;

// Stores both vectors in turn, as elements of V: the first halves at `low`, the second at `high`.
template <class V, class From>
KVLOOM_INLINE void store_interleaved(From first, From second, Byte* low, Byte* high) {
  const V a = interleave_low(as<V>(first), as<V>(second)), b = interleave_high(as<V>(first), as<V>(second));
  std::memcpy(low, &a, sizeof a);
  std::memcpy(high, &b, sizeof b);
}

// 16 bytes of each of four rows become 16 dwords of a byte of each row.
inline void interleave_bytes(const Byte* const* rows, Index at, Byte* to) {
  Bytes16 x[4];
  KVLOOM_UNROLL(4)
  for (int i = 0; i < 4; ++i) x[i] = bit_copy<Bytes16>(rows[i] + at);
  store_interleaved<Pairs16>(interleave_low(x[0], x[1]), interleave_low(x[2], x[3]), to, to + 16);
  store_interleaved<Pairs16>(interleave_high(x[0], x[1]), interleave_high(x[2], x[3]), to + 32, to + 48);
}

// Four dwords of each of four rows become four dwords of each row's first, second, third and fourth.
inline void transpose_four(const Byte* const* rows, Index at, Byte* to, Index stride) {
  Dwords16 x[4];
  KVLOOM_UNROLL(4)
  for (int i = 0; i < 4; ++i) x[i] = bit_copy<Dwords16>(rows[i] + at);
  store_interleaved<Qwords16>(interleave_low(x[0], x[1]), interleave_low(x[2], x[3]), to, to + stride);
  to += 2 * stride;
  store_interleaved<Qwords16>(interleave_high(x[0], x[1]), interleave_high(x[2], x[3]), to, to + stride);
}

constexpr Index kColumn = 4 * kBlock;  // bytes of a column: four of each token of a block

// One block of keys, [row_bytes / 4, 16, 4]: in place, or as `copy` with room for it.
inline const Byte* key_block(const ChunkRows& chunk, Index block, Byte* copy) {
  if (chunk.is_native) return chunk.block(block);
  const Byte* const* rows = chunk.row + block * kBlock;
  const Index bytes = chunk.side->row_bytes;
  for (Index at = 0; at < bytes; at += 16)
    for (Index t = 0; t < kBlock; t += 4) transpose_four(rows + t, at, copy + at / 4 * kColumn + 4 * t, kColumn);
  return copy;
}

// One block of values, [4, row_bytes, 4]: in place, or as `copy` with room for it.
inline const Byte* value_block(const ChunkRows& chunk, Index block, Byte* copy) {
  if (chunk.is_native) return chunk.block(block);
  const Index bytes = chunk.side->row_bytes;
  for (Index quad = 0; quad < kBlock / 4; ++quad) {
    const Byte* const* rows = chunk.row + block * kBlock + 4 * quad;
    for (Index at = 0; at < bytes; at += 16) interleave_bytes(rows, at, copy + 4 * (quad * bytes + at));
  }
  return copy;
}

// --- scales ------------------------------------------------------------------------------------------------

// kLanes 16-bit scales of a column of dwords, in float32: the low half of each, or the high one.
inline Vec widen_halves(DType dtype, IntVec pairs, bool high) {
  if (dtype == DType::bf16) return as<Vec>(high ? pairs & splat(INT32_MIN >> 15) : pairs << 16);
  return widen(low_halves(as<Words>(high ? pairs >> 16 : pairs)), Half{});
}

// Scales of the tokens [first, first + kBlock), `dwords` of them to a token, from byte `at` of a row on; whether these
// are all of a row.
inline void read_columns(const ChunkRows& chunk, Index first, Index at, Index dwords, bool are_all,
                         uint32_t (*to)[kBlock]) {
  const Byte* const* rows = chunk.scale + first;
  if (dwords == 1 && are_all && chunk.scales_are_contiguous(first)) {
    std::memcpy(to[0], rows[0], sizeof to[0]);
  } else if (dwords == 4) {
    for (Index t = 0; t < kBlock; t += 4)
      transpose_four(rows + t, at, reinterpret_cast<Byte*>(to[0] + t), sizeof to[0]);
  } else {
    for (Index t = 0; t < kBlock; ++t)
      for (Index i = 0; i < dwords; ++i) std::memcpy(to[i] + t, rows[t] + at + 4 * i, 4);
  }
}

// NaN in place of scales whose products with codes may be beyond the largest finite number that dequantizing gives.
// A row that is not finite in the end is computed again by NonFiniteRow.
inline Vec checked_scales(Vec scales, float limit) {
  const Vec size = as<Vec>(as<IntVec>(scales) & splat(INT32_MAX));
  return size > splat(limit) ? splat(NAN) : scales;
}

inline float largest_scale(const ChunkRows& chunk) {
  return largest_finite(chunk.query_dtype == DType::f16 ? chunk.query_dtype : chunk.side->scale.dtype) / 128.0f;
}

// Scales of one chunk by group and token, in float32; those of tokens outside [begin, end) are some of the others.
inline void read_scales(const ChunkRows& chunk, float (*scales)[kChunk]) {
  const DType dtype = chunk.side->scale.dtype;
  const Index groups = chunk.side->num_groups, bytes = groups * chunk.side->scale.itemsize;
  const float limit = largest_scale(chunk);
  const auto put_scales = [&](Index g, Index t, Vec x) { store(scales[g] + t, checked_scales(x, limit)); };
  for (Index first = 0; first < kChunk; first += kBlock) {
    if (groups == 1 && dtype != DType::f32 && chunk.scales_are_contiguous(first)) {
      alignas(64) float some[kBlock];
      read_floats(chunk.scale[first], dtype, 0, 1, some, kBlock);
      for (Index t = 0; t < kBlock; t += kLanes) put_scales(0, first + t, load(some + t));
      continue;
    }
    if (bytes % 4 != 0) {
      for (Index g = 0; g < groups; ++g) {
        for (Index t = first; t < first + kBlock; ++t) scales[g][t] = read_float(chunk.scale[t], dtype, g);
        for (Index t = first; t < first + kBlock; t += kLanes) put_scales(g, t, load(scales[g] + t));
      }
      continue;
    }
    alignas(64) uint32_t columns[4][kBlock];
    for (Index at = 0; at < bytes; at += 16) {
      const Index dwords = min(bytes - at, 16) / 4;
      read_columns(chunk, first, at, dwords, dwords * 4 == bytes, columns);
      for (Index i = 0; i < dwords; ++i)
        for (Index t = 0; t < kBlock; t += kLanes) {
          const IntVec column = bit_copy<IntVec>(columns[i] + t);
          if (dtype == DType::f32) {
            put_scales(at / 4 + i, first + t, as<Vec>(column));
          } else {
            put_scales(at / 2 + 2 * i, first + t, widen_halves(dtype, column, false));
            put_scales(at / 2 + 2 * i + 1, first + t, widen_halves(dtype, column, true));
          }
        }
    }
  }
}

// --- float32 arithmetic ------------------------------------------------------------------------------------

// Codes of one position of each dword: of int8 there are four, of int4 eight.
template <bool is_int4, int position>
inline Vec widen_position(IntVec dwords) {
  constexpr int bits = is_int4 ? 4 : 8;
  return __builtin_convertvector((dwords << (32 - bits * (position + 1))) >> (32 - bits), Vec);
}

template <class Visit, int... position>
inline void for_positions(std::integer_sequence<int, position...>, Visit visit) {
  (visit.template operator()<position>(), ...);
}
template <bool is_int4>
using Positions = std::make_integer_sequence<int, is_int4 ? 8 : 4>;

// A dequantized number is rounded to the scale's type where that shows in the query's.
struct Unrounded {
  static constexpr bool kRounds = false;
  static Vec of(Vec x) { return x; }
};
template <class T>
struct RoundedTo {
  static constexpr bool kRounds = true;
  static Vec of(Vec x) { return round_to<T>(x); }
};

// Adds an element of R query rows times that of two vectors of tokens.
template <int R>
KVLOOM_INLINE void add_products(Vec (*sums)[2], const float* query, Index width,
                                                        const Vec* codes) {
  KVLOOM_UNROLL(4)
  for (int r = 0; r < R; ++r) {
    const Vec x = splat(query[r * width]);
    sums[r][0] = multiply_add(x, codes[0], sums[r][0]);
    sums[r][1] = multiply_add(x, codes[1], sums[r][1]);
  }
}

// Adds the sums of a group, times its scales unless the products are.
template <int R, class Rounded>
KVLOOM_INLINE void add_group(Vec (*sums)[2], const Vec (*group)[2], const float* scales) {
  KVLOOM_UNROLL(4)
  for (int r = 0; r < R; ++r)
    KVLOOM_UNROLL(2)
    for (int n = 0; n < 2; ++n)
      sums[r][n] = Rounded::kRounds ? sums[r][n] + group[r][n]
                                    : multiply_add(group[r][n], load(scales + n * kLanes), sums[r][n]);
}

template <int R>
KVLOOM_INLINE void store_scores(const Vec (*sums)[2], float* scores) {
  KVLOOM_UNROLL(4)
  for (int r = 0; r < R; ++r)
    KVLOOM_UNROLL(2)
    for (int n = 0; n < 2; ++n) store(scores + r * kChunk + n * kLanes, sums[r][n]);
}

// R rows by the tokens [first, first + 2 * kLanes) of two blocks: code products are summed within a group, and
// scaled at its end; if they are rounded, each is scaled before.
template <int R, bool is_int4, class Rounded>
inline void score_codes_at(const Byte* const* blocks, Index first, const SideLayout& key, const float* query,
                           Index width, const float* scales, float* scores, const BlockPrefetcher* prefetchers) {
  const Index per_group = key.row_bytes / 4 / key.num_groups;
  const Byte* at[2];
  for (Index n = 0; n < 2; ++n) {
    const Index t = first + n * kLanes;
    at[n] = blocks[t / kBlock] + t % kBlock * 4;
  }
  Vec sums[R][2] = {};
  const float* q = query;
  Index column = 0;
  for (Index g = 0; g < key.num_groups; ++g) {
    Vec group[R][2] = {};
    const Vec scale[2] = {load(scales + g * kChunk + first), load(scales + g * kChunk + first + kLanes)};
    for (Index c = 0; c < per_group; ++c, ++column, q += is_int4 ? 8 : 4) {
      const IntVec dwords[2] = {bit_copy<IntVec>(at[0]), bit_copy<IntVec>(at[1])};
      at[0] += kColumn, at[1] += kColumn;
      for (Index n = 0; n < 2; ++n)
        if (const Index t = first + n * kLanes; t % kBlock == 0) prefetchers[t / kBlock].prefetch_line(column);
      for_positions(Positions<is_int4>{}, [&]<int position>() {
        Vec codes[2] = {widen_position<is_int4, position>(dwords[0]), widen_position<is_int4, position>(dwords[1])};
        if (Rounded::kRounds) codes[0] = Rounded::of(codes[0] * scale[0]), codes[1] = Rounded::of(codes[1] * scale[1]);
        add_products<R>(group, q + position, width, codes);
      });
    }
    add_group<R, Rounded>(sums, group, scales + g * kChunk + first);
  }
  store_scores<R>(sums, scores + first);
}

// Calls score.template operator()<R>(first row, first token, two blocks, scales from there on, a prefetcher for each
// block) for groups of rows and each two blocks of which the chunk has tokens.
template <class Score>
inline void for_key_blocks(const ChunkRows& chunk, Index num_rows, Score score) {
  alignas(64) Byte copies[2][kMaxHeadDim * kBlock];
  alignas(64) float scales[kMaxGroups][kChunk];
  read_scales(chunk, scales);
  chunk.prefetch_scales();
  const Index begin = chunk.begin / kBlock, last = (chunk.end - 1) / kBlock;
  for (Index block = begin / 2 * 2; block <= last; block += 2) {
    // A block without a token has no address: the other one replaces it.
    const Byte* const blocks[2] = {key_block(chunk, max(block, begin), copies[0]),
                                   key_block(chunk, min(block + 1, last), copies[1])};
    const Index first = block * kBlock;
    for_rows(num_rows, [&]<int R>(Index r) {
      const RowPrefetcher prefetcher = chunk.prefetcher.for_first_rows(r);
      const BlockPrefetcher prefetchers[2] = {{prefetcher, chunk, first}, {prefetcher, chunk, first + kBlock}};
      score.template operator()<R>(r, first, blocks, scales[0] + first, prefetchers);
    });
  }
}

// Codes of two blocks widened to float32, for many rows: element by token. Where products with scales are rounded, it
// holds the products.
struct WideColumns {
  template <bool is_int4, class Rounded>
  void read(const Byte* const* blocks, const SideLayout& key, const float* scales, const BlockPrefetcher* prefetchers) {
    constexpr Index kElements = is_int4 ? 8 : 4;
    for (Index column = 0; column < key.row_bytes / 4; ++column) {
      prefetchers[0].prefetch_line(column);
      prefetchers[1].prefetch_line(column);
      const float* of_group = scales + column * kElements / key.group * kChunk;
      for (Index t = 0; t < 2 * kBlock; t += kLanes) {
        const IntVec dwords = bit_copy<IntVec>(blocks[t / kBlock] + column * kColumn + t % kBlock * 4);
        for_positions(Positions<is_int4>{}, [&]<int position>() {
          const Vec codes = widen_position<is_int4, position>(dwords);
          const Vec x = Rounded::kRounds ? Rounded::of(codes * load(of_group + t)) : codes;
          store(at[column * kElements + position] + t, x);
        });
      }
    }
  }

  // As score_codes_at, over both blocks.
  template <int R, class Rounded>
  void score(const SideLayout& key, const float* query, Index width, const float* scales, float* scores) const {
    for (Index first = 0; first < 2 * kBlock; first += 2 * kLanes) {
      Vec sums[R][2] = {};
      for (Index g = 0; g < key.num_groups; ++g) {
        Vec group[R][2] = {};
        for (Index d = g * key.group; d < (g + 1) * key.group; ++d) {
          const Vec codes[2] = {load(at[d] + first), load(at[d] + first + kLanes)};
          add_products<R>(group, query + d, width, codes);
        }
        add_group<R, Rounded>(sums, group, scales + g * kChunk + first);
      }
      store_scores<R>(sums, scores + first);
    }
  }

  alignas(64) float at[kMaxHeadDim][2 * kBlock];
};

template <bool is_int4, class Rounded>
inline void score_codes(const ChunkRows& chunk, const ScoreTask& task) {
  const SideLayout& key = *chunk.side;
  WideColumns columns;
  for_key_blocks(chunk, task.num_rows, [&]<int R>(Index r, Index first, const Byte* const* blocks,
                                                  const float* scales, const BlockPrefetcher* prefetchers) {
    const float* query = task.query + r * task.width;
    float* scores = task.scores + r * kChunk + first;
    if (task.num_rows >= kManyRowsOfCodes) {
      if (r == 0) columns.read<is_int4, Rounded>(blocks, key, scales, prefetchers);
      return columns.score<R, Rounded>(key, query, task.width, scales, scores);
    }
    for (Index t = 0; t < 2 * kBlock; t += 2 * kLanes)
      score_codes_at<R, is_int4, Rounded>(blocks, t, key, query, task.width, scales, scores, prefetchers);
  });
}

// The blocks of values of which a chunk has tokens.
struct ValueBlocks {
  explicit ValueBlocks(const ChunkRows& chunk_rows)
      : chunk(chunk_rows), side(*chunk.side), begin(chunk.begin / kBlock), end(ceil_div(chunk.end, kBlock)) {
    for (Index b = begin; b < end; ++b) block[b] = value_block(chunk, b, copy + b * kBlock * side.row_bytes);
  }

  const ChunkRows& chunk;
  const SideLayout& side;
  Index begin, end;
  const Byte* block[kChunk / kBlock];
  alignas(64) Byte copy[kChunk * kMaxHeadDim];
};

// The groups of kLanes bytes from one on.
struct LaneGroups {
  LaneGroups(const SideLayout& side, Index byte)
      : first(side.group_of_byte[byte]),
        lanes(bit_copy<IntVec>(side.group_of_byte + byte) - splat(side.group_of_byte[byte])) {}

  Vec of(const float* scales) const { return permute(load(scales + first), lanes); }

  Index first;
  IntVec lanes;  // counted from the first
};

// Codes of token i of each quad times their scales: of int4 the even elements, then the odd ones.
template <bool is_int4, int i, class Rounded>
KVLOOM_INLINE void scale_codes(IntVec dwords, Vec scales, Vec* x) {
  if constexpr (is_int4) {
    x[0] = Rounded::of(scales * widen_position<true, 2 * i>(dwords));
    x[1] = Rounded::of(scales * widen_position<true, 2 * i + 1>(dwords));
  } else {
    x[0] = Rounded::of(scales * widen_position<false, i>(dwords));
  }
}

// Interleaves the vectors of even and odd elements.
inline void interleave(Vec* x) {
  const Vec even = x[0], odd = x[1];
  x[0] = interleave_low(even, odd);
  x[1] = interleave_high(even, odd);
}

// R rows by V vectors of bytes; scales[token] are those of the groups.
template <int R, bool is_int4, int V, class Rounded>
inline void add_codes(const ValueBlocks& values, const float* weights, const float (*scales)[kMaxGroups + kLanes],
                      float* accumulators, Index width, Index byte, const RowPrefetcher& prefetcher) {
  constexpr int N = is_int4 ? 2 * V : V;  // of int4 the even and the odd elements
  const LaneGroups groups[2] = {{values.side, byte}, {values.side, byte + (V - 1) * kLanes}};
  Vec sums[R][N] = {};
  for (Index b = values.begin; b < values.end; ++b) {
    const BlockPrefetcher block_prefetcher(prefetcher, values.chunk, b * kBlock);
    for (Index quad = 0; quad < kBlock / 4; ++quad) {
      const Byte* at = values.block[b] + 4 * (quad * values.side.row_bytes + byte);
      IntVec dwords[V];
      KVLOOM_UNROLL(2)
      for (int v = 0; v < V; ++v) dwords[v] = bit_copy<IntVec>(at + 4 * v * kLanes);
      KVLOOM_UNROLL(2)
      for (Index offset = at - values.block[b], v = 0; v < V; ++v, offset += 4 * kLanes)
        if (offset % 64 == 0) block_prefetcher.prefetch_line(offset / 64);
      for_positions(std::make_integer_sequence<int, 4>{}, [&]<int i>() {
        const Index t = b * kBlock + 4 * quad + i;
        Vec x[N];
        KVLOOM_UNROLL(2)
        for (int v = 0; v < V; ++v)
          scale_codes<is_int4, i, Rounded>(dwords[v], groups[v].of(scales[t]), x + N / V * v);
        KVLOOM_UNROLL(4)
        for (int r = 0; r < R; ++r) {
          const Vec weight = splat(weights[r * kChunk + t]);
          KVLOOM_UNROLL(2)
          for (int n = 0; n < N; ++n) sums[r][n] = multiply_add(weight, x[n], sums[r][n]);
        }
      });
    }
  }
  for (int r = 0; r < R; ++r) {
    float* accumulator = accumulators + r * width + (is_int4 ? 2 * byte : byte);
    if constexpr (is_int4) interleave(sums[r]);
    for (int n = 0; n < N; ++n) store(accumulator + n * kLanes, load(accumulator + n * kLanes) + sums[r][n]);
  }
}

// Codes of a chunk times their scales, for many rows: token by element.
struct WideValues {
  template <bool is_int4, class Rounded>
  void read(const ValueBlocks& values, const float (*scales)[kMaxGroups + kLanes], const RowPrefetcher& prefetcher) {
    constexpr int N = is_int4 ? 2 : 1;
    for (Index b = values.begin; b < values.end; ++b) {
      const BlockPrefetcher block_prefetcher(prefetcher, values.chunk, b * kBlock);
      for (Index quad = 0; quad < kBlock / 4; ++quad)
        for (Index byte = 0; byte < values.side.row_bytes; byte += kLanes) {
          const Index offset = 4 * (quad * values.side.row_bytes + byte);
          if (offset % 64 == 0) block_prefetcher.prefetch_line(offset / 64);
          const LaneGroups groups(values.side, byte);
          const IntVec dwords = bit_copy<IntVec>(values.block[b] + offset);
          for_positions(std::make_integer_sequence<int, 4>{}, [&]<int i>() {
            const Index t = b * kBlock + 4 * quad + i;
            Vec x[N];
            scale_codes<is_int4, i, Rounded>(dwords, groups.of(scales[t]), x);
            if constexpr (is_int4) interleave(x);
            for (int n = 0; n < N; ++n) store(at[t] + N * byte + n * kLanes, x[n]);
          });
        }
    }
  }

  // Adds R rows of the tokens [begin, end).
  template <int R>
  void add(const float* weights, Index begin, Index end, Index width, float* accumulators) const {
    const Byte* rows[kChunk];
    for (Index t = begin; t < end; ++t) rows[t] = reinterpret_cast<const Byte*>(at[t]);
    alignas(64) float sums[R * kMaxHeadDim];
    std::memset(sums, 0, R * width * sizeof(float));
    value_block<float>({weights, nullptr, R, width, sums}, rows, RowPrefetcher(), 0, begin, end);
    for (Index i = 0; i < R * width; i += kLanes) store(accumulators + i, load(accumulators + i) + load(sums + i));
  }

  alignas(64) float at[kChunk][kMaxHeadDim];
};

template <bool is_int4, class Rounded>
inline void value_codes(const ChunkRows& chunk, const ValueTask& task) {
  const SideLayout& value = *chunk.side;
  alignas(64) float by_group[kMaxGroups][kChunk];
  alignas(64) float scales[kChunk][kMaxGroups + kLanes];
  read_scales(chunk, by_group);
  for (Index t = 0; t < kChunk; t += kLanes)
    for (Index g = 0; g < value.num_groups; g += kLanes) {
      Vec x[kLanes];
      for (Index i = 0; i < kLanes; ++i) x[i] = g + i < value.num_groups ? load(by_group[g + i] + t) : Vec{};
      transpose(x);
      for (Index i = 0; i < kLanes; ++i) store(scales[t + i] + g, x[i]);
    }
  chunk.prefetch_scales();
  const ValueBlocks blocks(chunk);
  rescale_accumulators(task);
  WideValues wide;
  const bool has_many = task.num_rows >= kManyRowsOfCodes;
  if (has_many) wide.read<is_int4, Rounded>(blocks, scales, chunk.prefetcher);
  for_rows(task.num_rows, [&]<int R>(Index r) {
    constexpr int V = is_int4 ? 1 : 2;
    const RowPrefetcher prefetcher = chunk.prefetcher.for_first_rows(r);
    const float* weights = task.weights + r * kChunk;
    float* accumulators = task.accumulators + r * task.width;
    if (has_many) return wide.add<R>(weights, blocks.begin * kBlock, blocks.end * kBlock, task.width, accumulators);
    Index byte = 0;
    for (; byte + V * kLanes <= value.row_bytes; byte += V * kLanes)
      add_codes<R, is_int4, V, Rounded>(blocks, weights, scales, accumulators, task.width, byte, prefetcher);
    for (; byte < value.row_bytes; byte += kLanes)
      add_codes<R, is_int4, 1, Rounded>(blocks, weights, scales, accumulators, task.width, byte, prefetcher);
  });
}

}  // namespace kvloom::KVLOOM_ISA
