// AMX tiles for the GGUF kinds with blocks of 256 weights.
// Each weight is unpacked to its code times the integer scale of its sub-block (16 or 32 weights).
// The sum over a whole block is then multiplied by only one float scale.
#pragma once
#include "kernels/linear/tiles/groups.h"

namespace CPUSERVE_NS {
namespace {

// A GGUF kind with blocks of 256. Line numbers (such as line0) count lines of 64 weights,
// as if a weight took one byte, although most kinds unpack a weight to two bytes.
template <class G>
struct BlockTiles {
  using W = Planes<G>;
  using Vectors = PlaneKind<W>;
  using FewRows = BlockTiles;
  static constexpr ActFormat kAct = Vectors::kAct;
  static constexpr bool kGroups = true;
  static constexpr int kVectorRows = kPlaneVectorRows, kShapeLines = kTileLines;
  static constexpr int kUnitLines = W::kUnit / 4;
  // A code times its scale needs 16 bits (kWide), or only one byte if the largest one fits.
  // In Q3_K these products are from -124 to 128, so a signed byte stores the negative product.
  static constexpr bool kWide = !W::kFitsByte;
  static constexpr bool kNegated = !kWide && G::kZero != 0;
  static constexpr int kBytes = kWide ? 2 : 1;
  static constexpr int64_t kBlockLines = kGroupBlockLines / kBytes;
  static_assert(kBlockLines % kUnitLines == 0, "a block has whole units");
  static int64_t lines(int64_t k) { return Vectors::units(k) * kUnitLines; }

  typedef int16_t LineWords __attribute__((vector_size(64), aligned(1), may_alias));
  typedef uint16_t LineBits __attribute__((vector_size(64), aligned(1), may_alias));
  typedef int32_t LineInts __attribute__((vector_size(64), aligned(1), may_alias));

  // Returns a line with the scale of each column of a sub-block as two equal words of 16 bits,
  // because the four bytes of a column in a line are two such words.
  CPUSERVE_INLINE LineWords scale_line(const uint8_t* unit, int64_t sub) {
    alignas(64) int32_t scales[kPanel];
    for (int column = 0; column < kPanel; column += kLanes) {
      const Q words = W::scale_words(unit, sub / 2, column);
      store_bits(reinterpret_cast<float*>(scales + column),
                 sub % 2 ? odd_words(words) : even_words(words));
    }
    const LineInts x = *reinterpret_cast<const LineInts*>(scales);
    return (LineWords)((x << 16) | (x & 0xffff));
  }
  // Multiplies the codes of quads [kQuad, kEnd) of a group by their scale and writes the products.
  // A quad is 4 consecutive codes of each column of the panel. With kWide a product has two bytes:
  // the high bytes are written to `to`, and the low bytes after all high bytes of the unit.
  // Without kWide a product has one byte, which is written to `to`.
  template <int kQuad, int kEnd>
  CPUSERVE_INLINE void put_quads(const uint8_t* from, LineWords scale, LineWords of_zero,
                                 uint8_t* to) {
    if constexpr (kQuad < kEnd) {
      const LineWords x = (LineWords)quad_line<W, kQuad>(from);
      const LineWords upper = (LineWords)(LineInts{} + static_cast<int32_t>(0xff00ff00));
      LineWords even = (x & 0xff) * scale, odd = (LineWords)((LineBits)x >> 8) * scale;
      if constexpr (G::kZero != 0) {
        even -= of_zero;
        odd -= of_zero;
      }
      if constexpr (kNegated) {
        even = -even;
        odd = -odd;
      }
      const LineWords low = (even & ~upper) | (LineWords)((LineBits)odd << 8);
      if constexpr (kWide) {
        put_line(to, (LineBytes)((LineWords)((LineBits)even >> 8) | (odd & upper)));
        to += kUnitLines * kTileLineBytes;
      }
      put_line(to, (LineBytes)low);
      put_quads<kQuad + 1, kEnd>(from, scale, of_zero,
                                 to + (1 - (kWide ? kUnitLines : 0)) * kTileLineBytes);
    }
  }
  // Unpacks lines [line0, line1) of a panel, which are whole units of 256 weights a column.
  static void unpack(const PackedWeight& w, int64_t panel, int64_t line0, int64_t line1,
                     uint8_t* to) {
    const uint8_t* unit =
        w.data + static_cast<size_t>(panel) * w.panel_bytes + line0 / kUnitLines * W::kUnitBytes;
    for (int64_t line = line0; line < line1; line += kUnitLines, unit += W::kUnitBytes) {
      const uint8_t* from = unit + W::kHeader;
      for (int64_t g = 0; g < W::kGroups; g++, from += W::kLines * 64) {
        constexpr int kQuads = W::kSub / 4;
        constexpr int16_t kZero = G::kZero;
        LineWords scale = scale_line(unit, W::kSub == 32 ? g : 2 * g);
        uint8_t* group = to + g * 8 * kTileLineBytes;
        put_quads<0, kQuads>(from, scale, scale * kZero, group);
        if constexpr (kQuads == 4) {
          scale = scale_line(unit, 2 * g + 1);
          put_quads<4, 8>(from, scale, scale * kZero, group + 4 * kTileLineBytes);
        }
      }
      to += kBytes * kUnitLines * kTileLineBytes;
    }
  }

  // The integer sums of a unit that are in memory but not yet added to the fp32 sums:
  // with kWide the sums of one panel's high bytes and the sums of its low bytes,
  // otherwise the sums of all panels of a job.
  struct Waiting {
    int64_t unit;
    int panel;             // number of the panel in the job
    const DotTiles* dots;  // the integer sums; nullptr: there are none
  };

  // Adds the integer sums of `waiting` to the fp32 sums of one tile of 16 rows,
  // with the same operations as PlaneBlocks in linear/planes.h.
  template <int NP>
  static __attribute__((noinline)) void add_rows(const TileJob& t, const Waiting& waiting,
                                                 int row_tile) {
    constexpr int kWays = kPanel / kLanes, kPanels = kWide ? 1 : NP;
    const int row0 = row_tile * kTileRows16;
    const int rows = t.rows - row0 < kTileRows16 ? t.rows - row0 : kTileRows16;
    const size_t x_stride = t.x_stride;
    const int64_t c_stride = t.c_stride;
    const uint8_t* scales = row_of(t, row0) + t.x_padded;
    const uint8_t* sums =
        scales + t.x_padded / 256 * 4 + waiting.unit * kBlockSums + (W::kSub == 32 ? 32 : 0);
    scales += waiting.unit * 4;
    for (int p = 0; p < kPanels; p++) {
      const uint8_t* unit = t.w + static_cast<size_t>(waiting.panel + p) * t.panel_bytes +
                            waiting.unit * W::kUnitBytes;
      const int32_t* dots = (*waiting.dots)[row_tile * kJobColumns + p];
      constexpr int64_t kNext = kTileRows16 * kPanel;  // from the high-byte to the low-byte sums
      for (int v = 0; v < kWays; v++) {
        F scale, least;
        W::factors(unit, v * kLanes, &scale, &least);
        Q words[W::kMin ? W::kSubs / 2 : 1];
        if constexpr (W::kMin) {
          for (int i = 0; i < W::kSubs / 2; i++) words[i] = W::least_words(unit, i, v * kLanes);
        }
        float* c = t.c + row0 * c_stride + (waiting.panel + p) * kPanel + v * kLanes;
        const auto* dot = reinterpret_cast<const float*>(dots) + v * kLanes;
        for (int r = 0; r < rows; r++, c += c_stride, dot += kPanel) {
          const size_t row = static_cast<size_t>(r) * x_stride;
          I products = load_bits(dot);
          if constexpr (kWide) products = iadd(shl<8>(products), load_bits(dot + kNext));
          if constexpr (kNegated) products = isub(izero(), products);
          F x = mul(to_float(products), scale);
          if constexpr (W::kMin) {
            I low = izero();
#pragma GCC unroll 8
            for (int i = 0; i < W::kSubs / 2; i++) {
              const auto* pair = reinterpret_cast<const int8_t*>(sums + row + i * 4);
              low = dot_words(low, words[i], set1_quad(pair));
            }
            x = fnma(least, to_float(low), x);
          }
          store(c, fma(x, set1(read_as<float>(scales + row)), load(c)));
        }
      }
    }
  }

  template <int RT, int NP>
  static __attribute__((noinline)) void job(const TileJob& t) {
    constexpr int kColumns = kWide ? 2 : NP;
    if (!t.resume) {
      for (int r = 0; r < t.rows; r++) {
        for (int i = 0; i < NP * kPanel; i += kLanes) store(t.c + r * t.c_stride + i, zero());
      }
    }
    Waiting before = {0, 0, nullptr};
    int turn = 0;
    const uint8_t* lines = t.lines;
    constexpr size_t kUnitBytes = kUnitLines * kTileLineBytes;
    const size_t next_panel = sizeof t.scratch->lines[0];
    for (int64_t line = t.line0; line < t.line1; line += kUnitLines, lines += kBytes * kUnitBytes) {
      for (int p = 0; p < (kWide ? NP : 1); p++, turn ^= 1) {
        const uint8_t* first = lines + static_cast<size_t>(p) * next_panel;
        const uint8_t* second = first + (kWide ? kUnitBytes : next_panel);
        zero_sums<RT, kColumns>();
        for (int64_t at = 0; at < kUnitLines; at += kTileLines) {
          t.fetch->step();
          products<RT, kColumns>(t.x + (line + at) * 4, t.x_stride, first + at * kTileLineBytes,
                                 second + at * kTileLineBytes);
        }
        if (before.dots) {
          for (int i = 0; i < RT; i++) add_rows<NP>(t, before, i);
        }
        DotTiles& dots = t.scratch->dots[turn][0];
        store_dots<RT, kColumns>(dots);
        before = {line / kUnitLines, p, &dots};
      }
    }
    for (int i = 0; i < RT; i++) add_rows<NP>(t, before, i);
  }

  // Does the same as tile_products, but the low bytes of weights are unsigned.
  template <int RT, int kColumns>
  static __attribute__((always_inline)) inline void products(const uint8_t* x, size_t x_stride,
                                                             const uint8_t* w0, const uint8_t* w1) {
    tile_load<4>(x, x_stride);
    tile_load<6>(w0, kTileLineBytes);
    tile_dot_s8s8<0, 4, 6>();
    if constexpr (kColumns == 2) {
      tile_load<7>(w1, kTileLineBytes);
      kWide ? tile_dot_s8u8<1, 4, 7>() : tile_dot_s8s8<1, 4, 7>();
    }
    if constexpr (RT == 2) {
      tile_load<5>(x + kTileRows16 * x_stride, x_stride);
      tile_dot_s8s8<2, 5, 6>();
      if constexpr (kColumns == 2) kWide ? tile_dot_s8u8<3, 5, 7>() : tile_dot_s8s8<3, 5, 7>();
    }
  }
};

}  // namespace
}  // namespace CPUSERVE_NS
