// The operations of dense layers: embeddings, linears, activations.
#include <algorithm>

#include "base/check.h"
#include "runtime/operations/checks.h"
#include "runtime/worker.h"

namespace cpuserve {

void Program::embed(Id out, Id matrix_id, float scale) {
  const Matrix& m = matrix(matrix_id);
  check_tokens("embed", {out});
  check_argument(!m.glu && f32_value(out, "embed out").width == m.k,
                 "embed: value and matrix differ in width");
  embed_rows_ = std::max(embed_rows_, m.n);
  ops_.emplace_back(EmbedOp{out, matrix_id, scale});
}

void Program::position_embed(Id x, Id table, int64_t rows, int64_t offset) {
  check_tokens("position_embed", {x});
  check_argument(table != kNone && rows > offset && offset >= 0, "position_embed: a table of ",
                 rows, " rows cannot have the offset ", offset);
  check_vector(table, rows * f32_value(x, "position_embed x").width, "position table");
  max_positions_ = std::min(max_positions_, rows - offset);
  ops_.emplace_back(PositionEmbedOp{x, table, rows, offset});
}

void Program::convert(const ConvertOp& op) {
  const int64_t width = f32_value(op.x, "convert x").width;
  check_argument(width == value(op.out).width, "convert: x and out differ in width");
  check_argument(value(op.x).copies == value(op.out).copies, "convert: x and out differ in rows");
  check_argument(op.routing == kNone || op.order != kNone, "convert: experts need an order");
  int64_t orders = 1;
  if (op.routing != kNone) {
    routed_value(op.x, op.routing, "convert x");
    orders = experts_of(op.routing, "convert").count;
  }
  check_vector(op.order, orders * width, "order of columns");
  if (op.order != kNone) vectors_[static_cast<size_t>(op.order)].columns = width;
  ops_.emplace_back(op);
}

void Program::linear(LinearOp op, bool glu) {
  const Matrix& m = matrix(op.matrix);
  check_argument(m.glu == glu, "linear: matrix ", m.name, glu ? " is not" : " is",
                 " packed as glu");
  check_multiplies(op.x, m);
  const Value& out = value(op.out);
  check_tokens("linear", {op.x, op.out});
  check_argument(op.out != op.x, "linear: x and out are the same value");
  check_argument(op.out_column >= 0 && op.out_column + m.out_width() <= out.width,
                 "linear: ", m.out_width(), " columns from ", op.out_column,
                 " on do not fit value ", out.name, " of width ", out.width);
  // Other formats pad rows or store groups, and would overwrite the columns of other matrices.
  const bool part = m.out_width() != out.width;
  check_argument(out.format == ActFormat::f32 || (!part && !op.add),
                 "linear: adding and writing some columns need an f32 value");
  check_argument(!whole_row(out.format), "linear: value ", out.name,
                 " has scales wider than a tile; only convert can write such rows");
  check_gated("linear", op.activation, glu);
  op.bias = packed_bias(op.bias, m);
  set_grain(op.matrix, out.format);
  ops_.emplace_back(op);
}

void Program::activation(const ActivationOp& op) {
  check_tokens("activation", {op.x, op.out});
  const int64_t width = f32_value(op.x, "activation x").width;
  check_argument(width == value(op.out).width * (op.glu ? 2 : 1),
                 "activation: x and out differ in width");
  check_gated("activation", op.activation, op.glu);
  ops_.emplace_back(op);
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

void Executor::Worker::operator()(const LinearOp& op) noexcept {
  const Matrix& m = matrix(op.matrix);
  Rows out = value(op.out);
  out.data = static_cast<uint8_t*>(out.data) + static_cast<size_t>(op.out_column) * sizeof(float);
  out.width = m.out_width();
  multiply(op.matrix, value(op.x), tokens(), {vector(op.bias), op.activation, m.glu, op.add, out});
}

void Executor::Worker::operator()(const ActivationOp& op) noexcept {
  const Range rows = share(tokens());
  if (rows.size() == 0) return;
  e.table_->activation({value(op.x), value(op.out), op.activation, op.glu, rows.begin, rows.end,
                        reinterpret_cast<float*>(scratch)});
}

}  // namespace cpuserve
