// w8z_g32, w8z_g128, w4z_g32 and w4z_g64: codes of 8 or 4 bits with a scale and an integer zero
// point for every 32, 64 or 128 elements of K, as GPTQ, AWQ and compressed-tensors store them.
// A unit of a panel is { fp16 scale[16]; s8 zero[16]; u8 q[..][16][4] }. 4 bits: scale (q - zero);
// 8 bits: scale (q - 128 - zero), so that zero points from 0 to 255 fit in a signed byte.
//
// Kernels replace a zero point by the minimum -zero * scale, which is exact in fp32
// (8 bits times the 11 bits of fp16). Rows of activations have a scale for every 32 elements
// of K in all of these kinds. With one scale for 128 elements, kinds with groups
// of 128 would be faster on AMX tiles, but lose the accuracy that users want from 8 bits.
#pragma once
#include "kernels/linear/group.h"

namespace CPUSERVE_NS {
namespace {

template <int kBits>
struct BitsOf;
template <>
struct BitsOf<8> : EightBits {
  static constexpr int kZero = kDot8Zero, kMiddle = 128;
};
template <>
struct BitsOf<4> : FourBits {
  static constexpr int kZero = 0, kMiddle = 0;
};

template <int kBits, int kWeights>
struct ZeroGroup : BitsOf<kBits> {
  using Block = ZeroBlock<kBits, kWeights>;
  using BitsOf<kBits>::kMiddle;
  static constexpr ActFormat kAct = ActFormat::q8g32;
  static constexpr int kGroup = 32, kUnit = kWeights, kMinBytes = kPanel;
  static constexpr int kHeader = kScaleBytes + kMinBytes;
  static constexpr int64_t kUnitBytes = kHeader + kUnit * kBits / 8 * kPanel;

  __attribute__((always_inline)) static inline F least(const uint8_t* header, int column, F scale) {
    return mul(sub(zero(), scale), load_s8(header + kScaleBytes + column));
  }

  static void pack_column(const PackArgs& a, int64_t unit, int column, uint8_t* to) {
    uint8_t block[Block::kBytes] = {};
    if (a.rows[column]) memcpy(block, Block::at(a.rows[column], unit), sizeof block);
    memcpy(to + column * 2, block, 2);
    to[kScaleBytes + column] = static_cast<uint8_t>(Block::zero(block) - kMiddle);
    uint8_t codes[kUnit];
    for (int i = 0; i < kUnit; i++) codes[i] = Block::code(block, i);
    for (int i = 0; i < kUnit; i += 32 / kBits) {
      uint32_t q = read_as<uint32_t>(codes + i);
      if (kBits == 4) q |= read_as<uint32_t>(codes + i + 4) << 4;
      memcpy(to + kHeader + (i / (32 / kBits) * kPanel + column) * 4, &q, 4);
    }
  }
  static void read_column(const uint8_t* unit, int column, float* out) {
    const float d = half_to_float(read_as<uint16_t>(unit + column * 2));
    const int zero = static_cast<int8_t>(unit[kScaleBytes + column]) + kMiddle;
    for (int i = 0; i < kUnit; i++) {
      out[i] = d * static_cast<float>(BitsOf<kBits>::code(unit + kHeader, column, i) - zero);
    }
  }
};

}  // namespace
}  // namespace CPUSERVE_NS
