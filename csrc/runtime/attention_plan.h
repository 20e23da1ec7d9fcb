// The plan for the attention of one step: how the work is divided into attention units for threads.
// A step builds one plan for each distinct geometry of attention layers.
//
// An attention unit is the attention of some query rows of one sequence to some chunks of keys,
// for one KV head. A row is one query head of one token, and a chunk is 256 keys (kChunk).
// Prompts are divided into units of some rows. The share of a thread is a run of consecutive units,
// and all shares have equal cost. If whole units would load the threads unevenly (few sequences,
// or a very long one), a unit that crosses the end of a share is also divided over its chunks:
// each chunk then has a partial result, and a merge unit adds these results in ascending order,
// so the sum has the same bits as if one thread computed all chunks.
// If there are many decode units per thread, one unit takes several KV heads: while it computes
// a head, the keys of the next head are loaded. Planning takes time linear in the number of units.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "kernels/table.h"
#include "parallel/partition.h"
#include "runtime/step_input.h"

namespace cpuserve {

struct AttentionGeometry {
  int32_t q_heads, kv_heads, hd_pad, window;
  bool causal = true;
  int32_t most = 0;       // if not 0, rows that see more keys are not in the plan (SelectKeysOp)
  bool spans = false;     // rows of a picture see all its keys (StepInput::ends)
  bool sections = false;  // a row sees keys from the last multiple of `window` on
  int32_t group() const { return q_heads / kv_heads; }
  bool operator==(const AttentionGeometry& o) const {
    return q_heads == o.q_heads && kv_heads == o.kv_heads && hd_pad == o.hd_pad &&
           window == o.window && causal == o.causal && most == o.most && spans == o.spans &&
           sections == o.sections;
  }
};

struct AttentionUnit {
  int32_t seq, kv_head;
  int64_t row0, rows;      // rows [row0, row0 + rows); row r is query head r % group of a token
  int32_t chunk0, chunk1;  // chunks [chunk0, chunk1)
  // The offset of the unit's first partial result in the buffer of partial results, in floats.
  // A negative value means that the unit merges its chunks itself and has no partial results.
  int64_t partial;
  int64_t partial_stride;  // number of partial results from one row to the next
  int32_t heads;           // the unit computes KV heads [kv_head, kv_head + heads)
  int32_t end_key;         // the last row of the unit sees only keys before this position
  bool both_sides;         // all rows of the unit are of one picture, and see it up to end_key
  // Returns the number of keys that the unit attends to.
  int64_t keys() const {
    return std::min<int64_t>(int64_t{chunk1} * kChunk, end_key) - int64_t{chunk0} * kChunk;
  }
};

struct MergeUnit {
  int32_t seq, kv_head;
  int64_t row0, rows, chunks, partial;
};

// The limits of one step:
// its tokens, its sequences, the keys of one sequence, and the keys of all its sequences together.
struct AttentionLimits {
  int64_t tokens, seqs, sequence_keys, keys;
};

class AttentionPlan {
 public:
  // Sizes every table for the largest step (`limits`), so that build() allocates nothing.
  AttentionPlan(AttentionGeometry geometry, const AttentionLimits& limits, Ranks ranks);

  void build(const StepInput& in) noexcept;

  const AttentionGeometry& geometry() const { return geometry_; }
  const std::vector<AttentionUnit>& units() const { return units_; }
  // Returns the range of attention units that belong to threads [first, last). Units are
  // in ascending order of KV heads. If the number of KV heads is a multiple of the number of ranks,
  // each rank therefore computes the heads that are in its own memory.
  Range units_of(int64_t first, int64_t last) const {
    return {cuts_[static_cast<size_t>(first)], cuts_[static_cast<size_t>(last)]};
  }
  Range units_of(int rank) const {
    const Range threads = ranks_.threads_of(rank);
    return units_of(threads.begin, threads.end);
  }
  const std::vector<MergeUnit>& merges() const { return merges_; }
  // Returns the size, in floats, of a buffer that holds the partial results of any step.
  // A page of the buffer takes memory only when a step uses it.
  int64_t partial_floats() const { return partial_floats_ + selected_floats_; }
  // Returns the offset, in floats, of the partial results of rows that read selected keys and are
  // not in the plan (AttentionGeometry::most). The buffer has room for the rows of T - 1 pairs
  // of a token and a KV head, where T is the number of threads.
  int64_t selected_partials() const { return partial_floats_; }
  // Returns the number of floats of one partial result.
  int64_t slot() const noexcept;

 private:
  int64_t floats_for_partials(const AttentionLimits& limits) const noexcept;
  int64_t tile_rows(const StepInput& in) const noexcept;
  int32_t heads_a_unit(const StepInput& in) const noexcept;
  int64_t end_of_keys(int64_t position, int64_t keys) const noexcept;
  int64_t first_key(int64_t position) const noexcept;
  int64_t first_of_run(const StepInput& in, int32_t seq, int64_t token) const noexcept;
  void add_sequence(const StepInput& in, int32_t seq, int64_t tile_rows,
                    int32_t heads_a_unit) noexcept;
  void add_tile(AttentionUnit tile, int32_t step) noexcept;
  double cost(const AttentionUnit& u) const noexcept;
  void sort_by_head() noexcept;
  bool uneven(double largest) const noexcept;
  bool crosses(double before, double cost) const noexcept;
  void cut_at_shares() noexcept;
  bool split_unit(const AttentionUnit& u, double before, int64_t* partial) noexcept;
  void push_pieces(AttentionUnit piece, int64_t chunks, double before, int64_t partial) noexcept;
  void push_merges(const AttentionUnit& u, int64_t chunks, int64_t partial) noexcept;
  void share_out() noexcept;

  AttentionGeometry geometry_;
  Ranks ranks_;
  int threads_;
  std::vector<int32_t> head_ends_;  // by KV head: end of the range of heads that its rank owns
  std::vector<int64_t> cuts_;       // by thread: its first unit; last: the number of units
  std::vector<size_t> places_;      // by KV head: the index for its next unit, while sorting units
  std::vector<AttentionUnit> units_, whole_;
  std::vector<MergeUnit> merges_;
  int64_t partial_floats_ = 0, selected_floats_ = 0;
  double share_ = 0;  // cost of the share of each thread in this step
};

}  // namespace cpuserve
