#include "runtime/barrier_plan.h"

#include <algorithm>

namespace cpuserve {
namespace {

// Returns whether two threads may touch the same row of a value: one thread by an access
// in list `a`, the other thread by an access in list `b`.
bool conflict(const AccessList& a, const AccessList& b) {
  return std::any_of(a.begin(), a.end(), [&](const Access& x) {
    return std::any_of(b.begin(), b.end(), [&](const Access& y) {
      return x.id == y.id && (x.rows != y.rows || x.rows == 0);
    });
  });
}

}  // namespace

BarrierPlan plan_barriers(const Program& program) {
  BarrierPlan out;
  Accesses since;  // all accesses since the last barrier
  for (const Op& op : program.ops()) {
    const Accesses now = accesses_of(op, program);
    const bool waits = conflict(now.reads, since.writes) || conflict(now.writes, since.writes) ||
                       conflict(now.writes, since.reads);
    if (waits) since = {};
    since.reads.insert(since.reads.end(), now.reads.begin(), now.reads.end());
    since.writes.insert(since.writes.end(), now.writes.begin(), now.writes.end());
    if (ends_with_barrier(op)) since = {};
    out.before.push_back(waits);
    out.row_wise.push_back(!now.claim());
  }
  return out;
}

}  // namespace cpuserve
