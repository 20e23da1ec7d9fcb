// The block tables of the sequences. The executor keeps the tables of each request slot, so a step
// passes only the entries that have changed. parse_step (step_input.h) has checked these entries.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "base/span.h"

namespace cpuserve {

class BlockTables {
 public:
  // slots: the number of request slots. groups: the number of block tables of each sequence.
  BlockTables(int64_t slots, int64_t groups)
      : groups_(groups),
        tables_(static_cast<size_t>(slots * groups)),
        used_(static_cast<size_t>(slots)) {}

  Span<const int32_t> table(int64_t slot, int64_t group) const noexcept {
    return tables_[static_cast<size_t>(slot * groups_ + group)];
  }
  // Replaces the entries of a block table from index `first` on by `entries`; `first` is at most
  // the length of the table. Allocates memory if the table has never been as long before.
  void change(int64_t slot, int64_t group, int64_t first, Span<const int32_t> entries) {
    std::vector<int32_t>& table = tables_[static_cast<size_t>(slot * groups_ + group)];
    table.resize(static_cast<size_t>(first));
    table.insert(table.end(), entries.begin(), entries.end());
  }
  // Empties the block tables of a request slot.
  void release(int64_t slot) {
    const auto first = tables_.begin() + slot * groups_;
    std::for_each(first, first + groups_, [](std::vector<int32_t>& table) { table.clear(); });
  }

  // claim(slot) returns true at its first call with this request slot after begin_step(),
  // so that a caller can detect two sequences of a step with the same request slot.
  void begin_step() noexcept { step_++; }
  bool claim(int64_t slot) noexcept {
    int64_t& used = used_[static_cast<size_t>(slot)];
    const bool first = used != step_;
    used = step_;
    return first;
  }

 private:
  int64_t groups_;
  std::vector<std::vector<int32_t>> tables_;  // [request slot][table of a sequence]
  std::vector<int64_t> used_;                 // by request slot: the last step that claimed it
  int64_t step_ = 0;
};

}  // namespace cpuserve
