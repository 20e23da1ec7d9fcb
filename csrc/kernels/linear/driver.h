// How a linear walks its weights, whatever their kind: panels outermost, so that each is read from
// memory once; rows inside; K innermost. A kind gives the tile:
//
//   struct Kind {
//     static constexpr int64_t kUnitBytes   bytes of one panel per unit of K (pair, element, group)
//     static int64_t units(int64_t k)
//     static constexpr int64_t kWholeUnits  a K block is a multiple of so many units
//     static constexpr ActFormat kAct
//     static constexpr int kStreamRows      up to so many rows are one pass over the weights
//     static constexpr int stream_panels(int rows)         panels side by side in that pass
//     static constexpr int kRows, kPanels   the tile for more rows than kStreamRows
//     template <int MR, int NP, bool kNear, int NPF> static void tile(const LinearTile&)
//   };
//
// A tile starts from zero or from what a previous K block left in `c`; each output element is one
// chain over ascending K, so tile shapes and K blocks never change a bit.
#pragma once
#include "kernels/generic/epilogue.h"
#include "kernels/table.h"
#include "kernels/vec/vec.h"

namespace CPUSERVE_NS {
namespace {

struct LinearTile {
  const uint8_t* x;  // first row
  size_t x_stride;
  int64_t x_padded;  // row width in elements, as stored
  const uint8_t* w;  // first panel
  size_t panel_bytes;
  int64_t u0, split, u1;  // units of K
  const uint8_t *ahead0,
      *ahead1;  // prefetch base before and from `split`: base + n panel_bytes + u kUnitBytes
  float* c;     // sums, row stride sums_stride<kNear>()
  bool resume;  // c holds the sums of the units below u0
  bool last;    // u1 is the end of K
};

// Hides where a pointer comes from. A tile has a few pointers that move along K and adds constant
// row offsets to them; gcc, left to itself, keeps one moving pointer for every row and stream and
// spills.
template <class T>
CPUSERVE_INLINE void opaque(T*& p) {
  asm("" : "+r"(p));
}

// gcc allocates registers loop by loop; where sums outlive a short inner loop it then puts that
// loop's own operands on the stack (half the rate). With the function as one region it does not.
#if defined(__GNUC__) && !defined(__clang__)
#define CPUSERVE_ONE_REGION __attribute__((optimize("ira-region=one")))
#else
#define CPUSERVE_ONE_REGION
#endif

// Bytes of weights being fetched beyond those in use, of all panels of a tile together: 40 GB/s and
// 200 ns of loaded memory latency are 8 KB.
constexpr int64_t kAheadBytes = 8192;
// Panels of the whole matrix: a call also fetches what follows its last panel, which the same
// thread's next call most often needs.
CPUSERVE_INLINE int64_t panels_of(const PackedWeight& w) { return (w.n + kPanel - 1) / kPanel; }

// Panels whose results are collected before the epilogue in a one-pass linear; divides by 1..4.
constexpr int kSpanPanels = kMostPanels;
// Floats from one row of a tile's sums to the next: of a span in one-pass linears, else of a strip.
template <bool kNear>
constexpr int sums_stride() {
  return (kNear ? kSpanPanels : kStripPanels) * kPanel;
}
// Weights of one strip and K block, half of a 1 MB L2 less the rows that pass through it.
constexpr int64_t kBlockBytes = 256 << 10;
constexpr int64_t kBlockRows = 512;
static_assert(kBlockRows * kStripPanels * kPanel * 4 <= static_cast<int64_t>(kLinearScratch),
              "the sums of one row block must fit the scratch");

// f32 output of whole panels without activation is most of a model's linears.
CPUSERVE_INLINE bool plain_f32(const Epilogue& ep) {
  return ep.out.format == ActFormat::f32 && ep.act == Activation::none && !ep.glu;
}

// One copy of the general epilogue for all kinds.
static __attribute__((noinline)) void finish_tile(const Epilogue& ep, int64_t row0, int rows,
                                                  int64_t panel0, int panels, const float* c,
                                                  size_t stride) {
  store_tile(ep, row0, rows, panel0, panels, c, stride);
}

// Epilogue of `panels` finished panels of one row at `c`.
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

// Epilogue of `panels` finished panels of rows [row0, row0 + rows) at `c`, `stride` floats a row.
CPUSERVE_INLINE void finish(const Epilogue& ep, bool plain, int64_t row0, int rows, int64_t panel0,
                            int panels, const float* c, size_t stride) {
  if (!plain || (panel0 + panels) * kPanel > ep.out.width) {
    return finish_tile(ep, row0, rows, panel0, panels, c, stride);
  }
  for (int r = 0; r < rows; r++) {
    finish_plain(ep, row0 + r, panel0, panels, c + static_cast<size_t>(r) * stride);
  }
}

// The sums of a row's second part, `stride` floats on, join those of its first.
CPUSERVE_INLINE void join_parts(float* c, int stride, int panels) {
  for (int i = 0; i < panels * kPanel; i += kLanes) {
    store(c + i, add(load(c + i), load(c + stride + i)));
  }
}

// The same for `rows` rows of sums, each of which is one of a value's `parts`.
CPUSERVE_INLINE void finish_parts(const LinearArgs& a, bool plain, int64_t row0, int rows,
                                  int64_t panel0, int panels, float* c, int stride) {
  if (a.parts == 2) {
    for (int r = 0; r < rows; r += 2) join_parts(c + r * stride, stride, panels);
  }
  finish(a.ep, plain, row0, rows / a.parts, panel0, panels, c,
         static_cast<size_t>(stride * a.parts));
}

// The lines of output that a tile is going to fill or add to come while it computes: they were last
// touched a layer ago, and waiting for them costs up to a fifth of the tile.
CPUSERVE_INLINE void fetch_output(const Epilogue& ep, int64_t row0, int64_t rows, int64_t panel0,
                                  int panels) {
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
        break;  // tiles do not write these
    }
  }
}

// Runtime row count to compile-time tile.
template <class Kind, bool kNear, int NP, int NPF, int MR>
CPUSERVE_INLINE void call_tile(int rows, const LinearTile& t) {
  if (rows == MR) return Kind::template tile<MR, NP, kNear, NPF>(t);
  if constexpr (MR > 1) call_tile<Kind, kNear, NP, NPF, MR - 1>(rows, t);
}
// The one-pass tile of `rows` rows with as many panels as its registers hold.
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

// Few rows: one pass, bound by memory; every line is prefetched kAheadBytes ahead, across panels.
template <class Kind>
CPUSERVE_INLINE void stream(const LinearArgs& a) {
  const PackedWeight& w = *a.w;
  const int rows = static_cast<int>(a.m) * a.parts, wide = stream_panels_of<Kind>(rows);
  const bool plain = plain_f32(a.ep);
  float* c = static_cast<float*>(a.scratch);
  const int64_t units = Kind::units(w.k);
  const int64_t ahead_units = kAheadBytes / wide / Kind::kUnitBytes, total = panels_of(w);
  LinearTile t;
  t.x = static_cast<const uint8_t*>(a.x);
  t.x_stride = a.x_stride / static_cast<size_t>(a.parts);
  t.x_padded = padded_width(Kind::kAct, w.k);
  t.panel_bytes = w.panel_bytes;
  t.u0 = 0;
  t.u1 = units;
  t.split = units > ahead_units ? units - ahead_units : 0;
  t.resume = false;
  t.last = true;
  for (int64_t p0 = a.panel0; p0 < a.panel1; p0 += kSpanPanels) {
    const int span = static_cast<int>(a.panel1 - p0 < kSpanPanels ? a.panel1 - p0 : kSpanPanels);
    for (int p = 0, np; p < span; p += np) {
      np = span - p >= wide ? wide : 1;
      t.w = w.data + static_cast<size_t>(p0 + p) * w.panel_bytes;
      t.ahead0 = t.w + ahead_units * Kind::kUnitBytes;
      t.ahead1 = p0 + p + np < total
                     ? t.ahead0 + static_cast<size_t>(np - 1) * w.panel_bytes +
                           (static_cast<int64_t>(w.panel_bytes) - units * Kind::kUnitBytes)
                     : t.w;
      t.c = c + p * kPanel;
      if (np == 1) {
        call_tile<Kind, true, 1, 1, Kind::kStreamRows>(rows, t);
      } else {
        call_stream_tile<Kind, Kind::kStreamRows>(rows, t);
      }
    }
    finish_parts(a, plain, 0, rows, p0, span, c, sums_stride<true>());
  }
}

// Row tiles whose epilogue is done together: activations and quantization are long chains of
// dependent operations, and only several rows' side by side fill the core.
constexpr int64_t kFinishTiles = 4;

// What one strip's K block needs besides the tile itself.
struct Block {
  int64_t row0, rows;  // values of x; each is `parts` rows of bytes
  int64_t panel0;
  int panels;
  int64_t u0, u1;
  const uint8_t* next;  // the block after this one, for the prefetch; base as in LinearTile
  bool keep;            // more than one K block: sums stay in c, [rows][64]
  bool last;
};

// All row tiles of one block. The first four fetch the next block into L2, a panel each (where
// there are fewer, the first two half of it each), so that memory is neither idle while rows are
// computed from cache nor asked for more than it gives.
template <class Kind>
CPUSERVE_INLINE void run_block(const LinearArgs& a, const Block& b, bool plain) {
  const PackedWeight& w = *a.w;
  float* c = static_cast<float*>(a.scratch);
  constexpr int kWidth = sums_stride<false>();
  const int64_t most = Kind::kRows / a.parts, tiles = (b.rows + most - 1) / most;
  const int64_t base = b.rows / tiles, longer = b.rows % tiles;  // equal tiles: no short last one
  LinearTile t;
  t.x_stride = a.x_stride / static_cast<size_t>(a.parts);
  t.x_padded = padded_width(Kind::kAct, w.k);
  t.panel_bytes = w.panel_bytes;
  t.u0 = b.u0;
  t.split = t.u1 = b.u1;
  t.resume = b.u0 > 0;
  t.last = b.last;
  const int64_t together = plain ? 1 : kFinishTiles;
  for (int64_t i = 0, row = 0, unfinished = 0; i < tiles; i++) {
    const int rows = static_cast<int>(base + (i < longer)) * a.parts;
    float* sums = c + (b.keep ? row : row - unfinished) * a.parts * kWidth;
    t.x = static_cast<const uint8_t*>(a.x) + static_cast<size_t>(b.row0 + row) * a.x_stride;
    if (b.last) fetch_output(a.ep, b.row0 + row, rows / a.parts, b.panel0, b.panels);
    for (int p = 0, np; p < b.panels; p += np) {
      np = b.panels - p >= Kind::kPanels ? Kind::kPanels : 1;
      const size_t at = static_cast<size_t>(p) * w.panel_bytes;
      t.w = w.data + static_cast<size_t>(b.panel0) * w.panel_bytes + at;
      t.ahead0 = t.ahead1 = t.w;
      t.c = sums + p * kPanel;
      if (np == 1) {
        if (b.next && i == 0) t.ahead0 = t.ahead1 = b.next + at;
        call_tile<Kind, false, 1, 1, Kind::kRows>(rows, t);
      } else if (tiles >= kStripPanels) {
        const bool fetch = b.next && i < kStripPanels && p == 0;
        if (fetch) t.ahead0 = t.ahead1 = b.next + static_cast<size_t>(i) * w.panel_bytes;
        call_tile<Kind, false, Kind::kPanels, 1, Kind::kRows>(rows, t);
      } else {
        constexpr int kHalf = (Kind::kPanels + 1) / 2;
        const size_t from = at + static_cast<size_t>(i * kHalf) * w.panel_bytes;
        if (b.next && i < 2) t.ahead0 = t.ahead1 = b.next + from;
        call_tile<Kind, false, Kind::kPanels, kHalf, Kind::kRows>(rows, t);
      }
    }
    row += rows / a.parts;
    if (b.last && ((i + 1) % together == 0 || i + 1 == tiles)) {
      float* first = c + (b.keep ? unfinished * a.parts * kWidth : 0);
      const int count = static_cast<int>(row - unfinished) * a.parts;
      finish_parts(a, plain, b.row0 + unfinished, count, b.panel0, b.panels, first, kWidth);
      unfinished = row;
    }
  }
}

// Many rows: a strip's K block stays in L2 while every row passes over it.
template <class Kind>
CPUSERVE_INLINE void blocked(const LinearArgs& a) {
  const PackedWeight& w = *a.w;
  const bool plain = plain_f32(a.ep);
  const int64_t units = Kind::units(w.k);
  const int64_t most = kBlockBytes / (kStripPanels * Kind::kUnitBytes);
  const int64_t blocks = (units + most - 1) / most;
  const int64_t step = round_up((units + blocks - 1) / blocks, Kind::kWholeUnits);
  const int64_t height = kBlockRows / a.parts, total = panels_of(w);
  for (int64_t row0 = 0; row0 < a.m; row0 += height) {
    Block b;
    b.row0 = row0;
    b.rows = a.m - row0 < height ? a.m - row0 : height;
    b.keep = step < units;
    for (b.panel0 = a.panel0; b.panel0 < a.panel1; b.panel0 += kStripPanels) {
      const int64_t left = a.panel1 - b.panel0;
      b.panels = static_cast<int>(left < kStripPanels ? left : kStripPanels);
      const uint8_t* strip = w.data + static_cast<size_t>(b.panel0) * w.panel_bytes;
      for (b.u0 = 0; b.u0 < units; b.u0 += step) {
        b.u1 = b.u0 + step < units ? b.u0 + step : units;
        b.last = b.u1 == units;
        if (!b.last) {
          b.next = strip + step * Kind::kUnitBytes;
        } else {
          b.next = b.panel0 + kStripPanels < total
                       ? strip + kStripPanels * w.panel_bytes - b.u0 * Kind::kUnitBytes
                       : nullptr;
        }
        run_block<Kind>(a, b, plain);
      }
    }
  }
}

template <class Kind>
void run_linear(const LinearArgs& a) noexcept {
  if (a.m <= 0 || a.panel0 >= a.panel1) return;
  if (a.m * a.parts <= Kind::kStreamRows) {
    stream<Kind>(a);
  } else {
    blocked<Kind>(a);
  }
}

}  // namespace
}  // namespace CPUSERVE_NS
