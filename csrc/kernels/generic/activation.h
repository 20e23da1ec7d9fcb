// Activation functions: on a range of columns in place, and as an operation on whole rows.
#pragma once
#include <stdint.h>

#include "kernels/table/linear.h"

namespace cpuserve {

// The arguments of `activation`, which processes rows [m0, m1).
struct ActivationArgs {
  Rows x;
  Rows out;
  Activation act;
  bool glu;
  int64_t m0, m1;
  float* scratch;
};
#define CPUSERVE_ACTIVATION_KERNELS(X) X(activation, const ActivationArgs&)

}  // namespace cpuserve

#ifdef CPUSERVE_VEC  // in an ISA unit
#include "kernels/generic/convert.h"
#include "kernels/generic/math.h"

namespace CPUSERVE_NS {

// The functions of the activations of table/linear.h.
// max returns its second operand if one operand is NaN, so a NaN in x stays NaN.
CPUSERVE_INLINE F none(F x) { return x; }
CPUSERVE_INLINE F relu(F x) { return max(zero(), x); }
CPUSERVE_INLINE F relu2(F x) { return mul(relu(x), relu(x)); }
CPUSERVE_INLINE F silu(F x) { return div(x, add(set1(1.0f), exp(sub(zero(), x)))); }
CPUSERVE_INLINE F quick_gelu(F x) { return div(x, add(set1(1.0f), exp(mul(set1(-1.702f), x)))); }
// Returns max(x, -6) / 2, the first factor of GELU. The limit keeps the product small for x < -6,
// where the other factor (1 + erf or 1 + tanh) is 0 except for a rounding error of 6e-8.
CPUSERVE_INLINE F gelu_half(F x) { return mul(set1(0.5f), max(set1(-6.0f), x)); }
CPUSERVE_INLINE F gelu(F x) {
  const F h = gelu_half(x);
  return fma(h, erf(mul(x, set1(0.70710678f))), h);
}
CPUSERVE_INLINE F gelu_tanh(F x) {
  const F h = gelu_half(x);
  const F cubic = fma(mul(mul(x, x), set1(0.044715f)), x, x);
  return fma(h, tanh(mul(cubic, set1(0.79788456f))), h);
}

// The constants swiglu_alpha and swiglu_limit of the model gpt-oss.
// A NaN input stays NaN, because min and max return their second operand if one operand is NaN.
constexpr float kSwigluAlpha = 1.702f, kSwigluLimit = 7.0f;
CPUSERVE_INLINE F clamped_swiglu(F x) {
  const F g = min(set1(kSwigluLimit), x);
  return div(g, add(set1(1.0f), exp(mul(set1(-kSwigluAlpha), g))));
}
CPUSERVE_INLINE F clamped_up(F x) {
  return add(set1(1.0f), max(set1(-kSwigluLimit), min(set1(kSwigluLimit), x)));
}

template <class Map>
CPUSERVE_INLINE void map_columns(float* y, int n, Map map) {
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) store(y + i, map(load(y + i)));
  if (i < n) store_n(y + i, map(load_n(y + i, n - i)), n - i);
}

// Calls run(map, up) with the vector functions of `act`. An activation without a gate is map(x),
// and a gated activation (such as SwiGLU) is map(gate) * up(x).
template <class Run>
CPUSERVE_INLINE void with_activation(Activation act, Run run) {
  switch (act) {
#define CPUSERVE_CASE(name, up) \
  case Activation::name:        \
    return run([](F x) { return name(x); }, [](F x) { return up(x); });
    CPUSERVE_ACTIVATIONS(CPUSERVE_CASE)
#undef CPUSERVE_CASE
  }
}

// y = map(y) * up(x)
template <class Map, class Up>
CPUSERVE_INLINE void gate_columns(float* y, const float* x, int n, Map map, Up up) {
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) store(y + i, mul(map(load(y + i)), up(load(x + i))));
  if (i < n) store_n(y + i, mul(map(load_n(y + i, n - i)), up(load_n(x + i, n - i))), n - i);
}

// out = act(x), or act(x[:, :w]) * x[:, w:] with glu, where w is out.width. a.scratch has w floats.
static inline void activation(const ActivationArgs& a) noexcept {
  const int n = static_cast<int>(a.out.width);
  for (int64_t r = a.m0; r < a.m1; r++) {
    const float* x = f32_row(a.x, r);
    copy_f32(a.scratch, x, n);
    with_activation(a.act, [&](auto map, auto up) {
      a.glu ? gate_columns(a.scratch, x + n, n, map, up) : map_columns(a.scratch, n, map);
    });
    store_row(a.out, r, 0, a.scratch, n);
  }
}

}  // namespace CPUSERVE_NS
#endif
