#include "runtime/linear_plan.h"

namespace cpuserve {
namespace {

// Size of the claims of a decode linear: reading 128 KB of weights takes 5-10 us at one core's
// share of the memory bandwidth, which is long compared with an atomic (20-100 ns) and short
// compared with the delay of a late thread (40 us and more).
constexpr int64_t kClaimBytes = 128 << 10;
// Narrower tasks than strips are worth it where some thread would otherwise have 2 % more than the
// mean: two threads would get 5 and 4 of 9 strips, and 16 threads 3 or 2 of 40.
constexpr int64_t kUnevenParts = 50;
// Threads do not start together and do not run at the same speed. Then they wait for about this
// part of a task in the end, so if two plans end at the same time, the finer one is
// better.
constexpr int64_t kLateParts = 4;
// Reading the weights of a task takes as long as computing about this many rows for each value of
// the register tile, if all cores of a server read (4 to 5 GB/s for each): at AVX2 16 rows of bf16,
// at AVX-512 100, with AMX 300.
constexpr int64_t kReadRows = 4;
// A finer division has to end 1 % earlier: narrow tasks read the activations more often, and short
// ones the weights.
constexpr int64_t kBetterParts = 100;
constexpr int64_t kEnoughTasks = 16;  // per thread; more of them even out nothing
// Where tasks may be wider than a strip, reading a row from L3 takes as long as computing it for so
// many panels: with AMX, 2 bytes at 10 a cycle, and 32 operations at 700 a cycle.
constexpr int64_t kRowPanels = 4;

// The next width to consider: half strips and less by halves, wider tasks by pairs of panels, or
// by strips if the columns of one share a scale.
int64_t narrower(int64_t width, int64_t grain) {
  return width > kStripPanels ? width - std::max<int64_t>(grain, 2) : width / 2;
}

}  // namespace

LinearPlan::LinearPlan(const LinearShape& shape) noexcept
    : rows_(shape.rows), panels_(shape.panels), tile_rows_(shape.tile_rows) {
  if (rows_ <= 0 || panels_ <= 0) return;
  shape.rows <= kFewRows ? plan_few_rows(shape) : plan_many_rows(shape);
}

// Memory is the limit, so weights are read once: one row block, and panels in shares of equal size.
void LinearPlan::plan_few_rows(const LinearShape& s) noexcept {
  int64_t least = 0;
  for (int64_t width = kStripPanels; width >= s.grain; width /= 2) {
    const int64_t most = ceil_div(ceil_div(panels_, width), s.threads) * width;
    if (least > 0 && most >= least) continue;
    least = most;
    width_ = width;
    if ((most * s.threads - panels_) * kUnevenParts <= panels_) break;
  }
  columns_ = ceil_div(panels_, width_);
  blocks_ = 1;
  chunk_ = std::max<int64_t>(1, kClaimBytes / (width_ * s.panel_bytes));
}

// Arithmetic is the limit, or memory is where many threads have few rows. Of all divisions into
// equal tasks, takes the one that ends its products first, counting the other costs of each task.
// More row blocks than the kernels need are worth it only until the products take no longer than
// reading the weights: threads that share panels but no L3 cache read them twice. A task is never
// narrower than two panels of a tile that has several side by side, because one panel alone has too
// few sums to hide the latency of a product.
void LinearPlan::plan_many_rows(const LinearShape& s) noexcept {
  const int64_t narrowest = std::max(s.grain, std::min<int64_t>(s.tile_panels, 2));
  const int64_t tiles = ceil_div(rows_, s.tile_rows);
  // The kernels keep a strip's weights in L2 for block_rows rows; they would split a taller task.
  const int64_t fewest = ceil_div(tiles, std::max<int64_t>(1, s.block_rows / s.tile_rows));
  const int64_t reading = kReadRows * s.tile_rows * s.tile_panels * panels_ / s.threads;
  const int64_t enough = kEnoughTasks * s.threads;
  int64_t best = 0;
  for (int64_t blocks = fewest; blocks <= tiles; blocks++) {
    const bool done = best <= reading * kLateParts || columns_ * (blocks - 1) >= enough;
    if (blocks > fewest && done) break;
    for (int64_t width = s.span_panels; width >= narrowest; width = narrower(width, s.grain)) {
      const int64_t columns = ceil_div(panels_, width);
      const int64_t rounds = ceil_div(columns * blocks, s.threads);
      // Most threads have tasks of the mean height, and in the end one of the tallest.
      const int64_t mean = ceil_div(rows_, blocks);
      const int64_t most = std::min(rows_, ceil_div(tiles, blocks) * s.tile_rows);
      const int64_t panels = width + (s.span_panels > kStripPanels ? kRowPanels : 0);
      const int64_t last = panels * (most + kTaskRows);
      const int64_t end = ((rounds - 1) * panels * (mean + kTaskRows) + last) * kLateParts + last;
      if (best > 0 && end * kBetterParts > best * (kBetterParts - 1)) continue;
      best = end;
      width_ = width;
      columns_ = columns;
      blocks_ = blocks;
    }
  }
  together_ = std::max<int64_t>(1, blocks_ * kMostRows / rows_);
}

}  // namespace cpuserve
