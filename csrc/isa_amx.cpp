#define KVLOOM_ISA amx
#define KVLOOM_TILES HardwareTiles
#include "kernels/attend/tiles.h"

#include "isa.h"
