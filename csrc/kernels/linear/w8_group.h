// w8_g32: 8-bit weights in groups of 32, like Q8_0 of GGUF.
// A unit of a panel is { fp16 scale[16]; u8 q[8][16][4] }, where q is the signed code + 128.
#pragma once
#include "kernels/linear/group.h"

namespace CPUSERVE_NS {
namespace {

struct W8Group : EightBits {
  static constexpr ActFormat kAct = ActFormat::q8g32;
  static constexpr int kGroup = 32, kUnit = kGroup;
  static constexpr int kMinBytes = 0, kZero = kDot8Zero;
  static constexpr int64_t kUnitBytes = kScaleBytes + 8 * 64;

  // Quantizes 32 floats by the rule of GGUF: d = largest magnitude / 127, q = round(x / d).
  static BlockQ8_0 quantize(const float* x) {
    float amax = 0;
    for (int i = 0; i < kGroup; i++) amax = fabsf(x[i]) > amax ? fabsf(x[i]) : amax;
    const float d = amax / 127.0f, inverse = amax > 0 ? 127.0f / amax : 0.0f;
    BlockQ8_0 b;
    b.d = float_to_half(d);
    for (int i = 0; i < kGroup; i++) {
      const float q = rintf(x[i] * inverse);
      b.q[i] = static_cast<int8_t>(q < 127.0f ? q > -127.0f ? static_cast<int>(q) : -127 : 127);
    }
    return b;
  }
  static BlockQ8_0 block(const PackArgs& a, int64_t g, int row) {
    if (!a.rows[row]) return BlockQ8_0{};
    if (a.source == SourceType::gguf_q8_0) {
      return static_cast<const BlockQ8_0*>(a.rows[row])[g];
    }
    float x[kGroup];
    read_group(a.rows[row], a.source, g * kGroup, a.k, x);
    return quantize(x);
  }
  static void pack_column(const PackArgs& a, int64_t g, int column, uint8_t* to) {
    const BlockQ8_0 b = block(a, g, column);
    memcpy(to + column * 2, &b.d, 2);
    for (int quad = 0; quad < 8; quad++) {
      const uint32_t q = read_as<uint32_t>(b.q + quad * 4) ^ 0x80808080u;
      memcpy(to + kScaleBytes + (quad * kPanel + column) * 4, &q, 4);
    }
  }
  static void read_column(const uint8_t* group, int column, float* out) {
    const float d = half_to_float(read_as<uint16_t>(group + column * 2));
    for (int i = 0; i < kGroup; i++) {
      out[i] = d * static_cast<float>(code(group + kScaleBytes, column, i) - 128);
    }
  }
};

}  // namespace
}  // namespace CPUSERVE_NS
