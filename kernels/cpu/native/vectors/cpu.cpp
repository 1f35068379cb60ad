// What this processor lets the kernels use.
#include "registers.h"

extern "C" int quire_has_amx() { return 0; }

// The least weight of products of eight bits.
extern "C" int quire_least_code() { return quire::LEAST_CODE; }
