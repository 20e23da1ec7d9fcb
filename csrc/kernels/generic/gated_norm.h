// RMS norms with a gate, at the end of recurrent layers.
#pragma once
#include <stdint.h>

namespace cpuserve {

// RMS norm of each of `groups` groups of `width` columns x of a row, with gates z for the columns:
//   gate_first   out = rms(x silu(z)) weight     Mamba2
//   otherwise    out = rms(x) weight silu(z)     gated delta nets
// where rms(y) = y / sqrt(mean(y^2) + eps).
// With `sigmoid`, the gate is sigmoid(z) instead of silu(z).
struct GatedNormArgs {
  const float* x;
  int64_t x_stride;
  const float* z;
  int64_t z_stride;
  const float* weight;  // weights [width] if shared_weight, else [groups][width]
  int64_t groups, width;
  float eps;
  bool gate_first, shared_weight;
  float* out;  // output; may be x, if the strides are equal
  int64_t out_stride;
  int64_t rows;
  bool sigmoid = false;
};
#define CPUSERVE_GATED_NORM_KERNELS(X) X(gated_norm, const GatedNormArgs&)

}  // namespace cpuserve

#ifdef CPUSERVE_VEC  // in an ISA unit
#include "kernels/generic/activation.h"
#include "kernels/generic/norm.h"

namespace CPUSERVE_NS {

// y = x silu(z), or x sigmoid(z)
CPUSERVE_INLINE void gate_columns(float* y, const float* x, const float* z, int n,
                                  bool is_sigmoid) {
  const auto gate = [&](F gate) { return is_sigmoid ? sigmoid(gate) : silu(gate); };
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) store(y + i, mul(load(x + i), gate(load(z + i))));
  if (i < n) store_n(y + i, mul(load_n(x + i, n - i), gate(load_n(z + i, n - i))), n - i);
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
        gate_columns(out, x, z, n, a.sigmoid);
        scale_columns(out, out, n, 0.0f, rms_inverse(out, n, a.eps), weight, nullptr);
      } else {
        scale_columns(out, x, n, 0.0f, rms_inverse(x, n, a.eps), weight, nullptr);
        gate_columns(out, out, z, n, a.sigmoid);
      }
    }
  }
}

}  // namespace CPUSERVE_NS
#endif
