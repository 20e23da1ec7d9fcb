// RMS and layer normalization. A row is summed in four chains of vectors, always in the same order.
// The result is written in the row format that the next operation reads.
#pragma once
#include <stdint.h>

#include "kernels/table/rows.h"

namespace cpuserve {

// The arguments of rms_norm and layer_norm. The kernels process rows [m0, m1).
struct NormArgs {
  Rows x;               // f32
  Rows out;             // output in any format; may be the memory of x if its format is f32
  const float* weight;  // [width]
  const float* bias;    // bias [width] of layer_norm, or nullptr
  float eps;
  int64_t m0, m1;
  float* scratch;  // width floats
};
#define CPUSERVE_NORM_KERNELS(X) X(rms_norm, const NormArgs&) X(layer_norm, const NormArgs&)

}  // namespace cpuserve

#ifdef CPUSERVE_VEC  // in an ISA unit
#include "kernels/generic/convert.h"

namespace CPUSERVE_NS {

// Returns the sum of map(x[i]) over i < n.
template <class Map>
CPUSERVE_INLINE float sum_columns(const float* x, int n, Map map) {
  F s0 = zero(), s1 = zero(), s2 = zero(), s3 = zero();
  int i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
    s0 = add(s0, map(load(x + i)));
    s1 = add(s1, map(load(x + i + kLanes)));
    s2 = add(s2, map(load(x + i + 2 * kLanes)));
    s3 = add(s3, map(load(x + i + 3 * kLanes)));
  }
  for (; i + kLanes <= n; i += kLanes) s0 = add(s0, map(load(x + i)));
  if (i < n) s1 = add(s1, keep(map(load_n(x + i, n - i)), 0, n - i, zero()));
  return reduce_add(add(add(s0, s1), add(s2, s3)));
}

// y = (x - mean) * inverse * weight (+ bias)
CPUSERVE_INLINE void scale_columns(float* y, const float* x, int n, float mean, float inverse,
                                   const float* weight, const float* bias) {
  const F m = set1(mean), s = set1(inverse);
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const F v = mul(mul(sub(load(x + i), m), s), load(weight + i));
    store(y + i, bias ? add(v, load(bias + i)) : v);
  }
  if (i < n) {
    const F v = mul(mul(sub(load_n(x + i, n - i), m), s), load_n(weight + i, n - i));
    store_n(y + i, bias ? add(v, load_n(bias + i, n - i)) : v, n - i);
  }
}

CPUSERVE_INLINE float rms_inverse(const float* x, int n, float eps) {
  const float sum = sum_columns(x, n, [](F v) { return mul(v, v); });
  return 1.0f / sqrtf(sum / static_cast<float>(n) + eps);
}

// out = x / sqrt(mean(x^2) + eps) * weight
static inline void rms_norm(const NormArgs& a) noexcept {
  const int n = static_cast<int>(a.x.width);
  for (int64_t r = a.m0; r < a.m1; r++) {
    const float* x = f32_row(a.x, r);
    scale_columns(a.scratch, x, n, 0.0f, rms_inverse(x, n, a.eps), a.weight, nullptr);
    store_row(a.out, r, 0, a.scratch, n);
  }
}

// y = (x - mean) / sqrt(var + eps) * weight + bias
CPUSERVE_INLINE void scale_to_norm(float* y, const float* x, int n, const float* weight,
                                   const float* bias, float eps) {
  const float mean = sum_columns(x, n, [](F v) { return v; }) / static_cast<float>(n);
  const F m = set1(mean);
  const float square = sum_columns(x, n, [m](F v) { return mul(sub(v, m), sub(v, m)); });
  const float inverse = 1.0f / sqrtf(square / static_cast<float>(n) + eps);
  scale_columns(y, x, n, mean, inverse, weight, bias);
}

// out = (x - mean) / sqrt(var + eps) * weight + bias
static inline void layer_norm(const NormArgs& a) noexcept {
  const int n = static_cast<int>(a.x.width);
  for (int64_t r = a.m0; r < a.m1; r++) {
    const float* x = f32_row(a.x, r);
    scale_to_norm(a.scratch, x, n, a.weight, a.bias, a.eps);
    store_row(a.out, r, 0, a.scratch, n);
  }
}

}  // namespace CPUSERVE_NS
#endif
