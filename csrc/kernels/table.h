// The kernel API on one page: plain structs, plain function pointers, one table per ISA level.
//
// Rules every kernel obeys:
//  * noexcept, no allocation, no I/O, no globals, no getenv; scratch comes from the caller.
//  * Batch invariance: for one ISA level and weight kind, an output row depends on its own inputs
//    only, bit for bit: never on m, on its neighbours, on the task split or on threads. A dot
//    product over K is one accumulator chain in ascending K (one chain per output element; lanes
//    are output columns, so no horizontal sums). Attention works in kChunk-key chunks of absolute
//    position, each from an empty state, merged in ascending order.
//  * Masked or stale KV slots never reach a product (0 x NaN is NaN).
// Only C headers and files under kernels/ may be included by an ISA translation unit.
#pragma once
#include <stddef.h>
#include <stdint.h>

namespace cpuserve {

// ---------------------------------------------------------------------------------------------
// Activation rows. Every program value is a matrix [tokens, width] stored row by row in one of
// these formats; the weight kind of the consumer decides which one (program/lower.py).
//   f32    width floats
//   bf16   width bfloat16, round to nearest even
//   q8g32  groups of 32 along the row: width_padded int8 q, then groups float scale, then groups
//          int32 sum(q). scale = amax / 127, q = rne(x * (127 / amax)), amax == 0 -> scale 0, q 0.
//          width_padded = width rounded up to 32; padding holds zeros.
//   q8g128 the same in groups of 128; width_padded = width rounded up to 128.
//   q8g256 the same in groups of 256, with sums { int16 sum(q of 16)[16], sum(q of 32)[8] }.
//   q8row  the same with one group, the whole row. Ops that write a row piece by piece (a linear's
//          epilogue, attention) cannot write q8g128, q8g256 and q8row; convert writes them.
//   q8g32x2 q8g256x2   two rows of q8g32 or q8g256 one after another (each half the row stride),
//          called terms: the value, and the rest that quantizing it lost; together about 15 bits. A
//          linear runs on both terms as on two rows and adds the two results.
enum class ActFormat : int32_t { f32, bf16, q8g32, q8g32x2, q8g128, q8row, q8g256, q8g256x2 };

constexpr int kPanel = 16;       // output columns of one packed panel, at every ISA level
constexpr int kStripPanels = 4;  // panels of one strip: 64 columns, the widest register tile
constexpr int kBlock = 32;       // tokens of one KV block
constexpr int kChunk = 256;      // keys of one attention chunk (absolute position)
constexpr int kMaxTop = 20;      // default limit of alternatives per logprob request

inline int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

// Number of columns that a row of `width` is stored with, and how many of them share a scale in the
// q8 formats.
inline int64_t padded_width(ActFormat f, int64_t width) {
  const bool blocks = f == ActFormat::q8g256 || f == ActFormat::q8g256x2;
  return round_up(width, blocks ? 256 : f == ActFormat::q8g128 ? 128 : 32);
}
inline int64_t scale_group(ActFormat f, int64_t width) {
  if (f == ActFormat::q8row) return padded_width(f, width);
  return f == ActFormat::q8g256 || f == ActFormat::q8g256x2 ? 256
         : f == ActFormat::q8g128                           ? 128
                                                            : 32;
}
constexpr int64_t kBlockSums = 48;  // bytes of the sums of a group of 256
// Whether a row of activations has two terms, and the format of each of them.
inline bool two_terms(ActFormat f) { return f == ActFormat::q8g32x2 || f == ActFormat::q8g256x2; }
inline ActFormat term_format(ActFormat f) {
  return f == ActFormat::q8g32x2    ? ActFormat::q8g32
         : f == ActFormat::q8g256x2 ? ActFormat::q8g256
                                    : f;
}

// Bytes from one row to the next: a multiple of 64 and never a multiple of 4096, so that rows of a
// register tile do not share an L1 set (48 KB, 12 ways, 64 sets of 64 bytes = 4 KB period).
inline size_t row_bytes(ActFormat f, int64_t width) {
  int64_t p = padded_width(f, width), bytes = 0;
  switch (f) {
    case ActFormat::f32:
      bytes = p * 4;
      break;
    case ActFormat::bf16:
      bytes = p * 2;
      break;
    case ActFormat::q8g32:
    case ActFormat::q8g128:
    case ActFormat::q8row:
      bytes = p + p / scale_group(f, width) * 8;
      break;
    case ActFormat::q8g256:
      bytes = p + p / 256 * (4 + kBlockSums);
      break;
    case ActFormat::q8g32x2:
    case ActFormat::q8g256x2:
      return 2 * row_bytes(term_format(f), width);
  }
  bytes = round_up(bytes, 64);
  return static_cast<size_t>(bytes % 4096 == 0 ? bytes + 64 : bytes);
}

// A matrix [rows, width] of activations; `data` is 64-byte aligned.
struct Rows {
  void* data;
  size_t stride;  // bytes from row to row
  int64_t width;  // logical columns
  ActFormat format;
};

// ---------------------------------------------------------------------------------------------
// Linear. A weight matrix W[n, k] (row = output column, as in checkpoints) is packed into panels of
// kPanel output columns; K is contiguous inside a panel and zero padded to the kind's quantum.
//   dense_bf16  [n/16][k/2][16][2]   bf16            act bf16   (k padded to 2)
//   dense_f16   [n/16][k][16]        fp16            act f32
//   dense_f32   [n/16][k][16]        fp32            act f32
//   w8_g32      [n/16][k/32] of { fp16 scale[16]; u8 q[8][16][4] }   act q8g32; w = s * (q - 128)
//   w4_g32      [n/16][k/32] of { fp16 scale[16]; u8 q[4][16][4] }   act q8g32; w = s * (q - 8)
//   w4m_g32     [n/16][k/32] of { fp16 scale[16]; fp16 min[16]; u8 q[4][16][4] }  w = s * q + min
//   w4m_g128    [n/16][k/128] of { fp16 scale[16]; fp16 min[16]; u8 q[16][16][4] }   act q8g128
//   w8_channel  [n/16] of { u8 q[k/4][16][4]; fp32 scale[16] }     act q8row; w = s * (q - 128)
//   w8_channel_g128   the same bytes                               act q8g128
//   q4_k q5_k q6_k q2_k q3_k iq4_xs   [n/16][k/256]                  act q8g256
//   q5_0 q5_1 iq4_nl mxfp4            [n/16][k/32]                   act q8g32
//     of GGUF types: factors and planes of bits of 16 columns, kernels/linear/planes.h; four
//     bytes of a column are neighbours at every level. w = s * (value - zero) + min, where s and
//     min of 32 or 16 weights are d * scale and -(m * least) in the types with blocks of 256.
//   e4m3_g128   [n/16][k/128] of { fp32 scale[16]; u8 q[64][16][2] }       act bf16
//   nf4_g64 fp4_g64   [n/16][k/64] of { fp16 scale[16]; u8 q[32][16] }     act bf16
//   nvfp4       [n/16][k/256] of { fp32 scale[16]; [16] of { E4M3 s[16]; u8 q[8][16] } }   act bf16
//     w = scale * value, of nvfp4 scale * (s * value). The last block of a row ends with K. Two
//     nibbles of a byte are k and k + 1 (kernels/linear/coded.h).
//   w8z_g32 w8z_g128   [n/16][k/32 or 128] of { fp16 scale[16]; s8 zero[16]; u8 q[..][16][4] }
//   w4z_g32 w4z_g64    [n/16][k/32 or 64] of the same, 4 bits         act q8g32
//     w = s * (q - 128 - zero) of 8 bits, s * (q - zero) of 4 bits. Groups of rows are of 32 also
//     where the groups of weights are larger.
//   w2z_g32 w2z_g64 w2z_g128 w2z_g256   [n/16][k/32, 64, 128 or 256]  act q8g32
//   w3z_g32 w3z_g64 w3z_g128 w3z_g256   of { fp16 scale[16]; zero points of 4 bits; planes }
//     w = s * (q - zero). Planes of bits as in GGUF types.
// In the other 4-bit kinds byte (r, c, j) holds k = 8 r + j in its low and k = 8 r + 4 + j in its
// high nibble. The bytes in memory equal the GGUF file: 34, 18 and 20 for 32 weights. So a
// column has 4 bytes next to each other. Where a level uses the matrix products of Arm, it has 8
// (LinearKernel::column_bytes), and 8-bit codes are signed:
//   dense_bf16  [n/16][k/4][16][4]   k padded to 4
//   w8_g32      { fp16 scale[16]; s8 q[4][16][8] }       w8_channel { s8 q[k/8][16][8]; ... }
//   4 bits      byte (r, c, j) holds k = 16 r + j in its low and k = 16 r + 8 + j in its high
//   nibble
// The quantized dot product is, per group in ascending order:
//   f = fma(float(sum_k q_w q_x - zero * sum_x), s_w * s_x, f)   [int32 arithmetic is exact]
//   w4m:  then  f = fma(min, s_x * float(sum_x), f), and of zero points with min = -zero * s_w
//   blocks of 256; their scales and minima of 16 or 32 weights are d * scale and -(m * least):
//         sum = sum over groups of scale * sum_k (q_w - zero) q_x, low = the same sum of least *
//         sum_x f = fma(fnma(m, float(low), float(sum) * d), s_x, f)   without minima no low
//   float codes:  f = fma(sum, s_w, f), where sum is dense_bf16's of a group
//   w8_channel:       f = float(sum_k q_w q_x - zero * sum_x over the whole row) * (s_w * s_x)
//   w8_channel_g128:  f = fma(float(...), s_x, f) per group, then f * s_w
enum class WeightKind : int32_t {
  dense_bf16 = 0,
  dense_f16,
  dense_f32,
  w8_g32,
  w4_g32,
  w4m_g32,
  w4m_g128,
  w8_channel,
  w8_channel_g128,
  q4_k,
  q5_k,
  q6_k,
  q2_k,
  q3_k,
  q5_0,
  q5_1,
  iq4_nl,
  iq4_xs,
  mxfp4,
  e4m3_g128,
  nf4_g64,
  fp4_g64,
  nvfp4,
  w8z_g32,
  w8z_g128,
  w4z_g32,
  w4z_g64,
  w2z_g32,
  w2z_g64,
  w2z_g128,
  w2z_g256,
  w3z_g32,
  w3z_g64,
  w3z_g128,
  w3z_g256,
  count
};

// Element type of a source row handed to pack(). In addition to GGUF blocks, which the kinds of the
// same name are packed from and no other source:
//   s8_channel  { fp32 scale; s8 q[k] }                    w = scale * q
//   u4m_g128    k/128 of { fp16 scale; fp16 min; u8 q[64] }  w = scale * q + min; element 2 i is
//               the low and element 2 i + 1 the high nibble of byte i
// And the only sources of kinds that keep float codes, with nibbles in the same order:
//   e4m3_g128   k/128 of { fp32 scale; u8 q[128] }; the last block may be shorter by whole 32s
//   nf4_g64 fp4_g64   k/64 of { fp16 scale; u8 q[32] }
//   nvfp4       { fp32 scale; k/16 of { E4M3 s; u8 q[8] } }, whole 32 of K
// And kinds with integer zero points, w = scale * (q - zero). Codes are a stream of bits,
// the lowest first, so 4 bits are as in u4m_g128:
//   u8z_g32 u8z_g128 u4z_g32 u4z_g64   k/32, 64 or 128 of { fp16 scale; u8 zero; u8 q[] }
//   u2z_g32 to u2z_g256 u3z_g32 to u3z_g256   k/32, 64, 128 or 256 of the same
enum class SourceType : int32_t {
  f32 = 0,
  f16,
  bf16,
  gguf_q8_0,
  gguf_q4_0,
  gguf_q4_1,
  s8_channel,
  u4m_g128,
  gguf_q4_k,
  gguf_q5_k,
  gguf_q6_k,
  gguf_q2_k,
  gguf_q3_k,
  gguf_q5_0,
  gguf_q5_1,
  gguf_iq4_nl,
  gguf_iq4_xs,
  gguf_mxfp4,
  e4m3_g128,
  nf4_g64,
  fp4_g64,
  nvfp4,
  u8z_g32,
  u8z_g128,
  u4z_g32,
  u4z_g64,
  u2z_g32,
  u2z_g64,
  u2z_g128,
  u2z_g256,
  u3z_g32,
  u3z_g64,
  u3z_g128,
  u3z_g256
};

// The weights and bytes of one block of a source row, which consists of whole blocks.
struct BlockShape {
  int64_t weights;
  size_t bytes;
};
inline BlockShape block_shape(SourceType type) {
  switch (type) {
    case SourceType::f32:
      return {1, 4};
    case SourceType::f16:
    case SourceType::bf16:
      return {1, 2};
    case SourceType::gguf_q8_0:
      return {32, 34};
    case SourceType::gguf_q4_0:
    case SourceType::gguf_iq4_nl:
      return {32, 18};
    case SourceType::gguf_q4_1:
      return {32, 20};
    case SourceType::s8_channel:
      return {1, 1};  // after a scale of 4 bytes
    case SourceType::u4m_g128:
      return {128, 68};
    case SourceType::gguf_q4_k:
      return {256, 144};
    case SourceType::gguf_q5_k:
      return {256, 176};
    case SourceType::gguf_q6_k:
      return {256, 210};
    case SourceType::gguf_q2_k:
      return {256, 84};
    case SourceType::gguf_q3_k:
      return {256, 110};
    case SourceType::gguf_q5_0:
      return {32, 22};
    case SourceType::gguf_q5_1:
      return {32, 24};
    case SourceType::gguf_iq4_xs:
      return {256, 136};
    case SourceType::gguf_mxfp4:
      return {32, 17};
    case SourceType::e4m3_g128:
      return {32, 32};  // and a scale of 4 bytes for each 128
    case SourceType::nf4_g64:
    case SourceType::fp4_g64:
      return {64, 34};
    case SourceType::nvfp4:
      return {32, 18};  // after a scale of 4 bytes
    case SourceType::u8z_g32:
      return {32, 35};
    case SourceType::u8z_g128:
      return {128, 131};
    case SourceType::u4z_g32:
      return {32, 19};
    case SourceType::u4z_g64:
      return {64, 35};
    case SourceType::u2z_g32:
      return {32, 11};
    case SourceType::u2z_g64:
      return {64, 19};
    case SourceType::u2z_g128:
      return {128, 35};
    case SourceType::u2z_g256:
      return {256, 67};
    case SourceType::u3z_g32:
      return {32, 15};
    case SourceType::u3z_g64:
      return {64, 27};
    case SourceType::u3z_g128:
      return {128, 51};
    case SourceType::u3z_g256:
      return {256, 99};
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

// The only source of a kind that keeps the codes of its blocks; f32 of the kinds that take several.
inline SourceType only_source(WeightKind kind) {
  if (kind < WeightKind::q4_k || kind >= WeightKind::count) return SourceType::f32;
  return static_cast<SourceType>(static_cast<int32_t>(SourceType::gguf_q4_k) +
                                 static_cast<int32_t>(kind) -
                                 static_cast<int32_t>(WeightKind::q4_k));
}

struct PackArgs {
  const void* const* rows;  // kPanel source rows of k elements; nullptr = a row of zeros
  SourceType source;
  int64_t k;
  void* panel;  // destination, panel_bytes(k), 32-byte aligned
};

struct PackedWeight {
  const uint8_t* data;  // panels one after another, 64-byte aligned
  size_t panel_bytes;
  int64_t n, k;  // logical; panels = ceil(n / 16)
  WeightKind kind;
};

// clamped_swiglu has no form without glu, because it also changes the factor of the gate:
//   out = (1 + clamp(up, -7, 7)) * g * sigmoid(1.702 g), g = min(gate, 7)   (gpt-oss)
enum class Activation : int32_t { none = 0, relu, gelu, gelu_tanh, silu, clamped_swiglu };

// The epilogue of a finished tile, in this order: + bias, activation, (glu) times the other half,
// then store in out.format, or add to an f32 `out` in place.
struct Epilogue {
  const float* bias;  // [panels * 16] in packed column order, or nullptr
  Activation act;
  bool glu;  // panels alternate gate, up: out column 16 i + c = act(panel 2i) * panel 2i+1
  bool add;  // out += result; out.format must be f32
  Rows out;
};

// How much a kernel works on at a time, and how far ahead it fetches. These are data because they
// follow from the caches of a core (runtime/work_sizes.h); only the register tile is compiled.
// They decide about time only and never change a bit. The defaults are for 48 KB of L1 and 1 MB of
// L2, where the constants were measured.
constexpr int32_t kMostBlockRows = 512, kMostNearBytes = 24 << 10, kMostPassRows = 16;
constexpr size_t kAttentionScratch = 512 << 10;
struct WorkSizes {
  // Weights of a strip in one K block. They stay in L2 while rows pass over them.
  int32_t strip_bytes = 256 << 10;
  // Rows that pass over it, with sums that stay in L2: an even number up to kMostBlockRows.
  int32_t rows = kMostBlockRows;
  // The bytes that stay in L1 for reuse, of widened rows or of the weights of a strip
  // in one K block (linear/driver.h): up to kMostNearBytes.
  int32_t near_bytes = kMostNearBytes;
  // Weights that one pass over them fetches ahead of those in use, for all panels of a tile
  // together: 40 GB/s and 200 ns of loaded memory latency are 8 KB.
  int32_t ahead_bytes = 8 << 10;
  // Rows of a float kind that take one pass over the weights, at most (LinearKernel::pass_rows).
  int32_t float_pass_rows = kMostPassRows;
  // Rows of a float kind or of int8 with one scale per column, at most, in a pass that fetches
  // weights ahead to L2. A pass of more rows fetches them to L1: with 4 rows of bf16 at AVX2 it
  // reads 4 to 10 % more bytes a second so on Granite Rapids.
  int32_t far_pass_rows = 3;
  // 1: K blocks of few rows, and of int8 with one scale per column, stay in L1, and the next block
  // is fetched to L2. 0: all K blocks stay in L2, and the next one is fetched to L1, from where it
  // reaches L2 (linear/driver.h).
  int32_t near_blocks = 1;
  // Scratch of an attention unit that stays in L2; up to kAttentionScratch.
  int32_t attention_bytes = kAttentionScratch / 2;
};

struct LinearArgs {
  const PackedWeight* w;
  const void* x;    // rows in the kind's act format
  size_t x_stride;  // bytes
  int64_t m;        // rows
  // Panels to compute: whole pairs with glu (a gate and its up) and of a quantized output (32
  // results share a scale), whole strips if both.
  int64_t panel0, panel1;
  Epilogue ep;        // ep.out.data points at row 0; columns by absolute panel
  void* scratch;      // kLinearScratch bytes, 64-byte aligned, used by this thread only
  int32_t terms = 1;  // int8 rows per row of activations
  WorkSizes sizes = {};
};
constexpr size_t kLinearScratch = 640 << 10;

// Whether the activations of a step's rows stay in L2 while weights pass: up to four times the
// weights of a strip in a K block, which is half of an L2 of 2 MB.
constexpr bool rows_stay_in_l2(int64_t rows, size_t x_stride, const WorkSizes& sizes) {
  return static_cast<size_t>(rows) * x_stride <= 4 * static_cast<size_t>(sizes.strip_bytes);
}

struct LinearKernel {
  ActFormat act;
  // A level that packs weights as the level below does leaves panel_bytes, pack and row null.
  size_t (*panel_bytes)(int64_t k) noexcept;
  void (*pack)(const PackArgs&) noexcept;
  void (*product)(const LinearArgs&) noexcept;
  // out[0..k) = row n of W in fp32 (embedding lookup from a tied matrix).
  void (*row)(const PackedWeight&, int64_t n, float* out) noexcept;
  // Its geometry, which the division into tasks follows (runtime/linear_plan.h). The register tile
  // for many rows: int8 or float rows, and columns.
  int tile_rows = 1, tile_columns = kPanel;
  int tile_panels = 1;  // panels that are computed together, or that rows are prepared for
  int pass_rows = 1;    // up to so many int8 or float rows take one pass over the weights
  // Elements of K in a K block of many rows.
  int64_t (*block_k)(int64_t k, const WorkSizes&) noexcept = nullptr;
  int32_t column_bytes = 4;        // bytes of a column that are neighbours in a panel
  int span_panels = kStripPanels;  // of a task, at most, if its rows do not stay in L2
  bool sizes_cut_passes = false;   // WorkSizes::float_pass_rows may be less than pass_rows
  // Up to few_rows int8 rows take the product of the level below, which has the same bits: a level
  // with matrix tiles does not compile the loops for vectors a second time.
  int few_rows = 0;
  void (*few_product)(const LinearArgs&) noexcept = nullptr;

  void run(const LinearArgs& a) const noexcept {
    (few_product && a.m * a.terms <= few_rows ? few_product : product)(a);
  }
};

// ---------------------------------------------------------------------------------------------
// Row-wise operations: rows [m0, m1).
struct NormArgs {
  Rows x;               // f32
  Rows out;             // any format; may alias x when f32
  const float* weight;  // [width]
  const float* bias;    // layer_norm only, or nullptr
  float eps;
  int64_t m0, m1;
  float* scratch;  // width floats
};

struct ConvertArgs {
  Rows x;
  Rows out;
  int64_t m0, m1;
};  // x f32
struct AddArgs {
  Rows x;
  Rows out;
  int64_t m0, m1;
};  // out += x, f32
struct ActivationArgs {
  Rows x;
  Rows out;
  Activation act;
  bool glu;
  int64_t m0, m1;
  float* scratch;
};

// ---------------------------------------------------------------------------------------------
// KV cache geometry of one layer. Element type `KvType`; head_dim is padded to 16 (hd_pad).
// One head in one block, K or V:
//   bf16          K [hd_pad/2][kBlock][2]   V [kBlock/2][hd_pad][2]
//   f16, f32      K [hd_pad][kBlock]        V [kBlock][hd_pad]
//   int8, e4m3, e5m2   as f16 but of bytes; after them fp32 [kBlock]: the factor of
//                      the codes of a token (e4m3 codes widen to 1/256 of their value)
enum class KvType : int32_t { bf16 = 0, f16 = 1, f32 = 2, int8 = 3, e4m3 = 4, e5m2 = 5, count };
inline bool kv_scaled(KvType t) { return t >= KvType::int8; }
// Whether rope_store mixes the dimensions of q and k: k is multiplied by the Hadamard matrix H of n
// rows, where n is the largest power of two that divides head_dim, block by block, and q by H / n.
// Scores do not change.
inline bool kv_mixed(KvType t) { return t == KvType::int8; }
inline size_t kv_elem_bytes(KvType t) { return t == KvType::f32 ? 4 : kv_scaled(t) ? 1 : 2; }

// K or V of one head in one block.
inline size_t kv_half_bytes(KvType t, int32_t hd_pad) {
  return static_cast<size_t>(hd_pad) * kBlock * kv_elem_bytes(t) +
         (kv_scaled(t) ? kBlock * sizeof(float) : 0);
}

// The blocks of a slab are stored head by head, keys before values: the data that attention reads
// for one head is contiguous as long as the blocks of a sequence are consecutive.
constexpr int kSlabBlocks = 8;

struct KvLayer {
  uint8_t* base;        // this layer's first block
  size_t slab_stride;   // bytes from a slab of kSlabBlocks blocks to the next
  size_t block_stride;  // bytes from block b to b + 1 of a slab
  size_t head_stride;   // bytes from kv head h to h + 1 of a slab
  size_t value_offset;  // bytes from K to V of a head in a block; 0: the keys are the values
  int32_t kv_heads, head_dim, hd_pad;
  KvType type;
};

// K of one head in one block.
inline uint8_t* kv_block(const KvLayer& kv, int64_t block, int head) {
  return kv.base + static_cast<size_t>(block / kSlabBlocks) * kv.slab_stride +
         static_cast<size_t>(block % kSlabBlocks) * kv.block_stride +
         static_cast<size_t>(head) * kv.head_stride;
}

// Rotary embedding with "neox" pairing: dims i and i + rotary/2 are rotated together. cos/sin
// tables [max_position][rotary/2] fp32 (the scaling of Llama 3, YaRN and linear is in the table).
struct RopeStoreArgs {
  Rows qkv;  // f32 [T, (q_heads + 2 kv_heads) * head_dim]; q, k, v in this order
  Rows q;  // f32 [T, q_heads * hd_pad]: rotated (and mixed) q, zero padded; may be bf16 when kv is
           // bf16 or scaled
  KvLayer kv;
  int32_t q_heads;
  int32_t rotary;    // 0 = no rotation
  const float* cos;  // row = position
  const float* sin;
  const float* q_norm;  // [head_dim] rms norm per head before rotation, or nullptr
  const float* k_norm;
  float eps;
  const int32_t* positions;  // [T]
  const int32_t* slots;      // [T] block * kBlock + offset of each token's KV slot
  int64_t m0, m1;            // tokens
  // The location of each KV head, [kv_heads], for a layer that is divided among ranks; nullptr: all
  // are in `kv`.
  const KvLayer* pieces = nullptr;
};

// Compressed rows (MLA): the row of a token is key and value of the layer's only KV head. It
// consists of the first `rank` columns of kv, normalized, and its other `rotary` columns, rotated.
// A query consists of `rank` columns of `latent` and the last `rotary` columns of a head of q,
// rotated. Eight-bit rows are not mixed (kv_mixed).
struct LatentStoreArgs {
  Rows q;       // f32 [T, q_heads * (nope + rotary)]
  Rows latent;  // f32 [T, q_heads * rank]
  Rows kv;      // f32 [T, rank + rotary]
  Rows out;     // queries, as `q` of RopeStoreArgs
  KvLayer layer;
  int32_t q_heads, nope, rank, rotary;
  const float* cos;  // row = position
  const float* sin;
  const float* norm;  // [rank]
  float eps;
  bool
      interleaved;  // neighbouring columns are rotated as a pair, else columns i and i + rotary / 2
  const int32_t* positions;  // [T]
  const int32_t* slots;      // [T]
  int64_t m0, m1;            // tokens
};

// One unit of attention: rows (token, head of the group) of one KV head against chunks [chunk0,
// chunk1).
// Row r of the unit is token `t0 + r / group`, head `kv_head * group + r % group`.
struct AttentionArgs {
  Rows q;  // as written by rope_store
  KvLayer kv;
  int32_t kv_head, group;      // group = q_heads / kv_heads
  int64_t row0, rows;          // rows of the unit, row 0 = first row of token t0
  int64_t t0;                  // step token index of the sequence's first query token
  int32_t pos0;                // absolute position of token t0
  const int32_t* block_table;  // of the sequence
  int32_t chunk0, chunk1;      // chunks to visit (absolute position / kChunk)
  int32_t window;              // a row sees keys less than this far from it, 0 = any
  float scale, softcap;        // softcap 0 = none
  const float* slopes;         // [q_heads] ALiBi slopes or nullptr
  const float* sinks;          // [q_heads] attention sinks (logit) or nullptr
  // Result: if `partial` is null the chunks are merged here and rows go to `out` (format of the
  // o_proj's input). Else one partial per chunk: partial[(r * chunks + c - chunk0)] =
  // { m, l, 14 unused, o[hd_pad] } floats, and attention_merge finishes.
  Rows out;        // [T, q_heads * head_dim]; q8g32 only where head_dim % 32 == 0
  float* partial;  // slot of row 0, chunk0
  void* scratch;   // kAttentionScratch bytes
  // Number of chunks from one row of `partial` to the next, if several units share the chunks of
  // one sequence; 0 = chunk1 - chunk0.
  int64_t partial_stride;
  int32_t heads = 1;  // KV heads [kv_head, kv_head + heads) one after another; 1 with `partial`
  // Bytes of the scratch that rows may fill (WorkSizes::attention_bytes).
  int32_t scratch_bytes = kAttentionScratch / 2;
  // Where the keys are the values: memory for a chunk of values (kv_chunk_bytes), aligned to 64.
  void* values = nullptr;
  // 0: causal, a row sees keys up to its own. Else the keys of the sequence: a row sees those after
  // its own as well (encoders).
  int32_t keys = 0;
};
constexpr int kMaxHeadDim = 576;  // padded
struct AttentionKernel {
  void (*attend)(const AttentionArgs&) noexcept;
  // Heads wider than this (padded) take the kernel of the level below.
  int32_t widest_head = kMaxHeadDim;
  void (*attend_wider)(const AttentionArgs&) noexcept = nullptr;

  // The function for heads of this width (padded).
  auto for_head(int32_t hd_pad) const noexcept {
    return hd_pad > widest_head ? attend_wider : attend;
  }
  void operator()(const AttentionArgs& a) const noexcept { for_head(a.kv.hd_pad)(a); }
};
// K or V of one head in the blocks of a chunk.
inline size_t kv_chunk_bytes(KvType t, int32_t hd_pad) {
  return kv_half_bytes(t, hd_pad) * (kChunk / kBlock);
}

struct AttentionMergeArgs {
  const float* partial;  // [rows][chunks][16 + hd_pad]
  int64_t rows, chunks;
  int32_t kv_head, group, head_dim, hd_pad;
  int64_t row0, t0;
  const float* sinks;
  Rows out;
  void* scratch;
};

// ---------------------------------------------------------------------------------------------
// Recurrent layers, all in fp32. A state S [key_width, value_width] of each head follows
//   S_t = exp(g_t) S_{t-1} + k_t (x) u_t     out_t = S_t^T q_t
//   u_t = beta_t (v_t - exp(g_t) S_{t-1}^T k_t)   gated delta rule
//   u_t = beta_t v_t                              Mamba2: k = B, q = C, v = x, beta = dt, g = dt A
// State at absolute multiples of kStateChunk tokens is closed. The tokens since then are open rows:
// their k, their u, and G_t, the sum of g since the chunk began. A token reads the closed state
// once and chains over the open rows before it in ascending order,
//   out_t = exp(G_t) (S^T q_t) + sum_{i <= t} exp(G_t - G_i) (k_i . q_t) u_i
// and u_t likewise. So a row's bits do not depend on how tokens are cut into calls, and to forget
// the last tokens is to forget their rows.
constexpr int64_t kStateChunk = 16;  // tokens of a closed chunk

struct RecurrentShape {
  int32_t key_width, value_width;
  int32_t heads;  // value heads of a unit, which share its keys and queries
  bool delta;     // gated delta rule, else Mamba2
};

// One unit: `heads` states of one sequence. `closed`, `open` and `scratch` need no alignment, but
// are read faster at multiples of 64 bytes.
struct RecurrentArgs {
  RecurrentShape shape;
  const float* closed;  // [heads][key_width][value_width] at the last closed boundary
  float* closed_to;     // where the call that fills the chunk writes the state; may equal `closed`
  float* open;          // recurrent_open_floats() floats; rows after num_open may hold anything
  int64_t num_open;     // open rows before this call, 0 to 15
  int64_t rows;         // tokens of this call, 1 to 16 - num_open; the call closes a full chunk
  const float *k, *q, *v;  // row t at k + t * k_stride etc.; v row [heads][value_width]
  int64_t k_stride, q_stride, v_stride;
  const float *g, *beta;  // of (t, head) at t * gate_stride + head; g <= 0 and finite
  int64_t gate_stride;
  float* out;  // row t: [heads][value_width] at out + t * out_stride
  int64_t out_stride;
  uint8_t* scratch;  // recurrent_scratch_bytes() bytes
  // `closed` of the unit that this thread computes next, to fetch the beginning of its states
  // ahead; or nullptr.
  const float* next = nullptr;
};

// Rows of k and u are padded to whole vectors of any level.
inline int64_t recurrent_row_floats(int32_t width) { return round_up(width, 16); }

// Floats of a unit's open rows: k [16][key row], u [heads][16][value row], G [heads][16].
inline int64_t recurrent_open_floats(const RecurrentShape& s) {
  const int64_t row = recurrent_row_floats(s.key_width) +
                      s.heads * (recurrent_row_floats(s.value_width) + int64_t{1});
  return kStateChunk * row;
}

// Scratch: q [16][key row]; u until the chunk's end [16][value row], and products of states and
// vectors; five matrices of one number for each pair of rows; and a line to align them.
constexpr int64_t kRecurrentSums = 48;
inline size_t recurrent_scratch_bytes(const RecurrentShape& s) {
  const int64_t rows = kStateChunk * recurrent_row_floats(s.key_width) +
                       (kStateChunk + kRecurrentSums) * recurrent_row_floats(s.value_width);
  return static_cast<size_t>(rows + 5 * kStateChunk * kStateChunk + 16) * sizeof(float);
}

// The causal convolution of each channel before a recurrent layer, then silu if `silu`:
//   out[t][c] = bias[c] + sum_j weight[j][c] x[t - taps + 1 + j][c], one chain, j ascending
// A task may take some of the channels; then pointers are to its first one and the strides say how
// many floats there are from row to row.
constexpr int32_t kMaxTaps = 8;
struct ShortConvArgs {
  const float* x;
  int64_t x_stride;
  const float* before;  // the taps - 1 inputs before the first row, oldest first
  const float* weight;  // [taps][channels], oldest first
  const float* bias;    // [channels] or nullptr
  bool silu;
  int32_t taps;  // 1 to kMaxTaps
  int64_t channels, rows;
  float* out;  // must not overlap x or before
  int64_t out_stride;
  int64_t before_stride = 0, weight_stride = 0;  // 0 = channels
};

// RMS norm of each group of columns of a row, and a gate:
//   gate_first   out = rms(x silu(z)) weight     Mamba2
//   otherwise    out = rms(x) weight silu(z)     Qwen3-Next
struct GatedNormArgs {
  const float* x;
  int64_t x_stride;
  const float* z;
  int64_t z_stride;
  const float* weight;  // [width] if shared_weight, else [groups][width]
  int64_t groups, width;
  float eps;
  bool gate_first, shared_weight;
  float* out;  // may equal x, with the same stride
  int64_t out_stride;
  int64_t rows;
};

// ---------------------------------------------------------------------------------------------
// logits = softcap * tanh(logits * scale / softcap), or logits * scale where softcap is 0. Each
// logit is independent, so a row may be split anywhere.
struct ScaleLogitsArgs {
  float* logits;
  int64_t count;
  float scale, softcap;
};

// ---------------------------------------------------------------------------------------------
// Sampling of one row of logits. The steps, in order (the torch executor does the same):
//  1. logprob of any id = logit - logsumexp(logits) of the unmodified logits.
//  2. bias[i].value is added to logits[bias[i].id]; if num_allowed >= 0 all other ids become -inf;
//     the first min_tokens outputs ban the stop ids; ids with bit 0 in the mask become -inf.
//  3. repetition penalty on ids seen in prompt or output (logit > 0 ? / p : * p), then
//     - frequency * count_output - presence * (count_output > 0).
//  4. temperature < 1e-5: the largest logit, lowest id on ties. Else logits / temperature.
//  5. keep: min_p (p >= min_p * p_max), then top_k (largest k, ties by lower id), then top_p (the
//     shortest prefix in descending order, ties by lower id, with a mass of at least top_p of the
//     mass that top_k kept).
//  6. u = uniform(seed, position) * kept mass; the result is the first kept id, in id order, where
//     the running sum exceeds u. Sums run in double in id order.
struct TokenBias {
  int32_t id;
  float value;
};
struct TokenCount {
  int32_t id;
  int32_t prompt;
  int32_t output;
};  // id < 0: empty
struct SampleParams {
  float temperature, top_p, min_p;
  int32_t top_k;  // 0 = all
  float repetition, frequency, presence;
  uint64_t seed;
  const TokenBias* bias;
  int32_t num_bias;
  const int32_t* allowed;
  int32_t num_allowed;  // sorted; -1 = all
  const int32_t* banned;
  int32_t num_banned;  // this row's banned ids (min_tokens)
  const TokenCount* counts;
  int32_t num_counts;  // compact list of the ids seen so far, or empty
};
// The ids of a row are divided into at most kMaxBlocks blocks of this many.
constexpr int kMaxBlocks = 2048;
constexpr int sample_block(int vocab) {
  return 256 * ((vocab + 256 * kMaxBlocks - 1) / (256 * kMaxBlocks));
}
// sample does all of it. Before that, threads can share two passes over the row, which then sample
// leaves out: sample_scan for all ids, then sample_weigh for all ids. They fill the scratch for
// ids [begin, end), where begin and end (other than the last) are multiples of a block. Since sums
// over blocks are added in one order, the result is the same.
struct SampleArgs {
  float* logits;  // [vocab]; overwritten
  int32_t vocab;
  const SampleParams* params;  // nullptr: score only
  int32_t position;            // absolute position of the sampled token (RNG counter)
  int32_t target;              // id to score instead of sampling, -1 = sample
  int32_t num_top;             // requested alternatives; -1 = no logprobs at all
  const int32_t* mask;         // bit i % 32 of word i / 32: whether id i is allowed; nullptr: all
  int32_t token;               // out
  float logprob;               // out: the value of `token`
  int32_t rank;                // out: 1 + number of ids with a larger logit
  int32_t* top_ids;            // out [num_top], descending, ties by lower id
  float* top_logprobs;         // out [num_top]
  void* scratch;               // vocab * 8 + 65536 bytes, 64-byte aligned
  bool prepared = false;       // sample_scan and sample_weigh have filled the scratch
};

// uniform(seed, position) in [0, 1): splitmix64 finalizer over seed + golden * (position + 1), top
// 53 bits.
inline double uniform(uint64_t seed, uint64_t position) {
  uint64_t z = seed + 0x9e3779b97f4a7c15ull * (position + 1);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  z ^= z >> 31;
  return static_cast<double>(z >> 11) * (1.0 / 9007199254740992.0);
}

// ---------------------------------------------------------------------------------------------
// The products that a probe measures.
enum class DotKind : int32_t { f32 = 0, bf16, int8, int4, count };

// One ISA level's kernels. A level inherits the entries it does not override (isa/*.cpp).
struct KernelTable {
  const char* isa;
  LinearKernel linear[static_cast<int>(WeightKind::count)];
  void (*rms_norm)(const NormArgs&) noexcept;
  void (*layer_norm)(const NormArgs&) noexcept;
  void (*convert)(const ConvertArgs&) noexcept;
  void (*add)(const AddArgs&) noexcept;
  void (*activation)(const ActivationArgs&) noexcept;
  void (*rope_store)(const RopeStoreArgs&) noexcept;
  void (*latent_store)(const LatentStoreArgs&) noexcept;
  AttentionKernel attention[static_cast<int>(KvType::count)];
  void (*attention_merge)(const AttentionMergeArgs&) noexcept;
  void (*recurrent)(const RecurrentArgs&) noexcept;
  void (*short_conv)(const ShortConvArgs&) noexcept;
  void (*gated_norm)(const GatedNormArgs&) noexcept;
  void (*scale_logits)(const ScaleLogitsArgs&) noexcept;
  void (*sample_scan)(const SampleArgs&, int32_t begin, int32_t end) noexcept;
  void (*sample_weigh)(const SampleArgs&, int32_t begin, int32_t end) noexcept;
  void (*sample)(SampleArgs&) noexcept;
  // Roofline probes. probe_read returns the sum of all bytes that it read, so that the compiler
  // removes nothing. A function of probe_dot runs `iterations` of a loop of products on registers
  // and returns the operations done; int8 and int4 are the products of the 8- and 4-bit kinds.
  uint64_t (*probe_read)(const void* data, size_t bytes) noexcept;
  double (*probe_dot[static_cast<int>(DotKind::count)])(int64_t iterations) noexcept;
};

}  // namespace cpuserve
