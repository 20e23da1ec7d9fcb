// From a finished fp32 tile to the output rows of a linear.
#pragma once
#include "kernels/generic/activation.h"
#include "kernels/generic/add.h"

namespace CPUSERVE_NS {

// y = map(tile + bias), or with glu map(gate + bias) * (up + bias) of the alternating panels.
template <class Map>
CPUSERVE_INLINE void finish_columns(const Epilogue& ep, int64_t panel0, int panels,
                                    const float* tile, size_t ld, float* y, Map map) {
  const float* bias = ep.bias ? ep.bias + panel0 * kPanel : nullptr;
  const auto sum = [&](int p, int i) {
    const F v = load(tile + static_cast<size_t>(p) * ld + i);
    return bias ? add(v, load(bias + p * kPanel + i)) : v;
  };
  const int step = ep.glu ? 2 : 1;
  for (int p = 0; p < panels; p += step, y += kPanel) {
    for (int i = 0; i < kPanel; i += kLanes) {
      const F v = map(sum(p, i));
      store(y + i, ep.glu ? mul(v, sum(p + 1, i)) : v);
    }
  }
}

// One row of a tile of `panels` (at most kStripPanels) panels: panel p's kPanel values are at
// tile + p * ld (ld = kPanel when they lie one after another). Columns at or beyond out.width are
// dropped. With q8g32 output every tile covers whole groups: panel0 is a multiple of 2, of 4 with
// glu, and only the row's last tile may be narrower than a group.
static inline void store_tile(const Epilogue& ep, int64_t row, int64_t panel0, int panels,
                              const float* tile, size_t ld) {
  alignas(64) float y[kStripPanels * kPanel];
  with_activation(ep.act, [&](auto map) { finish_columns(ep, panel0, panels, tile, ld, y, map); });
  const int halves = ep.glu ? 2 : 1;
  const int64_t column0 = panel0 * kPanel / halves;
  int n = panels * kPanel / halves;
  if (column0 + n > ep.out.width) n = static_cast<int>(ep.out.width - column0);
  if (n <= 0) return;
  if (ep.add) {
    add_columns(f32_row(ep.out, row) + column0, y, n);
  } else {
    store_row(ep.out, row, column0, y, n);
  }
}

}  // namespace CPUSERVE_NS
