#include "runtime/worker.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace cpuserve {
namespace {

constexpr int64_t kLogitPiece = 8192;  // logits of one claim: 32 KB, a few microseconds

}  // namespace

// Only thread 0 reads the cancel flag. Before a barrier it copies the flag to one of two
// places, which alternate. When it writes to a place again, the other threads have read it, because
// they have passed the barrier in between.
//
// While ops are timed, each one ends with a barrier.
bool Executor::Worker::walk(int64_t first, int64_t last) noexcept {
  const std::vector<Op>& ops = e.program_->ops();
  const bool timing = e.profiling_;
  int64_t before = timing ? now_ns() : 0, turn = 0;
  bool ran = false;  // an op since the last barrier
  e.queue_.enter(thread, phase);
  // The barrier before op i. Its last thread does ops [i, end).
  const auto meet = [&](int64_t i, int64_t end) {
    bool& stop = e.stop_[turn++ & 1];
    if (thread == 0) stop = e.cancelled_.load(std::memory_order_relaxed);
    barrier([&] { run_alone(i, end); });
    ran = false;
    if (timing && thread == 0) {
      const int64_t now = now_ns();
      e.op_seconds_[op] += 1e-9 * static_cast<double>(now - std::exchange(before, now));
    }
    return !stop;
  };
  for (int64_t i = first; i < last; i++) {
    if (ran && (timing || e.waits_.before[static_cast<size_t>(i)])) {
      const int64_t end = end_of_light(i, last);
      if (!meet(i, end)) return false;
      i = end;
      if (i == last) break;
    }
    if (is_idle(ops[static_cast<size_t>(i)])) continue;
    op = static_cast<size_t>(i);
    std::visit(*this, ops[op]);
    ran = timing || !ends_with_barrier(ops[op]);
  }
  return !ran || meet(last, last);
}

// None where cores are unequal, because a slow one would hold up all others, and no Spread of a
// mapped file, because threads share the calls that ask the system to read it.
int64_t Executor::Worker::end_of_light(int64_t first, int64_t last) const noexcept {
  if (tokens() > 1 || e.profiling_ || !e.team_->speeds().equal()) return first;
  const auto is_light = [&](size_t i) {
    const bool asks = e.weights_.mapped() && std::holds_alternative<SpreadOp>(e.program_->ops()[i]);
    return e.waits_.light[i] && !asks;
  };
  while (first < last && is_light(static_cast<size_t>(first))) first++;
  return first;
}

void Executor::Worker::run_alone(int64_t first, int64_t last) noexcept {
  alone = true;
  for (int64_t i = first; i < last; i++) {
    op = static_cast<size_t>(i);
    if (!is_idle(e.program_->ops()[op])) std::visit(*this, e.program_->ops()[op]);
  }
  alone = false;
}

void Executor::Worker::operator()(const EmbedOp& op) noexcept {
  const Rows& out = value(op.out);
  const Matrix& m = matrix(op.matrix);
  const LinearKernel& kernel = e.table_->linear[static_cast<int>(m.kind)];
  const Range rows = share(tokens());
  const auto row_id = [&](int64_t t) {
    const int32_t id = e.input_.token_ids[t];
    return id < m.n ? id : 0;
  };
  const auto look_up = [&](const PackedWeight& packed, int64_t row, int64_t t) {
    float* x = reinterpret_cast<float*>(row_of(out, t));
    kernel.row(packed, row, x);
    if (op.scale != 1.0f) {
      for (int64_t i = 0; i < out.width; i++) x[i] *= op.scale;
    }
  };
  if (!m.gathered) {
    for (int64_t t = rows.begin; t < rows.end; t++) {
      look_up(e.weights_.with_row(op.matrix, row_id(t)), row_id(t), t);
    }
    return;
  }
  // Packed as in an arena, so that a row has the same bits: of every kind, from every type.
  const SourceTensor& table = e.weights_.table(op.matrix);
  const PackedWeight panel{scratch, m.panel_bytes, kPanel, m.k, m.kind};
  for (int64_t t = rows.begin; t < rows.end; t += kPanel) {
    const int64_t count = std::min<int64_t>(kPanel, rows.end - t);
    const void* from[kPanel] = {};
    for (int64_t c = 0; c < count; c++) {
      // A table that was never loaded has rows of zeros, like a matrix.
      if (table.data) from[c] = table.data + static_cast<size_t>(row_id(t + c)) * table.row_bytes;
    }
    kernel.pack({from, table.type, m.k, scratch});
    for (int64_t c = 0; c < count; c++) look_up(panel, c, t + c);
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

void Executor::Worker::operator()(const PartNormOp& op) noexcept {
  const Range rows = share(tokens());
  if (rows.size() == 0) return;
  Rows part = value(op.x);
  part.width = e.program_->vectors()[static_cast<size_t>(op.weight)].count;
  part.data = static_cast<float*>(part.data) + op.column;
  for (int32_t i = 0; i < op.parts; i++) {
    e.table_->rms_norm({part, part, vector(op.weight), nullptr, op.eps, rows.begin, rows.end,
                        reinterpret_cast<float*>(scratch)});
    part.data = static_cast<float*>(part.data) + part.width;
  }
}

void Executor::Worker::operator()(const ConvertOp& op) noexcept {
  if (op.order != kNone) return reorder(op);
  const Range rows = share(this->rows(op.x));
  if (rows.size() > 0) e.table_->convert({value(op.x), value(op.out), rows.begin, rows.end});
}

void Executor::Worker::reorder(const ConvertOp& op) noexcept {
  const Rows& x = value(op.x);
  const bool routed = op.routing != kNone;
  const Range mine = share(routed ? e.routing_.rows() : rows(op.x));
  Rows one = x;  // every row of it is the same
  one.data = scratch;
  one.stride = 0;
  float* to = reinterpret_cast<float*>(scratch);
  int64_t expert = 0;
  for (int64_t r = mine.begin; r < mine.end; r++) {
    while (routed && r >= e.routing_.first_row(expert + 1)) expert++;
    const float* from = floats_of(x, r);
    const float* order = vector(op.order) + expert * x.width;
    for (int64_t i = 0; i < x.width; i++) to[i] = from[static_cast<int32_t>(order[i])];
    e.table_->convert({one, value(op.out), r, r + 1});
  }
}

void Executor::Worker::operator()(const AddOp& op) noexcept {
  const Range rows = share(tokens());
  Rows out = value(op.out);
  out.data = static_cast<float*>(out.data) + op.column;
  out.width = value(op.x).width;
  if (rows.size() > 0) e.table_->add({value(op.x), out, rows.begin, rows.end});
}

void Executor::Worker::operator()(const ScaleOp& op) noexcept {
  const Rows& x = value(op.x);
  const float* factors = vector(op.factor);
  const bool single = e.program_->vectors()[static_cast<size_t>(op.factor)].count == 1;
  const Range rows = share(tokens());
  for (int64_t t = rows.begin; t < rows.end; t++) {
    float* to = floats_of(x, t);
    for (int64_t i = 0; i < x.width; i++) to[i] *= factors[single ? 0 : i];
  }
}

void Executor::Worker::operator()(const ActivationOp& op) noexcept {
  const Range rows = share(tokens());
  if (rows.size() == 0) return;
  e.table_->activation({value(op.x), value(op.out), op.activation, op.glu, rows.begin, rows.end,
                        reinterpret_cast<float*>(scratch)});
}

Executor::Worker::Product Executor::Worker::product(Id id, const Rows& x, const Epilogue& ep,
                                                    uint8_t* work) const noexcept {
  const Matrix& m = matrix(id);
  LinearArgs args{};
  args.x_stride = x.stride;
  args.ep = ep;
  args.scratch = work;
  args.terms = two_terms(x.format) ? 2 : 1;
  args.sizes = e.work_sizes_;
  return {e.table_->linear[static_cast<int>(m.kind)], m, x,
          m.panels_of(e.team_->ranks().share(m.units(), crew.rank)), args};
}

LinearPlan Executor::Worker::Product::plan(int64_t rows, int threads) const noexcept {
  return LinearPlan(LinearShape::of(kernel, args.sizes, rows, args.x_stride, args.terms,
                                    panels.size(), matrix.grain, matrix.panel_bytes, threads));
}

void Executor::Worker::Product::run(const PackedWeight& w, int64_t row0,
                                    const LinearTask& task) const noexcept {
  LinearArgs a = args;
  a.w = &w;
  a.x = row_of(x, row0 + task.row0);
  a.ep.out.data = row_of(args.ep.out, row0 + task.row0);
  a.m = task.rows;
  a.panel0 = panels.begin + task.panels.begin;
  a.panel1 = panels.begin + task.panels.end;
  kernel.run(a);
}

void Executor::Worker::multiply(Id id, const Rows& x, int64_t m, const Epilogue& ep) noexcept {
  const Product p = product(id, x, ep, scratch);
  const PackedWeight& w = e.weights_.matrix(id, crew.rank);
  const LinearPlan plan = p.plan(m, crew.size);
  drain(crew, plan.tasks(), plan.chunk(),
        [&](int64_t begin, int64_t end) { p.run(w, 0, plan.task(begin, end)); });
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
  if (!op.stores) args.kv.kv_heads = 0;
  args.q_heads = op.q_heads;
  args.rotary = op.rotary;
  args.cos = vector(op.cos);
  args.sin = vector(op.sin);
  args.q_norm = vector(op.q_norm);
  args.k_norm = vector(op.k_norm);
  args.eps = op.eps;
  args.positions = e.input_.positions;
  args.slots = e.slots_.data() + e.kv_.group(op.layer) * e.program_->max_tokens();
  args.m0 = rows.begin;
  args.m1 = rows.end;
  e.table_->rope_store(args);
}

// The tasks of all heads are one list, head after head, each with the plan of a linear of its own
// for its part of the threads.
void Executor::Worker::operator()(const HeadLinearOp& op) noexcept {
  const Rows &x = value(op.x), &out = value(op.out);
  const Matrix& m = matrix(op.first);
  const auto columns = [](const Rows& rows, int64_t first, int64_t width) {
    const size_t element = rows.format == ActFormat::f32 ? sizeof(float) : sizeof(uint16_t);
    Rows some = rows;
    some.data = static_cast<uint8_t*>(rows.data) + static_cast<size_t>(first) * element;
    some.width = width;
    return some;
  };
  const auto run = [&](int64_t head, const auto& use) {
    const Rows from = columns(x, head * op.step, m.k);
    const Epilogue ep{nullptr, Activation::none, false, false, columns(out, head * m.n, m.n)};
    const Product p = product(op.first, from, ep, scratch);
    use(p, p.plan(tokens(), static_cast<int>((crew.size + op.heads - 1) / op.heads)));
  };
  int64_t tasks = 0, chunk = 1;
  run(0, [&](const Product& p, const LinearPlan& plan) {
    if (p.panels.size() == 0) return;
    tasks = plan.tasks();
    chunk = plan.chunk();
  });
  drain(crew, op.heads * tasks, chunk, [&](int64_t begin, int64_t end) {
    while (begin < end) {
      const int64_t head = begin / tasks, first = head * tasks, last = std::min(end, first + tasks);
      const PackedWeight& w = e.weights_.matrix(op.first + static_cast<Id>(head), crew.rank);
      run(head, [&](const Product& p, const LinearPlan& plan) {
        p.run(w, 0, plan.task(begin - first, last - first));
      });
      begin = last;
    }
  });
}

void Executor::Worker::operator()(const LatentStoreOp& op) noexcept {
  const Range rows = share(tokens());
  if (rows.size() == 0) return;
  LatentStoreArgs args{};
  args.q = value(op.q);
  args.latent = value(op.latent);
  args.kv = value(op.kv);
  args.out = value(op.out);
  args.layer = *e.kv_.heads(op.layer);
  args.q_heads = op.q_heads;
  args.nope = op.nope;
  args.rank = op.rank;
  args.rotary = op.rotary;
  args.cos = vector(op.cos);
  args.sin = vector(op.sin);
  args.norm = vector(op.norm);
  args.eps = op.eps;
  args.interleaved = op.interleaved;
  args.positions = e.input_.positions;
  args.slots = e.slots_.data() + e.kv_.group(op.layer) * e.program_->max_tokens();
  args.m0 = rows.begin;
  args.m1 = rows.end;
  e.table_->latent_store(args);
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
  args.block_table = e.table(u.seq, e.kv_.group(op.layer));
  args.chunk0 = u.chunk0;
  args.chunk1 = u.chunk1;
  args.window = op.window;
  args.keys = op.causal ? 0 : in.kv_len[u.seq];
  args.scale = op.scale;
  args.softcap = op.softcap;
  args.slopes = vector(op.slopes);
  args.sinks = vector(op.sinks);
  args.out = value(op.out);
  args.partial = u.partial < 0 ? nullptr : e.partials_ + u.partial;
  args.partial_stride = u.partial_stride;
  args.scratch = scratch;
  args.scratch_bytes = e.work_sizes_.attention_bytes;
  args.values = scratch + kAttentionScratch;
  e.table_->attention[static_cast<int>(args.kv.type)](args);
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
  // If some threads of a rank are benched, its other members share the units that were planned for
  // them.
  const Range planned = e.team_->ranks().threads_of(crew.rank);
  const auto share_of = [&](int owner) {
    const Range of = split(planned.size(), owner, crew.size);
    return plan.units_of(planned.begin + of.begin, planned.begin + of.end);
  };
  const AttentionUnit* units = plan.units().data();
  drain_shares(crew, share_of, 1, [&](int64_t i, int64_t) { attend(op, units[i]); });
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
  for (int64_t first = 0; first < e.input_.rows; first += e.logit_rows_) {
    const int64_t count = std::min(e.logit_rows_, e.input_.rows - first);
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
