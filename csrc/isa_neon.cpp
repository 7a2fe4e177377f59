#define KVLOOM_ISA neon
#include "isa.h"
