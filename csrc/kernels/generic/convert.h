// Converts rows of fp32 activations to any ActFormat.
#pragma once
#include <stdint.h>

#include "kernels/table/rows.h"

namespace cpuserve {

// Converts rows [m0, m1).
struct ConvertArgs {
  Rows x;    // f32
  Rows out;  // any format
  int64_t m0, m1;
};
#define CPUSERVE_CONVERT_KERNELS(X) X(convert, const ConvertArgs&)

}  // namespace cpuserve

#ifdef CPUSERVE_VEC  // in an ISA unit
#include <float.h>

#include "kernels/vec/vec.h"

namespace CPUSERVE_NS {

CPUSERVE_INLINE uint8_t* row_at(const Rows& rows, int64_t row) {
  return static_cast<uint8_t*>(rows.data) + static_cast<size_t>(row) * rows.stride;
}
CPUSERVE_INLINE float* f32_row(const Rows& rows, int64_t row) {
  return reinterpret_cast<float*>(row_at(rows, row));
}

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

// The addresses of one group of columns: its fp32 values (x),
// and its int8 codes, its scale and the sum of its codes in the quantized row.
struct QuantGroup {
  const float* x;
  int8_t* q;
  float* scale;
  int32_t* sum;
};

// Returns the addresses of group `g` in a row of `padded` columns with groups of `size` columns.
// The fp32 values of the group are at x.
CPUSERVE_INLINE QuantGroup group_of(uint8_t* row, int64_t padded, int64_t size, int64_t g,
                                    const float* x) {
  float* scales = reinterpret_cast<float*>(row + padded);
  int32_t* sums = reinterpret_cast<int32_t*>(scales + padded / size);
  return {x, reinterpret_cast<int8_t*>(row + g * size), scales + g, sums + g};
}

// Returns the address of the sums of group `g` of 256 columns in a q8g256 row:
// 16 int16 sums of 16 columns each, then 8 int16 sums of 32 columns each.
CPUSERVE_INLINE uint8_t* block_sums(uint8_t* row, int64_t padded, int64_t g) {
  return row + padded + padded / 256 * 4 + g * kBlockSums;
}

// Returns amax / 127 and 127 / amax; `bits` are the bits of amax, the largest magnitude of a group.
// A NaN or infinity in the group makes the scale NaN, because a plausible code would hide
// the error: the NaN reaches the logits and is detected there. If amax is below kLeastMagnitude,
// 127 / amax would overflow, so the scale and the codes become zero.
constexpr float kLeastMagnitude = 4e-37f;
struct GroupScale {
  float scale, inverse;
};
CPUSERVE_INLINE GroupScale scale_of(int32_t bits) {
  float amax;
  memcpy(&amax, &bits, sizeof amax);
  const bool live = amax >= kLeastMagnitude && amax <= FLT_MAX;
  const float divisor = live ? amax : 1.0f, off = amax - amax;  // off: 0, or NaN for infinity, NaN
  return {live ? divisor / 127.0f : off, live ? 127.0f / divisor : 0.0f};
}

// Quantizes N whole groups together: most of the cost of a group is reducing vectors
// to single numbers, and one reduction can process four groups.
template <int kGroup, int N>
CPUSERVE_INLINE void quantize_groups(const QuantGroup* to) {
  static_assert(N == 1 || N == 2 || N == 4, "a divisor of four");
  int32_t amax[4], total[4];
  GroupScale scale[N];
  I top[N], sum[N];
  for (int g = 0; g < N; g++) {
    top[g] = abs_bits(load(to[g].x));
    for (int i = kLanes; i < kGroup; i += kLanes) {
      top[g] = imax(top[g], abs_bits(load(to[g].x + i)));
    }
  }
  reduce_max4(top[0], top[1 % N], top[2 % N], top[3 % N], amax);
  for (int g = 0; g < N; g++) scale[g] = scale_of(amax[g]);
  for (int g = 0; g < N; g++) {
    const F s = set1(scale[g].inverse);
    for (int i = 0; i < kGroup; i += kLanes) {
      const I q = round_to_int(mul(load(to[g].x + i), s));
      store_bytes(to[g].q + i, q);
      sum[g] = i ? iadd(sum[g], q) : q;
    }
  }
  reduce_add4(sum[0], sum[1 % N], sum[2 % N], sum[3 % N], total);
  for (int g = 0; g < N; g++) {
    *to[g].scale = scale[g].scale;
    *to[g].sum = total[g];
  }
}
constexpr int kGroupsAtOnce = 4;
// Quantizes n groups, at most kGroupsAtOnce (4).
// If there are three groups, the last group is quantized twice, as the fourth.
template <int kGroup>
static __attribute__((noinline)) void quantize_some(const QuantGroup* to, int n) {
  if (n >= 3) {
    const QuantGroup four[4] = {to[0], to[1], to[2], to[n - 1]};
    return quantize_groups<kGroup, 4>(four);
  }
  n == 2 ? quantize_groups<kGroup, 2>(to) : quantize_groups<kGroup, 1>(to);
}

// Quantizes one group of n columns, for any n, and stores it as `padded` (a multiple of 32) codes.
// Computes two chains of maxima and two chains of sums, because a group can be a whole row,
// and a single chain would be limited by the latency of its operations.
CPUSERVE_INLINE void quantize_group(const QuantGroup& to, int n, int padded) {
  const float* x = to.x;
  I top = izero(), top2 = izero(), sum = izero(), sum2 = izero();
  int i = 0;
  for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
    top = imax(top, abs_bits(load(x + i)));
    top2 = imax(top2, abs_bits(load(x + i + kLanes)));
  }
  for (; i < n; i += kLanes) top = imax(top, abs_bits(load_n(x + i, n - i)));
  top = imax(top, top2);
  int32_t amax[4], total[4];
  reduce_max4(top, top, top, top, amax);
  const GroupScale scale = scale_of(amax[0]);
  const F s = set1(scale.inverse);
  const auto put = [&](int at, F v) {
    const I q = round_to_int(mul(v, s));
    store_bytes(to.q + at, q);
    return q;
  };
  for (i = 0; i + 2 * kLanes <= n; i += 2 * kLanes) {
    sum = iadd(sum, put(i, load(x + i)));
    sum2 = iadd(sum2, put(i + kLanes, load(x + i + kLanes)));
  }
  for (; i < n; i += kLanes) sum = iadd(sum, put(i, load_n(x + i, n - i)));
  if (i < padded) memset(to.q + i, 0, static_cast<size_t>(padded - i));
  sum = iadd(sum, sum2);
  reduce_add4(sum, sum, sum, sum, total);
  *to.scale = scale.scale;
  *to.sum = total[0];
}

// Quantizes columns [column0, column0 + n) of a row in groups of kGroup columns.
// Only the last group of the row may have fewer columns.
template <int kGroup>
CPUSERVE_INLINE void quantize_columns(uint8_t* row, int64_t padded, int64_t column0, const float* x,
                                      int n) {
  int i = 0;
  while (i + kGroup <= n) {
    QuantGroup some[kGroupsAtOnce];
    int count = 0;
    for (; count < kGroupsAtOnce && i + kGroup <= n; count++, i += kGroup) {
      some[count] = group_of(row, padded, kGroup, (column0 + i) / kGroup, x + i);
    }
    quantize_some<kGroup>(some, count);
  }
  if (i < n) {
    quantize_group(group_of(row, padded, kGroup, (column0 + i) / kGroup, x + i), n - i, kGroup);
  }
}

// Writes the quantization error of a group of n columns, x - scale * code, to `left`.
CPUSERVE_INLINE void rest_of(const QuantGroup& of, int n, float* left) {
  const F scale = set1(*of.scale);
  for (int i = 0; i < n; i += kLanes) {
    const F q = load_s8(reinterpret_cast<const uint8_t*>(of.q) + i);
    store(left + i, sub(load(of.x + i), mul(scale, q)));
  }
}

// Quantizes the 256 columns at x as group number `g` of a q8g256 row of `padded` columns.
static __attribute__((noinline)) void quantize_block(uint8_t* row, int64_t padded, int64_t g,
                                                     const float* x) {
  int32_t sum;
  const QuantGroup to = group_of(row, padded, 256, g, x);
  quantize_group({x, to.q, to.scale, &sum}, 256, 256);
  int32_t sums[16];
  sums_of_16(to.q, sums);
  int16_t narrow[24];
  for (int i = 0; i < 16; i++) narrow[i] = static_cast<int16_t>(sums[i]);
  for (int i = 0; i < 8; i++) narrow[16 + i] = static_cast<int16_t>(sums[2 * i] + sums[2 * i + 1]);
  memcpy(block_sums(row, padded, g), narrow, kBlockSums);
}

// Quantizes columns [column0, column0 + n) of a q8g256 or q8g256x2 row.
// column0 is a multiple of 256.
static __attribute__((noinline)) void quantize_blocks(const Rows& out, uint8_t* row,
                                                      int64_t column0, const float* x, int n) {
  const int64_t padded = padded_width(out.format, out.width);
  alignas(64) float tail[256];
  for (int64_t g = column0 / 256; n > 0; g++, x += 256, n -= 256) {
    if (n < 256) {
      memset(tail, 0, sizeof tail);
      memcpy(tail, x, static_cast<size_t>(n) * sizeof(float));
      x = tail;
    }
    quantize_block(row, padded, g, x);
    if (out.format == ActFormat::q8g256) continue;
    alignas(64) float left[256];
    const QuantGroup first = group_of(row, padded, 256, g, x);
    rest_of(first, 256, left);
    quantize_block(row + out.stride / 2, padded, g, left);
  }
}

// Quantizes columns of a q8g128 or q8row row. The epilogue of a tile never writes these formats, so
// this function is not inlined there: gcc would warn about groups larger than a tile.
static __attribute__((noinline)) void quantize_wide(const Rows& out, uint8_t* row, int64_t column0,
                                                    const float* x, int n) {
  const int64_t padded = padded_width(out.format, out.width);
  if (out.format == ActFormat::q8row) {
    quantize_group(group_of(row, padded, padded, 0, x), n, static_cast<int>(padded));
  } else {
    quantize_columns<128>(row, padded, column0, x, n);
  }
}

// Writes the second term of q8g32x2, the quantized rounding errors of the first term,
// for n (up to four) whole groups of 32. The second term is `half` bytes after the first term.
static __attribute__((noinline)) void quantize_rest(const QuantGroup* of, size_t half, int n) {
  alignas(64) float left[kGroupsAtOnce][32];
  QuantGroup to[kGroupsAtOnce];
  const auto second = [half](auto* first) {
    return reinterpret_cast<decltype(first)>(reinterpret_cast<uint8_t*>(first) + half);
  };
  for (int g = 0; g < n; g++) {
    rest_of(of[g], 32, left[g]);
    to[g] = {left[g], second(of[g].q), second(of[g].scale), second(of[g].sum)};
  }
  quantize_some<32>(to, n);
}

// Quantizes n (up to four) whole groups of 32 columns as q8g32 or q8g32x2.
CPUSERVE_INLINE void quantize_32s(const Rows& out, const QuantGroup* groups, int n) {
  quantize_some<32>(groups, n);
  if (out.format == ActFormat::q8g32x2) quantize_rest(groups, out.stride / 2, n);
}

// Quantizes columns [column0, column0 + n) of a q8g32 or q8g32x2 row.
// The last group is padded with zeros.
static __attribute__((noinline)) void quantize_row(const Rows& out, uint8_t* row, int64_t column0,
                                                   const float* x, int n) {
  const int64_t padded = round_up(out.width, 32);
  alignas(64) float tail[32] = {};
  for (int i = 0; i < n;) {
    QuantGroup some[kGroupsAtOnce];
    int count = 0;
    for (; count < kGroupsAtOnce && i < n; count++, i += 32) {
      const float* from = x + i;
      if (n - i < 32) {
        memcpy(tail, from, static_cast<size_t>(n - i) * sizeof(float));
        from = tail;
      }
      some[count] = group_of(row, padded, 32, (column0 + i) / 32, from);
    }
    quantize_32s(out, some, count);
  }
}

// Converts the fp32 values at x to columns [column0, column0 + n) of one output row. column0 is
// a multiple of 32 for q8g32, of 128 for q8g128, of 256 for q8g256; q8row takes a whole row.
// The call that ends at out.width also sets the padding columns to 0, because operations read them.
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
    case ActFormat::q8g32x2:
      quantize_row(out, to, column0, x, n);
      break;
    case ActFormat::q8g128:
    case ActFormat::q8row:
      quantize_wide(out, to, column0, x, n);
      break;
    case ActFormat::q8g256:
    case ActFormat::q8g256x2:
      quantize_blocks(out, to, column0, x, n);
      break;
  }
}

static inline void convert(const ConvertArgs& a) noexcept {
  for (int64_t r = a.m0; r < a.m1; r++) {
    store_row(a.out, r, 0, f32_row(a.x, r), static_cast<int>(a.out.width));
  }
}

}  // namespace CPUSERVE_NS
#endif
