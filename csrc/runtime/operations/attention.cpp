// Attention, and the operations around it.
#include <algorithm>

#include "base/check.h"
#include "runtime/operations/checks.h"
#include "runtime/worker.h"

namespace cpuserve {

void Program::rope_store(const RopeStoreOp& op) {
  const CacheLayer& kv = kv_layer(op.layer);
  check_tokens("rope_store_kv", {op.qkv, op.q});
  const Value& qkv = f32_value(op.qkv, "rope_store_kv qkv");
  check_argument(op.q_heads >= 1 && op.q_heads % kv.kv_heads == 0, "rope_store_kv: ", op.q_heads,
                 " query heads over ", kv.kv_heads, " KV heads");
  const int32_t stored = op.stores ? 2 * kv.kv_heads : 0;
  check_argument(qkv.width >= int64_t{op.q_heads + stored} * kv.head_dim, "rope_store_kv: value ",
                 qkv.name, " of width ", qkv.width, " does not hold q, k and v");
  check_argument(
      value(op.q).width == int64_t{op.q_heads} * kv.hd_pad && !quantized(value(op.q).format),
      "rope_store_kv: q must be f32 or bf16 of q_heads padded heads");
  check_argument(op.rotary >= 0 && op.rotary % 2 == 0 && op.rotary <= kv.head_dim,
                 "rope_store_kv: cannot rotate ", op.rotary, " of ", kv.head_dim, " dimensions");
  check_argument(!kv.latent, "rope_store_kv: layer ", op.layer, " keeps no values");
  if (op.rotary > 0) check_rope("rope_store_kv", op.rotary, op.cos, op.sin);
  check_vector(op.q_norm, kv.head_dim, "q norm");
  check_vector(op.k_norm, kv.head_dim, "k norm");
  ops_.emplace_back(op);
}

void Program::check_rope(const char* op, int32_t rotary, Id cos, Id sin) {
  const int64_t half = rotary / 2, count = vector(cos).count;
  check_argument(count % half == 0, op, ": a table of ", count,
                 " elements does not hold whole rows of ", half);
  check_vector(sin, count, "rope sin");
  check_argument(sin != kNone, op, ": cos is given, but sin is missing");
  max_positions_ = std::min(max_positions_, count / half);
}

void Program::attention(const AttentionOp& op) {
  const CacheLayer& kv = kv_layer(op.layer);
  check_argument(op.q_heads >= 1 && op.q_heads % kv.kv_heads == 0, "attention: ", op.q_heads,
                 " query heads over ", kv.kv_heads, " KV heads");
  check_argument(value(op.q).width == int64_t{op.q_heads} * kv.hd_pad, "attention: q has width ",
                 value(op.q).width);
  check_tokens("attention", {op.q, op.out});
  const Value& out = value(op.out);
  check_argument(out.width == int64_t{op.q_heads} * kv.head_dim, "attention: out has width ",
                 out.width);
  // Heads are written one by one, so a group of 32 must not contain columns of two heads.
  check_argument(!whole_row(out.format), "attention: value ", out.name,
                 " has scales wider than a head; only convert can write such rows");
  check_argument(!quantized(out.format) || kv.head_dim % 32 == 0,
                 "attention: q8g32 rows need heads of a multiple of 32, not ", kv.head_dim);
  check_argument(op.window >= 0, "attention: window must be at least 0, not ", op.window);
  check_vector(op.slopes, op.q_heads, "ALiBi slopes");
  check_vector(op.sinks, op.q_heads, "attention sinks");
  ops_.emplace_back(op);
}

void Program::split_gates(const SplitGatesOp& op) {
  check_tokens("split_gates", {op.x, op.out});
  const int64_t width = f32_value(op.x, "split_gates x").width;
  check_argument(op.x != op.out && f32_value(op.out, "split_gates out").width == width,
                 "split_gates: x and out must be two values of one width");
  check_argument(op.heads >= 1 && op.head_dim >= 1 && int64_t{2} * op.heads * op.head_dim <= width,
                 "split_gates: ", op.heads, " heads of ", op.head_dim,
                 " dimensions and as many gates do not fit ", width, " columns");
  ops_.emplace_back(op);
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

void Executor::Worker::operator()(const SplitGatesOp& op) noexcept {
  const Rows &x = value(op.x), &out = value(op.out);
  const int64_t d = op.head_dim, queries = op.heads * d, rest = x.width - 2 * queries;
  const Range mine = share(tokens());
  for (int64_t t = mine.begin; t < mine.end; t++) {
    const float* from = floats_of(x, t);
    float* to = floats_of(out, t);
    for (int64_t h = 0; h < op.heads; h++) {
      std::copy_n(from + 2 * h * d, d, to + h * d);
      std::copy_n(from + (2 * h + 1) * d, d, to + queries + rest + h * d);
    }
    std::copy_n(from + 2 * queries, rest, to + queries);
  }
}

}  // namespace cpuserve
