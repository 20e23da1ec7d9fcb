// The arguments of operations on rows.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include "kernels/table/linear.h"
#include "kernels/table/rows.h"

namespace cpuserve {

// All of these kernels process rows [m0, m1).
struct NormArgs {
  Rows x;               // f32
  Rows out;             // any format; may alias x when f32
  const float* weight;  // [width]
  const float* bias;    // layer_norm only, or nullptr
  float eps;
  int64_t m0, m1;
  float* scratch;  // width floats
};

struct ConvertArgs {
  Rows x;
  Rows out;
  int64_t m0, m1;
};  // x is f32, out has any format
struct AddArgs {
  Rows x;
  Rows out;
  int64_t m0, m1;
};  // out += x, both f32
struct ActivationArgs {
  Rows x;
  Rows out;
  Activation act;
  bool glu;
  int64_t m0, m1;
  float* scratch;
};

}  // namespace cpuserve
