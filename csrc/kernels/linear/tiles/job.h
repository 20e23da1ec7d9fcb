// One job of a linear on matrix tiles: up to 32 rows by 2 panels over a block of K, with its
// scratch and its prefetches; and the sizes of blocks (linear/tiles.h).
#pragma once
#include "kernels/generic/matrix_job.h"
#include "kernels/linear/driver.h"

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

// For up to this many int8 rows, the vector kernels of linear/driver.h are faster than tiles. Tiles
// mostly need the weights unpacked to memory, and return the integer sums through memory.
// Both compute the integers exactly and add them to the fp32 sums in the same order, so a row gets
// the same bits.
// Measured on Granite Rapids, tiles take 1.2 to 1.7 times as long for one row, 0.9 to 1.3 times for
// 8 rows, and 0.7 to 1.1 times for 16. With codes in planes they take 1 to 1.2 times as long for 12
// rows, and 0.8 to 1 times for 16.
constexpr int kGroupVectorRows = 8;
constexpr int kPlaneVectorRows = 12;

}  // namespace
}  // namespace CPUSERVE_NS
