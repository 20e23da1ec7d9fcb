// Level neon_bf16: the level neon_i8mm, and bf16 dot products and matrix products.
#define CPUSERVE_NS cpuserve::isa_neon_bf16
#define CPUSERVE_VEC "kernels/vec/neon.h"
#define CPUSERVE_UNIT_BFMMLA
#include "kernels/isa/unit.h"

CPUSERVE_EXPORT_TABLE(neon_bf16)
