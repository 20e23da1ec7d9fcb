// The kinds of packed weights, and the types of the source rows that they are packed from.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include "kernels/table/rows.h"

namespace cpuserve {

// The kinds of packed weights of linears. A weight matrix W[n, k]
// (a row of W is an output column, as in checkpoints) is packed into panels of 16 output columns.
// All K elements of a panel are contiguous. K is padded with zeros to whole pairs or groups.
// `act` is the format of the activation rows, s a scale, q a code and w the value of a weight.
//   dense_bf16  [n/16][k/2][16][2]   bf16            act bf16   (k padded to 2)
//   dense_f16   [n/16][k][16]        fp16            act f32
//   dense_f32   [n/16][k][16]        fp32            act f32
//   w8_g32      [n/16][k/32] of { fp16 scale[16]; u8 q[8][16][4] }   act q8g32; w = s * (q - 128)
//   w4_g32      [n/16][k/32] of { fp16 scale[16]; u8 q[4][16][4] }   act q8g32; w = s * (q - 8)
//   w4m_g32     [n/16][k/32] of { fp16 scale[16]; fp16 min[16]; u8 q[4][16][4] }  w = s * q + min
//   w4m_g128    [n/16][k/128] of { fp16 scale[16]; fp16 min[16]; u8 q[16][16][4] }   act q8g128
//   w8_channel  [n/16] of { u8 q[k/4][16][4]; fp32 scale[16] }     act q8row; w = s * (q - 128)
//   w8_channel_g128   the same bytes as w8_channel                 act q8g128
//   q4_k q5_k q6_k q2_k q3_k iq4_xs iq3_s iq3_xxs iq2_s iq2_xs iq2_xxs iq1_m iq1_s
//                                     [n/16][k/256]                  act q8g256
//   q5_0 q5_1 iq4_nl mxfp4            [n/16][k/32]                   act q8g32
//     GGUF types: scales and minima, then planes of bits of the codes (linear/plane_layout.h).
//     The layout is the same at every ISA level. w = s * (value - zero) + min. In types with blocks
//     of 256 weights, each 32 or 16 weights have s = d * scale and min = -(m * least).
//   tq2_0 q2_0 pq2_0 q1_0   [n/16][k/256, 64, 128 or 128] of { fp16 scale[16]; planes of 2 bits or
//     of 1 bit (linear/ternary.h) }                                act q8g256; w = s * (code - 1)
//   e4m3_g128   [n/16][k/128] of { fp32 scale[16]; u8 q[64][16][2] }       act bf16
//   nf4_g64 fp4_g64   [n/16][k/64] of { fp16 scale[16]; u8 q[32][16] }     act bf16
//   nvfp4       [n/16][k/256] of { fp32 scale[16]; [16] of { E4M3 s[16]; u8 q[8][16] } }   act bf16
//     float codes: w = scale * value, and for nvfp4 w = scale * (s * value). The last block of a
//     row ends at K and may be shorter. The low nibble of a byte is the code of element k,
//     the high nibble the code of element k + 1 (kernels/linear/coded.h).
//   w8z_g32 w8z_g128   [n/16][k/32 or 128] of { fp16 scale[16]; s8 zero[16]; u8 q[..][16][4] }
//   w4z_g32 w4z_g64    [n/16][k/32 or 64] of the same struct with 4-bit q   act q8g32
//     integer zero points: w = s * (q - 128 - zero) for 8 bits, and s * (q - zero) for 4 bits.
//     Activations are quantized in groups of 32, even if the groups of weights are larger.
//   w2z_g32 w2z_g64 w2z_g128 w2z_g256   [n/16][k/32, 64, 128 or 256]  act q8g32
//   w3z_g32 w3z_g64 w3z_g128 w3z_g256   of { fp16 scale[16]; zero points of 4 bits; planes }
//     w = s * (q - zero), with codes in planes of bits as in the GGUF types.
// In the 4-bit kinds w4_*, w4m_* and w4z_*, byte q[r][c][j] has two codes of column c:
// the code of k = 8 r + j in its low nibble, and the code of k = 8 r + 4 + j in its high nibble.
// w8_g32, w4_g32 and w4m_g32 take as many bytes as in a GGUF file: 34, 18 and 20 for 32 weights.
// In the layouts above, 4 bytes of a column are adjacent. ISA levels with matrix products of Arm
// have 8 adjacent bytes of a column (LinearKernel::column_bytes), and signed 8-bit codes:
//   dense_bf16  [n/16][k/4][16][4]   k padded to 4
//   w8_g32      { fp16 scale[16]; s8 q[4][16][8] }       w8_channel { s8 q[k/8][16][8]; ... }
//   4 bits      q[r][c][j]: k = 16 r + j in the low nibble, k = 16 r + 8 + j in the high nibble
//
// The dot product f of a row x of activations and a column of quantized weights adds one group
// after another, in ascending order of K. q_w and s_w are codes and scales of weights, q_x and s_x
// of x, sum_x is the sum of q_x over the group, and code0 is the code of weight 0 (8 in w4_g32).
//   each group:            f = fma(float(sum_k q_w q_x - code0 * sum_x), s_w * s_x, f)
//   kinds with a minimum:  after that step, f = fma(min, s_x * float(sum_x), f)
//   kinds with zero points do both steps, with min = -zero * s_w
//   blocks of 256 weights have s_w = d * scale and min = -(m * least), and add a whole block:
//         sum = sum over its groups of scale * sum_k (q_w - code0) q_x    (an exact integer)
//         low = sum over its groups of least * sum_x    (only in types with minima)
//         f = fma(fnma(m, float(low), float(sum) * d), s_x, f)
//   ternary kinds add groups of 64 or 128 weights, with code0 = 1 and the s_x of 256 elements
//   float codes:      f = fma(sum, s_w, f), where sum is the sum of a group as in dense_bf16
//   w8_channel:       f = float(sum_k q_w q_x - 128 sum_x) * (s_w * s_x), sums over the whole row
//   w8_channel_g128:  f = fma(float(sum_k q_w q_x - 128 sum_x), s_x, f) per group, then f * s_w
//
// The list of the weight kinds, with one line for each kind.
// The enums, block shapes and kernels are generated from this list.
//   X(name, family)     a kind that can be packed from several types of source rows
//   OWN(name, source, weights, bytes, family)
//     a kind that is packed from one source type only and keeps its codes. A source row
//     consists of whole blocks of `weights` weights in `bytes` bytes.
//     No other weight kind is packed from `source`.
// family: the class with the kernels of the kind, which only ISA units include (linear/kinds.h).
// clang-format off: so that a new line does not move the columns of the other lines
#define CPUSERVE_WEIGHT_KINDS(X, OWN)                                          \
  X(dense_bf16, DenseFamily<Bf16Element>)                                      \
  X(dense_f16, DenseFamily<F16Element>)                                        \
  X(dense_f32, DenseFamily<F32Element>)                                        \
  X(w8_g32, GroupFamily<W8Group>)                                              \
  X(w4_g32, GroupFamily<W4Group<false>>)                                       \
  X(w4m_g32, GroupFamily<W4Group<true>>)                                       \
  X(w4m_g128, GroupFamily<W4Wide>)                                             \
  X(w8_channel, ChannelFamily<0>)                                              \
  X(w8_channel_g128, ChannelFamily<kWideGroup / 4>)                            \
  OWN(q4_k, gguf_q4_k, 256, 144, PlaneFamily<GgufQ4K>)                         \
  OWN(q5_k, gguf_q5_k, 256, 176, PlaneFamily<GgufQ5K>)                         \
  OWN(q6_k, gguf_q6_k, 256, 210, PlaneFamily<GgufQ6K>)                         \
  OWN(q2_k, gguf_q2_k, 256, 84, PlaneFamily<GgufQ2K>)                          \
  OWN(q3_k, gguf_q3_k, 256, 110, PlaneFamily<GgufQ3K>)                         \
  OWN(q5_0, gguf_q5_0, 32, 22, PlaneFamily<GgufQ5<false>>)                     \
  OWN(q5_1, gguf_q5_1, 32, 24, PlaneFamily<GgufQ5<true>>)                      \
  OWN(iq4_nl, gguf_iq4_nl, 32, 18, PlaneFamily<GgufIq4Nl>)                     \
  OWN(iq4_xs, gguf_iq4_xs, 256, 136, PlaneFamily<GgufIq4Xs>)                   \
  OWN(iq3_s, gguf_iq3_s, 256, 110, PlaneFamily<GgufIq3S>)                      \
  OWN(iq3_xxs, gguf_iq3_xxs, 256, 98, PlaneFamily<GgufIq3Xxs>)                 \
  OWN(iq2_s, gguf_iq2_s, 256, 82, PlaneFamily<GgufIq2S>)                       \
  OWN(iq2_xs, gguf_iq2_xs, 256, 74, PlaneFamily<GgufIq2Xs>)                    \
  OWN(iq2_xxs, gguf_iq2_xxs, 256, 66, PlaneFamily<GgufIq2Xxs>)                 \
  OWN(iq1_m, gguf_iq1_m, 256, 56, PlaneFamily<GgufIq1M>)                       \
  OWN(iq1_s, gguf_iq1_s, 256, 50, PlaneFamily<GgufIq1S>)                       \
  OWN(mxfp4, gguf_mxfp4, 32, 17, PlaneFamily<GgufMxfp4>)                       \
  OWN(tq2_0, gguf_tq2_0, 256, 66, TernaryFamily<GgufTq2_0>)                    \
  OWN(q2_0, gguf_q2_0, 64, 18, TernaryFamily<GgufQ2_0<64>>)                    \
  OWN(pq2_0, gguf_pq2_0, 128, 34, TernaryFamily<GgufQ2_0<128>>)                \
  OWN(q1_0, gguf_q1_0, 128, 18, TernaryFamily<GgufQ1_0>)                       \
  OWN(e4m3_g128, e4m3_g128, 32, 32, CodedFamily<F8Codes>)                      \
  OWN(nf4_g64, nf4_g64, 64, 34, CodedFamily<TableCodes64<Nf4Table>>)           \
  OWN(fp4_g64, fp4_g64, 64, 34, CodedFamily<TableCodes64<Fp4Table>>)           \
  OWN(nvfp4, nvfp4, 32, 18, CodedFamily<Nvfp4Codes>)                           \
  OWN(w8z_g32, u8z_g32, 32, 35, GroupFamily<ZeroGroup<8, 32>>)                 \
  OWN(w8z_g128, u8z_g128, 128, 131, GroupFamily<ZeroGroup<8, 128>>)            \
  OWN(w4z_g32, u4z_g32, 32, 19, GroupFamily<ZeroGroup<4, 32>>)                 \
  OWN(w4z_g64, u4z_g64, 64, 35, GroupFamily<ZeroGroup<4, 64>>)                 \
  OWN(w2z_g32, u2z_g32, 32, 11, PlaneFamily<ZeroBits<2, 32>>)                  \
  OWN(w2z_g64, u2z_g64, 64, 19, PlaneFamily<ZeroBits<2, 64>>)                  \
  OWN(w2z_g128, u2z_g128, 128, 35, PlaneFamily<ZeroBits<2, 128>>)              \
  OWN(w2z_g256, u2z_g256, 256, 67, PlaneFamily<ZeroBits<2, 256>>)              \
  OWN(w3z_g32, u3z_g32, 32, 15, PlaneFamily<ZeroBits<3, 32>>)                  \
  OWN(w3z_g64, u3z_g64, 64, 27, PlaneFamily<ZeroBits<3, 64>>)                  \
  OWN(w3z_g128, u3z_g128, 128, 51, PlaneFamily<ZeroBits<3, 128>>)              \
  OWN(w3z_g256, u3z_g256, 256, 99, PlaneFamily<ZeroBits<3, 256>>)
// clang-format on

// The types of source rows for pack(). Weight kinds with the name of a GGUF type
// are packed only from the blocks of that type. The other source types, with codes q:
//   s8_channel  { fp32 scale; s8 q[k] }                    w = scale * q
//   u4m_g128    k/128 of { fp16 scale; fp16 min; u8 q[64] }  w = scale * q + min; element 2 i is
//               the low and element 2 i + 1 the high nibble of byte i
// Float codes, packed only to the kind of the same name (nibbles as in u4m_g128):
//   e4m3_g128   k/128 of { fp32 scale; u8 q[128] }; the last block may have 32, 64 or 96 codes
//   nf4_g64 fp4_g64   k/64 of { fp16 scale; u8 q[32] }
//   nvfp4       { fp32 scale; k/16 of { E4M3 s; u8 q[8] } }; k is a multiple of 32
// Integer zero points, w = scale * (q - zero), packed only to kinds with the same bits and groups.
// Codes are a stream of bits, the lowest bit first, so 4-bit codes are as in u4m_g128:
//   u8z_g32 u8z_g128 u4z_g32 u4z_g64   k/32, 64 or 128 of { fp16 scale; u8 zero; u8 q[] }
//   u2z_g32 to u2z_g256, u3z_g32 to u3z_g256   k/32, 64, 128 or 256 of the same struct
//
// X(name, weights of a block, bytes of a block): source types that several kinds are packed from.
// A row of s8_channel or nvfp4 begins with a scale of 4 bytes, which no block contains.
// Each 128 weights of e4m3_g128 (4 blocks) begin with such a scale.
#define CPUSERVE_SHARED_SOURCES(X) \
  X(f32, 1, 4)                     \
  X(f16, 1, 2)                     \
  X(bf16, 1, 2)                    \
  X(gguf_q8_0, 32, 34)             \
  X(gguf_q4_0, 32, 18)             \
  X(gguf_q4_1, 32, 20)             \
  X(s8_channel, 1, 1)              \
  X(u4m_g128, 128, 68)

#define CPUSERVE_KIND(name, ...) name,
#define CPUSERVE_SOURCE(name, weights, bytes) name,
#define CPUSERVE_OWN_SOURCE(name, source, ...) source,
#define CPUSERVE_NOTHING(...)
enum class WeightKind : int32_t { CPUSERVE_WEIGHT_KINDS(CPUSERVE_KIND, CPUSERVE_KIND) count };
enum class SourceType : int32_t {
  CPUSERVE_SHARED_SOURCES(CPUSERVE_SOURCE)
      CPUSERVE_WEIGHT_KINDS(CPUSERVE_NOTHING, CPUSERVE_OWN_SOURCE)
};
#undef CPUSERVE_KIND
#undef CPUSERVE_SOURCE
#undef CPUSERVE_OWN_SOURCE

struct BlockShape {
  int64_t weights;
  size_t bytes;
};
inline BlockShape block_shape(SourceType type) {
  switch (type) {
#define CPUSERVE_SHAPE(source, weights, bytes) \
  case SourceType::source:                     \
    return {weights, bytes};
#define CPUSERVE_OWN_SHAPE(name, source, weights, bytes, ...) CPUSERVE_SHAPE(source, weights, bytes)
    CPUSERVE_SHARED_SOURCES(CPUSERVE_SHAPE)
    CPUSERVE_WEIGHT_KINDS(CPUSERVE_NOTHING, CPUSERVE_OWN_SHAPE)
#undef CPUSERVE_OWN_SHAPE
#undef CPUSERVE_SHAPE
  }
  return {1, 0};
}
constexpr int kF8Group = 128;
inline size_t source_row_bytes(SourceType type, int64_t k) {
  const BlockShape block = block_shape(type);
  const auto bytes = static_cast<size_t>(k / block.weights) * block.bytes;
  if (type == SourceType::e4m3_g128) {
    return bytes + static_cast<size_t>((k + kF8Group - 1) / kF8Group) * 4;
  }
  return type == SourceType::s8_channel || type == SourceType::nvfp4 ? bytes + 4 : bytes;
}

// For each weight kind: its only source type, or f32 if it can be packed from several source types.
#define CPUSERVE_ANY(...) SourceType::f32,
#define CPUSERVE_ONLY(name, source, ...) SourceType::source,
constexpr SourceType kOnlySources[] = {CPUSERVE_WEIGHT_KINDS(CPUSERVE_ANY, CPUSERVE_ONLY)};
#undef CPUSERVE_ANY
#undef CPUSERVE_ONLY
constexpr SourceType only_source(WeightKind kind) { return kOnlySources[static_cast<int>(kind)]; }
static_assert(sizeof kOnlySources / sizeof *kOnlySources == static_cast<size_t>(WeightKind::count),
              "one for each kind");
static_assert(only_source(WeightKind::w8_channel_g128) == SourceType::f32 &&
                  only_source(WeightKind::q4_k) == SourceType::gguf_q4_k &&
                  only_source(WeightKind::nvfp4) == SourceType::nvfp4 &&
                  only_source(WeightKind::w3z_g256) == SourceType::u3z_g256,
              "the source in the line of the kind");

struct PackArgs {
  const void* const* rows;  // kPanel source rows of k elements; a null row is a row of zeros
  SourceType source;
  int64_t k;
  void* panel;  // the packed panel: panel_bytes(k) bytes, 32-byte aligned
};

struct PackedWeight {
  const uint8_t* data;  // packed panels one after another, 64-byte aligned
  size_t panel_bytes;
  int64_t n, k;  // shape without padding; there are ceil(n / 16) panels
  WeightKind kind;
};

}  // namespace cpuserve
