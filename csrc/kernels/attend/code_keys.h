// Scores of int8 and int4 keys in float32, two blocks of tokens at a time.
#pragma once

#include "codes.h"
#include "scales.h"
#include "products.h"

namespace kvloom::KVLOOM_ISA {

// Adds an element of R query rows times that of two vectors of tokens.
template <int R>
KVLOOM_INLINE void add_products(Vec (*sums)[2], const float* query, Index width, const Vec* codes) {
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
  for (int r = 0; r < R; ++r) {
    KVLOOM_UNROLL(2)
    for (int n = 0; n < 2; ++n)
      sums[r][n] = Rounded::kRounds ? sums[r][n] + group[r][n]
                                    : multiply_add(group[r][n], load(scales + n * kLanes), sums[r][n]);
  }
}

template <int R>
KVLOOM_INLINE void store_scores(const Vec (*sums)[2], float* scores) {
  KVLOOM_UNROLL(4)
  for (int r = 0; r < R; ++r) {
    KVLOOM_UNROLL(2)
    for (int n = 0; n < 2; ++n) store(scores + r * kChunk + n * kLanes, sums[r][n]);
  }
}

// R rows by the tokens [first, first + 2 * kLanes) of two blocks: code products are summed within a group,
// and scaled at its end; if they are rounded, each is scaled before.
template <int R, bool is_int4, class Rounded>
inline void score_codes_at(const Byte* const* blocks, Index first, const SideLayout& key, const float* query,
                           Index width, const float* scales, float* scores,
                           const BlockPrefetcher* prefetchers) {
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
        if (const Index t = first + n * kLanes; t % kBlock == 0)
          prefetchers[t / kBlock].prefetch_line(column);
      for_positions(Positions<is_int4>{}, [&]<int position>() {
        Vec codes[2] = {widen_position<is_int4, position>(dwords[0]),
                        widen_position<is_int4, position>(dwords[1])};
        if (Rounded::kRounds)
          codes[0] = Rounded::of(codes[0] * scale[0]), codes[1] = Rounded::of(codes[1] * scale[1]);
        add_products<R>(group, q + position, width, codes);
      });
    }
    add_group<R, Rounded>(sums, group, scales + g * kChunk + first);
  }
  store_scores<R>(sums, scores + first);
}

// Calls score.template operator()<R>(first row, first token, two blocks, scales from there on, a prefetcher
// for each block) for groups of rows and each two blocks of which the chunk has tokens.
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
      const BlockPrefetcher prefetchers[2] = {{prefetcher, chunk, first},
                                              {prefetcher, chunk, first + kBlock}};
      score.template operator()<R>(r, first, blocks, scales[0] + first, prefetchers);
    });
  }
}

// Codes of two blocks widened to float32, for many rows: element by token. Where products with scales are
// rounded, it holds the products.
struct WideColumns {
  template <bool is_int4, class Rounded>
  void read(const Byte* const* blocks, const SideLayout& key, const float* scales,
            const BlockPrefetcher* prefetchers) {
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
  void score(const SideLayout& key, const float* query, Index width, const float* scales,
             float* scores) const {
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
  for_key_blocks(chunk, task.num_rows,
                 [&]<int R>(Index r, Index first, const Byte* const* blocks, const float* scales,
                            const BlockPrefetcher* prefetchers) {
                   const float* query = task.query + r * task.width;
                   float* scores = task.scores + r * kChunk + first;
                   if (task.num_rows >= kManyRowsOfCodes) {
                     if (r == 0) columns.read<is_int4, Rounded>(blocks, key, scales, prefetchers);
                     return columns.score<R, Rounded>(key, query, task.width, scales, scores);
                   }
                   for (Index t = 0; t < 2 * kBlock; t += 2 * kLanes)
                     score_codes_at<R, is_int4, Rounded>(blocks, t, key, query, task.width, scales, scores,
                                                         prefetchers);
                 });
}

}  // namespace kvloom::KVLOOM_ISA
