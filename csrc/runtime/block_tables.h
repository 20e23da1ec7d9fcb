// The block tables of the sequences, which the executor keeps by slot, so that a step brings only
// the changes. Each entry was checked when it arrived (step_input.h).
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "base/span.h"

namespace cpuserve {

class BlockTables {
 public:
  // groups: tables of each sequence.
  BlockTables(int64_t slots, int64_t groups)
      : groups_(groups),
        tables_(static_cast<size_t>(slots * groups)),
        used_(static_cast<size_t>(slots)) {}

  Span<const int32_t> table(int64_t slot, int64_t group) const noexcept {
    return tables_[static_cast<size_t>(slot * groups_ + group)];
  }
  // Lets a table go on with `entries` from entry `first` on, which is in it or right after its end.
  // Allocates if the table has never been that long.
  void change(int64_t slot, int64_t group, int64_t first, Span<const int32_t> entries) {
    std::vector<int32_t>& table = tables_[static_cast<size_t>(slot * groups_ + group)];
    table.resize(static_cast<size_t>(first));
    table.insert(table.end(), entries.begin(), entries.end());
  }
  // Empties the tables of a slot.
  void release(int64_t slot) {
    const auto first = tables_.begin() + slot * groups_;
    std::for_each(first, first + groups_, [](std::vector<int32_t>& table) { table.clear(); });
  }

  // `claim` returns whether nothing has claimed the slot since the last `begin_step`.
  void begin_step() noexcept { step_++; }
  bool claim(int64_t slot) noexcept {
    int64_t& used = used_[static_cast<size_t>(slot)];
    const bool first = used != step_;
    used = step_;
    return first;
  }

 private:
  int64_t groups_;
  std::vector<std::vector<int32_t>> tables_;  // [slots][groups]
  std::vector<int64_t> used_;                 // by slot: the last step that claimed it
  int64_t step_ = 0;
};

}  // namespace cpuserve
