#define KVLOOM_ISA amx
#define KVLOOM_TILES HardwareTiles
#define KVLOOM_MOVEMENT movement_avx512
#include "kernels/attend/tiles.h"

#include "isa.h"
