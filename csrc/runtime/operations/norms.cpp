// Norms of rows.

#include "base/check.h"
#include "runtime/worker.h"

namespace cpuserve {

void Program::norm(const NormOp& op) {
  check_tokens("norm", {op.x, op.out});
  const int64_t width = f32_value(op.x, "norm x").width;
  check_argument(value(op.out).width == width, "norm: x and out differ in width");
  check_argument(op.weight != kNone, "norm: the weight is missing");
  check_argument(op.centered || op.bias == kNone, "rms_norm has no bias");
  check_vector(op.weight, width, "norm weight");
  check_vector(op.bias, width, "norm bias");
  ops_.emplace_back(op);
}

void Program::part_norm(const PartNormOp& op) {
  check_tokens("part_norm", {op.x});
  check_argument(op.weight != kNone, "part_norm: the weight is missing");
  check_argument(op.parts >= 1, "part_norm: there must be at least 1 part, not ", op.parts);
  check_columns(op.x, op.column, op.parts * vector(op.weight).count, "part_norm x");
  ops_.emplace_back(op);
}

void Program::gated_norm(const GatedNormOp& op) {
  check_tokens("gated_norm", {op.x, op.z, op.out});
  const int64_t width = f32_value(op.out, "gated_norm out").width;
  check_argument(f32_value(op.x, "gated_norm x").width == width, "gated_norm: x has width ",
                 value(op.x).width, ", but out has ", width);
  check_columns(op.z, op.column, width, "gated_norm z");
  check_argument(op.z != op.out, "gated_norm: out must not be z");
  check_argument(op.groups >= 1 && width % op.groups == 0, "gated_norm: ", width,
                 " columns cannot form ", op.groups, " equal groups");
  check_argument(op.weight != kNone, "gated_norm: the weight is missing");
  check_vector(op.weight, width, "gated_norm weight");
  ops_.emplace_back(op);
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

void Executor::Worker::operator()(const GatedNormOp& op) noexcept {
  const Rows &x = value(op.x), &z = value(op.z), &out = value(op.out);
  const Range mine = share(tokens());
  if (mine.size() == 0) return;
  GatedNormArgs args{};
  args.x = floats_of(x, mine.begin);
  args.x_stride = float_stride(x);
  args.z = floats_of(z, mine.begin) + op.column;
  args.z_stride = float_stride(z);
  args.weight = vector(op.weight);
  args.groups = op.groups;
  args.width = out.width / op.groups;
  args.eps = op.eps;
  args.gate_first = true;
  args.out = floats_of(out, mine.begin);
  args.out_stride = float_stride(out);
  args.rows = mine.size();
  e.table_->gated_norm(args);
}

}  // namespace cpuserve
