// Level amx: the level avx512_bf16, and linears and attention on AMX tiles.
// A build with CPUSERVE_MODELS replaces AMX instructions with C++ code (tests/amx/tile_model.h)
// and the vectors with vec/avx2.h, so that the tests of this level run on any x86 CPU.
#define CPUSERVE_NS cpuserve::isa_amx
#ifdef CPUSERVE_TILE_MODEL
#define CPUSERVE_VEC "kernels/vec/avx2.h"
#else
#define CPUSERVE_VEC "kernels/vec/avx512.h"
#endif
#define CPUSERVE_UNIT_TILES
#include "kernels/isa/unit.h"

CPUSERVE_EXPORT_TABLE(amx)
