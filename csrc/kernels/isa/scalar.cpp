// Level scalar: no vector instructions. It runs only if it is requested (CPUSERVE_ISA=scalar).
#define CPUSERVE_NS cpuserve::isa_scalar
#define CPUSERVE_VEC "kernels/vec/scalar.h"
#define CPUSERVE_UNIT_ALL
#include "kernels/isa/unit.h"

CPUSERVE_EXPORT_TABLE(scalar)
