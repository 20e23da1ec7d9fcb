#include "runtime/state_cache.h"

#include <algorithm>
#include <cstring>

#include "base/check.h"

namespace cpuserve {

// Rounds a number of floats up to whole cache lines,
// because each part of a state slot begins at a cache line.
static int64_t in_lines(int64_t floats) { return round_up(floats, 16); }

StateCache::StateCache(const std::vector<StateLayer>& layers, int64_t slots, const Ranks& ranks)
    : slots_(slots) {
  check_argument(slots >= (layers.empty() ? 0 : 1), "a program with states needs at least 1 slot, ",
                 "not ", slots);
  int64_t longest = 0;
  for (const StateLayer& l : layers) {
    open_at_.push_back(in_lines(l.closed));
    closed_bytes_.push_back(static_cast<size_t>(l.closed) * sizeof(float));
    snapshot_bytes_ += static_cast<size_t>(l.units) * closed_bytes_.back();
    units_.emplace_back(static_cast<size_t>(l.units));
    longest = std::max(longest, l.closed);
  }
  empty_.resize(static_cast<size_t>(longest));
  for (int rank = 0; rank < ranks.count(); rank++) {
    int64_t floats = 0;  // number of floats of one slot on this rank
    std::vector<std::pair<Unit*, int64_t>> placed;
    for (size_t l = 0; l < layers.size(); l++) {
      const Range own = ranks.share(layers[l].units, rank);
      for (int64_t u = own.begin; u < own.end; u++) {
        placed.emplace_back(&units_[l][static_cast<size_t>(u)], floats);
        floats += open_at_[l] + in_lines(layers[l].open);
      }
    }
    arenas_.emplace_back(static_cast<size_t>(floats * slots) * sizeof(float));
    for (const auto& [unit, at] : placed) {
      *unit = {arenas_.back().data() + at * static_cast<int64_t>(sizeof(float)),
               floats * static_cast<int64_t>(sizeof(float))};
    }
  }
}

template <class Copy>
void StateCache::each_closed(int64_t slot, const Copy& copy) const {
  for (size_t l = 0; l < units_.size(); l++) {
    for (size_t u = 0; u < units_[l].size(); u++) {
      copy(reinterpret_cast<uint8_t*>(closed(static_cast<Id>(l), static_cast<int64_t>(u), slot)),
           closed_bytes_[l]);
    }
  }
}

void StateCache::read_snapshot(int64_t slot, uint8_t* to) const {
  each_closed(slot, [&](const uint8_t* state, size_t bytes) {
    std::memcpy(to, state, bytes);
    to += bytes;
  });
}

void StateCache::write_snapshot(int64_t slot, const uint8_t* from) {
  each_closed(slot, [&](uint8_t* state, size_t bytes) {
    std::memcpy(state, from, bytes);
    from += bytes;
  });
}

}  // namespace cpuserve
