// The kernels in several threads, for the thread sanitizer: bit for bit what one thread does and nothing
// around it. No torch.
//
//     kvloom_threads          every instruction set of this machine; 0 if all results agree
//     kvloom_threads --race   threads that store the same tokens: the sanitizer must report it
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <random>
#include <string_view>
#include <thread>
#include <vector>

#include "../../csrc/kernels.h"

extern "C" int kvloom_choose_isa(const char* name);

namespace kvloom {
namespace {

constexpr int kThreads = 4;
constexpr int64_t kHeads = 2, kQueryHeads = 6, kHeadDim = 64, kGroup = 16, kPage = 16, kSlots = 2048;
constexpr int64_t kTokensAtOnce = 3;  // no multiple of what the kernels do together
constexpr int64_t kGuard = 256;       // bytes around a result

struct Kind {
  const char* name;
  DType dtype, query;
  int64_t itemsize, width;  // of a head: items
  bool has_scale;
};

const Kind kKinds[] = {
    {"float32", DType::f32, DType::f32, 4, kHeadDim, false},
    {"bfloat16", DType::bf16, DType::bf16, 2, kHeadDim, false},
    {"float16", DType::f16, DType::f32, 2, kHeadDim, false},
    {"int8", DType::int8, DType::bf16, 1, kHeadDim, true},
    {"int4", DType::int4, DType::bf16, 1, kHeadDim / 2, true},
    {"int8, float32 queries", DType::int8, DType::f32, 1, kHeadDim, true},
};

using Bytes = std::vector<char>;

constexpr char kPoison = 0x77;

// Whether nothing was written around a result.
bool is_guarded(const Bytes& result) {
  const auto is_poison = [](char byte) { return byte == kPoison; };
  return std::all_of(result.begin(), result.begin() + kGuard, is_poison) &&
         std::all_of(result.end() - kGuard, result.end(), is_poison);
}

using Numbers = std::vector<float>;

Numbers random_numbers(int64_t count, unsigned seed) {
  std::mt19937 generator(seed);
  std::uniform_real_distribution<float> number(-2.0f, 2.0f);
  Numbers numbers(count);
  for (float& x : numbers) x = number(generator);
  return numbers;
}

// Runs `work(first, last)` over `[0, count)`, a few at a time and in turn, so that every thread has some.
template <class Work>
void in_threads(int num_threads, int64_t count, int64_t few, Work work) {
  std::vector<std::thread> threads;
  for (int i = 0; i < num_threads; ++i) {
    threads.emplace_back([=] {
      for (int64_t first = i * few; first < count; first += num_threads * few) {
        work(first, std::min(first + few, count));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// --- a cache -----------------------------------------------------------------------------------------------

// `[T, H, D]` or `[B, 1, S, H, 1, D]`, contiguous.
View view_of(const void* data, DType dtype, int64_t itemsize, int64_t slots, int64_t in_block,
             int64_t width) {
  View view;
  view.data = static_cast<Byte*>(const_cast<void*>(data));
  view.itemsize = itemsize;
  view.dtype = dtype;
  const int64_t size[6] = {slots / in_block, 1, in_block, kHeads, 1, width};
  const int64_t stride[6] = {in_block * kHeads * width, 0, kHeads * width, width, 0, 1};
  std::memcpy(view.size, size, sizeof size);
  std::memcpy(view.stride, stride, sizeof stride);
  return view;
}

struct Cache {
  explicit Cache(const Kind& kind) : kind(kind) {
    for (int i = 0; i < 2; ++i) {
      sides[i].assign(kSlots * kHeads * kind.width * kind.itemsize, 0x55);
      scales[i].assign(kSlots * kHeads * kHeadDim / kGroup * 2, 0x11);
    }
  }

  View side(int i) const {
    return view_of(sides[i].data(), kind.dtype, kind.itemsize, kSlots, kPage, kind.width);
  }
  View scale(int i) const {
    return view_of(scales[i].data(), DType::f16, 2, kSlots, kPage, kHeadDim / kGroup);
  }

  bool operator==(const Cache& other) const {
    return sides[0] == other.sides[0] && sides[1] == other.sides[1] && scales[0] == other.scales[0] &&
           scales[1] == other.scales[1];
  }

  const Kind& kind;
  Bytes sides[2], scales[2];  // of keys and values
};

void store(Cache& cache, const Numbers (&tokens)[2], const std::vector<int64_t>& slots, int num_threads,
           bool stream, bool everyone_stores_all) {
  Move moves[2];
  for (int i = 0; i < 2; ++i) {
    moves[i].from = view_of(tokens[i].data(), DType::f32, 4, slots.size(), 1, kHeadDim);
    moves[i].to = cache.side(i);
    if (cache.kind.has_scale) moves[i].to_scale = cache.scale(i);
  }
  MoveArgs args;
  args.moves = moves;
  args.num_moves = 2;
  args.to_slots = TokenSlots(slots.data());
  args.stream = stream;
  const int64_t count = slots.size();
  const auto work = [&](int64_t first, int64_t last) {
    alignas(64) Byte scratch[8 << 10];
    kernels().movement->move(args, first, last, scratch);
  };
  if (everyone_stores_all) {
    in_threads(num_threads, num_threads, 1, [&](int64_t, int64_t) { work(0, count); });
  } else {
    in_threads(num_threads, count, kTokensAtOnce, work);
  }
}

Bytes load(const Cache& cache, const std::vector<int64_t>& slots, int num_threads) {
  const int64_t side_bytes = slots.size() * kHeads * kHeadDim * 4;
  Bytes out(2 * side_bytes + 2 * kGuard, kPoison);
  Move moves[2];
  for (int i = 0; i < 2; ++i) {
    moves[i].from = cache.side(i);
    if (cache.kind.has_scale) moves[i].from_scale = cache.scale(i);
    moves[i].to = view_of(out.data() + kGuard + i * side_bytes, DType::f32, 4, slots.size(), 1, kHeadDim);
  }
  MoveArgs args;
  args.moves = moves;
  args.num_moves = 2;
  args.from_slots = TokenSlots(slots.data());
  in_threads(num_threads, slots.size(), kTokensAtOnce, [&](int64_t first, int64_t last) {
    alignas(64) Byte scratch[8 << 10];
    kernels().movement->move(args, first, last, scratch);
  });
  return out;
}

// --- attention ---------------------------------------------------------------------------------------------

// Splits that are items of their own, many new tokens, and few stored ones.
const std::vector<int64_t> kNew = {1, 40, 3}, kStored = {1900, 600, 70};

std::vector<int64_t> starts_of(const std::vector<int64_t>& counts) {
  std::vector<int64_t> starts(counts.size() + 1, 0);
  std::partial_sum(counts.begin(), counts.end(), starts.begin() + 1);
  return starts;
}

Bytes attend(const Cache& cache, const Numbers& numbers, const std::vector<int64_t>& pages, int num_threads) {
  const std::vector<int64_t> rows = starts_of(kNew), columns = starts_of(kStored);
  const int64_t itemsize = cache.kind.query == DType::f32 ? 4 : 2;
  const int64_t count = rows.back() * kQueryHeads * kHeadDim;
  Bytes query(count * itemsize), out(count * itemsize + 2 * kGuard, kPoison);
  for (int64_t i = 0; i < count; ++i) {  // bfloat16 is the upper half
    std::memcpy(&query[i * itemsize], reinterpret_cast<const char*>(&numbers[i]) + 4 - itemsize, itemsize);
  }
  const int64_t in_table = pages.size() / kNew.size(), page_rows[] = {0, in_table, 2 * in_table};
  AttendArgs args{};
  args.query = query.data();
  args.out = out.data() + kGuard;
  args.query_stride[0] = kQueryHeads * kHeadDim;
  args.query_stride[1] = kHeadDim;
  args.query_stride[2] = 1;
  args.query_dtype = args.out_dtype = cache.kind.query;
  args.num_heads = kQueryHeads;
  for (int i = 0; i < 2; ++i) {
    CacheSide& side = i == 0 ? args.key : args.value;
    side.cache = cache.side(i);
    if (cache.kind.has_scale) side.scale = cache.scale(i);
  }
  args.table = {pages.data(), page_rows, kPage};
  args.num_sequences = kNew.size();
  args.seqstarts = rows.data();
  args.kvstarts = columns.data();
  args.scale = 0.125f;
  args.is_causal = true;
  args.num_threads = num_threads;
  args.in_tiles = kernels().attend_in_tiles(args);
  const AttendPlan plan = kernels().attend_plan(args);
  void* workspace = ::operator new(plan.workspace_bytes, std::align_val_t{64});
  kernels().attend_prepare(args, workspace);
  in_threads(num_threads, plan.num_items, 1,
             [&](int64_t first, int64_t last) { kernels().attend_run(args, first, last, workspace); });
  in_threads(num_threads, plan.num_merges, 1,
             [&](int64_t first, int64_t last) { kernels().attend_merge(args, first, last, workspace); });
  ::operator delete(workspace, std::align_val_t{64});
  return out;
}

// --- everything --------------------------------------------------------------------------------------------

int check(bool agrees, const char* isa, const Kind& kind, const char* what) {
  if (!agrees) std::printf("%s, %s: %s differs\n", isa, kind.name, what);
  return agrees ? 0 : 1;
}

// Returns the number of results that differ.
int compare(const char* isa, const Kind& kind, bool race) {
  std::mt19937 generator(1);
  std::vector<int64_t> slots(kSlots), pages(kSlots / kPage);
  std::iota(slots.begin(), slots.end(), 0);
  std::shuffle(slots.begin(), slots.end(), generator);
  for (size_t i = 0; i < pages.size(); ++i) pages[i] = i * kPage;
  std::shuffle(pages.begin(), pages.end(), generator);
  pages.insert(pages.end(), pages.begin(), pages.end());  // sequences share pages
  pages.insert(pages.end(), pages.begin(), pages.begin() + kSlots / kPage);
  const Numbers tokens[2] = {random_numbers(kSlots * kHeads * kHeadDim, 2),
                             random_numbers(kSlots * kHeads * kHeadDim, 3)};
  const Numbers query = random_numbers(starts_of(kNew).back() * kQueryHeads * kHeadDim, 4);

  Cache expected(kind);
  store(expected, tokens, slots, 1, false, false);
  int wrong = 0;
  for (bool stream : {false, true}) {
    Cache cache(kind);
    store(cache, tokens, slots, kThreads, stream, race);
    wrong += check(cache == expected, isa, kind, "what is stored");
  }
  const Bytes loaded = load(expected, slots, 1);
  wrong += check(load(expected, slots, kThreads) == loaded, isa, kind, "what is loaded");
  const Bytes alone = attend(expected, query, pages, 1);
  Bytes both[2];  // two calls read one cache
  in_threads(2, 2, 1, [&](int64_t i, int64_t) { both[i] = attend(expected, query, pages, kThreads); });
  wrong += check(both[0] == alone && both[1] == alone, isa, kind, "attention");
  return wrong + check(is_guarded(loaded) && is_guarded(alone), isa, kind, "what lies around a result");
}

int main_with(bool race) {
  int wrong = 0;
  for (const char* isa : {"baseline", "neon", "avx2", "avx512", "amx", "amx-emulated"}) {
    if (kvloom_choose_isa(isa) != 0) {
      std::printf("%s: not on this machine\n", isa);
      continue;
    }
    for (const Kind& kind : kKinds) wrong += compare(isa, kind, race);
    std::printf("%s: compared\n", isa);
  }
  return wrong != 0;
}

}  // namespace
}  // namespace kvloom

int main(int argc, char** argv) {
  return kvloom::main_with(argc > 1 && std::string_view(argv[1]) == "--race");
}
