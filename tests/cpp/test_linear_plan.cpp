// Tests how a linear is divided into tasks: that they cover the output once at any size, and that
// threads get equal parts of matrices whose strips do not divide among them.
#include <vector>

#include "main.h"
#include "runtime/linear_plan.h"

using namespace cpuserve;

namespace {

constexpr int64_t kPanelBytes = 16 * 1024 * 2;

LinearShape shape(int64_t rows, int64_t panels, int threads, int64_t grain = 1,
                  int64_t tile_rows = 6, int64_t tile_panels = 4) {
  return {rows, panels, grain, kPanelBytes, tile_rows, tile_panels, threads};
}

// The tasks as threads claim them.
std::vector<LinearTask> claims(const LinearPlan& plan, int threads) {
  std::vector<LinearTask> out;
  for (int t = 0; t < threads; t++) {
    const Range own = split(plan.tasks(), t, threads);
    for (int64_t i = own.begin; i < own.end; i += plan.chunk()) {
      out.push_back(plan.task(i, std::min(i + plan.chunk(), own.end)));
    }
  }
  return out;
}

bool covers_everything_once(const LinearShape& s) {
  std::vector<int> seen(static_cast<size_t>(s.rows * s.panels));
  for (const LinearTask& task : claims(LinearPlan(s), s.threads)) {
    for (int64_t r = task.row0; r < task.row0 + task.rows; r++) {
      for (int64_t p = task.panels.begin; p < task.panels.end; p++) {
        seen.at(static_cast<size_t>(r * s.panels + p))++;
      }
    }
  }
  return std::all_of(seen.begin(), seen.end(), [](int n) { return n == 1; });
}

// Rows times panels of the thread with most of them, relative to the mean, if each works through
// its own share.
double most_of_a_thread(const LinearShape& s) {
  const LinearPlan plan(s);
  int64_t most = 0;
  for (int t = 0; t < s.threads; t++) {
    const Range own = split(plan.tasks(), t, s.threads);
    int64_t sum = 0;
    for (int64_t i = own.begin; i < own.end; i++) {
      const LinearTask task = plan.task(i, i + 1);
      sum += task.rows * task.panels.size();
    }
    most = std::max(most, sum);
  }
  return static_cast<double>(most * s.threads) / static_cast<double>(s.rows * s.panels);
}

}  // namespace

TEST(tasks_cover_the_output_once_at_any_size) {
  for (const int64_t rows : {1, 2, 16, 17, 40, 120, 513, 1024}) {
    for (const int64_t panels : {1, 2, 3, 7, 36, 57, 150}) {
      for (const int threads : {1, 2, 3, 16, 64, 192}) {
        EXPECT(covers_everything_once(shape(rows, panels, threads)));
        EXPECT(covers_everything_once(shape(rows, panels, threads, 1, 4, 1)));
        EXPECT(covers_everything_once(shape(rows, panels, threads, 2, 32, 2)));
        EXPECT(covers_everything_once(shape(rows, panels, threads, 4, 3, 2)));
      }
    }
  }
}

TEST(a_matrix_without_panels_or_rows_has_no_tasks) {
  EXPECT(LinearPlan(shape(5, 0, 4)).tasks() == 0);
  EXPECT(LinearPlan(shape(0, 8, 4)).tasks() == 0);
}

TEST(panels_that_belong_together_stay_together) {
  for (const int64_t rows : {1, 40, 512}) {
    for (const int64_t grain : {2, 4}) {
      for (const int threads : {2, 16, 192}) {
        const LinearShape s = shape(rows, 54, threads, grain);
        for (const LinearTask& task : claims(LinearPlan(s), threads)) {
          EXPECT(task.panels.begin % grain == 0);
          EXPECT(task.panels.end % grain == 0 || task.panels.end == s.panels);
        }
      }
    }
  }
}

TEST(tasks_are_whole_tiles) {
  for (const int64_t rows : {17, 100, 512, 2048}) {
    for (const int threads : {2, 16, 192}) {
      for (const auto& [tile_rows, tile_panels] :
           {std::pair<int64_t, int64_t>{6, 4}, {32, 2}, {4, 1}}) {
        const LinearPlan plan(shape(rows, 56, threads, 1, tile_rows, tile_panels));
        for (const LinearTask& task : claims(plan, threads)) {
          EXPECT(task.rows % tile_rows == 0 || task.row0 + task.rows == rows);
          EXPECT(task.rows > 0 && task.rows <= 512);
        }
        EXPECT(plan.width() >= std::min<int64_t>(tile_panels, 2));
      }
    }
  }
}

TEST(few_rows_read_the_weights_once) {
  for (const int64_t rows : {1, 7, 16}) {
    for (const int threads : {2, 64, 192}) {
      const LinearPlan plan(shape(rows, 36, threads));
      EXPECT(plan.row_blocks() == 1);
    }
  }
}

// 9 strips are 5 and 4 for two threads, 40 are 3 and 2 for sixteen: half strips divide evenly.
TEST(strips_that_do_not_divide_among_the_threads_are_halved) {
  for (const int64_t rows : {1, 16, 17, 40, 64, 100, 120}) {
    EXPECT(most_of_a_thread(shape(rows, 36, 2)) <= 1.001);
    EXPECT(most_of_a_thread(shape(rows, 160, 16)) <= 1.001);
    EXPECT(most_of_a_thread(shape(rows, 36, 2, 2)) <= 1.001);
    EXPECT(most_of_a_thread(shape(rows, 160, 16, 2)) <= 1.001);
  }
}

TEST(where_there_are_fewer_panels_than_threads_rows_are_divided_too) {
  for (const int threads : {64, 96, 192}) {
    EXPECT(most_of_a_thread(shape(512, 56, threads)) <= 1.15);
    EXPECT(most_of_a_thread(shape(512, 56, threads, 1, 4, 1)) <= 1.15);
  }
}

TEST(every_thread_has_several_tasks_where_the_matrix_is_large) {
  for (const int threads : {2, 16, 64}) {
    const LinearPlan plan(shape(512, 1024, threads));
    EXPECT(plan.tasks() >= 4 * threads);
  }
}

TEST(no_task_is_taller_than_the_rows_that_kernels_take_together) {
  for (const int64_t block_rows : {64, 128, 256, 512}) {
    for (const int64_t rows : {40, 300, 512, 2048}) {
      for (const int threads : {1, 2, 7, 64}) {
        LinearShape s = shape(rows, 56, threads);
        s.block_rows = block_rows;
        for (const LinearTask& task : claims(LinearPlan(s), threads)) {
          EXPECT(task.rows <= block_rows);
        }
      }
    }
  }
}

// A task reads its activations from L3 once for all of its columns, so wider tasks read less.
TEST(tasks_of_rows_that_do_not_stay_in_l2_are_as_wide_as_balance_permits) {
  for (const int64_t rows : {1, 17, 40, 512, 1024}) {
    for (const int64_t panels : {1, 7, 36, 56, 150}) {
      for (const int threads : {1, 2, 7, 64}) {
        for (const int64_t grain : {1, 2, 4}) {
          LinearShape s = shape(rows, panels, threads, grain, 32, 2);
          s.span_panels = 16;
          EXPECT(covers_everything_once(s));
          for (const LinearTask& task : claims(LinearPlan(s), threads)) {
            EXPECT(rows <= LinearPlan::kFewRows || task.panels.size() <= 16);
            EXPECT(task.panels.begin % grain == 0);
          }
        }
      }
    }
  }
  LinearShape s = shape(512, 56, 2, 1, 32, 2);
  EXPECT(LinearPlan(s).width() <= kStripPanels);
  s.span_panels = 16;
  EXPECT(LinearPlan(s).width() == 14);  // two tasks for each thread
  s.threads = 16;
  EXPECT(most_of_a_thread(s) <= 1.2);
}
