#include "parallel/attendance.h"

#include <algorithm>
#include <numeric>

namespace cpuserve {
namespace {

constexpr int64_t kMs = 1'000'000;
constexpr int64_t kWindow = 30 * kMs;  // ten scheduler slices of 3 ms
// A first absence is short, a bursty neighbour may be gone; each that ends in another one at once
// is twice as long, up to where trying (a window of 30 ms) costs 1.5 %: a prompt that comes when
// the neighbour has left runs at half its speed until then.
constexpr int64_t kFirstAbsence = 300 * kMs, kLongestAbsence = 2'000 * kMs;
constexpr int64_t kSoon = 500 * kMs;
// With n threads, one less does at least (n - 1) / n of the work; memory-bound work hardly notices.
// So a thread may cost the others up to 0.8 / n of their time before it is better away.
constexpr double kWorthOfOne = 0.8;
constexpr double kLosingItsCore = 0.15;  // of the time: not merely the last to finish

}  // namespace

Attendance::Attendance(int threads)
    : threads_(threads),
      members_(static_cast<size_t>(threads)),
      lost_(static_cast<size_t>(threads)),
      away_for_(kFirstAbsence) {
  std::iota(members_.begin(), members_.end(), 0);
}

void Attendance::start_window() noexcept {
  wall_ = waited_ = 0;
  std::fill(lost_.begin(), lost_.end(), 0);
}

bool Attendance::call_all() noexcept {
  const bool change = members_.size() < static_cast<size_t>(threads_);
  members_.resize(static_cast<size_t>(threads_));
  std::iota(members_.begin(), members_.end(), 0);
  start_window();
  return change;
}

bool Attendance::send_away(int64_t now_ns, size_t member) noexcept {
  members_.erase(members_.begin() + static_cast<std::ptrdiff_t>(member));
  const bool again = came_back_at_ > 0 && now_ns - came_back_at_ < kSoon;
  away_for_ = again ? std::min(2 * away_for_, kLongestAbsence) : kFirstAbsence;
  back_at_ = now_ns + away_for_;
  return true;
}

bool Attendance::judge(int64_t now_ns) noexcept {
  const double wall = static_cast<double>(wall_), n = static_cast<double>(members_.size());
  const double useful = 1 - static_cast<double>(waited_) / wall;
  if (members_.size() < 2 || useful >= 1 - kWorthOfOne / n) return false;
  size_t worst = 1;
  for (size_t i = 2; i < members_.size(); i++) {
    const auto lost = [&](size_t m) { return lost_[static_cast<size_t>(members_[m])]; };
    if (lost(i) > lost(worst)) worst = i;
  }
  const int64_t lost = lost_[static_cast<size_t>(members_[worst])];
  return static_cast<double>(lost) > kLosingItsCore * wall && send_away(now_ns, worst);
}

bool Attendance::update(int64_t now_ns, int64_t wall_ns, int64_t waited_ns,
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
