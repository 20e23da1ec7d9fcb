// Linears on AMX tiles: the tile registers of AMX. bf16 weights use them at every number of rows:
// the instruction TDPBF16PS sums even and odd products separately, unlike the vector kernels.
// If only linears with many rows used it, the bits of a row would depend on the number of rows.
//
// A panel is stored as lines of 64 bytes. A line has 2 (bf16) or 4 (int8) consecutive elements of K
// for each of the 16 columns, and an AMX tile holds up to 16 lines of weights.
// A job multiplies up to 32 rows by 2 panels with all eight AMX tiles:
// four have sums, two have rows, and two have weights.
//
// Chain kinds (bf16, and int8 with one scale per row) keep their sums in AMX tiles over a K block.
// Group kinds have a scale for every 16 to 256 elements of K. Their weights are first unpacked to
// signed bytes or to bf16, once for all rows of a block (except w8_channel_g128 for up to 32 rows).
// The sums of a group are stored from AMX tiles to memory, and vector code adds them to fp32 sums
// while AMX computes the next group. In GGUF kinds with blocks of 256, a block is one group:
// its weights are unpacked to codes times their integer scales. Most of these products need
// two bytes, so each AMX tile of rows is multiplied twice: by the high and by the low bytes.
#pragma once
#include "kernels/linear/tiles/blocks.h"
#include "kernels/linear/tiles/chains.h"
#include "kernels/linear/tiles/groups.h"

namespace CPUSERVE_NS {
namespace {

// Runs a job: multiplies t.rows rows (at most 32) by `panels` panels (1 or 2) on AMX tiles.
template <class Kind>
CPUSERVE_INLINE void call_job(const TileJob& t, int panels) {
  if (t.rows > kTileRows16) {
    panels == 2 ? Kind::template job<2, 2>(t) : Kind::template job<2, 1>(t);
  } else {
    panels == 2 ? Kind::template job<1, 2>(t) : Kind::template job<1, 1>(t);
  }
}

// Returns a job with the members that are equal in all jobs of a linear.
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

// Calls run() for every K block of `block` lines, with the range of lines in `t`.
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

// Sets the range of weights to prefetch while a panel of a chain kind is multiplied: as many bytes
// as a panel has, from `ahead_bytes` after the start of the panel on, so it ends in the next panel.
// Prefetches go to L2: a prefetch to L1 would occupy one of the 16 fill buffers of L1, which loads
// of AMX tiles need, for the latency of memory. Measured on Granite Rapids, bf16 reads 5 to 9 %
// more bytes a second with prefetches to L2 at one row, and 12 to 20 % more at 32 rows.
CPUSERVE_INLINE void fetch_ahead(const LinearArgs& a, const TileJob& t, int64_t steps) {
  const uint8_t* end = a.w->data + static_cast<size_t>(panels_of(*a.w)) * t.panel_bytes;
  const int64_t bytes = static_cast<int64_t>(t.panel_bytes);
  t.fetch->at = t.w + a.sizes.ahead_bytes;
  t.fetch->left = t.fetch->at < end ? (bytes + kTileLineBytes - 1) / kTileLineBytes : 0;
  t.fetch->a_step = (t.fetch->left + steps - 1) / steps;
}

// Sets the range of weights to prefetch to L2 while a K block of a group kind is multiplied:
// the next K block of the same `panels` panels, or the first K block of the panels after them.
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

// Computes a linear for up to 32 rows: every panel is read once.
// Chain kinds process one panel at a time, in the order of memory, because memory is the limit.
// Group kinds spend time on unpacking and adding as well, so they process a K block of two panels
// at a time, and each AMX tile of rows is loaded once for both panels. On Granite Rapids at 12,
// 20 and 32 rows, two panels at a time read 1.16 to 1.29 times as many bytes a second as one panel
// at a time for w4m_g128, 1.11 to 1.22 times for nf4_g64, 1.03 to 1.14 times for w8_g32,
// 0.94 to 1.06 times for w8_channel_g128, and 0.86 to 0.99 times for bf16.
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

// The fp32 sums of some panels in memory, for `rows` int8 or bf16 rows. A row of sums has
// the columns of two panels, or of 4 panels if the epilogue needs whole strips (`strips`).
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

// Runs the epilogue for `rows` int8 or bf16 rows of some panels, with finished sums at `c`.
CPUSERVE_INLINE void finish_rows(const LinearArgs& a, bool plain, int64_t row0, int64_t rows,
                                 int64_t panel0, int panels, float* c, int stride) {
  for (int64_t row = 0; row < rows; row += kJobRows) {
    const int some = static_cast<int>(rows - row < kJobRows ? rows - row : kJobRows);
    finish_terms(a, plain, row0 + row / a.terms, some, panel0, panels, c + row * stride, stride);
  }
}

// Multiplies all rows by one K block of `np` (one or two) panels, which stays in L1 meanwhile.
// row0 is the first row of activations; `first` is the index of the first panel in `sums`.
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

// Returns the number of lines of a K block in one panel, if all of K has `lines` lines.
// In chain kinds, all K blocks have about the same size.
template <class Kind>
CPUSERVE_INLINE int64_t tile_block_lines(int64_t lines) {
  if (Kind::kGroups) return Kind::kBlockLines;
  const int64_t blocks = (lines + kTileBlockLines - 1) / kTileBlockLines;
  return round_up((lines + blocks - 1) / blocks, kTileLines);
}
// The size of a K block depends on L1, which has 48 KB on every CPU with AMX,
// so WorkSizes does not change it.
template <class Kind>
int64_t tiles_block_k(int64_t k, const WorkSizes&) noexcept {
  return elements_of(k, Kind::lines(k), tile_block_lines<Kind>(Kind::lines(k)));
}

// Sets the range of weights to prefetch to L2 while `rows` rows are multiplied by a strip:
// the next strip. Panels are stored one after another, so it begins at the end of this strip.
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

// Computes a linear for many rows of activations that stay in L2: strip after strip.
// Within a strip, it computes all of K for some rows and two panels before the next rows.
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

// Computes a linear for more rows of activations than L2 can hold. The elements of all rows
// in one K block stay in L2 while they are multiplied by the panels of a span (kSpanStrips strips).
// The function does not prefetch panels, because the hardware prefetcher does.
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

// Computes a linear for many rows: weights are read once for each block of rows.
template <class Kind>
CPUSERVE_INLINE void blocked_tiles(const LinearArgs& a) {
  const bool plain = plain_f32(a.ep);
  const bool strips = a.ep.glu && a.ep.out.format != ActFormat::f32 &&
                      a.ep.out.format != ActFormat::bf16;  // 32 results from 4 panels share a scale
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

// Returns the most int8 rows of a linear that does not run on AMX tiles:
// the vector kernel of the ISA level below computes linears of so few rows.
template <class Kind>
constexpr int few_rows() {
  if constexpr (Kind::kAct == ActFormat::bf16) {
    return 0;
  } else {
    return Kind::kVectorRows;
  }
}

// Returns a copy of `kernel` with its products on AMX tiles, and its packing of weights unchanged.
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
