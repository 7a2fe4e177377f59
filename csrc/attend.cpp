// attend as torch calls it: tensors into arguments, values checked, items spread over threads.
#include <algorithm>
#include <atomic>
#include <cfloat>
#include <cmath>
#include <initializer_list>
#include <new>
#include <string>
#include <tuple>

#include "attend_bias.h"
#include "attend_index.h"
#include "kernels.h"
#include "tensors.h"

namespace kvloom {
namespace {

// The work that is worth waking a thread, which takes some microseconds: bytes, or as much arithmetic.
constexpr int64_t kWorkPerThread = 256 << 10;
constexpr int64_t kProductsPerByte = 8;
constexpr size_t kKeptBytes = 4 << 20;          // of a workspace between calls
constexpr int64_t kEndless = int64_t{1} << 62;  // more than any distance between positions

// --- tensors into plain arguments --------------------------------------------------------------------------

DType float_of(const Tensor& x, const char* message) {
  const DType dtype = type_of(x);
  require(dtype != DType::bits, message);
  return dtype;
}

// Keys or values, whose dtype says what codes they are where there are scales.
CacheSide side_of(const Tensor& cache, const MaybeTensor& scale) {
  const CacheSide side{source_view(cache, scale.has_value()), scale ? source_view(*scale) : View()};
  require(side.cache.dtype != DType::bits, "a cache without scales must hold floats");
  if (scale) check_scale(side.cache, side.scale);
  return side;
}

// A float tensor whose last dimensions are those of `stride`; the stride is 0 along missing dimensions.
FloatArray floats_of(const Tensor& x, const char* message) {
  FloatArray array{x.const_data_ptr(), {0, 0, 0}, float_of(x, message)};
  const int64_t rank = x.dim();
  for (int64_t i = 0; i < rank; ++i) array.stride[(rank == 2 ? 1 : 0) + i] = x.stride(i);
  return array;
}

FloatArray head_floats(const MaybeTensor& x, int64_t num_heads, const char* message) {
  if (!x) return {};
  require(x->dim() == 1 && x->size(0) == num_heads, message);
  return floats_of(*x, message);
}

// --- threads -----------------------------------------------------------------------------------------------

// The memory of a workspace, which a thread keeps for its next call if it is small.
class WorkspaceBuffer {
 public:
  WorkspaceBuffer() = default;
  WorkspaceBuffer(const WorkspaceBuffer&) = delete;
  WorkspaceBuffer& operator=(const WorkspaceBuffer&) = delete;
  ~WorkspaceBuffer() { release(); }

  void* reserve(size_t bytes) {
    if (bytes > size_) {
      release();
      data_ = ::operator new(bytes, std::align_val_t{64});
      size_ = bytes;
    }
    return data_;
  }

  void trim() {
    if (size_ > kKeptBytes) release();
  }

 private:
  void release() {
    ::operator delete(data_, std::align_val_t{64});
    data_ = nullptr;
    size_ = 0;
  }

  void* data_ = nullptr;
  size_t size_ = 0;
};

// The number of threads that the work of the call pays for.
int64_t num_threads_for(const AttendArgs& args, int64_t products_per_pair) {
  const View& second = args.rope.cache.data ? args.rope.cache : args.value.cache;
  const int64_t bytes = token_bytes(args.key.cache) + token_bytes(second);
  double work = 0;
  for (int64_t b = 0; b < args.num_sequences; ++b) {
    const int64_t stored = args.kvstarts[b + 1] - args.kvstarts[b];
    const int64_t rows = args.seqstarts[b + 1] - args.seqstarts[b];
    work += double(stored) * std::max(bytes, rows * products_per_pair / kProductsPerByte);
  }
  if (work < 2 * kWorkPerThread) return 1;
  return static_cast<int64_t>(std::min<double>(torch::stable::get_num_threads(), work / kWorkPerThread));
}

using RangeFunction = void (*)(const AttendArgs& args, int64_t first, int64_t last, void* workspace);

// Runs `function` over [0, count) in several threads. Each takes a few at a time, since their work differs;
// of prompts one, which is long enough.
void run_parallel(RangeFunction function, const AttendArgs& args, int64_t count, void* workspace) {
  const int64_t threads = std::min(args.num_threads, count);
  if (threads <= 1) {
    if (count > 0) function(args, 0, count, workspace);
    return;
  }
  std::atomic<int64_t> next{0};
  const int64_t grain = args.in_tiles ? 1 : std::max<int64_t>(1, count / (4 * threads));
  torch::stable::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    (void)begin, (void)end;
    for (int64_t first = next.fetch_add(grain); first < count; first = next.fetch_add(grain)) {
      function(args, first, std::min(first + grain, count), workspace);
    }
  });
}

void run(const AttendArgs& args) {
  thread_local WorkspaceBuffer buffer;
  const Kernels& table = kernels();
  const AttendPlan plan = table.attend_plan(args);
  void* workspace = buffer.reserve(plan.workspace_bytes);
  table.attend_prepare(args, workspace);
  run_parallel(table.attend_run, args, plan.num_items, workspace);
  run_parallel(table.attend_merge, args, plan.num_merges, workspace);
  buffer.trim();
}

// --- attend ------------------------------------------------------------------------------------------------

// Arguments of a part of an attention.
struct Part {
  std::optional<int64_t> skip;
  MaybeTensor skip_from, prior, prior_lse;
  MaybeTensor lse;  // written by attend
};

// Float32 of the part before, of the sizes of this one.
const float* prior_of(const Tensor& x, std::initializer_list<int64_t> sizes, const char* message) {
  require(x.dim() == static_cast<int64_t>(sizes.size()) &&
              std::equal(sizes.begin(), sizes.end(), x.sizes().begin()) &&
              dtype_of(x) == aoti_torch_dtype_float32() && x.is_contiguous(),
          message);
  return static_cast<const float*>(x.const_data_ptr());
}

// Arguments of a positional bias.
struct Positional {
  const Tensor &coefficients, &frequencies;
  const MaybeTensor& first_position;
};

// Arguments that differ between overloads.
struct Variant {
  Part* part = nullptr;
  const Positional* positional = nullptr;
  bool is_latent =
      false;  // keys are the latents and then the rope keys, which come as values; values are latents
};

// The result is `given`, if there is one, else new.
Tensor attend(const MaybeTensor& given, const Variant& variant, const Tensor& query, const Tensor& key_cache,
              const Tensor& value_cache, const MaybeTensor& key_scale, const MaybeTensor& value_scale,
              const Tensor& table, const MaybeTensor& row_starts, int64_t page_size, const Tensor& seqstarts,
              const Tensor& kvstarts, int64_t decoding_batches, const MaybeTensor& first_visible,
              double scale, bool is_causal, const MaybeTensor& mask, const MaybeTensor& alibi_slopes,
              std::optional<int64_t> window, std::optional<double> softcap, const MaybeTensor& sinks) {
  Part* part = variant.part;
  const Positional* positional = variant.positional;
  AttendArgs args{};
  require(query.dim() == 3, "query must have 3 dimensions");
  const int64_t num_rows = query.size(0);
  args.query = query.const_data_ptr();
  for (int i = 0; i < 3; ++i) args.query_stride[i] = query.stride(i);
  args.query_dtype = float_of(query, "query must be of floats");
  args.num_heads = query.size(1);
  args.key = side_of(key_cache, key_scale);
  args.value = side_of(value_cache, value_scale);
  const View &key = args.key.cache, &value = args.value.cache;
  require(key.num_slots() == value.num_slots() && key.num_heads() == value.num_heads(),
          "keys and values must have the same slots and heads");
  int64_t key_dim = key.head_dim();
  require(key_dim > 0, "keys must have a head dim of at least 1");
  if (variant.is_latent) {
    require(key.num_heads() == 1 && value.head_dim() > 0, "latents and rope keys must be of one head");
    key_dim += value.head_dim();
    args.rope = args.value;
    args.value = args.key;
  }
  const int64_t value_dim = value.head_dim();
  require(query.size(2) == key_dim &&
              (key.num_heads() > 0 ? args.num_heads % key.num_heads() : args.num_heads) == 0,
          "query must have the head dim of the keys and a multiple of their heads");
  require(kernels().attend_supports(args), "head dims are larger than the compiled attention has room for");

  AttendIndex index(seqstarts, kvstarts, first_visible, num_rows);
  args.decoding_batches = decoding_batches;
  require(decoding_batches >= 0, "decoding_batches must be at least 0");
  const int64_t num_columns = index.num_columns();
  if (mask) {
    const int64_t rank = mask->dim();
    require(rank == 2 || (rank == 3 && mask->size(0) == args.num_heads),
            "mask must be [Tq, Tkv] or [Hq, Tq, Tkv]");
    require(mask->size(rank - 2) == num_rows, "mask must have the rows of query");
    if (mask->size(rank - 1) < num_columns) {  // a type of its own, of which Python makes a ShapeError
      throw std::out_of_range("mask must have at least " + std::to_string(num_columns) + " columns, got " +
                              std::to_string(mask->size(rank - 1)));
    }
    args.mask = floats_of(*mask, "mask must be of floats");
  }
  args.alibi_slopes = head_floats(alibi_slopes, args.num_heads, "alibi_slopes must be floats, [Hq]");
  args.sinks = head_floats(sinks, args.num_heads, "sinks must be floats, [Hq]");

  args.is_causal = is_causal;
  require(!window || *window > 0, "window must be at least 1");
  args.window = std::min<int64_t>(window.value_or(0), kEndless);
  if (part) {
    require(!part->skip || *part->skip > 0, "skip must be at least 1");
    args.skip = std::min<int64_t>(part->skip.value_or(0), kEndless);
    index.copy_skip_from(part->skip_from);
  }
  // Causal masks, windows, ALiBi and what is left out use a query's position among the stored tokens.
  index.check_lengths([&](int64_t b) {
    return (is_causal && b >= decoding_batches) || alibi_slopes.has_value() || window.has_value() ||
           args.skip > 0;
  });
  index.copy_pages(table, row_starts, page_size, key.num_slots());
  index.assign_to(args);

  args.scale = static_cast<float>(scale);
  require(!softcap || (*softcap > 0 && std::isfinite(*softcap)), "softcap must be positive and finite");
  // Rounded to float32 it must be neither 0, which means none, nor infinite.
  args.softcap = softcap ? static_cast<float>(std::clamp<double>(*softcap, FLT_MIN, FLT_MAX)) : 0.0f;

  if (given) {
    require(given->dim() == 3 && given->size(0) == num_rows && given->size(1) == args.num_heads &&
                given->size(2) == value_dim && dtype_of(*given) == dtype_of(query) && given->is_contiguous(),
            "out must be contiguous, [Tq, Hq, Dv], with the dtype of query");
  }
  const int32_t out_dtype = part ? aoti_torch_dtype_float32() : dtype_of(query);
  Tensor out = given ? *given : empty_tokens(num_rows, args.num_heads, value_dim, out_dtype);
  args.out_dtype = part ? DType::f32 : args.query_dtype;
  if (part) {
    require(value_dim > 0, "values must have a head dim of at least 1");
    require(part->prior.has_value() == part->prior_lse.has_value(), "prior and prior_lse belong together");
    if (part->prior) {
      args.prior = prior_of(*part->prior, {num_rows, args.num_heads, value_dim},
                            "prior must be contiguous float32, [Tq, Hq, Dv]");
      args.prior_lse = prior_of(*part->prior_lse, {num_rows, args.num_heads},
                                "prior_lse must be contiguous float32, [Tq, Hq]");
    }
    part->lse = empty_heads(num_rows, args.num_heads, out_dtype);
    args.lse = static_cast<float*>(part->lse->mutable_data_ptr());
  }
  AttendBias bias;
  if (positional) {
    const Tensor& x = positional->coefficients;
    bias.copy(positional->frequencies, positional->first_position, key.num_heads(), args.num_sequences);
    require(x.dim() == 3 && x.size(0) == num_rows && x.size(1) == args.num_heads &&
                x.size(2) == 2 * bias.num_pairs(),
            "coefficients must be [Tq, Hq, 2K]");
    bias.assign_to(args.bias);
    args.bias.coefficients = floats_of(x, "coefficients must be of floats");
  }
  if (num_rows * args.num_heads * value_dim == 0) return out;
  args.out = out.mutable_data_ptr();
  args.prefetches_to_l2 = prefetches_to_l2();
  // Prompts in tiles have bits of their own; the kernels for few new tokens can run any number.
  args.in_tiles = !is_batch_invariant() && kernels().attend_in_tiles(args);
  args.num_threads = num_threads_for(args, args.num_heads * (key_dim + value_dim));
  run(args);
  return out;
}

template <class Argument>
void expect_apart(const Span& out, const Argument& x) {
  if constexpr (std::is_same_v<Argument, Tensor>)
    require(!out.meets(Span(x)), "out must lie apart from what is read");
  else if constexpr (std::is_same_v<Argument, MaybeTensor>)
    if (x) expect_apart(out, *x);
}

// The overloads of the operator.
template <class Function>
struct Overloads;

template <class... Arguments>
struct Overloads<Tensor (*)(const MaybeTensor& given, const Variant& variant, Arguments...)> {
  static Tensor functional(Arguments... arguments) { return attend(std::nullopt, {}, arguments...); }
  static Tensor latent(Arguments... arguments) {
    return attend(std::nullopt, {.is_latent = true}, arguments...);
  }
  static Tensor biased(Arguments... arguments, const Tensor& coefficients, const Tensor& frequencies,
                       const MaybeTensor& first_position) {
    const Positional positional{coefficients, frequencies, first_position};
    return attend(std::nullopt, {.positional = &positional}, arguments...);
  }
  static void out(Arguments... arguments, const Tensor& out) {
    const Span span(out);
    (expect_apart(span, arguments), ...);
    attend(out, {}, arguments...);
  }
  static void biased_out(Arguments... arguments, const Tensor& coefficients, const Tensor& frequencies,
                         const MaybeTensor& first_position, const Tensor& out) {
    const Span span(out);
    (expect_apart(span, arguments), ...);
    expect_apart(span, coefficients), expect_apart(span, frequencies), expect_apart(span, first_position);
    const Positional positional{coefficients, frequencies, first_position};
    attend(out, {.positional = &positional}, arguments...);
  }
  static std::tuple<Tensor, Tensor> part(Arguments... arguments, std::optional<int64_t> skip,
                                         const MaybeTensor& skip_from, const MaybeTensor& prior,
                                         const MaybeTensor& prior_lse) {
    Part part{skip, skip_from, prior, prior_lse, std::nullopt};
    Tensor out = attend(std::nullopt, {.part = &part}, arguments...);
    return {out, *part.lse};
  }
  static std::tuple<Tensor, Tensor> latent_part(Arguments... arguments, std::optional<int64_t> skip,
                                                const MaybeTensor& skip_from, const MaybeTensor& prior,
                                                const MaybeTensor& prior_lse) {
    Part part{skip, skip_from, prior, prior_lse, std::nullopt};
    Tensor out = attend(std::nullopt, {.part = &part, .is_latent = true}, arguments...);
    return {out, *part.lse};
  }
  static std::tuple<Tensor, Tensor> biased_part(Arguments... arguments, std::optional<int64_t> skip,
                                                const MaybeTensor& skip_from, const MaybeTensor& prior,
                                                const MaybeTensor& prior_lse, const Tensor& coefficients,
                                                const Tensor& frequencies,
                                                const MaybeTensor& first_position) {
    const Positional positional{coefficients, frequencies, first_position};
    Part part{skip, skip_from, prior, prior_lse, std::nullopt};
    Tensor out = attend(std::nullopt, {.part = &part, .positional = &positional}, arguments...);
    return {out, *part.lse};
  }
};
using Attend = Overloads<decltype(&attend)>;

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(kvloom, CPU, m) {
  m.impl("attend", KVLOOM_BOX(&Attend::functional));
  m.impl("attend.latent", KVLOOM_BOX(&Attend::latent));
  m.impl("attend.biased", KVLOOM_BOX(&Attend::biased));
  m.impl("attend.out", KVLOOM_BOX(&Attend::out));
  m.impl("attend.biased_out", KVLOOM_BOX(&Attend::biased_out));
  m.impl("attend_part", KVLOOM_BOX(&Attend::part));
  m.impl("attend_part.latent", KVLOOM_BOX(&Attend::latent_part));
  m.impl("attend_part.biased", KVLOOM_BOX(&Attend::biased_part));
}

}  // namespace kvloom
