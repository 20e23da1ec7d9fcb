// Level avx512_bf16: the level avx512_vnni, and bf16 dot products.
#define CPUSERVE_NS cpuserve::isa_avx512_bf16
#define CPUSERVE_VEC "kernels/vec/avx512.h"
#define CPUSERVE_UNIT_BF16
#include "kernels/isa/unit.h"

CPUSERVE_EXPORT_TABLE(avx512_bf16)
