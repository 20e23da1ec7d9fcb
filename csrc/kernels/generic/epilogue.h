// From a finished fp32 tile to the output rows of a linear.
#pragma once
#include "kernels/generic/activation.h"
#include "kernels/generic/add.h"

namespace CPUSERVE_NS {

// One row of a tile of `panels` (at most kStripPanels) panels: panel p's kPanel values are at
// tile + p * ld (ld = kPanel when they lie one after another). Columns at or beyond out.width are
// dropped. With q8g32 output every tile covers whole groups: panel0 is a multiple of 2, of 4 with
// glu, and only the row's last tile may be narrower than a group.
static inline void store_tile(const Epilogue& ep, int64_t row, int64_t panel0, int panels,
                              const float* tile, size_t ld) {
  alignas(64) float y[kStripPanels * kPanel];
  for (int p = 0; p < panels; p++) {
    for (int i = 0; i < kPanel; i += kLanes) {
      F v = load(tile + static_cast<size_t>(p) * ld + i);
      if (ep.bias) v = add(v, load(ep.bias + (panel0 + p) * kPanel + i));
      store(y + p * kPanel + i, v);
    }
  }
  int64_t column0 = panel0 * kPanel;
  int n = panels * kPanel;
  if (ep.glu) {
    for (int p = 0; p < panels / 2; p++) {
      float* gate = y + 2 * p * kPanel;
      activate_columns(ep.act, gate, kPanel);
      for (int i = 0; i < kPanel; i += kLanes) {
        store(y + p * kPanel + i, mul(load(gate + i), load(gate + kPanel + i)));
      }
    }
    column0 /= 2;
    n /= 2;
  } else {
    activate_columns(ep.act, y, n);
  }
  if (column0 + n > ep.out.width) n = static_cast<int>(ep.out.width - column0);
  if (n <= 0) return;
  if (ep.add) {
    add_columns(f32_row(ep.out, row) + column0, y, n);
  } else {
    store_row(ep.out, row, column0, y, n);
  }
}

}  // namespace CPUSERVE_NS
