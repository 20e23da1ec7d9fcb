// Selections of keys (SelectKeysOp): the tokens that see more keys than they may read, the choice
// of the keys with the highest scores, and copies of the selected keys and values for attention.
#pragma once
#include <cstdint>

#include "kernels/table.h"
#include "runtime/step_input.h"

namespace cpuserve {

// A token of a step, and its sequence.
struct SequenceToken {
  int64_t seq, token;
};

// The late tokens of a step: the tokens that see more than `most` keys. In each sequence
// they come after the other tokens, because positions ascend.
class LateTokens {
 public:
  LateTokens(const StepInput& in, int64_t most) noexcept;
  int64_t count() const { return count_; }
  int64_t longest() const { return longest_; }  // the most keys that a late token sees
  SequenceToken operator[](int64_t i) const noexcept;

 private:
  int64_t first_of(int64_t seq) const noexcept;

  const StepInput& in_;
  int64_t most_, count_ = 0, longest_ = 0;
};

constexpr size_t kSelectScratch = 2048 * sizeof(int32_t);  // bytes of scratch of select_highest

// Writes to `out` the positions of the `keep` highest of n scores, in ascending order; score i has
// the positions [i * pool, (i + 1) * pool). Of equal scores, the lower indices are selected. `keep`
// must be less than n. Each of three passes over the scores counts the values of up to 11 bits,
// from the highest bits on, to find the lowest score that is selected.
void select_highest(const float* scores, int64_t n, int64_t keep, int32_t pool, float* out,
                    void* scratch) noexcept;

// Returns the bytes of memory for copies of `keys` keys and values of one head, and for the block
// table of these copies.
size_t selected_bytes(const KvLayer& kv, int64_t keys);

// Copies the keys and values of one head at n ascending `positions` of a sequence to `to`, where
// they form a sequence of n tokens. Returns the KV layer of the copy, where all heads have the same
// address, and the block table of the copy.
struct SelectedKeys {
  KvLayer layer;
  const int32_t* block_table;
};
SelectedKeys copy_selected(const KvLayer& kv, int head, const int32_t* block_table,
                           const float* positions, int64_t n, uint8_t* to) noexcept;

}  // namespace cpuserve
