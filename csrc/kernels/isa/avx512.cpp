// Level avx512: AVX-512 F, BW, DQ, VL, CD.
#define CPUSERVE_NS cpuserve::isa_avx512
#define CPUSERVE_VEC "kernels/vec/avx512.h"
#define CPUSERVE_UNIT_ALL
#include "kernels/isa/unit.h"

CPUSERVE_EXPORT_TABLE(avx512)
