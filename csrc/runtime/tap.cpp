// Taps one op: reads its inputs before it runs and its output after, as fp32.
#include <algorithm>

#include "base/check.h"
#include "runtime/executor.h"
#include "runtime/worker.h"

namespace cpuserve {
namespace {

// The values that an op reads (including the one it adds to) and the one it writes.
struct Ends {
  std::vector<Id> inputs;
  Id output;
};
struct EndsOf {
  Ends operator()(const EmbedOp& o) { return {{}, o.out}; }
  Ends operator()(const PositionEmbedOp& o) { return {{o.x}, o.x}; }
  Ends operator()(const NormOp& o) { return {{o.x}, o.out}; }
  Ends operator()(const PartNormOp& o) { return {{o.x}, o.x}; }
  Ends operator()(const ConvertOp& o) { return {{o.x}, o.out}; }
  Ends operator()(const LinearOp& o) {
    return {o.add ? std::vector<Id>{o.x, o.out} : std::vector<Id>{o.x}, o.out};
  }
  Ends operator()(const RouteOp& o) { return {{o.x}, o.out}; }
  Ends operator()(const AdapterOp& o) { return {{}, o.out}; }
  Ends operator()(const SpreadOp& o) { return {{o.x, o.routing}, o.out}; }
  Ends operator()(const ExpertLinearOp& o) { return {{o.x, o.routing}, o.out}; }
  Ends operator()(const CombineOp& o) {
    return {o.add ? std::vector<Id>{o.x, o.routing, o.out} : std::vector<Id>{o.x, o.routing},
            o.out};
  }
  Ends operator()(const RopeStoreOp& o) { return {{o.qkv}, o.q}; }
  Ends operator()(const HeadLinearOp& o) { return {{o.x}, o.out}; }
  Ends operator()(const LatentStoreOp& o) { return {{o.q, o.latent, o.kv}, o.out}; }
  Ends operator()(const AttentionOp& o) { return {{o.q}, o.out}; }
  Ends operator()(const SplitGatesOp& o) { return {{o.x}, o.out}; }
  Ends operator()(const GateOp& o) { return {{o.x, o.out}, o.out}; }
  Ends operator()(const GatedNormOp& o) { return {{o.x, o.z}, o.out}; }
  Ends operator()(const GatedDeltaOp& o) { return {{o.x, o.gates}, o.out}; }
  Ends operator()(const ShortConvOp& o) { return {{o.x}, o.out}; }
  Ends operator()(const Mamba2Op& o) { return {{o.x, o.steps}, o.out}; }
  Ends operator()(const AddOp& o) { return {{o.x, o.out}, o.out}; }
  Ends operator()(const ScaleOp& o) { return {{o.x}, o.x}; }
  Ends operator()(const ColumnsOp& o) {
    return {o.more == kNone ? std::vector<Id>{o.x} : std::vector<Id>{o.x, o.more}, o.out};
  }
  Ends operator()(const MixPartsOp& o) {
    return {
        o.target == kNone ? std::vector<Id>{o.gates, o.x} : std::vector<Id>{o.gates, o.target, o.x},
        o.x};
  }
  Ends operator()(const MatchRmsOp& o) { return {{o.like, o.x}, o.x}; }
  Ends operator()(const KeepTopOp& o) { return {{o.x}, o.x}; }
  Ends operator()(const ActivationOp& o) { return {{o.x}, o.out}; }
  Ends operator()(const LogitsOp& o) { return {{o.x}, kNone}; }
  Ends operator()(const HiddenOp& o) { return {{o.x}, o.x}; }
};

}  // namespace

TapMatrix Executor::read_rows(const Rows& rows, int64_t count) const {
  TapMatrix out{count, rows.width, std::vector<float>(static_cast<size_t>(count * rows.width))};
  for (int64_t r = 0; r < count; r++) {
    read_row(rows, r, out.data.data() + r * rows.width);
  }
  return out;
}

Tap Executor::tap(Span<const int32_t> words, int64_t op) {
  const auto ops = static_cast<int64_t>(program_->ops().size());
  check_argument(op >= 0 && op < ops, "there is no op ", op, "; the number of ops is ", ops);
  // A caller that taps every op in order runs each op once.
  const bool same = std::equal(words.begin(), words.end(), tap_words_.begin(), tap_words_.end());
  const bool goes_on = same && tap_next_ >= 0 && op >= tap_next_;
  const int64_t begin = goes_on ? tap_next_ : 0;
  if (goes_on) {
    input_ = accept(words);  // the same, but maybe elsewhere in memory
  } else {
    begin_step(accept(words));
    tap_words_.assign(words.begin(), words.end());
  }
  tap_next_ = -1;
  input_.row_draft = nullptr;  // every row is sampled alone, and the state of its slot stays
  const Ends ends = std::visit(EndsOf{}, program_->ops()[static_cast<size_t>(op)]);
  const auto read = [&](Id id) {
    const auto at = static_cast<size_t>(id);
    return read_rows(values_[at], input_.tokens * program_->values()[at].copies);
  };
  if (!run_ops(begin, op)) fail_system("the step was cancelled");
  Tap out;
  for (Id id : ends.inputs) out.inputs.push_back(read(id));
  if (ends.output == kNone) {
    const auto size = static_cast<size_t>(input_.rows * logits_.width);
    out.output = {input_.rows, logits_.width, std::vector<float>(size)};
    logits_copy_ = out.output.data.data();
  }
  const bool finished = run_ops(op, op + 1);
  logits_copy_ = nullptr;
  if (!finished) fail_system("the step was cancelled");
  if (ends.output != kNone) out.output = read(ends.output);
  tap_next_ = op + 1;
  return out;
}

}  // namespace cpuserve
