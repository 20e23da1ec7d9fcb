// The loops of a linear, for all weight kinds: panels outermost, so that each is read from memory
// once; then rows; K innermost. A kind defines the tile:
//
//   struct Kind {
//     static constexpr int64_t kUnitBytes   bytes of one panel per unit of K (pair, element, group)
//     static constexpr bool kSharesHeaders  so many at most: several units may share a header
//     static int64_t units(int64_t k)
//     static constexpr int64_t kWholeUnits  a K block is a multiple of this many units
//     static constexpr ActFormat kAct
//     static constexpr bool kWidens         tiles of many rows read bf16 rows widened to fp32
//     static constexpr bool kNearBlocks     a K block stays in L1, and so do its rows
//     static constexpr int kStreamRows      up to this many rows take one pass over the weights
//     static constexpr bool kSizesCutPasses WorkSizes::float_pass_rows may be less than that
//     static constexpr int stream_panels(int rows)         panels side by side in that pass
//     static constexpr int kRows, kPanels   the tile for more rows than kStreamRows
//     static constexpr int kHalfRows        rows of that tile where it has two panels
//     static constexpr bool kLineUnits      a unit of a panel has 32 or 64 bytes, so at most a line
//     static constexpr int kTurns           only if not kLineUnits; see share_units
//     template <int MR, int NP, bool kNear, int NPF> static void tile(const LinearTile&)
//   };
//
// A tile starts from zero or from the sums of the previous K block in `c`. Each output element is
// one chain of additions over ascending K, so tile shapes and K blocks never change a bit.
#pragma once
#include "kernels/generic/epilogue.h"
#include "kernels/table.h"
#include "kernels/vec/vec.h"

namespace CPUSERVE_NS {
namespace {

// The part of the next K block that a tile prefetches while it computes. The panels of that block
// take turns. With a turn, the tile prefetches one stretch of a panel: `every` pieces of `step`
// bytes, one piece with each of its own next `every` units.
struct UnitShare {
  const uint8_t* at = nullptr;  // the first stretch
  int64_t every = 1, step = 0;
  int64_t panel = 0, panels = 0;  // the panel of the first stretch; the number of panels
  // Whether a turn is due: each `every` units add `panels` to the credit, and a turn costs `calls`.
  int64_t credit = 0, calls = 1;
};

struct LinearTile {
  const uint8_t* x;  // first row, from unit x_u0 on
  size_t x_stride;
  int64_t x_u0;
  int64_t x_padded;  // row width in elements, as stored
  const uint8_t* w;  // first panel
  size_t panel_bytes;
  int64_t unit_bytes;     // of one panel
  int64_t u0, split, u1;  // units of K
  // The prefetches of a tile depend on its use.
  // One pass over the weights (kNear): with unit u, ahead0 + (u - u0) unit_bytes if u is below
  // `split`, otherwise ahead1 + (u - u0) unit_bytes; the same place of the panels after the first.
  // A K block of a kind with kLineUnits: after every `fetch_every` units, one line of each of
  // `fetch_panels` panels of the next block, beginning with the line at ahead0.
  // For a K block of another kind, `share` has the part of the next block to prefetch.
  const uint8_t *ahead0, *ahead1;
  int64_t fetch_every, fetch_panels;
  UnitShare share;
  bool fetch_near = false;  // in a pass and with kLineUnits: to L1, otherwise to L2
  float* c;                 // sums, row stride sums_stride<kNear>()
  bool resume;              // c holds the sums of the units below u0
  bool last;                // u1 is the end of K
};

// Says where a tile of a kind without kLineUnits prefetches from. Units of a panel have
// `unit_bytes` bytes.
template <bool kNear>
class TileFetch {
 public:
  __attribute__((always_inline)) inline TileFetch(const LinearTile& t, int64_t unit_bytes)
      : t_(t),
        unit_bytes_(unit_bytes),
        at_(t.share.at),
        panel_(t.share.panel),
        credit_(t.share.credit) {}

  // Bytes between the prefetches of one unit and of the next one.
  __attribute__((always_inline)) inline int64_t step() const {
    return kNear ? unit_bytes_ : t_.share.step;
  }

  // Sets `ahead` to the prefetch of unit u, with weights at `w`. Returns the end of
  // the units that `ahead` then advances with, by step() each.
  __attribute__((always_inline)) inline int64_t next(int64_t u, const uint8_t* w,
                                                     const uint8_t*& ahead) {
    if constexpr (kNear) {
      ahead = (u < t_.split ? t_.ahead0 : t_.ahead1) + (u - t_.u0) * unit_bytes_;
      return u < t_.split ? t_.split : t_.u1;
    } else {
      const int64_t every = t_.share.every;
      ahead = take_turn(w - every * unit_bytes_);
      return t_.u1 - u > every ? u + every : t_.u1;
    }
  }

 private:
  // Returns the next stretch of the tile's share if a turn is due, otherwise `used`: weights that
  // the tile has just read. They are in L1, so prefetching them costs nothing. To prefetch nothing
  // instead, a tile would need its code a second time.
  __attribute__((always_inline)) inline const uint8_t* take_turn(const uint8_t* used) {
    const UnitShare& share = t_.share;
    credit_ += share.panels;
    if (credit_ < share.calls) return used;
    credit_ -= share.calls;
    const uint8_t* const now = at_;
    at_ += t_.panel_bytes;
    if (++panel_ == share.panels) {
      panel_ = 0;
      at_ += share.every * share.step - share.panels * static_cast<int64_t>(t_.panel_bytes);
    }
    return now;
  }

  const LinearTile& t_;
  const int64_t unit_bytes_;
  const uint8_t* at_;
  int64_t panel_, credit_;
};

// Hides the origin of a pointer from the compiler. A tile has a few pointers that advance along K
// and adds constant row offsets to them. Without this, gcc keeps a separate pointer for every row
// and stream, and spills.
template <class T>
CPUSERVE_INLINE void opaque(T*& p) {
  asm("" : "+r"(p));
}

// Keeps loads and prefetches before this point before it, and later ones after it. Otherwise gcc
// moves most fetches of a group after its products, where they come all at once: on Granite Rapids
// one row of w4_g32 then reads 82 % of the bandwidth instead of 91 %, and one of q6_k 76 % instead
// of 95 %.
CPUSERVE_INLINE void keep_here() { asm volatile("" ::: "memory"); }

// gcc allocates registers loop by loop. If sums live longer than a short inner loop, it keeps the
// operands of that loop on the stack, which halves the rate of the tile. With the whole function as
// one region it keeps them in registers.
#if defined(__GNUC__) && !defined(__clang__)
#define CPUSERVE_ONE_REGION __attribute__((optimize("ira-region=one")))
#else
#define CPUSERVE_ONE_REGION
#endif

// Whether the quads of a group are a loop, in a tile with so many products of a quad. Where a
// product takes several instructions, the eight quads of a tile would be thousands of them, which
// take long to compile and do not run faster.
constexpr bool loops_over_quads(int products) { return kEmulatesDots && products >= 4; }

// Prefetches a line to L1 or to L2.
CPUSERVE_INLINE void fetch_to(bool near, const uint8_t* line) {
  near ? prefetch(line) : prefetch_l2(line);
}

// Prefetches `left` lines, `a_step` of them with every step of a tile, so that memory works while
// the tile computes.
struct LineFetch {
  const uint8_t* at = nullptr;
  int64_t left = 0, a_step = 0;
  bool near = false;  // into L1

  __attribute__((always_inline)) inline void step() {
    constexpr int kLine = 64;
    const int64_t n = a_step < left ? a_step : left;
    for (int64_t i = 0; i < n; i++, at += kLine) fetch_to(near, at);
    left -= n;
  }
};

// Prefetches a line of each panel of `t`, `from` of the first one.
CPUSERVE_INLINE void fetch_ahead_lines(const LinearTile& t, const uint8_t* from) {
  for (int64_t p = 0; p < t.fetch_panels; p++) {
    fetch_to(t.fetch_near, from + static_cast<size_t>(p) * t.panel_bytes);
  }
}

// Number of panels of the whole matrix. A call also prefetches beyond its last panel, because the
// next call of the same thread usually needs that.
CPUSERVE_INLINE int64_t panels_of(const PackedWeight& w) { return (w.n + kPanel - 1) / kPanel; }

// Bytes of one panel per unit of K, on average where units share headers.
template <class Kind>
CPUSERVE_INLINE int64_t unit_bytes(const PackedWeight& w) {
  if constexpr (!Kind::kSharesHeaders) return Kind::kUnitBytes;
  return static_cast<int64_t>(w.panel_bytes) / Kind::units(w.k);
}

// Number of panels that a one-pass linear collects before the epilogue; divisible by 1..4.
constexpr int kSpanPanels = kMostPanels;
// Floats from one row of the sums of a tile to the next: the width of a span in one-pass linears,
// otherwise of a strip.
template <bool kNear>
constexpr int sums_stride() {
  return (kNear ? kSpanPanels : kStripPanels) * kPanel;
}
constexpr int64_t kSumsFloats = int64_t{kMostBlockRows} * kStripPanels * kPanel;
static_assert(kSumsFloats * 4 + 2 * kMostNearBytes <= static_cast<int64_t>(kLinearScratch),
              "the sums of one row block and widened rows must fit the scratch");

// True for f32 output without activation and glu, which most linears of a model have.
CPUSERVE_INLINE bool plain_f32(const Epilogue& ep) {
  return ep.out.format == ActFormat::f32 && ep.act == Activation::none && !ep.glu;
}

// Not inlined, so that all kinds share one copy of the general epilogue.
static __attribute__((noinline)) void finish_tile(const Epilogue& ep, int64_t row0, int rows,
                                                  int64_t panel0, int panels, const float* c,
                                                  size_t stride) {
  store_tile(ep, row0, rows, panel0, panels, c, stride);
}

// The epilogue of `panels` finished panels of one row at `c`.
CPUSERVE_INLINE void finish_plain(const Epilogue& ep, int64_t row, int64_t panel0, int panels,
                                  const float* c) {
  const int64_t column0 = panel0 * kPanel;
  float* out = f32_row(ep.out, row) + column0;
  for (int i = 0; i < panels * kPanel; i += kLanes) {
    F v = load(c + i);
    if (ep.bias) v = add(v, load(ep.bias + column0 + i));
    store(out + i, ep.add ? add(load(out + i), v) : v);
  }
}

// The epilogue of `panels` finished panels of rows [row0, row0 + rows) at `c`, with `stride` floats
// per row.
CPUSERVE_INLINE void finish(const Epilogue& ep, bool plain, int64_t row0, int rows, int64_t panel0,
                            int panels, const float* c, size_t stride) {
  if (!plain || (panel0 + panels) * kPanel > ep.out.width) {
    return finish_tile(ep, row0, rows, panel0, panels, c, stride);
  }
  for (int r = 0; r < rows; r++) {
    finish_plain(ep, row0 + r, panel0, panels, c + static_cast<size_t>(r) * stride);
  }
}

// Adds the sums of the second term of a row, which are `stride` floats further, to the sums of its
// first term.
CPUSERVE_INLINE void join_terms(float* c, int stride, int panels) {
  for (int i = 0; i < panels * kPanel; i += kLanes) {
    store(c + i, add(load(c + i), load(c + stride + i)));
  }
}

// The same for `rows` rows of sums; each is one of the `terms` of a row of activations,
// then the epilogue.
static __attribute__((noinline)) void finish_terms(const LinearArgs& a, bool plain, int64_t row0,
                                                   int rows, int64_t panel0, int panels, float* c,
                                                   int stride) {
  if (a.terms == 2) {
    for (int r = 0; r < rows; r += 2) join_terms(c + r * stride, stride, panels);
  }
  finish(a.ep, plain, row0, rows / a.terms, panel0, panels, c,
         static_cast<size_t>(stride * a.terms));
}

// Prefetches the output lines that a tile will write or add to, while it computes. They were last
// used a layer ago, and waiting for them takes up to a fifth of the time of the tile.
static __attribute__((noinline)) void fetch_output(const Epilogue& ep, int64_t row0, int64_t rows,
                                                   int64_t panel0, int panels) {
  const int halves = ep.glu ? 2 : 1;
  const int64_t column0 = panel0 * kPanel / halves, n = panels * kPanel / halves;
  const int64_t padded = round_up(ep.out.width, 32);
  for (int64_t r = row0; r < row0 + rows; r++) {
    uint8_t* out = row_at(ep.out, r);
    switch (ep.out.format) {
      case ActFormat::f32:
        for (int64_t i = 0; i < n; i += 16) prefetch(out + (column0 + i) * 4);
        break;
      case ActFormat::bf16:
        for (int64_t i = 0; i < n; i += 32) prefetch(out + (column0 + i) * 2);
        break;
      case ActFormat::q8g32x2:
      case ActFormat::q8g32: {
        const QuantGroup group = group_of(out, padded, 32, column0 / 32, nullptr);
        const size_t half = ep.out.format == ActFormat::q8g32 ? 0 : ep.out.stride / 2;
        for (size_t at = 0; at <= half; at += half + !half) {
          prefetch(reinterpret_cast<uint8_t*>(group.q) + at);
          prefetch(reinterpret_cast<uint8_t*>(group.scale) + at);
          prefetch(reinterpret_cast<uint8_t*>(group.sum) + at);
        }
        break;
      }
      case ActFormat::q8g128:
      case ActFormat::q8row:
      case ActFormat::q8g256:
      case ActFormat::q8g256x2:
        break;  // tiles do not write these
    }
  }
}

// Calls the tile with the compile-time row count `rows`, from kLeast to MR.
template <class Kind, bool kNear, int NP, int NPF, int MR, int kLeast = 1>
CPUSERVE_INLINE void call_tile(int rows, const LinearTile& t) {
  if (rows == MR) return Kind::template tile<MR, NP, kNear, NPF>(t);
  if constexpr (MR > kLeast) call_tile<Kind, kNear, NP, NPF, MR - 1, kLeast>(rows, t);
}
// Calls the one-pass tile of `rows` rows with as many panels as fit its registers.
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

// For few rows: one pass over the weights, bound by memory. Every line is prefetched ahead of its
// use, even across panels.
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

// Number of row tiles that share a run of the epilogue: activations and quantization are long
// chains of dependent operations, and only several rows in parallel use the core fully.
constexpr int64_t kFinishTiles = 4;

// The parameters of one K block of a strip, except the tile itself.
struct Block {
  int64_t row0, rows;  // rows of activations; each has `terms` int8 rows
  int64_t panel0;
  int panels;
  int64_t u0, u1;
  const uint8_t* next;  // the next block, for prefetching; base as in LinearTile
  bool keep;            // more than one K block: sums stay in c, [rows][64]
  bool last;
};

// A K block takes `calls` calls of tiles. Sets what call number `i` prefetches into L2: its share
// of the next block. All shares have the same size. Then memory is never idle while tiles compute
// from cache, and never gets more requests at once than it can serve: a request that waits occupies
// one of the core's few buffers for misses, and loads that only miss L1 then wait for a free one.
// When the first four calls prefetched a whole panel each, 64 rows of w8_channel ran at 64 % of the
// dot-product peak of Granite Rapids; with equal shares they run at 76 %.
//
// There are two ways to divide a block. A block with at most Kind::kTurns / 2 calls for each panel
// has few rows, and each call has much to prefetch: the panels take turns unit by unit, which is
// nearly the order of reading by tiles. The core's own prefetcher then sees several
// streams and runs ahead in each. 12 rows of w8_g32 read 26 GB/s this way on Granite Rapids, and
// 20 GB/s if a call prefetches one panel from end to end. With more calls, turns gain nothing and
// cost up to 5 %, so each call prefetches a part of a single panel. If that part is smaller than a
// unit for each unit of the tile, some lines are prefetched several times, which costs nothing.
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

// The same for kinds of line units. Lines are fetched in the order of reading by tiles,
// of all panels in turn. So the core's own prefetcher sees one stream for each panel, and runs
// ahead of the fetches. With 24 and 32 rows of w8_channel (K = 8192), Granite Rapids reaches 79 and
// 83 % of the dot-product peak so, and 70 and 73 % if they are fetched panel by panel.
template <class Kind>
CPUSERVE_INLINE void share_lines(const Block& b, LinearTile& t, int64_t i, int64_t calls) {
  const int64_t n = b.u1 - b.u0;
  t.fetch_every = b.next ? calls : n;
  t.fetch_panels = b.next ? b.panels : 0;
  t.ahead0 = (b.next ? b.next : t.w) + (b.u0 + i * n / calls) * Kind::kUnitBytes;
}

// Panels that the next call of a tile takes of the `left` ones of a block.
template <int kPanels>
CPUSERVE_INLINE int panels_at_once(int left) {
  return left >= kPanels ? kPanels : kPanels > 2 && left > 1 ? 2 : 1;
}

// Number of tiles that share `rows` rows of activations, each of `terms` int8 rows, as equally as
// possible. kRows: int8 rows of a tile, at most.
template <class Kind, int kRows, int kPanels>
constexpr int64_t tiles_of(int64_t rows, int terms) {
  const int64_t most = kRows / terms, needed = (rows + most - 1) / most;
  // Two tiles at least, if they have two panels: a call fetches one panel of the next block.
  return !Kind::kLineUnits && kPanels == 2 && needed == 1 && rows > 1 ? 2 : needed;
}

// Rows of a block, at least: as many as no kind takes in one pass. A block is at most twice as high
// as another one of the same linear, so that tiles of few rows need not be compiled.
constexpr int kLeastBlockRows = 16;

// Int8 rows that a tile over a block may have, at least.
template <class Kind, int kRows, int kPanels>
constexpr int least_tile_rows() {
  static_assert(Kind::kSizesCutPasses || Kind::kStreamRows < kLeastBlockRows,
                "a block has more rows than a pass");
  if (Kind::kSizesCutPasses || kRows < 4) return 1;
  int64_t least = kRows;
  for (int terms = 1; terms <= 2; terms++) {
    // Beyond twice the rows of a tile, a tile is more than two thirds full.
    for (int64_t rows = Kind::kStreamRows / terms + 1; rows * terms <= 4 * kRows + 16; rows++) {
      const int64_t part = rows / tiles_of<Kind, kRows, kPanels>(rows, terms) * terms;
      least = part < least ? part : least;
    }
  }
  return static_cast<int>(least);
}

// Runs a tile of NP panels, call `i` of the `calls` of a block.
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

// Sets where a tile reads units [u0, u1) of `rows` rows from `row` on, and widens them if the kind
// does.
template <class Kind>
CPUSERVE_INLINE void place_rows(const LinearArgs& a, int64_t row, int rows, LinearTile& t) {
  t.x = static_cast<const uint8_t*>(a.x) + static_cast<size_t>(row) * a.x_stride;
  if constexpr (Kind::kWidens) {
    float* const widened = static_cast<float*>(a.scratch) + kSumsFloats;
    constexpr int64_t kApart = 16;  // floats: rows a power of two apart would share sets of L1
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

// Runs all row tiles of one block, each of kRows rows and kPanels panels at most.
template <class Kind, int kRows, int kPanels>
CPUSERVE_INLINE void run_tiles(const LinearArgs& a, const Block& b, bool plain) {
  const PackedWeight& w = *a.w;
  float* c = static_cast<float*>(a.scratch);
  constexpr int kWidth = sums_stride<false>();
  constexpr int kLeast = least_tile_rows<Kind, kRows, kPanels>();
  const int64_t tiles = tiles_of<Kind, kRows, kPanels>(b.rows, a.terms);
  const int64_t base = b.rows / tiles, longer = b.rows % tiles;  // equal tiles: no short last one
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

// Half a strip takes taller tiles: with 6 x 2 sums, every element of a row would be broadcast (and
// widened) for 2 products instead of 4, and such tiles run at three quarters of the rate of 6 x 4.
// Few rows of int8 take them too where blocks stay in L2: 13 rows are two tiles of a strip, not
// three. On Zen 4, 13, 14 and 16 rows of w8_channel run at 780, 801 and 840 billion operations a
// second so, and at 691, 782 and 821 with tiles of 6 x 4.
template <class Kind>
CPUSERVE_INLINE void run_block(const LinearArgs& a, const Block& b, bool plain) {
  if constexpr (Kind::kHalfRows > Kind::kRows) {
    const bool few = b.rows * a.terms <= kLeastBlockRows;
    const bool tall = Kind::kNearBlocks && a.sizes.near_blocks == 0 && few;
    if (b.panels <= 2 || tall) return run_tiles<Kind, Kind::kHalfRows, 2>(a, b, plain);
  }
  run_tiles<Kind, Kind::kRows, Kind::kPanels>(a, b, plain);
}

// Units of K of a K block. There are as few blocks as possible, all of the same size. in_l1: the
// block stays in L1.
template <class Kind>
CPUSERVE_INLINE int64_t block_units(int64_t units, const WorkSizes& sizes, bool in_l1) {
  constexpr int64_t kPair = 2 * sizeof(float);
  const int32_t near = sizes.near_bytes;
  const bool small = in_l1 && sizes.near_blocks != 0 && near < sizes.strip_bytes;
  const int32_t bytes = small ? near : sizes.strip_bytes;
  const int64_t fit = bytes / (kStripPanels * Kind::kUnitBytes);
  const int64_t widened = near / (Kind::kHalfRows * kPair);
  const int64_t most = Kind::kWidens && widened < fit ? widened : fit;
  const int64_t blocks = most < 1 ? units : (units + most - 1) / most;
  return round_up((units + blocks - 1) / blocks, Kind::kWholeUnits);
}

// Rows that take one pass over the weights, at most.
template <class Kind>
CPUSERVE_INLINE int64_t pass_rows(const WorkSizes& sizes) {
  if constexpr (!Kind::kSizesCutPasses) return Kind::kStreamRows;
  return sizes.float_pass_rows < Kind::kStreamRows ? sizes.float_pass_rows : Kind::kStreamRows;
}

// For many rows: a K block of a strip stays in L2 while all rows pass over it. Where few rows come
// here, because a pass would be slower, it stays in L1: they compute little for the bytes they
// read.
template <class Kind>
CPUSERVE_INLINE void blocked(const LinearArgs& a) {
  const PackedWeight& w = *a.w;
  const bool plain = plain_f32(a.ep);
  const int64_t units = Kind::units(w.k), bytes = unit_bytes<Kind>(w);
  const bool few = a.m * a.terms <= Kind::kStreamRows;
  const int64_t step = block_units<Kind>(units, a.sizes, Kind::kNearBlocks || few);
  const int64_t rows = a.sizes.rows < 2 * kLeastBlockRows ? 2 * kLeastBlockRows : a.sizes.rows;
  const int64_t height = rows / a.terms, total = panels_of(w);
  const int64_t blocks = (a.m + height - 1) / height;
  Block b;
  b.row0 = 0;
  for (int64_t i = 0; i < blocks; i++, b.row0 += b.rows) {
    b.rows = (a.m - b.row0) / (blocks - i);  // equal ones, of at least half the height
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
        run_block<Kind>(a, b, plain);
      }
    }
  }
}

// The elements of K in `block` of `units` units.
inline int64_t elements_of(int64_t k, int64_t units, int64_t block) {
  const int64_t all = block * ((k + units - 1) / units);
  return all < k ? all : k;
}
template <class Kind>
int64_t linear_block_k(int64_t k, const WorkSizes& sizes) noexcept {
  const int64_t units = Kind::units(k);
  return elements_of(k, units, block_units<Kind>(units, sizes, Kind::kNearBlocks));
}

template <class Kind>
void run_linear(const LinearArgs& a) noexcept {
  if (a.m <= 0 || a.panel0 >= a.panel1) return;
  if (a.m * a.terms <= pass_rows<Kind>(a.sizes)) {
    stream<Kind>(a);
  } else {
    blocked<Kind>(a);
  }
}

}  // namespace
}  // namespace CPUSERVE_NS
