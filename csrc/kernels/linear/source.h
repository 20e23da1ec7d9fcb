// Reads a row of a checkpoint, in any SourceType, as fp32 or as the elements of a packed kind.
#pragma once
#include "kernels/linear/gguf_blocks.h"
#include "kernels/table.h"
#include "kernels/vec/vec.h"

namespace CPUSERVE_NS {
namespace {

constexpr int kGroup = 32;  // weights of one GGUF block and of one q8g32 group
constexpr int kChunk64 =
    64;  // elements converted at a time while packing: 16 rows of them are 4 KB

inline float half_to_float(uint16_t h) {
  uint16_t lanes[kLanes] = {h};
  float out[kLanes];
  store(out, load_f16(lanes));
  return out[0];
}
inline uint16_t float_to_half(float x) {
  uint16_t out[kLanes];
  store_f16(out, set1(x));
  return out[0];
}

template <class T>
inline T read_as(const void* p) {
  T x;
  memcpy(&x, p, sizeof x);
  return x;
}

struct BlockQ8_0 {
  uint16_t d;
  int8_t q[32];
};
struct BlockQ4_0 {
  uint16_t d;
  uint8_t q[16];
};
struct BlockQ4_1 {
  uint16_t d, m;
  uint8_t q[16];
};
constexpr int kWideGroup = 128;  // weights of one u4m_g128 block
struct BlockU4 {
  uint16_t d, m;
  uint8_t q[kWideGroup / 2];
};
static_assert(sizeof(BlockU4) == 68, "u4m_g128 blocks have no padding");
static_assert(sizeof(BlockQ8_0) == 34 && sizeof(BlockQ4_0) == 18 && sizeof(BlockQ4_1) == 20,
              "GGUF blocks have no padding");

inline void read_f16(const uint16_t* from, int n, float* out) {
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) store(out + i, load_f16(from + i));
  for (; i < n; i++) out[i] = half_to_float(from[i]);
}
inline void read_bf16(const uint16_t* from, int n, float* out) {
  for (int i = 0; i < n; i++) {
    const uint32_t bits = static_cast<uint32_t>(from[i]) << 16;
    memcpy(out + i, &bits, 4);
  }
}
inline void read_q8_0(const BlockQ8_0& b, float* out) {
  const float d = half_to_float(b.d);
  for (int i = 0; i < 32; i++) out[i] = d * static_cast<float>(b.q[i]);
}
inline void read_q4_0(const BlockQ4_0& b, float* out) {
  const float d = half_to_float(b.d);
  for (int i = 0; i < 16; i++) {
    out[i] = d * static_cast<float>((b.q[i] & 15) - 8);
    out[i + 16] = d * static_cast<float>((b.q[i] >> 4) - 8);
  }
}
inline void read_q4_1(const BlockQ4_1& b, float* out) {
  const float d = half_to_float(b.d), m = half_to_float(b.m);
  for (int i = 0; i < 16; i++) {
    out[i] = d * static_cast<float>(b.q[i] & 15) + m;
    out[i + 16] = d * static_cast<float>(b.q[i] >> 4) + m;
  }
}

// { fp32 scale; s8 q[k] }
inline void read_s8_channel(const void* row, int64_t k0, int n, float* out) {
  const float scale = read_as<float>(row);
  const int8_t* q = static_cast<const int8_t*>(row) + 4 + k0;
  for (int i = 0; i < n; i++) out[i] = scale * static_cast<float>(q[i]);
}
inline void read_u4m(const BlockU4* blocks, int64_t k0, int n, float* out) {
  for (int i = 0; i < n; i++) {
    const BlockU4& b = blocks[(k0 + i) / kWideGroup];
    const int64_t at = (k0 + i) % kWideGroup;
    const int q = at % 2 ? b.q[at / 2] >> 4 : b.q[at / 2] & 15;
    out[i] = half_to_float(b.d) * static_cast<float>(q) + half_to_float(b.m);
  }
}

// Elements [k0, k0 + n) of a row as fp32; k0 and, for GGUF sources, n are multiples of 32.
inline void read_floats(const void* row, SourceType type, int64_t k0, int n, float* out) {
  if (!row) {
    memset(out, 0, static_cast<size_t>(n) * sizeof(float));
    return;
  }
  switch (type) {
    case SourceType::f32:
      memcpy(out, static_cast<const float*>(row) + k0, sizeof(float) * static_cast<size_t>(n));
      return;
    case SourceType::f16:
      return read_f16(static_cast<const uint16_t*>(row) + k0, n, out);
    case SourceType::bf16:
      return read_bf16(static_cast<const uint16_t*>(row) + k0, n, out);
    case SourceType::gguf_q8_0:
      for (int i = 0; i < n; i += 32)
        read_q8_0(static_cast<const BlockQ8_0*>(row)[(k0 + i) / 32], out + i);
      return;
    case SourceType::gguf_q4_0:
      for (int i = 0; i < n; i += 32)
        read_q4_0(static_cast<const BlockQ4_0*>(row)[(k0 + i) / 32], out + i);
      return;
    case SourceType::gguf_q4_1:
      for (int i = 0; i < n; i += 32)
        read_q4_1(static_cast<const BlockQ4_1*>(row)[(k0 + i) / 32], out + i);
      return;
    case SourceType::s8_channel:
      return read_s8_channel(row, k0, n, out);
    case SourceType::u4m_g128:
      return read_u4m(static_cast<const BlockU4*>(row), k0, n, out);
    case SourceType::gguf_q4_k:
      return read_blocks<GgufQ4K>(row, k0, n, out);
    case SourceType::gguf_q5_k:
      return read_blocks<GgufQ5K>(row, k0, n, out);
    case SourceType::gguf_q6_k:
      return read_blocks<GgufQ6K>(row, k0, n, out);
    case SourceType::gguf_q2_k:
      return read_blocks<GgufQ2K>(row, k0, n, out);
    case SourceType::gguf_q3_k:
      return read_blocks<GgufQ3K>(row, k0, n, out);
    case SourceType::gguf_q5_0:
      return read_blocks<GgufQ5<false>>(row, k0, n, out);
    case SourceType::gguf_q5_1:
      return read_blocks<GgufQ5<true>>(row, k0, n, out);
    case SourceType::gguf_iq4_nl:
      return read_blocks<GgufIq4Nl>(row, k0, n, out);
    case SourceType::gguf_iq4_xs:
      return read_blocks<GgufIq4Xs>(row, k0, n, out);
    case SourceType::gguf_mxfp4:
      return read_blocks<GgufMxfp4>(row, k0, n, out);
  }
}

// The same for a group that may extend beyond k: elements beyond k are zeros.
inline void read_group(const void* row, SourceType type, int64_t k0, int64_t k, float* out,
                       int group = kGroup) {
  const int n = static_cast<int>(k - k0 < group ? k - k0 : group);
  read_floats(row, type, k0, n, out);
  for (int i = n; i < group; i++) out[i] = 0.0f;
}

}  // namespace
}  // namespace CPUSERVE_NS
