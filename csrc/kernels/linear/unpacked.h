// Products of many rows with codes that are unpacked to bytes first. Unpacking the codes takes
// 10 to 35 % of the vector operations of a tile. So a K block of a panel is unpacked once
// for all rows of a row block. The codes have a line of 64 bytes for
// each quad (four bytes of each of 16 columns), and stay in L1 while all rows are multiplied by
// them. The headers of the units stay where they are.
//
// A kind with small codes also starts its 16-bit sums from -kZero * (sum of the codes of the row):
// such a sum is the sum of (code - kZero) * x, which is half as large. So it holds twice as many
// products, and no zero point is left to subtract. On the way it may overflow, which does no harm,
// because additions are modulo 2^16. linear/driver.h explains the terms.
//
// With int8 dot products, what remains is to multiply the sums of sub-blocks by their small scales:
// imad takes three operations for each sum, as many as three products. So the bytes of a kind
// are products of codes and small scales, if these fit a byte (Q2_K, Q3_K): nothing remains.
// Otherwise the sums of parts of a sub-block that fit 16 bits take one operation each.
// All these sums are the same integers, so the bits of the results do not depend on the form.
//
// A kind that unpacks (kUnpacks) defines, besides the members in linear/driver.h:
//   Unpacked      the kind with tiles for unpacked codes, which are at LinearTile::codes
//   kUnitCodes    the codes of a column in a unit
//   unpack(t, to) writes the codes of units [t.u0, t.u1) of the panel at t.w
//   kUnitSums     the bytes of a unit in the sums of the codes of a row
//   kPackedRows   up to so many rows are multiplied by packed codes, as in a kind without kUnpacks
//   Unpacked::kStarts, Unpacked::put_starts: the numbers in a unit that the sums of a row
//                 start from, 0 if they start from 0 (put_row_starts)
#pragma once
#include "kernels/linear/driver.h"

namespace CPUSERVE_NS {
namespace {

// The scratch of a thread holds the sums, the codes of up to two panels, and the starts of sums.
constexpr int64_t kCodesBytes = kMostNearBytes + 64;  // from panel to panel: no multiple of 4096
constexpr int64_t kStartsAt = kSumsFloats * 4 + 2 * kCodesBytes;
static_assert(kStartsAt + kMostBlockRows * (kMostNearBytes / kPanel) / 8 * 4 <=
                  static_cast<int64_t>(kLinearScratch),
              "the starts of a row block must fit the scratch: 4 bytes for 8 codes");

// The division of the rows of a block into tiles.
template <class Kind>
struct RowTiles {
  const int64_t tiles, base, longer;
  RowTiles(int64_t rows, int terms)
      : tiles(tiles_of<Kind, Kind::kRows, Kind::kPanels>(rows, terms)),
        base(rows / tiles),
        longer(rows % tiles) {}
  int64_t rows(int64_t i) const { return base + (i < longer); }  // of tile i
};

// Writes -2^kShift times the sum of each kPart codes of a unit of 256, with its sums at `sums`
// (kBlockSums in table/rows.h).
template <class W, int kPart, int kShift>
CPUSERVE_INLINE void put_unit_starts(const int8_t* codes, const uint8_t* sums, int32_t* to) {
  if constexpr (kPart == 8) {
    W::Starts::template minus<kPart, kShift>(codes, to);
    W::Starts::template minus<kPart, kShift>(codes + 128, to + 16);
  } else {
    int16_t parts[kPart == 16 ? 16 : 8];
    memcpy(parts, sums + (kPart == 16 ? 0 : 32), sizeof parts);
    if constexpr (kPart == 256) {
      int32_t sum = 0;
      for (const int16_t part : parts) sum += part;
      to[0] = -sum * (1 << kShift);
    } else {
      for (size_t i = 0; i < sizeof parts / 2; i++) to[i] = -parts[i] * (1 << kShift);
    }
  }
}

// Writes the starts of the sums of a row, for `units` units with its codes at `x` and the sums of
// its codes at `sums`: a number (or two of 16 bits) for each kStartCodes codes. In `to`, a unit has
// the numbers of all `rows` rows of a tile, row after row.
template <class W>
CPUSERVE_INLINE void put_row_starts(const uint8_t* x, const uint8_t* sums, int64_t units, int rows,
                                    int32_t* to) {
  const auto* codes = reinterpret_cast<const int8_t*>(x);
  constexpr int kShift = log2_of(W::kStartZero), kCodes = 128, kPart = W::kStartCodes;
  constexpr int kNumbers = W::kUnit / kPart;
  if constexpr (kScalesWords) {
    for (int64_t u = 0; u < units; u++, to += rows * kNumbers) {
      put_unit_starts<W, kPart, kShift>(codes + u * W::kUnit, sums + u * W::kSumBytes, to);
    }
  } else if constexpr (W::kUnit == 2 * kCodes) {
    for (int64_t u = 0; u < units; u++, codes += 2 * kCodes, to += rows * kNumbers) {
      W::Starts::template minus<kPart, kShift>(codes, to);
      W::Starts::template minus<kPart, kShift>(codes + kCodes, to + kNumbers / 2);
    }
  } else {
    constexpr int kUnits = kCodes / W::kUnit;
    int8_t copy[kCodes] = {};
    for (int64_t u = 0; u < units; u += kUnits, codes += kCodes) {
      const int64_t some = units - u < kUnits ? units - u : kUnits;
      int32_t parts[kUnits * kNumbers];
      if (some < kUnits) memcpy(copy, codes, static_cast<size_t>(some * W::kUnit));
      W::Starts::template minus<kPart, kShift>(some < kUnits ? copy : codes, parts);
      for (int i = 0; i < some; i++, to += rows * kNumbers) {
        memcpy(to, parts + i * kNumbers, sizeof(int32_t) * kNumbers);
      }
    }
  }
}

// Writes the starts of the sums of all rows, for the units of a block.
template <class Kind>
static __attribute__((noinline)) void put_starts(const LinearArgs& a, const Block& b, int32_t* to) {
  const RowTiles<Kind> tiles(b.rows, a.terms);
  const int64_t units = b.u1 - b.u0;
  const size_t stride = a.x_stride / static_cast<size_t>(a.terms);
  const uint8_t* row = static_cast<const uint8_t*>(a.x) + static_cast<size_t>(b.row0) * a.x_stride;
  const int64_t padded = padded_width(Kind::kAct, a.w->k);
  const int64_t sums = padded + padded / Kind::kUnitCodes * 4 + b.u0 * Kind::kUnitSums;
  for (int64_t i = 0; i < tiles.tiles; i++) {
    const int rows = static_cast<int>(tiles.rows(i)) * a.terms;
    for (int r = 0; r < rows; r++, row += stride) {
      Kind::put_starts(row + b.u0 * Kind::kUnitCodes, row + sums, units, rows,
                       to + r * Kind::kStarts);
    }
    to += rows * units * Kind::kStarts;
  }
}

// Returns Block::next for the `np` panels from panel p of a strip on, in a K block.
template <class Kind>
CPUSERVE_INLINE const uint8_t* next_of(const LinearArgs& a, const Block& b, int p, int np) {
  if (p + np >= b.panels) return b.next;
  return a.w->data + static_cast<size_t>(b.panel0 + p + np) * a.w->panel_bytes;
}

// Multiplies all rows of a block by `np` panels from panel p of its strip on, with unpacked codes.
template <class Kind>
CPUSERVE_INLINE void run_codes(const LinearArgs& a, const Block& b, LinearTile& t, int p, int np,
                               bool plain) {
  constexpr int kWidth = sums_stride<false>(), kRows = Kind::kRows, kPanels = Kind::kPanels;
  constexpr int kLeast = least_tile_rows<Kind, kRows, kPanels>();
  float* const c = static_cast<float*>(a.scratch);
  const RowTiles<Kind> tiles(b.rows, a.terms);
  const int32_t* starts = t.starts;
  const bool finishes = b.last && p + np == b.panels;
  Block part = b;
  part.panels = np;
  part.next = next_of<Kind>(a, b, p, np);
  for (int64_t i = 0, row = 0, unfinished = 0; i < tiles.tiles; i++) {
    const int rows = static_cast<int>(tiles.rows(i)) * a.terms;
    t.x = static_cast<const uint8_t*>(a.x) + static_cast<size_t>(b.row0 + row) * a.x_stride;
    t.c = c + row * a.terms * kWidth + p * kPanel;
    t.starts = starts + row * a.terms * (t.u1 - t.u0) * Kind::kStarts;
    if (finishes) fetch_output(a.ep, b.row0 + row, rows / a.terms, b.panel0, b.panels);
    if (np == 1) {
      run_wide<Kind, 1, kRows, kLeast>(part, t, rows, i, tiles.tiles);
    } else {
      run_wide<Kind, kPanels, kRows, kLeast>(part, t, rows, i, tiles.tiles);
    }
    row += rows / a.terms;
    if (finishes && (plain || (i + 1) % kFinishTiles == 0 || i + 1 == tiles.tiles)) {
      finish_terms(a, plain, b.row0 + unfinished, static_cast<int>(row - unfinished) * a.terms,
                   b.panel0, b.panels, c + unfinished * a.terms * kWidth, kWidth);
      unfinished = row;
    }
  }
  t.starts = starts;
}

template <class Kind>
CPUSERVE_INLINE void unpacked(const LinearArgs& a) {
  using Codes = typename Kind::Unpacked;
  const PackedWeight& w = *a.w;
  const bool plain = plain_f32(a.ep);
  uint8_t* const codes = static_cast<uint8_t*>(a.scratch) + kSumsFloats * 4;
  auto* const starts = reinterpret_cast<int32_t*>(static_cast<uint8_t*>(a.scratch) + kStartsAt);
  LinearTile t;
  t.x = static_cast<const uint8_t*>(a.x);
  t.x_stride = a.x_stride / static_cast<size_t>(a.terms);
  t.x_padded = padded_width(Kind::kAct, w.k);
  t.x_u0 = 0;
  t.panel_bytes = w.panel_bytes;
  t.unit_bytes = unit_bytes<Kind>(w);
  t.fetch_near = a.sizes.near_blocks == 0;
  t.codes = codes;
  t.starts = starts;
  const int64_t step = unpacked_units<Kind>(Kind::units(w.k), a.sizes);
  over_blocks<Kind>(
      a, step, [&](const Block& b) __attribute__((always_inline)) {
        t.u0 = b.u0;
        t.split = t.u1 = b.u1;
        t.resume = b.u0 > 0;
        t.last = b.last;
        if constexpr (Codes::kStarts > 0) put_starts<Codes>(a, b, starts);
        for (int p = 0, np; p < b.panels; p += np) {
          np = panels_at_once<Kind::kPanels>(b.panels - p);
          for (int i = 0; i < np; i++) {
            t.w = w.data + static_cast<size_t>(b.panel0 + p + i) * w.panel_bytes;
            Kind::unpack(t, codes + i * kCodesBytes);
          }
          t.w = w.data + static_cast<size_t>(b.panel0 + p) * w.panel_bytes;
          run_codes<Codes>(a, b, t, p, np, plain);
        }
      });
}

}  // namespace
}  // namespace CPUSERVE_NS
