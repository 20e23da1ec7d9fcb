// Finds the rows of values, and reads them outside the kernels: for Combine, taps and tests.
#pragma once
#include <cstdint>
#include <cstring>

#include "kernels/table.h"

namespace cpuserve {

inline uint8_t* row_of(const Rows& rows, int64_t row) noexcept {
  return static_cast<uint8_t*>(rows.data) + static_cast<size_t>(row) * rows.stride;
}

// The same of a value in fp32, and how many floats there are from row to row.
inline float* floats_of(const Rows& rows, int64_t row) noexcept {
  return reinterpret_cast<float*>(row_of(rows, row));
}
inline int64_t float_stride(const Rows& rows) noexcept {
  return static_cast<int64_t>(rows.stride / sizeof(float));
}

inline float bf16_to_float(uint16_t x) noexcept {
  const uint32_t bits = uint32_t{x} << 16;
  float out;
  std::memcpy(&out, &bits, sizeof out);
  return out;
}

// Writes row `row`, in any format, to out[0..rows.width) as fp32.
void read_row(const Rows& rows, int64_t row, float* out) noexcept;

}  // namespace cpuserve
