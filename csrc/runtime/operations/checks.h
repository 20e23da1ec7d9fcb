// Checks that operations of several families share.
#pragma once
#include "base/check.h"
#include "kernels/table.h"

namespace cpuserve {

inline void check_gated(const char* op, Activation activation, bool glu) {
  check_argument(glu || activation != Activation::clamped_swiglu, op,
                 ": clamped_swiglu needs a gate and an up");
}

}  // namespace cpuserve
