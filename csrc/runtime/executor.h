// Runs forward steps of a program: one call of the team per step; every worker walks
// through all ops, with barriers where one needs the results of other threads (barrier_plan.h). The
// constructor sizes everything but the block tables, which grow before a step runs, and a step
// allocates nothing.
#pragma once
#include <atomic>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/buffer.h"
#include "base/span.h"
#include "kernels/table.h"
#include "parallel/partition.h"
#include "parallel/team.h"
#include "runtime/attention_plan.h"
#include "runtime/barrier_plan.h"
#include "runtime/block_tables.h"
#include "runtime/kv_cache.h"
#include "runtime/program.h"
#include "runtime/routing.h"
#include "runtime/sampler.h"
#include "runtime/state_cache.h"
#include "runtime/step_input.h"
#include "runtime/weights.h"
#include "runtime/work_sizes.h"

namespace cpuserve {

// Rows that lm_head and sampling take at a time: one of each sequence, so that a step reads the
// matrix once. platforms/memory.py counts their logits, 78 MB for 128 rows and 152k tokens.
constexpr int64_t kLeastLogitRows = 32, kMostLogitRows = 128;

// Results of the rows of a step: [max_tokens], and [max_tokens, max_top]. Of a program with a
// hidden op, vectors [max_tokens, hidden_width] alone.
struct StepResults {
  std::vector<int32_t> tokens, ranks, top_ids;
  std::vector<float> logprobs, top_logprobs, vectors;
};

// The inputs and the output of an op, each as fp32 [rows, width].
struct TapMatrix {
  int64_t rows, width;
  std::vector<float> data;
};
struct Tap {
  std::vector<TapMatrix> inputs;
  TapMatrix output;
};

// How weights and KV cache are placed on the NUMA nodes of their ranks. mode is "bind";
// "first_touch" (then `error` says why: the system refuses to bind, or the threads of a rank are
// not pinned to one node); "interleave" if requested; or "none" with one rank.
struct MemoryBinding {
  std::string mode, error;
  std::vector<int> nodes;  // by rank; -1: more than one
};

// For each rank, the bytes of its weights and of its keys and values by the NUMA node they are on
// now.
struct MemoryNodes {
  std::vector<std::map<int, int64_t>> weights, kv;
};

class Executor {
 public:
  Executor(Team& team, const Program& program, int64_t num_blocks, KvType kv_type,
           int64_t num_slots, int64_t max_top, int64_t num_states = 0, PackedFile packed = {});

  // How much the kernels work on at a time. To be set between steps.
  const WorkSizes& work_sizes() const { return work_sizes_; }
  void set_work_sizes(const WorkSizes& sizes) {
    check_work_sizes(sizes);
    work_sizes_ = sizes;
  }

  Weights& weights() { return weights_; }
  Sampler& sampler() { return sampler_; }
  Team& team() { return *team_; }
  const Program& program() const { return *program_; }
  int64_t max_top() const { return limits_.max_top; }
  // Forgets the sampler state and the block tables of a slot.
  void release(int64_t slot) {
    sampler_.release(slot);
    tables_.release(slot);
  }

  // Runs one step and returns the number of its logit rows; results() holds their results until the
  // next step. Throws std::invalid_argument, before anything runs or changes, if an index is out of
  // range.
  // Throws std::runtime_error if cancelled (KV slots of the tokens of the step may have been
  // written, and slots with drafts have to be admitted again). If the draft of a row was not
  // sampled, the rows that would follow it get no token (-1). `masks` is the memory of the step's
  // masks, which must not change meanwhile.
  int64_t step(Span<const int32_t> words, Span<const int32_t> masks = {});
  // The same, and also copies the unmodified logits [rows, vocab] to `logits`, which the caller has
  // sized.
  int64_t step_logits(Span<const int32_t> words, float* logits);
  int64_t count_rows(Span<const int32_t> words) { return parse(words).rows; }
  // Runs the ops before `op`, then `op`. If the previous call tapped an earlier op of the same
  // step, it continues from there. Nothing is sampled, but the ops store keys and values.
  Tap tap(Span<const int32_t> words, int64_t op);
  // Reads or writes the bytes of KV blocks of a group between steps; see KvCache. Throws
  // std::invalid_argument for a block or a group that does not exist.
  size_t kv_block_bytes() const { return kv_.block_bytes(); }
  void read_blocks(Span<const int32_t> blocks, int32_t group, uint8_t* to) const;
  void write_blocks(Span<const int32_t> blocks, int32_t group, const uint8_t* from);
  // The same for the states in a slot that end with a block.
  size_t snapshot_bytes() const { return states_.snapshot_bytes(); }
  void read_snapshot(int64_t slot, uint8_t* to) const;
  void write_snapshot(int64_t slot, const uint8_t* from);
  // Between steps: allocates memory for some of the KV blocks that the next step could use. Takes
  // 0.1 ms (7 ms in a VM if the host must first find the memory). Returns false when all of them
  // have memory.
  bool grow_kv() {
    return kv_.grow(*team_, program_->cache_groups() * blocks_of(program_->max_tokens()));
  }
  // Returns the heap allocations made during steps so far (base/allocations.h). It stays 0.
  int64_t step_allocations() const { return step_allocations_; }
  const StepResults& results() const { return results_; }
  StepResults& results() { return results_; }

  // From any thread: the running step, or the next one if none runs, ends as soon as each thread
  // has finished its claimed tasks (milliseconds). cancel(false) between steps revokes that.
  void cancel(bool on) noexcept { cancelled_.store(on, std::memory_order_relaxed); }

  // From any thread: returns (number of phases of steps and probes so far, items claimed in the
  // latest). Two readings are equal only if no work was claimed between them.
  std::pair<int64_t, int64_t> progress() const noexcept {
    return {advances_.count.load(std::memory_order_relaxed), queue_.claimed()};
  }

  const MemoryBinding& binding() const { return binding_; }
  // Interleaves the pages of weights and KV cache over `nodes`. To be called before they are
  // loaded.
  void interleave(const std::vector<int>& nodes);
  MemoryNodes memory_nodes() const;  // reads /proc/self/numa_maps

  void profile(bool on) noexcept { profiling_ = on; }
  const std::vector<double>& op_seconds() const { return op_seconds_; }

  double probe_bandwidth(double seconds);      // bytes/s when reading the packed weights
  double probe_dot(int kind, double seconds);  // operations/s; a DotKind
  double probe_barrier(int64_t rounds);        // seconds per barrier
  // Seconds that `count` linears from number `first` on take with `rows` rows, whatever these hold;
  // after the last linear of the program comes the first. Overwrites activations.
  double probe_linears(int64_t rows, int64_t first, int64_t count);
  int64_t num_linears() const;
  std::map<std::string, int64_t> memory() const;  // bytes by use

 private:
  friend struct Worker;  // the work of a thread in a step (worker.h)

  static int64_t blocks_of(int64_t tokens) { return (tokens + kBlock - 1) / kBlock; }
  static Routing make_routing(const Program& program);
  static Buffer make_activations(const Program& program, std::vector<Rows>& values);
  StepInput parse(Span<const int32_t> words, Span<const int32_t> masks = {});
  StepInput accept(Span<const int32_t> words, Span<const int32_t> masks = {});
  void check_kernels() const;
  void check_block(int32_t block) const;
  void check_group(int32_t group) const;
  void check_slot(int64_t slot) const;
  void bind_memory();
  void plan_attention();
  void carve_work_memory();
  void begin_step(const StepInput& in);
  void find_state_slots();
  const int32_t* table(int64_t seq, int64_t group) const noexcept {
    return tables_.table(input_.seq_slot[seq], group).data();
  }
  bool run_ops(int64_t first, int64_t last);
  int64_t run_step(Span<const int32_t> words, Span<const int32_t> masks, float* logits);
  void append_samples();
  TapMatrix read_rows(const Rows& rows, int64_t count) const;

  Team* team_;
  const Program* program_;
  const KernelTable* table_;
  WorkSizes work_sizes_;
  Weights weights_;
  std::vector<Rows> values_;
  Buffer activations_;
  KvCache kv_;
  StateCache states_;
  MemoryBinding binding_;
  Sampler sampler_;
  StepLimits limits_;
  BlockTables tables_;
  std::vector<AttentionPlan> plans_;
  std::vector<int> plan_of_op_;  // by op, -1 where it is not attention
  const BarrierPlan barriers_;

  Buffer work_;  // per-thread scratch, logits, gathered rows, attention partials
  std::vector<uint8_t*> scratch_;
  int64_t logit_rows_ = 0;  // that logit_input_ and logits_ hold
  Rows logit_input_{}, logits_{};
  float* partials_ = nullptr;
  WorkQueue queue_;
  int queue_threads_ = 0;  // number that claimed in the last call
  int64_t phase_ = 0;

  StepInput input_{};
  std::vector<int32_t> slots_;  // KV slot of each token: [groups][max_tokens]
  // Of recurrent layers: the state slot of each token's block, and by sequence the slot of the last
  // closed state before its first token (-1: there is none).
  std::vector<int64_t> state_slots_, state_before_;
  Routing routing_;                 // of the last RouteOp
  std::vector<int32_t> tap_words_;  // the step of the last tap
  int64_t tap_next_ = -1;           // the op after the tapped one; -1: the next tap starts again
  float* logits_copy_ = nullptr;
  StepResults results_;

  // Only thread 0 writes it, at every barrier, so it has a cache line that no other thread uses.
  struct alignas(64) Advances {
    std::atomic<int64_t> count{0};
    void add() noexcept {
      count.store(count.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
    }
  } advances_;

  std::atomic<bool> cancelled_{false};
  bool stop_[2] = {false, false};
  int64_t step_allocations_ = 0;
  bool profiling_ = false;
  std::vector<double> op_seconds_;
};

}  // namespace cpuserve
