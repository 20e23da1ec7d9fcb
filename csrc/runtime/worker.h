// One thread's walk through a step. Included by the executor's units only.
#pragma once
#include "runtime/executor.h"
#include "runtime/rows.h"

namespace cpuserve {

struct Executor::Worker {
  Executor& e;
  const int thread, threads;
  const Crew crew;  // of this thread's rank
  int64_t phase;
  uint8_t* const scratch;
  size_t op = 0;  // index of the op that runs

  // Runs ops [first, last), a barrier after each; false when the step was cancelled.
  bool walk(int64_t first, int64_t last) noexcept;

  // Work between two barriers is one phase; all threads number them alike.
  void barrier() noexcept {
    e.team_->barrier(thread);
    e.queue_.enter(thread, ++phase);
  }
  // Claims the crew's items of this phase in chunks, own share first; once cancelled, leaves them
  // undone, since one op of a long prompt can take a second. What was not computed is never used:
  // values only feed values here, and run_ops finds the flag set. One call a phase.
  template <class Run>
  void drain(Crew of, int64_t items, int64_t chunk, const Run& run) noexcept {
    e.queue_.drain(thread, of, phase, items, chunk, [&](int64_t begin, int64_t end) {
      if (!e.cancelled_.load(std::memory_order_relaxed)) run(begin, end);
    });
  }
  Crew everyone() const noexcept { return {0, 0, threads}; }
  Range share(int64_t items) const noexcept { return split(items, thread, threads); }

  int64_t tokens() const noexcept { return e.input_.tokens; }
  const Rows& value(Id id) const noexcept { return e.values_[static_cast<size_t>(id)]; }
  const float* vector(Id id) const noexcept { return e.weights_.vector(id); }
  const Matrix& matrix(Id id) const noexcept {
    return e.program_->matrices()[static_cast<size_t>(id)];
  }

  void operator()(const EmbedOp& op) noexcept;
  void operator()(const PositionEmbedOp& op) noexcept;
  void operator()(const NormOp& op) noexcept;
  void operator()(const ConvertOp& op) noexcept;
  void operator()(const LinearOp& op) noexcept;
  void operator()(const RopeStoreOp& op) noexcept;
  void operator()(const AttentionOp& op) noexcept;
  void operator()(const AddOp& op) noexcept;
  void operator()(const ActivationOp& op) noexcept;
  void operator()(const LogitsOp& op) noexcept;

  // rows x of the matrix's kind -> ep.out: the panels of this rank, claimed by its threads.
  void multiply(Id matrix, const Rows& x, int64_t m, const Epilogue& ep) noexcept;

 private:
  void attend(const AttentionOp& op, const AttentionUnit& unit) noexcept;
  void merge(const AttentionOp& op, const MergeUnit& unit) noexcept;
  void gather_logit_rows(const LogitsOp& op, int64_t first, int64_t count) noexcept;
  void scale_logits(const LogitsOp& op, float* logits) noexcept;
  void sample_row(const LogitsOp& op, int64_t first, int64_t row) noexcept;
};

}  // namespace cpuserve
