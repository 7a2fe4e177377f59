// The tile operations that the kernels use, on AMX hardware. emulated_tiles.h has the same in plain C++.
//
// Inline assembly and not the intrinsics: these want literals for tiles, which an argument of a template is
// not, and a flag of the compiler.
#pragma once

#include "cache.h"

#include <cstddef>

namespace kvloom::KVLOOM_ISA {

// Eight tiles of 16 rows of 64 bytes. A thread has them from configure() until the object ends; later the
// system would save 8 KiB whenever it switches threads.
class HardwareTiles {
 public:
  HardwareTiles() = default;
  HardwareTiles(const HardwareTiles&) = delete;
  HardwareTiles& operator=(const HardwareTiles&) = delete;
  ~HardwareTiles() {
    if (is_configured_) asm volatile("tilerelease");
  }

  KVLOOM_INLINE void configure() {
    if (is_configured_) return;
    Shapes shapes;
    for (int tile = 0; tile < 8; ++tile) shapes.row_bytes[tile] = 64, shapes.rows[tile] = 16;
    asm volatile("ldtilecfg %0" ::"m"(shapes));
    is_configured_ = true;
  }

  template <int T>
  KVLOOM_INLINE void zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(T));
  }
  // Rows that begin `stride` bytes apart.
  template <int T>
  KVLOOM_INLINE void load(const void* from, std::ptrdiff_t stride) {
    asm volatile("tileloadd (%1,%2,1), %%tmm%c0" ::"i"(T), "r"(from), "r"(stride) : "memory");
  }
  template <int T>
  KVLOOM_INLINE void store(void* to, std::ptrdiff_t stride) {
    asm volatile("tilestored %%tmm%c0, (%1,%2,1)" ::"i"(T), "r"(to), "r"(stride) : "memory");
  }
  // C[m][n] += sum over pairs k of A[m][k] * B[k][n], of bfloat16 to float32.
  template <int C, int A, int B>
  KVLOOM_INLINE void multiply() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
  }

 private:
  // Operand of `ldtilecfg`.
  struct alignas(64) Shapes {
    Byte palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    Byte rows[16] = {};
  };
  static_assert(sizeof(Shapes) == 64);

  bool is_configured_ = false;
};

}  // namespace kvloom::KVLOOM_ISA
