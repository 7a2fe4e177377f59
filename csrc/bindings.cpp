// Store, load and copy as torch calls them: tensors into views, slots checked, work shared out among threads.
#include <algorithm>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "kernels.h"
#include "tensors.h"

namespace kvloom {
namespace {

constexpr int64_t kBytesPerThread = 64 << 10;  // less is not worth waking a thread
// From so many bytes on, whole cache lines are written past the caches: they would push everything else out.
// What is loaded is read next, so more of it is kept; of what is dequantised, all that a last-level cache
// holds, since its lines come too slowly for streaming to gain anything.
constexpr int64_t kBytesToStream = 2 << 20, kLoadedBytesToStream = 4 << 20;
constexpr int64_t kDequantizedBytesToStream = 16 << 20;

// --- tensors into plain arguments -------------------------------------------------------------------------

/// `Type::bits` for what is no float that values are cast from or to.
Type type_of(int32_t dtype) {
  if (dtype == aoti_torch_dtype_float32()) return Type::float32;
  if (dtype == aoti_torch_dtype_float16()) return Type::float16;
  if (dtype == aoti_torch_dtype_bfloat16()) return Type::bfloat16;
  return Type::bits;
}

View base_view(const Tensor& x, void* data) {
  View view;
  const int32_t dtype = dtype_of(x);
  view.data = static_cast<char*>(data);
  view.itemsize = static_cast<int64_t>(aoti_torch_dtype_element_size(dtype));
  view.type = type_of(dtype);
  return view;
}

/// A canonical view `[B, S/s, s, H, D/d, d]`; what is quantised says so by its dtype.
View view_of(const Tensor& x, void* data, bool is_quantized = false) {
  require(x.dim() == 6, "a canonical view must have 6 dimensions");
  View view = base_view(x, data);
  const auto sizes = x.sizes(), strides = x.strides();
  for (size_t i = 0; i < 6; ++i) {
    view.size[i] = sizes[i];
    view.stride[i] = strides[i];
  }
  if (is_quantized) view.type = dtype_of(x) == aoti_torch_dtype_int8() ? Type::int8 : Type::int4;
  return view;
}

View source_view(const Tensor& x, bool is_quantized = false) {
  return view_of(x, const_cast<void*>(x.const_data_ptr()), is_quantized);
}

View target_view(const Tensor& x, bool is_quantized = false) {
  return view_of(x, x.mutable_data_ptr(), is_quantized);
}

/// New tokens `[T, H, D]`.
View token_view(const Tensor& x, void* data) {
  require(x.dim() == 3, "new tokens must have 3 dimensions");
  View view = base_view(x, data);
  const auto sizes = x.sizes(), strides = x.strides();
  const int64_t size[6] = {sizes[0], 1, 1, sizes[1], 1, sizes[2]};
  const int64_t stride[6] = {strides[0], 0, 0, strides[1], 0, strides[2]};
  std::copy_n(size, 6, view.size);
  std::copy_n(stride, 6, view.stride);
  return view;
}

Slots slots_of(const Tensor& x, int64_t count) {
  require(x.dim() == 1 && x.size(0) == count, "there must be one slot for each token");
  Slots slots;
  slots.data = x.const_data_ptr();
  slots.stride = x.stride(0);
  slots.is_int32 = dtype_of(x) == aoti_torch_dtype_int32();
  return slots;
}

// --- checks -----------------------------------------------------------------------------------------------

struct Range {
  int64_t low, high;
};

template <class Int>
Range range_of(const Int* slots, int64_t stride, int64_t count) {
  Int low = slots[0], high = slots[0];
  for (int64_t t = 1; t < count; ++t) {
    low = std::min(low, slots[t * stride]);
    high = std::max(high, slots[t * stride]);
  }
  return {low, high};
}

Range range_of(const Slots& slots, int64_t count) {
  return slots.is_int32 ? range_of(static_cast<const int32_t*>(slots.data), slots.stride, count)
                        : range_of(static_cast<const int64_t*>(slots.data), slots.stride, count);
}

/// Refuses slots outside `[0, num_slots)` before anything is written. Python makes an ArgumentError of it.
void check_slots(const char* name, const Slots& slots, int64_t count, int64_t num_slots,
                 bool skip_negative = false) {
  if (count == 0) return;
  const Range range = range_of(slots, count);
  if (range.high < num_slots && (skip_negative || range.low >= 0)) return;
  for (int64_t t = 0; t < count; ++t) {
    const int64_t slot = slots[t];
    if (slot < num_slots && (skip_negative || slot >= 0)) continue;
    throw std::invalid_argument(std::string(name) + " must be in [0, " + std::to_string(num_slots) +
                                "), got " + std::to_string(slot) + " for token " + std::to_string(t));
  }
}

int64_t numbers_in(const View& view) { return view.width() * (view.type == Type::int4 ? 2 : 1); }

void check_scale(const View& codes, const View& scale) {
  const int64_t numbers = numbers_in(codes), groups = scale.width();
  require(std::equal(codes.size, codes.size + 4, scale.size) && groups > 0 && numbers % groups == 0 &&
              (codes.type != Type::int4 || numbers / groups % 2 == 0) && scale.type != Type::bits,
          "scales must have the axes of their cache, and groups of whole bytes");
}

void check_move(const Move& move) {
  const bool same = move.from.type == move.to.type && move.from.itemsize == move.to.itemsize;
  require(same || (move.from.type != Type::bits && move.to.type != Type::bits), "dtypes must fit");
  require(move.from.num_heads() * move.repeat == move.to.num_heads() &&
              numbers_in(move.from) == numbers_in(move.to),
          "heads and head dims must fit");
  if (move.from_scale.data != nullptr) check_scale(move.from, move.from_scale);
  if (move.to_scale.data != nullptr) check_scale(move.to, move.to_scale);
}

// --- sharing out ------------------------------------------------------------------------------------------

int64_t token_bytes(const View& view) { return view.num_heads() * view.width() * view.itemsize; }

/// Moves tokens `[0, count)`, in one thread or in several.
void run(MoveArgs& args, int64_t count, int64_t bytes_to_stream) {
  if (count == 0) return;
  int64_t bytes = 0, scratch_bytes = 0;  // of a token
  for (int m = 0; m < args.num_moves; ++m) {
    const Move& move = args.moves[m];
    bytes += std::max(token_bytes(move.from), token_bytes(move.to) * move.repeat);
    int64_t row_bytes = 0;
    for (const View* view : {&move.from, &move.from_scale, &move.to, &move.to_scale}) {
      row_bytes += aligned(token_bytes(*view));
    }
    scratch_bytes = std::max(scratch_bytes, row_bytes);
  }
  args.stream = bytes * count >= bytes_to_stream;
  const int64_t grain = std::max<int64_t>(1, kBytesPerThread / std::max<int64_t>(bytes, 1));
  const auto work = [&](int64_t begin, int64_t end) {
    alignas(64) char small[8 << 10];
    const std::unique_ptr<char[]> large(scratch_bytes > int64_t(sizeof small) ? new char[scratch_bytes]
                                                                              : nullptr);
    kernels().move(args, begin, end, large ? large.get() : small);
  };
  if (count <= grain) {
    work(0, count);
  } else {
    torch::stable::parallel_for(0, count, grain, work);
  }
}

// --- store ------------------------------------------------------------------------------------------------

Move store_side(const Tensor& x, const Tensor& cache, const MaybeTensor& scale) {
  Move move;
  move.from = token_view(x, const_cast<void*>(x.const_data_ptr()));
  move.to = target_view(cache, scale.has_value());
  if (scale) move.to_scale = target_view(*scale);
  check_move(move);
  return move;
}

void store(const Tensor& key, const MaybeTensor& value, const Tensor& slots, const Tensor& key_cache,
           const MaybeTensor& value_cache, const MaybeTensor& key_scale, const MaybeTensor& value_scale) {
  MoveArgs args;
  const int64_t count = key.size(0);
  args.to_slots = slots_of(slots, count);
  Move moves[2] = {store_side(key, key_cache, key_scale)};
  args.moves = moves;
  args.num_moves = 1;
  if (value && value_cache) {
    require(value->size(0) == count, "there must be as many values as keys");
    moves[args.num_moves++] = store_side(*value, *value_cache, value_scale);
    require(moves[0].to.num_slots() == moves[1].to.num_slots(), "keys and values must have the same slots");
  }
  check_slots("slots", args.to_slots, count, moves[0].to.num_slots(), true);
  run(args, count, kBytesToStream);
}

// --- load -------------------------------------------------------------------------------------------------

Move load_side(const Tensor& cache, const MaybeTensor& scale, int64_t count, int32_t dtype, int64_t repeat,
               Tensor& out) {
  Move move;
  move.from = source_view(cache, scale.has_value());
  if (scale) move.from_scale = source_view(*scale);
  out = empty_tokens(count, move.from.num_heads() * repeat, numbers_in(move.from), dtype);
  move.to = token_view(out, out.mutable_data_ptr());
  move.repeat = repeat;
  check_move(move);
  return move;
}

std::tuple<Tensor, Tensor> load(const Tensor& slots, const Tensor& key_cache, const MaybeTensor& value_cache,
                                const MaybeTensor& key_scale, const MaybeTensor& value_scale, int32_t dtype,
                                int64_t num_repeat) {  // not ScalarType, which lacks dtypes
  MoveArgs args;
  const int64_t count = slots.size(0);
  args.from_slots = slots_of(slots, count);
  check_slots("slots", args.from_slots, count, source_view(key_cache).num_slots());
  Tensor key, value;
  Move moves[2] = {load_side(key_cache, key_scale, count, dtype, num_repeat, key)};
  args.moves = moves;
  args.num_moves = 1;
  if (value_cache) {
    moves[args.num_moves++] = load_side(*value_cache, value_scale, count, dtype, num_repeat, value);
    require(moves[0].from.num_slots() == moves[1].from.num_slots(),
            "keys and values must have the same slots");
  } else {
    value = empty_tokens(count, key.size(1), 0, dtype);
  }
  run(args, count, key_scale ? kDequantizedBytesToStream : kLoadedBytesToStream);
  return {key, value};
}

// --- copy -------------------------------------------------------------------------------------------------

struct Reach {
  const char* begin;
  const char* end;
};

Reach reach_of(const View& view) {
  int64_t last = 0;
  for (int i = 0; i < 6; ++i) {
    if (view.size[i] == 0) return {view.data, view.data};
    last += (view.size[i] - 1) * view.stride[i];
  }
  return {view.data, view.data + (last + 1) * view.itemsize};
}

bool is_same(const View& a, const View& b) {
  return a.data == b.data && std::equal(a.size, a.size + 6, b.size) &&
         std::equal(a.stride, a.stride + 6, b.stride);
}

/// Whether no slot occurs in both.
bool is_disjoint(const Slots& a, const Slots& b, int64_t count) {
  const Range of_a = range_of(a, count), of_b = range_of(b, count);
  if (of_a.high < of_b.low || of_b.high < of_a.low) return true;
  std::vector<bool> seen(of_a.high - of_a.low + 1);
  for (int64_t t = 0; t < count; ++t) seen[a[t] - of_a.low] = true;
  for (int64_t t = 0; t < count; ++t) {
    if (b[t] >= of_a.low && b[t] <= of_a.high && seen[b[t] - of_a.low]) return false;
  }
  return true;
}

/// Whether a write may change what is still to be read.
bool may_clash(const Move* moves, int num_moves, const Slots& from, const Slots& to, int64_t count) {
  const Move* end = moves + num_moves;
  if (std::all_of(moves, end, [](const Move& move) { return is_same(move.from, move.to); })) {
    return !is_disjoint(from, to, count);  // one cache, whose slots share nothing
  }
  for (const Move* a = moves; a != end; ++a) {
    for (const Move* b = moves; b != end; ++b) {
      const Reach read = reach_of(a->from), written = reach_of(b->to);
      if (read.begin < written.end && written.begin < read.end) return true;
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
    moves[m].from.type = moves[m].to.type = Type::bits;
    check_move(moves[m]);
    require(moves[m].from.num_slots() == moves[0].from.num_slots() &&
                moves[m].to.num_slots() == moves[0].to.num_slots(),
            "all sides must have the same slots");
  }
  const int64_t count = source_slots.size(0);
  const Slots from = slots_of(source_slots, count), to = slots_of(target_slots, count);
  check_slots("source_slots", from, count, moves[0].from.num_slots());
  check_slots("target_slots", to, count, moves[0].to.num_slots());
  if (count == 0) return;
  MoveArgs args;
  args.num_moves = num_moves;
  if (!may_clash(moves, num_moves, from, to, count)) {
    args.moves = moves;
    args.from_slots = from;
    args.to_slots = to;
    run(args, count, kBytesToStream);
    return;
  }
  // Every row is read into memory of its own before the first is written.
  Move reads[kMaxMoves], writes[kMaxMoves];
  std::vector<std::unique_ptr<char[]>> rows;
  for (int m = 0; m < num_moves; ++m) {
    const int64_t width = moves[m].from.width(), heads = moves[m].from.num_heads();
    View between = moves[m].from;
    rows.emplace_back(new char[std::max<int64_t>(count * heads * width * between.itemsize, 1)]);
    between.data = rows.back().get();
    const int64_t size[6] = {count, 1, 1, heads, 1, width}, stride[6] = {heads * width, 0, 0, width, 0, 1};
    std::copy_n(size, 6, between.size);
    std::copy_n(stride, 6, between.stride);
    reads[m].from = moves[m].from;
    reads[m].to = writes[m].from = between;
    writes[m].to = moves[m].to;
  }
  args.moves = reads;
  args.from_slots = from;
  run(args, count, kBytesToStream);
  args.moves = writes;
  args.from_slots = Slots();
  args.to_slots = to;
  run(args, count, kBytesToStream);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(kvloom, CPU, m) {
  m.impl("store", TORCH_BOX(&store));
  m.impl("load", TORCH_BOX(&load));
  m.impl("copy", TORCH_BOX(&copy));
}

}  // namespace kvloom
