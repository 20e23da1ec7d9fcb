// What the threads of a step share: the program with its weights, caches and work memory, and the
// input, the progress and the results of the step. Executor owns it; Worker, which does the work
// of one thread, and the operations see only this.
#pragma once
#include <atomic>
#include <memory>
#include <vector>

#include "kernels/table.h"
#include "parallel/partition.h"
#include "parallel/team.h"
#include "runtime/attention_plan.h"
#include "runtime/block_tables.h"
#include "runtime/declarations.h"
#include "runtime/kv_cache.h"
#include "runtime/parked_rows.h"
#include "runtime/routing.h"
#include "runtime/sampler.h"
#include "runtime/state_cache.h"
#include "runtime/step_input.h"
#include "runtime/weights.h"
#include "runtime/work_sizes.h"

namespace cpuserve {

// The results of a step, one entry for each result row. tokens, ranks and logprobs
// are [max_tokens], and top_ids and top_logprobs are [max_tokens, max_top].
// A program with HiddenOp has only vectors [max_tokens / fold, hidden_width].
struct StepResults {
  std::vector<int32_t> tokens, ranks, top_ids;
  std::vector<float> logprobs, top_logprobs, vectors;
};

// The part of an operation that a call of Executor::advance() runs, because other executors wait.
// Tasks of a linear and of attention are claimed until a time, and the following calls claim
// the others: in order, so that the threads that take part may change between the calls.
// An operation on rows (BarrierPlan::row_wise) runs on some of its rows in each call.
struct Slice {
  static constexpr int64_t kRows = 512;  // tokens of a part of an operation on rows

  explicit Slice(int ranks) : next(static_cast<size_t>(ranks)) {}
  void begin_op() noexcept {
    for (std::atomic<int64_t>& n : next) n.store(0, std::memory_order_relaxed);
    part = 0;
  }
  // Returns the number of tasks of the operation that were claimed so far. Any thread may call it.
  int64_t claimed() const noexcept {
    int64_t sum = 0;
    for (const std::atomic<int64_t>& n : next) sum += n.load(std::memory_order_relaxed);
    return sum;
  }

  std::vector<std::atomic<int64_t>> next;  // by rank: its next task in the operation
  int64_t end = 0;                // when threads stop claiming tasks (now_ns); 0: at the last one
  std::atomic<bool> more{false};  // whether there were tasks left at that time
  int part = 0, parts = 1;        // an operation on rows runs on part number `part` of its rows
};

struct RouteOp;
// The router that a GuessOp applies: the next RouteOp, and the linear that computes its logits.
struct NextRouter {
  const RouteOp* route = nullptr;
  size_t op = 0;  // the number of this RouteOp
  Id matrix = kNone, bias = kNone;
  Activation activation{};
};

struct StepContext {
  // The tables of a rope in Program::axial_ropes() for the step: a row for each token.
  struct Turns {
    float *cos, *sin;
  };

  // `owner` has the KV layers `layers`, which this one reads; nullptr: it has its own.
  StepContext(Team& team, const Declarations& program, const StepLimits& limits, KvType kv_type,
              PackedFile packed, const StepContext* owner, const std::vector<Id>& layers);

  const uint8_t* patch(int64_t row) const noexcept {
    return patches + row * program->patch_width();
  }
  float* media_row(int64_t row) const noexcept { return media + row * program->media_width(); }
  const int32_t* table(int64_t seq, int64_t group) const noexcept {
    return tables.table(input.seq_slot[seq], group).data();
  }
  // Finds what the operations need of the sequences that they run on.
  void set_input(const StepInput& in);
  // Whether the step stops after RouteOp `op`, because some of its sequences have to be parked.
  bool pauses(int64_t op) const noexcept;
  void release_parked(const ParkedRows::Sequence& sequence);

  Team* team;
  const Declarations* program;
  const KernelTable* kernels;
  WorkSizes work_sizes;
  Weights weights;
  std::vector<Rows> values;
  KvCache kv;
  StateCache states;
  Sampler sampler;
  StepLimits limits;
  BlockTables tables;
  std::vector<AttentionPlan> plans;
  std::vector<int> plan_of_op;  // by operation: the index of its plan in plans; -1: no attention
  std::vector<NextRouter> next_routers;  // by operation: the router that a GuessOp applies

  std::vector<uint8_t*> scratch;
  int64_t logit_rows = 0;  // number of rows of logit_input and logits
  Rows logit_input{}, logits{};
  uint8_t* patches = nullptr;        // [max_tokens, Program::patch_width]
  float* media = nullptr;            // the media buffer: [limits.media, Program::media_width]
  std::vector<Turns> turns;          // of each rope in Program::axial_ropes()
  int32_t* token_numbers = nullptr;  // 0, 1, 2 ...: the rows of the tables in turns
  float* partials = nullptr;
  float* index_scores = nullptr;
  int64_t index_floats = 0;  // number of floats of index_scores
  WorkQueue queue;
  int queue_threads = 0;  // number of threads that claimed tasks in the last call of the team
  int64_t phase = 0;

  StepInput input{};
  std::vector<int32_t> kv_slots;  // KV slot of each token: [groups][max_tokens]
  std::vector<int32_t> ends;      // StepInput::ends; empty if no layer attends in both directions
  // For recurrent layers: state_slots has the state slot for the block of each token.
  // state_before has for each sequence the slot of the last closed state before the first token
  // of the step (-1: there is none).
  std::vector<int64_t> state_slots, state_before;
  // By token of the step: whether an expert of the token could not be read. Empty without a pool.
  std::unique_ptr<std::atomic<bool>[]> failed_tokens;
  bool guessing = false;               // whether the step runs the operations of guesses
  std::unique_ptr<ParkedRows> parked;  // null: a step waits for the experts of all its sequences
  // The present step, if sequences of it may be parked (parts.cpp). `part` has the numbers of the
  // sequences that go on, in the order of their rows, and `part_rows` the row of each token.
  bool parting = false;
  int64_t paused_op = -1;   // the RouteOp where threads have stopped; -1: they have not
  int64_t decided_op = -1;  // the RouteOp where they do not stop again
  std::vector<int32_t> part, part_rows, part_words, part_failed;
  Routing routing;  // set by the last RouteOp or AdapterOp that ran
  Slice slice;      // the part of an operation that advance() runs now
  float* logits_copy = nullptr;
  StepResults results;

  // The number of phases so far. Only thread 0 writes it, at every barrier. It has a cache line
  // of its own, so that these writes do not slow down reads of other variables.
  struct alignas(64) Advances {
    std::atomic<int64_t> count{0};
    void add() noexcept {
      count.store(count.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
    }
  } advances;

  std::atomic<bool> cancelled{false};
  bool stop[2] = {false, false};
  bool profiling = false;
  std::vector<double> op_seconds;

 private:
  void find_state_slots();
  void find_ends() noexcept;
  void turn();
};

}  // namespace cpuserve
