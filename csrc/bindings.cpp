// Store, load and copy as torch calls them: tensors into views, slots checked, work spread over threads.
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "kernels.h"
#include "smoothing.h"
#include "tensors.h"

namespace kvloom {
namespace {

constexpr int64_t kBytesPerThread = 64 << 10;  // less is not worth waking a thread
// Above this size whole cache lines are written with non-temporal stores, since they would evict everything
// else. Loaded tokens are read next, so the limit is larger; dequantized ones come so slowly that streaming
// gains nothing until they exceed a last-level cache.
constexpr int64_t kBytesToStream = 2 << 20, kLoadedBytesToStream = 4 << 20;
constexpr int64_t kDequantizedBytesToStream = 16 << 20;

// --- tensors into plain arguments --------------------------------------------------------------------------

View target_view(const Tensor& x, bool has_scale = false) {
  return view_of(x, x.mutable_data_ptr(), has_scale);
}

// Tokens `[T, H, D]`, or `[B, H, N, D]` with token n of row b in slot b * N + n.
View token_view(const Tensor& x, const void* data) {
  View view = base_view(x, data);
  const auto sizes = x.sizes(), strides = x.strides();
  if (x.dim() == 4) {
    const int64_t size[6] = {sizes[0], sizes[2], 1, sizes[1], 1, sizes[3]};
    const int64_t stride[6] = {strides[0], strides[2], 0, strides[1], 0, strides[3]};
    std::copy_n(size, 6, view.size);
    std::copy_n(stride, 6, view.stride);
    return view;
  }
  require(x.dim() == 3, "tokens must have 3 dimensions");
  const int64_t size[6] = {sizes[0], 1, 1, sizes[1], 1, sizes[2]};
  const int64_t stride[6] = {strides[0], 0, 0, strides[1], 0, strides[2]};
  std::copy_n(size, 6, view.size);
  std::copy_n(stride, 6, view.stride);
  return view;
}

// --- checks ------------------------------------------------------------------------------------------------

// Slots of tokens, copied once, so that the values that are checked are those that are used: another thread
// may write to the tensor, or this call where the tensor shares memory with the cache.
class CheckedSlots {
 public:
  // Refuses slots outside `[0, num_slots)` before anything is written.
  CheckedSlots(const char* name, const Tensor& x, int64_t count, int64_t num_slots,
               bool skip_negative = false) {
    const Integers slots = slots_of(x);
    require(x.numel() == count, "there must be one slot for each token");
    slots_ = slots.copied(count);
    if (count == 0) return;
    const auto [low, high] = std::minmax_element(slots_.begin(), slots_.end());
    low_ = *low, high_ = *high;
    if (high_ < num_slots && (skip_negative || low_ >= 0)) return;
    for (int64_t t = 0; t < count; ++t) {
      const int64_t slot = slots_[t];
      if (slot < num_slots && (skip_negative || slot >= 0)) continue;
      throw std::invalid_argument(std::string(name) + " must be in [0, " + std::to_string(num_slots) +
                                  "), got " + std::to_string(slot) + " for token " + std::to_string(t));
    }
  }

  TokenSlots get() const { return TokenSlots(slots_.data()); }

  // Whether no slot occurs in both.
  bool is_disjoint(const CheckedSlots& other) const {
    if (slots_.empty() || high_ < other.low_ || other.high_ < low_) return true;
    std::vector<bool> seen(high_ - low_ + 1);
    for (const int64_t slot : slots_) seen[slot - low_] = true;
    return std::none_of(other.slots_.begin(), other.slots_.end(),
                        [&](int64_t slot) { return slot >= low_ && slot <= high_ && seen[slot - low_]; });
  }

 private:
  std::vector<int64_t> slots_;
  int64_t low_ = 0, high_ = 0;
};

void check_move(const Move& move) {
  const bool same = move.from.dtype == move.to.dtype && move.from.itemsize == move.to.itemsize;
  require(same || (move.from.dtype != DType::bits && move.to.dtype != DType::bits), "dtypes must fit");
  require(move.from.num_heads() * move.repeat == move.to.num_heads() &&
              move.from.head_dim() == move.to.head_dim(),
          "heads and head dims must fit");
  if (is_quantized(move.from.dtype)) check_scale(move.from, move.from_scale);
  if (is_quantized(move.to.dtype)) check_scale(move.to, move.to_scale);
}

struct Extent {
  const Byte* begin;
  const Byte* end;
};

Extent extent_of(const View& view) {
  int64_t last = 0;
  for (int i = 0; i < 6; ++i) {
    if (view.size[i] == 0) return {view.data, view.data};
    last += (view.size[i] - 1) * view.stride[i];
  }
  return {view.data, view.data + (last + 1) * view.itemsize};
}

// Whether a byte between the first and the last of one view is between those of the other.
bool extents_meet(const View& x, const View& y) {
  const Extent a = extent_of(x), b = extent_of(y);
  return a.begin < b.end && b.begin < a.end;
}

// --- threads -----------------------------------------------------------------------------------------------

constexpr int64_t kLine = 64, kSmallScratch = 8 << 10;

Byte* aligned_up(Byte* data) {
  return reinterpret_cast<Byte*>((reinterpret_cast<uintptr_t>(data) + kLine - 1) / kLine * kLine);
}

// Moves tokens `[0, count)`, in one thread or in several.
void run(MoveArgs& args, int64_t count, int64_t bytes_to_stream) {
  if (count == 0) return;
  int64_t bytes = 0, scratch_bytes = 0;  // of a token
  for (int m = 0; m < args.num_moves; ++m) {
    const Move& move = args.moves[m];
    bytes += std::max(token_bytes(move.from), token_bytes(move.to));
    int64_t row_bytes = 0;
    for (const View* view : {&move.from, &move.from_scale, &move.to, &move.to_scale}) {
      row_bytes += aligned(token_bytes(*view));
    }
    if (move.smooth) row_bytes += smoothed_bytes(move.from);
    scratch_bytes = std::max(scratch_bytes, row_bytes);
  }
  args.stream = double(bytes) * count >= bytes_to_stream;
  for (int m = 0; m < args.num_moves; ++m) args.stream &= !args.moves[m].restore;  // which reads them again
  const int64_t grain = std::max<int64_t>(1, kBytesPerThread / std::max<int64_t>(bytes, 1));
  const bool is_parallel = count > grain;
  // Allocated before anything is written, since it may fail.
  const int64_t pieces = is_parallel ? torch::stable::get_num_threads() : 1;
  std::unique_ptr<Byte[]> large;
  if (scratch_bytes > kSmallScratch) large.reset(new Byte[scratch_bytes * pieces + kLine]);
  std::atomic<int64_t> taken{0};
  const auto work = [&](int64_t begin, int64_t end) {
    alignas(kLine) Byte small[kSmallScratch];
    Byte* scratch = small;
    if (large) scratch = aligned_up(large.get()) + taken.fetch_add(1) % pieces * scratch_bytes;
    kernels().movement->move(args, begin, end, scratch);
  };
  if (is_parallel) {
    torch::stable::parallel_for(0, count, grain, work);  // once in each thread
  } else {
    work(0, count);
  }
}

// --- store -------------------------------------------------------------------------------------------------

// Keys or values of new tokens, `[T, H, D]` or `[B, H, N, D]`, into their cache.
Move store_side(const Tensor& x, const Tensor& cache, const MaybeTensor& scale, bool full_range,
                const SmoothArgs& smoothing) {
  Move move;
  if (smoothing.factor) move.smooth = &smoothing;
  move.full_range = full_range;
  move.from = token_view(x, x.const_data_ptr());
  move.to = target_view(cache, scale.has_value());
  if (scale) move.to_scale = target_view(*scale);
  check_move(move);
  return move;
}

// `of_key` and `of_value` say what is done to rows before, if their factors are there.
void store_sides(const Tensor& key, const MaybeTensor& value, const Tensor& slots, const Tensor& key_cache,
                 const MaybeTensor& value_cache, const MaybeTensor& key_scale, const MaybeTensor& value_scale,
                 bool full_range, const SmoothArgs& of_key, const SmoothArgs& of_value) {
  MoveArgs args;
  Move moves[2] = {store_side(key, key_cache, key_scale, full_range, of_key)};
  const int64_t count = moves[0].from.num_slots();
  require(slots.dim() == key.dim() - 2 && slots.size(0) == key.size(0),
          "there must be slots for each sequence");
  args.moves = moves;
  args.num_moves = 1;
  if (value && value_cache) {
    moves[args.num_moves++] = store_side(*value, *value_cache, value_scale, full_range, of_value);
    require(moves[1].from.num_slots() == count, "there must be as many values as keys");
    require(moves[0].to.num_slots() == moves[1].to.num_slots(), "keys and values must have the same slots");
  }
  const CheckedSlots to("slots", slots, count, moves[0].to.num_slots(), true);
  for (int from = 0; from < args.num_moves; ++from) {
    for (int m = 0; m < args.num_moves; ++m) {
      const View &x = moves[from].from, &codes = moves[m].to, &scale = moves[m].to_scale;
      require(!extents_meet(x, codes) && (scale.data == nullptr || !extents_meet(x, scale)),
              "new tokens must lie before or after the cache");
    }
  }
  args.to_slots = to.get();
  run(args, count, kBytesToStream);
}

void store(const Tensor& key, const MaybeTensor& value, const Tensor& slots, const Tensor& key_cache,
           const MaybeTensor& value_cache, const MaybeTensor& key_scale, const MaybeTensor& value_scale,
           bool full_range) {
  store_sides(key, value, slots, key_cache, value_cache, key_scale, value_scale, full_range, {}, {});
}

void expect_smoothing(const MaybeTensor& positions, const MaybeTensor& factor, const MaybeTensor& mean) {
  require(factor || !positions, "factor must be there with positions");
  require(positions || !mean, "positions must be there with mean");
}

void store_transformed(const Tensor& key, const MaybeTensor& value, const Tensor& slots,
                       const Tensor& key_cache, const MaybeTensor& value_cache, const MaybeTensor& key_scale,
                       const MaybeTensor& value_scale, bool full_range, int64_t key_block,
                       int64_t value_block, const MaybeTensor& positions, const MaybeTensor& factor,
                       const MaybeTensor& mean, const MaybeTensor& channels, const MaybeTensor& frequencies) {
  Smoothing of_key, of_value;
  expect_smoothing(positions, factor, mean);
  if (factor) {
    of_key.set_keys(key, positions, *factor, mean, channels, frequencies, key_block);
  } else if (key_block) {
    of_key.set_rotated(key, key_block);
  }
  if (value && value_block) of_value.set_rotated(*value, value_block);
  store_sides(key, value, slots, key_cache, value_cache, key_scale, value_scale, full_range, of_key.args,
              of_value.args);
}

// --- load --------------------------------------------------------------------------------------------------

constexpr int64_t kLargeResult = 128 << 10;  // glibc takes blocks from here on from the system

// Lets the C library keep the memory of large results between calls. glibc takes such blocks from the system,
// and gives them back, each time until a block as large was freed once (M_MMAP_THRESHOLD in mallopt(3)): then
// every page of every result is touched for the first time, which takes longer than to write it.
void keep_large_memory() {
  static const bool is_kept = [] {
    constexpr size_t kLargest = (size_t{32} << 20) - (64 << 10);  // larger ones do not move the threshold
    void* volatile block = std::malloc(kLargest);                 // never touched
    std::free(block);
    return true;
  }();
  static_cast<void>(is_kept);
}

// Advises pages of 2 MiB for new memory of many of 4 KiB. Only advice: the system may refuse it.
void advise_huge_pages(Byte* data, int64_t bytes) {
#ifdef MADV_HUGEPAGE
  constexpr uintptr_t kHuge = 2 << 20;
  const uintptr_t first = (reinterpret_cast<uintptr_t>(data) + kHuge - 1) / kHuge * kHuge;
  const uintptr_t last = (reinterpret_cast<uintptr_t>(data) + bytes) / kHuge * kHuge;
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
}

// Tensor for the loaded tokens of one side: `[T, H, D]`, or `[B, H, N, D]` where slots are `[B, N]`.
Tensor empty_loaded(const Tensor& slots, int64_t heads, int64_t width, int32_t dtype) {
  Tensor out = slots.dim() == 1
                   ? empty_tokens(slots.size(0), heads, width, dtype)
                   : empty_contiguous(std::array{slots.size(0), heads, slots.size(1), width}, dtype);
  const int64_t bytes = out.numel() * static_cast<int64_t>(aoti_torch_dtype_element_size(dtype));
  if (bytes >= kLargeResult) {
    keep_large_memory();
    advise_huge_pages(static_cast<Byte*>(out.mutable_data_ptr()), bytes);
  }
  return out;
}

Move load_side(const Tensor& cache, const MaybeTensor& scale, const Tensor& slots, int32_t dtype,
               int64_t repeat, Tensor& out) {
  Move move;
  move.from = source_view(cache, scale.has_value());
  if (scale) move.from_scale = source_view(*scale);
  const int64_t heads = checked_product({move.from.num_heads(), repeat}, "num_repeat times heads");
  out = empty_loaded(slots, heads, move.from.head_dim(), dtype);
  move.to = token_view(out, out.mutable_data_ptr());
  move.repeat = repeat;
  check_move(move);
  return move;
}

// `set_restore(moves, key, value)` may say what is done to the rows of either side afterwards.
template <class SetRestore>
std::tuple<Tensor, Tensor> load_sides(const Tensor& slots, const Tensor& key_cache,
                                      const MaybeTensor& value_cache, const MaybeTensor& key_scale,
                                      const MaybeTensor& value_scale, int32_t dtype, int64_t num_repeat,
                                      SetRestore set_restore) {
  require(num_repeat > 0, "num_repeat must be at least 1");
  const int64_t count = slots.numel();
  const CheckedSlots from("slots", slots, count, source_view(key_cache).num_slots());
  MoveArgs args;
  args.from_slots = from.get();
  Tensor key, value;
  Move moves[2] = {load_side(key_cache, key_scale, slots, dtype, num_repeat, key)};
  args.moves = moves;
  args.num_moves = 1;
  if (value_cache) {
    moves[args.num_moves++] = load_side(*value_cache, value_scale, slots, dtype, num_repeat, value);
    require(moves[0].from.num_slots() == moves[1].from.num_slots(),
            "keys and values must have the same slots");
  } else {
    value = empty_loaded(slots, key.size(1), 0, dtype);
  }
  set_restore(moves, key, value);
  run(args, count, key_scale ? kDequantizedBytesToStream : kLoadedBytesToStream);
  return {key, value};
}

std::tuple<Tensor, Tensor> load(const Tensor& slots, const Tensor& key_cache, const MaybeTensor& value_cache,
                                const MaybeTensor& key_scale, const MaybeTensor& value_scale, int32_t dtype,
                                int64_t num_repeat) {  // not ScalarType, which does not have all dtypes
  return load_sides(slots, key_cache, value_cache, key_scale, value_scale, dtype, num_repeat,
                    [](Move*, Tensor&, Tensor&) {});
}

std::tuple<Tensor, Tensor> load_transformed(const Tensor& slots, const Tensor& key_cache,
                                            const MaybeTensor& value_cache, const MaybeTensor& key_scale,
                                            const MaybeTensor& value_scale, int32_t dtype, int64_t key_block,
                                            int64_t value_block, const MaybeTensor& positions,
                                            const MaybeTensor& factor, const MaybeTensor& mean,
                                            const MaybeTensor& channels, const MaybeTensor& frequencies) {
  Smoothing of_key, of_value;
  expect_smoothing(positions, factor, mean);
  return load_sides(slots, key_cache, value_cache, key_scale, value_scale, dtype, 1,
                    [&](Move* moves, Tensor& key, Tensor& value) {
                      if (factor) {
                        of_key.set_keys(key, positions, *factor, mean, channels, frequencies, key_block);
                        of_key.args.is_restored = true;
                      } else if (key_block) {
                        of_key.set_rotated(key, key_block);
                      }
                      if (value_cache && value_block) of_value.set_rotated(value, value_block);
                      moves[0].restore = of_key.in_place(key);
                      if (value_cache) moves[1].restore = of_value.in_place(value);
                    });
}

// --- copy --------------------------------------------------------------------------------------------------

bool is_same(const View& a, const View& b) {
  return a.data == b.data && std::equal(a.size, a.size + 6, b.size) &&
         std::equal(a.stride, a.stride + 6, b.stride);
}

// Whether a write may change bytes that are read later.
bool may_overlap(const Move* moves, int num_moves, const CheckedSlots& from, const CheckedSlots& to) {
  const Move* end = moves + num_moves;
  if (std::all_of(moves, end, [](const Move& move) { return is_same(move.from, move.to); })) {
    return !from.is_disjoint(to);  // one cache, whose slots do not overlap
  }
  for (const Move* a = moves; a != end; ++a) {
    for (const Move* b = moves; b != end; ++b) {
      if (extents_meet(a->from, b->to)) return true;
    }
  }
  return false;
}

void copy(const std::vector<Tensor>& sources, const Tensor& source_slots, const std::vector<Tensor>& targets,
          const Tensor& target_slots) {
  Move moves[kMaxMoves];
  const int num_moves = static_cast<int>(sources.size());
  if (num_moves == 0 || num_moves > kMaxMoves || sources.size() != targets.size()) {
    throw std::invalid_argument("sources must be 1 to " + std::to_string(kMaxMoves) + " tensors, as targets");
  }
  for (int m = 0; m < num_moves; ++m) {
    moves[m].from = source_view(sources[m]);
    moves[m].to = target_view(targets[m]);
    moves[m].from.dtype = moves[m].to.dtype = DType::bits;
    check_move(moves[m]);
    require(moves[m].from.num_slots() == moves[0].from.num_slots() &&
                moves[m].to.num_slots() == moves[0].to.num_slots(),
            "all sides must have the same slots");
  }
  const int64_t count = source_slots.size(0);
  const CheckedSlots from("source_slots", source_slots, count, moves[0].from.num_slots());
  const CheckedSlots to("target_slots", target_slots, count, moves[0].to.num_slots());
  if (count == 0) return;
  MoveArgs args;
  args.num_moves = num_moves;
  if (!may_overlap(moves, num_moves, from, to)) {
    args.moves = moves;
    args.from_slots = from.get();
    args.to_slots = to.get();
    run(args, count, kBytesToStream);
    return;
  }
  // Every row is read into memory of its own before the first is written.
  Move reads[kMaxMoves], writes[kMaxMoves];
  std::vector<std::unique_ptr<Byte[]>> rows;
  for (int m = 0; m < num_moves; ++m) {
    const int64_t width = moves[m].from.width(), heads = moves[m].from.num_heads();
    View between = moves[m].from;
    const int64_t bytes = checked_product({count, heads, width, between.itemsize}, "the bytes to copy");
    rows.emplace_back(new Byte[std::max<int64_t>(bytes, 1)]);
    between.data = rows.back().get();
    const int64_t size[6] = {count, 1, 1, heads, 1, width}, stride[6] = {heads * width, 0, 0, width, 0, 1};
    std::copy_n(size, 6, between.size);
    std::copy_n(stride, 6, between.stride);
    reads[m].from = moves[m].from;
    reads[m].to = writes[m].from = between;
    writes[m].to = moves[m].to;
  }
  args.moves = reads;
  args.from_slots = from.get();
  run(args, count, kBytesToStream);
  args.moves = writes;
  args.from_slots = TokenSlots();
  args.to_slots = to.get();
  run(args, count, kBytesToStream);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(kvloom, CPU, m) {
  m.impl("store", KVLOOM_BOX(&store));
  m.impl("store.transformed", KVLOOM_BOX(&store_transformed));
  m.impl("load", KVLOOM_BOX(&load));
  m.impl("load.transformed", KVLOOM_BOX(&load_transformed));
  m.impl("copy", KVLOOM_BOX(&copy));
}

}  // namespace kvloom
