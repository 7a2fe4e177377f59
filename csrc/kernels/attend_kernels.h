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

// Rows of the query's own dtype are read as they are, all others through float32 copies.
inline bool is_direct(const SidePlace& side, DType query_dtype) {
  return !side.scale.data && side.cache.dtype == query_dtype && side.dim % kBlock == 0;
}

inline ScoreKernel choose_score(const SidePlace& key, DType query_dtype) {
  if (!is_direct(key, query_dtype)) return {pack_nothing, score_wide};
  switch (query_dtype) {
    case DType::bf16: return {pack_nothing, score_direct<LoadBf16>};
    case DType::f16: return {pack_nothing, score_direct<LoadF16>};
    default: return {pack_nothing, score_direct<LoadF32>};
  }
}

inline ValueKernel choose_value(const SidePlace& value, DType query_dtype) {
  if (!is_direct(value, query_dtype)) return value_wide;
  switch (query_dtype) {
    case DType::bf16: return value_direct<LoadBf16>;
    case DType::f16: return value_direct<LoadF16>;
    default: return value_direct<LoadF32>;
  }
}

}  // namespace kvloom::KVLOOM_ISA
