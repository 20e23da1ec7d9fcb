// Access to the rows of values outside the kernels: for operations, Executor::tap and tests.
#pragma once
#include <cstdint>
#include <cstring>

#include "kernels/table.h"

namespace cpuserve {

inline uint8_t* row_of(const Rows& rows, int64_t row) noexcept {
  return static_cast<uint8_t*>(rows.data) + static_cast<size_t>(row) * rows.stride;
}

constexpr bool quantized(ActFormat f) { return f >= ActFormat::q8g32; }
// Returns whether a scale of this format covers more columns than linears write together.
// Only an op that has the whole row (ConvertOp) can write such a format.
constexpr bool whole_row(ActFormat f) { return f >= ActFormat::q8g128; }

// floats_of returns the address of a row of an fp32 value.
// float_stride returns the number of floats from one row to the next.
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

// Converts row `row`, which may have any format, to fp32 and writes it to out[0 .. rows.width).
void read_row(const Rows& rows, int64_t row, float* out) noexcept;

}  // namespace cpuserve
