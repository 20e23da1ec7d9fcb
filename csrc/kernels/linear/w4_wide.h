// w4m_g128: 4-bit weights with a scale and a minimum for every 128 elements of K.
// A unit of a panel is { fp16 scale[16]; fp16 min[16]; u8 q[16][16][4] }.
#pragma once
#include "kernels/linear/group.h"

namespace CPUSERVE_NS {
namespace {

struct W4Wide : FourBits {
  static constexpr ActFormat kAct = ActFormat::q8g128;
  static constexpr int kGroup = kWideGroup, kUnit = kGroup;
  static constexpr int kMinBytes = kPanel * 2, kZero = 0;
  static constexpr int64_t kUnitBytes = kScaleBytes + kMinBytes + kGroup / 8 * 64;
  __attribute__((always_inline)) static inline F least(const uint8_t* header, int column, F) {
    return half_minima(header, column);
  }

  struct Column {
    uint16_t d, m;
    uint8_t q[kGroup];
  };

  // Quantizes x with the scale d and the minimum m, writes the codes to q,
  // and returns the sum of the squared errors of the first n elements.
  static float codes(const float* x, int n, float d, float m, uint8_t* q) {
    const F inverse = set1(d > 0.0f ? 1.0f / d : 0.0f), low = set1(m), step = set1(d);
    F error = zero();
    for (int i = 0; i < kGroup; i += kLanes) {
      const F v = load(x + i);
      const F l = min(max(round(mul(sub(v, low), inverse)), zero()), set1(15.0f));
      const F e = keep(sub(v, fma(l, step, low)), 0, n - i, zero());
      error = fma(e, e, error);
      store_s8(reinterpret_cast<int8_t*>(q) + i, l);
    }
    return reduce_add(error);
  }
  // Divides the range [min, max] of x into 15 steps. Also tries ranges that are reduced on both
  // sides, to 80 % at least, and takes the range with the smallest squared error:
  // in a reduced range, outliers lose precision, and the other values get finer steps.
  static Column quantize(const float* x, int n) {
    F low = load(x), high = low;
    for (int i = kLanes; i < kGroup; i += kLanes) {
      low = min(low, load(x + i));
      high = max(high, load(x + i));
    }
    const float least = -reduce_max(sub(zero(), low)), most = reduce_max(high);
    Column best{}, next{};
    float lowest = 0.0f;
    for (int i = 0; i <= kCuts; i++) {
      const float cut = (most - least) * (0.5f * kCutStep * static_cast<float>(i));
      next.d = float_to_half((most - least - 2.0f * cut) / 15.0f);
      next.m = float_to_half(least + cut);
      const float error = codes(x, n, half_to_float(next.d), half_to_float(next.m), next.q);
      if (i == 0 || error < lowest) {
        best = next;
        lowest = error;
      }
    }
    return best;
  }
  static constexpr int kCuts = 4;
  static constexpr float kCutStep = 0.05f;

  static Column column(const PackArgs& a, int64_t g, int row) {
    Column c{};
    if (!a.rows[row]) return c;
    if (a.source == SourceType::u4m_g128) {
      const BlockU4& b = static_cast<const BlockU4*>(a.rows[row])[g];
      c.d = b.d;
      c.m = b.m;
      for (int i = 0; i < kGroup; i++) {
        c.q[i] = static_cast<uint8_t>(i % 2 ? b.q[i / 2] >> 4 : b.q[i / 2] & 15);
      }
      return c;
    }
    alignas(64) float x[kGroup];
    read_group(a.rows[row], a.source, g * kGroup, a.k, x, kGroup);
    const int64_t left = a.k - g * kGroup;
    const int n = static_cast<int>(left < kGroup ? left : kGroup);
    // Elements after the end of K repeat the last weight, so that they do not widen the range.
    for (int i = n; i < kGroup; i++) x[i] = x[n - 1];
    return quantize(x, n);
  }
  static void pack_column(const PackArgs& a, int64_t g, int column_, uint8_t* to) {
    const Column c = column(a, g, column_);
    memcpy(to + column_ * 2, &c.d, 2);
    memcpy(to + kScaleBytes + column_ * 2, &c.m, 2);
    for (int r = 0; r < kGroup / 8; r++) {
      const uint32_t q = read_as<uint32_t>(c.q + 8 * r) | read_as<uint32_t>(c.q + 8 * r + 4) << 4;
      memcpy(to + kScaleBytes + kMinBytes + (r * kPanel + column_) * 4, &q, 4);
    }
  }
  static void read_column(const uint8_t* group, int column, float* out) {
    const float d = half_to_float(read_as<uint16_t>(group + column * 2));
    const float m = half_to_float(read_as<uint16_t>(group + kScaleBytes + column * 2));
    for (int i = 0; i < kGroup; i++) {
      out[i] = d * static_cast<float>(code(group + kScaleBytes + kMinBytes, column, i)) + m;
    }
  }
};

}  // namespace
}  // namespace CPUSERVE_NS
