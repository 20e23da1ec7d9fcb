// Linears on AMX tiles; bf16 at every number of rows: TDPBF16PS sums even and odd products
// apart, so a level that used it for many rows only would have two different sums for one row.
//
// K is walked in lines: the 64 bytes that hold 2 (bf16) or 4 (int8) of K for the 16 columns of a
// panel. Up to 16 lines are one tile of weights. A tile job is up to 32 rows by 2 panels: four
// tiles of sums, two of rows, two of weights.
//
// Chain kinds keep their sums in tiles over a block of K: bf16, and int8 with one scale per row.
// Group kinds have a scale for every 16 to 256 of K. Their weights are first unpacked to signed
// bytes or to bf16, once for all rows of a block (not w8_channel_g128 for up to 32 rows); a group's
// sums leave the tiles, and vectors add them to fp32 sums while the tiles compute the next group.
// Kinds of GGUF with blocks of 256 have one group for all of it: they are unpacked to codes times
// their integer scales. Most need two bytes, so that each tile of rows enters two
// products.
#pragma once
#include "kernels/generic/matrix_job.h"
#include "kernels/linear/channel.h"
#include "kernels/linear/coded.h"
#include "kernels/linear/dense.h"
#include "kernels/linear/planes.h"
#include "kernels/linear/w4_group.h"
#include "kernels/linear/w4_wide.h"
#include "kernels/linear/w8_group.h"

namespace CPUSERVE_NS {
namespace {

// At most so many lines of K are a block of a chain kind. Two panels of it are 24 KB, which stay in
// an L1 of 48 KB while the rows of a step pass from L2, which sustains 48 bytes a cycle: a job of
// 32 rows is 768 cycles of products, 24 KB of rows, and 12 KB for its sums (read, written, and
// evicted), together 768 cycles. Longer blocks would save bytes of sums, but two panels and the
// rows of a job would drive each other out of L1, and then both come from L2: 4 KB for 64 cycles of
// products.
constexpr int64_t kTileBlockLines = 12 * kTileLines;
// Rows of a chain kind with sums that stay in L1, next to a block of two panels, until all of K has
// passed: 16 KB for a pair. Measured on Granite Rapids: a tile of sums is stored to L1 in 15 cycles
// and to L2 in 60, and loaded in 8 and 20.
constexpr int64_t kNearRows = 128;
// Rows of a step that are too many bytes for L2 come from L3, which delivers 10 bytes a cycle to a
// core (also measured there). A task of so many strips reads them once for all of its columns.
constexpr int kSpanStrips = 4;
// The unpacked lines of a panel in a block of K, for kinds with blocks of 256: 8 KB. Others have
// fewer.
constexpr int64_t kGroupBlockLines = 8 * kTileLines;
// The same for other group kinds, so that two panels are 8 KB together. They share the 48 KB of L1
// with 16 KB of groups' integer sums, 4 KB of fp32 sums and 8 KB of the rows of a job. Measured on
// Granite Rapids, blocks of twice as many lines take 1.05 to 1.18 times as long for 64 to 512 rows
// of w4m_g128.
constexpr int64_t kPairBlockLines = kGroupBlockLines / 2;

// A group's sums, integers or the bits of floats, as they leave the tiles.
using DotTiles = int32_t[2 * kJobColumns][kTileRows16 * kPanel];

// Where the scratch of a call holds what.
struct TileScratch {
  float sums[kSpanStrips * kSumsFloats];        // TileSums
  uint8_t rows_tail[kJobRows][kTileLineBytes];  // the last lines of K, padded with zeros
  uint8_t lines_tail[kJobColumns][kTileBytes];  // the same of the weights
  DotTiles dots[2][2];                          // of two groups, and of the next two
  uint8_t lines[kJobColumns][kGroupBlockLines * kTileLineBytes];  // unpacked weights
};
static_assert(sizeof(TileScratch) <= kLinearScratch, "the scratch of a call holds all of it");

// Fetches `left` lines of one panel to L2, `a_step` at a time, and with `second` the same lines of
// a panel so many bytes after it. The last step may fetch a few lines more.
struct PairFetch {
  const uint8_t* at = nullptr;
  int64_t left = 0, a_step = 0, second = 0;

  __attribute__((always_inline)) inline void step() {
    const int64_t some = left > 0 ? a_step : 0;
    const uint8_t* line = at;
    if (second) {
      for (int64_t i = 0; i < some; i++, line += kTileLineBytes) {
        prefetch_l2(line);
        prefetch_l2(line + second);
      }
    } else {
      for (int64_t i = 0; i < some; i++, line += kTileLineBytes) prefetch_l2(line);
    }
    at = line;
    left -= some;
  }
};

// One job: `row_tiles` tiles of rows by `panels` panels, over lines [line0, line1) of K.
struct TileJob {
  const uint8_t* x;  // the job's first row, at K = 0
  size_t x_stride;
  int64_t x_padded;  // of a row, in elements
  const uint8_t* w;  // the job's first panel as packed, at K = 0
  size_t panel_bytes;
  const uint8_t* lines;  // group kinds: the panels' unpacked lines from line0 on, if they have any
  int64_t line0, line1;
  float* c;  // sums, c_stride floats a row
  int c_stride;
  bool resume, last;  // c holds the sums before line0; line1 is the end of K
  int rows;
  int configured = 0;  // the tiles have the shapes of a job of so many rows
  TileScratch* scratch;
  PairFetch* fetch;
};

CPUSERVE_INLINE const uint8_t* row_of(const TileJob& t, int row) {
  return t.x + static_cast<size_t>(row) * t.x_stride;
}

// The last `lines` lines of K, fewer than a tile's, padded with zeros: the bytes after them in
// memory is another panel, or nothing.
template <int NP>
CPUSERVE_INLINE void copy_tails(const TileJob& t, int64_t line, int64_t lines) {
  const size_t bytes = static_cast<size_t>(lines) * 4;
  memset(t.scratch->rows_tail, 0, sizeof t.scratch->rows_tail);
  for (int r = 0; r < t.rows; r++) {
    memcpy(t.scratch->rows_tail[r], row_of(t, r) + line * 4, bytes);
  }
  memset(t.scratch->lines_tail, 0, sizeof t.scratch->lines_tail);
  for (int p = 0; p < NP; p++) {
    memcpy(t.scratch->lines_tail[p],
           t.w + static_cast<size_t>(p) * t.panel_bytes + line * kTileLineBytes,
           static_cast<size_t>(lines) * kTileLineBytes);
  }
}

// A chain kind's job: the sums stay in tiles from line0 to line1.
template <class Product, int RT, int NP>
CPUSERVE_INLINE void chain_products(const TileJob& t) {
  const size_t stride = static_cast<size_t>(t.c_stride) * sizeof(float);
  if (t.resume) {
    load_sums<RT, NP>(t.c, stride);
  } else {
    zero_sums<RT, NP>();
  }
  const uint8_t* w = t.w + t.line0 * kTileLineBytes;
  int64_t line = t.line0;
  for (; line + kTileLines <= t.line1; line += kTileLines, w += kTileBytes) {
    tile_products<Product, RT, NP, NP == 2>(t.x + line * 4, t.x_stride, w, w + t.panel_bytes,
                                            kTileLineBytes);
    t.fetch->step();
  }
  if (line < t.line1) {
    copy_tails<NP>(t, line, t.line1 - line);
    tile_products<Product, RT, NP>(t.scratch->rows_tail[0], kTileLineBytes,
                                   t.scratch->lines_tail[0], t.scratch->lines_tail[1],
                                   kTileLineBytes);
  }
  store_sums<RT, NP>(t.c, stride);
}

// For up to this many int8 rows, the vector kernels of linear/driver.h are faster than tiles. Tiles
// mostly need the weights unpacked to memory, and return the integer sums through memory.
// Both compute the integers exactly and add them to the fp32 sums in the same order, so a row gets
// the same bits.
// Measured on Granite Rapids, tiles take 1.2 to 1.7 times as long for one row, 0.9 to 1.3 times for
// 8 rows, and 0.7 to 1.1 times for 16. With codes in planes they take 1 to 1.2 times as long for 12
// rows, and 0.8 to 1 times for 16.
constexpr int kGroupVectorRows = 8;
constexpr int kPlaneVectorRows = 12;

struct Bf16Tiles {
  using FewRows = Bf16Tiles;
  static constexpr ActFormat kAct = ActFormat::bf16;
  static constexpr bool kGroups = false;
  static constexpr int kShapeLines = kTileLines;
  static constexpr int64_t kBlockLines = 0;  // a chain kind depends on K
  static int64_t lines(int64_t k) { return (k + 1) / 2; }
  static void unpack(const PackedWeight&, int64_t, int64_t, int64_t, uint8_t*) {}

  template <int RT, int NP>
  static __attribute__((noinline)) void job(const TileJob& t) {
    chain_products<Bf16Product, RT, NP>(t);
  }
};

// w8_channel: integers over the whole row, then both scales.
struct ChannelTiles {
  using Vectors = Channel<0>;
  using FewRows = ChannelTiles;
  static constexpr int kVectorRows = kGroupVectorRows;
  static constexpr ActFormat kAct = ActFormat::q8row;
  static constexpr bool kGroups = false;
  static constexpr int kShapeLines = kTileLines;
  static constexpr int64_t kBlockLines = 0;  // a chain kind depends on K
  static int64_t lines(int64_t k) { return (k + 3) / 4; }
  static void unpack(const PackedWeight&, int64_t, int64_t, int64_t, uint8_t*) {}

  template <int RT, int NP>
  static __attribute__((noinline)) void job(const TileJob& t) {
    chain_products<S8U8Product, RT, NP>(t);
    if (!t.last) return;
    for (int p = 0; p < NP; p++) {
      const uint8_t* scales = t.w + static_cast<size_t>(p + 1) * t.panel_bytes - kChannelScales;
      for (int r = 0; r < t.rows; r++) {
        const uint8_t* of_row = row_of(t, r) + t.x_padded;
        const F s = set1(read_as<float>(of_row));
        const I correction = shl<7>(iload1(reinterpret_cast<const int32_t*>(of_row) + 1));
        float* c = t.c + r * t.c_stride + p * kPanel;
        for (int i = 0; i < kPanel; i += kLanes) {
          const F scale = load(reinterpret_cast<const float*>(scales) + i);
          store(c + i, mul(to_float(isub(load_bits(c + i), correction)), mul(scale, s)));
        }
      }
    }
  }
};

// Lines of 64 bytes as the compiler's own vectors: all that unpacking needs, at any width of
// register.
#pragma GCC diagnostic ignored "-Wpsabi"  // nothing here crosses a call
typedef uint8_t LineBytes __attribute__((vector_size(64), aligned(1), may_alias));
CPUSERVE_INLINE LineBytes line_at(const uint8_t* p) {
  return *reinterpret_cast<const LineBytes*>(p);
}
CPUSERVE_INLINE void put_line(uint8_t* p, LineBytes x) { *reinterpret_cast<LineBytes*>(p) = x; }

// Quad kQuad of a group of a kind of linear/planes.h, with lines that begin at `from`.
template <class W, int kQuad>
CPUSERVE_INLINE LineBytes quad_line(const uint8_t* from) {
  LineBytes x;
  for (int v = 0; v < kVecs; v++) {
    const Q q = W::template quad<kQuad>(from + v * kLanes * 4);
    memcpy(reinterpret_cast<uint8_t*>(&x) + v * kLanes * 4, &q, sizeof q);
  }
  return x;
}

// The layout of a group kind W in memory: raw bytes of a unit, and a group's lines as signed bytes.
template <class W>
struct RawGroup {
  using Unit = UnitOf<W>;
  static constexpr int kGroup = W::kGroup, kLines = kGroup / 4;
  static constexpr int kVectorRows = kGroupVectorRows;
  static constexpr bool kScales = true, kLeast = W::kMinBytes != 0, kFloats = false;
  static constexpr bool kAsStored = false;
  using Vectors = Grouped<W>;
  using FewRows = RawGroup;
  using Product = S8S8Product;
  static constexpr ActFormat kAct = W::kAct;
  static int64_t lines(int64_t k) { return (k + kGroup - 1) / kGroup * kLines; }
  static const uint8_t* at(const uint8_t* panel, int64_t group) {
    return panel + group / Unit::kGroups * W::kUnitBytes;
  }
  static void unpack(const uint8_t* panel, int64_t group, int64_t, uint8_t* to) {
    const uint8_t* from =
        at(panel, group) + Unit::kHeader + group % Unit::kGroups * Unit::kGroupBytes;
    for (int i = 0; i < kLines / W::kQuadsPerLine; i++, from += kTileLineBytes) {
      const LineBytes x = line_at(from);
      if constexpr (W::kQuadsPerLine == 1) {
        put_line(to + i * kTileLineBytes, x ^ 0x80);
      } else {
        const uint8_t zero = W::kMinBytes ? 0 : 8;
        put_line(to + 2 * i * kTileLineBytes, (x & 15) - zero);
        put_line(to + (2 * i + 1) * kTileLineBytes, (x >> 4) - zero);
      }
    }
  }
  CPUSERVE_INLINE void factors(const uint8_t* panel, int64_t group, int column, F* scale,
                               F* least) {
    const uint8_t* header = at(panel, group);
    *scale = load_f16(reinterpret_cast<const uint16_t*>(header) + column);
    if constexpr (kLeast) *least = W::least(header, column, *scale);
  }
  CPUSERVE_INLINE F add_least(F least, F x, F sum) { return fma(least, x, sum); }
};
template <bool kUnsigned>
struct ChannelProduct : S8U8Product {};
template <>
struct ChannelProduct<false> : S8S8Product {};

// w8_channel_g128: lines without scales between them, and a last group that may be cut short.
// kStored: tiles read the lines in place, as bytes with 128 as 0, and the zero
// point is taken off the sums. Up to 32 rows read each weight only once, so unpacking it first took
// half of the time.
template <bool kStored>
struct RawChannel {
  static constexpr int kGroup = kWideGroup, kLines = kGroup / 4;
  static constexpr int kVectorRows = kGroupVectorRows;
  static constexpr bool kScales = false, kLeast = false, kFloats = false, kAsStored = kStored;
  using Vectors = Channel<kWideGroup / 4>;
  using Product = ChannelProduct<kStored>;
  using FewRows = RawChannel<true>;
  static constexpr ActFormat kAct = Vectors::kAct;
  static int64_t lines(int64_t k) { return (k + kGroup - 1) / kGroup * kLines; }
  // With kStored, only a group that is cut short has to be unpacked.
  static void unpack(const uint8_t* panel, int64_t group, int64_t k, uint8_t* to) {
    const int64_t lines = (k + 3) / 4 - group * kLines;
    if (kStored && lines >= kLines) return;
    const uint8_t zero = kStored ? 0 : 0x80;
    const uint8_t* from = panel + group * kLines * kTileLineBytes;
    for (int64_t i = 0; i < kLines; i++) {
      LineBytes x = {};
      if (i < lines) x = line_at(from + i * kTileLineBytes) ^ zero;
      put_line(to + i * kTileLineBytes, x);
    }
  }
};

// The kinds of linear/planes.h without small factors; their units have one or several groups of 32.
template <class G>
struct RawPlanes {
  using W = Planes<G>;
  static constexpr int kGroup = 32, kLines = kGroup / 4;
  static constexpr int kVectorRows = kPlaneVectorRows;
  static constexpr bool kScales = true, kLeast = W::kMin, kFloats = false, kAsStored = false;
  using Vectors = PlaneKind<W>;
  using FewRows = RawPlanes;
  using Product = S8S8Product;
  static constexpr ActFormat kAct = Vectors::kAct;
  static int64_t lines(int64_t k) { return Vectors::units(k) * kLines; }
  static const uint8_t* at(const uint8_t* panel, int64_t group) {
    return panel + group / W::kGroups * W::kUnitBytes;
  }
  static void unpack(const uint8_t* panel, int64_t group, int64_t, uint8_t* to) {
    put_quads<0>(at(panel, group) + W::kHeader + group % W::kGroups * W::kLines * 64, to);
  }
  template <int kQuad>
  CPUSERVE_INLINE void put_quads(const uint8_t* from, uint8_t* to) {
    if constexpr (kQuad < kLines) {
      put_line(to, quad_line<W, kQuad>(from) - static_cast<uint8_t>(G::kZero));
      put_quads<kQuad + 1>(from, to + kTileLineBytes);
    }
  }
  CPUSERVE_INLINE void factors(const uint8_t* panel, int64_t group, int column, F* scale,
                               F* least) {
    W::factors(at(panel, group), column, scale, least);
  }
  CPUSERVE_INLINE F add_least(F least, F x, F sum) { return fma(least, x, sum); }
};

// Float codes with lines of bf16. K ends with a whole tile.
template <class C>
struct RawCoded {
  static constexpr int kGroup = C::kGroup, kLines = kGroup / 2;
  static constexpr int kVectorRows = 0;
  static constexpr bool kScales = true, kLeast = false, kFloats = true, kAsStored = false;
  using Vectors = void;
  using FewRows = RawCoded;
  using Product = Bf16Product;
  static constexpr ActFormat kAct = ActFormat::bf16;
  static int64_t lines(int64_t k) { return k / 2; }
  static const uint8_t* at(const uint8_t* panel, int64_t group) {
    return panel + group * C::bytes(kGroup);
  }
  static void unpack(const uint8_t* panel, int64_t group, int64_t k, uint8_t* to) {
    C::template widen<false>(at(panel, group), group_size<C>(k, group),
                             reinterpret_cast<uint16_t*>(to), 0);
  }
  CPUSERVE_INLINE void factors(const uint8_t* panel, int64_t group, int column, F* scale, F*) {
    *scale = C::scale(at(panel, group), column);
  }
};

template <int RT, int NP>
CPUSERVE_INLINE void store_dots(DotTiles& dots) {
  tile_store<0>(dots[0], kTileLineBytes);
  if constexpr (NP == 2) tile_store<1>(dots[1], kTileLineBytes);
  if constexpr (RT == 2) tile_store<2>(dots[2], kTileLineBytes);
  if constexpr (RT == 2 && NP == 2) tile_store<3>(dots[3], kTileLineBytes);
}

// A kind with groups of kGroup of K. Line numbers count unpacked lines.
template <class Raw>
struct GroupTiles {
  using Vectors = typename Raw::Vectors;
  using FewRows = GroupTiles<typename Raw::FewRows>;  // the kind for up to kJobRows rows
  static constexpr ActFormat kAct = Raw::kAct;
  static constexpr bool kGroups = true;
  static constexpr int kLines = Raw::kLines;  // of a group
  static constexpr int kShapeLines = kLines < kTileLines ? kLines : kTileLines;
  static constexpr int kVectorRows = Raw::kVectorRows;
  static constexpr int64_t kBlockLines = kLines < kPairBlockLines ? kPairBlockLines : kLines;
  static_assert(kBlockLines % kLines == 0, "a block has whole groups");
  static int64_t lines(int64_t k) { return Raw::lines(k); }

  // Unpacks lines [line0, line1) of a panel.
  static void unpack(const PackedWeight& w, int64_t panel, int64_t line0, int64_t line1,
                     uint8_t* to) {
    const uint8_t* from = w.data + static_cast<size_t>(panel) * w.panel_bytes;
    for (int64_t g = line0 / kLines; g * kLines < line1; g++, to += kLines * kTileLineBytes) {
      Raw::unpack(from, g, w.k, to);
    }
  }

  // The steps of the fp32 chains that the integers of groups g to g + G - 1 are, as in
  // linear/group.h and linear/channel.h, for the rows of one tile and NP panels. Two groups at a
  // time load and store each sum once.
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
    const uint8_t* of_row = row_of(t, row0) + t.x_padded + g * 4;
    const int64_t to_sums = t.x_padded / Raw::kGroup * 4;
    // Copies: a store to c cannot change them, which the compiler does not know of t's.
    const size_t x_stride = t.x_stride;
    const int64_t c_stride = t.c_stride;
    float* c = t.c + row0 * c_stride;
    for (int r = 0; r < rows; r++, of_row += x_stride, c += c_stride) {
      F s[G], m[G];
      I of_zeros[G];
      for (int j = 0; j < G; j++) {
        const auto* sums = reinterpret_cast<const int32_t*>(of_row + to_sums);
        if constexpr (!Raw::kFloats) s[j] = set1(read_as<float>(of_row + j * 4));
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

  // Loads the tile registers with rows and weights of K from `line` on.
  template <int RT, int NP>
  static __attribute__((always_inline)) inline void load_tiles(const TileJob& t, int64_t line) {
    const uint8_t* w = t.lines + (line - t.line0) * kTileLineBytes;
    size_t next_panel = sizeof t.scratch->lines[0];
    if constexpr (Raw::kAsStored) {
      const auto stored = static_cast<int64_t>((t.panel_bytes - kChannelScales) / kTileLineBytes);
      if ((line / kLines + 1) * kLines <= stored) {  // else the last group, which was filled up
        w = t.w + line * kTileLineBytes;
        next_panel = t.panel_bytes;
      }
    }
    load_operands<RT, NP, NP == 2>(t.x + line * 4, t.x_stride, w, w + next_panel, kTileLineBytes);
  }

  // Groups with integers that have left the tiles and have not been added yet.
  struct Waiting {
    int64_t g;
    int groups;  // 0: none
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
        // The next product's tiles are loaded ahead, before a group is added. Prefetches are issued
        // after the product: issued before it, they took the fill buffers that its loads need.
        for (int64_t end = line + kLines; line < end && line < t.line1;) {
          multiply_operands<typename Raw::Product, RT, NP>();
          t.fetch->step();
          line += kShapeLines;
          if (line < t.line1) load_tiles<RT, NP>(t, line);
        }
        // The two groups before are added while the products of this one are under way: one tile
        // of rows with each group, so that few instructions separate two products.
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

  // w8_channel_g128: the column's scale comes last.
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

// GGUF kinds with blocks of 256. Line numbers count lines of 64 weights, as if each took one
// byte, although most kinds unpack a weight to two.
template <class G>
struct BlockTiles {
  using W = Planes<G>;
  using Vectors = PlaneKind<W>;
  using FewRows = BlockTiles;
  static constexpr ActFormat kAct = Vectors::kAct;
  static constexpr bool kGroups = true;
  static constexpr int kVectorRows = kPlaneVectorRows, kShapeLines = kTileLines;
  static constexpr int kUnitLines = W::kUnit / 4;
  // Codes times scales are in [-128, 128] (Q3_K, at 128 in its negative) or in 16 bits.
  static constexpr bool kWide = G::kLow == 4;
  static constexpr bool kNegated = !kWide && G::kZero != 0;
  static constexpr int kBytes = kWide ? 2 : 1;
  static constexpr int64_t kBlockLines = kGroupBlockLines / kBytes;
  static_assert(kBlockLines % kUnitLines == 0, "a block has whole units");
  static int64_t lines(int64_t k) { return Vectors::units(k) * kUnitLines; }

  typedef int16_t LineWords __attribute__((vector_size(64), aligned(1), may_alias));
  typedef uint16_t LineBits __attribute__((vector_size(64), aligned(1), may_alias));
  typedef int32_t LineInts __attribute__((vector_size(64), aligned(1), may_alias));

  // The scale of each column of a sub-block, twice: the four bytes of a column are two words.
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
  // Puts quads [kQuad, kEnd) of a group times their scale: high bytes at `to`, low ones after
  // the whole unit; or the one byte.
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
  // Unpacks lines [line0, line1) of a panel, which are whole units.
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

  // Integers of a unit that have left the tiles, and have not been added yet: of both bytes of a
  // panel, or of the panels of a job.
  struct Waiting {
    int64_t unit;
    int panel;             // of the job
    const DotTiles* dots;  // nullptr: none
  };

  // Adds the integers of `waiting` to the fp32 sums of the rows of one tile, as PlaneBlocks does.
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
      constexpr int64_t kNext = kTileRows16 * kPanel;  // from high bytes to low ones
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

  // As tile_products; low bytes are unsigned.
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

template <class Kind>
CPUSERVE_INLINE void call_job(const TileJob& t, int panels) {
  if (t.rows > kTileRows16) {
    panels == 2 ? Kind::template job<2, 2>(t) : Kind::template job<2, 1>(t);
  } else {
    panels == 2 ? Kind::template job<1, 2>(t) : Kind::template job<1, 1>(t);
  }
}

template <class Kind>
CPUSERVE_INLINE TileJob job_of(const LinearArgs& a) {
  TileJob t;
  t.x = static_cast<const uint8_t*>(a.x);
  t.x_stride = a.x_stride / static_cast<size_t>(a.terms);
  t.x_padded = padded_width(Kind::kAct, a.w->k);
  t.panel_bytes = a.w->panel_bytes;
  t.scratch = static_cast<TileScratch*>(a.scratch);
  return t;
}

// Calls run() for every block of K, of `block` lines.
template <class Run>
CPUSERVE_INLINE void over_k(TileJob& t, int64_t lines, int64_t block, Run run) {
  for (t.line0 = 0; t.line0 < lines; t.line0 += block) {
    t.line1 = t.line0 + block < lines ? t.line0 + block : lines;
    t.resume = t.line0 > 0;
    t.last = t.line1 == lines;
    run();
  }
}

// Calls run(panel, panels) for every `step` panels of [begin, end).
template <class Run>
CPUSERVE_INLINE void over_panels(int64_t begin, int64_t end, int step, Run run) {
  for (int64_t p = begin; p < end; p += step) {
    run(p, static_cast<int>(end - p < step ? end - p : step));
  }
}

// While a panel of a chain kind is used, fetches as many bytes, `ahead_bytes` further on and also
// across panels. They go to L2: a fetch to L1 would hold one of its 16 fill buffers, which tile
// loads need, for the latency of memory. Measured on Granite Rapids, bf16 reads 5 to 9 % more bytes
// a second at one row so, and 12 to 20 % more at 32.
CPUSERVE_INLINE void fetch_ahead(const LinearArgs& a, const TileJob& t, int64_t steps) {
  const uint8_t* end = a.w->data + static_cast<size_t>(panels_of(*a.w)) * t.panel_bytes;
  const int64_t bytes = static_cast<int64_t>(t.panel_bytes);
  t.fetch->at = t.w + a.sizes.ahead_bytes;
  t.fetch->left = t.fetch->at < end ? (bytes + kTileLineBytes - 1) / kTileLineBytes : 0;
  t.fetch->a_step = (t.fetch->left + steps - 1) / steps;
}

// While a block of K of `panels` panels of a group kind is used, fetches the next block to L2: of
// the same panels, or the first block of the panels after them.
CPUSERVE_INLINE void fetch_next_block(const LinearArgs& a, const TileJob& t, int panels,
                                      int64_t lines, int64_t block, int64_t steps) {
  const uint8_t* end = a.w->data + static_cast<size_t>(panels_of(*a.w)) * t.panel_bytes;
  const int64_t bytes = static_cast<int64_t>(t.panel_bytes);
  const int64_t line0 = t.last ? 0 : t.line1;
  const int64_t line1 = line0 + block < lines ? line0 + block : lines;
  const int64_t begin = bytes * line0 / lines, stop = bytes * line1 / lines;
  t.fetch->at = t.w + (t.last ? panels * bytes : 0) + begin;
  t.fetch->second = panels > 1 ? bytes : 0;
  t.fetch->left = t.fetch->at < end ? (stop - begin + kTileLineBytes - 1) / kTileLineBytes : 0;
  t.fetch->a_step = (t.fetch->left + steps - 1) / steps;
}

// Up to 32 rows: every panel is read once. Chain kinds take one panel at a time, in the order of
// memory, which sets the pace. Group kinds also spend time on unpacking and adding, so they take a
// block of K of two panels; each tile of rows is loaded once for it. Measured on Granite Rapids
// at 12, 20 and 32 rows, w4m_g128 reads 1.16 to 1.29 times as many bytes a second so, nf4_g64 1.11
// to 1.22 times, w8_g32 1.03 to 1.14 times, w8_channel_g128 0.94 to 1.06 times; bf16 would read
// 0.86 to 0.99 times as many.
template <class Kind>
CPUSERVE_INLINE void stream_tiles(const LinearArgs& a) {
  constexpr int kTogether = Kind::kGroups ? kJobColumns : 1;
  const PackedWeight& w = *a.w;
  const bool plain = plain_f32(a.ep);
  const int64_t lines = Kind::lines(w.k), block = Kind::kGroups ? Kind::kBlockLines : lines;
  TileJob t = job_of<Kind>(a);
  PairFetch fetch;
  t.fetch = &fetch;
  t.lines = t.scratch->lines[0];
  t.rows = static_cast<int>(a.m) * a.terms;
  t.c_stride = sums_stride<true>();
  configure_job(t.rows, Kind::kShapeLines);
  over_panels(a.panel0, a.panel1, kSpanPanels, [&](int64_t panel0, int span) {
    over_panels(panel0, panel0 + span, kTogether, [&](int64_t panel, int np) {
      t.w = w.data + static_cast<size_t>(panel) * w.panel_bytes;
      t.c = t.scratch->sums + (panel - panel0) * kPanel;
      over_k(t, lines, block, [&] {
        const int64_t steps = (t.line1 - t.line0 + Kind::kShapeLines - 1) / Kind::kShapeLines;
        if constexpr (Kind::kGroups) {
          fetch_next_block(a, t, np, lines, block, steps);
          for (int p = 0; p < np; p++) {
            Kind::unpack(w, panel + p, t.line0, t.line1, t.scratch->lines[p]);
          }
        } else {
          fetch_ahead(a, t, steps);
        }
        call_job<Kind>(t, np);
      });
    });
    finish_terms(a, plain, 0, t.rows, panel0, span, t.scratch->sums, sums_stride<true>());
  });
}

// Where the sums of `rows` rows (of terms) by some panels are: together for a
// pair of panels, or for a strip where the epilogue takes whole strips.
struct TileSums {
  float* at;
  int64_t rows;
  bool strips;

  int stride() const { return (strips ? kStripPanels : kJobColumns) * kPanel; }
  float* of(int64_t panel) const {
    const int64_t together = strips ? kStripPanels : kJobColumns;
    return at + panel / together * rows * stride() + panel % together * kPanel;
  }
};

// The epilogue of finished rows (of terms) of some panels.
CPUSERVE_INLINE void finish_rows(const LinearArgs& a, bool plain, int64_t row0, int64_t rows,
                                 int64_t panel0, int panels, float* c, int stride) {
  for (int64_t row = 0; row < rows; row += kJobRows) {
    const int some = static_cast<int>(rows - row < kJobRows ? rows - row : kJobRows);
    finish_terms(a, plain, row0 + row / a.terms, some, panel0, panels, c + row * stride, stride);
  }
}

// One block of K of one or two panels, which stay in L1 while rows pass: the rows of `sums`, from
// activation row0 on. first: the panel's number in `sums`.
template <class Kind>
CPUSERVE_INLINE void run_tile_pair(const LinearArgs& a, TileJob& t, bool plain, int64_t row0,
                                   int64_t panel, int np, const TileSums& sums, int64_t first) {
  const PackedWeight& w = *a.w;
  const uint8_t* x = static_cast<const uint8_t*>(a.x) + static_cast<size_t>(row0) * a.x_stride;
  if constexpr (Kind::kGroups) {
    for (int p = 0; p < np; p++) {
      Kind::unpack(w, panel + p, t.line0, t.line1, t.scratch->lines[p]);
    }
  }
  t.w = w.data + static_cast<size_t>(panel) * w.panel_bytes;
  t.lines = t.scratch->lines[0];
  t.c_stride = sums.stride();
  const bool finished = t.last && !sums.strips;
  for (int64_t row = 0; row < sums.rows; row += kJobRows) {
    t.rows = static_cast<int>(sums.rows - row < kJobRows ? sums.rows - row : kJobRows);
    if (t.rows != t.configured) configure_job(t.rows, Kind::kShapeLines);
    t.configured = t.rows;
    t.x = x + static_cast<size_t>(row) * t.x_stride;
    t.c = sums.of(first) + row * t.c_stride;
    call_job<Kind>(t, np);
    if (!finished) continue;
    finish_terms(a, plain, row0 + row / a.terms, t.rows, panel, np, t.c, t.c_stride);
  }
}

template <class Kind>
CPUSERVE_INLINE int64_t tile_block_lines(int64_t lines) {
  if (Kind::kGroups) return Kind::kBlockLines;
  const int64_t blocks = (lines + kTileBlockLines - 1) / kTileBlockLines;
  return round_up((lines + blocks - 1) / blocks, kTileLines);
}
// L1, which every CPU with these tiles has 48 KB of, sets the K block.
template <class Kind>
int64_t tiles_block_k(int64_t k, const WorkSizes&) noexcept {
  return elements_of(k, Kind::lines(k), tile_block_lines<Kind>(Kind::lines(k)));
}

// Fetches the next strip into L2 while `rows` rows pass over a strip. Panels come one after
// another, so the next lines belong to the next strip.
template <class Kind>
CPUSERVE_INLINE void fetch_next_strip(const PackedWeight& w, PairFetch& fetch, int64_t rows,
                                      int64_t panel0, int panels) {
  const int64_t next = panels_of(w) - panel0 - panels, lines = Kind::lines(w.k);
  fetch.at = w.data + static_cast<size_t>(panel0 + panels) * w.panel_bytes;
  fetch.left = (next < kStripPanels ? next : kStripPanels) * static_cast<int64_t>(w.panel_bytes) /
               kTileLineBytes;
  const int64_t jobs = (rows + kJobRows - 1) / kJobRows;
  const int64_t pairs = (panels + kJobColumns - 1) / kJobColumns;
  const int64_t steps = jobs * pairs * ((lines + Kind::kShapeLines - 1) / Kind::kShapeLines);
  fetch.a_step = (fetch.left + steps - 1) / steps;
}

// Many rows that stay in L2: strip after strip, and all of K for some rows and a pair of panels.
template <class Kind>
CPUSERVE_INLINE void strip_tiles(const LinearArgs& a, TileJob& t, bool plain, bool strips,
                                 int64_t row0, int64_t rows) {
  const int64_t lines = Kind::lines(a.w->k), block = tile_block_lines<Kind>(lines);
  const int64_t near = Kind::kGroups ? rows : kNearRows;  // groups are unpacked once for all rows
  over_panels(a.panel0, a.panel1, kStripPanels, [&](int64_t panel0, int panels) {
    fetch_next_strip<Kind>(*a.w, *t.fetch, rows, panel0, panels);
    for (int64_t row = 0; row < rows; row += near) {
      const TileSums sums{t.scratch->sums, rows - row < near ? rows - row : near, strips};
      const int64_t first = row0 + row / a.terms;
      over_panels(panel0, panel0 + panels, kJobColumns, [&](int64_t panel, int np) {
        over_k(t, lines, block, [&] {
          run_tile_pair<Kind>(a, t, plain, first, panel, np, sums, strips ? panel - panel0 : 0);
        });
      });
      if (strips) {
        finish_rows(a, plain, first, sums.rows, panel0, panels, sums.at, sums.stride());
      }
    }
  });
}

// Many rows that do not stay in L2: a block of K of all rows does, while the panels of a span pass
// over it. The processor fetches panels by itself.
template <class Kind>
CPUSERVE_INLINE void span_tiles(const LinearArgs& a, TileJob& t, bool plain, bool strips,
                                int64_t row0, int64_t rows) {
  t.fetch->left = 0;
  const int64_t lines = Kind::lines(a.w->k);
  const TileSums sums{t.scratch->sums, rows, strips};
  over_panels(a.panel0, a.panel1, kSpanStrips * kStripPanels, [&](int64_t panel0, int panels) {
    over_k(t, lines, tile_block_lines<Kind>(lines), [&] {
      over_panels(panel0, panel0 + panels, kJobColumns, [&](int64_t panel, int np) {
        run_tile_pair<Kind>(a, t, plain, row0, panel, np, sums, panel - panel0);
      });
    });
    if (!strips) return;
    over_panels(panel0, panel0 + panels, kStripPanels, [&](int64_t panel, int some) {
      finish_rows(a, plain, row0, rows, panel, some, sums.of(panel - panel0), sums.stride());
    });
  });
}

// Many rows: weights are read once, while every row passes over them.
template <class Kind>
CPUSERVE_INLINE void blocked_tiles(const LinearArgs& a) {
  const bool plain = plain_f32(a.ep);
  const bool strips = a.ep.glu && a.ep.out.format != ActFormat::f32 &&
                      a.ep.out.format != ActFormat::bf16;  // 32 results of 4 panels share a scale
  const int64_t height = a.sizes.rows / a.terms;
  TileJob t = job_of<Kind>(a);
  PairFetch fetch;
  t.fetch = &fetch;
  for (int64_t row0 = 0; row0 < a.m; row0 += height) {
    const int64_t values = a.m - row0 < height ? a.m - row0 : height, rows = values * a.terms;
    if (rows_stay_in_l2(values, a.x_stride, a.sizes)) {
      strip_tiles<Kind>(a, t, plain, strips, row0, rows);
    } else {
      span_tiles<Kind>(a, t, plain, strips, row0, rows);
    }
  }
}

template <class Kind>
void run_tiles(const LinearArgs& a) noexcept {
  if (a.m <= 0 || a.panel0 >= a.panel1) return;
  if (a.m * a.terms <= kJobRows) {
    stream_tiles<typename Kind::FewRows>(a);
  } else {
    blocked_tiles<Kind>(a);
  }
  tile_release();
}

// Int8 rows that the vectors of the level below multiply.
template <class Kind>
constexpr int few_rows() {
  if constexpr (Kind::kAct == ActFormat::bf16) {
    return 0;
  } else {
    return Kind::kVectorRows;
  }
}

// A kind's kernel with its product loop on tiles; packing and reading rows do not change.
template <class Kind>
constexpr LinearKernel on_tiles(LinearKernel kernel) {
  kernel.product = run_tiles<Kind>;
  kernel.few_rows = few_rows<Kind>();
  kernel.tile_rows = kJobRows;
  kernel.tile_columns = kJobColumns * kPanel;
  kernel.tile_panels = kJobColumns;
  kernel.pass_rows = kJobRows;
  kernel.block_k = tiles_block_k<Kind>;
  kernel.span_panels = kSpanStrips * kStripPanels;
  kernel.sizes_cut_passes = false;
  return kernel;
}

}  // namespace
}  // namespace CPUSERVE_NS
