#include "runtime/accesses.h"

#include <algorithm>

namespace cpuserve {
namespace {

bool meet(const AccessList& a, const AccessList& b) {
  return std::any_of(a.begin(), a.end(), [&](const Access& x) {
    return std::any_of(b.begin(), b.end(), [&](const Access& y) {
      return x.id == y.id && (x.rows != y.rows || x.rows == 0);
    });
  });
}

}  // namespace

bool Accesses::claim() const {
  return std::any_of(writes.begin(), writes.end(), [](const Access& a) { return a.id == kQueue; });
}

Waits find_waits(const Program& program) {
  Waits out;
  Accesses since;  // the last barrier
  for (const Op& op : program.ops()) {
    const Accesses now = accesses_of(op, program);
    const bool waits = meet(now.reads, since.writes) || meet(now.writes, since.writes) ||
                       meet(now.writes, since.reads);
    if (waits) since = {};
    since.reads.insert(since.reads.end(), now.reads.begin(), now.reads.end());
    since.writes.insert(since.writes.end(), now.writes.begin(), now.writes.end());
    if (ends_with_barrier(op)) since = {};
    out.before.push_back(waits);
    out.light.push_back(!now.claim());
  }
  return out;
}

}  // namespace cpuserve
