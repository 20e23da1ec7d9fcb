// A job of a linear on AMX tiles: up to 32 rows by 2 panels over a K block, with its scratch memory
// and its prefetches. This header also defines the sizes of blocks (linear/tiles.h).
#pragma once
#include "kernels/generic/matrix_job.h"
#include "kernels/linear/driver.h"

namespace CPUSERVE_NS {
namespace {

// The most lines of a K block of a chain kind. Such a K block of two panels takes 24 KB
// and stays in an L1 of 48 KB, while the rows of the jobs come from L2, at 48 bytes a cycle.
// A job of 32 rows takes 768 cycles of products. It needs 24 KB of rows and 12 KB for its sums
// (read, written, and evicted), which take 768 cycles as well. Larger K blocks would need fewer
// bytes for sums, but the two panels and the rows of a job would evict each other from L1.
// Panels and rows would then both come from L2: 4 KB for every 64 cycles of products.
constexpr int64_t kTileBlockLines = 12 * kTileLines;
// Chain kinds multiply this many rows by all K blocks before the next rows, so that the sums
// of the rows (16 KB for two panels) stay in L1 next to a K block. On Granite Rapids, an AMX tile
// of sums is stored to L1 in 15 and to L2 in 60 cycles, and loaded from them in 8 and 20 cycles.
constexpr int64_t kNearRows = 128;
// The most strips of a task, which reads its rows once for all of them. Rows that are too large
// for L2 come from L3, which delivers 10 bytes a cycle to a core of Granite Rapids.
constexpr int kSpanStrips = 4;
// The number of unpacked lines of one panel in a K block, for kinds with blocks of 256 weights:
// 128 lines of 64 bytes take 8 KB.
constexpr int64_t kGroupBlockLines = 8 * kTileLines;
// The number of unpacked lines of one panel in a K block, for other group kinds: 64 lines,
// so that two panels take 8 KB. The other data in L1 (48 KB) are 16 KB of integer sums of groups,
// 4 KB of fp32 sums and 8 KB of activation rows. On Granite Rapids, K blocks
// of twice as many lines take 1.05 to 1.18 times as long for 64 to 512 rows of w4m_g128.
constexpr int64_t kPairBlockLines = kGroupBlockLines / 2;

// The sums of a group as AMX tiles store them: integers, or the bits of floats.
using DotTiles = int32_t[2 * kJobColumns][kTileRows16 * kPanel];

// The scratch memory of the function run_tiles (linear/tiles.h).
struct TileScratch {
  float sums[kSpanStrips * kSumsFloats];        // sums of all rows (TileSums)
  uint8_t rows_tail[kJobRows][kTileLineBytes];  // the end of K of the rows, padded with zeros
  uint8_t lines_tail[kJobColumns][kTileBytes];  // the end of K of the weights, padded with zeros
  DotTiles dots[2][2];                          // sums of two groups, and of the next two groups
  uint8_t lines[kJobColumns][kGroupBlockLines * kTileLineBytes];  // unpacked weights
};
static_assert(sizeof(TileScratch) <= kLinearScratch, "the scratch of a call holds all of it");

// Prefetches `left` lines of one panel from `at` on to L2: a_step lines with every step of a job
// along K. If `second` is not 0, it prefetches as many lines of a second panel,
// which begin `second` bytes later. The last step may prefetch a few more lines.
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

// One job: up to 32 rows (two AMX tiles) by one or two panels, over lines [line0, line1) of K.
struct TileJob {
  const uint8_t* x;  // the first row of the job, at K = 0
  size_t x_stride;
  int64_t x_padded;  // elements of a row, including padding
  const uint8_t* w;  // the first packed panel of the job, at K = 0
  size_t panel_bytes;
  const uint8_t* lines;  // group kinds: the unpacked lines of the panels, from line0 on
  int64_t line0, line1;
  float* c;  // the sums, with c_stride floats from row to row
  int c_stride;
  bool resume, last;  // resume: c has the sums of the lines before line0; last: K ends at line1
  int rows;
  int configured = 0;  // the number of rows that the AMX tiles are configured for
  TileScratch* scratch;
  PairFetch* fetch;
};

CPUSERVE_INLINE const uint8_t* row_of(const TileJob& t, int row) {
  return t.x + static_cast<size_t>(row) * t.x_stride;
}

// For up to this many int8 rows, the vector kernels of linear/driver.h are faster than AMX tiles,
// which mostly need weights unpacked to memory and return the integer sums through memory.
// Both kernels add the same integers to the fp32 sums in the same order, so a row gets
// the same bits. On Granite Rapids, AMX tiles take 1.2 to 1.7 times as long as vectors
// for one row, 0.9 to 1.3 times for 8 rows, and 0.7 to 1.1 times for 16 rows. For codes in planes
// of bits, AMX takes 1 to 1.2 times as long for 12 rows, and 0.8 to 1 times for 16 rows.
constexpr int kGroupVectorRows = 8;
constexpr int kPlaneVectorRows = 12;

}  // namespace
}  // namespace CPUSERVE_NS
