// Runs forward steps of a program: one dispatch to the team a step, every worker walking all ops
// with a barrier after each. Everything is sized in the constructor; a step allocates nothing.
#pragma once
#include <atomic>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/buffer.h"
#include "base/span.h"
#include "kernels/table.h"
#include "parallel/partition.h"
#include "parallel/team.h"
#include "runtime/attention_plan.h"
#include "runtime/kv_cache.h"
#include "runtime/program.h"
#include "runtime/sampler.h"
#include "runtime/step_input.h"
#include "runtime/weights.h"

namespace cpuserve {

constexpr int64_t kLogitRows = 32;  // rows of lm_head and sampling at a time

// Results of the step's logit rows: [max_tokens], and [max_tokens, max_top].
struct StepResults {
  std::vector<int32_t> tokens, ranks, top_ids;
  std::vector<float> logprobs, top_logprobs;
};

// An op's inputs and output as fp32 [rows, width] each.
struct TapMatrix {
  int64_t rows, width;
  std::vector<float> data;
};
struct Tap {
  std::vector<TapMatrix> inputs;
  TapMatrix output;
};

// How weights and KV cache come to the nodes of their ranks. mode: "bind"; "first_touch", `error`
// says why (the system refuses to bind, or a rank's threads are not pinned to one node);
// "interleave" when asked; "none" with one rank.
struct MemoryBinding {
  std::string mode, error;
  std::vector<int> nodes;  // by rank; -1: more than one
};

// Bytes of each rank's weights and keys and values by the NUMA node they are on now.
struct MemoryNodes {
  std::vector<std::map<int, int64_t>> weights, kv;
};

class Executor {
 public:
  Executor(Team& team, const Program& program, int64_t num_blocks, KvType kv_type,
           int64_t num_slots, int64_t max_top);

  Weights& weights() { return weights_; }
  Sampler& sampler() { return sampler_; }
  Team& team() { return *team_; }
  const Program& program() const { return *program_; }
  int64_t max_top() const { return limits_.max_top; }

  // Runs one step and returns its logit rows; results() holds them until the next step. Throws
  // std::invalid_argument, nothing having run, when an index is out of range, and
  // std::runtime_error when cancelled (KV slots of the step's tokens may have been written).
  int64_t step(Span<const int32_t> words);
  // The same, and copies the untouched logits [rows, vocab] to `logits`, sized by the caller.
  int64_t step_logits(Span<const int32_t> words, float* logits);
  int64_t count_rows(Span<const int32_t> words) const { return parse(words).rows; }
  // Runs the ops before `op`, then `op`. Samples nothing; the ops' KV stores do happen.
  Tap tap(Span<const int32_t> words, int64_t op);
  // The bytes of KV blocks, between steps; see KvCache. std::invalid_argument for a bad block.
  size_t kv_block_bytes() const { return kv_.block_bytes(); }
  void read_blocks(Span<const int32_t> blocks, uint8_t* to) const;
  void write_blocks(Span<const int32_t> blocks, const uint8_t* from);
  // While nothing runs: gives memory to some of the KV blocks that the next step could take, for
  // 0.1 ms (or, in a VM whose host has to find it first, 7). False when they all have it.
  bool grow_kv() { return kv_.grow(*team_, blocks_of(program_->max_tokens())); }
  // Heap allocations made so far while steps ran (base/allocations.h); stays 0.
  int64_t step_allocations() const { return step_allocations_; }
  const StepResults& results() const { return results_; }
  StepResults& results() { return results_; }

  // From any thread: the step that runs, or else the next, ends as soon as each thread has finished
  // what it has claimed (milliseconds). cancel(false) between steps takes it back.
  void cancel(bool on) noexcept { cancelled_.store(on, std::memory_order_relaxed); }

  const MemoryBinding& binding() const { return binding_; }
  // Asks for weights and KV cache from all of `nodes` in turn; before they are loaded.
  void interleave(const std::vector<int>& nodes);
  MemoryNodes memory_nodes() const;  // reads a file of the kernel

  void profile(bool on) noexcept { profiling_ = on; }
  const std::vector<double>& op_seconds() const { return op_seconds_; }

  double probe_bandwidth(double seconds);         // bytes/s of reading the packed weights
  double probe_dot(int kind, double seconds);     // operations/s; kind as in KernelTable
  double probe_barrier(int64_t rounds);           // seconds per barrier
  std::map<std::string, int64_t> memory() const;  // bytes by use

 private:
  struct Worker;
  friend struct Worker;

  static int64_t blocks_of(int64_t tokens) { return (tokens + kBlock - 1) / kBlock; }
  static Buffer make_activations(const Program& program, std::vector<Rows>& values);
  StepInput parse(Span<const int32_t> words) const;
  void check_kernels() const;
  void check_block(int32_t block) const;
  void bind_memory();
  void plan_attention();
  void carve_work_memory();
  void begin_step(const StepInput& in);
  bool run_ops(int64_t first, int64_t last);
  int64_t run_step(Span<const int32_t> words, float* logits);
  void append_samples();
  TapMatrix read_rows(const Rows& rows, int64_t count) const;

  Team* team_;
  const Program* program_;
  const KernelTable* table_;
  Weights weights_;
  std::vector<Rows> values_;
  Buffer activations_;
  KvCache kv_;
  MemoryBinding binding_;
  Sampler sampler_;
  StepLimits limits_;
  std::vector<AttentionPlan> plans_;
  std::vector<int> plan_of_op_;  // by op, -1 where it is not attention

  Buffer work_;  // per-thread scratch, logits, gathered rows, attention partials
  std::vector<uint8_t*> scratch_;
  Rows logit_input_{}, logits_{};
  float* partials_ = nullptr;
  WorkQueue queue_;
  int queue_threads_ = 0;  // that claimed in the last dispatch
  int64_t phase_ = 0;

  StepInput input_{};
  std::vector<int32_t> slots_;  // KV slot of each token
  float* logits_copy_ = nullptr;
  StepResults results_;

  std::atomic<bool> cancelled_{false};
  bool stop_[2] = {false, false};
  int64_t step_allocations_ = 0;
  bool profiling_ = false;
  std::vector<double> op_seconds_;
};

}  // namespace cpuserve
