// Attention of many new tokens in tiles: the rows of a prompt meet the stored tokens of one key/value head.
//
//   scores  = queries * keys      32 rows by 32 tokens at a time (a step); keys are in pairs of dims
//   weights = 2^(scores - shift)  in float32, then rounded to bfloat16
//   totals += weights * values    32 rows by 32 dims, over a chunk; values are in pairs of tokens
//
// Keys and values of a chunk of 256 tokens are packed once for all rows of an item.
//
// A row's shift is not its running maximum but the largest score of the first step of which it sees a token,
// and stays. The relative precision of weights does not depend on it, and nothing waits for the maximum of a
// chunk. Should the weights of a chunk add up to 2^30 or more, the shift rises to the largest score of this
// chunk, what was added up shrinks, and the chunk is weighed again. All this depends on the row's own scores
// only, so that its bits do, too.
#pragma once

#include "nonfinite.h"
#include "positional.h"
#include "softmax.h"
#include "tile_rows.h"
#include "tile_vectors.h"

namespace kvloom::KVLOOM_ISA {

constexpr Index kStep = 32;  // tokens whose scores are computed together, and rows that share them
constexpr Index kStepsOfChunk = kPromptChunk / kStep;
constexpr Index kKeptSteps = 4;    // whose scores are kept
constexpr float kHidden = -1e30f;  // the score of a hidden token: its weight is 0 with any shift
constexpr float kMaxChunkSum = 0x1p30f;

// Rows of an item, and what was computed for them. kDims is the head dim in pieces of 32.
template <int kDims>
struct PromptSpace {
  static constexpr Index kRows = prompt_rows(32 * kDims);

  alignas(64) Byte query[kRows / 16][kDims][1024];
  alignas(64) Byte keys[kPromptChunk / 16][kDims][1024];    // 16 pairs of dims by 16 tokens
  alignas(64) Byte values[kStepsOfChunk][2 * kDims][1024];  // 16 pairs of tokens by 16 dims
  alignas(64) Byte weights[2][2][kStepsOfChunk][1024];      // of a block of 32 rows, and of the one before
  alignas(64) float scores[kKeptSteps][32][kStep];          // of this step and those before
  alignas(64) float totals[kRows / 16][2 * kDims][16][16];  // even dims, then odd ones, of each 32
  alignas(64) float sums[kRows][16], chunk_sums[2][32][16];
  alignas(64) float shift[kRows];  // in the unit of scores; negative infinity before a token is seen
  alignas(64) float down[kRows];   // -shift as a power of two
  bool has_shifts[kRows / 32];     // whether all rows of a block have seen a token
  ScoreRow rows[kRows];
};

template <class Tiles, int kDims>
class PromptItem {
 public:
  using Space = PromptSpace<kDims>;

  PromptItem(Tiles& tiles, const AttendArgs& args, const Workspace& workspace, const SideLayout& key,
             const SideLayout& value, Space& space)
      : tiles_(tiles),
        args_(args),
        workspace_(workspace),
        space_(space),
        key_(key),
        value_(value),
        key_rows_(key),
        value_rows_(value),
        next_keys_(key),
        next_values_(value),
        group_(args.num_heads / key.cache.num_heads()),
        is_adjusted_(args.softcap > 0.0f || args.mask.data || args.alibi_slopes.data ||
                     !(args.scale > 1e-20f && args.scale < 1e20f)) {
    tiles.configure();
  }

  // The rows of an item, which see tokens of [tokens.begin, tokens.end), and none else.
  void run(const SequencePlan& plan, Index sequence, const Item& item, Tokens tokens,
           const TokenSlots& slots) {
    plan_ = &plan;
    item_ = item;
    sequence_ = sequence;
    const auto chunk_at = [&](Index first) {
      return Tokens{max(tokens.begin, first), min(tokens.end, first + kPromptChunk)};
    };
    const Index first = tokens.begin / kPromptChunk * kPromptChunk;
    find_next(slots, chunk_at(first));
    load_rows();
    is_first_ = true;
    for (chunk_ = first; chunk_ < tokens.end; chunk_ += kPromptChunk) {
      pack(slots, chunk_at(chunk_));
      find_next(slots, chunk_at(chunk_ + kPromptChunk));
      run_chunk();
      is_first_ = false;
    }
    write();
  }

 private:
  static constexpr float kLog2e = 1.44269504f;
  // Number of the 8 steps of tokens that are scored while 32 dims of the block before are added up; 0 if
  // that is no integer.
  static constexpr int kStepsInTurn = 8 % kDims == 0 ? 8 / kDims : 0;

  Index num_blocks() const { return ceil_div(item_.num_rows, 32); }
  // The new token and the query head of a row. Rows that fill the last block repeat the last one.
  struct TokenHead {
    Index new_token, head;
  };
  TokenHead token_head(Index r) const {
    const Index row = item_.first_row + min(r, item_.num_rows - 1);
    return {row / group_, item_.first_head * group_ + row % group_};
  }

  // Beginning of the query of a row.
  const Byte* query_of(Index r) const {
    const auto [new_token, head] = token_head(r);
    return static_cast<const Byte*>(args_.query) +
           2 * ((plan_->first_row + new_token) * args_.query_stride[0] + head * args_.query_stride[1]);
  }

  void load_rows() {
    const Index* stride = args_.query_stride;
    for (Index r = 0; r < 32 * num_blocks(); ++r) {
      if (r % 32 == 0) prefetch_next(r / 32);
      constexpr Index kAhead = 16;
      for (Index i = 0; i < 2 * key_.dim; i += 64) prefetch(query_of(r + kAhead) + i);
      const auto [new_token, head] = token_head(r);
      const Byte* from = query_of(r);
      for (Index s = 0; s < kDims; ++s) {
        Byte* to = space_.query[r / 16][s] + r % 16 * 64;
        if (32 * s >= key_.dim) {
          std::memset(to, 0, 64);
        } else if (stride[2] == 1) {
          std::memcpy(to, from + 64 * s, 64);
        } else {
          for (Index i = 0; i < 32; ++i) std::memcpy(to + 2 * i, from + 2 * (32 * s + i) * stride[2], 2);
        }
      }
      space_.rows[r] = score_row(args_, *plan_, new_token, head);
      set_shift(r, -INFINITY);
      space_.has_shifts[r / 32] = false;
      _mm512_store_ps(space_.sums[r], _mm512_setzero_ps());
    }
  }

  // --- keys and values of a chunk ------------------------------------------------------------------------

  void pack(const TokenSlots& slots, Tokens seen) {
    for (Index first = 0; first < kPromptChunk; first += kChunk) {
      const Index begin = max(seen.begin, chunk_ + first), end = min(seen.end, chunk_ + first + kChunk);
      if (begin >= end) {
        std::memset(space_.keys[first / 16], 0, kChunk / 16 * sizeof space_.keys[0]);
        std::memset(space_.values[first / kStep], 0, kChunk / kStep * sizeof space_.values[0]);
        continue;
      }
      key_rows_.find(slots, item_.first_head, begin, end - begin);
      for (Index t = 0; t < kChunk; t += kBlock) pack_keys(t, space_.keys[(first + t) / 16]);
      value_rows_.find(slots, item_.first_head, begin, end - begin);
      for (Index t = 0; t < kChunk; t += kStep) pack_values(t, space_.values[(first + t) / kStep]);
    }
  }

  // Finds the tokens of the next chunk, and prefetches them by blocks of rows.
  void find_next(const TokenSlots& slots, Tokens tokens) {
    next_keys_.find(slots, item_.first_head, tokens);
    next_values_.find(slots, item_.first_head, tokens);
  }
  void prefetch_next(Index b) const {
    next_keys_.prefetch_share(b, num_blocks());
    next_values_.prefetch_share(b, num_blocks());
  }

  // Keys of a block as tiles of 16 pairs of dims by 16 tokens.
  void pack_keys(Index first, Byte (*to)[1024]) {
    if (!key_rows_.has_block(first)) return void(std::memset(to, 0, kDims * 1024));
    const Byte* const* rows = key_rows_.block(first);
    for (Index s = 0; s < kDims; ++s) {
      if (32 * s < key_.dim)
        transpose_dwords(rows, 64 * s, to[s]);
      else
        std::memset(to[s], 0, 1024);
    }
  }

  // Values of a step as tiles of 16 pairs of tokens, t and t + 16, by 16 dims. Those that no row sees are 0,
  // with any content of their slots.
  void pack_values(Index first, Byte (*to)[1024]) {
    alignas(64) static constexpr Byte zeros[64 * kDims] = {};
    const Byte* rows[kStep];
    for (Index block = first; block < first + kStep; block += kBlock) {
      const Byte* const* from = value_rows_.has_block(block) ? value_rows_.block(block) : nullptr;
      for (Index t = block; t < block + kBlock; ++t)
        rows[t - first] = value_rows_.has_token(t) ? from[t - block] : zeros;
    }
    for (Index s = 0; s < kDims; ++s) {
      if (32 * s >= value_.dim) {
        std::memset(to[2 * s], 0, 2 * sizeof to[0]);
        continue;
      }
      for (Index t = 0; t < kBlock; ++t) {
        const RowPairs pairs(_mm512_loadu_si512(rows[t] + 64 * s), _mm512_loadu_si512(rows[t + 16] + 64 * s));
        _mm512_store_si512(to[2 * s] + 64 * t, pairs.even);
        _mm512_store_si512(to[2 * s + 1] + 64 * t, pairs.odd);
      }
    }
  }

  // --- a chunk -------------------------------------------------------------------------------------------

  // All rows of the item meet the chunk, in blocks of 32.
  void run_chunk() {
    if constexpr (kStepsInTurn > 0)
      if (!is_adjusted_ && !has_bias(args_) && all_see_chunk()) return run_whole_chunk();
    for (Index b = 0; b < num_blocks(); ++b) {
      prefetch_next(b);
      // Later rows see later tokens.
      const Index begin = max(space_.rows[32 * b].visible.begin - chunk_, 0) / kStep;
      const Index end = ceil_div(min(space_.rows[32 * b + 31].visible.end - chunk_, kPromptChunk), kStep);
      if (begin >= end) {
        if (is_first_) add_values(b, 0, 0);
        continue;
      }
      weigh_chunk(b, begin, end);
      if (!finish_chunk(b, false)) {
        raise_shifts(b, begin, end);
        weigh_chunk(b, begin, end);
        finish_chunk(b, true);
      }
      add_values(b, begin, end);
    }
  }

  bool all_see_chunk() const {
    return space_.rows[0].visible.end >= chunk_ + kPromptChunk &&
           space_.rows[item_.num_rows - 1].visible.begin <= chunk_;
  }

  // Tiles and vectors alternate: tiles score a block's steps, or add 32 dims of the block before, while
  // vectors weigh rows that were scored some turns ago.
  void run_whole_chunk() {
    prefetch_next(0);
    run_turns<true, false>(0);
    for (Index b = 1; b < num_blocks(); ++b) {
      prefetch_next(b);
      run_turns<true, true>(b);
    }
    run_turns<false, true>(num_blocks());
  }

  // No branch depends on anything but constants and the first time: compilers would spill what vectors hold.
  template <bool kHasBlock, bool kHasBefore>
  [[gnu::noinline]] void run_turns(Index b) {
    constexpr int kTurns = 16, kRowsInTurn = 2 * kStepsInTurn;
    // Number of turns from a score to its weight.
    constexpr int kLag = kStepsInTurn == 4 ? 4 : kStepsInTurn == 2 ? 6 : 8;
    if (kHasBlock) clear_chunk_sums(b);
    const auto take_turns = [&]<bool kIsFirst>(Index n) KVLOOM_INLINE_LAMBDA {
      KVLOOM_UNROLL(16)
      for (int turn = 0; turn < kTurns; ++turn) {
        if (turn < 8) {
          if (kHasBlock) score_part(b, kStepsInTurn * n + turn / kDims, turn % kDims);
        } else if (kHasBefore) {
          add_step(b - 1, n, turn - 8, 0, kStepsOfChunk);
        }
        if (kIsFirst && turn == kLag - 1 && kHasBlock) set_shifts(b, 0);
        // First row to weigh, of the steps of this round or of the one before.
        const int first = (turn - kLag + kTurns) % kTurns * kRowsInTurn;
        if (turn >= kLag || !kIsFirst) {
          if (kHasBlock)
            weigh_rows<kRowsInTurn>(b, kStepsInTurn * (turn < kLag ? n - 1 : n) + first / 32, first % 32);
        } else if (kHasBefore) {
          weigh_rows<kRowsInTurn>(b - 1, kStepsOfChunk - kStepsInTurn + first / 32, first % 32);
        }
        if (kIsFirst && turn == 7 && kHasBefore && !finish_chunk(b - 1, false)) repeat(b);
      }
    };
    take_turns.template operator()<true>(0);
    for (Index n = 1; n < kDims; ++n) take_turns.template operator()<false>(n);
  }

  // Weighs the block before b again, with larger shifts; and scores what of b this took the place of.
  [[gnu::noinline]] void repeat(Index b) {
    raise_shifts(b - 1, 0, kStepsOfChunk);
    weigh_chunk(b - 1, 0, kStepsOfChunk);
    finish_chunk(b - 1, true);
    if (b == num_blocks()) return;
    for (Index step = 0; step < kStepsInTurn; ++step) score(b, step, [](Index) {});
  }

  void clear_chunk_sums(Index b) {
    for (Index i = 0; i < 32; ++i) _mm512_store_ps(space_.chunk_sums[b % 2][i], _mm512_setzero_ps());
  }

  // Weights of a block and the steps [begin, end): while vectors weigh one, tiles score the next.
  void weigh_chunk(Index b, Index begin, Index end) {
    clear_chunk_sums(b);
    score(b, begin, [](Index) {});
    for (Index step = begin; step < end; ++step) {
      adjust(b, step);
      set_shifts(b, step);
      const auto weigh = [&](Index part) {
        for (Index i = part * 32 / kDims / 2 * 2; i < (part + 1) * 32 / kDims / 2 * 2; i += 2)
          is_adjusted_ ? weigh_adjusted(b, step, i) : weigh_rows<2>(b, step, i);
      };
      if (step + 1 < end)
        score(b, step + 1, weigh);
      else
        for (Index part = 0; part < kDims; ++part) weigh(part);
    }
  }

  // --- scores --------------------------------------------------------------------------------------------

  float (*scores_of(Index step)) [kStep] { return space_.scores[step % kKeptSteps]; }

  // Scores of a block by a step; meanwhile(part) is called kDims times, among the products.
  template <class Meanwhile>
  KVLOOM_INLINE void score(Index b, Index step, Meanwhile meanwhile) {
    KVLOOM_UNROLL(8)
    for (int part = 0; part < kDims; ++part) {
      score_part(b, step, part);
      meanwhile(part);
    }
  }

  // 32 dims of that: the first ones begin the sums, the last ones write them.
  KVLOOM_INLINE void score_part(Index b, Index step, int part) {
    if (part == 0) zero_sums();
    tiles_.template load<4>(space_.query[2 * b][part], 64);
    tiles_.template load<6>(space_.keys[2 * step][part], 64);
    tiles_.template multiply<0, 4, 6>();
    tiles_.template load<7>(space_.keys[2 * step + 1][part], 64);
    tiles_.template multiply<1, 4, 7>();
    tiles_.template load<5>(space_.query[2 * b + 1][part], 64);
    tiles_.template multiply<2, 5, 6>();
    tiles_.template multiply<3, 5, 7>();
    if (part + 1 < kDims) return;
    float (*to)[kStep] = scores_of(step);
    tiles_.template store<0>(to[0], 4 * kStep), tiles_.template store<1>(to[0] + 16, 4 * kStep);
    tiles_.template store<2>(to[16], 4 * kStep), tiles_.template store<3>(to[16] + 16, 4 * kStep);
  }

  KVLOOM_INLINE void zero_sums() {
    tiles_.template zero<0>(), tiles_.template zero<1>(), tiles_.template zero<2>(),
        tiles_.template zero<3>();
  }

  // Hides what a row does not see, and does what else the call asks of scores.
  void adjust(Index b, Index step) {
    const Index first = chunk_ + kStep * step;
    if (has_bias(args_)) bias_products(b, step);
    // Tokens that all rows see.
    const Tokens seen{space_.rows[32 * b + 31].visible.begin, space_.rows[32 * b].visible.end};
    if (!is_adjusted_ && seen.begin <= first && seen.end >= first + kStep) return;
    for (Index i = 0; i < 32; ++i) {
      const ScoreRow& row = space_.rows[32 * b + i];
      float* scores = scores_of(step)[i];
      if (is_adjusted_) {
        adjust_scores<kStep>(args_, row, first, plan_->num_stored, scores);
        continue;
      }
      const Index begin = row.visible.begin - first, end = row.visible.end - first;
      if (begin <= 0 && end >= kStep) continue;
      const uint32_t seen = bits_below(end) & ~bits_below(begin);
      hide(scores, static_cast<__mmask16>(seen));
      hide(scores + 16, static_cast<__mmask16>(seen >> 16));
    }
  }

  [[gnu::noinline]] void bias_products(Index b, Index step) {
    const PositionalBias& bias = args_.bias;
    MiddleWaves waves;
    waves.find(bias, item_.first_head, 1, position_of(bias, sequence_, chunk_ + kStep * step), kStep);
    const float* table = workspace_.wave_tables() + item_.first_head * bias.num_pairs * 2 * kWaves;
    alignas(64) float row[2 * kMaxPairs];
    for (Index i = 0; i < 32; ++i) {
      const auto [new_token, head] = token_head(32 * b + i);
      read_coefficients(bias, plan_->first_row + new_token, head, row);
      add_bias<1, kStep>({row, bias.num_pairs, padded_pairs(bias), waves.cos, waves.sin, table},
                         scores_of(step)[i]);
    }
  }

  static uint32_t bits_below(Index i) { return i <= 0 ? 0u : i >= 32 ? ~0u : (uint32_t{1} << i) - 1; }
  static void hide(float* scores, __mmask16 seen) {
    _mm512_store_ps(scores, _mm512_mask_mov_ps(_mm512_set1_ps(kHidden), seen, _mm512_load_ps(scores)));
  }

  float largest_score(Index step, Index i) {
    const float* scores = scores_of(step)[i];
    return _mm512_reduce_max_ps(_mm512_max_ps(_mm512_load_ps(scores), _mm512_load_ps(scores + 16)));
  }

  void set_shift(Index r, float shift) {
    space_.shift[r] = shift;
    space_.down[r] = -finite_max(shift) * args_.scale * kLog2e;
  }

  // Sets the shifts of rows that see their first tokens.
  KVLOOM_INLINE void set_shifts(Index b, Index step) {
    if (!space_.has_shifts[b]) space_.has_shifts[b] = find_shifts(b, step);
  }

  // Returns whether all rows have a shift.
  [[gnu::noinline]] bool find_shifts(Index b, Index step) {
    bool have_all = true;
    for (Index i = 0; i < 32; ++i) {
      if (space_.shift[32 * b + i] != -INFINITY) continue;
      const float largest = largest_score(step, i);
      const bool is_seen = largest > (is_adjusted_ ? -INFINITY : 0.1f * kHidden);
      if (is_seen) set_shift(32 * b + i, largest);
      have_all &= is_seen;
    }
    return have_all;
  }

  // --- weights -------------------------------------------------------------------------------------------

  // Weights of kCount rows of a block from `first` on.
  template <int kCount>
  KVLOOM_INLINE void weigh_rows(Index b, Index step, Index first) {
    const float (*scores)[kStep] = scores_of(step) + first;
    const __m512 unit = _mm512_set1_ps(args_.scale * kLog2e);
    KVLOOM_UNROLL(8)
    for (int i = 0; i < kCount; ++i) {
      const __m512 down = _mm512_set1_ps(space_.down[32 * b + first + i]);
      put_weights(b, step, first + i, exp2_of<3>(_mm512_fmadd_ps(_mm512_load_ps(scores[i]), unit, down)),
                  exp2_of<3>(_mm512_fmadd_ps(_mm512_load_ps(scores[i] + 16), unit, down)));
    }
  }

  // Weights of two rows whose scores are in their final unit, those of hidden tokens -infinity.
  void weigh_adjusted(Index b, Index step, Index first) {
    for (Index i = first; i < first + 2; ++i) {
      const __m512 shift = _mm512_set1_ps(finite_max(space_.shift[32 * b + i]));
      const auto weight = [&](Index t) {
        const __m512 below = _mm512_sub_ps(_mm512_load_ps(scores_of(step)[i] + t), shift);
        const __m512 power = _mm512_mul_ps(below, _mm512_set1_ps(kLog2e));
        return exp2_of<3>(_mm512_max_ps(_mm512_set1_ps(kHidden), power));  // a NaN stays one
      };
      put_weights(b, step, i, weight(0), weight(16));
    }
  }

  KVLOOM_INLINE void put_weights(Index b, Index step, Index i, __m512 low, __m512 high) {
    float* sums = space_.chunk_sums[b % 2][i];
    _mm512_store_ps(sums, _mm512_add_ps(_mm512_load_ps(sums), _mm512_add_ps(low, high)));
    _mm512_store_si512(space_.weights[b % 2][i / 16][step] + i % 16 * 64, pair_rounded(low, high));
  }

  static bool is_small(const float* sums) {
    return _mm512_cmp_ps_mask(_mm512_load_ps(sums), _mm512_set1_ps(kMaxChunkSum), _CMP_LT_OQ) == 0xffff;
  }

  // Adds the sums of the chunk to those before. Returns false instead if some are too large, or NaN; not if
  // `is_final`.
  bool finish_chunk(Index b, bool is_final) {
    const float (*chunk)[16] = space_.chunk_sums[b % 2];
    bool are_small = true;
    for (Index i = 0; i < 32; ++i) are_small &= is_small(chunk[i]);
    if (!are_small && !is_final) return false;
    for (Index i = 0; i < 32; ++i) {
      float* sums = space_.sums[32 * b + i];
      _mm512_store_ps(sums, _mm512_add_ps(_mm512_load_ps(sums), _mm512_load_ps(chunk[i])));
    }
    return true;
  }

  // Raises the shift of rows whose chunk has become too large to the largest score of the chunk, and shrinks
  // what was added up before.
  [[gnu::noinline]] void raise_shifts(Index b, Index begin, Index end) {
    float largest[32];
    for (Index i = 0; i < 32; ++i) largest[i] = space_.shift[32 * b + i];
    for (Index step = begin; step < end; ++step) {
      score(b, step, [](Index) {});
      adjust(b, step);
      for (Index i = 0; i < 32; ++i) largest[i] = std::fmax(largest[i], largest_score(step, i));
    }
    for (Index i = 0; i < 32; ++i) {
      if (is_small(space_.chunk_sums[b % 2][i])) continue;
      const Index r = 32 * b + i;
      const float unit = is_adjusted_ ? kLog2e : args_.scale * kLog2e;
      const float below = std::fmax((finite_max(space_.shift[r]) - finite_max(largest[i])) * unit, kHidden);
      const __m512 factor = exp2_of<5>(_mm512_set1_ps(below));
      set_shift(r, largest[i]);
      scale_by(space_.sums[r], factor);
      if (!is_first_)
        for (Index n = 0; n < 2 * kDims; ++n) scale_by(space_.totals[r / 16][n][r % 16], factor);
    }
  }

  static void scale_by(float* x, __m512 factor) {
    _mm512_store_ps(x, _mm512_mul_ps(_mm512_load_ps(x), factor));
  }

  // --- totals --------------------------------------------------------------------------------------------

  // The block's totals of all dims over the steps [begin, end).
  void add_values(Index b, Index begin, Index end) {
    if (begin >= end) {
      std::memset(space_.totals[2 * b], 0, 2 * sizeof space_.totals[0]);
      return;
    }
    for (Index n = 0; n < kDims; ++n)
      for (Index step = begin; step < end; ++step) add_step(b, n, step, begin, end);
  }

  // 32 dims and one step of that: the first one reads the totals, the last one writes them.
  KVLOOM_INLINE void add_step(Index b, Index n, Index step, Index begin, Index end) {
    float *low = space_.totals[2 * b][2 * n][0], *high = space_.totals[2 * b + 1][2 * n][0];
    if (step == begin) {
      if (is_first_) {
        zero_sums();
      } else {
        tiles_.template load<0>(low, 64), tiles_.template load<1>(low + 256, 64);
        tiles_.template load<2>(high, 64), tiles_.template load<3>(high + 256, 64);
      }
    }
    tiles_.template load<4>(space_.weights[b % 2][0][step], 64);
    tiles_.template load<6>(space_.values[step][2 * n], 64);
    tiles_.template multiply<0, 4, 6>();
    tiles_.template load<7>(space_.values[step][2 * n + 1], 64);
    tiles_.template multiply<1, 4, 7>();
    tiles_.template load<5>(space_.weights[b % 2][1][step], 64);
    tiles_.template multiply<2, 5, 6>();
    tiles_.template multiply<3, 5, 7>();
    if (step + 1 < end) return;
    tiles_.template store<0>(low, 64), tiles_.template store<1>(low + 256, 64);
    tiles_.template store<2>(high, 64), tiles_.template store<3>(high + 256, 64);
  }

  // --- results -------------------------------------------------------------------------------------------

  void write() {
    for (Index r = 0; r < item_.num_rows; ++r) {
      const auto [new_token, head] = token_head(r);
      const ScoreRow& row = space_.rows[r];
      const float unit = is_adjusted_ ? 1.0f : args_.scale;
      const OnlineSoftmax softmax{space_.shift[r] * unit,
                                  _mm512_reduce_add_ps(_mm512_load_ps(space_.sums[r]))};
      const Index to = (plan_->first_row + new_token) * args_.num_heads + head;
      const bool is_finite = args_.lse ? write_part(r, head, softmax, to) : write_row(r, head, softmax, to);
      // Without a sum, scores may be as far below zero as those that hide tokens.
      const bool is_certain = is_adjusted_ || softmax.sum > 0.0f || row.visible.begin >= row.visible.end;
      if (!is_finite || !is_certain) NonFiniteRow(args_, *plan_, sequence_).compute(new_token, head, row);
    }
  }

  // Writes a row of the result. Returns whether it is finite.
  bool write_row(Index r, Index head, OnlineSoftmax softmax, Index to) {
    const float scale = FinalSoftmax(args_, head, softmax).scale();
    auto* out = static_cast<BFloat*>(args_.out) + to * value_.dim;
    Vec differences{};  // x - x: 0 where x is finite, else NaN
    for (Index n = 0; n < value_.dim / 32; ++n) {
      const float* from = space_.totals[r / 16][2 * n][r % 16];
      const Vec even = is_first_ ? Vec{} : load(from) * scale,
                odd = is_first_ ? Vec{} : load(from + 256) * scale;
      differences += (even - even) + (odd - odd);
      store(out + 32 * n, interleave_low(even, odd));
      store(out + 32 * n + 16, interleave_high(even, odd));
    }
    return sum_lanes(differences) == 0.0f;
  }

  // The same for a part, which is finished as rows of other kernels are.
  bool write_part(Index r, Index head, OnlineSoftmax softmax, Index to) {
    alignas(64) float accumulator[kMaxTileDim] = {};
    for (Index n = 0; n < value_.dim / 32 && !is_first_; ++n) {
      const float* from = space_.totals[r / 16][2 * n][r % 16];
      const Vec even = load(from), odd = load(from + 256);
      store(accumulator + 32 * n, interleave_low(even, odd));
      store(accumulator + 32 * n + 16, interleave_high(even, odd));
    }
    return finish_row(args_, head, softmax, accumulator, value_.dim, to);
  }

  Tiles& tiles_;
  const AttendArgs& args_;
  const Workspace& workspace_;
  Space& space_;
  const SideLayout &key_, &value_;
  TileRows key_rows_, value_rows_;
  TileRowPrefetcher next_keys_, next_values_;
  const Index group_;
  const bool is_adjusted_;
  const SequencePlan* plan_ = nullptr;
  Item item_{};
  Index sequence_ = 0, chunk_ = 0;
  bool is_first_ = true;  // no chunk was added yet
};

// Calls run.template operator()<kDims>() with the pieces of 32 dims that hold a head dim of at most 256.
template <class Run>
inline void for_prompt_dims(Index dim, Run run) {
  if (dim <= 64) return run.template operator()<2>();
  if (dim <= 96) return run.template operator()<3>();
  if (dim <= 128) return run.template operator()<4>();
  if (dim <= 192) return run.template operator()<6>();
  return run.template operator()<8>();
}

}  // namespace kvloom::KVLOOM_ISA
