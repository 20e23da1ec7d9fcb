// Linears on matrix products of Arm: int8 and 4-bit kinds with SMMLA, dense_bf16 with BFMMLA.
//
// Panels have 8 adjacent bytes of a column instead of 4 (kernels/table/weights.h).
// A line of a panel is here 16 columns of 8 bytes (8 int8 or 4 bf16 of K: one step of K),
// and two neighbouring columns are one operand of a product. The other operand is 8 bytes
// of each of two rows, so rows are first interleaved in pairs. If the number of rows is odd,
// the last row is paired with itself. A single row then takes as many matrix products as it would
// take dot products, and the instructions that compute a row do not depend on the number of rows.
//
// A tile is up to kPairs pairs of rows by 8 or 4 pairs of columns, with its sums in registers.
// Chain kinds have one scale for all of K, or no scale. A step of 6 x 4 products needs
// 10 loads, and Neoverse V1 and V2 can do 3 loads for every 4 products, so loads are not the limit.
// Tiles of group kinds have 3 x 4 integer sums of a group and 3 x 4 fp32 sums in registers.
//
// With few rows, one pass over the weights reads each packed panel once.
// With many rows, K is divided into K blocks that stay in L1, and all rows are multiplied
// by a K block of a strip before the next one. The weights of a K block are first unpacked to bytes
// and fp32 scales, unless a panel has them in this form already.
#pragma once
#include "kernels/linear/dense.h"
#include "kernels/linear/mmla/chains.h"
#include "kernels/linear/mmla/groups.h"
#include "kernels/linear/mmla/pack.h"

namespace CPUSERVE_NS {
namespace {

template <class Kind, bool kUnpacked, int RP = 1>
CPUSERVE_INLINE void call_mmla(int pairs, const MmlaTile& t) {
  if (pairs == RP) return Kind::template tile<kUnpacked, RP, Kind::column_pairs(RP)>(t);
  if constexpr (RP < Kind::kPairs) call_mmla<Kind, kUnpacked, RP + 1>(pairs, t);
}

// Runs the tiles of all columns of one panel for `pairs` pairs of rows.
// The tiles together prefetch `lines` cache lines from `next` on, to L1 if `near`, else to L2.
template <class Kind, bool kUnpacked>
CPUSERVE_INLINE void run_panel(int pairs, MmlaTile& t, const uint8_t* next, int64_t lines,
                               bool near) {
  const int wide = Kind::column_pairs(pairs);
  const int64_t share = (lines * wide + kColumnPairs - 1) / kColumnPairs;
  float* const c = t.c;
  for (t.pair0 = 0; t.pair0 < kColumnPairs; t.pair0 += wide, next += share * 64) {
    const int64_t beats = Kind::kUnitBytes > kLineBytes ? t.units : t.units / kBeat;
    t.fetch.at = next;
    t.fetch.left = beats ? share : 0;
    t.fetch.a_step = beats ? (share + beats - 1) / beats : 0;
    t.fetch.near = near;
    t.c = c + 2 * t.pair0;
    call_mmla<Kind, kUnpacked>(pairs, t);
  }
  t.c = c;
}

template <class Kind>
CPUSERVE_INLINE MmlaRows rows_of_call(const LinearArgs& a) {
  return {static_cast<const uint8_t*>(a.x), a.x_stride / static_cast<size_t>(a.terms),
          padded_width(Kind::kAct, a.w->k), static_cast<int>(a.m) * a.terms, a.w->k};
}

// Computes a linear for the rows of at most one tile:
// every panel is read once, in the order of memory.
template <class Kind>
CPUSERVE_INLINE void stream_mmla(const LinearArgs& a) {
  const PackedWeight& w = *a.w;
  const MmlaRows rows = rows_of_call<Kind>(a);
  MmlaScratch& scratch = *static_cast<MmlaScratch*>(a.scratch);
  const int pairs = pairs_of(rows.rows);
  const int64_t units = Kind::units(w.k), steps = Kind::steps(w.k);
  // If the columns of a panel need two tiles,
  // K is divided into K blocks that stay in L1 while both tiles read them.
  const int64_t block = Kind::column_pairs(pairs) == kColumnPairs ? units : Kind::kBlock;
  const bool plain = plain_f32(a.ep);
  Kind::prepare(rows, 0, units, scratch.rows);
  MmlaTile t;
  t.c_stride = sums_stride<true>();
  for (int64_t p0 = a.panel0; p0 < a.panel1; p0 += kSpanPanels) {
    const int span = static_cast<int>(a.panel1 - p0 < kSpanPanels ? a.panel1 - p0 : kSpanPanels);
    for (int p = 0; p < span; p++) {
      const uint8_t* panel = w.data + static_cast<size_t>(p0 + p) * w.panel_bytes;
      t.c = scratch.sums + p * kPanel;
      for (int64_t u0 = 0; u0 < units; u0 += block) {
        t.units = u0 + block < units ? block : units - u0;
        t.steps = steps - u0 * Kind::kUnitSteps;
        t.resume = u0 > 0;
        t.a = scratch.rows + u0 * Kind::kPairBytes * pairs;
        t.b = panel + u0 * Kind::kUnitBytes;
        run_panel<Kind, false>(pairs, t, t.b + a.sizes.ahead_bytes, t.units * Kind::kUnitBytes / 64,
                               true);
      }
    }
    Kind::finish_sums(a, rows, p0, span, scratch.sums, t.c_stride);
    finish_terms(a, plain, 0, rows.rows, p0, span, scratch.sums, t.c_stride);
  }
}

// The number of rows that the epilogue processes together (see kFinishTiles in linear/driver.h).
constexpr int64_t kFinishRows = 24;

// The rows that are multiplied by a K block, divided into `tiles` tiles of `height` rows.
struct MmlaBlock {
  MmlaRows rows;
  int64_t row0;  // the first row of the block, counted from row 0 of the linear
  int64_t tiles, height;
};

// Computes units [u0, u0 + t.units) of K for a strip of panels: multiplies the rows of one tile
// by all panels while these rows stay in L1, and then the rows of the next tile.
template <class Kind>
CPUSERVE_INLINE void run_mmla_block(const LinearArgs& a, const MmlaBlock& b, int64_t panel0,
                                    int panels, int64_t u0, MmlaTile& t) {
  const PackedWeight& w = *a.w;
  MmlaScratch& scratch = *static_cast<MmlaScratch*>(a.scratch);
  const bool last = u0 + t.units == Kind::units(w.k);
  const uint8_t* strip = w.data + static_cast<size_t>(panel0) * w.panel_bytes;
  const size_t offset = static_cast<size_t>(u0 * Kind::kUnitBytes);
  if constexpr (Kind::kUnpacks) {
    for (int p = 0; p < panels; p++) {
      const uint8_t* from = strip + static_cast<size_t>(p) * w.panel_bytes + offset;
      Kind::unpack(from, t.units, scratch.lines[p]);
    }
  }
  // While the tiles multiply, they prefetch the next K block of this strip to L2,
  // or the first K block of the next strip.
  const size_t next = last ? kStripPanels * w.panel_bytes
                           : offset + static_cast<size_t>(t.units * Kind::kUnitBytes);
  const bool fetched = !last || panel0 + 2 * kStripPanels <= panels_of(w);
  const int64_t lines = fetched ? t.units * Kind::kUnitBytes / 64 : 0;
  const int64_t share = (lines + b.tiles - 1) / b.tiles;
  for (int64_t row = 0, i = 0; row < b.rows.rows; row += b.height, i++) {
    MmlaRows some = b.rows;
    some.x += static_cast<size_t>(row) * some.stride;
    some.rows = static_cast<int>(b.rows.rows - row < b.height ? b.rows.rows - row : b.height);
    if (last) {
      fetch_output(a.ep, (b.row0 + row) / a.terms, some.rows / a.terms, panel0, panels);
    }
    Kind::prepare(some, u0, t.units, scratch.rows);
    t.a = scratch.rows;
    for (int p = 0; p < panels; p++) {
      const uint8_t* panel = strip + static_cast<size_t>(p) * w.panel_bytes;
      t.b = Kind::kUnpacks ? scratch.lines[p] : panel + offset;
      t.c = scratch.sums + row * t.c_stride + p * kPanel;
      run_panel<Kind, Kind::kUnpacks>(pairs_of(some.rows), t, panel + next + i * share * 64, share,
                                      false);
    }
  }
}

// Computes a linear for many rows: they use a K block of a strip while it is in L2.
template <class Kind>
CPUSERVE_INLINE void blocked_mmla(const LinearArgs& a) {
  const MmlaRows all = rows_of_call<Kind>(a);
  float* const sums = static_cast<MmlaScratch*>(a.scratch)->sums;
  const bool plain = plain_f32(a.ep);
  const int64_t units = Kind::units(a.w->k), steps = Kind::steps(a.w->k);
  constexpr int kWidth = sums_stride<false>();
  MmlaTile t;
  t.c_stride = kWidth;
  for (int64_t row0 = 0; row0 < all.rows; row0 += a.sizes.rows) {
    MmlaBlock b{all, row0, 0, 0};
    b.rows.x += static_cast<size_t>(row0) * all.stride;
    b.rows.rows = static_cast<int>(all.rows - row0 < a.sizes.rows ? all.rows - row0 : a.sizes.rows);
    b.tiles = (b.rows.rows + 2 * Kind::kPairs - 1) / (2 * Kind::kPairs);
    b.height = round_up((b.rows.rows + b.tiles - 1) / b.tiles, 2);  // tiles of equal, even height
    for (int64_t panel0 = a.panel0; panel0 < a.panel1; panel0 += kStripPanels) {
      const int64_t left = a.panel1 - panel0;
      const int panels = static_cast<int>(left < kStripPanels ? left : kStripPanels);
      for (int64_t u0 = 0; u0 < units; u0 += Kind::kBlock) {
        t.units = u0 + Kind::kBlock < units ? Kind::kBlock : units - u0;
        t.steps = steps - u0 * Kind::kUnitSteps;
        t.resume = u0 > 0;
        run_mmla_block<Kind>(a, b, panel0, panels, u0, t);
      }
      Kind::finish_sums(a, b.rows, panel0, panels, sums, kWidth);
      for (int64_t row = 0; row < b.rows.rows; row += kFinishRows) {
        const int64_t rest = b.rows.rows - row;
        finish_terms(a, plain, (row0 + row) / a.terms,
                     static_cast<int>(rest < kFinishRows ? rest : kFinishRows), panel0, panels,
                     sums + row * kWidth, kWidth);
      }
    }
  }
}

template <class Kind>
void run_mmla(const LinearArgs& a) noexcept {
  if (a.m <= 0 || a.panel0 >= a.panel1) return;
  const int64_t rows = a.m * a.terms;
  // Interleaving rows rounds the number of steps of K up to an even number.
  const int64_t prepared = (Kind::units(a.w->k) + 1) * Kind::kPairBytes * pairs_of(rows);
  if (rows <= 2 * Kind::kPairs && prepared <= static_cast<int64_t>(kPreparedBytes)) {
    stream_mmla<Kind>(a);
  } else {
    blocked_mmla<Kind>(a);
  }
}

// The value of LinearKernel::tile_panels. A tile has half a panel or one panel, but a task of one
// panel would be slow, because each task interleaves its rows again.
constexpr int kTaskPanels = 2;

// The size of a K block is a constant that suits L1, because the interleaved rows of a tile
// and the unpacked weights of the K block stay in L1.
template <class Kind>
int64_t mmla_block_k(int64_t k, const WorkSizes&) noexcept {
  return elements_of(k, Kind::units(k), Kind::kBlock);
}

template <class Kind>
constexpr LinearKernel mmla_dense_kernel() {
  return {Kind::kAct,
          mmla_dense_bytes,
          pack_dense<Bf16Element, kStepBytes / 2>,
          run_mmla<Kind>,
          dense_row<Bf16Element, kStepBytes / 2>,
          2 * Kind::kPairs,
          2 * Kind::column_pairs(Kind::kPairs),
          kTaskPanels,
          2 * Kind::kPairs,
          mmla_block_k<Kind>,
          kStepBytes};
}
template <class Kind>
constexpr LinearKernel mmla_channel_kernel() {
  return {Kind::kAct,
          mmla_channel_bytes,
          pack_channel<kStepBytes, 0>,
          run_mmla<Kind>,
          channel_row<kStepBytes, 0>,
          2 * Kind::kPairs,
          2 * Kind::column_pairs(Kind::kPairs),
          kTaskPanels,
          2 * Kind::kPairs,
          mmla_block_k<Kind>,
          kStepBytes};
}
template <class W>
constexpr LinearKernel mmla_group_kernel() {
  return {W::kAct,
          group_panel_bytes<W>,
          pack_mmla_group<W>,
          run_mmla<MmlaGroup<W>>,
          mmla_group_row<W>,
          2 * MmlaGroup<W>::kPairs,
          2 * MmlaGroup<W>::column_pairs(MmlaGroup<W>::kPairs),
          kTaskPanels,
          2 * MmlaGroup<W>::kPairs,
          mmla_block_k<MmlaGroup<W>>,
          kStepBytes};
}

}  // namespace
}  // namespace CPUSERVE_NS
