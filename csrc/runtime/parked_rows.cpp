#include "runtime/parked_rows.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include "runtime/operations/operations.h"
#include "runtime/rows.h"

namespace cpuserve {
namespace {

bool by_token(const Value& v) { return v.copies == 1 && v.fold == 1; }

size_t bytes_of_row(const Program& program) {
  size_t sum = 0;
  for (const Value& v : program.values()) {
    if (by_token(v)) sum += row_bytes(v.format, v.width);
  }
  return sum;
}

int64_t most_tokens(const Program& program) {
  return std::min(program.max_tokens(), ParkedRows::kMostTokens);
}

bool has(const AccessList& list, Id id) {
  return std::any_of(list.begin(), list.end(), [&](const Access& a) { return a.id == id; });
}

}  // namespace

// Routed rows of an earlier mixture would be lost, and recurrent states would be advanced twice by
// a chunk that begins again.
bool ParkedRows::possible(const Program& program) {
  if (!program.states().empty() || program.vocab() == 0) return false;
  std::vector<Accesses> accesses;
  for (const Op& op : program.ops()) accesses.push_back(accesses_of(op, program));
  for (size_t r = 0; r < accesses.size(); r++) {
    if (!std::holds_alternative<RouteOp>(program.ops()[r])) continue;
    for (size_t v = 0; v < program.values().size(); v++) {
      if (by_token(program.values()[v])) continue;
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

size_t ParkedRows::bytes(const Program& program) {
  return possible(program) ? bytes_of_row(program) * static_cast<size_t>(most_tokens(program)) : 0;
}

ParkedRows::ParkedRows(const Program& program)
    : row_bytes_(bytes_of_row(program)), memory_(bytes(program)) {
  for (size_t v = 0; v < program.values().size(); v++) {
    if (by_token(program.values()[v])) values_.push_back(v);
  }
  if (memory_.size() > 0) free_.resize(static_cast<size_t>(most_tokens(program)));
  std::iota(free_.rbegin(), free_.rend(), 0);
}

std::vector<ParkedRows::Sequence> ParkedRows::begin_step(const StepInput& in) {
  std::vector<Sequence> forgotten;
  for (Sequence& p : all_) p.number = -1;
  for (int64_t s = 0; s < in.seqs && !all_.empty(); s++) {
    const auto found = std::find_if(all_.begin(), all_.end(),
                                    [&](const Sequence& p) { return p.slot == in.seq_slot[s]; });
    if (found == all_.end()) continue;
    const int64_t first = in.query_start[s], tokens = in.query_start[s + 1] - first;
    const auto count = static_cast<int64_t>(found->token_ids.size());
    if (count == tokens && in.positions[first] == found->position &&
        std::equal(found->token_ids.begin(), found->token_ids.end(), in.token_ids + first)) {
      found->number = s;
    } else {
      forgotten.push_back(forget(static_cast<size_t>(found - all_.begin())));
    }
  }
  return forgotten;
}

bool ParkedRows::any() const noexcept {
  return std::any_of(all_.begin(), all_.end(), [](const Sequence& p) { return p.number >= 0; });
}

bool ParkedRows::any_at(int64_t op) const noexcept {
  return std::any_of(all_.begin(), all_.end(),
                     [&](const Sequence& p) { return p.number >= 0 && p.op == op; });
}

void ParkedRows::copy(const Sequence& sequence, Span<const Rows> values, int64_t first,
                      bool save) noexcept {
  for (size_t t = 0; t < sequence.rows.size(); t++) {
    uint8_t* kept = memory_.data() + static_cast<size_t>(sequence.rows[t]) * row_bytes_;
    for (const size_t v : values_) {
      const Rows& rows = values[static_cast<int64_t>(v)];
      uint8_t* row = row_of(rows, first + static_cast<int64_t>(t));
      save ? std::memcpy(kept, row, rows.stride) : std::memcpy(row, kept, rows.stride);
      kept += rows.stride;
    }
  }
}

void ParkedRows::save(Sequence sequence, Span<const Rows> values, int64_t first) {
  for (size_t t = 0; t < sequence.token_ids.size(); t++) {
    sequence.rows.push_back(free_.back());
    free_.pop_back();
  }
  copy(sequence, values, first, true);
  all_.push_back(std::move(sequence));
}

ParkedRows::Sequence ParkedRows::restore(size_t at, Span<const Rows> values, int64_t first) {
  copy(all_[at], values, first, false);
  return forget(at);
}

ParkedRows::Sequence ParkedRows::forget(size_t at) {
  Sequence gone = std::move(all_[at]);
  all_.erase(all_.begin() + static_cast<int64_t>(at));
  free_.insert(free_.end(), gone.rows.begin(), gone.rows.end());
  return gone;
}

}  // namespace cpuserve
