// Level neon_dotprod: the level neon, and int8 dot products.
#define CPUSERVE_NS cpuserve::isa_neon_dotprod
#define CPUSERVE_VEC "kernels/vec/neon.h"
#define CPUSERVE_UNIT_GROUPED
#include "kernels/isa/unit.h"

CPUSERVE_EXPORT_TABLE(neon_dotprod)
