// A tile of a linear on matrix products of Arm:
// the rows and weights that it reads, its sums, and the products of one step (linear/mmla.h).
#pragma once
#include "kernels/linear/driver.h"
#include "kernels/vec/mmla.h"

namespace CPUSERVE_NS {
namespace {

constexpr int kStepBytes = 8;                    // bytes of one row or column in one product
constexpr int kOperandBytes = 2 * kStepBytes;    // an operand has two rows or two columns
constexpr int kColumnPairs = kPanel / 2;         // pairs of columns of a panel
constexpr int kLineBytes = kPanel * kStepBytes;  // bytes of a panel in one step of K
constexpr int kBeat = 4;                         // steps of K between two prefetches
constexpr size_t kPreparedBytes = 64 << 10;      // most bytes of interleaved (prepared) rows
constexpr size_t kUnpackedBytes = 16 << 10;      // most bytes of unpacked weights of a panel

struct MmlaScratch {
  float sums[kSumsFloats];
  uint8_t rows[kPreparedBytes];
  uint8_t lines[kStripPanels][kUnpackedBytes];
};
static_assert(sizeof(MmlaScratch) <= kLinearScratch, "the scratch of a call holds all of it");

// A tile over `units` units of K. In a chain kind (linear/mmla.h), a unit is one step of K.
// In a group kind, a unit is the groups that share a header of scales, or one group without header.
struct MmlaTile {
  const uint8_t* a;  // interleaved (prepared) rows
  const uint8_t* b;  // weights of the panel, packed or unpacked
  int pair0;         // first pair of columns
  int64_t units;
  int64_t steps;  // steps from the first of these units to the end of K
  float* c;       // the sum of the first row and the first column of the tile
  int c_stride;
  bool resume;  // whether the tile adds to sums over earlier units of K in c
  LineFetch fetch;
};

// Rows to interleave (prepare): `rows` rows from `x` on. A row has `padded` elements with padding.
struct MmlaRows {
  const uint8_t* x;
  size_t stride;
  int64_t padded;
  int rows;
  int64_t k;
};
CPUSERVE_INLINE int pairs_of(int64_t rows) { return static_cast<int>((rows + 1) / 2); }

// Calls put(pair, first row, second row) for each pair of rows.
// The last row of an odd number of rows is paired with itself.
template <class Put>
CPUSERVE_INLINE void for_each_pair(const MmlaRows& r, const Put& put) {
  for (int p = 0; p < pairs_of(r.rows); p++) {
    const uint8_t* first = r.x + static_cast<size_t>(2 * p) * r.stride;
    put(p, first, 2 * p + 1 < r.rows ? first + r.stride : first);
  }
}

// Interleaves two rows of activations. A step of K is 8 bytes: `to` gets one step of the first row,
// then one of the second, in each of `steps` (rounded up to even) places `stride` bytes apart.
CPUSERVE_INLINE void interleave(const uint8_t* first, const uint8_t* second, int64_t steps,
                                uint8_t* to, size_t stride) {
  for (int64_t s = 0; s < steps; s += 2, to += 2 * stride) {
    const Q x = load_quads(first + s * kStepBytes), y = load_quads(second + s * kStepBytes);
    store_quads(to, first_halves(x, y));
    store_quads(to + stride, last_halves(x, y));
  }
}

// Loads the sums of a tile to registers, where each vector has the sums of two columns of two rows.
// In memory at `c`, sums are stored row by row.
template <int RP, int CP, class Sum>
CPUSERVE_INLINE void load_sums(const MmlaTile& t, Sum (&sum)[RP][CP]) {
#pragma GCC unroll 8
  for (int r = 0; r < RP; r++) {
    const float* row = t.c + 2 * r * t.c_stride;
#pragma GCC unroll 4
    for (int c = 0; c < CP; c += 2) {
      const F first = load(row + 2 * c), second = load(row + t.c_stride + 2 * c);
      from_floats(first_halves(first, second), &sum[r][c]);
      from_floats(last_halves(first, second), &sum[r][c + 1]);
    }
  }
}
template <int RP, int CP, class Sum>
CPUSERVE_INLINE void store_sums(const MmlaTile& t, const Sum (&sum)[RP][CP]) {
#pragma GCC unroll 8
  for (int r = 0; r < RP; r++) {
    float* row = t.c + 2 * r * t.c_stride;
#pragma GCC unroll 4
    for (int c = 0; c < CP; c += 2) {
      const F even = as_floats(sum[r][c]), odd = as_floats(sum[r][c + 1]);
      store(row + 2 * c, first_halves(even, odd));
      store(row + t.c_stride + 2 * c, last_halves(even, odd));
    }
  }
}

// Adds the products of one step of K. weight(c) returns the operand of column pair c.
// The operands of the rows stay in registers, or of the columns, whichever are fewer.
template <int RP, int CP, class Sum, class Weight>
CPUSERVE_INLINE void step_products(Sum (&sum)[RP][CP], const uint8_t* a, const Weight& weight) {
  if constexpr (RP > CP) {
    Q w[CP];
#pragma GCC unroll 8
    for (int c = 0; c < CP; c++) w[c] = weight(c);
#pragma GCC unroll 8
    for (int r = 0; r < RP; r++) {
      const Q x = load_quads(a + r * kOperandBytes);
#pragma GCC unroll 8
      for (int c = 0; c < CP; c++) sum[r][c] = mmla(sum[r][c], x, w[c]);
    }
  } else {
    Q x[RP];
#pragma GCC unroll 8
    for (int r = 0; r < RP; r++) x[r] = load_quads(a + r * kOperandBytes);
#pragma GCC unroll 8
    for (int c = 0; c < CP; c++) {
      const Q w = weight(c);
#pragma GCC unroll 8
      for (int r = 0; r < RP; r++) sum[r][c] = mmla(sum[r][c], x[r], w);
    }
  }
}

}  // namespace
}  // namespace CPUSERVE_NS
