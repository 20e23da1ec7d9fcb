#include "runtime/step_context.h"

#include <algorithm>
#include <utility>

namespace cpuserve {

StepContext::StepContext(Team& a_team, const Declarations& a_program, const StepLimits& a_limits,
                         KvType kv_type, PackedFile packed, const StepContext* owner,
                         const std::vector<Id>& layers)
    : team(&a_team),
      program(&a_program),
      kernels(&a_program.table()),
      weights(a_program, a_team.ranks(), std::move(packed)),
      kv(owner ? KvCache(a_program.kv_layers(), owner->kv, layers)
               : KvCache(a_program.kv_layers(), a_limits.num_blocks, kv_type, a_team.ranks())),
      states(a_program.states(), a_limits.states, a_team.ranks()),
      sampler(a_limits.num_slots, a_program.vocab(),
              std::min(a_limits.num_blocks * kBlock, a_program.max_positions())),
      limits(a_limits),
      tables(a_limits.num_slots, a_program.table_groups()),
      queue(a_team.threads()),
      kv_slots(static_cast<size_t>(a_program.max_tokens() * a_program.cache_groups())),
      state_slots(a_program.states().empty() ? 0 : static_cast<size_t>(a_program.max_tokens())),
      state_before(a_program.states().empty() ? 0 : static_cast<size_t>(a_program.max_seqs())),
      routing(a_program.max_tokens() * a_program.most_experts().chosen,
              a_program.most_experts().count),
      slice(a_team.ranks().count()),
      op_seconds(a_program.num_ops()) {}

// Finds the state slot for every token of the step.
// A block without a state slot uses the state slot of the next block that has one.
void StepContext::find_state_slots() {
  if (state_slots.empty()) return;
  const int32_t gone = static_cast<int32_t>(limits.num_blocks - 1);
  for (int64_t s = 0; s < input.seqs; s++) {
    const int32_t* table = this->table(s, program->cache_groups());
    const int64_t first = input.query_start[s], last = input.query_start[s + 1] - 1;
    int64_t at = input.positions[last] / kBlock;
    while (table[at] == gone) at++;
    const auto slot_of = [&](int64_t position) {  // must be called with descending positions
      if (table[position / kBlock] != gone) at = position / kBlock;
      return int64_t{table[at] - gone - 1};
    };
    for (int64_t t = last; t >= first; t--) {
      state_slots[static_cast<size_t>(t)] = slot_of(input.positions[t]);
    }
    const int64_t base = input.positions[first] / kStateChunk * kStateChunk;
    state_before[static_cast<size_t>(s)] = base ? slot_of(base - 1) : -1;
  }
}

// Copies cos and sin of each token and frequency from the tables of the program, from the row that
// is the place of the token on the axis of the frequency.
void StepContext::turn() {
  for (size_t i = 0; input.angles && i < turns.size(); i++) {
    const AxialRope& rope = program->axial_ropes()[i];
    const auto half = static_cast<int64_t>(rope.axes.size());
    const float *cos = weights.vector(rope.cos), *sin = weights.vector(rope.sin);
    for (int64_t t = 0; t < input.tokens; t++) {
      for (int64_t f = 0; f < half; f++) {
        const int64_t from = input.angle(rope.axes[static_cast<size_t>(f)], t) * half + f;
        turns[i].cos[t * half + f] = cos[from];
        turns[i].sin[t * half + f] = sin[from];
      }
    }
  }
}

// Finds what the operations need of the sequences that they run on.
void StepContext::set_input(const StepInput& in) {
  input = in;
  for (int64_t t = 0; failed_tokens && t < in.tokens; t++) {
    failed_tokens[static_cast<size_t>(t)].store(false, std::memory_order_relaxed);
  }
  for (int32_t g = 0; g < program->cache_groups(); g++) {
    int32_t* slots = kv_slots.data() + g * program->max_tokens();
    for (int64_t s = 0; s < in.seqs; s++) {
      const int32_t* table = this->table(s, g);
      for (int64_t t = in.query_start[s]; t < in.query_start[s + 1]; t++) {
        const int32_t p = in.positions[t];
        const int32_t block = table[p / kBlock];
        slots[t] = block * kBlock + p % kBlock;
        kv.want(block);
      }
    }
  }
  kv.use(*team);
  find_state_slots();
  turn();
  find_ends();
  for (AttentionPlan& plan : plans) plan.build(input);
}

// Finds the last key of each token: the last token of its picture, or its own. A step has whole
// runs of neighbouring tokens of pictures, or ends of runs.
void StepContext::find_ends() noexcept {
  if (ends.empty() || !input.media_rows) return;
  for (int64_t s = 0; s < input.seqs; s++) {
    for (int64_t t = input.query_start[s + 1] - 1, last = t; t >= input.query_start[s]; t--) {
      const bool joined = t < last && input.media_row(t) >= 0 && input.media_row(t + 1) >= 0;
      const auto i = static_cast<size_t>(t);
      ends[i] = joined ? ends[i + 1] : input.positions[t] + 1;
    }
  }
  input.ends = ends.data();
}

bool StepContext::pauses(int64_t op) const noexcept {
  if (!parting || op == decided_op) return false;
  const auto route = static_cast<size_t>(op);
  if (parked->any_at(op)) return true;
  const bool others = input.seqs > 1 || parked->any();
  return others && weights.pool()->misses(route, routing);
}

void StepContext::release_parked(const ParkedRows::Sequence& sequence) {
  weights.pool()->release(static_cast<size_t>(sequence.op), sequence.experts);
}

}  // namespace cpuserve
