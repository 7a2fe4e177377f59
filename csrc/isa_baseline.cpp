#define KVLOOM_ISA baseline
#include "isa.h"
