// Reads values of the program as fp32. Executor::tap copies the inputs of one operation before it
// runs, and its output afterwards. Executor::read_hidden copies rows that the last step has left.
#include <algorithm>

#include "base/check.h"
#include "runtime/executor.h"

namespace cpuserve {
namespace {

// The values that an operation reads, and the value that it writes.
// If the operation adds to its output value, this value is also among `inputs`.
struct Ends {
  std::vector<Id> inputs;
  Id output = kNone;
};

Ends ends_of(const Op& op, const Program& program) {
  const Accesses all = accesses_of(op, program);
  Ends out;
  for (const Access& a : all.reads) {
    if (a.id >= 0) out.inputs.push_back(a.id);
  }
  if (!all.writes.empty() && all.writes.front().id >= 0) out.output = all.writes.front().id;
  if (const auto* hidden = std::get_if<HiddenOp>(&op)) out.output = hidden->x;
  return out;
}

// Returns the value that the logits of the program are computed from, or the one that is kept
// instead of it; kNone if the program has no logits.
Id hidden_value(const Program& program) {
  const auto* logits = std::get_if<LogitsOp>(&program.ops().back());
  if (!logits) return kNone;
  return logits->kept == kNone ? logits->x : logits->kept;
}

}  // namespace

int64_t Executor::kept_width() const {
  const Id id = hidden_value(program());
  return id == kNone ? 0 : step_.values[static_cast<size_t>(id)].width;
}

void Executor::read_hidden(Span<const int32_t> rows, float* to) const {
  const Id id = hidden_value(program());
  check_argument(id != kNone, "read_hidden: the program has no logits");
  const Rows& from = step_.values[static_cast<size_t>(id)];
  const auto tokens =
      step_.parting ? static_cast<int64_t>(step_.part_rows.size()) : step_.input.tokens;
  for (const int32_t token : rows) {
    check_argument(token >= 0 && token < tokens, "read_hidden: the last step has ", tokens,
                   " tokens, and no row ", token);
    const int32_t row = step_.parting ? step_.part_rows[static_cast<size_t>(token)] : token;
    check_argument(row >= 0, "read_hidden: the sequence of row ", token, " is parked");
    read_row(from, row, to);
    to += from.width;
  }
}

TapMatrix Executor::read_rows(const Rows& rows, int64_t count) const {
  TapMatrix out{count, rows.width, std::vector<float>(static_cast<size_t>(count * rows.width))};
  for (int64_t r = 0; r < count; r++) {
    read_row(rows, r, out.data.data() + r * rows.width);
  }
  return out;
}

Tap Executor::tap(Span<const int32_t> words, int64_t op) {
  const auto ops = walk_.num_ops();
  check_argument(op >= 0 && op < ops, "there is no op ", op, "; the number of ops is ", ops);
  // A caller that taps all operations in order runs each of them only once.
  const bool same = std::equal(words.begin(), words.end(), tap_words_.begin(), tap_words_.end());
  const bool goes_on = same && tap_next_ >= 0 && op >= tap_next_;
  const int64_t begin = goes_on ? tap_next_ : 0;
  if (goes_on) {
    step_.input = accept(words);  // the words may have moved in memory
  } else {
    begin_step(accept(words));
    tap_words_.assign(words.begin(), words.end());
  }
  tap_next_ = -1;
  step_.input.row_draft =
      nullptr;  // rows are sampled independently, and sampler states do not change
  const Ends ends = ends_of(program().ops()[static_cast<size_t>(op)], program());
  const auto read = [&](Id id) {
    const auto at = static_cast<size_t>(id);
    return read_rows(step_.values[at], program().values()[at].rows(step_.input.tokens));
  };
  if (!walk_.run(begin, op)) fail_system("the step was cancelled");
  Tap out;
  for (Id id : ends.inputs) out.inputs.push_back(read(id));
  if (ends.output == kNone) {
    const auto size = static_cast<size_t>(step_.input.rows * step_.logits.width);
    out.output = {step_.input.rows, step_.logits.width, std::vector<float>(size)};
    step_.logits_copy = out.output.data.data();
  }
  const bool finished = walk_.run(op, op + 1);
  step_.logits_copy = nullptr;
  if (!finished) fail_system("the step was cancelled");
  if (ends.output != kNone) out.output = read(ends.output);
  tap_next_ = op + 1;
  return out;
}

}  // namespace cpuserve
