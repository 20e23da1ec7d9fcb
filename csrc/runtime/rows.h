// Reads activation rows outside the kernels, for taps and tests.
#pragma once
#include <cstdint>

#include "kernels/table.h"

namespace cpuserve {

inline uint8_t* row_of(const Rows& rows, int64_t row) noexcept {
  return static_cast<uint8_t*>(rows.data) + static_cast<size_t>(row) * rows.stride;
}

// Writes row `row`, in any format, to out[0..rows.width) as fp32.
void read_row(const Rows& rows, int64_t row, float* out) noexcept;

}  // namespace cpuserve
