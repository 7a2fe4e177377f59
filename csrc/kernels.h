// The kernels of one instruction set, and which set was chosen.
#pragma once

#include "kernels/move/args.h"
#include "kernels/move/arrange_args.h"
#include "kernels/move/rotate_args.h"
#include "kernels/move/smooth_args.h"
#include "kernels/attend/args.h"

namespace kvloom {

// Kernels that move and transform rows. Work is a range of items, so that the caller decides about threads.
struct Movement {
  // Tokens `[begin, end)` of a store, a load or a copy. `scratch` holds the rows of a token.
  void (*move)(const MoveArgs& args, int64_t begin, int64_t end, Byte* scratch);
  // Rows `[begin, end)` times a Hadamard matrix.
  void (*rotate)(const RotateArgs& args, int64_t begin, int64_t end);
  // Head vectors in other axes and another order of pairs; returns the bits of the largest magnitude.
  int32_t (*arrange)(const ArrangeArgs& args);
  // Tokens `[begin, end)` of smoothed keys, or of queries for them.
  void (*smooth)(const SmoothArgs& args, int64_t begin, int64_t end);
};

// One table for each instruction set.
struct Kernels {
  const char* name;
  const Movement* movement;
  // Attention: whether head dims fit, whether prompts run in tiles, the plan of a call, the start of the
  // workspace, items, and then merges.
  bool (*attend_supports)(const AttendArgs& args);
  bool (*attend_in_tiles)(const AttendArgs& args);
  AttendPlan (*attend_plan)(const AttendArgs& args);
  void (*attend_prepare)(const AttendArgs& args, void* workspace);
  void (*attend_run)(const AttendArgs& args, int64_t first, int64_t last, void* workspace);
  void (*attend_merge)(const AttendArgs& args, int64_t first, int64_t last, void* workspace);
};

extern const Kernels kernels_baseline;
#ifdef KVLOOM_X86
extern const Kernels kernels_avx2;
extern const Kernels kernels_avx512;
extern const Movement movement_avx512;  // with tiles, too
extern const Kernels kernels_amx;
extern const Kernels kernels_amx_emulated;
#endif
#ifdef KVLOOM_ARM
extern const Kernels kernels_neon;
#endif

// The chosen table: by default the best that this machine runs.
const Kernels& kernels();

// Whether attention prefetches to the second-level cache: by default what is faster on this processor.
bool prefetches_to_l2();

// Whether attention must have the same bits in calls of any number of new tokens, at present.
bool is_batch_invariant();

}  // namespace kvloom
