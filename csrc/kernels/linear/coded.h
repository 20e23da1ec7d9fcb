// Weight kinds with float codes and a scale for each group of K: FP8, and 4-bit codes with a table.
//
// The codes of a group are widened to bf16 lines (the layout of dense_bf16)
// in scratch that stays in the caches, and the tiles of dense_bf16 multiply these lines.
// The sum of a group starts from zero, and is then added to the fp32 sum f of the output element:
//
//   f = fma(sum, scale, f)      per group in ascending order
//
// A weight kind is a class C that defines
//   kGroup                 elements of a group, a multiple of 32; the last group may have fewer
//   bytes(n)               the bytes that a group of n elements has in a panel
//   scale(group, column)   the scales of columns [column, column + kLanes)
//   widen(group, n, to)    writes n / 2 lines of 32 bf16; with kFetch it prefetches from `ahead`
//   pack_column(row, g, n, column, group)   packs group g of a source row
//   read(row, k0, n, to)   elements [k0, k0 + n) of a source row as fp32
#pragma once
#include "kernels/linear/dense.h"
#include "kernels/linear/driver.h"
#include "kernels/linear/source.h"

namespace CPUSERVE_NS {
namespace {

constexpr int kLineCodes = 2 * kPanel;  // codes of a line: two elements of K for each of 16 columns
constexpr int kWideLine = kLineCodes * 2;  // bytes of a line that is widened to bf16

template <bool kFetch>
CPUSERVE_INLINE void fetch_ahead(const uint8_t* p, int64_t ahead) {
  if constexpr (kFetch) prefetch(p + ahead);
}

// e4m3_g128: { fp32 scale[16]; u8 q[n / 2][16][2] }. widen() writes 1/256 of the value of a code,
// so the packed scale is 256 times the scale of the checkpoint.
struct F8Codes {
  static constexpr int kGroup = kF8Group, kScales = kPanel * 4;
  static constexpr float kWidened = 256;
  static constexpr int64_t bytes(int64_t n) { return kScales + n * kPanel; }
  CPUSERVE_INLINE F scale(const uint8_t* group, int column) {
    return load(reinterpret_cast<const float*>(group) + column);
  }
  template <bool kFetch>
  CPUSERVE_INLINE void widen(const uint8_t* group, int64_t n, uint16_t* to, int64_t ahead) {
    const uint8_t* q = group + kScales;
    for (int64_t line = 0; line < n / 2; line += 2) {  // 64 bytes
      fetch_ahead<kFetch>(q, ahead);
#pragma GCC unroll 16
      for (int v = 0; v < 2 * kVecs; v++, q += 2 * kLanes, to += 2 * kLanes) widen_e4m3(q, to);
    }
  }
  static void read(const void* row, int64_t k0, int n, float* out) {
    read_e4m3(static_cast<const BlockE4m3*>(row), k0, n, out);
  }
  static void pack_column(const uint8_t* row, int64_t g, int64_t n, int column, uint8_t* group) {
    const auto* block = row ? reinterpret_cast<const BlockE4m3*>(row) + g : nullptr;
    const float scale = row ? block->scale * kWidened : 0.0f;
    memcpy(group + column * 4, &scale, 4);
    uint8_t* q = group + kScales + column * 2;
    for (int64_t i = 0; i < n; i++) q[i / 2 * kLineCodes + i % 2] = row ? block->q[i] : uint8_t{0};
  }
};

// nf4_g64, fp4_g64: { fp16 scale[16]; u8 q[32][16] }; q[i]: k = 2 i (low nibble), 2 i + 1 (high).
template <class Table>
struct TableCodes64 {
  static constexpr int kGroup = 64, kScales = kPanel * 2;
  static constexpr int64_t bytes(int64_t n) { return kScales + n / 2 * kPanel; }
  CPUSERVE_INLINE F scale(const uint8_t* group, int column) {
    const auto* scales = reinterpret_cast<const uint16_t*>(group);
    return mul(load_f16(scales + column), set1(Table::kUnit));
  }
  template <bool kFetch>
  CPUSERVE_INLINE void widen(const uint8_t* group, int64_t n, uint16_t* to, int64_t ahead) {
    const Entries entries = load_entries(Table::kEntries);
    const uint8_t* q = group + kScales;
    for (int64_t line = 0; line < n / 2; line += 4) {  // 64 bytes
      fetch_ahead<kFetch>(q, ahead);
#pragma GCC unroll 16
      for (int v = 0; v < 4 * kVecs; v++, q += kLanes, to += 2 * kLanes) {
        store_pairs(to, lookup_pairs(entries, q));
      }
    }
  }
  static void read(const void* row, int64_t k0, int n, float* out) {
    read_table<Table>(static_cast<const Block4*>(row), k0, n, out);
  }
  static void pack_column(const uint8_t* row, int64_t g, int64_t n, int column, uint8_t* group) {
    const auto* block = row ? reinterpret_cast<const Block4*>(row) + g : nullptr;
    const uint16_t scale = row ? block->d : uint16_t{0};
    memcpy(group + column * 2, &scale, 2);
    uint8_t* q = group + kScales + column;
    for (int64_t i = 0; i < n / 2; i++) q[i * kPanel] = row ? block->q[i] : uint8_t{0};
  }
};

// nvfp4: { fp32 scale[16]; n / 16 of { E4M3 s[16]; u8 q[8][16] } }.
// The product of a code's value and s has at most 6 significant bits, so it is exact in bf16.
struct Nvfp4Codes {
  static constexpr int kGroup = 256, kScales = kPanel * 4, kSmall = 16;
  static constexpr int64_t kSmallBytes = kPanel + kSmall / 2 * kPanel;
  static constexpr float kWidened = 256;
  static constexpr int64_t bytes(int64_t n) { return kScales + n / kSmall * kSmallBytes; }
  CPUSERVE_INLINE F scale(const uint8_t* group, int column) {
    return load(reinterpret_cast<const float*>(group) + column);
  }
  template <bool kFetch>
  CPUSERVE_INLINE void widen(const uint8_t* group, int64_t n, uint16_t* to, int64_t ahead) {
    const Entries entries = load_entries(kE2m1Entries);
    const uint8_t* small = group + kScales;
    for (int64_t i = 0; i < n; i += kSmall, small += kSmallBytes) {
      fetch_ahead<kFetch>(small, ahead);
      fetch_ahead<kFetch>(small + kSmallBytes / 2, ahead);
      F scales[kVecs];
      for (int v = 0; v < kVecs; v++) scales[v] = load_e4m3(small + v * kLanes);
      const uint8_t* q = small + kPanel;
#pragma GCC unroll 8
      for (int line = 0; line < kSmall / 2; line++) {
#pragma GCC unroll 16
        for (int v = 0; v < kVecs; v++, q += kLanes, to += 2 * kLanes) {
          const P x = lookup_pairs(entries, q);
          store_pairs(to, interleave_top(mul(even(x), scales[v]), mul(odd(x), scales[v])));
        }
      }
    }
  }
  static void read(const void* row, int64_t k0, int n, float* out) {
    read_nvfp4(static_cast<const uint8_t*>(row), k0, n, out);
  }
  static void pack_column(const uint8_t* row, int64_t g, int64_t n, int column, uint8_t* group) {
    const float scale = row ? read_as<float>(row) * kWidened : 0.0f;
    memcpy(group + column * 4, &scale, 4);
    const auto* blocks = reinterpret_cast<const BlockNvfp4*>(row ? row + 4 : nullptr);
    for (int64_t i = 0; i < n / kSmall; i++) {
      uint8_t* small = group + kScales + i * kSmallBytes + column;
      const BlockNvfp4 block = row ? blocks[g * kGroup / kSmall + i] : BlockNvfp4{};
      *small = block.scale;
      for (int j = 0; j < kSmall / 2; j++) small[(1 + j) * kPanel] = block.q[j];
    }
  }
};

using WideTiles = Dense<Bf16Element>;
constexpr int kMostCodedGroup = 256;
constexpr int kWideApart = 16;  // floats between two widened rows, so that they share no sets of L1
constexpr int64_t kMostWideLines = 1024;  // most widened lines of a panel: 256 KB for a strip
// The scratch memory of a call of run_coded.
struct CodedScratch {
  float sums[kSumsFloats];
  float part[WideTiles::kHalfRows * kStripPanels * kPanel];  // the sums of one group
  float rows[WideTiles::kHalfRows * (kMostCodedGroup + kWideApart)];
  alignas(64) uint16_t lines[kStripPanels][kMostWideLines * kLineCodes];
};
static_assert(sizeof(CodedScratch) <= kLinearScratch, "the scratch of a call holds all of it");

template <class C>
CPUSERVE_INLINE int64_t groups_of(int64_t k) {
  return (k + C::kGroup - 1) / C::kGroup;
}
template <class C>
CPUSERVE_INLINE int64_t group_size(int64_t k, int64_t g) {
  const int64_t left = k - g * C::kGroup;
  return left < C::kGroup ? left : int64_t{C::kGroup};
}

// Returns the number of groups of a K block, in linears with many rows.
// The widened lines of such a K block take about as many bytes as a K block of dense_bf16.
template <class C>
CPUSERVE_INLINE int64_t block_groups(int64_t k, const WorkSizes& sizes) {
  const int64_t given = sizes.strip_bytes / (kStripPanels * kWideLine);
  const int64_t lines = given < kMostWideLines ? given : kMostWideLines;
  const int64_t most = lines / (C::kGroup / 2), all = groups_of<C>(k);
  const int64_t blocks = most < 1 ? all : (all + most - 1) / most;
  return (all + blocks - 1) / blocks;
}

// Groups [g0, g1) of K in some panels. CodedScratch::lines has the widened lines of these groups.
struct CodedPart {
  int64_t panel0;
  int panels;
  int64_t g0, g1;
};

// Multiplies the sums at `part`, which belong to group g, by the scales of the columns,
// and adds the products to the fp32 sums of a tile at `f`.
template <class C>
CPUSERVE_INLINE void add_coded(const LinearArgs& a, const CodedPart& b, int64_t g, int rows,
                               const float* part, float* f) {
  constexpr int kStride = sums_stride<false>();
  for (int p = 0; p < b.panels; p++) {
    const uint8_t* group =
        a.w->data + static_cast<size_t>(b.panel0 + p) * a.w->panel_bytes + g * C::bytes(C::kGroup);
    for (int v = 0; v < kVecs; v++) {
      const F scale = C::scale(group, v * kLanes);
      const int at = p * kPanel + v * kLanes;
      for (int r = 0; r < rows; r++) {
        float* to = f + r * kStride + at;
        const F before = g ? load(to) : zero();
        store(to, fma(load(part + r * kStride + at), scale, before));
      }
    }
  }
}

// Runs the tiles of rows [row, row + rows). A tile has at most kRows rows and kPanels panels.
// `f` points to the fp32 sums of rows [row, row + rows).
template <class C, int kRows, int kPanels>
CPUSERVE_INLINE void coded_tiles(const LinearArgs& a, CodedScratch& s, const CodedPart& b,
                                 int64_t row, int64_t rows, float* f) {
  constexpr int kStride = sums_stride<false>();
  const int64_t tiles = (rows + kRows - 1) / kRows, base = rows / tiles, longer = rows % tiles;
  LinearTile t;
  t.x_padded = padded_width(ActFormat::bf16, a.w->k);
  t.panel_bytes = sizeof s.lines[0];
  t.x_u0 = t.u0 = 0;
  t.resume = false;
  t.last = true;
  t.fetch_panels = 0;  // no prefetches, because the lines are in the caches
  for (int64_t i = 0; i < tiles; i++) {
    const int high = static_cast<int>(base + (i < longer));
    for (int64_t g = b.g0; g < b.g1; g++) {
      const int64_t n = group_size<C>(a.w->k, g);
      t.x = static_cast<const uint8_t*>(a.x) + static_cast<size_t>(row) * a.x_stride +
            g * C::kGroup * 2;
      t.x_stride = a.x_stride;
      if constexpr (WideTiles::kWidens) {
        constexpr int64_t kWidth = C::kGroup + kWideApart;
        for (int r = 0; r < high; r++) {
          const auto* from = reinterpret_cast<const uint16_t*>(t.x + r * a.x_stride);
          for (int64_t e = 0; e < n; e += kLanes) {
            store(s.rows + r * kWidth + e, load_bf16(from + e));
          }
        }
        t.x = reinterpret_cast<const uint8_t*>(s.rows);
        t.x_stride = kWidth * sizeof(float);
      }
      t.split = t.u1 = t.fetch_every = n / 2;
      for (int p = 0, np; p < b.panels; p += np) {
        np = b.panels - p >= kPanels ? kPanels : kPanels > 2 && b.panels - p > 1 ? 2 : 1;
        t.w = reinterpret_cast<const uint8_t*>(s.lines[p] + (g - b.g0) * C::kGroup * kPanel);
        t.ahead0 = t.w;
        t.c = s.part + p * kPanel;
        if (np == 1) {
          call_tile<WideTiles, false, 1, 0, kRows>(high, t);
        } else if (np == kPanels) {
          call_tile<WideTiles, false, kPanels, 0, kRows>(high, t);
        } else if constexpr (kPanels > 2) {
          call_tile<WideTiles, false, 2, 0, kRows>(high, t);
        }
      }
      add_coded<C>(a, b, g, high, s.part, f);
    }
    row += high;
    f += high * kStride;
  }
}

template <class C>
void run_coded(const LinearArgs& a) noexcept {
  const PackedWeight& w = *a.w;
  auto& s = *static_cast<CodedScratch*>(a.scratch);
  const bool plain = plain_f32(a.ep);
  const int64_t groups = groups_of<C>(w.k);
  // For few rows, a K block is one group: tiles use its widened lines while these are still in L1.
  const int64_t step = a.m <= WideTiles::kRows ? 1 : block_groups<C>(w.k, a.sizes);
  for (int64_t row0 = 0; row0 < a.m; row0 += a.sizes.rows) {
    const int64_t rows = a.m - row0 < a.sizes.rows ? a.m - row0 : a.sizes.rows;
    CodedPart b;
    for (b.panel0 = a.panel0; b.panel0 < a.panel1; b.panel0 += kStripPanels) {
      const int64_t left = a.panel1 - b.panel0;
      b.panels = static_cast<int>(left < kStripPanels ? left : kStripPanels);
      for (b.g0 = 0; b.g0 < groups; b.g0 = b.g1) {
        b.g1 = b.g0 + step < groups ? b.g0 + step : groups;
        for (int p = 0; p < b.panels; p++) {
          const uint8_t* panel = w.data + static_cast<size_t>(b.panel0 + p) * w.panel_bytes;
          for (int64_t g = b.g0; g < b.g1; g++) {
            C::template widen<true>(panel + g * C::bytes(C::kGroup), group_size<C>(w.k, g),
                                    s.lines[p] + (g - b.g0) * C::kGroup * kPanel,
                                    a.sizes.ahead_bytes / kStripPanels);
          }
        }
        if constexpr (WideTiles::kHalfRows > WideTiles::kRows) {
          if (b.panels <= 2) {
            coded_tiles<C, WideTiles::kHalfRows, 2>(a, s, b, row0, rows, s.sums);
            continue;
          }
        }
        coded_tiles<C, WideTiles::kRows, WideTiles::kPanels>(a, s, b, row0, rows, s.sums);
      }
      finish(a.ep, plain, row0, static_cast<int>(rows), b.panel0, b.panels, s.sums,
             sums_stride<false>());
    }
  }
}

template <class C>
size_t coded_panel_bytes(int64_t k) noexcept {
  const int64_t last = groups_of<C>(k) - 1;
  return static_cast<size_t>(last * C::bytes(C::kGroup) + C::bytes(group_size<C>(k, last)));
}

template <class C>
void pack_coded(const PackArgs& a) noexcept {
  auto* to = static_cast<uint8_t*>(a.panel);
  for (int64_t g = 0; g < groups_of<C>(a.k); g++, to += C::bytes(C::kGroup)) {
    for (int r = 0; r < kPanel; r++) {
      C::pack_column(static_cast<const uint8_t*>(a.rows[r]), g, group_size<C>(a.k, g), r, to);
    }
  }
}

template <class C>
void coded_row(const PackedWeight& w, int64_t n, float* out) noexcept {
  const int64_t column = n % kPanel;
  const uint8_t* group = w.data + static_cast<size_t>(n / kPanel) * w.panel_bytes;
  for (int64_t g = 0; g < groups_of<C>(w.k); g++, group += C::bytes(C::kGroup)) {
    alignas(64) uint16_t lines[C::kGroup * kPanel];
    const int64_t size = group_size<C>(w.k, g);
    C::template widen<false>(group, size, lines, 0);
    float scales[kPanel];
    for (int v = 0; v < kVecs; v++) store(scales + v * kLanes, C::scale(group, v * kLanes));
    for (int64_t i = 0; i < size; i++, out++) {
      *out = Bf16Element::to_float(lines[i / 2 * kLineCodes + column * 2 + i % 2]) * scales[column];
    }
  }
}

template <class C>
int64_t coded_block_k(int64_t k, const WorkSizes& sizes) noexcept {
  const int64_t block = block_groups<C>(k, sizes) * C::kGroup;
  return block < k ? block : k;
}

template <class C>
constexpr LinearKernel coded_kernel() {
  static_assert(C::kGroup <= kMostCodedGroup, "lines of a group fit the scratch");
  return {ActFormat::bf16,
          coded_panel_bytes<C>,
          pack_coded<C>,
          run_coded<C>,
          coded_row<C>,
          WideTiles::kRows,
          WideTiles::kPanels * kPanel,
          WideTiles::kPanels,
          WideTiles::kRows,
          coded_block_k<C>};
}

}  // namespace
}  // namespace CPUSERVE_NS
