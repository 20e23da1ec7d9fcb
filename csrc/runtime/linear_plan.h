// The division of one linear into tasks, which the threads of a rank claim. A plan is a pure
// function of sizes: the executor runs it, and benchmarks/work_simulator.h simulates it.
//
// A task is a rectangle of the output: some rows by some panels of 16 columns.
// A plan affects only time: the bits of an output element do not depend on its task.
#pragma once
#include <algorithm>
#include <cstdint>

#include "kernels/table.h"
#include "parallel/partition.h"

namespace cpuserve {

// The sizes that determine a plan.
struct LinearShape {
  int64_t rows;                         // rows of activations
  int64_t panels;                       // panels of the matrix that this rank computes
  int64_t grain;                        // panels that must stay in one task (Matrix::grain)
  int64_t panel_bytes;                  // bytes of one packed panel
  int64_t tile_rows, tile_panels;       // the register tile, in rows of activations and panels
  int threads;                          // threads of this rank
  int64_t block_rows = kMostBlockRows;  // rows that a K block in L2 is used for
  int64_t span_panels = kStripPanels;   // most panels of a task with many rows

  // Returns the shape for `rows` rows of activations with a stride of x_stride bytes.
  // Each row consists of `terms` int8 rows (1 or 2).
  static LinearShape of(const LinearKernel& kernel, const WorkSizes& sizes, int64_t rows,
                        size_t x_stride, int32_t terms, int64_t panels, int64_t grain,
                        size_t panel_bytes, int threads) noexcept {
    const int64_t tile_rows = std::max<int64_t>(1, kernel.tile_rows / terms);
    const int64_t block_rows = sizes.rows / terms;
    const bool near = rows_stay_in_l2(std::min(rows, block_rows), x_stride, sizes);
    return {rows,
            panels,
            grain,
            static_cast<int64_t>(panel_bytes),
            tile_rows,
            kernel.tile_panels,
            threads,
            block_rows,
            near ? kStripPanels : kernel.span_panels};
  }
};

struct LinearTask {
  int64_t row0, rows;
  Range panels;  // counted from the first panel of the rank
};

class LinearPlan {
 public:
  static constexpr int64_t kFewRows = 16;  // up to so many rows, a plan reads weights only once
  // With more than kFewRows rows, each task costs as much as if it had kTaskRows extra rows,
  // because its first tiles find neither weights nor output in the cache.
  // At AVX2, tasks of 24 rows run at 95 to 99 % of the rate of 480 rows: a cost of 0.2 to 1.3 rows.
  // A faster core computes more rows while it waits for memory, so the constant is higher.
  static constexpr int64_t kTaskRows = 2;

  explicit LinearPlan(const LinearShape& shape) noexcept;

  // Consecutive tasks have the same panels and successive blocks of rows, up to kMostRows rows.
  // Then come the tasks of the next panels. Threads with neighbouring tasks therefore use the same
  // panels and read them through one L3, where the activations of kMostRows rows stay as well.
  static constexpr int64_t kMostRows = 512;
  int64_t tasks() const noexcept { return columns_ * blocks_; }
  // Returns the number of consecutive tasks that a thread claims at a time.
  // The number is 1 if there are several row blocks.
  int64_t chunk() const noexcept { return chunk_; }
  // Returns tasks [begin, end), which a thread has claimed together, as one task.
  LinearTask task(int64_t begin, int64_t end) const noexcept {
    const int64_t group = begin / (columns_ * together_), at = begin % (columns_ * together_);
    const int64_t blocks = std::min(together_, blocks_ - group * together_);
    const int64_t column = at / blocks, block = group * together_ + at % blocks;
    const int64_t row0 = first_row(block);
    const int64_t panel1 = std::min((column + end - begin) * width_, panels_);
    return {row0, first_row(block + 1) - row0, {column * width_, panel1}};
  }
  int64_t width() const noexcept { return width_; }  // number of panels of a task
  int64_t row_blocks() const noexcept { return blocks_; }

 private:
  void plan_few_rows(const LinearShape& shape) noexcept;
  void plan_many_rows(const LinearShape& shape) noexcept;

  // Returns the first row of a row block. The heights of row blocks differ by at most one tile.
  int64_t first_row(int64_t block) const noexcept {
    const int64_t tiles = (rows_ + tile_rows_ - 1) / tile_rows_;
    return std::min(rows_, tiles * block / blocks_ * tile_rows_);
  }

  int64_t rows_, panels_, tile_rows_;
  int64_t width_ = 1, columns_ = 0, blocks_ = 0, chunk_ = 1;
  int64_t together_ = 1;  // number of row blocks with at most kMostRows rows together
};

}  // namespace cpuserve
