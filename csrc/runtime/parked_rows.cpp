#include "runtime/parked_rows.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include "runtime/rows.h"

namespace cpuserve {
namespace {

size_t bytes_of_row(const Declarations& program) {
  size_t sum = 0;
  for (const Value& v : program.values()) {
    if (ParkedRows::by_token(v)) sum += row_bytes(v.format, v.width);
  }
  return sum;
}

int64_t most_tokens(const Declarations& program) {
  return std::min(program.max_tokens(), ParkedRows::kMostTokens);
}

}  // namespace

ParkedRows::ParkedRows(const Declarations& program)
    : row_bytes_(bytes_of_row(program)),
      memory_(row_bytes_ * static_cast<size_t>(most_tokens(program))),
      free_(static_cast<size_t>(most_tokens(program))) {
  for (size_t v = 0; v < program.values().size(); v++) {
    if (by_token(program.values()[v])) values_.push_back(v);
  }
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
