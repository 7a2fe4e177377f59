// Which instruction set runs, chosen when the library is loaded. Plain C names, for ctypes.
#include <cstring>

#include "kernels.h"

namespace kvloom {
namespace {

struct Candidate {
  const Kernels* table;
  bool runs_here;
};

#ifdef KVLOOM_X86
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
}

const Candidate candidates[] = {
    {&kernels_avx512, has_avx512()}, {&kernels_avx2, has_avx2()}, {&kernels_baseline, true}};
#else
const Candidate candidates[] = {{&kernels_baseline, true}};
#endif

const Kernels* best() {
  for (const Candidate& each : candidates) {
    if (each.runs_here) return each.table;
  }
  return &kernels_baseline;
}

const Kernels* chosen = best();

}  // namespace

const Kernels& kernels() { return *chosen; }

}  // namespace kvloom

extern "C" {

// Name of the chosen instruction set.
__attribute__((visibility("default"))) const char* kvloom_isa() { return kvloom::kernels().name; }

// The largest head dim of the compiled attention.
__attribute__((visibility("default"))) int64_t kvloom_max_head_dim() { return kvloom::kMaxHeadDim; }

// Choose `name`: 0, or 1 if this machine lacks it, or 2 if it is unknown; then nothing changes.
__attribute__((visibility("default"))) int kvloom_choose_isa(const char* name) {
  for (const kvloom::Candidate& each : kvloom::candidates) {
    if (std::strcmp(each.table->name, name) != 0) continue;
    if (!each.runs_here) return 1;
    kvloom::chosen = each.table;
    return 0;
  }
  return 2;
}

}  // extern "C"
