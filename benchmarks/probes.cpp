// The yardsticks of what is bound by memory: bytes read and bytes copied as fast as this machine can, in
// torch's own threads.
#include <atomic>
#include <cstdint>
#include <cstring>

#if defined(__linux__)
#include <sched.h>
#endif

#if defined(__AVX2__)
#include <immintrin.h>
#endif

// From torch's stable C interface.
extern "C" int32_t torch_parallel_for(int64_t begin, int64_t end, int64_t grain,
                                      void (*work)(int64_t, int64_t, void*), void* context);

namespace {

typedef int64_t Line __attribute__((vector_size(64)));

struct Read {
  const char* from;
  std::atomic<int64_t> sum;
};

struct ReadPieces {
  Read read;
  const int64_t* order;
  int64_t bytes, count;
};

struct Copy {
  char* to;
  const char* from;
};

constexpr int64_t kPage = 4096, kPagesPerThread = 16;

// Adds up the bytes of [at, last). Prefetches what lies some bytes further on and, near the end, `next`: 2
// KiB to the first-level cache, or 8 to the second-level one.
template <bool to_l2>
int64_t read_bytes(const char* at, const char* last, const char* next) {
  constexpr int64_t kAhead = to_l2 ? 8192 : 2048;
  Line sum[4] = {};
  for (; at < last; at += 4 * sizeof(Line)) {
    const char* ahead = at + kAhead < last ? at + kAhead : next + (at + kAhead - last);
    for (int i = 0; i < 4; ++i) {
      __builtin_prefetch(ahead + i * sizeof(Line), 0, to_l2 ? 2 : 3);
      sum[i] += *reinterpret_cast<const Line*>(at + i * sizeof(Line));
    }
  }
  sum[0] += sum[1] + sum[2] + sum[3];
  int64_t all = 0;
  for (int i = 0; i < 8; ++i) all += sum[0][i];
  return all;
}

void read_pages(int64_t begin, int64_t end, void* context) {
  Read& read = *static_cast<Read*>(context);
  const char* last = read.from + end * kPage;
  read.sum += read_bytes<false>(read.from + begin * kPage, last, last);
}

template <bool to_l2>
void read_pieces(int64_t begin, int64_t end, void* context) {
  ReadPieces& pieces = *static_cast<ReadPieces*>(context);
  int64_t all = 0;
  for (int64_t i = begin; i < end; ++i) {
    const char* at = pieces.read.from + pieces.order[i] * pieces.bytes;
    const char* next = pieces.read.from + pieces.order[i + 1 < pieces.count ? i + 1 : i] * pieces.bytes;
    all += read_bytes<to_l2>(at, at + pieces.bytes, next);
  }
  pieces.read.sum += all;
}

void copy_pages(int64_t begin, int64_t end, void* context) {
  const Copy& copy = *static_cast<const Copy*>(context);
#if defined(__AVX2__)
  for (int64_t i = begin * kPage; i < end * kPage; i += 32) {
    const __m256i half_line = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(copy.from + i));
    _mm256_stream_si256(reinterpret_cast<__m256i*>(copy.to + i), half_line);
  }
  _mm_sfence();
#else
  std::memcpy(copy.to + begin * kPage, copy.from + begin * kPage, (end - begin) * kPage);
#endif
}

#if defined(__linux__)
struct Cores {
  cpu_set_t all;
  bool one_each;
};

void keep_to_cores(int64_t begin, int64_t, void* context) {
  const Cores& cores = *static_cast<const Cores*>(context);
  cpu_set_t mine = cores.all;
  if (cores.one_each) {
    int64_t nth = begin % CPU_COUNT(&cores.all);
    int core = 0;
    while (!CPU_ISSET(core, &cores.all) || nth-- > 0) ++core;
    CPU_ZERO(&mine);
    CPU_SET(core, &mine);
  }
  sched_setaffinity(0, sizeof mine, &mine);  // of the thread that calls
}
#endif

}  // namespace

/// Gives each of torch's threads a core of its own, or all of `cores` to each of them.
extern "C" void share_cores(const int64_t* cores, int64_t num_cores, int64_t num_threads, bool one_each) {
#if defined(__linux__)
  Cores given{{}, one_each};
  for (int64_t i = 0; i < num_cores; ++i) CPU_SET(cores[i], &given.all);
  torch_parallel_for(0, num_threads, 1, keep_to_cores, &given);
#endif
}

/// Adds up whole pages, which are aligned to lines.
extern "C" int64_t read_all(const void* from, int64_t num_pages) {
  Read read{static_cast<const char*>(from), {0}};
  torch_parallel_for(0, num_pages, kPagesPerThread, read_pages, &read);
  return read.sum;
}

/// Adds up pieces of some bytes, a multiple of four lines, in an order of their own; prefetches to the
/// second-level cache, or to the first.
extern "C" int64_t read_in_order(const void* from, const int64_t* order, int64_t count, int64_t bytes,
                                 bool to_l2) {
  ReadPieces pieces{{static_cast<const char*>(from), {0}}, order, bytes, count};
  torch_parallel_for(0, count, 1, to_l2 ? read_pieces<true> : read_pieces<false>, &pieces);
  return pieces.read.sum;
}

/// Copies whole pages past the caches.
extern "C" void copy_all(void* to, const void* from, int64_t num_pages) {
  Copy copy{static_cast<char*>(to), static_cast<const char*>(from)};
  torch_parallel_for(0, num_pages, kPagesPerThread, copy_pages, &copy);
}
