// The activations in fp64, for the tests of linears and of rows.
#pragma once
#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/table.h"

namespace activations {

using cpuserve::Activation;

inline double activated(Activation act, double x) {
  switch (act) {
    case Activation::none:
      return x;
    case Activation::relu:
      return x > 0 ? x : 0;
    case Activation::relu2:
      return x > 0 ? x * x : 0;
    case Activation::gelu:
      return 0.5 * x * (1 + std::erf(x / std::sqrt(2.0)));
    case Activation::gelu_tanh:
      return 0.5 * x * (1 + std::tanh(std::sqrt(2 / std::acos(-1.0)) * (x + 0.044715 * x * x * x)));
    case Activation::silu:
      return x / (1 + std::exp(-x));
    case Activation::quick_gelu:
      return x / (1 + std::exp(-1.702 * x));
    case Activation::sigmoid:
      return 1 / (1 + std::exp(-x));
    case Activation::tanh:
      return std::tanh(x);
    case Activation::clamped_swiglu: {
      const double g = std::min(x, 7.0);
      return g / (1 + std::exp(-1.702 * g));
    }
  }
  return NAN;
}

// With glu: the factor of the activated gate.
inline double other_half(Activation act, double x) {
  return act == Activation::clamped_swiglu ? 1 + std::max(-7.0, std::min(x, 7.0)) : x;
}

// All activations but those that need a gate and its up projection.
inline std::vector<Activation> ungated() {
  std::vector<Activation> out;
#define CPUSERVE_EACH(name, up) out.push_back(Activation::name);
  CPUSERVE_ACTIVATIONS(CPUSERVE_EACH)
#undef CPUSERVE_EACH
  out.erase(std::find(out.begin(), out.end(), Activation::clamped_swiglu));
  return out;
}

}  // namespace activations
