// The work of one thread in a step.
// The source files of the operations include this header.
#pragma once
#include <cmath>

#include "runtime/linear_plan.h"
#include "runtime/rows.h"
#include "runtime/step_context.h"

namespace cpuserve {

inline float sigmoid(float x) noexcept { return 1.0f / (1.0f + std::exp(-x)); }

// log(1 + exp(x)), which makes the time step of a recurrent layer positive.
inline float softplus(float x) noexcept { return x > 20.0f ? x : std::log1p(std::exp(x)); }

struct Worker {
  StepContext& step;
  const int thread, threads;
  const RankThreads peers;  // the members of the rank of this thread, including this thread
  int64_t phase;
  uint8_t* const scratch;
  size_t op = 0;       // index of the running op
  bool alone = false;  // whether this thread does all work of the running op

  // Waits until all threads of the step have called barrier().
  // The work between two barriers is called a phase; all threads number the phases in the same way.
  void barrier() noexcept {
    barrier([] {});
  }
  // Waits until all threads of the step have called barrier().
  // The last thread to arrive calls last() before the other threads continue.
  template <class Last>
  void barrier(const Last& last) noexcept {
    step.team->barrier(thread, last);
    if (thread == 0) step.advances.add();
    step.queue.enter(thread, ++phase);
  }
  // Divides items [0, items) among the threads `of` with work stealing: this thread claims chunks
  // of items, first from its own share, and calls run(begin, end) for each chunk.
  // May be called once in a phase. In a cancelled step, threads claim the remaining items
  // without computing them, because one op of a long prompt can take a second. The results
  // of such a step are not used: Walk::run reads the cancel flag at the end and drops the step.
  template <class Run>
  void drain(RankThreads of, int64_t items, int64_t chunk, const Run& run) noexcept {
    drain_shares(of, [&](int owner) { return split(items, owner, of.size); }, chunk, run);
  }
  template <class Share, class Run>
  void drain_shares(RankThreads of, const Share& share_of, int64_t chunk, const Run& run) noexcept {
    step.queue.drain_shares(thread, of, phase, share_of, chunk, [&](int64_t begin, int64_t end) {
      if (!step.cancelled.load(std::memory_order_relaxed)) run(begin, end);
    });
  }
  // Does the same as drain() for the tasks of this rank in a slice of an operation (Slice): a
  // thread claims at least one task, if there is one. The tasks must need no barrier between them.
  template <class Run>
  void drain_slice(Range tasks, int64_t chunk, const Run& run) noexcept {
    std::atomic<int64_t>& next = step.slice.next[static_cast<size_t>(peers.rank)];
    do {
      // relaxed: a claim only takes a number, and the barrier at the end publishes the results
      const int64_t at = tasks.begin + next.fetch_add(chunk, std::memory_order_relaxed);
      if (at >= tasks.end) return;
      if (!step.cancelled.load(std::memory_order_relaxed)) run(at, std::min(at + chunk, tasks.end));
    } while (now_ns() < step.slice.end);
    if (next.load(std::memory_order_relaxed) < tasks.size()) {
      step.slice.more.store(true, std::memory_order_relaxed);
    }
  }
  bool in_slice() const noexcept { return step.slice.end > 0; }
  RankThreads everyone() const noexcept { return {0, 0, threads}; }
  // Returns the items of this thread in an operation that is too short for work stealing.
  // Threads on faster cores get more items.
  Range share(int64_t items) const noexcept {
    if (alone) return {0, items};
    const Range part = split(items, step.slice.part, step.slice.parts);
    const Range mine = step.team->speeds().share(part.size(), thread, threads);
    return {part.begin + mine.begin, part.begin + mine.end};
  }

  int64_t tokens() const noexcept { return step.input.tokens; }
  // Returns the number of rows of a value in this step.
  int64_t rows(Id id) const noexcept {
    return step.program->values()[static_cast<size_t>(id)].rows(tokens());
  }
  const Rows& value(Id id) const noexcept { return step.values[static_cast<size_t>(id)]; }
  const float* vector(Id id) const noexcept { return step.weights.vector(id); }
  const Matrix& matrix(Id id) const noexcept {
    return step.program->matrices()[static_cast<size_t>(id)];
  }

  // The parts of the step that operations use.
  const Declarations& program() const noexcept { return *step.program; }
  const KernelTable& kernels() const noexcept { return *step.kernels; }
  const WorkSizes& work_sizes() const noexcept { return step.work_sizes; }
  const Ranks& ranks() const noexcept { return step.team->ranks(); }
  const Weights& weights() const noexcept { return step.weights; }
  const StepInput& input() const noexcept { return step.input; }
  Routing& routing() const noexcept { return step.routing; }
  const std::atomic<bool>& cancelled() const noexcept { return step.cancelled; }
  const NextRouter& next_router() const noexcept { return step.next_routers[op]; }
  // Whether the step stops after the running RouteOp, because some of its sequences have to be
  // parked, or go on (parts.h). One thread calls this while the others wait.
  bool pauses() const noexcept {
    if (!step.pauses(static_cast<int64_t>(op))) return false;
    step.paused_op = static_cast<int64_t>(op);
    return true;
  }
  // Marks a token that needs an expert which could not be read: its sequence gets no result.
  void fail_token(int64_t token) const noexcept {
    step.failed_tokens[static_cast<size_t>(token)].store(true, std::memory_order_relaxed);
  }
  const float* media_row(int64_t row) const noexcept { return step.media_row(row); }
  const uint8_t* patch(int64_t row) const noexcept { return step.patch(row); }
  const StepContext::Turns& turns(int32_t axial) const noexcept {
    return step.turns[static_cast<size_t>(axial)];
  }
  const int32_t* token_numbers() const noexcept { return step.token_numbers; }
  const KvCache& kv() const noexcept { return step.kv; }
  // kv_slots returns the KV slot of each token, in the cache group of KV layer `layer`. block_table
  // returns the block table of a sequence in the cache group of the layer.
  const int32_t* kv_slots(Id layer) const noexcept {
    return step.kv_slots.data() + step.kv.group(layer) * step.program->max_tokens();
  }
  const int32_t* block_table(int64_t seq, Id layer) const noexcept {
    return step.table(seq, step.kv.group(layer));
  }
  const AttentionPlan& attention_plan() const noexcept {  // the plan of the running op
    return step.plans[static_cast<size_t>(step.plan_of_op[op])];
  }
  float* partials() const noexcept { return step.partials; }  // partial results of attention
  // Memory for the scores of index keys, which holds the scores of one token at least.
  float* index_scores() const noexcept { return step.index_scores; }
  int64_t index_floats() const noexcept { return step.index_floats; }
  StateCache& states() const noexcept { return step.states; }
  // state_slot returns the state slot for the block of a token. state_before returns the state slot
  // with the last closed state before the tokens of a sequence in this step (-1: there is none).
  int64_t state_slot(int64_t token) const noexcept {
    return step.state_slots[static_cast<size_t>(token)];
  }
  int64_t state_before(int64_t seq) const noexcept {
    return step.state_before[static_cast<size_t>(seq)];
  }
  const Rows& logit_input() const noexcept { return step.logit_input; }
  const Rows& logits() const noexcept { return step.logits; }
  int64_t logit_rows() const noexcept { return step.logit_rows; }
  float* logits_copy() const noexcept { return step.logits_copy; }
  Sampler& sampler() const noexcept { return step.sampler; }
  StepResults& results() const noexcept { return step.results; }
  int64_t max_top() const noexcept { return step.limits.max_top; }
  uint8_t* scratch_of(int64_t other) const noexcept {
    return step.scratch[static_cast<size_t>(other)];
  }

  // The arguments of a linear, without its weights. The linears of all experts share one Product,
  // because they differ only in their weights and rows.
  struct Product {
    const LinearKernel& kernel;
    const Matrix& matrix;
    const Rows& x;
    Range panels;  // the panels that this rank computes
    LinearArgs args;

    LinearPlan plan(int64_t rows, int threads) const noexcept;
    // Runs `task` of a LinearPlan: multiplies the rows of the task by the weights w.
    // Row 0 of the LinearPlan is row `row0` of x.
    void run(const PackedWeight& w, int64_t row0, const LinearTask& task) const noexcept;
  };
  Product product(Id matrix, const Rows& x, const Epilogue& ep, uint8_t* work) const noexcept;
  // Multiplies m rows of x by a matrix and writes the result to ep.out.
  // x must have the row format that the weight kind of the matrix needs.
  // Each rank has some panels of the matrix, and its threads claim tasks of these panels.
  void multiply(Id matrix, const Rows& x, int64_t m, const Epilogue& ep) noexcept;
};

}  // namespace cpuserve
