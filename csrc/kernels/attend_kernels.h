// Which kernel serves which dtype on this instruction set.
#pragma once

#include "attend_tile.h"

namespace kvloom::KVLOOM_ISA {

// Bytes of a packed query row: a head of numbers, then up to four for each element.
constexpr Index kPackedHead = 256;
constexpr Index kPackedRow(Index width) { return kPackedHead + 4 * width; }

struct ScoreKernel {
  void (*pack)(const SidePlace& side, const float* query, Index num_rows, Index width, Byte* packed);
  void (*run)(const ChunkRows& chunk, const ScoreTask& task);
};
using ValueKernel = void (*)(const ChunkRows& chunk, const ValueTask& task);

inline void pack_nothing(const SidePlace&, const float*, Index, Index, Byte*) {}

inline ScoreKernel choose_score(const SidePlace&, DType) { return {pack_nothing, score_wide}; }
inline ValueKernel choose_value(const SidePlace&, DType) { return value_wide; }

}  // namespace kvloom::KVLOOM_ISA
