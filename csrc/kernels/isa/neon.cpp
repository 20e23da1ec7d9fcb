// Level neon: Armv8.0-A Advanced SIMD. The base level on Arm.
#define CPUSERVE_NS cpuserve::isa_neon
#define CPUSERVE_VEC "kernels/vec/neon.h"
#define CPUSERVE_UNIT_ALL
#include "kernels/isa/unit.h"

CPUSERVE_EXPORT_TABLE(neon)
