// Level avx_vnni: the level avx2, and int8 dot products.
// CPUs without AVX-512 use this level, such as Intel CPUs since Alder Lake.
#define CPUSERVE_NS cpuserve::isa_avx_vnni
#define CPUSERVE_VEC "kernels/vec/avx2.h"
#define CPUSERVE_UNIT_GROUPED
#include "kernels/isa/unit.h"

CPUSERVE_EXPORT_TABLE(avx_vnni)
