// A check of linears that files share whose weights and rows have their own types.
#pragma once
#include <algorithm>
#include <initializer_list>

#include "harness.h"

namespace harness {

// Checks that the first `rows` rows of a product have the same bits in every division of rows,
// panels and K. compute(out, row0, m, panel0, panel1, sizes) computes rows row0 to row0 + m. For
// each number in `last`, so many of the last rows are computed without the others.
template <class Output, class Weights, class Compute>
void check_divisions(const Weights& w, int64_t rows, std::initializer_list<int64_t> last,
                     const Compute& compute) {
  using cpuserve::WorkSizes;
  Output whole(rows, w.n);
  compute(whole, 0, rows, 0, w.panels, WorkSizes{});
  const auto check = [&](int64_t row0, int64_t m, int64_t step, const WorkSizes& sizes) {
    Output part(rows, w.n);
    for (int64_t p = 0; p < w.panels; p += step) {
      compute(part, row0, m, p, std::min(w.panels, p + step), sizes);
    }
    for (int64_t r = row0; r < row0 + m; r++) CHECK(whole.same_row(part, r));
  };
  for (int64_t m : last) check(rows - m, m, w.panels, {});
  for (int64_t step : {1, 2, 3, 5}) {
    check(0, 3, step, {});
    check(1, 21, step, {});
  }
  WorkSizes small{};
  small.strip_bytes = 8 << 10;
  small.rows = 24;
  small.near_bytes = 2 << 10;
  small.ahead_bytes = 0;
  WorkSizes large{};
  large.strip_bytes = 4 << 20;
  large.ahead_bytes = 64 << 10;
  CHECK(w.kernel.block_k(w.k, small) < w.k);
  for (const WorkSizes& sizes : {small, large}) {
    check(0, 1, w.panels, sizes);
    check(0, rows, w.panels, sizes);
  }
}

}  // namespace harness
