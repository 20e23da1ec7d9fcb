#include "parallel/thread_roster.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace cpuserve {
namespace {

constexpr int64_t kMs = 1'000'000;
constexpr int64_t kWindow = 30 * kMs;  // period for judging threads: ten scheduler slices of 3 ms
// A thread that keeps losing its core takes no part for 300 ms. If this happens again soon
// after its return, the absence is doubled, up to 2 s. A trial of 30 ms every 2 s costs 1.5 %.
// The absence must not be longer: if the process that took the core has ended,
// a prompt runs at half the possible speed (on two cores) until the thread returns.
constexpr int64_t kFirstAbsence = 300 * kMs, kLongestAbsence = 2'000 * kMs;
constexpr int64_t kSoon = 500 * kMs;  // an absence within this time after a return is doubled
// Without one of n threads, a step runs at (n - 1) / n of its speed,
// or faster if memory is the limit. So a thread is left out
// if the other threads spend more than 0.8 / n of their time waiting for this thread.
constexpr double kWorthOfOne = 0.8;
constexpr double kLosingItsCore =
    0.15;  // fraction of time without a core; a thread below it is late for other reasons

}  // namespace

ThreadRoster::ThreadRoster(Ranks ranks)
    : ranks_(std::move(ranks)),
      threads_(ranks_.threads()),
      members_(static_cast<size_t>(threads_)),
      lost_(static_cast<size_t>(threads_)),
      away_for_(kFirstAbsence) {
  std::iota(members_.begin(), members_.end(), 0);
}

void ThreadRoster::start_window() noexcept {
  wall_ = waited_ = 0;
  std::fill(lost_.begin(), lost_.end(), 0);
}

bool ThreadRoster::call_all() noexcept {
  const bool change = members_.size() < static_cast<size_t>(threads_);
  members_.resize(static_cast<size_t>(threads_));
  std::iota(members_.begin(), members_.end(), 0);
  start_window();
  return change;
}

bool ThreadRoster::send_away(int64_t now_ns, size_t member) noexcept {
  members_.erase(members_.begin() + static_cast<std::ptrdiff_t>(member));
  const bool again = came_back_at_ > 0 && now_ns - came_back_at_ < kSoon;
  away_for_ = again ? std::min(2 * away_for_, kLongestAbsence) : kFirstAbsence;
  back_at_ = now_ns + away_for_;
  return true;
}

int ThreadRoster::members_of(int rank) const noexcept {
  const Range threads = ranks_.threads_of(rank);
  int count = 0;
  for (int t : members_) count += t >= threads.begin && t < threads.end;
  return count;
}

// Leaves out the thread that lost the most time, if waiting for it costs more than it contributes.
// The other members of its rank then compute its share of the work.
// Returns true if a thread was left out.
bool ThreadRoster::judge(int64_t now_ns) noexcept {
  size_t worst = 0;
  int n = 0;  // number of members in the rank of thread `worst`
  const auto lost = [&](size_t m) { return lost_[static_cast<size_t>(members_[m])]; };
  for (size_t i = 1; i < members_.size(); i++) {
    if (worst > 0 && lost(i) <= lost(worst)) continue;
    const int others = members_of(ranks_.of_thread(members_[i]));
    if (others < 2) continue;
    worst = i;
    n = others;
  }
  if (worst == 0) return false;
  const double wall = static_cast<double>(wall_);
  const double useful = 1 - static_cast<double>(waited_) / wall;
  if (useful >= 1 - kWorthOfOne / n) return false;
  return static_cast<double>(lost(worst)) > kLosingItsCore * wall && send_away(now_ns, worst);
}

bool ThreadRoster::update(int64_t now_ns, int64_t wall_ns, int64_t waited_ns,
                          const std::vector<int64_t>& lost_ns) noexcept {
  if (threads_ == 1) return false;
  if (members_.size() < static_cast<size_t>(threads_) && now_ns >= back_at_) {
    came_back_at_ = now_ns;
    return call_all();
  }
  wall_ += wall_ns;
  waited_ += waited_ns;
  for (int t : members_) lost_[static_cast<size_t>(t)] += lost_ns[static_cast<size_t>(t)];
  if (wall_ < kWindow) return false;
  const bool change = judge(now_ns);
  start_window();
  return change;
}

}  // namespace cpuserve
