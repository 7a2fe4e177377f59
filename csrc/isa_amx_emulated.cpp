// For tests: the kernels of isa_amx.cpp on tiles in plain C++, wherever AVX-512 is.
#define KVLOOM_ISA amx_emulated
#define KVLOOM_NAME "amx-emulated"
#define KVLOOM_TILES EmulatedTiles
#include "kernels/attend/emulated_tiles.h"

#include "isa.h"
