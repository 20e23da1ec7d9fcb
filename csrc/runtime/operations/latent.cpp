// The operations of latent attention (MLA).
#include "runtime/operations/latent.h"

#include <algorithm>

#include "base/check.h"
#include "runtime/operations/attention.h"
#include "runtime/operations/checks.h"
#include "runtime/worker.h"

namespace cpuserve {

void prepare(HeadLinearOp& op, const Declarations& p) {
  check_argument(!op.matrices.empty(), "head_linear: there are no matrices");
  p.check_tokens("head_linear", {op.x, op.out});
  op.first = op.matrices[0];
  op.heads = static_cast<int32_t>(op.matrices.size());
  const Matrix& one = p.matrix(op.first);
  for (size_t h = 0; h < op.matrices.size(); h++) {
    const Matrix& m = p.matrix(op.matrices[h]);
    check_argument(op.matrices[h] == op.first + static_cast<Id>(h), "head_linear: matrix ", m.name,
                   " does not follow that of the head before");
    check_argument(m.n == one.n && m.k == one.k && m.kind == one.kind && !m.glu,
                   "head_linear: matrices ", one.name, " and ", m.name, " differ in shape");
  }
  const Value &x = p.value(op.x), &out = p.value(op.out);
  // The columns of two heads must not share a quantization scale.
  check_argument(x.format == p.table().linear[static_cast<int>(one.kind)].act &&
                     !quantized(x.format) && !quantized(out.format),
                 "head_linear: values ", x.name, " and ", out.name,
                 " must be f32 or bf16, as the matrices multiply them");
  // A product stored as fp32 writes only the columns of the head. A product stored as bf16 also
  // writes zeros, up to a multiple of 32 columns, and would overwrite columns of the next head.
  check_argument(one.n % 32 == 0 || out.format == ActFormat::f32, "head_linear: matrix ", one.name,
                 " has ", one.n, " rows, so value ", out.name, " must be f32");
  // A product reads round_up(k, 32) columns of x; the weights of the columns after k are 0.
  check_argument(
      op.step >= round_up(one.k, 32) && op.step % 2 == 0 && x.width == op.heads * op.step,
      "head_linear: value ", x.name, " of width ", x.width, " is not ", op.heads, " heads of ",
      op.step);
  check_argument(op.x != op.out && out.width == op.heads * one.n, "head_linear: value ", out.name,
                 " has width ", out.width, ", not ", op.heads * one.n);
}

// The tasks of all heads form one list, head after head. Each head is a linear
// with a LinearPlan for the threads that compute this head.
void run(const HeadLinearOp& op, Worker& w) noexcept {
  const Rows &x = w.value(op.x), &out = w.value(op.out);
  const Matrix& m = w.matrix(op.first);
  const auto columns = [](const Rows& rows, int64_t first, int64_t width) {
    const size_t element = rows.format == ActFormat::f32 ? sizeof(float) : sizeof(uint16_t);
    Rows some = rows;
    some.data = static_cast<uint8_t*>(rows.data) + static_cast<size_t>(first) * element;
    some.width = width;
    return some;
  };
  const auto with_plan = [&](int64_t head, const auto& use) {
    const Rows from = columns(x, head * op.step, m.k);
    const Epilogue ep{nullptr, Activation::none, false, false, columns(out, head * m.n, m.n)};
    const Worker::Product p = w.product(op.first, from, ep, w.scratch);
    use(p, p.plan(w.tokens(), static_cast<int>((w.peers.size + op.heads - 1) / op.heads)));
  };
  int64_t tasks = 0, chunk = 1;
  with_plan(0, [&](const Worker::Product& p, const LinearPlan& plan) {
    if (p.panels.size() == 0) return;
    tasks = plan.tasks();
    chunk = plan.chunk();
  });
  w.drain(w.peers, op.heads * tasks, chunk, [&](int64_t begin, int64_t end) {
    while (begin < end) {
      const int64_t head = begin / tasks, first = head * tasks, last = std::min(end, first + tasks);
      const PackedWeight& packed =
          w.weights().matrix(op.first + static_cast<Id>(head), w.peers.rank);
      with_plan(head, [&](const Worker::Product& p, const LinearPlan& plan) {
        p.run(packed, 0, plan.task(begin - first, last - first));
      });
      begin = last;
    }
  });
}

void prepare(const LatentStoreOp& op, Declarations& p) {
  const CacheLayer& kv = p.kv_layer(op.layer);
  p.check_tokens("latent_store_kv", {op.q, op.latent, op.kv, op.out});
  check_argument(
      op.q_heads >= 1 && op.nope >= 0 && op.rank >= 1 && op.rotary >= 0 && op.rotary % 2 == 0,
      "latent_store_kv: cannot have ", op.q_heads, " heads of ", op.nope, ", ", op.rank, " and ",
      op.rotary, " columns");
  check_argument(kv.kv_heads == 1 && kv.head_dim == op.rank + op.rotary, "latent_store_kv: layer ",
                 op.layer, " does not keep rows of ", op.rank, " + ", op.rotary);
  const int64_t heads = op.q_heads;
  check_argument(p.f32_value(op.q, "latent_store_kv q").width == heads * (op.nope + op.rotary) &&
                     p.f32_value(op.latent, "latent_store_kv latent").width == heads * op.rank &&
                     p.f32_value(op.kv, "latent_store_kv kv").width == kv.head_dim,
                 "latent_store_kv: values ", p.value(op.q).name, ", ", p.value(op.latent).name,
                 " and ", p.value(op.kv).name, " have other widths than the heads");
  check_argument(p.value(op.out).width == heads * kv.hd_pad && !quantized(p.value(op.out).format),
                 "latent_store_kv: out must be f32 or bf16 of q_heads padded heads");
  if (op.rotary > 0) check_rope(p, "latent_store_kv", op.rotary, op.cos, op.sin);
  check_argument(op.norm != kNone, "latent_store_kv: the norm is missing");
  p.check_vector(op.norm, op.rank, "latent norm");
}

void run(const LatentStoreOp& op, Worker& w) noexcept {
  const Range rows = w.share(w.tokens());
  if (rows.size() == 0) return;
  LatentStoreArgs args{};
  args.q = w.value(op.q);
  args.latent = w.value(op.latent);
  args.kv = w.value(op.kv);
  args.out = w.value(op.out);
  args.layer = *w.kv().heads(op.layer);
  args.q_heads = op.q_heads;
  args.nope = op.nope;
  args.rank = op.rank;
  args.rotary = op.rotary;
  args.cos = w.vector(op.cos);
  args.sin = w.vector(op.sin);
  args.norm = w.vector(op.norm);
  args.eps = op.eps;
  args.interleaved = op.interleaved;
  args.positions = w.input().positions;
  args.slots = w.kv_slots(op.layer);
  args.m0 = rows.begin;
  args.m1 = rows.end;
  w.kernels().latent_store(args);
}

}  // namespace cpuserve
