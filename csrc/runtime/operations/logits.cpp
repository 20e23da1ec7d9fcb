// The rows that produce results: logits and their sampling, and hidden rows.
#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "runtime/worker.h"

namespace cpuserve {
namespace {

constexpr int64_t kLogitPiece = 8192;  // logits of one claim: 32 KB, a few microseconds

}  // namespace

void Program::logits(const LogitsOp& op) {
  const Matrix& m = matrix(op.matrix);
  check_argument(vocab_ == 0 && hidden_width_ == 0,
                 "a program can have only one logits or hidden op");
  check_argument(!m.glu, "logits: matrix ", m.name, " is packed as glu");
  check_tokens("logits", {op.x});
  check_multiplies(op.x, m);
  check_vector(op.bias, m.n, "logits bias");
  vocab_ = m.n;
  ops_.emplace_back(op);
}

void Program::hidden(Id x) {
  check_argument(vocab_ == 0 && hidden_width_ == 0,
                 "a program can have only one logits or hidden op");
  check_tokens("hidden", {x});
  hidden_width_ = f32_value(x, "hidden x").width;
  ops_.emplace_back(HiddenOp{x});
}

void Executor::Worker::gather_logit_rows(const LogitsOp& op, int64_t first,
                                         int64_t count) noexcept {
  const Rows& x = value(op.x);
  const Range rows = share(count);
  for (int64_t r = rows.begin; r < rows.end; r++) {
    std::memcpy(row_of(e.logit_input_, r), row_of(x, e.input_.row_token[first + r]), x.stride);
  }
}

bool Executor::Worker::share_rows(int64_t count) const noexcept {
  return count < threads && e.logits_.width > kLogitPiece;
}

// All threads scale pieces of every row: for a vocabulary of 256k, one thread alone would take as
// long as for a layer. If some threads have no row to sample, all threads also share the
// passes of sampling over every logit.
void Executor::Worker::prepare_logits(const LogitsOp& op, int64_t first, int64_t count) noexcept {
  const bool scales = op.scale != 1.0f || op.softcap > 0.0f, shares = share_rows(count);
  const int64_t vocab = e.logits_.width, block = sample_block(static_cast<int>(vocab));
  const int64_t piece = (kLogitPiece + block - 1) / block * block;
  const int64_t pieces = (vocab + piece - 1) / piece;
  const auto each_piece = [&](const auto& run) {
    drain(everyone(), count * pieces, 1, [&](int64_t i, int64_t) {
      const int64_t row = i / pieces, begin = i % pieces * piece;
      run(row, begin, std::min(begin + piece, vocab));
    });
    barrier();
  };
  if (scales || shares) {
    each_piece([&](int64_t row, int64_t begin, int64_t end) {
      float* logits = reinterpret_cast<float*>(row_of(e.logits_, row)) + begin;
      if (scales) e.table_->scale_logits({logits, end - begin, op.scale, op.softcap});
      if (shares) {
        e.table_->sample_scan(sample_args(first + row, row, count), static_cast<int32_t>(begin),
                              static_cast<int32_t>(end));
      }
    });
  }
  if (!shares) return;
  each_piece([&](int64_t row, int64_t begin, int64_t end) {
    e.table_->sample_weigh(sample_args(first + row, row, count), static_cast<int32_t>(begin),
                           static_cast<int32_t>(end));
  });
}

// Samples a row and those that verify its drafts, each with the state that its slot has after the
// tokens before it: exactly what steps of one token would sample. Rows after the first draft that
// was not sampled have no token. A run of rows that began in the block before continues
// here; the barriers between the blocks order its results.
void Executor::Worker::sample_rows(int64_t first, int64_t row, int64_t count) noexcept {
  const StepInput& in = e.input_;
  std::vector<int32_t>& tokens = e.results_.tokens;
  if (row > 0 && in.draft(first + row - 1) >= 0) return;  // sampled with the row before it
  for (; row < count; row++) {
    const int64_t r = first + row;
    const auto at = static_cast<size_t>(r);
    const int32_t wanted = r > 0 ? in.draft(r - 1) : -1;
    copy_logits(r, row);
    if (wanted >= 0 && tokens[at - 1] != wanted) {
      tokens[at] = -1;
    } else {
      if (wanted >= 0) e.sampler_.append(in.row_slot[r], wanted);
      sample_row(r, row, count);
    }
    if (in.draft(r) < 0) return;
  }
}

void Executor::Worker::copy_logits(int64_t r, int64_t row) noexcept {
  if (!e.logits_copy_) return;
  std::memcpy(e.logits_copy_ + r * e.logits_.width, row_of(e.logits_, row),
              static_cast<size_t>(e.logits_.width) * sizeof(float));
}

// The passes over a row that threads share meet in the scratch of the thread with its number.
SampleArgs Executor::Worker::sample_args(int64_t number, int64_t row, int64_t rows) const noexcept {
  const StepInput& in = e.input_;
  const auto r = static_cast<size_t>(number);

  SampleArgs args{};
  args.logits = reinterpret_cast<float*>(row_of(e.logits_, row));
  args.vocab = static_cast<int32_t>(e.logits_.width);
  args.target = in.row_target[r];
  args.params = args.target < 0 ? &e.sampler_.params(in.row_slot[r]) : nullptr;
  args.position = in.positions[in.row_token[r]] + 1;
  args.num_top = in.row_top[r];
  if (in.row_mask && in.row_mask[r] >= 0) {
    args.mask = in.masks + in.row_mask[r] * mask_words(e.logits_.width);
  }
  args.top_ids = e.results_.top_ids.data() + r * static_cast<size_t>(e.limits_.max_top);
  args.top_logprobs = e.results_.top_logprobs.data() + r * static_cast<size_t>(e.limits_.max_top);
  args.prepared = share_rows(rows);
  args.scratch = args.prepared ? e.scratch_[static_cast<size_t>(row)] : scratch;
  return args;
}

void Executor::Worker::sample_row(int64_t number, int64_t row, int64_t rows) noexcept {
  const auto r = static_cast<size_t>(number);
  SampleArgs args = sample_args(number, row, rows);
  e.table_->sample(args);
  e.results_.tokens[r] = args.token;
  e.results_.logprobs[r] = args.logprob;
  e.results_.ranks[r] = args.rank;
}

void Executor::Worker::operator()(const LogitsOp& op) noexcept {
  for (int64_t first = 0; first < e.input_.rows; first += kLogitRows) {
    const int64_t count = std::min(kLogitRows, e.input_.rows - first);
    gather_logit_rows(op, first, count);
    barrier();
    multiply(op.matrix, e.logit_input_, count,
             {vector(op.bias), Activation::none, false, false, e.logits_});
    barrier();
    prepare_logits(op, first, count);
    // The gather of the next block needs no barrier: it writes rows that no thread reads any more.
    drain(everyone(), count, 1, [&](int64_t row, int64_t) { sample_rows(first, row, count); });
  }
}

void Executor::Worker::operator()(const HiddenOp& op) noexcept {
  const Rows& x = value(op.x);
  const Range mine = share(e.input_.rows);
  for (int64_t r = mine.begin; r < mine.end; r++) {
    std::memcpy(e.results_.vectors.data() + r * x.width, row_of(x, e.input_.row_token[r]),
                static_cast<size_t>(x.width) * sizeof(float));
  }
}

}  // namespace cpuserve
