// The rows of sequences that wait for experts while the other sequences of their step go on.
//
// A sequence is parked at a RouteOp: its experts at this operation are not in memory. Its rows of
// all values leave the step. It goes on when a step with the same tokens comes to the operation,
// and its experts have been read. Until then ExpertPool::hold keeps the experts that are there.
#pragma once
#include <cstdint>
#include <vector>

#include "base/buffer.h"
#include "base/span.h"
#include "kernels/table.h"
#include "runtime/declarations.h"
#include "runtime/step_input.h"

namespace cpuserve {

class ParkedRows {
 public:
  // Longer chunks of prompts wait with their step. platforms/on_disk.py counts the memory.
  static constexpr int64_t kMostTokens = 256;

  struct Sequence {
    int64_t slot = 0;      // of its request
    int64_t op = 0;        // the RouteOp
    int32_t position = 0;  // of its first token
    std::vector<int32_t> token_ids, experts;
    std::vector<int32_t> rows;  // of memory_, one for each token
    int64_t number = -1;        // in the present step; -1: the step does not have it
  };

  explicit ParkedRows(const Declarations& program);
  // Whether a value has one row for each token. Only such rows are parked.
  static bool by_token(const Value& value) { return value.copies == 1 && value.fold == 1; }

  // Finds the sequences of a step among the parked ones, and forgets parked ones
  // with other tokens in its request slots. Returns the forgotten ones.
  std::vector<Sequence> begin_step(const StepInput& in);
  std::vector<Sequence>& all() { return all_; }
  const std::vector<Sequence>& all() const { return all_; }
  // Whether a sequence of the present step is parked, anywhere or at an operation.
  bool any() const noexcept;
  bool any_at(int64_t op) const noexcept;
  bool has_room(int64_t tokens) const { return tokens <= static_cast<int64_t>(free_.size()); }

  // Copies rows [first, first + tokens) of `values` to memory.
  void save(Sequence sequence, Span<const Rows> values, int64_t first);
  // Copies the rows of sequence number `at` of all() to rows from `first` on, and forgets it.
  Sequence restore(size_t at, Span<const Rows> values, int64_t first);
  Sequence forget(size_t at);

 private:
  void copy(const Sequence& sequence, Span<const Rows> values, int64_t first, bool save) noexcept;

  std::vector<size_t> values_;  // the numbers of the values with a row for each token
  size_t row_bytes_ = 0;
  Buffer memory_;
  std::vector<int32_t> free_;
  std::vector<Sequence> all_;
};

}  // namespace cpuserve
