#define KVLOOM_ISA avx512
#include "isa.h"
