// Decides where a step needs barriers, from the values that its operations read and write
// and from the rows that each thread touches. There is a barrier before an operation only if it
// reads rows that another thread has written since the last barrier,
// or writes rows that another thread has read or written since then.
#pragma once
#include <vector>

#include "runtime/program.h"

namespace cpuserve {

// Returns whether an operation itself ends with a barrier, so that all threads see its results.
inline bool ends_with_barrier(const Op& op) {
  return std::holds_alternative<RouteOp>(op) || std::holds_alternative<GuessOp>(op);
}

// Two flags for each operation of a step.
struct BarrierPlan {
  std::vector<bool> before;  // whether a barrier comes before the operation
  // Whether threads divide the rows of the operation among them, instead of claiming tasks.
  // If a step has one token, only one thread has work in such an operation. The last thread
  // that arrives at the barrier before the operation then runs the operation alone,
  // and releases the other threads afterwards, which saves a barrier after the operation.
  std::vector<bool> row_wise;
};
BarrierPlan plan_barriers(const Program& program);

}  // namespace cpuserve
