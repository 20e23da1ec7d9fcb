// The state units of recurrent layers, which threads claim, and the chunks of their tokens.
#pragma once
#include <algorithm>

#include "runtime/worker.h"

namespace cpuserve {

constexpr size_t kCarved = 6 * 64;  // most bytes that a Carver adds to align up to six arrays

// Tokens [t0, t0 + rows) of the step, which belong to one chunk of 16 tokens of a sequence.
//   num_open  the number of open rows of the chunk from earlier steps
//   slot      the state slot of the rows of the chunk,
//             which gets the closed state when the chunk is full
//   before    the state slot of the last closed state, or -1 at the beginning of a sequence
//   last      whether these are the last tokens of the sequence in this step
struct ChunkRows {
  int64_t t0, rows, num_open, slot, before;
  bool last;
  bool closes() const { return num_open + rows == kStateChunk; }
};

// Calls run(unit, ChunkRows) for all chunks of every sequence and every state unit of this rank.
// Threads claim pairs of a sequence and a unit; one thread computes the chunks of a pair in order.
template <class Recurrent, class Run>
void each_unit(const Recurrent& op, Worker& w, const Run& run) noexcept {
  const StepInput& in = w.input();
  const Range own = w.ranks().share(op.layer().units, w.peers.rank);
  w.drain(w.peers, in.seqs * own.size(), 1, [&](int64_t i, int64_t) {
    const int64_t seq = i / own.size(), unit = own.begin + i % own.size();
    const int64_t t0 = in.query_start[seq], end = in.query_start[seq + 1];
    for (int64_t t = t0; t < end;) {
      const int64_t p = in.positions[t], base = p / kStateChunk * kStateChunk;
      const int64_t rows = std::min(end - t, base + kStateChunk - p);
      const int64_t before = t > t0 ? w.state_slot(t - 1) : w.state_before(seq);
      run(unit, ChunkRows{t, rows, p - base, w.state_slot(t), before, t + rows == end});
      t += rows;
    }
  });
}

// Returns the closed state of a state unit before a chunk.
template <class Recurrent>
const float* closed_of(const Recurrent& op, int64_t unit, const ChunkRows& r, Worker& w) noexcept {
  return r.before < 0 ? w.states().empty() : w.states().closed(op.state, unit, r.before);
}

// Sets the state of a state unit, and the rows of a chunk, in the arguments of a kernel.
template <class Args, class Recurrent>
void set_chunk(Args& args, const Recurrent& op, int64_t unit, const ChunkRows& r,
               Worker& w) noexcept {
  args.closed = closed_of(op, unit, r, w);
  args.closed_to = w.states().closed(op.state, unit, r.slot);
  args.open = w.states().open(op.state, unit, r.slot);
  args.num_open = r.num_open;
  args.rows = r.rows;
}

// Returns the closed state of the next state unit of the sequence, or nullptr.
// The kernel prefetches it, because the same thread usually computes the next unit next.
template <class Recurrent>
const float* next_of(const Recurrent& op, int64_t unit, const ChunkRows& r, Worker& w) noexcept {
  const bool goes_on = r.before >= 0 && r.last && unit + 1 < op.layer().units;
  return goes_on ? w.states().closed(op.state, unit + 1, r.before) : nullptr;
}

}  // namespace cpuserve
