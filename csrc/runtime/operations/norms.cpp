// Norms of rows, and their products with Hadamard matrices.
#include "runtime/operations/norms.h"

#include "base/check.h"
#include "runtime/worker.h"

namespace cpuserve {
namespace {

// The checks that RmsNormOp and LayerNormOp share.
void check_norm(const char* name, Id x, Id out, Id weight, const Declarations& p) {
  p.check_rows(name, {x, out});
  const int64_t width = p.f32_value(x, "norm x").width;
  check_argument(p.value(out).width == width, name, ": x and out differ in width");
  check_argument(weight != kNone, name, ": the weight is missing");
  p.check_vector(weight, width, "norm weight");
}

}  // namespace

void prepare(const RmsNormOp& op, const Declarations& p) {
  check_norm(op.kName, op.x, op.out, op.weight, p);
  if (op.groups == 1) return;
  const int64_t width = p.f32_value(op.out, "rms_norm out of groups").width;
  check_argument(op.groups >= 1 && width % op.groups == 0, "rms_norm: ", width,
                 " columns cannot form ", op.groups, " equal groups");
}

void run(const RmsNormOp& op, Worker& w) noexcept {
  const Range rows = w.share(w.rows(op.x));
  if (rows.size() == 0) return;
  Rows x = w.value(op.x), out = w.value(op.out);
  const float* weight = w.vector(op.weight);
  const int64_t width = out.width / op.groups;
  x.width = out.width = width;
  for (int32_t i = 0; i < op.groups; i++) {
    w.kernels().rms_norm({x, out, weight, nullptr, op.eps, rows.begin, rows.end,
                          reinterpret_cast<float*>(w.scratch)});
    if (i + 1 == op.groups) break;
    x.data = static_cast<float*>(x.data) + width;
    out.data = static_cast<float*>(out.data) + width;
    weight += width;
  }
}

void prepare(const LayerNormOp& op, const Declarations& p) {
  check_norm(op.kName, op.x, op.out, op.weight, p);
  p.check_vector(op.bias, p.value(op.x).width, "norm bias");
}

void run(const LayerNormOp& op, Worker& w) noexcept {
  const Range rows = w.share(w.rows(op.x));
  if (rows.size() == 0) return;
  w.kernels().layer_norm({w.value(op.x), w.value(op.out), w.vector(op.weight), w.vector(op.bias),
                          op.eps, rows.begin, rows.end, reinterpret_cast<float*>(w.scratch)});
}

void prepare(const PartNormOp& op, const Declarations& p) {
  p.check_tokens("part_norm", {op.x});
  check_argument(op.weight != kNone, "part_norm: the weight is missing");
  check_argument(op.parts >= 1, "part_norm: there must be at least 1 part, not ", op.parts);
  p.check_columns(op.x, op.column, op.parts * p.vector(op.weight).count, "part_norm x");
}

void run(const PartNormOp& op, Worker& w) noexcept {
  const Range rows = w.share(w.tokens());
  if (rows.size() == 0) return;
  Rows part = w.value(op.x);
  part.width = w.program().vectors()[static_cast<size_t>(op.weight)].count;
  part.data = static_cast<float*>(part.data) + op.column;
  for (int32_t i = 0; i < op.parts; i++) {
    w.kernels().rms_norm({part, part, w.vector(op.weight), nullptr, op.eps, rows.begin, rows.end,
                          reinterpret_cast<float*>(w.scratch)});
    part.data = static_cast<float*>(part.data) + part.width;
  }
}

void prepare(const PartLayerNormOp& op, const Declarations& p) {
  p.check_tokens("part_layer_norm", {op.x});
  check_argument(op.weight != kNone, "part_layer_norm: the weight is missing");
  const int64_t columns = p.vector(op.weight).count;
  check_argument(op.parts >= 1 && columns % op.parts == 0, "part_layer_norm: ", columns,
                 " columns cannot form ", op.parts, " equal parts");
  p.check_vector(op.bias, columns, "part_layer_norm bias");
  p.check_columns(op.x, op.column, columns, "part_layer_norm x");
}

void run(const PartLayerNormOp& op, Worker& w) noexcept {
  const Range rows = w.share(w.tokens());
  if (rows.size() == 0) return;
  Rows part = w.value(op.x);
  part.width = w.program().vectors()[static_cast<size_t>(op.weight)].count / op.parts;
  part.data = static_cast<float*>(part.data) + op.column;
  const float *weight = w.vector(op.weight), *bias = w.vector(op.bias);
  for (int32_t i = 0; i < op.parts; i++) {
    const int64_t at = i * part.width;
    w.kernels().layer_norm({part, part, weight + at, bias ? bias + at : nullptr, op.eps, rows.begin,
                            rows.end, reinterpret_cast<float*>(w.scratch)});
    part.data = static_cast<float*>(part.data) + part.width;
  }
}

void prepare(const HadamardOp& op, const Declarations& p) {
  check_norm(op.kName, op.x, op.out, op.signs, p);
  const int64_t width = p.value(op.x).width;
  check_argument(op.x != op.out, "hadamard: out must not be x");
  check_argument(op.block >= kPanel && (op.block & (op.block - 1)) == 0 && width % op.block == 0,
                 "hadamard: ", width, " columns cannot form blocks of ", op.block);
  check_argument(op.head >= 1 && op.key_heads >= 1 && width % (op.head * op.key_heads) == 0,
                 "hadamard: ", width, " columns cannot form groups of ", op.key_heads, " heads of ",
                 op.head, " columns");
}

void run(const HadamardOp& op, Worker& w) noexcept {
  const Range rows = w.share(w.rows(op.x));
  if (rows.size() == 0) return;
  w.kernels().hadamard_rows({w.value(op.x), w.value(op.out), w.vector(op.signs), op.block,
                             op.inverse, op.head, op.key_heads, rows.begin, rows.end,
                             reinterpret_cast<float*>(w.scratch)});
}

void prepare(const GatedNormOp& op, const Declarations& p) {
  p.check_tokens("gated_norm", {op.x, op.z, op.out});
  const int64_t width = p.f32_value(op.out, "gated_norm out").width;
  check_argument(p.f32_value(op.x, "gated_norm x").width == width, "gated_norm: x has width ",
                 p.value(op.x).width, ", but out has ", width);
  p.check_columns(op.z, op.column, width, "gated_norm z");
  check_argument(op.z != op.out, "gated_norm: out must not be z");
  check_argument(op.groups >= 1 && width % op.groups == 0, "gated_norm: ", width,
                 " columns cannot form ", op.groups, " equal groups");
  check_argument(op.weight != kNone, "gated_norm: the weight is missing");
  p.check_vector(op.weight, width, "gated_norm weight");
}

void run(const GatedNormOp& op, Worker& w) noexcept {
  const Rows &x = w.value(op.x), &z = w.value(op.z), &out = w.value(op.out);
  const Range mine = w.share(w.tokens());
  if (mine.size() == 0) return;
  GatedNormArgs args{};
  args.x = floats_of(x, mine.begin);
  args.x_stride = float_stride(x);
  args.z = floats_of(z, mine.begin) + op.column;
  args.z_stride = float_stride(z);
  args.weight = w.vector(op.weight);
  args.groups = op.groups;
  args.width = out.width / op.groups;
  args.eps = op.eps;
  args.gate_first = true;
  args.out = floats_of(out, mine.begin);
  args.out_stride = float_stride(out);
  args.rows = mine.size();
  w.kernels().gated_norm(args);
}

}  // namespace cpuserve
