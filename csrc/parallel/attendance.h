// Which threads of the team take part in the next step.
//
// A barrier makes every op wait for the latest thread. On a core that some other process keeps busy
// a thread runs half of the time, in slices of milliseconds, and everyone stands still in the other
// half (two cores, one of them shared: 35-41 % of the quiet decode rate with any way of waiting,
// where the fair share would be 67 %). One thread alone does better, decode being bound by memory:
// so a thread that keeps losing its core sits out for a while and is then given another try.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "parallel/partition.h"

namespace cpuserve {

class Attendance {
 public:
  // No rank loses its last thread: nobody else computes its part.
  explicit Attendance(Ranks ranks);

  // Takes in one step: its wall time, the time thread 0 waited for others in it, and by thread the
  // time it wanted to run and did not. True when members() has changed. Allocates nothing.
  bool update(int64_t now_ns, int64_t wall_ns, int64_t waited_ns,
              const std::vector<int64_t>& lost_ns) noexcept;

  // Everyone takes part again; true when that is a change.
  bool call_all() noexcept;

  // Threads that take part, ascending; thread 0 always does.
  const std::vector<int>& members() const { return members_; }

 private:
  bool judge(int64_t now_ns) noexcept;
  int members_of(int rank) const noexcept;
  bool send_away(int64_t now_ns, size_t member) noexcept;
  void start_window() noexcept;

  const Ranks ranks_;
  const int threads_;
  std::vector<int> members_;
  std::vector<int64_t> lost_;  // by thread, in this window
  int64_t wall_ = 0, waited_ = 0;
  int64_t back_at_ = 0, came_back_at_ = 0, away_for_ = 0;
};

}  // namespace cpuserve
