// Residual additions: out += x, in fp32.
#pragma once
#include <stdint.h>

#include "kernels/table/rows.h"

namespace cpuserve {

// out += x for rows [m0, m1).
struct AddArgs {
  Rows x;    // f32
  Rows out;  // f32
  int64_t m0, m1;
};
#define CPUSERVE_ADD_KERNELS(X) X(add, const AddArgs&)

}  // namespace cpuserve

#ifdef CPUSERVE_VEC  // in an ISA unit
#include "kernels/generic/convert.h"

namespace CPUSERVE_NS {

CPUSERVE_INLINE void add_columns(float* to, const float* x, int n) {
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) store(to + i, add(load(to + i), load(x + i)));
  if (i < n) store_n(to + i, add(load_n(to + i, n - i), load_n(x + i, n - i)), n - i);
}

static inline void add(const AddArgs& a) noexcept {
  const int n = static_cast<int>(a.out.width);
  for (int64_t r = a.m0; r < a.m1; r++) add_columns(f32_row(a.out, r), f32_row(a.x, r), n);
}

}  // namespace CPUSERVE_NS
#endif
