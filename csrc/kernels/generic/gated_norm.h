// RMS norms with a gate, at the end of recurrent layers.
#pragma once
#include "kernels/generic/activation.h"
#include "kernels/generic/norm.h"

namespace CPUSERVE_NS {

// y = x silu(z)
CPUSERVE_INLINE void gate_columns(float* y, const float* x, const float* z, int n) {
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) store(y + i, mul(load(x + i), silu(load(z + i))));
  if (i < n) store_n(y + i, mul(load_n(x + i, n - i), silu(load_n(z + i, n - i))), n - i);
}

static inline void gated_norm(const GatedNormArgs& a) noexcept {
  const int n = static_cast<int>(a.width);
  for (int64_t r = 0; r < a.rows; r++) {
    for (int64_t group = 0; group < a.groups; group++) {
      const int64_t at = group * a.width;
      const float* x = a.x + r * a.x_stride + at;
      const float* z = a.z + r * a.z_stride + at;
      const float* weight = a.weight + (a.shared_weight ? 0 : at);
      float* out = a.out + r * a.out_stride + at;
      if (a.gate_first) {
        gate_columns(out, x, z, n);
        scale_columns(out, out, n, 0.0f, rms_inverse(out, n, a.eps), weight, nullptr);
      } else {
        scale_columns(out, x, n, 0.0f, rms_inverse(x, n, a.eps), weight, nullptr);
        gate_columns(out, out, z, n);
      }
    }
  }
}

}  // namespace CPUSERVE_NS
