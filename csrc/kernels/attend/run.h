// Attention over stored tokens: work items, each a tile of rows over a range of tokens; and merging splits.
//
// The caller sees attend_supports, attend_plan, attend_prepare, attend_run and attend_merge. Include this in
// a unit that defines KVLOOM_ISA.
#pragma once

#include <optional>

#include "kernels.h"
#include "plan.h"
#include "positional.h"
#include "nonfinite.h"
#include "softmax.h"
#include "two_bits.h"

#ifdef KVLOOM_HAS_TILES
#include "prompt.h"
#endif

namespace kvloom::KVLOOM_ISA {

// Whether head dims are within what the kernels keep on the stack.
inline bool attend_supports(const AttendArgs& args) {
  return head_dim(args.key) <= kMaxHeadDim && head_dim(args.value) <= kMaxHeadDim &&
         (!has_rope(args) || head_dim(args.rope) <= kMaxHeadDim);
}

// Rope keys after latents: products of their own with queries of their own.
struct RopeKeys {
  RopeKeys(const AttendArgs& args)
      : side(args.rope, NativeOrder::columns),
        kernel(choose_score(side, args.query_dtype)),
        width(round_up(side.dim, kBlock)) {
    rows.side = &side, rows.query_dtype = args.query_dtype, rows.uses_code_kernels = uses_code_kernels(side);
  }
  const SideLayout side;
  const ScoreKernel kernel;
  const Index width;
  ChunkRows rows;
  alignas(64) float query[kTileFloats];
  alignas(64) Byte packed[kTileRows * kPackedRow];
  alignas(64) float scores[kTileRows * kChunk];
};

// Runs work items one after another. While it computes a chunk, it prefetches the next one.
class ItemRunner {
 public:
  ItemRunner(const AttendArgs& args, const Workspace& workspace)
      : args_(args),
        workspace_(workspace),
        key_(args.key, NativeOrder::columns),
        value_(args.value, NativeOrder::quads),
        score_kernel_(choose_score(key_, args.query_dtype)),
        value_kernel_(choose_value(value_, args.query_dtype)),
        group_(args.num_heads / args.key.cache.num_heads()),
        key_width_(round_up(key_.dim, kBlock)),
        value_width_(round_up(value_.dim, kBlock)) {
    key_rows_.side = &key_, value_rows_.side = &value_;
    key_rows_.query_dtype = value_rows_.query_dtype = args.query_dtype;
    key_rows_.uses_code_kernels = uses_code_kernels(key_);
    value_rows_.uses_code_kernels = uses_code_kernels(value_);
    if (has_rope(args)) rope_.emplace(args);
  }

  void run(Index first, Index last) {
    if (first >= last) return;
    Job job(*this, first, nullptr);
    for (Index i = first; i < last; ++i) {
      const Job next(*this, min(i + 1, last - 1), &job);
      job.plan.is_prompt ? run_prompt(job) : run_item(job, i + 1 < last ? &next : nullptr);
      job = next;
    }
  }

 private:
  struct Addresses {
    ChunkAddresses key, value, rope;
  };

  // An item and the data of its sequence.
  struct Job {
    Job(const ItemRunner& runner, Index i, const Job* before)
        : b(before && i < runner.workspace_.offsets(before->b + 1).items
                ? before->b
                : runner.workspace_.sequence_of(&WorkOffsets::items, i)),
          plan(before && before->b == b ? before->plan : SequencePlan(runner.args_, b)),
          item(plan.item(runner.args_, i - runner.workspace_.offsets(b).items)),
          slots(runner.args_.table, b) {
      const Index first = item.first_row / runner.group_,
                  last = (item.first_row + item.num_rows - 1) / runner.group_;
      tokens = plan.visible(runner.args_, first, last + 1);
      if (item.split >= 0)
        tokens = {max(tokens.begin, item.split * kSplit), min(tokens.end, (item.split + 1) * kSplit)};
    }
    Index b;
    SequencePlan plan;
    Item item;
    TokenSlots slots;
    Tokens tokens;
  };

  void run_prompt(const Job& job) {
#ifdef KVLOOM_HAS_TILES
    for_prompt_dims(max(key_.dim, value_.dim), [&]<int kDims>() {
      PromptSpace<kDims> space;
      PromptItem<KVLOOM_TILES, kDims> item(tiles_, args_, workspace_, key_, value_, space);
      item.run(job.plan, job.b, job.item, job.tokens, job.slots);
    });
#else
    (void)job;  // no call is in tiles
#endif
  }

  // The chunk that holds `token`, as far as the job sees it.
  static Tokens chunk_at(const Job& job, Index token) {
    const Index first = token / kChunk * kChunk;
    return {max(first, job.tokens.begin), min(first + kChunk, job.tokens.end)};
  }

  void run_item(const Job& job, const Job* next) {
    load_queries(job);
    const Index rows = num_rows(job);
    start_split(rows);
    bool is_first_split = true;
    if (job.tokens.begin < job.tokens.end) find_rows(job, chunk_at(job, job.tokens.begin), *current_);
    for (Index token = job.tokens.begin; token < job.tokens.end;) {
      const Tokens chunk = chunk_at(job, token);
      find_next(job, chunk.end, next);
      prefetch_rows(job, next, chunk);
      run_chunk(job, chunk);
      std::swap(current_, next_);
      token = chunk.end;
      if (job.item.split < 0 && (token % kSplit == 0 || token >= job.tokens.end)) {
        end_split(rows, is_first_split);
        is_first_split = false;
      }
    }
    if (job.item.split < 0 && is_first_split) end_split(rows, true);  // no token is visible
    job.item.split < 0 ? write_rows(job) : write_partials(job);
  }

  // Row r of an item, in which the rows of each head are consecutive.
  struct TileRow {
    Index new_token, head;  // head of the query
  };
  TileRow tile_row(const Job& job, Index r) const {
    const Index row = job.item.first_row + r % job.item.num_rows;
    return {row / group_, (job.item.first_head + r / job.item.num_rows) * group_ + row % group_};
  }
  static Index num_rows(const Job& job) { return job.item.num_heads * job.item.num_rows; }

  // Offset of a row's query, in elements, and its row in the result.
  Index query_at(const Job& job, TileRow row) const {
    return (job.plan.first_row + row.new_token) * args_.query_stride[0] + row.head * args_.query_stride[1];
  }
  Index out_row(const Job& job, TileRow row) const {
    return (job.plan.first_row + row.new_token) * args_.num_heads + row.head;
  }

  void load_queries(const Job& job) {
    for (Index r = 0; r < num_rows(job); ++r) {
      const TileRow row = tile_row(job, r);
      float* to = query_ + r * key_width_;
      read_floats(args_.query, args_.query_dtype, query_at(job, row), args_.query_stride[2], to, key_.dim);
      for (Index d = key_.dim; d < key_width_; ++d) to[d] = 0.0f;
      score_rows_[r] = score_row(args_, job.plan, row.new_token, row.head);
    }
    if (has_bias(args_)) load_coefficients(job);
    if (rope_) load_rope_queries(job);
    score_kernel_.pack(key_, query_, num_rows(job), key_width_, packed_);
  }

  [[gnu::noinline]] void load_coefficients(const Job& job) {
    const Index row_floats = 2 * padded_pairs(args_.bias);
    for (Index r = 0; r < num_rows(job); ++r) {
      const TileRow row = tile_row(job, r);
      read_coefficients(args_.bias, job.plan.first_row + row.new_token, row.head,
                        coefficients_ + r * row_floats);
    }
  }

  [[gnu::noinline]] void load_rope_queries(const Job& job) {
    RopeKeys& rope = *rope_;
    for (Index r = 0; r < num_rows(job); ++r) {
      float* to = rope.query + r * rope.width;
      const Index from = query_at(job, tile_row(job, r)) + key_.dim * args_.query_stride[2];
      read_floats(args_.query, args_.query_dtype, from, args_.query_stride[2], to, rope.side.dim);
      for (Index d = rope.side.dim; d < rope.width; ++d) to[d] = 0.0f;
    }
    rope.kernel.pack(rope.side, rope.query, num_rows(job), rope.width, rope.packed);
  }

  // Prefetches queries of the next item and result rows of this one, which are written at its end: a share
  // with each chunk.
  KVLOOM_INLINE void prefetch_rows(const Job& job, const Job* next, Tokens chunk) const {
    const auto share = [&](const Job& owner, Index token) {
      return (token - job.tokens.begin) * num_rows(owner) / (job.tokens.end - job.tokens.begin);
    };
    const Index bytes = args_.query_dtype == DType::f32 ? 4 : 2;
    const Index out_bytes = (args_.out_dtype == DType::f32 ? 4 : 2) * value_.dim;
    if (next)
      for (Index r = share(*next, chunk.begin); r < share(*next, chunk.end); ++r)
        prefetch_lines(args_.query, query_at(*next, tile_row(*next, r)) * bytes, key_.dim * bytes);
    if (job.item.split < 0)
      for (Index r = share(job, chunk.begin); r < share(job, chunk.end); ++r)
        prefetch_lines(args_.out, out_row(job, tile_row(job, r)) * out_bytes, out_bytes);
  }

  KVLOOM_INLINE static void prefetch_lines(const void* from, Index first, Index bytes) {
    for (Index i = first; i < first + bytes; i += 64) prefetch_to_l2(static_cast<const Byte*>(from) + i);
  }

  // Finds the addresses of the next chunk, in this item or the next one. After the last chunk they repeat
  // this one: there is nothing else to prefetch.
  void find_next(const Job& job, Index token, const Job* next) {
    const Job& owner = token < job.tokens.end || !next ? job : *next;
    const Index first = &owner == &job ? token : owner.tokens.begin;
    if (first >= owner.tokens.end) {
      next_->key.repeat(current_->key);
      next_->value.repeat(current_->value);
      if (rope_) next_->rope.repeat(current_->rope);
      return;
    }
    find_rows(owner, chunk_at(owner, first), *next_);
  }

  void find_rows(const Job& job, Tokens chunk, Addresses& to) const {
    const Index head = job.item.first_head, count = chunk.end - chunk.begin;
    to.key.find(job.slots, key_, head, chunk.begin, count);
    to.value.find(job.slots, value_, head, chunk.begin, count);
    if (rope_) to.rope.find(job.slots, rope_->side, head, chunk.begin, count);
  }

  KVLOOM_INLINE void run_chunk(const Job& job, Tokens chunk) {
    const Index first = chunk.begin / kChunk * kChunk;
    const RowRange seen = rows_that_see(chunk, job.item.num_rows);
    ChunkRows &keys = key_rows_, &values = value_rows_;
    keys.begin = values.begin = chunk.begin - first;
    keys.end = values.end = chunk.end - first;
    keys.num_heads = values.num_heads = job.item.num_heads;
    keys.next_scale = next_->key.scale, values.next_scale = next_->value.scale;
    list_rows(job.item.num_heads);
    if (has_bias(args_)) find_waves(job, first);
    for (Index h = 0; h < job.item.num_heads; ++h) {
      const Index r0 = h * job.item.num_rows + seen.first;
      set_rows(keys, current_->key, 2 * h);
      score_kernel_.run(keys,
                        {query_ + r0 * key_width_, packed_, r0, seen.count, key_width_, scores_, &tiles_});
      if (has_bias(args_)) bias_products(job, h, r0, seen.count);
      if (rope_) add_rope_products(r0, seen.count);
      for_rows(seen.count, [&]<int R>(Index r) {
        update_softmax<R>(args_, score_rows_ + r0 + r, first, job.plan.num_stored, scores_ + r * kChunk,
                          softmax_, r0 + r, factors_ + r);
      });
      if (rope_) {  // the values are the keys
        place_rows(values, current_->value, rows_[0]);
      } else {
        set_rows(values, current_->value, 2 * h + 1);
      }
      value_kernel_(
          values, {scores_, factors_, seen.count, value_width_, accumulators_ + r0 * value_width_, &tiles_});
    }
  }

  // Code of a bias is not inlined, so that the compiled code of all else is the same as without it.
  [[gnu::noinline]] void find_waves(const Job& job, Index first) {
    waves_.find(args_.bias, job.item.first_head, job.item.num_heads, position_of(args_.bias, job.b, first),
                kChunk);
  }

  // Adds the bias of some rows of the h-th head to their products with the chunk.
  [[gnu::noinline]] void bias_products(const Job& job, Index h, Index first_row, Index num_rows) {
    const Index pairs = args_.bias.num_pairs, padded = padded_pairs(args_.bias), at = h * pairs;
    const float* table = workspace_.wave_tables() + (job.item.first_head + h) * pairs * 2 * kWaves;
    for_rows(num_rows, [&]<int R>(Index r) {
      const float* rows = coefficients_ + (first_row + r) * 2 * padded;
      add_bias<R>({rows, pairs, padded, waves_.cos + at, waves_.sin + at, table}, scores_ + r * kChunk);
    });
  }

  // Adds the products with rope keys.
  [[gnu::noinline]] void add_rope_products(Index first_row, Index num_rows) {
    RopeKeys& rope = *rope_;
    rope.rows.begin = key_rows_.begin, rope.rows.end = key_rows_.end, rope.rows.num_heads = 1;
    rope.rows.next_scale = next_->rope.scale;
    place_rows(rope.rows, current_->rope, current_->rope.row);
    rope.rows.head = 0;
    const float* query = rope.query + first_row * rope.width;
    rope.kernel.run(rope.rows, {query, rope.packed, first_row, num_rows, rope.width, rope.scores, &tiles_});
    for (Index i = 0; i < num_rows * kChunk; i += kLanes)
      store(scores_ + i, load(scores_ + i) + load(rope.scores + i));
  }

  struct RowRange {
    Index first, count;
  };

  // Rows of a head that see some of the chunk. Later rows see later tokens, so these rows are consecutive.
  RowRange rows_that_see(Tokens chunk, Index num_rows) const {
    Index first = 0, last = num_rows;
    while (first < last && score_rows_[first].visible.end <= chunk.begin) ++first;
    while (first < last && score_rows_[last - 1].visible.begin >= chunk.end) --last;
    return {first, last - first};
  }

  // Lists the rows of the chunk in the order in which kernels read them: for each head its keys, then its
  // values. The rows of the next chunk's first head follow.
  void list_rows(Index heads) {
    for (Index h = 0; h < heads; ++h) {
      shift_rows(current_->key.row, h * key_.head_bytes(), rows_[2 * h]);
      shift_rows(current_->value.row, h * value_.head_bytes(), rows_[2 * h + 1]);
    }
    shift_rows(next_->key.row, 0, rows_[2 * heads]);
    shift_rows(next_->value.row, 0, rows_[2 * heads + 1]);
    if (rope_) shift_rows(next_->key.row, 0, rows_[1]);  // the values are the keys, which come next
    if (key_.heads_are_contiguous) list_by_address(next_->key.row, heads, key_, far_rows_[0][0]);
    if (value_.heads_are_contiguous) list_by_address(next_->value.row, heads, value_, far_rows_[1][0]);
  }

  // The rows of all heads, token by token: memory is fastest in the order of addresses.
  static void list_by_address(const Byte* const* rows, Index heads, const SideLayout& side, const Byte** to) {
    const Index bytes = side.head_bytes();
    for (Index t = 0; t < kChunk; ++t)
      for (Index h = 0; h < heads; ++h) *to++ = rows[t] + h * bytes;
  }

  static void shift_rows(const Byte* const* rows, Index bytes, const Byte** to) {
    for (Index t = 0; t < kChunk; ++t) to[t] = rows[t] + bytes;
  }

  // The i-th listed rows and their scales, or copies where rows are not contiguous or are expanded.
  void set_rows(ChunkRows& chunk, ChunkAddresses& addresses, Index i) {
    const SideLayout& side = *chunk.side;
    const Byte* const* rows = rows_[i];
    const Index distance = RowPrefetcher::distance(side.cache.itemsize);
    chunk.prefetcher = {rows, side.heads_are_contiguous ? far_rows_[i % 2][i / 2] : rows + distance,
                        args_.prefetches_to_l2};
    chunk.head = i / 2;
    if (side.scale.data && i >= 2) shift_rows(addresses.scale, side.scale_head_bytes(), addresses.scale);
    place_rows(chunk, addresses, rows);
  }

  void place_rows(ChunkRows& chunk, ChunkAddresses& addresses, const Byte* const* rows) {
    const SideLayout& side = *chunk.side;
    chunk.in_blocks = addresses.in_blocks;
    chunk.is_native = addresses.in_blocks && side.order != NativeOrder::none && chunk.uses_code_kernels;
    chunk.row = rows;
    if (side.is_expanded)
      chunk.row =
          expand_rows(side, rows, addresses.begin, addresses.end, chunk.is_native, gathered_, copied_rows_);
    else if (!side.is_contiguous && !chunk.is_native)
      chunk.row = copy_rows(rows, addresses.begin, addresses.end, side.cache, gathered_, copied_rows_);
    chunk.scale = addresses.scale;
    if (side.scale.data && !side.scale_is_contiguous)
      chunk.scale = copy_rows(addresses.scale, addresses.begin, addresses.end, side.scale, gathered_scales_,
                              copied_scales_);
  }

  void start_split(Index rows) {
    softmax_.start(rows);
    std::memset(accumulators_, 0, rows * value_width_ * sizeof(float));
  }

  void end_split(Index rows, bool is_first) {
    for (Index r = 0; r < rows; ++r) {
      float *merged = merged_ + r * value_width_, *part = accumulators_ + r * value_width_;
      if (is_first) {
        merged_softmax_[r] = softmax_[r];
        std::memcpy(merged, part, value_width_ * sizeof(float));
      } else {
        merge_partial(merged_softmax_[r], merged, softmax_[r], part, value_width_);
      }
    }
    start_split(rows);
  }

  void write_rows(const Job& job) {
    for (Index r = 0; r < num_rows(job); ++r) {
      const TileRow row = tile_row(job, r);
      const Index to = out_row(job, row);
      if (!finish_row(args_, row.head, merged_softmax_[r], merged_ + r * value_width_, value_.dim, to))
        NonFiniteRow(args_, job.plan, job.b).compute(row.new_token, row.head, score_rows_[r]);
    }
  }

  void write_partials(const Job& job) {
    for (Index r = 0; r < num_rows(job); ++r) {
      const TileRow row = tile_row(job, r);
      const Index split = job.item.split - job.plan.first_split;
      float* to = workspace_.partial(job.plan, job.b, split, row.new_token, row.head);
      to[0] = softmax_.max[r];
      to[1] = softmax_.sum[r];
      std::memcpy(to + kPartial, accumulators_ + r * value_width_, value_width_ * sizeof(float));
    }
  }

  const AttendArgs& args_;
  const Workspace& workspace_;
  const SideLayout key_, value_;
  const ScoreKernel score_kernel_;
  const ValueKernel value_kernel_;
  const Index group_, key_width_, value_width_;

  [[no_unique_address]] KVLOOM_TILES tiles_;
  ChunkRows key_rows_, value_rows_;
  const Byte *rows_[2 * (kTileHeads + 1)][kChunk], *far_rows_[2][kTileHeads][kChunk];
  Addresses both_[2];
  Addresses *current_ = both_, *next_ = both_ + 1;
  ScoreRow score_rows_[kTileRows];
  SoftmaxRows softmax_;
  OnlineSoftmax merged_softmax_[kTileRows];
  const Byte *copied_rows_[kChunk], *copied_scales_[kChunk];
  float factors_[kTileRows];
  alignas(64) float scores_[kTileRows * kChunk];
  alignas(64) float query_[kTileFloats];
  alignas(64) Byte packed_[kTileRows * kPackedRow];
  alignas(64) float accumulators_[kTileFloats];
  alignas(64) float merged_[kTileFloats];
  alignas(64) Byte gathered_[kChunk * kMaxHeadDim * 4];
  alignas(64) Byte gathered_scales_[kChunk * kMaxHeadDim * 4];
  // For a positional bias.
  alignas(64) float coefficients_[kTileRows * 2 * kMaxPairs];
  MiddleWaves waves_;
  std::optional<RopeKeys> rope_;
};

// Whether this call has prompts, and they run in tiles.
inline bool attend_in_tiles(const AttendArgs& args) {
#ifdef KVLOOM_HAS_TILES
  bool has_prompts = false;
  if (has_rope(args)) return false;
  for (Index b = 0; b < args.num_sequences; ++b)
    has_prompts |= args.seqstarts[b + 1] - args.seqstarts[b] > kMaxNewTokensToSplit;
  if (!has_prompts) return false;
  const SideLayout key(args.key, NativeOrder::columns), value(args.value, NativeOrder::quads);
  return is_read_in_tiles(key, args.query_dtype) && is_read_in_tiles(value, args.query_dtype);
#else
  return (void)args, false;
#endif
}

inline AttendPlan attend_plan_of(const AttendArgs& args) { return attend_plan(args); }

inline void attend_prepare(const AttendArgs& args, void* workspace) {
  attend_plan(args, static_cast<WorkOffsets*>(workspace));
  if (has_bias(args)) fill_wave_tables(args, Workspace(args, workspace).wave_tables());
}

// Items [first, last) of the plan. The workspace was prepared.
inline void attend_run(const AttendArgs& args, Index first, Index last, void* data) {
  const Workspace workspace(args, data);
  ItemRunner(args, workspace).run(first, last);
}

// Merges [first, last), one for each row whose splits were items of their own.
inline void attend_merge(const AttendArgs& args, Index first, Index last, void* data) {
  const Workspace workspace(args, data);
  const Index dim = head_dim(args.value), width = round_up(dim, kBlock);
  alignas(64) float accumulator[kMaxHeadDim];
  for (Index i = first; i < last; ++i) {
    const Index b = workspace.sequence_of(&WorkOffsets::merges, i), row = i - workspace.offsets(b).merges;
    const SequencePlan plan(args, b);
    const Index new_token = row / args.num_heads, head = row % args.num_heads;
    OnlineSoftmax softmax;
    for (Index split = 0; split < plan.num_splits; ++split) {
      const float* part = workspace.partial(plan, b, split, new_token, head);
      if (split == 0) {
        softmax = {part[0], part[1]};
        std::memcpy(accumulator, part + kPartial, width * sizeof(float));
      } else {
        merge_partial(softmax, accumulator, {part[0], part[1]}, part + kPartial, width);
      }
    }
    if (!finish_row(args, head, softmax, accumulator, dim,
                    (plan.first_row + new_token) * args.num_heads + head))
      NonFiniteRow(args, plan, b).compute(new_token, head, score_row(args, plan, new_token, head));
  }
}

}  // namespace kvloom::KVLOOM_ISA
