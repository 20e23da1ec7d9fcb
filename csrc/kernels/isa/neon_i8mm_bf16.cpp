// Level neon_i8mm_bf16: neon_dotprod with bf16 dot products.
#define CPUSERVE_NS cpuserve::isa_neon_i8mm_bf16
#define CPUSERVE_VEC "kernels/vec/neon.h"
#define CPUSERVE_UNIT_BF16
#include "kernels/isa/unit.h"

CPUSERVE_EXPORT_TABLE(neon_i8mm_bf16)
