// The kinds that keep integer codes of blocks: GGUF's in planes of bits (kernels/linear/planes.h),
// and those with integer zero points, in planes or in bytes (kernels/linear/zero_group.h), against
// an fp64 reference that reads single elements of the blocks by the text of their format.
#include <algorithm>

#include "divisions.h"
#include "harness.h"
#include "kernels/linear/iq_grids.h"

using namespace cpuserve;
using harness::Buffer;
using harness::for_each_kind;
using harness::Rng;

namespace {

constexpr WeightKind kKinds[] = {
    WeightKind::q4_k,     WeightKind::q5_k,    WeightKind::q6_k,     WeightKind::q2_k,
    WeightKind::q3_k,     WeightKind::q5_0,    WeightKind::q5_1,     WeightKind::iq4_nl,
    WeightKind::iq4_xs,   WeightKind::iq3_s,   WeightKind::iq3_xxs,  WeightKind::iq2_s,
    WeightKind::iq2_xs,   WeightKind::iq2_xxs, WeightKind::iq1_m,    WeightKind::iq1_s,
    WeightKind::mxfp4,    WeightKind::w8z_g32, WeightKind::w8z_g128, WeightKind::w4z_g32,
    WeightKind::w4z_g64,  WeightKind::w2z_g32, WeightKind::w2z_g64,  WeightKind::w2z_g128,
    WeightKind::w2z_g256, WeightKind::w3z_g32, WeightKind::w3z_g64,  WeightKind::w3z_g128,
    WeightKind::w3z_g256, WeightKind::tq2_0,   WeightKind::q2_0,     WeightKind::pq2_0,
    WeightKind::q1_0};
bool has_grid(WeightKind kind) { return kind >= WeightKind::iq3_s && kind <= WeightKind::iq1_s; }
bool zero_points(WeightKind kind) { return kind >= WeightKind::w8z_g32; }
// The bits of a code of a kind with zero points.
int bits_of(WeightKind kind) {
  const BlockShape shape = block_shape(only_source(kind));
  return static_cast<int>((shape.bytes - 3) * 8) / static_cast<int>(shape.weights);
}
// Kinds of 2 and 3 bits hold a zero point in half a byte, which a row of theirs has a byte for.
bool half_zeros(WeightKind kind) { return zero_points(kind) && bits_of(kind) < 4; }
// Some K of the kind that is about `k`.
int64_t some_k(WeightKind kind, int64_t k) {
  return round_up(k, block_shape(only_source(kind)).weights);
}

double half_of(const uint8_t* p) {
  uint16_t h;
  std::memcpy(&h, p, 2);
  return static_cast<double>(harness::from_f16(h));
}
int nibble(const uint8_t* bytes, int i, int apart) {
  return i % (2 * apart) < apart ? bytes[i / (2 * apart) * apart + i % apart] & 15
                                 : bytes[i / (2 * apart) * apart + i % apart] >> 4;
}
// One of the eight scales (or minima) of 6 bits in 12 bytes.
int six_bits(const uint8_t* s, int j, bool least) {
  if (j < 4) return s[j + (least ? 4 : 0)] & 63;
  const int low = least ? s[j + 4] >> 4 : s[j + 4] & 15;
  return low | s[least ? j : j - 4] >> 6 << 4;
}

// Code i of a stream of codes of `bits` bits.
int code_of(const uint8_t* stream, int i, int bits) {
  int code = 0;
  for (int j = 0; j < bits; j++) {
    code |= (stream[(i * bits + j) / 8] >> (i * bits + j) % 8 & 1) << j;
  }
  return code;
}

constexpr int kIq4[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
constexpr double kFp4[16] = {0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6};

// Value i of an entry of a grid, where a value has `bits` bits.
int grid_value(const int* values, uint16_t entry, int i, int bits) {
  return values[entry >> i * bits & ((1 << bits) - 1)];
}
constexpr int kIq2[3] = {8, 25, 43}, kTernary[3] = {-1, 0, 1};
constexpr int kIq3Xxs[8] = {4, 12, 20, 28, 36, 44, 52, 62}, kIq3S[8] = {1, 3, 5, 7, 9, 11, 13, 15};
// Sign i of 8: 7 are stored, and the number of negative signs is even.
int even_sign(int seven, int i) {
  int negative = 0;
  for (int j = 0; j < 7; j++) negative += seven >> j & 1;
  return (i < 7 ? seven >> i & 1 : negative % 2) ? -1 : 1;
}
int half_bits(const uint8_t* p) { return p[0] | p[1] << 8; }

// Element i of a block of the kinds with a grid: the entry e has 8 weights (IQ3: two have 4 each).
double grid_element(WeightKind kind, const uint8_t* b, int i) {
  const int e = i / 8, j = i % 8;
  switch (kind) {
    case WeightKind::iq2_xxs: {
      const uint8_t* group = b + 2 + i / 32 * 8;
      const int64_t word = half_bits(group + 4) | static_cast<int64_t>(half_bits(group + 6)) << 16;
      const int sign = even_sign(static_cast<int>(word >> 7 * (e % 4) & 127), j);
      return half_of(b) * (2 * static_cast<double>(word >> 28) + 1) / 8 * sign *
             grid_value(kIq2, kIq2XxsGrid[group[e % 4]], j, 2);
    }
    case WeightKind::iq2_xs: {
      const int word = half_bits(b + 2 + e * 2);
      return half_of(b) * (2 * (b[66 + e / 4] >> e / 2 % 2 * 4 & 15) + 1) / 8 *
             even_sign(word >> 9, j) * grid_value(kIq2, kIq2XsGrid[word & 511], j, 2);
    }
    case WeightKind::iq2_s: {
      const int index = b[2 + e] | (b[66 + e / 4] >> 2 * (e % 4) & 3) << 8;
      return half_of(b) * (2 * (b[74 + e / 4] >> e / 2 % 2 * 4 & 15) + 1) / 8 *
             (b[34 + e] >> j & 1 ? -1 : 1) * grid_value(kIq2, kIq2SGrid[index], j, 2);
    }
    case WeightKind::iq3_xxs: {
      const uint8_t* group = b + 66 + i / 32 * 4;
      const int64_t word = half_bits(group) | static_cast<int64_t>(half_bits(group + 2)) << 16;
      const int sign = even_sign(static_cast<int>(word >> 7 * (e % 4) & 127), j);
      return half_of(b) * (2 * static_cast<double>(word >> 28) + 1) / 4 * sign *
             grid_value(kIq3Xxs, kIq3XxsGrid[b[2 + i / 4]], i % 4, 4);
    }
    case WeightKind::iq3_s: {
      const int index = b[2 + i / 4] | (b[66 + i / 32] >> i / 4 % 8 & 1) << 8;
      return half_of(b) * (2 * (b[106 + i / 64] >> i / 32 % 2 * 4 & 15) + 1) *
             (b[74 + e] >> j & 1 ? -1 : 1) * grid_value(kIq3S, kIq3SGrid[index], i % 4, 4);
    }
    case WeightKind::iq1_s: {
      const int word = half_bits(b + 34 + i / 32 * 2);
      const int index = b[2 + e] | (word >> 3 * (e % 4) & 7) << 8;
      return half_of(b) * (2 * (word >> 12 & 7) + 1) *
             (grid_value(kTernary, kIq1Grid[index], j, 2) + (word >> 15 ? -0.125 : 0.125));
    }
    default: {  // iq1_m
      uint8_t d[2];
      for (int n = 0; n < 2; n++) {
        d[n] = static_cast<uint8_t>(b[49 + 4 * n] >> 4 | (b[51 + 4 * n] & 0xf0));
      }
      const int high = b[32 + e / 2] >> 4 * (e % 2), sub = i / 16;
      const int scale = half_bits(b + 48 + sub / 4 * 2) >> 3 * (sub % 4) & 7;
      return half_of(d) * (2 * scale + 1) *
             (grid_value(kTernary, kIq1Grid[b[e] | (high & 7) << 8], j, 2) +
              (high & 8 ? -0.125 : 0.125));
    }
  }
}

// Element i of a row of blocks.
double source_value(WeightKind kind, const uint8_t* row, int64_t k) {
  const BlockShape shape = block_shape(only_source(kind));
  const uint8_t* b = row + static_cast<size_t>(k / shape.weights) * shape.bytes;
  const int i = static_cast<int>(k % shape.weights);
  if (has_grid(kind)) return grid_element(kind, b, i);
  switch (kind) {
    case WeightKind::q4_k:
      return half_of(b) * six_bits(b + 4, i / 32, false) * nibble(b + 16, i, 32) -
             half_of(b + 2) * six_bits(b + 4, i / 32, true);
    case WeightKind::q5_k: {
      const int q = nibble(b + 48, i, 32) + 16 * (b[16 + i % 32] >> i / 32 & 1);
      return half_of(b) * six_bits(b + 4, i / 32, false) * q -
             half_of(b + 2) * six_bits(b + 4, i / 32, true);
    }
    case WeightKind::q6_k: {
      const int high = b[128 + i / 128 * 32 + i % 32] >> 2 * (i / 32 % 4) & 3;
      const int q = nibble(b, i, 64) + 16 * high - 32;
      return half_of(b + 208) * static_cast<int8_t>(b[192 + i / 16]) * q;
    }
    case WeightKind::q2_k: {
      const int q = b[16 + i / 128 * 32 + i % 32] >> 2 * (i / 32 % 4) & 3;
      return half_of(b + 80) * (b[i / 16] & 15) * q - half_of(b + 82) * (b[i / 16] >> 4);
    }
    case WeightKind::q3_k: {
      const int j = i / 16, low = j < 8 ? b[96 + j] & 15 : b[88 + j] >> 4;
      const int scale = low + 16 * (b[104 + j % 4] >> 2 * (j / 4) & 3) - 32;
      const int q = b[32 + i / 128 * 32 + i % 32] >> 2 * (i / 32 % 4) & 3;
      return half_of(b + 108) * scale * (q - (b[i % 32] >> i / 32 & 1 ? 0 : 4));
    }
    case WeightKind::q5_0:
      return half_of(b) * (nibble(b + 6, i, 16) + 16 * (b[2 + i / 8] >> i % 8 & 1) - 16);
    case WeightKind::q5_1:
      return half_of(b) * (nibble(b + 8, i, 16) + 16 * (b[4 + i / 8] >> i % 8 & 1)) +
             half_of(b + 2);
    case WeightKind::iq4_nl:
      return half_of(b) * kIq4[nibble(b + 2, i, 16)];
    case WeightKind::iq4_xs: {
      const int j = i / 32, low = j % 2 ? b[4 + j / 2] >> 4 : b[4 + j / 2] & 15;
      const int scale = low + 16 * ((b[2] | b[3] << 8) >> 2 * j & 3) - 32;
      return half_of(b) * scale * kIq4[nibble(b + 8, i, 16)];
    }
    case WeightKind::mxfp4:
      return std::ldexp(kFp4[nibble(b + 1, i, 16)], b[0] - 127);
    case WeightKind::tq2_0:
      return half_of(b + 64) * ((b[i / 128 * 32 + i % 32] >> 2 * (i / 32 % 4) & 3) - 1);
    case WeightKind::q2_0:
    case WeightKind::pq2_0:
      return half_of(b) * (code_of(b + 2, i, 2) - 1);
    case WeightKind::q1_0:
      return half_of(b) * (2 * code_of(b + 2, i, 1) - 1);
    default:
      return zero_points(kind) ? half_of(b) * (code_of(b + 3, i, bits_of(kind)) - b[2]) : NAN;
  }
}

// Where the halves of a block are, and -1.
std::vector<int> halves_of(WeightKind kind) {
  switch (kind) {
    case WeightKind::q4_k:
    case WeightKind::q5_k:
    case WeightKind::q5_1:
      return {0, 2};
    case WeightKind::q6_k:
      return {208};
    case WeightKind::q2_k:
      return {80, 82};
    case WeightKind::q3_k:
      return {108};
    case WeightKind::iq1_m:
      return {48};
    case WeightKind::mxfp4:
      return {};
    case WeightKind::tq2_0:
      return {64};
    default:
      return {0};
  }
}

// Byte `at` of a block; with --unsigned one like it of which tiles multiply no negative byte: their
// bytes are codes less their zero or, of kinds with scales in bytes, these times their scale, which
// Q3_K takes negated.
uint8_t weight_byte(WeightKind kind, size_t at, uint8_t byte) {
  if (!harness::unsigned_bytes()) return byte;
  switch (kind) {
    case WeightKind::q3_k:
      if (at < 32) return 0xff;                           // codes 0 to 3
      return at >= 104 && at < 108 ? byte & 0x55 : byte;  // scales -32 to -1
    case WeightKind::q5_0:
      return at >= 2 && at < 6 ? 0xff : byte;  // codes 0 to 15
    case WeightKind::q6_k:
      if (at >= 128 && at < 192) return byte | 0xaa;  // codes 0 to 31
      return at >= 192 && at < 208 ? byte & 0x7f : byte;
    case WeightKind::iq4_nl:
      return at >= 2 ? byte | 0x88 : byte;  // the upper half of the table
    case WeightKind::iq4_xs:
      if (at == 2 || at == 3) return byte | 0xaa;  // scales 0 to 31
      return at >= 8 ? byte | 0x88 : byte;
    case WeightKind::iq3_s:
      return at >= 74 && at < 106 ? 0 : byte;  // no negative signs
    case WeightKind::iq3_xxs:
      return at < 66 ? byte : at % 4 == 1 ? byte & 0xf0 : 0;
    case WeightKind::iq2_s:
      return at >= 34 && at < 66 ? 0 : byte;
    case WeightKind::iq2_xs:
      return at >= 2 && at < 66 && at % 2 ? byte & 1 : byte;
    case WeightKind::iq2_xxs:
      return at < 2 || (at - 2) % 8 < 4 ? byte : at % 8 == 1 ? byte & 0xf0 : 0;
    case WeightKind::iq1_m:
      return at < 32 ? 0xff : at < 48 ? byte | 0x77 : byte;  // the entry of eight ones
    case WeightKind::mxfp4:
      return at >= 1 ? byte & 0x77 : byte;
    case WeightKind::tq2_0:
      return at < 64 ? byte | 0x55 : byte;  // codes 1 and 3
    case WeightKind::q2_0:
    case WeightKind::pq2_0:
      return at >= 2 ? byte | 0x55 : byte;
    case WeightKind::q1_0:
      return at >= 2 ? 0xff : byte;
    case WeightKind::w8z_g32:
    case WeightKind::w8z_g128:
      return at >= 3 ? byte | 0x80 : byte;  // codes 128 to 255
    default:
      return byte;
  }
}
// Writes a half of a block, of which IQ1_M has four bits in each of four bytes.
void put_half(WeightKind kind, uint8_t* to, float x) {
  const uint16_t h = harness::to_f16(x);
  if (kind != WeightKind::iq1_m) {
    std::memcpy(to, &h, 2);
    return;
  }
  for (int i = 0; i < 4; i++) {
    to[2 * i + 1] = static_cast<uint8_t>((to[2 * i + 1] & 15) | (h >> 4 * i & 15) << 4);
  }
}
// A zero point: any, or if all codes are `fill`, the one farthest from them.
uint8_t zero_point(WeightKind kind, int fill, Rng& rng) {
  const int most = bits_of(kind) == 8 ? 255 : 1 << bits_of(kind);
  const auto any = static_cast<int>(rng.below(most + 1));
  return static_cast<uint8_t>(fill < 0 ? any : fill < 128 ? most : 0);
}

struct Weights {
  Weights(const KernelTable& table, WeightKind kind_, int64_t n_, int64_t k_, int fill = -1)
      : kernel(table.linear[static_cast<int>(kind_)]),
        kind(kind_),
        n(n_),
        k(some_k(kind_, k_)),
        panels((n_ + kPanel - 1) / kPanel),
        row_size(source_row_bytes(only_source(kind_), k)),
        source(static_cast<size_t>(n_) * row_size),
        packed(static_cast<size_t>(panels) * kernel.panel_bytes(k)) {
    Rng rng(static_cast<uint64_t>(n * 1000 + k));
    const size_t block = block_shape(only_source(kind)).bytes;
    for (size_t i = 0; i < source.size(); i++) {
      const uint64_t byte = fill < 0 ? rng.bits() : static_cast<uint64_t>(fill);
      source[i] = weight_byte(kind, i % block, static_cast<uint8_t>(byte));
    }
    for (size_t at = 0; at < source.size(); at += block) {
      if (kind == WeightKind::mxfp4) source[at] = static_cast<uint8_t>(120 + rng.below(8));
      if (zero_points(kind)) source[at + 2] = zero_point(kind, fill, rng);
      bool first = true;
      for (int half : halves_of(kind)) {
        // Of extreme bytes: scales of 1 and no minimum, so that sums are exact in fp32.
        const float x = fill < 0 ? rng.uniform() * 0.05f : first ? 1.0f : 0.0f;
        put_half(kind, source.data() + at + static_cast<size_t>(half), x);
        first = false;
      }
    }
    for (int64_t p = 0; p < panels; p++) {
      const void* rows[kPanel];
      for (int64_t r = 0; r < kPanel; r++) {
        rows[r] = p * kPanel + r < n ? row(p * kPanel + r) : nullptr;
      }
      kernel.pack({rows, only_source(kind), k,
                   packed.data() + static_cast<size_t>(p) * kernel.panel_bytes(k)});
    }
  }
  const uint8_t* row(int64_t r) const { return source.data() + static_cast<size_t>(r) * row_size; }
  double value(int64_t r, int64_t i) const { return r < n ? source_value(kind, row(r), i) : 0.0; }
  PackedWeight view() const { return {packed.data(), kernel.panel_bytes(k), n, k, kind}; }

  const LinearKernel& kernel;
  WeightKind kind;
  int64_t n, k, panels;
  size_t row_size;
  Buffer<uint8_t> source, packed;
};

// Rows of a kind's format, `gap` bytes apart.
struct Inputs {
  Inputs(const Weights& w, int64_t m_, int extreme = 0, size_t gap = 0)
      : m(m_),
        k(w.k),
        group(w.kernel.act == ActFormat::q8g256 ? 256 : 32),
        padded(padded_width(w.kernel.act, w.k)),
        stride(row_bytes(w.kernel.act, w.k) + gap),
        data(static_cast<size_t>(m_) * stride) {
    const int64_t weights = block_shape(only_source(w.kind)).weights;
    const bool blocks = !zero_points(w.kind) && weights > 32;
    CHECK(w.kernel.act == (blocks ? ActFormat::q8g256 : ActFormat::q8g32));
    Rng rng(static_cast<uint64_t>(m * 100 + k));
    for (int64_t r = 0; r < m; r++) {
      for (int64_t g = 0; g < padded / group; g++) {
        std::vector<int32_t> sums(static_cast<size_t>(group / 16));
        for (int64_t i = 0; i < group; i++) {
          int64_t q = extreme ? extreme : rng.below(255) - 127;
          if (g * group + i >= k) q = 0;
          if (harness::unsigned_bytes()) q = std::abs(q);
          row(r)[g * group + i] = static_cast<uint8_t>(static_cast<int8_t>(q));
          sums[static_cast<size_t>(i / 16)] += static_cast<int32_t>(q);
        }
        const float scale = extreme ? 1.0f : rng.uniform() * 0.01f;
        std::memcpy(row(r) + padded + g * 4, &scale, 4);
        uint8_t* to = row(r) + padded + padded / group * 4;
        if (group == 32) {
          const int32_t sum = sums[0] + sums[1];
          std::memcpy(to + g * 4, &sum, 4);
          continue;
        }
        int16_t narrow[24];
        for (size_t i = 0; i < 16; i++) narrow[i] = static_cast<int16_t>(sums[i]);
        for (size_t i = 0; i < 8; i++) {
          narrow[16 + i] = static_cast<int16_t>(sums[2 * i] + sums[2 * i + 1]);
        }
        std::memcpy(to + g * kBlockSums, narrow, sizeof narrow);
      }
    }
  }
  uint8_t* row(int64_t r) { return data.data() + static_cast<size_t>(r) * stride; }
  double value(int64_t r, int64_t i) {
    float scale;
    std::memcpy(&scale, row(r) + padded + i / group * 4, 4);
    return static_cast<double>(scale) * static_cast<int8_t>(row(r)[i]);
  }
  int64_t m, k, group, padded;
  size_t stride;
  Buffer<uint8_t> data;
};

struct Output {
  Output(int64_t m, int64_t n)
      : stride(row_bytes(ActFormat::f32, n)), width(n), data(static_cast<size_t>(m) * stride) {
    std::memset(data.data(), 0x5a, data.size());
  }
  float* row(int64_t r) {
    return reinterpret_cast<float*>(data.data() + static_cast<size_t>(r) * stride);
  }
  bool same_row(Output& other, int64_t r) {
    return std::memcmp(row(r), other.row(r), static_cast<size_t>(width) * 4) == 0;
  }
  size_t stride;
  int64_t width;
  Buffer<uint8_t> data;
};

// Of `terms` 2, every two rows of x are the terms of one.
void run(const Weights& w, Inputs& x, Output& out, int64_t row0, int64_t m, int64_t panel0 = 0,
         int64_t panel1 = -1, const WorkSizes& sizes = {}, int terms = 1) {
  Buffer<uint8_t> scratch(kLinearScratch);
  std::memset(scratch.data(), 0xff, scratch.size());  // NaN: nothing may be read unwritten
  const PackedWeight view = w.view();
  LinearArgs a{};
  a.w = &view;
  a.x = x.row(row0 * terms);
  a.x_stride = x.stride * static_cast<size_t>(terms);
  a.terms = terms;
  a.m = m;
  a.panel0 = panel0;
  a.panel1 = panel1 < 0 ? w.panels : panel1;
  a.ep.out = {out.row(row0), out.stride, w.n, ActFormat::f32};
  a.scratch = scratch.data();
  a.sizes = sizes;
  w.kernel.run(a);
}

void check_against_reference(const KernelTable& table, WeightKind kind, int64_t m, int64_t n,
                             int64_t k, int fill = -1, int extreme = 0) {
  const Weights w(table, kind, n, k, fill);
  Inputs x(w, m, extreme);
  Output out(m, n);
  run(w, x, out, 0, m);
  std::vector<double> values(static_cast<size_t>(w.k)), inputs(static_cast<size_t>(m * w.k));
  for (int64_t r = 0; r < m; r++) {
    for (int64_t i = 0; i < w.k; i++) inputs[static_cast<size_t>(r * w.k + i)] = x.value(r, i);
  }
  for (int64_t c = 0; c < n; c++) {
    for (int64_t i = 0; i < w.k; i++) values[static_cast<size_t>(i)] = w.value(c, i);
    for (int64_t r = 0; r < m; r++) {
      double sum = 0, magnitude = 0;
      const double* row = inputs.data() + r * w.k;
      for (size_t i = 0; i < values.size(); i++) {
        sum += values[i] * row[i];
        magnitude += std::fabs(values[i] * row[i]);
      }
      // Codes with a minimum are not centered, so sums of them are larger than those of products.
      const double tolerance =
          4 * magnitude * static_cast<double>(w.k / 8 + 4) * std::ldexp(1, -24);
      CHECK_NEAR(static_cast<double>(out.row(r)[c]), sum,
                 extreme ? std::ldexp(magnitude, -20) : tolerance + 1e-6);
    }
  }
}

}  // namespace

KERNEL_TEST(blocks_take_little_more_than_the_file) {
  for_each_kind(k, kKinds, [&](WeightKind kind) {
    const BlockShape shape = block_shape(only_source(kind));
    const size_t file = shape.bytes * kPanel * 4 - (half_zeros(kind) ? kPanel * 2 : 0);
    const size_t bytes = k.linear[static_cast<int>(kind)].panel_bytes(shape.weights * 4);
    // Grids are written out: a sign, and 2 or 3 bits of a magnitude.
    const size_t percent = kind == WeightKind::iq1_m     ? 190
                           : kind == WeightKind::iq2_xxs ? 165
                           : has_grid(kind)              ? 145
                                                         : 105;
    CHECK(bytes >= file && bytes * 100 <= file * percent);
  });
}

KERNEL_TEST(blocks_keep_every_value) {
  for_each_kind(k, kKinds, [&](WeightKind kind) {
    const Weights w(k, kind, 37, 512);
    const PackedWeight view = w.view();
    std::vector<float> row(static_cast<size_t>(w.k));
    for (int64_t r = 0; r < w.panels * kPanel; r++) {
      w.kernel.row(view, r, row.data());
      for (int64_t i = 0; i < w.k; i++) {
        // Scale, product and minimum are rounded to fp32 one after another.
        const double expected = w.value(r, i);
        CHECK_NEAR(static_cast<double>(row[static_cast<size_t>(i)]), expected,
                   std::ldexp(std::fabs(expected) + 2, -22));
      }
    }
  });
}

KERNEL_TEST(blocks_convert_to_floats_as_their_rows_are_read) {
  for_each_kind(k, kKinds, [&](WeightKind kind) {
    const Weights w(k, kind, 16, 512);
    const LinearKernel& dense = k.linear[static_cast<int>(WeightKind::dense_f32)];
    Buffer<uint8_t> panel(dense.panel_bytes(w.k));
    const void* rows[kPanel];
    for (int64_t r = 0; r < kPanel; r++) rows[r] = w.row(r);
    dense.pack({rows, only_source(kind), w.k, panel.data()});
    const PackedWeight floats{panel.data(), dense.panel_bytes(w.k), 16, w.k, WeightKind::dense_f32};
    const PackedWeight view = w.view();
    std::vector<float> a(static_cast<size_t>(w.k)), b(a.size());
    for (int64_t r = 0; r < 16; r++) {
      w.kernel.row(view, r, a.data());
      dense.row(floats, r, b.data());
      CHECK(std::memcmp(a.data(), b.data(), a.size() * 4) == 0);
    }
  });
}

KERNEL_TEST(blocks_match_fp64_at_every_shape) {
  for_each_kind(k, kKinds, [&](WeightKind kind) {
    check_against_reference(k, kind, 1, 64, 512);
    check_against_reference(k, kind, 3, 16, 32);
    check_against_reference(k, kind, 13, 72, 288);
    check_against_reference(k, kind, 2, 33, 1536);
    for (int64_t m = 4; m <= 26; m += m < 13 ? 1 : 6) check_against_reference(k, kind, m, 36, 32);
  });
}

// The largest integer sums neither wrap around nor saturate: every product has the same sign.
KERNEL_TEST(blocks_of_extreme_bytes_keep_their_sums) {
  for_each_kind(k, kKinds, [&](WeightKind kind) {
    if (kind == WeightKind::mxfp4) return;  // its scales are not 1
    for (int extreme : {-127, 127}) {
      for (int byte : {0x00, 0x77, 0x80, 0xff}) {
        check_against_reference(k, kind, 1, 16, 32, byte, extreme);
        check_against_reference(k, kind, 9, 32, 32, byte, extreme);
        check_against_reference(k, kind, 25, 32, 32, byte, extreme);  // unpacked codes
      }
    }
  });
}

KERNEL_TEST(blocks_row_has_the_same_bits_in_every_division) {
  for_each_kind(k, kKinds, [&](WeightKind kind) {
    constexpr int64_t kMost = 33;
    const Weights w(k, kind, 16 * harness::fewer(11, 5) - 3, harness::fewer(1280, 1024));
    Inputs x(w, kMost);
    const auto compute = [&](Output& out, int64_t row0, int64_t m, int64_t panel0, int64_t panel1,
                             const WorkSizes& sizes) {
      run(w, x, out, row0, m, panel0, panel1, sizes);
    };
    harness::check_divisions<Output>(w, kMost, {1, 2, 3, 4, 5, 6, 7, 8, 9, 13}, compute);
  });
}

// A prompt's rows, which matrix tiles compute where there are some, against rows computed one by
// one, which they never do.
KERNEL_TEST(blocks_rows_of_a_prompt_have_the_bits_of_single_rows) {
  for_each_kind(k, kKinds, [&](WeightKind kind) {
    constexpr int64_t kMost = 77;
    const Weights w(k, kind, 16 * 5 - 3, harness::fewer(1280, 1024));
    Inputs x(w, kMost, 0, 192);
    Output single(kMost, w.n);
    for (int64_t r = 0; r < kMost; r++) run(w, x, single, r, 1);
    WorkSizes sizes[3];
    sizes[1].rows = 40;
    sizes[2].strip_bytes = 8 << 10;  // L2 is taken to hold 32 KB of rows, which is a few
    for (const WorkSizes& some : sizes) {
      for (int64_t m : {16, 17, 32, 33, 48, 77}) {
        Output out(kMost, w.n);
        run(w, x, out, kMost - m, m, 0, -1, some);
        for (int64_t r = kMost - m; r < kMost; r++) CHECK(single.same_row(out, r));
      }
    }
  });
}

KERNEL_TEST(blocks_rows_of_two_terms_have_the_sum_of_both) {
  for_each_kind(k, kKinds, [&](WeightKind kind) {
    constexpr int64_t kMost = 39;
    const Weights w(k, kind, 16 * 5 - 3, 512);
    Inputs x(w, 2 * kMost);
    Output single(2 * kMost, w.n);
    run(w, x, single, 0, 2 * kMost);
    for (int64_t m : {1, 2, 3, 8, 17, 39}) {
      Output out(kMost, w.n);
      run(w, x, out, 0, m, 0, -1, {}, 2);
      for (int64_t r = 0; r < m; r++) {
        for (int64_t c = 0; c < w.n; c++) {
          CHECK(out.row(r)[c] == single.row(2 * r)[c] + single.row(2 * r + 1)[c]);
        }
      }
    }
  });
}

KERNEL_TEST(blocks_keep_nan_and_infinity_in_their_row) {
  for_each_kind(k, kKinds, [&](WeightKind kind) {
    const Weights w(k, kind, 40, 256);
    Inputs x(w, 13);
    Output clean(13, w.n);
    run(w, x, clean, 0, 13);
    for (float bad : {NAN, INFINITY}) {
      std::memcpy(x.row(1) + x.padded, &bad, 4);
      for (int64_t m : {3, 13}) {
        Output out(13, w.n);
        run(w, x, out, 0, m);
        for (int64_t r = 0; r < m; r++) {
          if (r != 1) CHECK(clean.same_row(out, r));
        }
        for (int64_t c = 0; c < w.n; c++) CHECK(!std::isfinite(out.row(1)[c]));
      }
    }
  });
}
