// How one step's attention is cut into tasks: once a step, for every distinct layer geometry.
//
// A unit is (sequence, KV head, rows, chunks). Long queries are cut by rows. Where the units left
// the threads unevenly loaded (few sequences, few heads), decode units are also cut over chunks:
// each chunk then leaves a partial result and a merge unit folds them in ascending order, which
// gives the same bits as one thread walking all chunks. Where there are many decode units to a
// thread, one unit takes several KV heads: while it computes on one, the next one's keys arrive.
#pragma once
#include <cstdint>
#include <vector>

#include "kernels/table.h"
#include "parallel/partition.h"
#include "runtime/step_input.h"

namespace cpuserve {

struct AttentionGeometry {
  int32_t q_heads, kv_heads, hd_pad, window;
  int32_t group() const { return q_heads / kv_heads; }
  bool operator==(const AttentionGeometry& o) const {
    return q_heads == o.q_heads && kv_heads == o.kv_heads && hd_pad == o.hd_pad &&
           window == o.window;
  }
};

struct AttentionUnit {
  int32_t seq, kv_head;
  int64_t row0, rows;
  int32_t chunk0, chunk1;
  // < 0: merged here. Else floats from the partial buffer's start to this unit's first slot.
  int64_t partial;
  int64_t partial_stride;  // chunks from row to row there
  int32_t heads;           // KV heads from kv_head on
};

struct MergeUnit {
  int32_t seq, kv_head;
  int64_t row0, rows, chunks, partial;
};

class AttentionPlan {
 public:
  // Sizes every table for the largest step; build() allocates nothing.
  AttentionPlan(AttentionGeometry geometry, int64_t max_tokens, int64_t max_seqs, Ranks ranks);

  void build(const StepInput& in) noexcept;

  const AttentionGeometry& geometry() const { return geometry_; }
  const std::vector<AttentionUnit>& units() const { return units_; }
  // The units that a rank's threads compute: as much as is due to their number, in ascending order
  // of heads, so that with as many heads as ranks (or a multiple) all are the rank's own.
  Range units_of(int rank) const {
    return {cuts_[static_cast<size_t>(rank)], cuts_[static_cast<size_t>(rank) + 1]};
  }
  const std::vector<MergeUnit>& merges() const { return merges_; }
  static constexpr int64_t kPartialFloats = int64_t{4} << 20;  // 16 MB, touched only when used

 private:
  int32_t heads_a_unit(const StepInput& in) const noexcept;
  void add_sequence(const StepInput& in, int32_t seq, int64_t tile_rows,
                    int32_t heads_a_unit) noexcept;
  double cost(const AttentionUnit& u) const noexcept;
  bool unbalanced(double total, double* share) noexcept;
  void split_units(double piece_cost) noexcept;
  void share_out(double total) noexcept;
  bool split_unit(const AttentionUnit& u, double piece_cost, int64_t* partial,
                  int64_t* splits) noexcept;

  AttentionGeometry geometry_;
  Ranks ranks_;
  int threads_;
  std::vector<int32_t> head_ends_;  // by KV head: the end of the heads its owner has
  std::vector<int64_t> cuts_;       // by rank, where its units begin; and their end
  std::vector<size_t> places_;      // by KV head
  std::vector<AttentionUnit> units_, whole_;
  std::vector<MergeUnit> merges_;
  std::vector<double> loads_;
};

}  // namespace cpuserve
