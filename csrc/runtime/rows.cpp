#include "runtime/rows.h"

namespace cpuserve {
namespace {

float q8_to_float(const uint8_t* row, int64_t padded, int64_t group, int64_t i) {
  return reinterpret_cast<const float*>(row + padded)[i / group] *
         static_cast<float>(reinterpret_cast<const int8_t*>(row)[i]);
}

}  // namespace

void read_row(const Rows& rows, int64_t row, float* out) noexcept {
  const uint8_t* at = row_of(rows, row);
  const int64_t padded = padded_width(rows.format, rows.width);
  const int64_t group = scale_group(rows.format, rows.width);
  for (int64_t i = 0; i < rows.width; i++) {
    switch (rows.format) {
      case ActFormat::f32:
        out[i] = reinterpret_cast<const float*>(at)[i];
        break;
      case ActFormat::bf16:
        out[i] = bf16_to_float(reinterpret_cast<const uint16_t*>(at)[i]);
        break;
      case ActFormat::q8g32:
      case ActFormat::q8g128:
      case ActFormat::q8row:
      case ActFormat::q8g256:
        out[i] = q8_to_float(at, padded, group, i);
        break;
      case ActFormat::q8g32x2:
      case ActFormat::q8g256x2:
        out[i] =
            q8_to_float(at, padded, group, i) + q8_to_float(at + rows.stride / 2, padded, group, i);
        break;
    }
  }
}

}  // namespace cpuserve
