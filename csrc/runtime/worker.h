// The work of one thread in a step. Only the source files of the executor include this.
#pragma once
#include <cmath>

#include "runtime/executor.h"
#include "runtime/linear_plan.h"
#include "runtime/rows.h"

namespace cpuserve {

inline float sigmoid(float x) noexcept { return 1.0f / (1.0f + std::exp(-x)); }

// Makes the positive time step of a recurrent layer from the computed value.
inline float softplus(float x) noexcept { return x > 20.0f ? x : std::log1p(std::exp(x)); }

struct Executor::Worker {
  Executor& e;
  const int thread, threads;
  const Crew crew;  // members of this thread's rank
  int64_t phase;
  uint8_t* const scratch;
  size_t op = 0;       // index of the running op
  bool alone = false;  // this thread does all of the running op

  // Runs ops [first, last) with the barriers of Waits. Returns false if the step was
  // cancelled.
  bool walk(int64_t first, int64_t last) noexcept;

  // Whether an op works on routed rows alone and there are none, because no sequence of the step
  // has an adapter. All threads find the same, because a barrier follows the op that routes.
  bool is_idle(const Op& op) const noexcept;

  // The work between two barriers is one phase. All threads number phases alike.
  void barrier() noexcept {
    barrier([] {});
  }
  // The last thread to arrive calls last() before the others go on.
  template <class Last>
  void barrier(const Last& last) noexcept {
    e.team_->barrier(thread, last);
    if (thread == 0) e.advances_.add();
    e.queue_.enter(thread, ++phase);
  }
  // Claims the crew's items of this phase in chunks, starting with this thread's own share. Once
  // the step is cancelled, the remaining items are claimed but not computed, because one op of a
  // long prompt can take a second. Values that were not computed are never used: only other values
  // depend on them, and run_ops sees the flag. At most one call per phase.
  template <class Run>
  void drain(Crew of, int64_t items, int64_t chunk, const Run& run) noexcept {
    drain_shares(of, [&](int owner) { return split(items, owner, of.size); }, chunk, run);
  }
  template <class Share, class Run>
  void drain_shares(Crew of, const Share& share_of, int64_t chunk, const Run& run) noexcept {
    e.queue_.drain_shares(thread, of, phase, share_of, chunk, [&](int64_t begin, int64_t end) {
      if (!e.cancelled_.load(std::memory_order_relaxed)) run(begin, end);
    });
  }
  Crew everyone() const noexcept { return {0, 0, threads}; }
  // Rows of an operation that no thread claims: they take too little time.
  Range share(int64_t items) const noexcept {
    if (alone) return {0, items};
    return e.team_->speeds().share(items, thread, threads);
  }

  int64_t tokens() const noexcept { return e.input_.tokens; }
  // Rows of a value in this step.
  int64_t rows(Id id) const noexcept {
    return tokens() * e.program_->values()[static_cast<size_t>(id)].copies;
  }
  const Rows& value(Id id) const noexcept { return e.values_[static_cast<size_t>(id)]; }
  const float* vector(Id id) const noexcept { return e.weights_.vector(id); }
  const Matrix& matrix(Id id) const noexcept {
    return e.program_->matrices()[static_cast<size_t>(id)];
  }

  void operator()(const EmbedOp& op) noexcept;
  void operator()(const PositionEmbedOp& op) noexcept;
  void operator()(const NormOp& op) noexcept;
  void operator()(const PartNormOp& op) noexcept;
  void operator()(const ConvertOp& op) noexcept;
  void operator()(const LinearOp& op) noexcept;
  void operator()(const RouteOp& op) noexcept;
  void operator()(const AdapterOp& op) noexcept;
  void operator()(const SpreadOp& op) noexcept;
  void operator()(const ExpertLinearOp& op) noexcept;
  void operator()(const CombineOp& op) noexcept;
  void operator()(const RopeStoreOp& op) noexcept;
  void operator()(const HeadLinearOp& op) noexcept;
  void operator()(const LatentStoreOp& op) noexcept;
  void operator()(const AttentionOp& op) noexcept;
  void operator()(const SplitGatesOp& op) noexcept;
  void operator()(const GateOp& op) noexcept;
  void operator()(const GatedNormOp& op) noexcept;
  void operator()(const GatedDeltaOp& op) noexcept;
  void operator()(const ShortConvOp& op) noexcept;
  void operator()(const Mamba2Op& op) noexcept;
  void operator()(const AddOp& op) noexcept;
  void operator()(const ScaleOp& op) noexcept;
  void operator()(const ColumnsOp& op) noexcept;
  void operator()(const MixPartsOp& op) noexcept;
  void operator()(const MatchRmsOp& op) noexcept;
  void operator()(const KeepTopOp& op) noexcept;
  void operator()(const ActivationOp& op) noexcept;
  void operator()(const LogitsOp& op) noexcept;
  void operator()(const HiddenOp& op) noexcept;

  // Multiplies rows x, in the format of the matrix's kind, and passes the result to ep.out.
  // Computes the panels of this rank, which its threads claim.
  void multiply(Id matrix, const Rows& x, int64_t m, const Epilogue& ep) noexcept;

 private:
  // Returns the op after those from `first` on that one thread does while the others wait.
  int64_t end_of_light(int64_t first, int64_t last) const noexcept;
  void run_alone(int64_t first, int64_t last) noexcept;

  // Asks the system to read the experts of this step ahead, if the weights are mapped from a file.
  void fetch_experts() const noexcept;

  // A conversion that reorders columns.
  void reorder(const ConvertOp& op) noexcept;

  // A linear, or the linears of all experts, which differ in their weights and rows alone.
  struct Product {
    const LinearKernel& kernel;
    const Matrix& matrix;
    const Rows& x;
    Range panels;  // that this rank computes
    LinearArgs args;

    LinearPlan plan(int64_t rows, int threads) const noexcept;
    // `task` of a plan for the rows from row0 on, which w multiplies.
    void run(const PackedWeight& w, int64_t row0, const LinearTask& task) const noexcept;
  };
  Product product(Id matrix, const Rows& x, const Epilogue& ep, uint8_t* work) const noexcept;
  void attend(const AttentionOp& op, const AttentionUnit& unit) noexcept;
  void merge(const AttentionOp& op, const MergeUnit& unit) noexcept;
  // Tokens [t0, t0 + rows) of a chunk that has `num_open` open rows before them. These are in
  // `slot`, which also takes the state once the chunk is full; `before` holds the last closed
  // state, or is -1 at the beginning of a sequence. `last`: the sequence's last ones in this step.
  struct ChunkRows {
    int64_t t0, rows, num_open, slot, before;
    bool last;
    bool closes() const { return num_open + rows == kStateChunk; }
  };
  template <class Op, class Run>
  void each_unit(const Op& op, const Run& run) noexcept;
  // The closed state before a chunk.
  template <class Op>
  const float* closed_of(const Op& op, int64_t unit, const ChunkRows& r) const noexcept {
    return r.before < 0 ? e.states_.empty() : e.states_.closed(op.state, unit, r.before);
  }
  // A thread usually goes on with the next unit of the sequence: the kernel fetches its state.
  template <class Op>
  const float* next_of(const Op& op, int64_t unit, const ChunkRows& r) const noexcept {
    const bool goes_on = r.before >= 0 && r.last && unit + 1 < op.layer().units;
    return goes_on ? e.states_.closed(op.state, unit + 1, r.before) : nullptr;
  }
  void delta_rows(const GatedDeltaOp& op, int64_t unit, int64_t t0, int64_t rows, int64_t num_open,
                  int64_t slot, int64_t before, const float* next) noexcept;
  void conv_rows(const ShortConvOp& op, int64_t unit, const ChunkRows& r) noexcept;
  void mamba2_rows(const Mamba2Op& op, int64_t unit, const ChunkRows& r) noexcept;
  void gather_logit_rows(const LogitsOp& op, int64_t first, int64_t count) noexcept;
  // Prepares rows [first, first + count) for sampling, with a barrier after each pass.
  void prepare_logits(const LogitsOp& op, int64_t first, int64_t count) noexcept;
  // To sample row `row` of `rows` that run at once, the step's logit row `number`.
  SampleArgs sample_args(int64_t number, int64_t row, int64_t rows) const noexcept;
  void sample_rows(int64_t first, int64_t row, int64_t count) noexcept;
  // Whether so few rows are sampled that threads share the passes over each.
  bool share_rows(int64_t count) const noexcept;
  void copy_logits(int64_t number, int64_t row) noexcept;
  void sample_row(int64_t number, int64_t row, int64_t rows) noexcept;
};

// Calls run(unit, rows of a chunk) for the tokens of every sequence and every unit of this rank.
// Threads share the pairs of both; one thread computes the chunks of a pair in their order.
template <class Op, class Run>
void Executor::Worker::each_unit(const Op& op, const Run& run) noexcept {
  const StepInput& in = e.input_;
  const Range own = e.team_->ranks().share(op.layer().units, crew.rank);
  drain(crew, in.seqs * own.size(), 1, [&](int64_t i, int64_t) {
    const int64_t seq = i / own.size(), unit = own.begin + i % own.size();
    const int64_t t0 = in.query_start[seq], end = in.query_start[seq + 1];
    for (int64_t t = t0; t < end;) {
      const int64_t p = in.positions[t], base = p / kStateChunk * kStateChunk;
      const int64_t rows = std::min(end - t, base + kStateChunk - p);
      const int64_t slot = e.state_slots_[static_cast<size_t>(t)];
      const int64_t before = t > t0 ? e.state_slots_[static_cast<size_t>(t - 1)]
                                    : e.state_before_[static_cast<size_t>(seq)];
      run(unit, ChunkRows{t, rows, p - base, slot, before, t + rows == end});
      t += rows;
    }
  });
}

}  // namespace cpuserve
