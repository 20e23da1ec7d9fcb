// AMX tiles for the kinds with a scale for every group of 32 to 256 elements of K.
// The sums of a group are stored from the AMX tiles to memory. Vector code multiplies them
// by the scales and adds them to fp32 sums, while AMX multiplies the next groups.
#pragma once
#include "kernels/linear/tiles/unpack.h"

namespace CPUSERVE_NS {
namespace {

template <int RT, int NP>
CPUSERVE_INLINE void store_dots(DotTiles& dots) {
  tile_store<0>(dots[0], kTileLineBytes);
  if constexpr (NP == 2) tile_store<1>(dots[1], kTileLineBytes);
  if constexpr (RT == 2) tile_store<2>(dots[2], kTileLineBytes);
  if constexpr (RT == 2 && NP == 2) tile_store<3>(dots[3], kTileLineBytes);
}

// A kind with groups of Raw::kGroup elements of K. Line numbers (line0) count unpacked lines.
template <class Raw>
struct GroupTiles {
  using Vectors = typename Raw::Vectors;
  using FewRows = GroupTiles<typename Raw::FewRows>;  // the kind to use for up to kJobRows rows
  static constexpr ActFormat kAct = Raw::kAct;
  static constexpr bool kGroups = true;
  static constexpr int kLines = Raw::kLines;  // lines of a group
  static constexpr int kShapeLines = kLines < kTileLines ? kLines : kTileLines;
  static constexpr int kVectorRows = Raw::kVectorRows;
  static constexpr int64_t kBlockLines = kLines < kPairBlockLines ? kPairBlockLines : kLines;
  static_assert(kBlockLines % kLines == 0, "a block has whole groups");
  static int64_t lines(int64_t k) { return Raw::lines(k); }

  // Unpacks lines [line0, line1) of a panel to signed bytes or bf16, at `to`.
  static void unpack(const PackedWeight& w, int64_t panel, int64_t line0, int64_t line1,
                     uint8_t* to) {
    const uint8_t* from = w.data + static_cast<size_t>(panel) * w.panel_bytes;
    for (int64_t g = line0 / kLines; g * kLines < line1; g++, to += kLines * kTileLineBytes) {
      Raw::unpack(from, g, w.k, to);
    }
  }

  // Adds the sums of groups [g, g + G) to the fp32 sums of 16 rows (one AMX tile) and NP panels,
  // with the operations of linear/group.h and linear/channel.h, so that AMX and vector kernels
  // return the same bits. With G = 2, each fp32 sum is loaded and stored once for both groups.
  template <int NP, int G>
  static __attribute__((noinline)) void add_rows(const TileJob& t, int64_t g, int row_tile,
                                                 const DotTiles* dots) {
    constexpr int kWays = kPanel / kLanes;
    F scale[G][NP][kWays], least[G][NP][kWays];
    for (int j = 0; j < G; j++) {
      for (int p = 0; p < NP; p++) {
        const uint8_t* panel = t.w + static_cast<size_t>(p) * t.panel_bytes;
        for (int v = 0; v < kWays; v++) {
          if constexpr (Raw::kScales) {
            Raw::factors(panel, g + j, v * kLanes, &scale[j][p][v], &least[j][p][v]);
          }
        }
      }
    }
    const int row0 = row_tile * kTileRows16;
    const int rows = t.rows - row0 < kTileRows16 ? t.rows - row0 : kTileRows16;
    const uint8_t* of_row = row_of(t, row0) + t.x_padded;
    const int64_t to_sums = t.x_padded / Raw::kGroup * 4;
    // Local copies, because the compiler cannot know that a store
    // to c does not change the members of t.
    const size_t x_stride = t.x_stride;
    const int64_t c_stride = t.c_stride;
    float* c = t.c + row0 * c_stride;
    for (int r = 0; r < rows; r++, of_row += x_stride, c += c_stride) {
      F s[G], m[G];
      I of_zeros[G];
      for (int j = 0; j < G; j++) {
        const auto* sums = reinterpret_cast<const int32_t*>(of_row + to_sums + g * 4);
        if constexpr (!Raw::kFloats) {
          s[j] = set1(read_as<float>(of_row + (g + j) / Raw::kGroupsOfScale * 4));
        }
        if constexpr (Raw::kLeast) m[j] = mul(s[j], to_float(iload1(sums + j)));
        if constexpr (Raw::kAsStored) of_zeros[j] = shl<7>(iload1(sums + j));
      }
      for (int p = 0; p < NP; p++) {
        for (int v = 0; v < kWays; v++) {
          float* to = c + p * kPanel + v * kLanes;
          F sum = load(to);
          for (int j = 0; j < G; j++) {
            const int32_t* dot = dots[j][row_tile * kJobColumns + p] + r * kPanel + v * kLanes;
            const auto* bits = reinterpret_cast<const float*>(dot);
            if constexpr (Raw::kFloats) {
              sum = fma(load(bits), scale[j][p][v], sum);
            } else {
              I product = load_bits(bits);
              if constexpr (Raw::kAsStored) product = isub(product, of_zeros[j]);
              sum = fma(to_float(product), Raw::kScales ? mul(scale[j][p][v], s[j]) : s[j], sum);
            }
            if constexpr (Raw::kLeast) sum = Raw::add_least(least[j][p][v], m[j], sum);
          }
          store(to, sum);
        }
      }
    }
  }

  // Loads the rows and the weights of a job to AMX tiles, from line `line` of K on.
  template <int RT, int NP>
  static __attribute__((always_inline)) inline void load_tiles(const TileJob& t, int64_t line) {
    const uint8_t* w = t.lines + (line - t.line0) * kTileLineBytes;
    size_t next_panel = sizeof t.scratch->lines[0];
    if constexpr (Raw::kAsStored) {
      const auto stored = static_cast<int64_t>((t.panel_bytes - kChannelScales) / kTileLineBytes);
      if ((line / kLines + 1) * kLines <= stored) {  // unless `line` is in the padded last group
        w = t.w + line * kTileLineBytes;
        next_panel = t.panel_bytes;
      }
    }
    load_operands<RT, NP, NP == 2>(t.x + line * 4, t.x_stride, w, w + next_panel, kTileLineBytes);
  }

  // The groups with sums that are stored from AMX tiles to memory,
  // but not yet added to the fp32 sums.
  struct Waiting {
    int64_t g;
    int groups;  // number of such groups, from group g on; 0: none
    const DotTiles* dots;
  };
  template <int NP>
  static __attribute__((always_inline)) inline void add(const TileJob& t, const Waiting& w,
                                                        int row_tile) {
    if (w.groups == 2) add_rows<NP, 2>(t, w.g, row_tile, w.dots);
    if (w.groups == 1) add_rows<NP, 1>(t, w.g, row_tile, w.dots);
  }

  template <int RT, int NP>
  static __attribute__((noinline)) void job(const TileJob& t) {
    if (!t.resume) {
      for (int r = 0; r < t.rows; r++) {
        for (int i = 0; i < NP * kPanel; i += kLanes) store(t.c + r * t.c_stride + i, zero());
      }
    }
    const int64_t group0 = t.line0 / kLines, group1 = (t.line1 + kLines - 1) / kLines;
    Waiting before = {0, 0, nullptr};
    int turn = 0;
    int64_t line = t.line0;
    load_tiles<RT, NP>(t, line);
    for (int64_t g = group0; g < group1; g += 2, turn ^= 1) {
      const int groups = group1 - g < 2 ? 1 : 2;
      DotTiles* dots = t.scratch->dots[turn];
      for (int j = 0; j < groups; j++) {
        zero_sums<RT, NP>();
        // The AMX tiles of the next product are loaded before a group is added to the fp32 sums.
        // Prefetches come after the product:
        // before it, they would take the fill buffers that the loads of its AMX tiles need.
        for (int64_t end = line + kLines; line < end && line < t.line1;) {
          multiply_operands<typename Raw::Product, RT, NP>();
          t.fetch->step();
          line += kShapeLines;
          if (line < t.line1) load_tiles<RT, NP>(t, line);
        }
        // Vector code adds the two previous groups while AMX multiplies the next two groups:
        // rows 0 to 15 during the first of the next groups, the other rows during the second one.
        // So there are few instructions between two products.
        if (RT == 1 || groups == 1) {
          if (j == 0) add<NP>(t, before, 0);
          if (RT == 2) add<NP>(t, before, 1);
        } else {
          add<NP>(t, before, j);
        }
        store_dots<RT, NP>(dots[j]);
      }
      before = {g, groups, dots};
    }
    for (int i = 0; i < RT; i++) add<NP>(t, before, i);
    if constexpr (!Raw::kScales) {
      if (t.last) multiply_channels<NP>(t);
    }
  }

  // Only for w8_channel_g128: multiplies the finished sums by the scales of the columns.
  template <int NP>
  static void multiply_channels(const TileJob& t) {
    for (int p = 0; p < NP; p++) {
      const uint8_t* scales = t.w + static_cast<size_t>(p + 1) * t.panel_bytes - kChannelScales;
      for (int r = 0; r < t.rows; r++) {
        float* c = t.c + r * t.c_stride + p * kPanel;
        for (int i = 0; i < kPanel; i += kLanes) {
          store(c + i, mul(load(c + i), load(reinterpret_cast<const float*>(scales) + i)));
        }
      }
    }
  }
};

}  // namespace
}  // namespace CPUSERVE_NS
