// Where a step needs barriers, by the values that its operations read and write, and the rows of
// them that a thread touches. An operation waits for the threads that ran the ones before it only
// if it touches rows that another thread wrote, or writes rows that another thread reads or writes.
#pragma once
#include <vector>

#include "runtime/program.h"

namespace cpuserve {

// Whether an operation ends with a barrier, so that all of its results are there for the next one.
inline bool ends_with_barrier(const Op& op) { return std::holds_alternative<RouteOp>(op); }

// The barriers before each operation of a step.
struct BarrierPlan {
  std::vector<bool> before;  // whether a barrier comes before the operation
  // Whether one thread can do all of the operation: threads divide its rows. If a step has one row,
  // only one thread has any work, so the last thread at the barrier does it there, before it lets
  // the others go on: that saves a barrier after the operation.
  std::vector<bool> row_wise;
};
BarrierPlan plan_barriers(const Program& program);

}  // namespace cpuserve
