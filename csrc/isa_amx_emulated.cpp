// The kernels of isa_amx.cpp on tiles in plain C++, for tests on any processor with AVX-512.
#define KVLOOM_ISA amx_emulated
#define KVLOOM_NAME "amx-emulated"
#define KVLOOM_TILES EmulatedTiles
#define KVLOOM_MOVEMENT movement_avx512
#include "kernels/attend/emulated_tiles.h"

#include "isa.h"
