// Level avx512_vnni: the level avx512, and int8 dot products.
#define CPUSERVE_NS cpuserve::isa_avx512_vnni
#define CPUSERVE_VEC "kernels/vec/avx512.h"
#define CPUSERVE_UNIT_GROUPED
#include "kernels/isa/unit.h"

CPUSERVE_EXPORT_TABLE(avx512_vnni)
