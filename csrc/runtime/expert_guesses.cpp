// What the pool of experts reads before a step needs it: the heat of an earlier run, guesses, and
// the experts of parked sequences.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <utility>

#include "base/check.h"
#include "parallel/barrier.h"
#include "runtime/expert_pool.h"

namespace cpuserve {

// --- heat ----------------------------------------------------------------------------------------

std::vector<float> ExpertPool::heat() const {
  const std::lock_guard lock(mutex_);
  std::vector<float> out;
  for (const Unit& unit : units_) {
    out.push_back(static_cast<float>(std::exp2(unit.kept - kept_age())));
  }
  return out;
}

void ExpertPool::warm(Span<const float> heat) {
  check_argument(heat.size() == static_cast<int64_t>(units_.size()), "there are ", units_.size(),
                 " units, not ", heat.size());
  std::vector<int32_t> by_heat;
  const auto heat_of = [&](int32_t unit) { return double{heat[unit]}; };
  for (int32_t unit = 0; unit < heat.size(); unit++) {
    if (heat[unit] > 0 && std::isfinite(heat[unit])) by_heat.push_back(unit);
  }
  std::stable_sort(by_heat.begin(), by_heat.end(),
                   [&](int32_t a, int32_t b) { return heat_of(a) > heat_of(b); });
  const std::lock_guard lock(mutex_);
  for (const int32_t number : by_heat) {
    Unit& unit = units_[static_cast<size_t>(number)];
    unit.kept = kept_age() + std::log2(heat_of(number));
    // All have less heat than a unit that this start uses once, so they leave as topics change.
    unit.level = age_ + std::log2(heat_of(number) / heat_of(by_heat.front()));
    const Shelf& shelf = shelves_[static_cast<size_t>(unit.shelf)];
    const int32_t slot = coldest(shelf);
    const bool free = slot >= 0 && shelf.holders[static_cast<size_t>(slot)] < 0;
    if (free && unit.slot < 0) begin_read(static_cast<size_t>(number), Why::kGuessed);
  }
  jobs_ready_.notify_all();
}

// --- guesses -------------------------------------------------------------------------------------

void ExpertPool::guess(size_t route, Span<const int32_t> experts) noexcept {
  if (route >= by_route_.size()) return;
  const std::lock_guard lock(mutex_);
  if (guesses_.pause > 0) return;  // it began in this step
  guesses_.route = route;
  guesses_.next = 0;
  guesses_.units.clear();
  for (const int32_t e : experts) {
    for (const size_t number : by_route_[route]) {
      if (e < 0) continue;  // an identity, which has no matrices (RouteOp)
      const size_t unit = groups_[number].first_unit + static_cast<size_t>(e);
      const int state = units_[unit].state.load(std::memory_order_relaxed);
      const bool room = guesses_.units.size() < guesses_.units.capacity();
      if (state != kReady && state != kReading && room) {
        guesses_.units.push_back(static_cast<int32_t>(unit));
      }
    }
  }
  if (guesses_.left()) jobs_ready_.notify_one();
}

bool ExpertPool::guesses() const noexcept {
  const std::lock_guard lock(mutex_);
  return guesses_.pause == 0 && !has_all();
}

bool ExpertPool::has_work() const noexcept {
  return wanted_.count + early_.count > 0 || (guesses_.left() && guesses_.pieces < kGuessPieces);
}

// Takes a piece to read. A unit of a guess gets a slot only now, when nothing else is to be read.
// Returns a piece of unit -1 if none of the guesses left is worth its slot.
ExpertPool::Piece ExpertPool::next_piece() noexcept {
  const bool held = early_.count > 0 && units_[static_cast<size_t>(early_.at(0).unit)].held > 0 &&
                    wanted_.count > 0 && ++passed_ % kShare == 0;
  if (wanted_.count > 0 && !held) return wanted_.pop();
  if (early_.count == 0 && !begin_guess()) return {-1, 0, 0, 0, false};
  return early_.pop();
}

bool ExpertPool::begin_guess() noexcept {
  while (guesses_.left()) {
    const int32_t number = guesses_.units[guesses_.next++];
    Unit& unit = units_[static_cast<size_t>(number)];
    const int state = unit.state.load(std::memory_order_relaxed);
    if (state == kReady || state == kReading) continue;
    if (!begin_read(static_cast<size_t>(number), Why::kGuessed)) continue;
    for (size_t i = 0; i < early_.count; i++) early_.at(i).guess = true;
    guesses_.pieces += static_cast<int>(early_.count);  // there were no others
    guesses_.begun.push_back(number);
    counts_.guessed++;
    jobs_ready_.notify_all();
    return true;
  }
  return false;
}

// Counts which guesses were right, when the router has chosen.
void ExpertPool::judge_guesses(size_t route, const Routing& routing) noexcept {
  for (const int32_t number : guesses_.begun) {
    const auto unit = static_cast<size_t>(number);
    const Group& g = groups_[static_cast<size_t>(group_of_unit_[unit])];
    const bool used =
        g.of.route == route && routing.rows(static_cast<int64_t>(unit - g.first_unit)) > 0;
    const bool right = used || units_[unit].held > 0;  // a parked sequence will use it
    guesses_.tried++;
    guesses_.right += right;
    counts_.guessed_right += right;
  }
  guesses_.begun.clear();
  guesses_.units.clear();
  guesses_.next = 0;
  if (guesses_.tried < kTrial) return;
  const double least = kPays * static_cast<double>(guesses_.tried);
  if (static_cast<double>(guesses_.right) < least) guesses_.pause = kPause;
  guesses_.tried = guesses_.right = 0;
}

// Moves the pieces of units that the step now needs to the wanted ones. Other pieces are read
// when nothing else is: their units have slots already.
void ExpertPool::promote_guesses() noexcept {
  for (size_t n = early_.count; n > 0; n--) {
    Piece piece = early_.pop();
    const bool wanted = units_[static_cast<size_t>(piece.unit)].pinned;
    if (wanted && piece.guess) {
      guesses_.pieces--;
      piece.guess = false;
    }
    (wanted ? wanted_ : early_).push(piece);
  }
}

// --- parked sequences ----------------------------------------------------------------------------

bool ExpertPool::misses(size_t route, const Routing& routing) const noexcept {
  for (size_t g = 0; route < by_route_.size() && g < by_route_[route].size(); g++) {
    const Group& group = groups_[by_route_[route][g]];
    for (int32_t e = 0; e < group.of.experts; e++) {
      if (routing.rows(e) > 0 && !ready(route, {&e, 1})) return true;
    }
  }
  return false;
}

bool ExpertPool::ready(size_t route, Span<const int32_t> experts) const noexcept {
  return each_unit(route, experts, [&](size_t unit) {
    const int state = units_[unit].state.load(std::memory_order_acquire);
    return state == kReady || (state == kFailed && units_[unit].held > 0);
  });
}

int ExpertPool::missing(size_t route, Span<const int32_t> experts) const noexcept {
  int count = 0;
  each_unit(route, experts, [&](size_t unit) {
    count += units_[unit].state.load(std::memory_order_acquire) != kReady;
    return true;
  });
  return count;
}

bool ExpertPool::hold_unit(size_t number) noexcept {
  Unit& unit = units_[number];
  Shelf& shelf = shelves_[static_cast<size_t>(unit.shelf)];
  if (unit.held == 0 && 2 * (shelf.held + 1) > shelf.holders.size()) return false;
  const int state = unit.state.load(std::memory_order_relaxed);
  const bool there = state == kReady || state == kReading;
  if (!there && !(unit.held > 0 && state == kFailed) && !begin_read(number, Why::kHeld)) {
    return false;
  }
  shelf.held += unit.held++ == 0;
  if (state != kReady && !std::exchange(unit.counted, true)) counts_.misses++;
  return true;
}

void ExpertPool::release_unit(size_t number) noexcept {
  Unit& unit = units_[number];
  if (--unit.held == 0) shelves_[static_cast<size_t>(unit.shelf)].held--;
}

bool ExpertPool::hold(size_t route, Span<const int32_t> experts, bool first) noexcept {
  const std::lock_guard lock(mutex_);
  unpin();  // the step has gone past the operations before
  std::vector<size_t> held;
  const bool all = each_unit(route, experts, [&](size_t unit) {
    if (!hold_unit(unit)) return false;
    held.push_back(unit);
    return true;
  });
  for (size_t i = 0; !all && i < held.size(); i++) release_unit(held[i]);
  if (all && first) {  // no unit is pinned now, so these are the only ones
    for (const size_t unit : held) units_[unit].pinned = true;
    promote_guesses();
    for (const size_t unit : held) units_[unit].pinned = false;
  }
  if (wanted_.count + early_.count > 0) jobs_ready_.notify_all();
  return all;
}

void ExpertPool::release(size_t route, Span<const int32_t> experts) noexcept {
  const std::lock_guard lock(mutex_);
  each_unit(route, experts, [&](size_t unit) {
    release_unit(unit);
    return true;
  });
  for (Shelf& shelf : shelves_) fill(shelf);
}

void ExpertPool::wait_read(int64_t finished, int threads) noexcept {
  const int64_t begin = now_ns();
  std::unique_lock lock(mutex_);
  if (finished_.load(std::memory_order_relaxed) == finished) {
    unit_ready_.wait_for(lock, std::chrono::milliseconds(1));
  }
  counts_.wait_ns += threads * (now_ns() - begin);
}

}  // namespace cpuserve
