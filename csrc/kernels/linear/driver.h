// The loops of a linear on vectors, for all weight kinds. The outermost loop is over panels,
// so that each panel is read from memory once; then comes the loop over rows;
// the loop over K is innermost. The files of this folder use these terms:
//   K        the inputs of a matrix, over which products are summed
//   panel    16 output columns of the packed matrix, with all of K
//   strip    4 panels
//   line     64 bytes of a panel
//   quad     4 elements of K of one column, the operand of an int8 dot product
//   unit     the smallest part of K that a kind can process: a pair, quad, group or block
//   tile     some rows by some columns, with their sums in registers
//   pass     one read of all weights of a matrix, for so few rows that memory is the limit
//   K block  the units of a strip that stay in a cache while many rows are multiplied by them
//   terms    the int8 rows, one or two, that add up to a row of activations (table/rows.h)
//
// A weight kind is a class that defines its units of K and its tiles:
//
//   struct Kind {
//     static constexpr int64_t kUnitBytes   bytes of a unit (pair, element, group) in one panel
//     static constexpr bool kSharesHeaders  units share headers; kUnitBytes counts a whole header
//     static int64_t units(int64_t k)       number of units of K
//     static constexpr int64_t kWholeUnits  a K block is a multiple of this many units
//     static constexpr ActFormat kAct
//     static constexpr bool kWidens         tiles of many rows read bf16 rows widened to fp32
//     static constexpr bool kNearBlocks     a K block and its elements of the rows stay in L1
//     static constexpr int kStreamRows      the most rows that one pass over the weights computes
//     static constexpr bool kSizesCutPasses whether float_pass_rows (WorkSizes) limits kStreamRows
//     static constexpr int stream_panels(int rows)         panels of a tile in one pass
//     static constexpr int kRows, kPanels   size of the tile for more than kStreamRows rows
//     static constexpr int kHalfRows        rows of a tile that has only two panels
//     static constexpr bool kLineUnits      a unit has 32 or 64 bytes in a panel: at most a line
//     static constexpr int kTurns           with at most kTurns / 2 tiles a panel in a block,
//                                           share_units prefetches the panels in turn
//                                           (kTurns is not used with kLineUnits)
//     static constexpr bool kUnpacks        products of many rows unpack the codes first: the kind
//                                           has the members that linear/unpacked.h lists
//     template <int MR, int NP, bool kNear, int NPF> static void tile(const LinearTile&)
//   };
//
// A tile has MR int8 or float rows and NP panels, and prefetches cache lines of NPF panels.
// With kNear, the tile belongs to one pass over the weights. Its sums start from zero,
// or from the sums of the previous K block in `c`. Each output element is one chain of additions
// over ascending K, so the shapes of tiles and the K blocks never change a bit.
#pragma once
#include "kernels/linear/finish.h"
#include "kernels/linear/linear_tile.h"

namespace CPUSERVE_NS {
namespace {

// Calls the tile function that is compiled for `rows` rows, where `rows` is from kLeast to MR.
template <class Kind, bool kNear, int NP, int NPF, int MR, int kLeast = 1>
CPUSERVE_INLINE void call_tile(int rows, const LinearTile& t) {
  if (rows == MR) return Kind::template tile<MR, NP, kNear, NPF>(t);
  if constexpr (MR > kLeast) call_tile<Kind, kNear, NP, NPF, MR - 1, kLeast>(rows, t);
}
// Calls the tile function for one pass over the weights that is compiled for `rows` rows.
// The tile has as many panels as fit in the registers.
template <class Kind, int MR>
CPUSERVE_INLINE void call_stream_tile(int rows, const LinearTile& t) {
  if (rows == MR) {
    constexpr int NP = Kind::stream_panels(MR);
    return Kind::template tile<MR, NP, true, NP>(t);
  }
  if constexpr (MR > 1) call_stream_tile<Kind, MR - 1>(rows, t);
}
template <class Kind, int MR = Kind::kStreamRows>
CPUSERVE_INLINE int stream_panels_of(int rows) {
  if (rows == MR) return Kind::stream_panels(MR);
  if constexpr (MR > 1) return stream_panels_of<Kind, MR - 1>(rows);
  return 1;
}

// Computes a linear for few rows: in one pass over the weights, limited by memory.
// Every cache line of the weights is prefetched before its use, even if it is in the next panel.
template <class Kind>
CPUSERVE_INLINE void stream(const LinearArgs& a) {
  const PackedWeight& w = *a.w;
  const int rows = static_cast<int>(a.m) * a.terms, wide = stream_panels_of<Kind>(rows);
  const bool plain = plain_f32(a.ep);
  float* c = static_cast<float*>(a.scratch);
  const int64_t units = Kind::units(w.k);
  const int64_t bytes = unit_bytes<Kind>(w), total = panels_of(w);
  const int64_t ahead_units = a.sizes.ahead_bytes / wide / bytes;
  LinearTile t;
  t.x = static_cast<const uint8_t*>(a.x);
  t.x_stride = a.x_stride / static_cast<size_t>(a.terms);
  t.x_padded = padded_width(Kind::kAct, w.k);
  t.panel_bytes = w.panel_bytes;
  t.unit_bytes = bytes;
  t.x_u0 = t.u0 = 0;
  t.u1 = units;
  t.split = units > ahead_units ? units - ahead_units : 0;
  t.fetch_near = rows > a.sizes.far_pass_rows;
  t.resume = false;
  t.last = true;
  for (int64_t p0 = a.panel0; p0 < a.panel1; p0 += kSpanPanels) {
    const int span = static_cast<int>(a.panel1 - p0 < kSpanPanels ? a.panel1 - p0 : kSpanPanels);
    for (int p = 0, np; p < span; p += np) {
      np = span - p >= wide ? wide : 1;
      t.w = w.data + static_cast<size_t>(p0 + p) * w.panel_bytes;
      t.ahead0 = t.w + ahead_units * bytes;
      t.ahead1 = p0 + p + np < total ? t.ahead0 + static_cast<size_t>(np - 1) * w.panel_bytes +
                                           (static_cast<int64_t>(w.panel_bytes) - units * bytes)
                                     : t.w;
      t.c = c + p * kPanel;
      if (np == 1) {
        call_tile<Kind, true, 1, 1, Kind::kStreamRows>(rows, t);
      } else {
        call_stream_tile<Kind, Kind::kStreamRows>(rows, t);
      }
    }
    finish_terms(a, plain, 0, rows, p0, span, c, sums_stride<true>());
  }
}

// The number of finished tiles that the epilogue processes together, one below another.
// Activation functions and quantization are long chains of dependent operations,
// so a core is busy only if it computes several rows in parallel.
constexpr int64_t kFinishTiles = 4;

// A part of a product that is small enough for the caches: tiles multiply its rows by its panels
// over units [u0, u1) of K. A unit is the smallest part of K that Kind can process.
struct Block {
  int64_t row0, rows;  // rows of activations; each consists of LinearArgs::terms int8 rows
  int64_t panel0;
  int panels;
  int64_t u0, u1;
  const uint8_t* next;  // the weights of the next block, to prefetch; or nullptr
  bool keep;            // there are several K blocks: the sums [rows][64] stay in c between them
  bool last;            // whether the block contains the end of K
};

// A K block is computed in `calls` calls of tile functions. The function share_units
// sets the part (share) of the next K block's weights that call number `i` prefetches into L2.
// All shares have the same size: memory is never idle while tiles compute from the caches,
// and never gets more requests than it can serve. A waiting request occupies one of the few miss
// buffers of the core, and loads that miss L1 but not L2 would wait for a free buffer.
// With equal shares, 64 rows of w8_channel run at 76 % of the dot-product peak of Granite Rapids;
// they ran at 64 % when each of the first four calls prefetched a whole panel.
//
// The next block is divided in one of two ways. If a block has few rows (at most Kind::kTurns / 2
// calls for each panel), a call has much to prefetch: a unit of K of each panel in turn,
// nearly in the reading order of tiles, so that the hardware prefetcher sees several streams
// and runs ahead in each of them. On Granite Rapids, 12 rows of w8_g32 read 26 GB/s in this way,
// and 20 GB/s if a call prefetches one panel from end to end. With more calls, prefetching in turn
// gains nothing and costs up to 5 %, so each call prefetches a part of one panel. If this part has
// fewer cache lines than the call has units, lines are prefetched repeatedly, which costs nothing.
template <class Kind>
CPUSERVE_INLINE void share_units(const Block& b, LinearTile& t, int64_t i, int64_t calls) {
  const int64_t n = b.u1 - b.u0, panels = b.panels;
  const int64_t panel_bytes = static_cast<int64_t>(t.panel_bytes);
  UnitShare& share = t.share = {};
  if (!b.next) return;
  const uint8_t* const next = b.next + b.u0 * t.unit_bytes;
  if (2 * calls <= Kind::kTurns * panels) {
    const int64_t done = i * n * panels, unit = done / calls;
    share.step = t.unit_bytes;
    share.panel = unit % panels;
    share.panels = panels;
    share.credit = done % calls;
    share.calls = calls;
    share.at = next + share.panel * panel_bytes + unit / panels * t.unit_bytes;
    return;
  }
  const int64_t panel = i * panels / calls, first = (panel * calls + panels - 1) / panels;
  const int64_t parts = ((panel + 1) * calls + panels - 1) / panels - first;
  share.every = n;
  share.step = (t.unit_bytes + parts - 1) / parts;
  share.panels = 1;
  share.at = next + panel * panel_bytes + (i - first) * n * share.step;
}

// Sets the share of the next block that call number `i` prefetches, for kinds with kLineUnits.
// Cache lines are prefetched in the reading order of tiles: a line of each panel in turn.
// The hardware prefetcher then sees one stream for each panel, and runs ahead of the prefetches.
// With 24 and 32 rows of w8_channel (K = 8192), Granite Rapids reaches 79 % and 83 %
// of the dot-product peak; if lines are prefetched panel by panel, it reaches 70 % and 73 %.
template <class Kind>
CPUSERVE_INLINE void share_lines(const Block& b, LinearTile& t, int64_t i, int64_t calls) {
  const int64_t n = b.u1 - b.u0;
  t.fetch_every = b.next ? calls : n;
  t.fetch_panels = b.next ? b.panels : 0;
  t.ahead0 = (b.next ? b.next : t.w) + (b.u0 + i * n / calls) * Kind::kUnitBytes;
}

// Returns the number of panels of the next tile, if `left` panels of the block remain.
template <int kPanels>
CPUSERVE_INLINE int panels_at_once(int left) {
  return left >= kPanels ? kPanels : kPanels > 2 && left > 1 ? 2 : 1;
}

// Returns the number of tiles that `rows` rows of activations are divided into.
// Each row consists of `terms` int8 rows, and a tile has at most kRows int8 rows.
template <class Kind, int kRows, int kPanels>
constexpr int64_t tiles_of(int64_t rows, int terms) {
  const int64_t most = kRows / terms, needed = (rows + most - 1) / most;
  // If tiles have two panels, a block has at least two tiles of rows,
  // because a call of a tile prefetches only one panel of the next block.
  return !Kind::kLineUnits && kPanels == 2 && needed == 1 && rows > 1 ? 2 : needed;
}

// The smallest number of rows of a block. One pass over the weights takes fewer rows in every kind.
// The blocks of a linear differ in their numbers of rows by at most a factor of 2,
// so that tiles of few rows need not be compiled.
constexpr int kLeastBlockRows = 16;

// Returns the smallest number of int8 rows of a tile, over all ways to divide
// the rows of a block into tiles. Smaller tiles are not compiled.
template <class Kind, int kRows, int kPanels>
constexpr int least_tile_rows() {
  static_assert(Kind::kSizesCutPasses || Kind::kStreamRows < kLeastBlockRows,
                "a block has more rows than a pass");
  if (Kind::kSizesCutPasses || kRows < 4) return 1;
  int64_t least = kRows;
  for (int terms = 1; terms <= 2; terms++) {
    // Larger numbers of rows need not be checked: if there are more than twice
    // as many rows as a tile can have, every tile is more than two thirds full.
    for (int64_t rows = Kind::kStreamRows / terms + 1; rows * terms <= 4 * kRows + 16; rows++) {
      const int64_t part = rows / tiles_of<Kind, kRows, kPanels>(rows, terms) * terms;
      least = part < least ? part : least;
    }
  }
  return static_cast<int>(least);
}

// Runs a tile of NP panels: tile number `i` of the `calls` tiles of a block.
template <class Kind, int NP, int kRows, int kLeast>
CPUSERVE_INLINE void run_wide(const Block& b, LinearTile& t, int rows, int64_t i, int64_t calls) {
  if constexpr (Kind::kLineUnits) {
    share_lines<Kind>(b, t, i, calls);
    call_tile<Kind, false, NP, 0, kRows, kLeast>(rows, t);
  } else {
    share_units<Kind>(b, t, i, calls);
    call_tile<Kind, false, NP, 1, kRows, kLeast>(rows, t);
  }
}

// Sets t.x to `rows` rows of activations from `row` on. If the kind widens bf16 rows (kWidens),
// writes units [t.u0, t.u1) of these rows as fp32 to the scratch, and sets t.x to this copy.
template <class Kind>
CPUSERVE_INLINE void place_rows(const LinearArgs& a, int64_t row, int rows, LinearTile& t) {
  t.x = static_cast<const uint8_t*>(a.x) + static_cast<size_t>(row) * a.x_stride;
  if constexpr (Kind::kWidens) {
    float* const widened = static_cast<float*>(a.scratch) + kSumsFloats;
    constexpr int64_t kApart = 16;  // floats between rows, so that they do not share sets of L1
    const int64_t n = round_up(2 * (t.u1 - t.u0), kApart), stride = n + kApart;
    for (int r = 0; r < rows; r++) {
      const uint8_t* from = t.x + static_cast<size_t>(r) * a.x_stride;
      const auto* pairs = reinterpret_cast<const uint16_t*>(from) + 2 * t.u0;
      float* to = widened + r * stride;
      for (int64_t i = 0; i < n; i += kLanes) store(to + i, load_bf16(pairs + i));
    }
    t.x = reinterpret_cast<const uint8_t*>(widened);
    t.x_stride = static_cast<size_t>(stride) * sizeof(float);
    t.x_u0 = t.u0;
  }
}

// Runs all tiles of one block. A tile has at most kRows rows and kPanels panels.
template <class Kind, int kRows, int kPanels>
CPUSERVE_INLINE void run_tiles(const LinearArgs& a, const Block& b, bool plain) {
  const PackedWeight& w = *a.w;
  float* c = static_cast<float*>(a.scratch);
  constexpr int kWidth = sums_stride<false>();
  constexpr int kLeast = least_tile_rows<Kind, kRows, kPanels>();
  const int64_t tiles = tiles_of<Kind, kRows, kPanels>(b.rows, a.terms);
  const int64_t base = b.rows / tiles, longer = b.rows % tiles;  // rows of a tile: base or base + 1
  LinearTile t;
  t.x_stride = a.x_stride / static_cast<size_t>(a.terms);
  t.x_padded = padded_width(Kind::kAct, w.k);
  t.x_u0 = 0;
  t.panel_bytes = w.panel_bytes;
  t.unit_bytes = unit_bytes<Kind>(w);
  t.u0 = b.u0;
  t.split = t.u1 = b.u1;
  t.fetch_near = a.sizes.near_blocks == 0;
  t.resume = b.u0 > 0;
  t.last = b.last;
  const int64_t together = plain ? 1 : kFinishTiles;
  int64_t calls = 0, call = 0;
  for (int p = 0; p < b.panels; p += panels_at_once<kPanels>(b.panels - p)) calls += tiles;
  for (int64_t i = 0, row = 0, unfinished = 0; i < tiles; i++) {
    const int rows = static_cast<int>(base + (i < longer)) * a.terms;
    float* sums = c + (b.keep ? row : row - unfinished) * a.terms * kWidth;
    place_rows<Kind>(a, b.row0 + row, rows, t);
    if (b.last) fetch_output(a.ep, b.row0 + row, rows / a.terms, b.panel0, b.panels);
    for (int p = 0, np; p < b.panels; p += np) {
      np = panels_at_once<kPanels>(b.panels - p);
      t.w = w.data + static_cast<size_t>(b.panel0 + p) * w.panel_bytes;
      t.c = sums + p * kPanel;
      if (np == 1) {
        run_wide<Kind, 1, kRows, kLeast>(b, t, rows, call++, calls);
      } else if (np == kPanels) {
        run_wide<Kind, kPanels, kRows, kLeast>(b, t, rows, call++, calls);
      } else if constexpr (kPanels > 2) {
        run_wide<Kind, 2, kRows, kLeast>(b, t, rows, call++, calls);
      }
    }
    row += rows / a.terms;
    if (b.last && ((i + 1) % together == 0 || i + 1 == tiles)) {
      float* first = c + (b.keep ? unfinished * a.terms * kWidth : 0);
      const int count = static_cast<int>(row - unfinished) * a.terms;
      finish_terms(a, plain, b.row0 + unfinished, count, b.panel0, b.panels, first, kWidth);
      unfinished = row;
    }
  }
}

// Blocks of at most two panels (half a strip) use tiles with twice as many rows.
// A tile of 6 x 2 sums would broadcast (and widen) every element of a row for 2 products instead
// of 4, and runs at three quarters of the rate of a tile of 6 x 4 sums. Few int8 rows use the
// taller tiles as well if K blocks stay in L2: 13 rows then take two tiles instead of three.
// On Zen 4, 13, 14 and 16 rows of w8_channel run at 780, 801 and 840 billion operations a second
// with taller tiles, and at 691, 782 and 821 billion with tiles of 6 x 4 sums.
template <class Kind>
CPUSERVE_INLINE void run_block(const LinearArgs& a, const Block& b, bool plain) {
  if constexpr (Kind::kHalfRows > Kind::kRows) {
    const bool few = b.rows * a.terms <= kLeastBlockRows;
    const bool tall = Kind::kNearBlocks && a.sizes.near_blocks == 0 && few;
    if (b.panels <= 2 || tall) return run_tiles<Kind, Kind::kHalfRows, 2>(a, b, plain);
  }
  run_tiles<Kind, Kind::kRows, Kind::kPanels>(a, b, plain);
}

// Returns the number of units of a K block, if K has `units` units and `most` units fit the cache.
// There are as few K blocks as possible, all of about the same size.
template <class Kind>
CPUSERVE_INLINE int64_t even_units(int64_t units, int64_t most) {
  const int64_t blocks = most < 1 ? units : (units + most - 1) / most;
  return round_up((units + blocks - 1) / blocks, Kind::kWholeUnits);
}

// Returns the number of units of a K block of a strip, if K has `units` units.
// in_l1: K blocks fit L1, if WorkSizes::near_blocks is 1.
template <class Kind>
CPUSERVE_INLINE int64_t block_units(int64_t units, const WorkSizes& sizes, bool in_l1) {
  constexpr int64_t kPair = 2 * sizeof(float);
  const int32_t near = sizes.near_bytes;
  const bool small = in_l1 && sizes.near_blocks != 0 && near < sizes.strip_bytes;
  const int32_t bytes = small ? near : sizes.strip_bytes;
  const int64_t fit = bytes / (kStripPanels * Kind::kUnitBytes);
  const int64_t widened = near / (Kind::kHalfRows * kPair);
  return even_units<Kind>(units, Kind::kWidens && widened < fit ? widened : fit);
}

// Returns the largest number of int8 or float rows that are computed in one pass over the weights.
template <class Kind>
CPUSERVE_INLINE int64_t pass_rows(const WorkSizes& sizes) {
  if constexpr (!Kind::kSizesCutPasses) return Kind::kStreamRows;
  return sizes.float_pass_rows < Kind::kStreamRows ? sizes.float_pass_rows : Kind::kStreamRows;
}

// Calls run(b) for the K blocks of every strip of every row block, with `step` units in a K block.
// The K blocks of a strip follow one another.
template <class Kind, class Run>
CPUSERVE_INLINE void over_blocks(const LinearArgs& a, int64_t step, const Run& run) {
  const PackedWeight& w = *a.w;
  const int64_t units = Kind::units(w.k), bytes = unit_bytes<Kind>(w);
  const int64_t rows = a.sizes.rows < 2 * kLeastBlockRows ? 2 * kLeastBlockRows : a.sizes.rows;
  const int64_t height = rows / a.terms, total = panels_of(w);
  const int64_t blocks = (a.m + height - 1) / height;
  Block b;
  b.row0 = 0;
  for (int64_t i = 0; i < blocks; i++, b.row0 += b.rows) {
    b.rows = (a.m - b.row0) / (blocks - i);  // blocks have about the same number of rows
    b.keep = step < units;
    for (b.panel0 = a.panel0; b.panel0 < a.panel1; b.panel0 += kStripPanels) {
      const int64_t left = a.panel1 - b.panel0;
      b.panels = static_cast<int>(left < kStripPanels ? left : kStripPanels);
      const uint8_t* strip = w.data + static_cast<size_t>(b.panel0) * w.panel_bytes;
      for (b.u0 = 0; b.u0 < units; b.u0 += step) {
        b.u1 = b.u0 + step < units ? b.u0 + step : units;
        b.last = b.u1 == units;
        if (!b.last) {
          b.next = strip + step * bytes;
        } else {
          b.next = b.panel0 + b.panels < total
                       ? strip + static_cast<size_t>(b.panels) * w.panel_bytes - b.u0 * bytes
                       : nullptr;
        }
        run(b);
      }
    }
  }
}

// Computes a linear for many rows: a K block of a strip stays in L2 while all rows of a row block
// are multiplied by it. For few rows (if one pass over the weights would be slower),
// K blocks stay in L1, because few rows have few products for each byte that is read.
template <class Kind>
CPUSERVE_INLINE void blocked(const LinearArgs& a) {
  const bool plain = plain_f32(a.ep), few = a.m * a.terms <= Kind::kStreamRows;
  const int64_t units = Kind::units(a.w->k);
  const int64_t step = block_units<Kind>(units, a.sizes, Kind::kNearBlocks || few);
  over_blocks<Kind>(
      a,
      step, [&](const Block& b) __attribute__((always_inline)) { run_block<Kind>(a, b, plain); });
}

// Returns the number of elements of K in `block` units, if K has `units` units.
inline int64_t elements_of(int64_t k, int64_t units, int64_t block) {
  const int64_t all = block * ((k + units - 1) / units);
  return all < k ? all : k;
}

// Returns the number of units of a K block of unpacked codes (bytes), which stays in L1. If tiles
// have two panels, a third of L1 is left for the rows: 16 rows then run up to 1.1 times as fast.
template <class Kind>
CPUSERVE_INLINE int64_t unpacked_units(int64_t units, const WorkSizes& sizes) {
  constexpr int kParts = Kind::kPanels == 1 ? 1 : Kind::kPanels + 1;
  return even_units<Kind>(units, sizes.near_bytes / (kParts * Kind::kUnitCodes * kPanel));
}

template <class Kind>
int64_t linear_block_k(int64_t k, const WorkSizes& sizes) noexcept {
  const int64_t units = Kind::units(k);
  const int64_t block = [&] {
    if constexpr (Kind::kUnpacks) return unpacked_units<Kind>(units, sizes);
    return block_units<Kind>(units, sizes, Kind::kNearBlocks);
  }();
  return elements_of(k, units, block);
}

// Computes a linear for many rows with codes that are unpacked first (linear/unpacked.h).
template <class Kind>
CPUSERVE_INLINE void unpacked(const LinearArgs& a);

// Whether some products of more rows than a pass has multiply packed codes.
template <class Kind>
constexpr bool blocks_packed() {
  if constexpr (Kind::kUnpacks) return Kind::kPackedRows > 0;
  return true;
}

template <class Kind>
void run_linear(const LinearArgs& a) noexcept {
  if (a.m <= 0 || a.panel0 >= a.panel1) return;
  if (a.m * a.terms <= pass_rows<Kind>(a.sizes)) return stream<Kind>(a);
  if constexpr (Kind::kUnpacks) {
    if (a.m * a.terms > Kind::kPackedRows) return unpacked<Kind>(a);
  }
  if constexpr (blocks_packed<Kind>()) blocked<Kind>(a);
}

}  // namespace
}  // namespace CPUSERVE_NS
