// The states of recurrent layers. Each rank has memory (an arena) [slot][layer][unit of the rank]
// { closed, open }. A state slot holds the states of all layers of one sequence after the tokens
// up to and including one KV block: `closed` is the state after the last multiple of kStateChunk
// tokens, and `open` has a row for each later token (table/recurrent.h).
// A slot is as large as hundreds of KV blocks, so slots have memory of their own.
#pragma once
#include <vector>

#include "base/buffer.h"
#include "parallel/partition.h"
#include "runtime/declarations.h"

namespace cpuserve {

class StateCache {
 public:
  StateCache(const std::vector<StateLayer>& layers, int64_t slots, const Ranks& ranks);

  int64_t slots() const { return slots_; }
  // Return the closed state and the open rows of a state unit, which is a head or a group of heads.
  float* closed(Id layer, int64_t unit, int64_t slot) const noexcept {
    const Unit& u = units_[static_cast<size_t>(layer)][static_cast<size_t>(unit)];
    return reinterpret_cast<float*>(u.base + slot * u.stride);
  }
  float* open(Id layer, int64_t unit, int64_t slot) const noexcept {
    return closed(layer, unit, slot) + open_at_[static_cast<size_t>(layer)];
  }
  // A snapshot consists of the closed states of a slot in the order [layer][unit],
  // for any number of ranks. It has no open rows, so it is complete only if the number of tokens
  // is a multiple of kStateChunk, as at the end of a KV block.
  size_t snapshot_bytes() const { return snapshot_bytes_; }
  void read_snapshot(int64_t slot, uint8_t* to) const;
  void write_snapshot(int64_t slot, const uint8_t* from);
  // Returns a closed state of zeros: the state before the first token of a sequence.
  const float* empty() const noexcept { return empty_.data(); }
  std::vector<Buffer>& arenas() { return arenas_; }  // by rank
  const std::vector<Buffer>& arenas() const { return arenas_; }

 private:
  struct Unit {
    uint8_t* base;   // address of the closed state of the state unit in slot 0
    int64_t stride;  // bytes from one slot to the next
  };
  // Calls copy(address of the closed state, bytes) for every state unit of a state slot.
  template <class Copy>
  void each_closed(int64_t slot, const Copy& copy) const;

  int64_t slots_;
  size_t snapshot_bytes_ = 0;
  std::vector<size_t> closed_bytes_;      // by layer: bytes of the closed state of a state unit
  std::vector<int64_t> open_at_;          // by layer: floats from `closed` to `open` of a unit
  std::vector<std::vector<Unit>> units_;  // [layer][unit]
  std::vector<Buffer> arenas_;
  std::vector<float> empty_;
};

}  // namespace cpuserve
