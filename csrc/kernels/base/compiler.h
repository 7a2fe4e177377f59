// What compilers must be told: what is inlined.
#pragma once

// Never a symbol of its own: units for different CPUs include this file, and the linker would keep one.
#define KVLOOM_INLINE [[gnu::always_inline]] inline
#define KVLOOM_INLINE_LAMBDA __attribute__((always_inline))
