// Runs the steps of a Program. A step is one call of Team::run_on_all: every thread runs
// all operations, with a barrier where one needs results of other threads (barrier_plan.h).
// The constructor allocates all memory except block tables, which grow before a step runs.
// The step itself allocates nothing.
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
#include "runtime/parked_rows.h"
#include "runtime/program.h"
#include "runtime/routing.h"
#include "runtime/sampler.h"
#include "runtime/state_cache.h"
#include "runtime/step_input.h"
#include "runtime/weights.h"
#include "runtime/work_sizes.h"

namespace cpuserve {

// lm_head and sampling process the result rows of a step in batches.
// A batch has `rows_per_seq` rows (1, and 1 for each draft token) for every sequence that a step
// can have, but at least 32 and at most 128, so a decode step reads the lm_head matrix once.
// platforms/memory.py counts the fp32 logits of a batch as memory: 78 MB for 128 rows and a
// vocabulary of 152k.
constexpr int64_t kLeastLogitRows = 32, kMostLogitRows = 128;

// The results of a step, one entry for each result row. tokens, ranks and logprobs
// are [max_tokens], and top_ids and top_logprobs are [max_tokens, max_top].
// A program with HiddenOp has only vectors [max_tokens / fold, hidden_width].
struct StepResults {
  std::vector<int32_t> tokens, ranks, top_ids;
  std::vector<float> logprobs, top_logprobs, vectors;
};

// A value of the program as fp32 [rows, width].
// Executor::tap copies the inputs and the output of an operation to such matrices.
struct TapMatrix {
  int64_t rows, width;
  std::vector<float> data;
};
struct Tap {
  std::vector<TapMatrix> inputs;
  TapMatrix output;
};

// How weights and KV cache are placed on NUMA nodes. The values of `mode` are
//   "bind"         each rank has its memory on the NUMA node of its threads
//   "first_touch"  binding is not possible, and `error` says why:
//                  the system refuses it, or the threads of a rank are not pinned to one node
//   "interleave"   pages alternate between nodes, if this was requested
//   "none"         there is one rank
struct MemoryBinding {
  std::string mode, error;
  std::vector<int> nodes;  // by rank: its NUMA node, or -1 if its threads are on several nodes
};

// For each rank: the bytes of its weights and of its KV cache on each NUMA node (node -> bytes).
// Only pages that are in memory count.
struct MemoryNodes {
  std::vector<std::map<int, int64_t>> weights, kv;
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

class Executor;

// KV layers of another executor, which an executor reads and never writes: its layer i is
// layer `layers[i]` of `owner`. Only one of the two may run a step at a time.
struct SharedKv {
  const Executor* owner = nullptr;  // nullptr: the executor has KV layers of its own
  std::vector<Id> layers;
};

class Executor {
 public:
  Executor(Team& team, const Program& program, int64_t num_blocks, KvType kv_type,
           int64_t num_slots, int64_t max_top, int64_t num_states = 0, PackedFile packed = {},
           int64_t num_media = 0, int64_t rows_per_seq = 1, const SharedKv& shared = {});

  // The block sizes of the kernels. The caller may set them only between steps.
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
  // Deletes the sampler state and the block tables of a request slot, after its request has ended.
  void release(int64_t slot);

  // Runs one step and returns the number of its result rows. results() returns the results
  // until the next step. `words` is the input of the step (step_input.h). `masks` is the memory
  // of the bitmasks of the step, which must not change meanwhile. After a row
  // that rejects its draft token, the rows of the following draft tokens get no token (-1).
  // If an index is out of range, throws std::invalid_argument before anything runs or changes.
  // Throws std::runtime_error if the step was cancelled: the step may then have written keys
  // and values of its tokens, and request slots with draft tokens have to be admitted again.
  int64_t step(Span<const int32_t> words, Span<const int32_t> masks = {});
  // Runs a step like step(), and copies the unmodified logits [rows, vocab] to `logits`,
  // which the caller has allocated.
  int64_t step_logits(Span<const int32_t> words, float* logits);
  // start() begins a step with result rows only of HiddenOp, and advance() runs its operations,
  // until `seconds` have passed or operation `last` is next (-1: the step is complete); it returns
  // whether it is there. A call may end inside of an operation, after a few tasks or rows (Slice).
  // Other executors of the team may run steps between these calls.
  // The same tokens may be divided into other sequences before operation `first`: start() then
  // goes on with the values that the operations before it have computed.
  // start() throws like step(). advance() throws std::invalid_argument if no step has been started
  // since the last complete one, or `last` is no later operation, and std::runtime_error if the
  // step was cancelled.
  void start(Span<const int32_t> words, int64_t first = 0);
  bool advance(double seconds, int64_t last = -1);
  // Writes the patches of the next steps: `rows` are whole rows of Program::patch_width() bytes.
  // Throws std::invalid_argument if they are not, or are more than a step can have tokens.
  void write_patches(Span<const uint8_t> rows);
  // Copies rows `rows` of the value that the logits are computed from (or of LogitsOp::kept), as
  // fp32 [rows, width], to `to`: the hidden states of these tokens of the last step. Call it before
  // anything else runs.
  // Throws std::invalid_argument if the last step has no such row.
  void read_hidden(Span<const int32_t> rows, float* to) const;
  int64_t kept_width() const;  // columns of these rows; 0 = the program has no logits
  int64_t count_rows(Span<const int32_t> words) { return parse(words).rows; }
  // Runs the operations up to and including number `op`; returns the inputs and the output of `op`.
  // If the previous call tapped an earlier operation of this step, it continues after that one.
  // Nothing is sampled, but keys and values are stored in the cache.
  Tap tap(Span<const int32_t> words, int64_t op);
  // Copies KV blocks of a cache group to or from memory, between steps (KvCache::read_block).
  // Throws std::invalid_argument for a block or a group that does not exist.
  size_t kv_block_bytes() const { return kv_.block_bytes(); }
  void read_blocks(Span<const int32_t> blocks, int32_t group, uint8_t* to) const;
  void write_blocks(Span<const int32_t> blocks, int32_t group, const uint8_t* from);
  // Copies the recurrent states of a state slot to or from memory, between steps.
  // The tokens of the slot must end at the end of a KV block.
  size_t snapshot_bytes() const { return states_.snapshot_bytes(); }
  void read_snapshot(int64_t slot, uint8_t* to) const;
  void write_snapshot(int64_t slot, const uint8_t* from);
  // Overwrites rows of the media buffer from row `first` on, between steps. Tokens with such rows
  // (StepInput::media_rows) have them instead of the rows of their ids.
  // Throws std::invalid_argument unless `rows` are whole rows of the buffer.
  void write_media(int64_t first, Span<const float> rows);
  // Allocates memory for some of the KV blocks that the next step could use, between steps.
  // Returns false when all of these blocks have memory. A call takes 0.1 ms (7 ms in a VM
  // if its host must first find free memory).
  bool grow_kv() {
    return kv_.grow(*team_, program_->cache_groups() * blocks_of(program_->max_tokens()));
  }
  // Returns the number of heap allocations in all steps so far (base/allocations.h):
  // 0, because a step must not allocate.
  int64_t step_allocations() const { return step_allocations_; }
  const StepResults& results() const { return results_; }
  StepResults& results() { return results_; }
  // Returns the sequences of the last step, by number, that needed an expert which could not be
  // read. Their results and their keys, values and states have no meaning; Weights::pool() has
  // the reason.
  std::vector<int32_t> failed_sequences() const;

  // Returns the sequences of the last step, by number, that have no results yet, because experts
  // are being read that they need: other sequences did not wait for these reads. Such a sequence
  // goes on in a later step that has the same tokens of its request slot.
  std::vector<int32_t> parked_sequences() const;

  // Cancels the running step, or the next step if none runs. Any thread may call this function.
  // The step ends within milliseconds, when each thread has finished the tasks that it has claimed.
  // cancel(false) between steps revokes the request.
  void cancel(bool on) noexcept { cancelled_.store(on, std::memory_order_relaxed); }

  // Returns (number of phases of steps and probes so far, items claimed in the last two phases, and
  // experts read so far, because a step may wait for many of them before it goes on).
  // A phase is the work between two barriers. Two equal results mean
  // that no work was claimed between the two calls. Any thread may call this function.
  std::pair<int64_t, int64_t> progress() const noexcept {
    const ExpertPool* pool = weights_.pool();
    return {advances_.count.load(std::memory_order_relaxed),
            queue_.claimed() + slice_.claimed() + (pool ? pool->finished() : 0)};
  }

  const MemoryBinding& binding() const { return binding_; }
  // Interleaves the pages of weights and KV cache over the NUMA nodes `nodes`.
  // Must be called before weights are loaded.
  void interleave(const std::vector<int>& nodes);
  MemoryNodes memory_nodes() const;  // reads /proc/self/numa_maps

  void profile(bool on) noexcept { profiling_ = on; }
  const std::vector<double>& op_seconds() const { return op_seconds_; }

  double probe_bandwidth(double seconds);      // bytes per second of reading the packed weights
  double probe_dot(int kind, double seconds);  // operations/s of all threads; kind is a DotKind
  double probe_barrier(int64_t rounds);        // seconds per barrier
  // Returns the seconds that `count` linears of the program, from number `first` on, take
  // with `rows` rows of activations. After the last linear it continues with the first one.
  // The rows have arbitrary contents, and the call overwrites the values of the program.
  double probe_linears(int64_t rows, int64_t first, int64_t count);
  int64_t num_linears() const;
  std::map<std::string, int64_t> memory() const;  // bytes of memory for each use, such as weights

 private:
  friend struct Worker;     // does the work of one thread in a step (worker.h)
  friend struct StepParts;  // the parts of a step without the sequences that are parked (parts.cpp)

  static int64_t blocks_of(int64_t tokens) { return (tokens + kBlock - 1) / kBlock; }
  static Routing make_routing(const Program& program);
  static Buffer make_activations(const Program& program, std::vector<Rows>& values);
  StepInput parse(Span<const int32_t> words, Span<const int32_t> masks = {});
  StepInput accept(Span<const int32_t> words, Span<const int32_t> masks = {});
  void check_kernels(bool own) const;
  void check_block(int32_t block) const;
  void check_group(int32_t group) const;
  void check_slot(int64_t slot) const;
  const uint8_t* patch(int64_t row) const noexcept {
    return patches_ + row * program_->patch_width();
  }
  float* media_row(int64_t row) noexcept { return media_ + row * program_->media_width(); }
  // The tables of a rope in Program::axial_ropes() for the step: a row for each token.
  struct Turns {
    float *cos, *sin;
  };
  void turn();
  void bind_memory();
  void plan_attention();
  void carve_work_memory(int64_t rows_per_seq);
  void begin_step(const StepInput& in);
  void set_input(const StepInput& in);
  bool can_part(const StepInput& in) const noexcept;
  bool pauses(int64_t op) const noexcept;
  void release_parked(const ParkedRows::Sequence& sequence);
  void find_state_slots();
  void find_ends() noexcept;
  const int32_t* table(int64_t seq, int64_t group) const noexcept {
    return tables_.table(input_.seq_slot[seq], group).data();
  }
  bool run_ops(int64_t first, int64_t last);
  bool can_pause(int64_t op) const noexcept;
  bool run_slice(int64_t op, int64_t end);
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
  std::vector<int> plan_of_op_;  // by operation: the index of its plan in plans_; -1: no attention
  const BarrierPlan barriers_;

  // Scratch of the threads, logits, inputs of lm_head, partial results of attention, media,
  // patches.
  Buffer work_;
  std::vector<uint8_t*> scratch_;
  int64_t logit_rows_ = 0;  // number of rows of logit_input_ and logits_
  Rows logit_input_{}, logits_{};
  uint8_t* patches_ = nullptr;        // [max_tokens, Program::patch_width]
  int64_t num_patches_ = 0;           // number of rows that write_patches() has written
  float* media_ = nullptr;            // the media buffer: [limits_.media, Program::media_width]
  std::vector<Turns> turns_;          // of each rope in Program::axial_ropes()
  int32_t* token_numbers_ = nullptr;  // 0, 1, 2 ...: the rows of the tables in turns_
  float* partials_ = nullptr;
  float* index_scores_ = nullptr;
  int64_t index_floats_ = 0;  // number of floats of index_scores_
  WorkQueue queue_;
  int queue_threads_ = 0;  // number of threads that claimed tasks in the last call of the team
  int64_t phase_ = 0;

  StepInput input_{};
  std::vector<int32_t> slots_;  // KV slot of each token: [groups][max_tokens]
  std::vector<int32_t> ends_;   // StepInput::ends; empty if no layer attends in both directions
  // For recurrent layers: state_slots_ has the state slot for the block of each token.
  // state_before_ has for each sequence the slot of the last closed state before the first token
  // of the step (-1: there is none).
  std::vector<int64_t> state_slots_, state_before_;
  // By token of the step: whether an expert of the token could not be read. Empty without a pool.
  std::unique_ptr<std::atomic<bool>[]> failed_tokens_;
  const std::vector<bool> guess_ops_;   // by operation: whether it is only for guesses of experts
  bool guessing_ = false;               // whether the step runs them
  std::unique_ptr<ParkedRows> parked_;  // null: a step waits for the experts of all its sequences
  // The present step, if sequences of it may be parked (parts.cpp). `part_` has the numbers of the
  // sequences that go on, in the order of their rows, and `part_rows_` the row of each token.
  bool parting_ = false;
  int64_t paused_op_ = -1;   // the RouteOp where threads have stopped; -1: they have not
  int64_t decided_op_ = -1;  // the RouteOp where they do not stop again
  std::vector<int32_t> part_, part_rows_, part_words_, part_failed_;
  Routing routing_;                 // set by the last RouteOp or AdapterOp that ran
  Slice slice_;                     // the part of an operation that advance() runs now
  std::vector<int32_t> started_;    // the input of the step that start() began
  int64_t started_next_ = -1;       // the operation that advance() runs next; -1: none
  std::vector<int32_t> tap_words_;  // the input of the step that tap() ran last
  int64_t tap_next_ = -1;  // the operation after the last tapped one, or -1 to start the step again
  float* logits_copy_ = nullptr;
  StepResults results_;

  // The number of phases so far. Only thread 0 writes it, at every barrier. It has a cache line
  // of its own, so that these writes do not slow down reads of other variables.
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
