#include "runtime/step_input.h"

#include "base/check.h"
#include "kernels/table.h"

namespace cpuserve {
namespace {

constexpr int64_t kHeader = 8;

class Reader {
 public:
  explicit Reader(Span<const int32_t> words) : at_(words.data()), left_(words.size()) {}
  const int32_t* take(int64_t count) {
    check_argument(count <= left_, "the words of the step are too short: ", count - left_,
                   " are missing");
    const int32_t* p = at_;
    at_ += count;
    left_ -= count;
    return p;
  }
  int64_t left() const { return left_; }

 private:
  const int32_t* at_;
  int64_t left_;
};

void check_range(const char* what, int64_t index, int64_t value, int64_t low, int64_t high) {
  check_argument(value >= low && value < high, what, "[", index, "] = ", value, " is not in [", low,
                 ", ", high, ")");
}

void check_offsets(const char* what, const int32_t* start, int64_t n, int64_t total) {
  check_argument(start[0] == 0 && start[n] == total, what, " does not run from 0 to ", total);
  for (int64_t i = 0; i < n; i++) {
    check_argument(start[i] < start[i + 1], what, "[", i, "] is not below the next entry");
  }
}

void check_sequence(const StepInput& in, const StepLimits& limits, int64_t s) {
  const int64_t first = in.query_start[s], queries = in.query_start[s + 1] - first;
  const int64_t keys = in.kv_len[s], blocks = in.table_start[s + 1] - in.table_start[s];
  check_range("kv_len", s, keys, queries, limits.max_positions + 1);
  check_argument(blocks * kBlock >= keys, "sequence ", s, " has ", blocks, " blocks for ", keys,
                 " keys");
  for (int64_t i = 0; i < queries; i++) {
    const int64_t t = first + i;
    check_argument(in.positions[t] == keys - queries + i, "positions[", t, "] = ", in.positions[t],
                   ", but sequence ", s, " is at ", keys - queries + i);
    check_range("token_ids", t, in.token_ids[t], 0, limits.embed_rows);
  }
  for (int64_t b = in.table_start[s]; b < in.table_start[s + 1]; b++) {
    check_range("block_tables", b, in.block_tables[b], 0, limits.num_blocks);
  }
}

void check_row(const StepInput& in, const StepLimits& limits, int64_t r) {
  check_range("row_token", r, in.row_token[r], 0, in.tokens);
  check_range("row_slot", r, in.row_slot[r], 0, limits.num_slots);
  check_range("row_target", r, in.row_target[r], -1, limits.vocab);
  check_range("row_top", r, in.row_top[r], -1, limits.max_top + 1);
}

}  // namespace

StepInput parse_step(Span<const int32_t> words, const StepLimits& limits) {
  Reader reader(words);
  const int32_t* header = reader.take(kHeader);
  StepInput in{};
  in.tokens = header[0];
  in.seqs = header[1];
  in.rows = header[2];
  const int64_t blocks = header[3];
  check_argument(in.tokens >= 1 && in.tokens <= limits.max_tokens, "a step must have 1 to ",
                 limits.max_tokens, " tokens, not ", in.tokens);
  check_argument(in.seqs >= 1 && in.seqs <= limits.max_seqs, "a step must have 1 to ",
                 limits.max_seqs, " sequences, not ", in.seqs);
  check_argument(in.rows >= 0 && in.rows <= limits.max_tokens, "a step must have 0 to ",
                 limits.max_tokens, " logit rows, not ", in.rows);
  check_argument(in.rows == 0 || limits.vocab > 0,
                 "the step has logit rows, but this program has no logits op");
  check_argument(blocks >= 0, "a step cannot have ", blocks, " blocks");

  in.token_ids = reader.take(in.tokens);
  in.positions = reader.take(in.tokens);
  in.query_start = reader.take(in.seqs + 1);
  in.kv_len = reader.take(in.seqs);
  in.table_start = reader.take(in.seqs + 1);
  in.block_tables = reader.take(blocks);
  in.row_token = reader.take(in.rows);
  in.row_slot = reader.take(in.rows);
  in.row_target = reader.take(in.rows);
  in.row_top = reader.take(in.rows);
  check_argument(reader.left() == 0, "the words of the step are too long: ", reader.left(),
                 " are left over");

  check_offsets("query_start", in.query_start, in.seqs, in.tokens);
  check_offsets("table_start", in.table_start, in.seqs, blocks);
  for (int64_t s = 0; s < in.seqs; s++) check_sequence(in, limits, s);
  for (int64_t r = 0; r < in.rows; r++) check_row(in, limits, r);
  return in;
}

}  // namespace cpuserve
