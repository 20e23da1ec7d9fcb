#include "runtime/worker.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

namespace cpuserve {
namespace {

// Claims of a decode linear: 128 KB of weights are 5-10 us of one core's share of memory, long
// against an atomic (20-100 ns) and short against the 40 us and more a late thread is late.
constexpr size_t kClaimBytes = 128 << 10;
constexpr int64_t kFewRows = 16;  // up to here a linear is one pass over the weights
// Fewer strips a thread than these, and half strips even out what threads have to read: of 9
// strips two threads would get 5 and 4. Half a strip is a whole group of quantized output.
constexpr int64_t kManyStrips = 8, kGrainPanels = kStripPanels / 2;
constexpr int64_t kBlockRows = 512;  // rows that share a strip's weights in L2
constexpr int64_t kLeastBlockRows = 120, kBlockStep = 24;  // 24: whole tiles of 4, 6, 8 and 12 rows
constexpr int64_t kTasksPerThread = 8;

// Rows per task, so that every thread gets several tasks to even out, and short blocks only where
// there are few strips.
int64_t block_rows(int64_t m, int64_t strips, int threads) noexcept {
  const int64_t wanted = (kTasksPerThread * threads + strips - 1) / strips;
  const int64_t blocks = std::max((m + kBlockRows - 1) / kBlockRows, wanted);
  const int64_t rows = (m + blocks - 1) / blocks, whole = round_up(rows, kBlockStep);
  // Beyond kBlockRows the kernel would split what is left of a block off, and 1024 rows would be
  // 528 and 496.
  return std::max(whole <= kBlockRows ? whole : rows, std::min(m, kLeastBlockRows));
}

}  // namespace

// Only thread 0 looks at the cancel flag, and says so before a barrier in one of two places by
// turns: when it writes one again, the others have read it, because they are past the barrier
// since.
bool Executor::Worker::walk(int64_t first, int64_t last) noexcept {
  const bool timing = e.profiling_ && thread == 0;
  int64_t before = timing ? now_ns() : 0;
  e.queue_.enter(thread, phase);
  for (int64_t i = first; i < last; i++) {
    op = static_cast<size_t>(i);
    std::visit(*this, e.program_->ops()[op]);
    bool& stop = e.stop_[i & 1];
    if (thread == 0) stop = e.cancelled_.load(std::memory_order_relaxed);
    barrier();
    if (timing) {
      const int64_t now = now_ns();
      e.op_seconds_[op] += 1e-9 * static_cast<double>(now - std::exchange(before, now));
    }
    if (stop) return false;
  }
  return true;
}

void Executor::Worker::operator()(const EmbedOp& op) noexcept {
  const Rows& out = value(op.out);
  const LinearKernel& kernel = e.table_->linear[static_cast<int>(matrix(op.matrix).kind)];
  const Range rows = share(tokens());
  for (int64_t t = rows.begin; t < rows.end; t++) {
    float* x = reinterpret_cast<float*>(row_of(out, t));
    const int32_t token = e.input_.token_ids[t];
    kernel.row(e.weights_.with_row(op.matrix, token), token, x);
    if (op.scale != 1.0f) {
      for (int64_t i = 0; i < out.width; i++) x[i] *= op.scale;
    }
  }
}

void Executor::Worker::operator()(const PositionEmbedOp& op) noexcept {
  const Rows& x = value(op.x);
  const Range rows = share(tokens());
  for (int64_t t = rows.begin; t < rows.end; t++) {
    float* to = reinterpret_cast<float*>(row_of(x, t));
    const float* from = vector(op.table) + (e.input_.positions[t] + op.offset) * x.width;
    for (int64_t i = 0; i < x.width; i++) to[i] += from[i];
  }
}

void Executor::Worker::operator()(const NormOp& op) noexcept {
  const Range rows = share(tokens());
  if (rows.size() == 0) return;
  const NormArgs args{
      value(op.x), value(op.out), vector(op.weight), vector(op.bias),
      op.eps,      rows.begin,    rows.end,          reinterpret_cast<float*>(scratch)};
  op.centered ? e.table_->layer_norm(args) : e.table_->rms_norm(args);
}

void Executor::Worker::operator()(const ConvertOp& op) noexcept {
  const Range rows = share(tokens());
  if (rows.size() > 0) e.table_->convert({value(op.x), value(op.out), rows.begin, rows.end});
}

void Executor::Worker::operator()(const AddOp& op) noexcept {
  const Range rows = share(tokens());
  if (rows.size() > 0) e.table_->add({value(op.x), value(op.out), rows.begin, rows.end});
}

void Executor::Worker::operator()(const ActivationOp& op) noexcept {
  const Range rows = share(tokens());
  if (rows.size() == 0) return;
  e.table_->activation({value(op.x), value(op.out), op.activation, op.glu, rows.begin, rows.end,
                        reinterpret_cast<float*>(scratch)});
}

void Executor::Worker::multiply(Id id, const Rows& x, int64_t m, const Epilogue& ep) noexcept {
  const PackedWeight& w = e.weights_.matrix(id, crew.rank);
  const auto run = e.table_->linear[static_cast<int>(w.kind)].run;
  const int64_t panels = matrix(id).panels();
  const Range own = e.team_->ranks().share(matrix(id).strips(), crew.rank);
  const int64_t strips = own.size();
  if (strips == 0) return;
  const int32_t parts = x.format == ActFormat::q8g32x2 ? 2 : 1;
  LinearArgs args{&w, x.data, x.stride, m, 0, 0, ep, scratch, parts};
  if (m <= kFewRows) {
    const Range all = panels_of(own, panels);
    const int64_t item = ep.glu || strips >= kManyStrips * crew.size ? kStripPanels : kGrainPanels;
    const size_t item_bytes = w.panel_bytes * static_cast<size_t>(item);
    const auto chunk = static_cast<int64_t>(std::max<size_t>(1, kClaimBytes / item_bytes));
    drain(crew, (all.size() + item - 1) / item, chunk, [&](int64_t begin, int64_t end) {
      args.panel0 = all.begin + begin * item;
      args.panel1 = std::min(all.begin + end * item, all.end);
      run(args);
    });
    return;
  }
  const int64_t height = block_rows(m, strips, crew.size), blocks = (m + height - 1) / height;
  drain(crew, blocks * strips, 1, [&](int64_t task, int64_t) {
    const int64_t row0 = task / strips * height, strip = own.begin + task % strips;
    const Range p = panels_of({strip, strip + 1}, panels);
    args.x = row_of(x, row0);
    args.ep.out.data = row_of(ep.out, row0);
    args.m = std::min(height, m - row0);
    args.panel0 = p.begin;
    args.panel1 = p.end;
    run(args);
  });
}

void Executor::Worker::operator()(const LinearOp& op) noexcept {
  const Matrix& m = matrix(op.matrix);
  Rows out = value(op.out);
  out.data = static_cast<uint8_t*>(out.data) + static_cast<size_t>(op.out_column) * sizeof(float);
  out.width = m.out_width();
  multiply(op.matrix, value(op.x), tokens(), {vector(op.bias), op.activation, m.glu, op.add, out});
}

void Executor::Worker::operator()(const RopeStoreOp& op) noexcept {
  const Range rows = share(tokens());
  if (rows.size() == 0) return;
  RopeStoreArgs args{};
  args.qkv = value(op.qkv);
  args.q = value(op.q);
  args.pieces = e.kv_.heads(op.layer);
  args.kv = args.pieces[0];
  args.q_heads = op.q_heads;
  args.rotary = op.rotary;
  args.cos = vector(op.cos);
  args.sin = vector(op.sin);
  args.q_norm = vector(op.q_norm);
  args.k_norm = vector(op.k_norm);
  args.eps = op.eps;
  args.positions = e.input_.positions;
  args.slots = e.slots_.data();
  args.m0 = rows.begin;
  args.m1 = rows.end;
  e.table_->rope_store(args);
}

void Executor::Worker::attend(const AttentionOp& op, const AttentionUnit& u) noexcept {
  const StepInput& in = e.input_;
  AttentionArgs args{};
  args.q = value(op.q);
  args.kv = e.kv_.heads(op.layer)[u.kv_head];
  args.kv_head = u.kv_head;
  args.heads = u.heads;
  args.group = op.q_heads / args.kv.kv_heads;
  args.row0 = u.row0;
  args.rows = u.rows;
  args.t0 = in.query_start[u.seq];
  args.pos0 = in.positions[args.t0];
  args.block_table = in.block_tables + in.table_start[u.seq];
  args.chunk0 = u.chunk0;
  args.chunk1 = u.chunk1;
  args.window = op.window;
  args.scale = op.scale;
  args.softcap = op.softcap;
  args.slopes = vector(op.slopes);
  args.sinks = vector(op.sinks);
  args.out = value(op.out);
  args.partial = u.partial < 0 ? nullptr : e.partials_ + u.partial;
  args.partial_stride = u.partial_stride;
  args.scratch = scratch;
  e.table_->attention(args);
}

void Executor::Worker::merge(const AttentionOp& op, const MergeUnit& u) noexcept {
  const KvLayer& kv = *e.kv_.heads(op.layer);
  AttentionMergeArgs args{};
  args.partial = e.partials_ + u.partial;
  args.rows = u.rows;
  args.chunks = u.chunks;
  args.kv_head = u.kv_head;
  args.group = op.q_heads / kv.kv_heads;
  args.head_dim = kv.head_dim;
  args.hd_pad = kv.hd_pad;
  args.row0 = u.row0;
  args.t0 = e.input_.query_start[u.seq];
  args.sinks = vector(op.sinks);
  args.out = value(op.out);
  args.scratch = scratch;
  e.table_->attention_merge(args);
}

void Executor::Worker::operator()(const AttentionOp& op) noexcept {
  const AttentionPlan& plan = e.plans_[static_cast<size_t>(e.plan_of_op_[this->op])];
  const Range own = plan.units_of(crew.rank);
  const AttentionUnit* units = plan.units().data() + own.begin;
  drain(crew, own.size(), 1, [&](int64_t i, int64_t) { attend(op, units[i]); });
  const auto& merges = plan.merges();
  if (merges.empty()) return;
  barrier();
  drain(everyone(), static_cast<int64_t>(merges.size()), 1,
        [&](int64_t i, int64_t) { merge(op, merges[static_cast<size_t>(i)]); });
}

void Executor::Worker::gather_logit_rows(const LogitsOp& op, int64_t first,
                                         int64_t count) noexcept {
  const Rows& x = value(op.x);
  const Range rows = share(count);
  for (int64_t r = rows.begin; r < rows.end; r++) {
    std::memcpy(row_of(e.logit_input_, r), row_of(x, e.input_.row_token[first + r]), x.stride);
  }
}

void Executor::Worker::scale_logits(const LogitsOp& op, float* logits) noexcept {
  const int64_t vocab = e.logits_.width;
  if (op.scale != 1.0f) {
    for (int64_t i = 0; i < vocab; i++) logits[i] *= op.scale;
  }
  if (op.softcap > 0.0f) {
    for (int64_t i = 0; i < vocab; i++) logits[i] = op.softcap * std::tanh(logits[i] / op.softcap);
  }
}

void Executor::Worker::sample_row(const LogitsOp& op, int64_t first, int64_t row) noexcept {
  const StepInput& in = e.input_;
  const auto r = static_cast<size_t>(first + row);
  const auto vocab = static_cast<size_t>(e.logits_.width);
  float* logits = reinterpret_cast<float*>(row_of(e.logits_, row));
  scale_logits(op, logits);
  if (e.logits_copy_) std::memcpy(e.logits_copy_ + r * vocab, logits, vocab * sizeof(float));

  SampleArgs args{};
  args.logits = logits;
  args.vocab = static_cast<int32_t>(vocab);
  args.target = in.row_target[r];
  args.params = args.target < 0 ? &e.sampler_.params(in.row_slot[r]) : nullptr;
  args.position = in.positions[in.row_token[r]] + 1;
  args.num_top = in.row_top[r];
  args.top_ids = e.results_.top_ids.data() + r * static_cast<size_t>(e.limits_.max_top);
  args.top_logprobs = e.results_.top_logprobs.data() + r * static_cast<size_t>(e.limits_.max_top);
  args.scratch = scratch;
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
    // The next block's gather needs no barrier: it writes rows that nobody reads any more.
    drain(everyone(), count, 1, [&](int64_t row, int64_t) { sample_row(op, first, row); });
  }
}

}  // namespace cpuserve
