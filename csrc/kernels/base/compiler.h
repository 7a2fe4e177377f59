// Instructions to the compiler: functions to inline, and loops to unroll.
#pragma once

// Never a symbol of its own: units for different CPUs include this file, and the linker would keep one.
#define KVLOOM_INLINE [[gnu::always_inline]] inline
#define KVLOOM_INLINE_LAMBDA __attribute__((always_inline))

#define KVLOOM_PRAGMA(text) _Pragma(#text)
#define KVLOOM_UNROLL(count) KVLOOM_PRAGMA(GCC unroll count)  // before a loop
