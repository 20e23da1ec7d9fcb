// The two operations that write the results of a step: LogitsOp computes logits and samples
// from them, HiddenOp copies rows of the hidden states (the vectors of an embedding model).
#include "runtime/operations/logits.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "base/check.h"
#include "runtime/worker.h"

namespace cpuserve {
namespace {

constexpr int64_t kLogitPiece = 8192;  // logits that a thread claims: 32 KB, a few microseconds

void gather_logit_rows(const LogitsOp& op, int64_t first, int64_t count, Worker& w) noexcept {
  const Rows& x = w.value(op.x);
  const Range rows = w.share(count);
  for (int64_t r = rows.begin; r < rows.end; r++) {
    std::memcpy(row_of(w.logit_input(), r), row_of(x, w.input().row_token[first + r]), x.stride);
  }
}

// The logit rows [first, first + count) of a step, which are sampled together.
struct Batch {
  int64_t first, count;
  // shares: several threads process the logits of one row, because there are fewer rows
  // than threads. cuts: these threads also share the search for the cut of top_p.
  bool shares = false, cuts = false;
};

// Returns the ids to report logprobs of for row `number`, instead of its most likely ids; or null.
const std::vector<int32_t>* scored_ids(int64_t number, Worker& w) noexcept {
  const StepInput& in = w.input();
  const auto r = static_cast<size_t>(number);
  if (in.row_target[r] >= 0 || in.row_top[r] <= 0) return nullptr;
  const std::vector<int32_t>& ids = w.sampler().scored(in.row_slot[r]);
  return ids.empty() ? nullptr : &ids;
}

// Returns the arguments to sample row `row` of the batch.
// If threads share the logits of a row, all of them use the scratch of thread `row` for it.
SampleArgs sample_args(const Batch& batch, int64_t row, Worker& w) noexcept {
  const StepInput& in = w.input();
  const int64_t number = batch.first + row;
  const auto r = static_cast<size_t>(number);

  SampleArgs args{};
  args.logits = reinterpret_cast<float*>(row_of(w.logits(), row));
  args.vocab = static_cast<int32_t>(w.logits().width);
  args.target = in.row_target[r];
  args.params = args.target < 0 ? &w.sampler().params(in.row_slot[r]) : nullptr;
  args.position = in.positions[in.row_token[r]] + 1;
  args.num_top = in.row_top[r];
  if (args.num_top > 0 && scored_ids(number, w)) args.num_top = 0;  // sample_row reports these ids
  if (in.row_mask && in.row_mask[r] >= 0) {
    args.mask = in.masks + in.row_mask[r] * mask_words(w.logits().width);
  }
  args.top_ids = w.results().top_ids.data() + r * static_cast<size_t>(w.max_top());
  args.top_logprobs = w.results().top_logprobs.data() + r * static_cast<size_t>(w.max_top());
  args.prepared = batch.shares;
  args.cut = batch.cuts;
  args.scratch = args.prepared ? w.scratch_of(row) : w.scratch;
  return args;
}

// Sets batch.shares and batch.cuts: how the threads share the work on the rows of the batch.
// All threads must get the same result, so they call this function between two barriers.
// No thread may sample meanwhile, because sampling changes the parameters of the rows.
void choose_shares(Batch& batch, Worker& w) noexcept {
  batch.shares = batch.count < w.threads && w.logits().width > kLogitPiece;
  for (int64_t row = 0; batch.shares && !batch.cuts && row < batch.count; row++) {
    batch.cuts = shares_cut(sample_args(batch, row, w));
  }
}

// Prepares rows for sampling, in passes over the logits with a barrier after each pass.
// All threads scale pieces of every row: with a vocabulary of 256k, one thread would need
// as long for a row as all threads need for a layer. If there are fewer rows than threads,
// all threads also share the passes of sampling that read every logit.
void prepare_logits(const LogitsOp& op, const Batch& batch, Worker& w) noexcept {
  const bool scales = op.scale != 1.0f || op.softcap > 0.0f;
  const int64_t vocab = w.logits().width, block = sample_block(static_cast<int>(vocab));
  const int64_t piece = (kLogitPiece + block - 1) / block * block;
  const int64_t pieces = (vocab + piece - 1) / piece;
  const auto each_piece = [&](const auto& run) {
    w.drain(w.everyone(), batch.count * pieces, 1, [&](int64_t i, int64_t) {
      const int64_t row = i / pieces, begin = i % pieces * piece;
      run(row, static_cast<int32_t>(begin), static_cast<int32_t>(std::min(begin + piece, vocab)));
    });
    w.barrier();
  };
  const auto each_row = [&](const auto& run) {
    w.drain(w.everyone(), batch.count, 1,
            [&](int64_t row, int64_t) { run(sample_args(batch, row, w)); });
    w.barrier();
  };
  const auto share = [&](const auto& pass) {
    each_piece([&](int64_t row, int32_t begin, int32_t end) {
      pass(sample_args(batch, row, w), begin, end);
    });
  };
  if (scales || batch.shares) {
    each_piece([&](int64_t row, int32_t begin, int32_t end) {
      float* logits = reinterpret_cast<float*>(row_of(w.logits(), row)) + begin;
      if (scales) w.kernels().scale_logits({logits, end - begin, op.scale, op.softcap});
      if (batch.shares) w.kernels().sample_scan(sample_args(batch, row, w), begin, end);
    });
  }
  if (!batch.shares) return;
  share(w.kernels().sample_weigh);
  if (!batch.cuts) return;
  each_row(w.kernels().sample_guess);
  share(w.kernels().sample_tally);
  each_row(w.kernels().sample_cut);
  share(w.kernels().sample_drop);
}

void copy_logits(int64_t r, int64_t row, Worker& w) noexcept {
  if (!w.logits_copy()) return;
  std::memcpy(w.logits_copy() + r * w.logits().width, row_of(w.logits(), row),
              static_cast<size_t>(w.logits().width) * sizeof(float));
}

// Samples a row. If the request has ids to score (scored_ids), their logits are saved
// in top_logprobs before the row is sampled, because bans change the logits.
// Afterwards each saved logit becomes a logprob: the function subtracts the logarithm of the sum
// of exp(logit), which is the sampled token's logit minus its logprob.
void sample_row(const Batch& batch, int64_t row, Worker& w) noexcept {
  const int64_t number = batch.first + row;
  const auto r = static_cast<size_t>(number);
  SampleArgs args = sample_args(batch, row, w);
  const std::vector<int32_t>* ids = scored_ids(number, w);
  const int32_t count = ids ? w.input().row_top[r] : 0;
  for (int32_t i = 0; i < count; i++) {
    const bool named = i < static_cast<int32_t>(ids->size());
    args.top_ids[i] = named ? (*ids)[static_cast<size_t>(i)] : -1;
    args.top_logprobs[i] = named ? args.logits[args.top_ids[i]] : -INFINITY;
  }
  SamplerChain* chain = args.params ? w.sampler().chain(w.input().row_slot[r]) : nullptr;
  if (chain) {
    args.target = w.sampler().sample(w.input().row_slot[r], args.logits, args.mask, args.position);
    args.params = nullptr;  // null: the kernel only computes the logprob of the token
  }
  w.kernels().sample(args);
  if (chain && chain->reports() && args.num_top >= 0 && args.token >= 0) {
    args.logprob = chain->report(args.token, args.num_top, args.top_ids, args.top_logprobs);
  }
  const bool sampled = args.token >= 0;
  const double sum = sampled && count > 0 ? static_cast<double>(args.logits[args.token]) -
                                                static_cast<double>(args.logprob)
                                          : NAN;
  for (int32_t i = 0; i < count; i++) {
    args.top_logprobs[i] = static_cast<float>(static_cast<double>(args.top_logprobs[i]) - sum);
    if (!sampled) args.top_ids[i] = -1;
  }
  w.results().tokens[r] = args.token;
  w.results().logprobs[r] = args.logprob;
  w.results().ranks[r] = args.rank;
}

// Samples a row and the following rows that verify the draft tokens of its sequence.
// Each row is sampled with the sampler state after the tokens before it,
// so the tokens are the same as in steps of one token. After the first draft token
// that is not sampled, the other rows get no token. A run of rows that began in the previous batch
// continues here; the barriers between batches make the results of that batch visible.
void sample_rows(const Batch& batch, int64_t row, Worker& w) noexcept {
  const StepInput& in = w.input();
  std::vector<int32_t>& tokens = w.results().tokens;
  if (row > 0 && in.draft(batch.first + row - 1) >= 0) return;  // sampled by an earlier row's call
  for (; row < batch.count; row++) {
    const int64_t r = batch.first + row;
    const auto at = static_cast<size_t>(r);
    const int32_t wanted = r > 0 ? in.draft(r - 1) : -1;
    copy_logits(r, row, w);
    if (wanted >= 0 && tokens[at - 1] != wanted) {
      tokens[at] = -1;
    } else {
      if (wanted >= 0) w.sampler().append(in.row_slot[r], wanted);
      sample_row(batch, row, w);
    }
    if (in.draft(r) < 0) return;
  }
}

}  // namespace

void prepare(const LogitsOp& op, Declarations& p) {
  const Matrix& m = p.matrix(op.matrix);
  check_argument(p.limits().vocab == 0 && p.limits().hidden_width == 0,
                 "a program can have only one logits or hidden op");
  check_argument(!m.glu, "logits: matrix ", m.name, " is packed as glu");
  p.check_tokens("logits", {op.x});
  if (op.kept != kNone) p.check_tokens("logits kept", {op.kept});
  p.check_multiplies(op.x, m);
  p.check_vector(op.bias, m.n, "logits bias");
  p.limits().vocab = m.n;
}

void run(const LogitsOp& op, Worker& w) noexcept {
  for (int64_t first = 0; first < w.input().rows; first += w.logit_rows()) {
    Batch batch{first, std::min(w.logit_rows(), w.input().rows - first)};
    gather_logit_rows(op, first, batch.count, w);
    w.barrier();
    w.multiply(op.matrix, w.logit_input(), batch.count,
               {w.vector(op.bias), Activation::none, false, false, w.logits()});
    choose_shares(batch, w);
    w.barrier();
    prepare_logits(op, batch, w);
    // Gathering the rows of the next batch needs no barrier before it:
    // it writes to logit_input_, which no thread reads any more.
    w.drain(w.everyone(), batch.count, 1,
            [&](int64_t row, int64_t) { sample_rows(batch, row, w); });
  }
}

void prepare(const HiddenOp& op, Declarations& p) {
  check_argument(p.limits().vocab == 0 && p.limits().hidden_width == 0,
                 "a program can have only one logits or hidden op");
  p.check_rows("hidden", {op.x});
  check_argument(p.value(op.x).fold == p.fold(), "hidden: value ", p.value(op.x).name,
                 " has other rows than the last fold");
  p.limits().hidden_width = p.f32_value(op.x, "hidden x").width;
}

void run(const HiddenOp& op, Worker& w) noexcept {
  const Rows& x = w.value(op.x);
  const Range mine = w.share(w.input().rows);
  for (int64_t r = mine.begin; r < mine.end; r++) {
    std::memcpy(w.results().vectors.data() + r * x.width, row_of(x, w.input().row_token[r]),
                static_cast<size_t>(x.width) * sizeof(float));
  }
}

}  // namespace cpuserve
