// Checks that operations of several families share.
#pragma once
#include "base/check.h"
#include "kernels/table.h"

namespace cpuserve {

constexpr bool quantized(ActFormat f) { return f >= ActFormat::q8g32; }
// Returns whether a scale of this format covers more columns than linears write together.
// Only an op that has the whole row (ConvertOp) can write such a format.
constexpr bool whole_row(ActFormat f) { return f >= ActFormat::q8g128; }

inline void check_gated(const char* op, Activation activation, bool glu) {
  check_argument(glu || activation != Activation::clamped_swiglu, op,
                 ": clamped_swiglu needs a gate and an up");
}

}  // namespace cpuserve
