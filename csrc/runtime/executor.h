// Runs the steps of a Program. A step is one call of Team::run_on_all: every thread runs
// all operations, with a barrier where one needs results of other threads (barrier_plan.h).
// The constructor allocates all memory except block tables, which grow before a step runs.
// The step itself allocates nothing.
#pragma once
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "base/buffer.h"
#include "base/span.h"
#include "kernels/table.h"
#include "parallel/team.h"
#include "runtime/program.h"
#include "runtime/step_context.h"
#include "runtime/step_input.h"
#include "runtime/walk.h"

namespace cpuserve {

// lm_head and sampling process the result rows of a step in batches.
// A batch has `rows_per_seq` rows (1, and 1 for each draft token) for every sequence that a step
// can have, but at least 32 and at most 128, so a decode step reads the lm_head matrix once.
// platforms/memory.py counts the fp32 logits of a batch as memory: 78 MB for 128 rows and a
// vocabulary of 152k.
constexpr int64_t kLeastLogitRows = 32, kMostLogitRows = 128;

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
  const WorkSizes& work_sizes() const { return step_.work_sizes; }
  void set_work_sizes(const WorkSizes& sizes) {
    check_work_sizes(sizes);
    step_.work_sizes = sizes;
  }

  Weights& weights() { return step_.weights; }
  Sampler& sampler() { return step_.sampler; }
  Team& team() { return *step_.team; }
  const Program& program() const { return walk_.program; }
  int64_t max_top() const { return step_.limits.max_top; }
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
  size_t kv_block_bytes() const { return step_.kv.block_bytes(); }
  void read_blocks(Span<const int32_t> blocks, int32_t group, uint8_t* to) const;
  void write_blocks(Span<const int32_t> blocks, int32_t group, const uint8_t* from);
  // Copies the recurrent states of a state slot to or from memory, between steps.
  // The tokens of the slot must end at the end of a KV block.
  size_t snapshot_bytes() const { return step_.states.snapshot_bytes(); }
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
    return step_.kv.grow(*step_.team, program().cache_groups() * blocks_of(program().max_tokens()));
  }
  // Returns the number of heap allocations in all steps so far (base/allocations.h):
  // 0, because a step must not allocate.
  int64_t step_allocations() const { return step_allocations_; }
  const StepResults& results() const { return step_.results; }
  StepResults& results() { return step_.results; }
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
  void cancel(bool on) noexcept { step_.cancelled.store(on, std::memory_order_relaxed); }

  // Returns (number of phases of steps and probes so far, items claimed in the last two phases, and
  // experts read so far, because a step may wait for many of them before it goes on).
  // A phase is the work between two barriers. Two equal results mean
  // that no work was claimed between the two calls. Any thread may call this function.
  std::pair<int64_t, int64_t> progress() const noexcept {
    const ExpertPool* pool = step_.weights.pool();
    return {step_.advances.count.load(std::memory_order_relaxed),
            step_.queue.claimed() + step_.slice.claimed() + (pool ? pool->finished() : 0)};
  }

  const MemoryBinding& binding() const { return binding_; }
  // Interleaves the pages of weights and KV cache over the NUMA nodes `nodes`.
  // Must be called before weights are loaded.
  void interleave(const std::vector<int>& nodes);
  MemoryNodes memory_nodes() const;  // reads /proc/self/numa_maps

  void profile(bool on) noexcept { step_.profiling = on; }
  const std::vector<double>& op_seconds() const { return step_.op_seconds; }

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
  static int64_t blocks_of(int64_t tokens) { return (tokens + kBlock - 1) / kBlock; }
  static Buffer make_activations(const Program& program, std::vector<Rows>& values);
  StepInput parse(Span<const int32_t> words, Span<const int32_t> masks = {});
  StepInput accept(Span<const int32_t> words, Span<const int32_t> masks = {});
  void check_kernels(bool own) const;
  void check_block(int32_t block) const;
  void check_group(int32_t group) const;
  void check_slot(int64_t slot) const;
  void bind_memory();
  void plan_attention();
  void carve_work_memory(int64_t rows_per_seq);
  void begin_step(const StepInput& in);
  bool can_pause(int64_t op) const noexcept;
  bool run_slice(int64_t op, int64_t end);
  int64_t run_step(Span<const int32_t> words, Span<const int32_t> masks, float* logits);
  void append_samples();
  TapMatrix read_rows(const Rows& rows, int64_t count) const;

  StepContext step_;
  Walk walk_;
  Buffer activations_;
  MemoryBinding binding_;
  // Scratch of the threads, logits, inputs of lm_head, partial results of attention, media,
  // patches.
  Buffer work_;
  int64_t num_patches_ = 0;         // number of rows that write_patches() has written
  std::vector<int32_t> started_;    // the input of the step that start() began
  int64_t started_next_ = -1;       // the operation that advance() runs next; -1: none
  std::vector<int32_t> tap_words_;  // the input of the step that tap() ran last
  int64_t tap_next_ = -1;  // the operation after the last tapped one, or -1 to start the step again
  int64_t step_allocations_ = 0;
};

}  // namespace cpuserve
