// Writing fp32 values as an activation row in any ActFormat.
#pragma once
#include <float.h>

#include "kernels/table.h"
#include "kernels/vec/vec.h"

namespace CPUSERVE_NS {

CPUSERVE_INLINE uint8_t* row_at(const Rows& rows, int64_t row) {
  return static_cast<uint8_t*>(rows.data) + static_cast<size_t>(row) * rows.stride;
}
CPUSERVE_INLINE float* f32_row(const Rows& rows, int64_t row) {
  return reinterpret_cast<float*>(row_at(rows, row));
}
CPUSERVE_INLINE F abs(F x) { return max(x, sub(zero(), x)); }

CPUSERVE_INLINE void copy_f32(float* to, const float* x, int n) {
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) store(to + i, load(x + i));
  if (i < n) store_n(to + i, load_n(x + i, n - i), n - i);
}

CPUSERVE_INLINE void copy_bf16(uint16_t* to, const float* x, int n) {
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) store_bf16(to + i, load(x + i));
  if (i < n) {
    uint16_t tail[kLanes];
    store_bf16(tail, load_n(x + i, n - i));
    memcpy(to + i, tail, static_cast<size_t>(n - i) * sizeof(uint16_t));
  }
}

// One group of n columns, stored as `padded` (a multiple of 32) bytes. A NaN or infinity anywhere
// makes the scale NaN, so that it reaches the logits and is detected there, rather than turning
// into a plausible byte. Where 127 / amax would overflow (amax < 4e-37) the group is zero.
CPUSERVE_INLINE void quantize_group(const float* x, int n, int padded, int8_t* q, float* scale,
                                    int32_t* sum) {
  const int whole = n / kLanes * kLanes;
  F top = zero();
  for (int i = 0; i < whole; i += kLanes) top = max(top, abs(load(x + i)));
  if (whole < n) top = max(top, abs(load_n(x + whole, n - whole)));
  const float amax = reduce_max(top);
  float inverse = amax > 0 ? 127.0f / amax : 0.0f;
  if (inverse > FLT_MAX) inverse = 0.0f;
  F total = zero();
  const auto put = [&](int i, F v) {
    const F r = round(mul(v, set1(inverse)));
    store_s8(q + i, r);
    total = add(total, r);  // integers below 2^24 up to 130,000 columns: exact in any order
  };
  for (int i = 0; i < whole; i += kLanes) put(i, load(x + i));
  int end = whole;
  if (whole < n) {
    put(whole, load_n(x + whole, n - whole));
    end += kLanes;
  }
  if (end < padded) memset(q + end, 0, static_cast<size_t>(padded - end));
  const float t = reduce_add(total);
  *scale = t - t != 0.0f ? t - t : inverse == 0.0f ? 0.0f : amax / 127.0f;
  *sum = t - t != 0.0f ? 0 : static_cast<int32_t>(t);
}

// Columns [column0, column0 + n), a whole number of groups but for the row's last; kGroup 0 is the
// whole row.
template <int kGroup>
CPUSERVE_INLINE void quantize_columns(uint8_t* row, int64_t padded, int64_t column0, const float* x,
                                      int n) {
  const int size = kGroup ? kGroup : static_cast<int>(padded);
  const int64_t groups = padded / size;
  float* scales = reinterpret_cast<float*>(row + padded);
  int32_t* sums = reinterpret_cast<int32_t*>(scales + groups);
  for (int i = 0; i < n; i += size) {
    const int64_t g = (column0 + i) / size;
    int8_t* q = reinterpret_cast<int8_t*>(row + g * size);
    if (kGroup && i + kGroup <= n) {
      quantize_group(x + i, kGroup, kGroup, q, scales + g, sums + g);
    } else {
      quantize_group(x + i, n - i, size, q, scales + g, sums + g);
    }
  }
}

static inline void quantize_row(uint8_t* row, int64_t width, int64_t column0, const float* x,
                                int n) {
  quantize_columns<32>(row, round_up(width, 32), column0, x, n);
}

// q8g128 and q8row. Not inlined: tiles never write these, and gcc warns about the ones they would.
static __attribute__((noinline)) void quantize_wide(const Rows& out, uint8_t* row, int64_t column0,
                                                    const float* x, int n) {
  const int64_t padded = padded_width(out.format, out.width);
  if (out.format == ActFormat::q8row) {
    quantize_columns<0>(row, padded, column0, x, n);
  } else {
    quantize_columns<128>(row, padded, column0, x, n);
  }
}

// As quantize_row, in two terms: the second holds what the first one's rounding lost.
CPUSERVE_INLINE void quantize_row_twice(const Rows& out, uint8_t* row, int64_t column0,
                                        const float* x, int n) {
  const int64_t groups = round_up(out.width, 32) / 32;
  quantize_row(row, out.width, column0, x, n);
  uint8_t* second = row + out.stride / 2;
  for (int i = 0; i < n; i += 32) {
    const int64_t g = (column0 + i) / 32;
    const float scale = reinterpret_cast<const float*>(row + groups * 32)[g];
    const int8_t* q = reinterpret_cast<const int8_t*>(row + g * 32);
    const int count = n - i < 32 ? n - i : 32;
    float left[32] = {};
    for (int j = 0; j < count; j++) left[j] = x[i + j] - scale * static_cast<float>(q[j]);
    quantize_row(second, out.width, column0 + i, left, count);
  }
}

// Writes columns [column0, column0 + n) of one row from fp32; column0 is a multiple of 32 for
// q8g32, of 128 for q8g128 and 0 for q8row, whose n is the width. The call that ends at out.width
// also zeroes the padding columns of bf16 and q8g32, whose consumers read K rounded up.
CPUSERVE_INLINE void store_row(const Rows& out, int64_t row, int64_t column0, const float* x,
                               int n) {
  uint8_t* to = row_at(out, row);
  switch (out.format) {
    case ActFormat::f32:
      copy_f32(reinterpret_cast<float*>(to) + column0, x, n);
      break;
    case ActFormat::bf16: {
      uint16_t* b = reinterpret_cast<uint16_t*>(to);
      copy_bf16(b + column0, x, n);
      const int64_t padded = round_up(out.width, 32);
      if (column0 + n == out.width && padded > out.width) {
        memset(b + out.width, 0, static_cast<size_t>(padded - out.width) * sizeof(uint16_t));
      }
      break;
    }
    case ActFormat::q8g32:
      quantize_row(to, out.width, column0, x, n);
      break;
    case ActFormat::q8g32x2:
      quantize_row_twice(out, to, column0, x, n);
      break;
    case ActFormat::q8g128:
    case ActFormat::q8row:
      quantize_wide(out, to, column0, x, n);
      break;
  }
}

static inline void convert(const ConvertArgs& a) noexcept {
  for (int64_t r = a.m0; r < a.m1; r++) {
    store_row(a.out, r, 0, f32_row(a.x, r), static_cast<int>(a.out.width));
  }
}

}  // namespace CPUSERVE_NS
