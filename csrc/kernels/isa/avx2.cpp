// Level avx2: AVX2, FMA, F16C. The base level on x86.
#define CPUSERVE_NS cpuserve::isa_avx2
#define CPUSERVE_VEC "kernels/vec/avx2.h"
#define CPUSERVE_UNIT_ALL
#include "kernels/isa/unit.h"

CPUSERVE_EXPORT_TABLE(avx2)
