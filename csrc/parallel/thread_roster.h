// Decides which threads of the team take part in the next steps.
//
// At a barrier all threads wait for the slowest one. If another process keeps a core busy,
// the thread on this core runs half of the time, in slices of milliseconds,
// and all other threads wait during the other half. With two cores, one of them shared,
// decode reached 35-41 % of its undisturbed rate with any way of waiting at barriers.
// One thread alone is faster than that, because decode is limited by memory. Therefore a thread
// that keeps losing its core is left out of steps for a while, and is then tried again.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "parallel/partition.h"

namespace cpuserve {

class ThreadRoster {
 public:
  // At least one thread of each rank takes part: threads of other ranks cannot compute its part.
  explicit ThreadRoster(Ranks ranks);

  // Records one step: its wall time, the time that thread 0 waited for other threads,
  // and for each thread the time during which it was ready to run but had no core.
  // Returns true if members() has changed. Allocates nothing.
  bool update(int64_t now_ns, int64_t wall_ns, int64_t waited_ns,
              const std::vector<int64_t>& lost_ns) noexcept;

  // Makes all threads take part again. Returns true if members() has changed.
  bool call_all() noexcept;

  // Returns the threads that take part, in ascending order. Thread 0 always takes part.
  const std::vector<int>& members() const { return members_; }

 private:
  bool judge(int64_t now_ns) noexcept;
  int members_of(int rank) const noexcept;
  bool send_away(int64_t now_ns, size_t member) noexcept;
  void start_window() noexcept;

  const Ranks ranks_;
  const int threads_;
  std::vector<int> members_;
  std::vector<int64_t> lost_;  // by thread: ns without a core in this window (kWindow)
  int64_t wall_ = 0, waited_ = 0;
  // When the absent threads return, when threads last returned, and how long an absence is (ns).
  int64_t back_at_ = 0, came_back_at_ = 0, away_for_ = 0;
};

}  // namespace cpuserve
