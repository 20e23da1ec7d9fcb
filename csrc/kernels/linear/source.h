// Reads a row of a checkpoint, in any SourceType, as fp32 or as the codes of a weight kind.
#pragma once
#include "kernels/linear/gguf_blocks.h"
#include "kernels/table.h"
#include "kernels/vec/vec.h"

namespace CPUSERVE_NS {
namespace {

constexpr int kGroup = 32;  // weights of a block of Q8_0, Q4_0 and Q4_1; elements of a q8g32 group
constexpr int kChunk64 =
    64;  // elements of a row that packing converts at a time; for 16 rows, they take 4 KB in fp32

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
struct BlockE4m3 {
  float scale;
  uint8_t q[kF8Group];
};
struct Block4 {  // nf4_g64, fp4_g64
  uint16_t d;
  uint8_t q[32];
};
struct BlockNvfp4 {
  uint8_t scale;
  uint8_t q[8];
};
static_assert(sizeof(BlockE4m3) == 132 && sizeof(Block4) == 34 && sizeof(BlockNvfp4) == 9,
              "blocks have no padding");
static_assert(sizeof(BlockU4) == 68, "u4m_g128 blocks have no padding");
static_assert(sizeof(BlockQ8_0) == 34 && sizeof(BlockQ4_0) == 18 && sizeof(BlockQ4_1) == 20,
              "GGUF blocks have no padding");

// The tables of values for 4-bit codes: kValues in fp32, and kEntries in bf16 for kernels, where
// value = kUnit * entry. kUnit is chosen so that the entries are exact in bf16 (FP4), or so that
// their rounding error is smallest: 0.06 % of the rms of NF4, instead of 0.11 % without kUnit.
struct Nf4Table {  // source: QLoRA, appendix E
  static constexpr float kValues[16] = {-1.0f,
                                        -0.6961928009986877f,
                                        -0.5250730514526367f,
                                        -0.39491748809814453f,
                                        -0.28444138169288635f,
                                        -0.18477343022823334f,
                                        -0.09105003625154495f,
                                        0.0f,
                                        0.07958029955625534f,
                                        0.16093020141124725f,
                                        0.24611230194568634f,
                                        0.33791524171829224f,
                                        0.44070982933044434f,
                                        0.5626170039176941f,
                                        0.7229568362236023f,
                                        1.0f};
  static constexpr uint16_t kEntries[16] = {0xbfb8, 0xbf80, 0xbf41, 0xbf11, 0xbed1, 0xbe88,
                                            0xbe06, 0,      0x3dea, 0x3e6d, 0x3eb5, 0x3ef9,
                                            0x3f22, 0x3f4f, 0x3f85, 0x3fb8};
  static constexpr float kUnit = 0.69589135f;
};
struct Fp4Table {  // bitsandbytes: 1 bit of sign, 2 bits of exponent, 1 bit of fraction
  static constexpr float kValues[16] = {
      0.0f,  0.0625f / 12,  8.0f / 12,  1.0f,  4.0f / 12,  0.5f,  2.0f / 12,  0.25f,
      -0.0f, -0.0625f / 12, -8.0f / 12, -1.0f, -4.0f / 12, -0.5f, -2.0f / 12, -0.25f};
  static constexpr uint16_t kEntries[16] = {0,      0x3d80, 0x4100, 0x4140, 0x4080, 0x40c0,
                                            0x4000, 0x4040, 0x8000, 0xbd80, 0xc100, 0xc140,
                                            0xc080, 0xc0c0, 0xc000, 0xc040};
  static constexpr float kUnit = 1.0f / 12;
};
constexpr uint16_t kE2m1Entries[16] = {0,      0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040,
                                       0x4080, 0x40c0, 0x8000, 0xbf00, 0xbf80, 0xbfc0,
                                       0xc000, 0xc040, 0xc080, 0xc0c0};

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

// Reads elements [k0, k0 + n) of an s8_channel row, { fp32 scale; s8 q[k] }, as fp32.
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

inline int nibble_of(const uint8_t* q, int64_t i) { return i % 2 ? q[i / 2] >> 4 : q[i / 2] & 15; }

// A block of source types with zero points: { fp16 scale; u8 zero; u8 q[kWeights * kBits / 8] }
template <int kBits, int kWeights>
struct ZeroBlock {
  static constexpr int kBytes = 3 + kWeights * kBits / 8;
  static const uint8_t* at(const void* row, int64_t i) {
    return static_cast<const uint8_t*>(row) + i * kBytes;
  }
  static int zero(const uint8_t* block) { return block[2]; }
  static uint8_t code(const uint8_t* block, int64_t i) {
    const int64_t bit = i * kBits;
    const uint8_t* q = block + 3 + bit / 8;
    int code = *q >> bit % 8;
    if (bit % 8 + kBits > 8) code |= q[1] << (8 - bit % 8);
    return static_cast<uint8_t>(code & ((1 << kBits) - 1));
  }
  static void read(const void* row, int64_t k0, int n, float* out) {
    for (int64_t i = k0; i < k0 + n; i++) {
      const uint8_t* block = at(row, i / kWeights);
      const int q = code(block, i % kWeights) - zero(block);
      out[i - k0] = half_to_float(read_as<uint16_t>(block)) * static_cast<float>(q);
    }
  }
};

// The source types with zero points that are packed into planes of bits (linear/plane_layout.h).
template <int kBits, int kWeights>
struct ZeroBits {
  using Source = ZeroBlock<kBits, kWeights>;
  static constexpr int kUnit = kWeights, kBytes = Source::kBytes, kSub = kWeights, kZero = 0;
  static constexpr int kLow = 2, kHigh = kBits - 2;
  static constexpr Factors kFactors = Factors::zero_points;
  static constexpr bool kMin = true, kTable = false;
  static void take(const uint8_t* b, BlockCodes& c) {
    c.d = half_at(b);
    c.m = static_cast<uint16_t>(Source::zero(b));
    const uint8_t* from = b + 3;
    for (int i = 0; i < kWeights; i += 8, from += kBits) {  // eight codes are kBits bytes
      uint32_t bits = from[0];
      for (int j = 1; j < kBits; j++) bits |= static_cast<uint32_t>(from[j]) << 8 * j;
      const uint32_t words[2] = {spread_codes<kBits>(bits), spread_codes<kBits>(bits >> 4 * kBits)};
      memcpy(c.q + i, words, sizeof words);
    }
  }
};

inline float e4m3_to_float(uint8_t code) {
  uint8_t codes[kLanes] = {code};
  float out[kLanes];
  store(out, load_e4m3(codes));
  return 256 * out[0];
}
inline void read_e4m3(const BlockE4m3* blocks, int64_t k0, int n, float* out) {
  for (int i = 0; i < n; i++) {
    const BlockE4m3& b = blocks[(k0 + i) / kF8Group];
    out[i] = b.scale * e4m3_to_float(b.q[(k0 + i) % kF8Group]);
  }
}
template <class Table>
inline void read_table(const Block4* blocks, int64_t k0, int n, float* out) {
  for (int i = 0; i < n; i++) {
    const Block4& b = blocks[(k0 + i) / 64];
    out[i] = half_to_float(b.d) * Table::kValues[nibble_of(b.q, (k0 + i) % 64)];
  }
}
inline void read_nvfp4(const uint8_t* row, int64_t k0, int n, float* out) {
  const float scale = read_as<float>(row);
  for (int i = 0; i < n; i++) {
    const BlockNvfp4& b = reinterpret_cast<const BlockNvfp4*>(row + 4)[(k0 + i) / 16];
    float value;
    read_bf16(kE2m1Entries + nibble_of(b.q, (k0 + i) % 16), 1, &value);
    out[i] = scale * (e4m3_to_float(b.scale) * value);
  }
}

// Reads elements [k0, k0 + n) of a source row as fp32, for source types that several weight kinds
// may be packed from (CPUSERVE_SHARED_SOURCES). read_floats does the same for all source types.
inline void read_shared(const void* row, SourceType type, int64_t k0, int n, float* out) {
  const auto blocks = [&](auto* of_row, auto read) {
    for (int i = 0; i < n; i += 32) read(of_row[(k0 + i) / 32], out + i);
  };
  switch (type) {
    case SourceType::f32:
      memcpy(out, static_cast<const float*>(row) + k0, sizeof(float) * static_cast<size_t>(n));
      return;
    case SourceType::f16:
      return read_f16(static_cast<const uint16_t*>(row) + k0, n, out);
    case SourceType::bf16:
      return read_bf16(static_cast<const uint16_t*>(row) + k0, n, out);
    case SourceType::gguf_q8_0:
      return blocks(static_cast<const BlockQ8_0*>(row), read_q8_0);
    case SourceType::gguf_q4_0:
      return blocks(static_cast<const BlockQ4_0*>(row), read_q4_0);
    case SourceType::gguf_q4_1:
      return blocks(static_cast<const BlockQ4_1*>(row), read_q4_1);
    case SourceType::s8_channel:
      return read_s8_channel(row, k0, n, out);
    case SourceType::u4m_g128:
      return read_u4m(static_cast<const BlockU4*>(row), k0, n, out);
    default:
      return;  // read_floats does not call this function for source types of a single weight kind
  }
}

// Reads elements [k0, k0 + n) of a row as fp32; k0 and, for GGUF types, n are multiples of 32.
// Writes zeros if `row` is null. Defined in linear/kinds.h, because it needs all weight kinds.
inline void read_floats(const void* row, SourceType type, int64_t k0, int n, float* out);

// Reads elements [k0, k0 + group) of a row with k elements as fp32. Elements from k on are zeros.
inline void read_group(const void* row, SourceType type, int64_t k0, int64_t k, float* out,
                       int group = kGroup) {
  const int n = static_cast<int>(k - k0 < group ? k - k0 : group);
  read_floats(row, type, k0, n, out);
  for (int i = n; i < group; i++) out[i] = 0.0f;
}

}  // namespace
}  // namespace CPUSERVE_NS
