#include "runtime/parts.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "runtime/rows.h"
#include "runtime/walk.h"

namespace cpuserve {
namespace {

// A sequence at the RouteOp where the step has stopped.
struct Stopped {
  int32_t number = 0;  // in the whole step
  int64_t row = -1;    // its first row in the step; -1: it is parked
  int missing = 0;
  bool held = false, goes_on = false;
  std::vector<int32_t> experts;
};

int64_t first_token(const StepInput& in, int32_t s) { return in.query_start[s]; }
int64_t tokens_of(const StepInput& in, int32_t s) {
  return int64_t{in.query_start[s + 1]} - in.query_start[s];
}

// Calls visit(row of the whole step, token of it) for each result row of sequence s.
template <class Visit>
void each_result(const StepInput& in, int32_t s, const Visit& visit) {
  for (int64_t r = 0; r < in.rows; r++) {
    const int64_t token = in.row_token[r];
    if (token >= in.query_start[s] && token < in.query_start[s + 1]) visit(r, token);
  }
}

// Returns the step with only the sequences `part`, in this order. Its arrays are in `words`.
// It has no new entries of block tables, because the whole step has entered them.
StepInput part_of(const StepInput& whole, const std::vector<int32_t>& part,
                  std::vector<int32_t>& words) {
  StepInput out = whole;
  out.seqs = static_cast<int64_t>(part.size());
  out.tokens = out.rows = 0;
  for (const int32_t s : part) {
    out.tokens += tokens_of(whole, s);
    each_result(whole, s, [&](int64_t, int64_t) { out.rows++; });
  }
  words.assign(static_cast<size_t>(2 * out.tokens + 3 * out.seqs + 1 + 6 * out.rows), 0);
  int32_t* next = words.data();
  const auto take = [&](int64_t count) { return std::exchange(next, next + count); };
  int32_t *ids = take(out.tokens), *positions = take(out.tokens);
  int32_t *start = take(out.seqs + 1), *keys = take(out.seqs), *slots = take(out.seqs);
  int32_t *row_token = take(out.rows), *row_slot = take(out.rows), *row_target = take(out.rows);
  int32_t *row_top = take(out.rows), *row_draft = take(out.rows), *row_mask = take(out.rows);
  int32_t token = 0;
  int64_t row = 0;
  for (size_t i = 0; i < part.size(); i++) {
    const int32_t s = part[i];
    const int64_t first = first_token(whole, s), count = tokens_of(whole, s);
    std::copy_n(whole.token_ids + first, count, ids + token);
    std::copy_n(whole.positions + first, count, positions + token);
    start[i] = token;
    keys[i] = whole.kv_len[s];
    slots[i] = whole.seq_slot[s];
    each_result(whole, s, [&](int64_t r, int64_t at) {
      row_token[row] = token + static_cast<int32_t>(at - first);
      row_slot[row] = whole.row_slot[r];
      row_target[row] = whole.row_target[r];
      row_top[row] = whole.row_top[r];
      row_draft[row] = whole.draft(r);
      row_mask[row++] = whole.row_mask ? whole.row_mask[r] : -1;
    });
    token += static_cast<int32_t>(count);
  }
  start[part.size()] = token;
  out.token_ids = ids;
  out.positions = positions;
  out.query_start = start;
  out.kv_len = keys;
  out.seq_slot = slots;
  out.table_first = out.table_start = out.table_entries = nullptr;
  out.row_token = row_token;
  out.row_slot = row_slot;
  out.row_target = row_target;
  out.row_top = row_top;
  out.row_draft = whole.row_draft ? row_draft : nullptr;
  out.row_mask = whole.row_mask ? row_mask : nullptr;
  return out;
}

bool has(const AccessList& list, Id id) {
  return std::any_of(list.begin(), list.end(), [&](const Access& a) { return a.id == id; });
}

}  // namespace

struct StepParts {
  Walk& walk;
  StepContext& e;
  const StepInput whole;
  ParkedRows& parked;
  ExpertPool& pool;
  std::vector<ParkedRows::Sequence> going;  // their units are held until they have been used
  std::vector<int32_t> next_words;

  bool run() {
    std::vector<int32_t> fresh;
    for (int32_t s = 0; s < whole.seqs; s++) {
      const auto is_parked = [&](const ParkedRows::Sequence& p) { return p.number == s; };
      if (std::none_of(parked.all().begin(), parked.all().end(), is_parked)) fresh.push_back(s);
    }
    int64_t op = 0;
    e.part.clear();
    if (fresh.empty()) {
      op = first_ready();
      if (op < 0 || !decide(op)) return false;
    } else {
      set_part(std::move(fresh), true);
    }
    while (!e.part.empty()) {
      const bool finished = walk.run(op, walk.num_ops());
      op = std::exchange(e.paused_op, -1);
      release_going();
      if (!finished) return false;
      if (op < 0) break;
      if (!decide(op)) return false;
    }
    return true;
  }

  // Returns the first operation with a parked sequence that can go on, when there is one; -1 if
  // the step was cancelled.
  int64_t first_ready() {
    while (!cancelled()) {
      const int64_t finished = pool.finished();
      int64_t first = -1;
      for (const ParkedRows::Sequence& p : parked.all()) {
        const bool earlier = p.number >= 0 && (first < 0 || p.op < first);
        if (earlier && pool.ready(static_cast<size_t>(p.op), p.experts)) first = p.op;
      }
      if (first >= 0) return first;
      pool.wait_read(finished, e.team->members());
    }
    return -1;
  }

  bool cancelled() {
    if (!e.cancelled.load(std::memory_order_relaxed)) return false;
    e.cancelled.store(false, std::memory_order_relaxed);
    return true;
  }

  // Chooses which sequences go on from RouteOp `op`, parks the others that are in the step, and
  // sets the input. None goes on if all have to wait, and a sequence parked elsewhere has not.
  // Returns false if the step was cancelled.
  bool decide(int64_t op) {
    const auto route = static_cast<size_t>(op);
    std::vector<Stopped> all = candidates(op);
    int64_t room = 0;
    bool urgent = true;       // whether no sequence before has units to read
    for (Stopped& c : all) {  // those with the fewest missing units first: so they are read
      if (c.row < 0) continue;
      const bool there = pool.ready(route, c.experts);
      const int64_t tokens = there ? 0 : tokens_of(whole, c.number);
      c.held = parked.has_room(room + tokens) && pool.hold(route, c.experts, !there && urgent);
      urgent = urgent && there;
      room += c.held ? tokens : 0;
      // A sequence that cannot be parked waits in the step, as all do in an executor without parts.
      c.goes_on = there || !c.held;
    }
    bool any = all.empty();
    while (!any) {
      const int64_t finished = pool.finished();
      for (Stopped& c : all) {
        c.goes_on = c.goes_on || pool.ready(route, c.experts);
        any = any || c.goes_on;
      }
      if (any || another_ready(op)) break;
      pool.wait_read(finished, e.team->members());
      if (!cancelled()) continue;
      for (const Stopped& c : all) {
        if (c.held) pool.release(route, c.experts);
      }
      return false;
    }
    part(op, all);
    e.decided_op = op;
    return true;
  }

  // Whether a sequence that is parked at another operation need not wait any more. It goes on in
  // the next step, if all sequences of this one wait.
  bool another_ready(int64_t op) const {
    return std::any_of(
        parked.all().begin(), parked.all().end(), [&](const ParkedRows::Sequence& p) {
          return p.number >= 0 && p.op != op && pool.ready(static_cast<size_t>(p.op), p.experts);
        });
  }

  // The sequences at RouteOp `op`, in the step or parked, those with fewer missing units first.
  std::vector<Stopped> candidates(int64_t op) {
    std::vector<Stopped> all;
    for (size_t i = 0; i < e.part.size(); i++) {
      Stopped c;
      c.number = e.part[i];
      c.row = e.input.query_start[i];
      if (has_failed(c)) {  // nothing waits for its experts
        e.part_failed.push_back(c.number);
        continue;
      }
      c.experts = experts_of_rows(op, c.row, tokens_of(whole, c.number));
      all.push_back(std::move(c));
    }
    for (const ParkedRows::Sequence& p : parked.all()) {
      if (p.number < 0 || p.op != op) continue;
      Stopped c;
      c.number = static_cast<int32_t>(p.number);
      c.experts = p.experts;
      all.push_back(std::move(c));
    }
    for (Stopped& c : all) c.missing = pool.missing(static_cast<size_t>(op), c.experts);
    std::stable_sort(all.begin(), all.end(),
                     [](const Stopped& a, const Stopped& b) { return a.missing < b.missing; });
    return all;
  }

  // The experts that RouteOp `op` has chosen for these rows, each once.
  std::vector<int32_t> experts_of_rows(int64_t op, int64_t first, int64_t count) const {
    const auto& route = std::get<RouteOp>(walk.program.ops()[static_cast<size_t>(op)]);
    const Rows& out = e.values[static_cast<size_t>(route.out)];
    std::vector<int32_t> found;
    for (int64_t t = first; t < first + count; t++) {
      for (int64_t i = 0; i < route.chosen; i++) {
        const auto expert = static_cast<int32_t>(floats_of(out, t)[i]);
        if (expert >= 0) found.push_back(expert);  // not an identity
      }
    }
    std::sort(found.begin(), found.end());
    found.erase(std::unique(found.begin(), found.end()), found.end());
    return found;
  }

  // Saves the rows of those that stay behind, and brings the others together.
  void part(int64_t op, std::vector<Stopped>& all) {
    std::sort(all.begin(), all.end(), [](const Stopped& a, const Stopped& b) {
      return a.row < b.row;  // those that come from the step in order, so rows only move down
    });
    for (Stopped& c : all) {
      if (c.row >= 0 && !c.goes_on) park(op, c);
    }
    std::vector<int32_t> next;
    int64_t to = 0;
    for (const Stopped& c : all) {
      if (c.row < 0 || !c.goes_on) continue;
      move_rows(c.row, to, tokens_of(whole, c.number));
      to += tokens_of(whole, c.number);
      next.push_back(c.number);
      if (!c.held) continue;
      ParkedRows::Sequence held;
      held.op = op;
      held.experts = c.experts;
      going.push_back(std::move(held));
    }
    for (const Stopped& c : all) {
      if (c.row >= 0 || !c.goes_on) continue;
      size_t at = 0;
      while (parked.all()[at].number != c.number) at++;
      going.push_back(parked.restore(at, e.values, to));
      to += tokens_of(whole, c.number);
      next.push_back(c.number);
    }
    if (next != e.part) set_part(std::move(next));
  }

  void park(int64_t op, Stopped& c) {
    ParkedRows::Sequence p;
    const int64_t first = first_token(whole, c.number);
    p.slot = whole.seq_slot[c.number];
    p.op = op;
    p.position = whole.positions[first];
    p.token_ids.assign(whole.token_ids + first,
                       whole.token_ids + first + tokens_of(whole, c.number));
    p.experts = std::move(c.experts);
    p.number = c.number;
    parked.save(std::move(p), e.values, c.row);
  }

  bool has_failed(const Stopped& c) const {
    for (int64_t t = c.row; t < c.row + tokens_of(whole, c.number); t++) {
      if (e.failed_tokens[static_cast<size_t>(t)].load(std::memory_order_relaxed)) return true;
    }
    return false;
  }

  void move_rows(int64_t from, int64_t to, int64_t count) {
    if (from == to) return;
    for (size_t v = 0; v < e.values.size(); v++) {
      const Value& value = e.program->values()[v];
      if (!ParkedRows::by_token(value)) continue;
      const Rows& rows = e.values[v];
      std::memmove(row_of(rows, to), row_of(rows, from), static_cast<size_t>(count) * rows.stride);
    }
  }

  // Lets the step go on with the sequences `next`. Their rows follow one another in this order.
  void set_part(std::vector<int32_t> next, bool at_start = false) {
    if (next.empty()) e.input.tokens = e.input.seqs = e.input.rows = 0;
    const StepInput in = part_of(whole, next, next_words);
    e.part_words.swap(next_words);  // the arrays of `in` keep their addresses
    e.part = std::move(next);
    e.part_rows.assign(static_cast<size_t>(whole.tokens), -1);
    int32_t row = 0;
    for (const int32_t s : e.part) {
      for (int64_t t = whole.query_start[s]; t < whole.query_start[s + 1]; t++) {
        e.part_rows[static_cast<size_t>(t)] = row++;
      }
    }
    const bool begun = at_start && static_cast<int64_t>(e.part.size()) == whole.seqs;
    if (!e.part.empty() && !begun) e.set_input(in);  // otherwise the step has all of them
  }

  static bool run(Walk& walk, const StepInput& whole) {
    StepContext& e = walk.step;
    StepParts parts{walk, e, whole, *e.parked, *e.weights.pool(), {}, {}};
    for (const ParkedRows::Sequence& p : parts.parked.begin_step(whole)) e.release_parked(p);
    e.paused_op = e.decided_op = -1;
    e.parting = !parts.shares_new_blocks();
    if (e.parting) return parts.run();
    forget(e, [](const ParkedRows::Sequence& p) { return p.number >= 0; });
    return walk.run(0, walk.num_ops());
  }

  // Forgets the parked sequences for which gone(sequence) is true. They begin again.
  template <class Gone>
  static void forget(StepContext& e, const Gone& gone) {
    for (size_t i = 0; i < e.parked->all().size();) {
      if (gone(e.parked->all()[i])) {
        e.release_parked(e.parked->forget(i));
      } else {
        i++;
      }
    }
  }

  // Whether a sequence reads keys that another one stores in this step: a prompt with a prefix
  // that the other one computes. They must then be at the same layer. Only whole blocks are shared:
  // the other one fills a block, and the prompt goes on at the begin of the next block.
  bool shares_new_blocks() const {
    std::vector<std::pair<int32_t, int32_t>> filled;  // (block, sequence)
    const auto each_block = [&](int32_t s, int64_t first, int64_t end, const auto& visit) {
      for (int32_t g = 0; g < e.program->cache_groups(); g++) {
        const int32_t* table = e.table(s, g);
        for (int64_t b = first; b < end; b++) visit(table[b]);
      }
    };
    const auto first_of = [&](int32_t s) {
      return int64_t{whole.positions[first_token(whole, s)]};
    };
    for (int32_t s = 0; s < whole.seqs; s++) {
      each_block(s, first_of(s) / kBlock, whole.kv_len[s] / kBlock,
                 [&](int32_t block) { filled.emplace_back(block, s); });
    }
    if (filled.empty()) return false;
    std::sort(filled.begin(), filled.end());
    bool shares = false;
    for (int32_t s = 0; s < whole.seqs; s++) {
      if (first_of(s) % kBlock != 0) continue;
      each_block(s, 0, first_of(s) / kBlock, [&](int32_t block) {
        const auto at = std::lower_bound(filled.begin(), filled.end(), std::pair{block, 0});
        shares = shares || (at != filled.end() && at->first == block);
      });
    }
    return shares;
  }

  static void order_results(StepContext& e, const StepInput& whole) {
    std::vector<int32_t> order;  // by row of the part: its row of the whole step
    for (const int32_t s : e.part) {
      each_result(whole, s, [&](int64_t r, int64_t) { order.push_back(static_cast<int32_t>(r)); });
    }
    if (static_cast<int64_t>(order.size()) == whole.rows &&
        std::is_sorted(order.begin(), order.end())) {
      return;
    }
    StepResults& out = e.results;
    const auto put = [&](auto& values, int64_t width) {
      const auto part = values;
      for (size_t i = 0; i < order.size(); i++) {
        std::copy_n(part.data() + static_cast<int64_t>(i) * width, width,
                    values.data() + order[i] * width);
      }
    };
    put(out.ranks, 1);
    put(out.logprobs, 1);
    put(out.top_ids, e.limits.max_top);
    put(out.top_logprobs, e.limits.max_top);
    const std::vector<int32_t> tokens = out.tokens;
    std::fill_n(out.tokens.begin(), whole.rows, -1);
    for (size_t i = 0; i < order.size(); i++) {
      out.tokens[static_cast<size_t>(order[i])] = tokens[i];
    }
  }

  void release_going() {
    for (const ParkedRows::Sequence& p : going) e.release_parked(p);
    going.clear();
  }
};

// Routed rows of an earlier mixture would be lost, and recurrent states would be advanced twice by
// a chunk that begins again.
bool can_park(const Program& program) {
  if (!program.states().empty() || program.vocab() == 0) return false;
  std::vector<Accesses> accesses;
  for (const Op& op : program.ops()) accesses.push_back(accesses_of(op, program));
  for (size_t r = 0; r < accesses.size(); r++) {
    if (!std::holds_alternative<RouteOp>(program.ops()[r])) continue;
    for (size_t v = 0; v < program.values().size(); v++) {
      if (ParkedRows::by_token(program.values()[v])) continue;
      const Id id = static_cast<Id>(v);
      size_t i = r + 1;
      while (i < accesses.size() && !has(accesses[i].reads, id) && !has(accesses[i].writes, id)) {
        i++;
      }
      if (i < accesses.size() && has(accesses[i].reads, id)) return false;
    }
  }
  return true;
}

bool run_parts(Walk& walk, const StepInput& whole) { return StepParts::run(walk, whole); }

void order_results(StepContext& step, const StepInput& whole) {
  StepParts::order_results(step, whole);
}

bool can_part(const StepContext& step, const StepInput& in) noexcept {
  return step.parked && !in.adapters && !in.media_rows && !in.angles &&
         (in.seqs > 1 || !step.parked->all().empty());
}

void forget_parked(StepContext& step, int64_t slot) {
  if (!step.parked) return;
  StepParts::forget(step, [&](const ParkedRows::Sequence& p) { return p.slot == slot; });
}

std::vector<int32_t> parked_sequences(const StepContext& step) {
  std::vector<int32_t> out;
  for (size_t i = 0; step.parting && i < step.parked->all().size(); i++) {
    const int64_t number = step.parked->all()[i].number;
    if (number >= 0) out.push_back(static_cast<int32_t>(number));
  }
  std::sort(out.begin(), out.end());
  return out;
}

}  // namespace cpuserve
