#include "runtime/linear_plan.h"

namespace cpuserve {
namespace {

// The bytes of weights that a thread claims at a time in a decode step.
// Reading 128 KB at one core's share of the bandwidth takes 5-10 us, long compared with an atomic
// operation (20-100 ns) and short compared with the delay of a late thread (40 us and more).
constexpr int64_t kClaimBytes = 128 << 10;
// A plan has tasks narrower than a strip (4 panels), which are slower, only
// if some thread would otherwise have more than 2 % (1 / kUnevenParts) more work than the mean:
// two threads would get 5 and 4 of 9 strips, and 16 threads would get 3 or 2 of 40 strips.
constexpr int64_t kUnevenParts = 50;
// Threads neither start at the same time nor run at the same speed.
// At the end of a linear each thread therefore waits for about 1 / kLateParts of a task.
// If two plans otherwise take the same time, the plan with smaller tasks is better.
constexpr int64_t kLateParts = 4;
// If all cores of a server read weights (4 to 5 GB/s for each core), reading the weights
// of a task takes as long as multiplying them by kReadRows * tile_rows * tile_panels rows:
// about 16 rows of bf16 at AVX2, 100 at AVX-512 and 300 with AMX.
constexpr int64_t kReadRows = 4;
// A plan with smaller tasks must be 1 % (1 / kBetterParts) faster to be chosen:
// narrow tasks read the activations more often, and tasks of few rows read the weights more often.
constexpr int64_t kBetterParts = 100;
constexpr int64_t kEnoughTasks = 16;  // tasks per thread; more would not balance the load better
// The time to read a row of activations from L3, as the number of panels that could be multiplied
// by the row in this time. The cost model uses it for tasks wider than a strip (AMX).
// For each element of K, reading 2 bytes at 10 bytes a cycle takes 0.2 cycles,
// and the 32 operations of one panel, at 700 operations a cycle, take 0.046 cycles.
constexpr int64_t kRowPanels = 4;

// Returns the next smaller width of a task, in panels, that a plan considers:
// two panels (or `grain` panels) less if the task is wider than a strip, otherwise half the width.
int64_t narrower(int64_t width, int64_t grain) {
  return width > kStripPanels ? width - std::max<int64_t>(grain, 2) : width / 2;
}

}  // namespace

LinearPlan::LinearPlan(const LinearShape& shape) noexcept
    : rows_(shape.rows), panels_(shape.panels), tile_rows_(shape.tile_rows) {
  if (rows_ <= 0 || panels_ <= 0) return;
  shape.rows <= kFewRows ? plan_few_rows(shape) : plan_many_rows(shape);
}

// With few rows the memory bandwidth is the limit, so the plan reads each weight only once:
// all rows are one row block, and all threads get about the same number of panels.
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

// With many rows arithmetic is the limit (or memory, if many threads have few rows each).
// The function chooses the division into equal tasks with the least time in a cost model.
// Dividing rows into more blocks than the kernels need is faster only if the products of a block
// take longer than reading the weights: threads with equal panels but different L3 caches
// each read these panels. If the register tile has several panels, a task has at least two panels:
// the sums of one panel are too few to hide the latency of a product.
void LinearPlan::plan_many_rows(const LinearShape& s) noexcept {
  const int64_t narrowest = std::max(s.grain, std::min<int64_t>(s.tile_panels, 2));
  const int64_t tiles = ceil_div(rows_, s.tile_rows);
  // The kernels multiply at most block_rows rows by a K block while it is in L2.
  // They would divide a task with more rows into parts of that size.
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
      // The model assumes that all tasks of a thread have the mean number of rows,
      // except the last one, which has the largest number.
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
