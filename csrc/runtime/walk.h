// The way of the threads through the operations of a program.
#pragma once
#include <vector>

#include "runtime/barrier_plan.h"
#include "runtime/program.h"
#include "runtime/step_context.h"
#include "runtime/worker.h"

namespace cpuserve {

struct Walk {
  // The Program and the step must outlive the walk. The step gets the routers that its guesses
  // apply.
  // Throws std::invalid_argument if a GuessOp has no router to apply.
  Walk(const Program& a_program, StepContext& a_step);

  // Runs operations [first, last) on all threads. Returns false if the step was cancelled.
  bool run(int64_t first, int64_t last);
  int64_t num_ops() const noexcept { return static_cast<int64_t>(program.ops().size()); }

  const Program& program;
  StepContext& step;
  const BarrierPlan barriers;
  const std::vector<bool> guess_ops;  // by operation: whether it is only for guesses of experts

 private:
  // Runs ops [first, last) on one thread, with the barriers of BarrierPlan.
  // Returns false if the step was cancelled.
  bool run_on(Worker& w, int64_t first, int64_t last) const noexcept;
  void run_op(Worker& w, size_t i) const noexcept;

  // Returns whether the op has nothing to do: it processes only routed rows,
  // and the step has no routed rows because no sequence has an adapter.
  // All threads get the same result, because a barrier follows the op that computes the routing.
  bool is_idle(const Op& op) const noexcept;
  // Returns the end of the range of ops from `first` on that a single thread runs
  // while the other threads wait at the barrier.
  int64_t end_of_row_wise(int64_t first, int64_t last) const noexcept;
  void run_alone(Worker& w, int64_t first, int64_t last) const noexcept;
  // Whether the step makes no guesses, and the op is only for them.
  bool skips(size_t i) const noexcept;
};

}  // namespace cpuserve
