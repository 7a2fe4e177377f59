#define KVLOOM_ISA avx2
#include "isa.h"
