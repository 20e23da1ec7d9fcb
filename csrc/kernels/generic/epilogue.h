// Writes a finished tile of fp32 sums to the output rows of a linear.
#pragma once
#include "kernels/generic/activation.h"
#include "kernels/generic/add.h"

namespace CPUSERVE_NS {

// Computes y = map(sum + bias) for one row of a tile. With glu, y = map(gate + bias)
// * other(up + bias): gate and up are alternate panels. activation.h chooses map and other.
template <class Map, class Other>
CPUSERVE_INLINE void finish_columns(const Epilogue& ep, int64_t panel0, int panels,
                                    const float* tile, size_t ld, float* y, Map map, Other other) {
  const float* bias = ep.bias ? ep.bias + panel0 * kPanel : nullptr;
  const auto sum = [&](int p, int i) {
    const F v = load(tile + static_cast<size_t>(p) * ld + i);
    return bias ? add(v, load(bias + p * kPanel + i)) : v;
  };
  const int step = ep.glu ? 2 : 1;
  for (int p = 0; p < panels; p += step, y += kPanel) {
    for (int i = 0; i < kPanel; i += kLanes) {
      const F v = map(sum(p, i));
      store(y + i, ep.glu ? mul(v, other(sum(p + 1, i))) : v);
    }
  }
}

constexpr int kMostPanels = 12;  // the most panels of store_tile(); divisible by 1, 2, 3 and 4

// Quantizes columns [column0, column0 + n) of output rows [row, row + rows) in groups of 32.
// y[r] has the fp32 values of these columns for output row `row` + r.
CPUSERVE_INLINE void quantize_rows(const Rows& out, int64_t row, int rows, int64_t column0, int n,
                                   const float (*y)[kMostPanels * kPanel]) {
  const int64_t padded = round_up(out.width, 32);
  QuantGroup some[kGroupsAtOnce];
  int count = 0;
  for (int i = 0; i < n; i += 32) {
    for (int r = 0; r < rows; r++) {
      some[count++] = group_of(row_at(out, row + r), padded, 32, (column0 + i) / 32, y[r] + i);
      if (count < kGroupsAtOnce && (i + 32 < n || r + 1 < rows)) continue;
      quantize_32s(out, some, count);
      count = 0;
    }
  }
}

// Applies the epilogue to a tile of `rows` rows and `panels` (at most kMostPanels) panels,
// and writes the output rows from row0 on. The kPanel values of panel p of row r begin
// at the address tile + r * stride + p * kPanel. Columns at or after out.width are dropped.
// With q8g32 output, every tile has whole groups of 32 output columns: panel0 is a multiple
// of 2 (of 4 with glu), and only the last tile of a row may end with an incomplete group.
static inline void store_tile(const Epilogue& ep, int64_t row0, int rows, int64_t panel0,
                              int panels, const float* tile, size_t stride) {
  const int halves = ep.glu ? 2 : 1;
  const int64_t column0 = panel0 * kPanel / halves;
  int n = panels * kPanel / halves;
  if (column0 + n > ep.out.width) n = static_cast<int>(ep.out.width - column0);
  if (n <= 0) return;
  const bool groups = ep.out.format == ActFormat::q8g32 || ep.out.format == ActFormat::q8g32x2;
  alignas(64) float y[kGroupsAtOnce][kMostPanels * kPanel];
  for (int at = 0, some; at < rows; at += some) {
    some = rows - at < kGroupsAtOnce ? rows - at : kGroupsAtOnce;
    with_activation(ep.act, [&](auto map, auto other) {
      for (int r = 0; r < some; r++) {
        const float* from = tile + static_cast<size_t>(at + r) * stride;
        finish_columns(ep, panel0, panels, from, kPanel, y[r], map, other);
      }
    });
    if (groups && n % 32 == 0) {
      quantize_rows(ep.out, row0 + at, some, column0, n, y);
      continue;
    }
    for (int r = 0; r < some; r++) {
      if (ep.add) {
        add_columns(f32_row(ep.out, row0 + at + r) + column0, y[r], n);
      } else {
        store_row(ep.out, row0 + at + r, column0, y[r], n);
      }
    }
  }
}

}  // namespace CPUSERVE_NS
