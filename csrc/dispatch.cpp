// Choice of the instruction set, made when the library is loaded. Plain C names, for ctypes.
#include <atomic>
#include <cstring>

#if defined(__linux__)
#include <sys/auxv.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#endif

#include "kernels.h"

namespace kvloom {
namespace {

// An instruction set, and why this process cannot run it: null if it can.
struct Candidate {
  const Kernels* table;
  const char* why_not;
};

#ifdef KVLOOM_X86
const char* why_not_avx2() {
  const bool runs =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  return runs ? nullptr : "the processor lacks AVX2, FMA or F16C";
}

const char* why_not_avx512() {
  const bool runs = why_not_avx2() == nullptr && __builtin_cpu_supports("avx512f") &&
                    __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                    __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bf16") &&
                    __builtin_cpu_supports("avx512vnni");
  return runs ? nullptr : "the processor lacks AVX-512 with BF16 and VNNI";
}

// Linux lets a process use tiles that asks for them, once for all its threads.
const char* why_not_amx() {
#if defined(__linux__)
  if (const char* reason = why_not_avx512()) return reason;
  unsigned a = 7, b, c = 0, d;
  asm volatile("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
  constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24;
  if ((d & kBf16) == 0 || (d & kTile) == 0) return "the processor lacks AMX with BF16";
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0 ? nullptr
                                                                     : "Linux refuses this process tiles";
#else
  return "tiles are asked of Linux only";
#endif
}

// The best first. Emulated tiles are for tests, and chosen by their name only.
const Candidate candidates[] = {
    {&kernels_amx, why_not_amx()},
    {&kernels_avx512, why_not_avx512()},
    {&kernels_avx2, why_not_avx2()},
    {&kernels_baseline, nullptr},
#ifdef KVLOOM_EMULATED_TILES
    {&kernels_amx_emulated, why_not_avx512()},
#endif
};
#elif defined(KVLOOM_ARM)
// The baseline has NEON, as all of 64 bits; dot products came with Armv8.2.
const char* why_not_neon() {
#if defined(__linux__)
  constexpr unsigned long kDotProducts = 1ul << 20;  // HWCAP_ASIMDDP
  const bool runs = (getauxval(AT_HWCAP) & kDotProducts) != 0;
#elif defined(__APPLE__)
  int found = 0;
  size_t size = sizeof found;
  const bool runs = sysctlbyname("hw.optional.arm.FEAT_DotProd", &found, &size, nullptr, 0) == 0 && found;
#else
  const bool runs = false;
#endif
  return runs ? nullptr : "the processor lacks dot products, or does not say that it has them";
}

const Candidate candidates[] = {{&kernels_neon, why_not_neon()}, {&kernels_baseline, nullptr}};
#else
const Candidate candidates[] = {{&kernels_baseline, nullptr}};
#endif

const Kernels* best() {
  for (const Candidate& each : candidates) {
    if (each.why_not == nullptr) return each.table;
  }
  return &kernels_baseline;
}

// Processors on which prefetching to the second-level cache was measured to be faster: AMD's Zen 3 and Zen 4,
// family 25. There the first-level cache waits for few lines at a time.
bool is_faster_to_l2() {
#ifdef KVLOOM_X86
  unsigned a = 0, b, c, d;
  asm volatile("cpuid" : "+a"(a), "=b"(b), "=c"(c), "=d"(d));
  char maker[12];
  std::memcpy(maker, &b, 4), std::memcpy(maker + 4, &d, 4), std::memcpy(maker + 8, &c, 4);
  a = 1;
  asm volatile("cpuid" : "+a"(a), "=b"(b), "=c"(c), "=d"(d));
  const unsigned family = (a >> 8 & 15) + (a >> 20 & 255);
  return std::memcmp(maker, "AuthenticAMD", sizeof maker) == 0 && family == 25;
#else
  return false;
#endif
}

const Kernels* chosen = best();
bool to_l2 = is_faster_to_l2();
std::atomic<int64_t> num_holders{0};  // of batch invariance

}  // namespace

const Kernels& kernels() { return *chosen; }
bool prefetches_to_l2() { return to_l2; }
bool is_batch_invariant() { return num_holders.load(std::memory_order_relaxed) > 0; }

}  // namespace kvloom

extern "C" {

// Name of the chosen instruction set.
__attribute__((visibility("default"))) const char* kvloom_isa() { return kvloom::kernels().name; }

// The largest head dim of the compiled attention.
__attribute__((visibility("default"))) int64_t kvloom_max_head_dim() { return kvloom::kMaxHeadDim; }

// Choose `name`: returns 0, or 1 if this machine does not have it, or 2 if this library does not; then
// nothing changes.
__attribute__((visibility("default"))) int kvloom_choose_isa(const char* name) {
  for (const kvloom::Candidate& each : kvloom::candidates) {
    if (std::strcmp(each.table->name, name) != 0) continue;
    if (each.why_not != nullptr) return 1;
    kvloom::chosen = each.table;
    return 0;
  }
  return 2;
}

// Whether attention prefetches to the second-level cache; set by `choice` if that is 0 or 1.
__attribute__((visibility("default"))) int kvloom_prefetch_to_l2(int choice) {
  if (choice == 0 || choice == 1) kvloom::to_l2 = choice == 1;
  return kvloom::to_l2;
}

// Adds `change` to the number of those who hold attention to batch invariance; from any thread, at any time.
__attribute__((visibility("default"))) void kvloom_hold_batch_invariance(int64_t change) {
  kvloom::num_holders.fetch_add(change, std::memory_order_relaxed);
}

// Why this process cannot run `name`; null if it can.
__attribute__((visibility("default"))) const char* kvloom_why_not(const char* name) {
  for (const kvloom::Candidate& each : kvloom::candidates)
    if (std::strcmp(each.table->name, name) == 0) return each.why_not;
  return "this library was built without it";
}

}  // extern "C"
