// w4_g32 and w4m_g32: 4-bit weights in groups of 32, like Q4_0 and Q4_1 of GGUF.
// A unit of a panel is { fp16 scale[16]; fp16 min[16] (only w4m_g32); u8 q[4][16][4] }.
#pragma once
#include "kernels/linear/group.h"

namespace CPUSERVE_NS {
namespace {

template <bool kMin>
struct W4Group : FourBits {
  static constexpr ActFormat kAct = ActFormat::q8g32;
  static constexpr int kGroup = 32, kUnit = kGroup;
  static constexpr int kMinBytes = kMin ? kPanel * 2 : 0, kZero = kMin ? 0 : 8;
  static constexpr int64_t kUnitBytes = kScaleBytes + kMinBytes + 4 * 64;
  using Block = BlockQ4_1;  // for w4m_g32, and for w4_g32, which does not use the member m
  __attribute__((always_inline)) static inline F least(const uint8_t* header, int column, F) {
    return half_minima(header, column);
  }

  static uint8_t nibble(float x) {
    return static_cast<uint8_t>(x > 0.0f ? x < 15.0f ? static_cast<int>(x) : 15 : 0);
  }
  // Quantizes 32 floats by the rules of GGUF. Q4_0 (w4_g32): d is chosen so that the value of the
  // largest magnitude is -8 d. Q4_1 (w4m_g32): the range [min, max] is divided into 15 steps.
  static Block quantize(const float* x) {
    float low = x[0], high = x[0], largest = 0;
    for (int i = 0; i < kGroup; i++) {
      low = x[i] < low ? x[i] : low;
      high = x[i] > high ? x[i] : high;
      largest = fabsf(x[i]) > fabsf(largest) ? x[i] : largest;
    }
    const float d = kMin ? (high - low) / 15.0f : largest / -8.0f;
    const float inverse = d != 0.0f ? 1.0f / d : 0.0f, shift = kMin ? 0.5f : 8.5f;
    Block b;
    b.d = float_to_half(d);
    b.m = kMin ? float_to_half(low) : uint16_t{0};
    for (int i = 0; i < 16; i++) {
      const float bias = kMin ? low : 0.0f;
      const int l = nibble((x[i] - bias) * inverse + shift);
      const int h = nibble((x[i + 16] - bias) * inverse + shift);
      b.q[i] = static_cast<uint8_t>(l | h << 4);
    }
    return b;
  }
  static Block block(const PackArgs& a, int64_t g, int row) {
    Block b;
    if (!a.rows[row]) {
      b.d = b.m = 0;
      memset(b.q, kMin ? 0 : 0x88, sizeof b.q);
    } else if (kMin && a.source == SourceType::gguf_q4_1) {
      b = static_cast<const BlockQ4_1*>(a.rows[row])[g];
    } else if (!kMin && a.source == SourceType::gguf_q4_0) {
      const BlockQ4_0& from = static_cast<const BlockQ4_0*>(a.rows[row])[g];
      b.d = from.d;
      b.m = 0;
      memcpy(b.q, from.q, sizeof b.q);
    } else {
      float x[kGroup];
      read_group(a.rows[row], a.source, g * kGroup, a.k, x);
      b = quantize(x);
    }
    return b;
  }
  // Packs one column of group g. A GGUF block has elements 0 to 15 in its low nibbles, 16 to 31 in
  // its high nibbles. Line r of a panel has quad 2 r in low and quad 2 r + 1 in high nibbles.
  static void pack_column(const PackArgs& a, int64_t g, int column, uint8_t* to) {
    const Block b = block(a, g, column);
    memcpy(to + column * 2, &b.d, 2);
    if (kMin) memcpy(to + kScaleBytes + column * 2, &b.m, 2);
    for (int r = 0; r < 4; r++) {
      const uint32_t even = read_as<uint32_t>(b.q + r % 2 * 8);
      const uint32_t odd = read_as<uint32_t>(b.q + r % 2 * 8 + 4);
      const int shift = r / 2 * 4;
      const uint32_t q = (even >> shift & 0x0f0f0f0fu) | (odd >> shift & 0x0f0f0f0fu) << 4;
      memcpy(to + kScaleBytes + kMinBytes + (r * kPanel + column) * 4, &q, 4);
    }
  }
  static void read_column(const uint8_t* group, int column, float* out) {
    const float d = half_to_float(read_as<uint16_t>(group + column * 2));
    const float m =
        kMin ? half_to_float(read_as<uint16_t>(group + kScaleBytes + column * 2)) : 0.0f;
    for (int i = 0; i < kGroup; i++) {
      const int q = code(group + kScaleBytes + kMinBytes, column, i);
      out[i] = kMin ? d * static_cast<float>(q) + m : d * static_cast<float>(q - 8);
    }
  }
};

}  // namespace
}  // namespace CPUSERVE_NS
