// Level amx: avx512_bf16 with matrix tiles. In a build with CPUSERVE_MODELS the tiles are
// C++ (tests/amx/tile_model.h) and the vectors AVX2's, so that any x86 CPU runs this level's tests.
#define CPUSERVE_NS cpuserve::isa_amx
#ifdef CPUSERVE_TILE_MODEL
#define CPUSERVE_VEC "kernels/vec/avx2.h"
#else
#define CPUSERVE_VEC "kernels/vec/avx512.h"
#endif
#define CPUSERVE_UNIT_TILES
#include "kernels/isa/unit.h"

CPUSERVE_EXPORT_TABLE(amx)
