// What the pool of experts expects: the heat of an earlier run, and guesses.
#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "runtime/expert_pool.h"

namespace cpuserve {

// --- heat ----------------------------------------------------------------------------------------

std::vector<float> ExpertPool::heat() const {
  const std::lock_guard lock(mutex_);
  std::vector<float> out;
  for (const Unit& unit : units_) out.push_back(static_cast<float>(std::exp2(unit.level - age_)));
  return out;
}

void ExpertPool::warm(Span<const float> heat) {
  check_argument(heat.size() == static_cast<int64_t>(units_.size()), "there are ", units_.size(),
                 " units, not ", heat.size());
  std::vector<int32_t> by_heat;
  const std::lock_guard lock(mutex_);
  for (size_t i = 0; i < units_.size(); i++) {
    const float h = heat[static_cast<int64_t>(i)];
    if (!(h > 0) || !std::isfinite(h)) continue;
    units_[i].level = age_ + std::log2(static_cast<double>(h));
    by_heat.push_back(static_cast<int32_t>(i));
  }
  std::stable_sort(by_heat.begin(), by_heat.end(), [&](int32_t a, int32_t b) {
    return units_[static_cast<size_t>(a)].level > units_[static_cast<size_t>(b)].level;
  });
  for (const int32_t unit : by_heat) {
    const Shelf& shelf = shelves_[static_cast<size_t>(units_[static_cast<size_t>(unit)].shelf)];
    const int32_t slot = coldest(shelf);
    const bool free = slot >= 0 && shelf.holders[static_cast<size_t>(slot)] < 0;
    if (!free || units_[static_cast<size_t>(unit)].slot >= 0) continue;
    begin_read(static_cast<size_t>(unit), true);
  }
  jobs_ready_.notify_all();
}

// --- guesses -------------------------------------------------------------------------------------

void ExpertPool::guess(size_t route, Span<const int32_t> experts) noexcept {
  if (route >= by_route_.size()) return;
  const std::lock_guard lock(mutex_);
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
  if (wanted_.count > 0) return wanted_.pop();
  if (early_.count == 0 && !begin_guess()) return {-1, 0, 0, 0, false};
  return early_.pop();
}

bool ExpertPool::begin_guess() noexcept {
  while (guesses_.left()) {
    const int32_t number = guesses_.units[guesses_.next++];
    Unit& unit = units_[static_cast<size_t>(number)];
    const int state = unit.state.load(std::memory_order_relaxed);
    if (state == kReady || state == kReading) continue;
    if (!begin_read(static_cast<size_t>(number), true)) continue;
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
    const bool right =
        g.of.route == route && routing.rows(static_cast<int64_t>(unit - g.first_unit)) > 0;
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

}  // namespace cpuserve
