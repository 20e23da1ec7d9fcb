// The states of recurrent layers: for each rank [slot][layer][unit of the rank] { closed, open }.
// A slot holds the states of all layers for one sequence up to a block of its tokens: the last
// closed state in that block, and the rows of the tokens since then. Slots are as large as hundreds
// of KV blocks, so they have memory of their own.
#pragma once
#include <vector>

#include "base/buffer.h"
#include "parallel/partition.h"
#include "runtime/program.h"

namespace cpuserve {

class StateCache {
 public:
  StateCache(const std::vector<StateLayer>& layers, int64_t slots, const Ranks& ranks);

  int64_t slots() const { return slots_; }
  // The closed state and the open rows of a unit.
  float* closed(Id layer, int64_t unit, int64_t slot) const noexcept {
    const Unit& u = units_[static_cast<size_t>(layer)][static_cast<size_t>(unit)];
    return reinterpret_cast<float*>(u.base + slot * u.stride);
  }
  float* open(Id layer, int64_t unit, int64_t slot) const noexcept {
    return closed(layer, unit, slot) + open_at_[static_cast<size_t>(layer)];
  }
  // A snapshot is the closed states of a slot, in the order of layers and units for any number of
  // ranks. It is complete if the tokens of the slot end with a chunk, as blocks do.
  size_t snapshot_bytes() const { return snapshot_bytes_; }
  void read_snapshot(int64_t slot, uint8_t* to) const;
  void write_snapshot(int64_t slot, const uint8_t* from);
  // A state before any token.
  const float* empty() const noexcept { return empty_.data(); }
  std::vector<Buffer>& arenas() { return arenas_; }  // by rank
  const std::vector<Buffer>& arenas() const { return arenas_; }

 private:
  struct Unit {
    uint8_t* base;  // in slot 0
    int64_t stride;
  };
  // Calls copy(closed state, bytes) for every unit of a slot.
  template <class Copy>
  void each_closed(int64_t slot, const Copy& copy) const;

  int64_t slots_;
  size_t snapshot_bytes_ = 0;
  std::vector<size_t> closed_bytes_;      // by layer
  std::vector<int64_t> open_at_;          // by layer: where the open rows begin, in floats
  std::vector<std::vector<Unit>> units_;  // [layer][unit]
  std::vector<Buffer> arenas_;
  std::vector<float> empty_;
};

}  // namespace cpuserve
