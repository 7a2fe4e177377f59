// Included once by each isa_*.cpp, which is compiled for its own instruction set. Everything here is in a
// namespace of that set: two units must never define one inline function, or the linker would keep the
// version of a CPU that this one may not be. For the same reason no templates of the standard library.
#pragma once

#include "kernels.h"
#include "kernels/attend/run.h"

#define KVLOOM_JOIN_(a, b) a##b
#define KVLOOM_JOIN(a, b) KVLOOM_JOIN_(a, b)
#define KVLOOM_STRING_(a) #a
#define KVLOOM_STRING(a) KVLOOM_STRING_(a)

#ifndef KVLOOM_NAME
#define KVLOOM_NAME KVLOOM_STRING(KVLOOM_ISA)
#endif

#ifndef KVLOOM_MOVEMENT  // a unit may name another one's
#include "kernels/move/arrange.h"
#include "kernels/move/move.h"
#include "kernels/move/rotate.h"
#include "kernels/move/smooth.h"

namespace kvloom {

#define KVLOOM_MOVEMENT KVLOOM_JOIN(movement_, KVLOOM_ISA)
extern const Movement KVLOOM_MOVEMENT;
const Movement KVLOOM_MOVEMENT = {
    .move = KVLOOM_ISA::rows::move,
    .rotate = KVLOOM_ISA::rotate,
    .arrange = KVLOOM_ISA::arrange,
    .smooth = KVLOOM_ISA::smooth,
};

}  // namespace kvloom
#endif

namespace kvloom {

extern const Kernels KVLOOM_JOIN(kernels_, KVLOOM_ISA);
const Kernels KVLOOM_JOIN(kernels_, KVLOOM_ISA) = {
    .name = KVLOOM_NAME,
    .movement = &KVLOOM_MOVEMENT,
    .attend_supports = KVLOOM_ISA::attend_supports,
    .attend_in_tiles = KVLOOM_ISA::attend_in_tiles,
    .attend_plan = KVLOOM_ISA::attend_plan_of,
    .attend_prepare = KVLOOM_ISA::attend_prepare,
    .attend_run = KVLOOM_ISA::attend_run,
    .attend_merge = KVLOOM_ISA::attend_merge,
};

}  // namespace kvloom
