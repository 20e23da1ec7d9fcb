// Level neon_i8mm: the level neon_dotprod, and int8 matrix products.
#define CPUSERVE_NS cpuserve::isa_neon_i8mm
#define CPUSERVE_VEC "kernels/vec/neon.h"
#define CPUSERVE_UNIT_I8MM
#include "kernels/isa/unit.h"

CPUSERVE_EXPORT_TABLE(neon_i8mm)
