// The operations of recurrent layers in a step, and of gates.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "runtime/worker.h"

namespace cpuserve {
namespace {

constexpr float kLengthEps = 1e-6f;  // of the squared length of a query or key

float sigmoid(float x) noexcept { return 1.0f / (1.0f + std::exp(-x)); }

// Divides x by its length and multiplies it by `scale`. Sixteen sums, so that compilers vectorize
// them, are added in one order.
void to_length(float* x, int64_t n, float scale) noexcept {
  float sums[16] = {};
  for (int64_t i = 0; i < n; i++) sums[i % 16] += x[i] * x[i];
  float sum = kLengthEps;
  for (const float s : sums) sum += s;
  const float factor = scale / std::sqrt(sum);
  for (int64_t i = 0; i < n; i++) x[i] *= factor;
}

}  // namespace

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

void Executor::Worker::operator()(const GateOp& op) noexcept {
  const Rows &x = value(op.x), &out = value(op.out);
  const Range mine = share(tokens());
  for (int64_t t = mine.begin; t < mine.end; t++) {
    const float* gates = floats_of(x, t) + op.column;
    float* to = floats_of(out, t);
    if (op.single) {
      const float gate = op.plain ? gates[0] : sigmoid(gates[0]);
      for (int64_t i = 0; i < out.width; i++) to[i] *= gate;
    } else if (op.plain) {
      for (int64_t i = 0; i < out.width; i++) to[i] *= gates[i];
    } else {
      for (int64_t i = 0; i < out.width; i++) to[i] *= sigmoid(gates[i]);
    }
  }
}

void Executor::Worker::operator()(const GatedDeltaOp& op) noexcept {
  each_unit(op, [&](int64_t unit, const ChunkRows& r) {
    delta_rows(op, unit, r.t0, r.rows, r.num_open, r.slot, r.before, next_of(op, unit, r));
  });
}

// Tokens [t0, t0 + rows) of a chunk that has `num_open` open rows before them. These are in
// `slot`, which also takes the state once the chunk is full; `before` holds the last closed state,
// or is -1 at the beginning of a sequence. `next` is a state that is likely to be read next, or
// null.
void Executor::Worker::delta_rows(const GatedDeltaOp& op, int64_t unit, int64_t t0, int64_t rows,
                                  int64_t num_open, int64_t slot, int64_t before,
                                  const float* next) noexcept {
  const RecurrentShape shape = op.shape();
  const int64_t d = op.key_width, heads = shape.heads, values = heads * op.value_width;
  const int64_t channels = 2 * d + values, tail = op.taps - 1;
  const int64_t state = heads * d * op.value_width;  // floats before the tail
  const float* closed = before < 0 ? e.states_.empty() : e.states_.closed(op.state, unit, before);
  float* closed_to = e.states_.closed(op.state, unit, slot);
  float* open = e.states_.open(op.state, unit, slot);
  float* inputs = open + recurrent_open_floats(shape);  // [kStateChunk][channels]

  Carver carver(scratch);
  float* known = carver.take<float>(tail * channels);
  float* mixed = carver.take<float>(kStateChunk * channels);
  float* gates = carver.take<float>(2 * kStateChunk * heads);
  float* out = carver.take<float>(kStateChunk * values);
  uint8_t* rest = carver.take<uint8_t>(static_cast<int64_t>(recurrent_scratch_bytes(shape)));

  const Rows& x = value(op.x);
  const int64_t width = op.value_width, keys = op.key_heads * d;
  for (int64_t i = 0; i < rows; i++) {
    const float* from = floats_of(x, t0 + i);
    float* to = inputs + (num_open + i) * channels;
    std::copy_n(from + unit * d, d, to);
    std::copy_n(from + keys + unit * d, d, to + d);
    for (int64_t h = 0; h < heads; h++) {
      std::copy_n(from + 2 * keys + op.value_head(unit, h) * width, width, to + 2 * d + h * width);
    }
  }
  for (int64_t i = 0; i < tail; i++) {  // the inputs before row num_open
    const int64_t row = num_open - tail + i;
    const float* from =
        row >= 0 ? inputs + row * channels : closed + state + (tail + row) * channels;
    std::copy_n(from, channels, known + i * channels);
  }
  e.table_->short_conv({inputs + num_open * channels, channels, known,
                        vector(op.conv) + unit * op.taps * channels, nullptr, true, op.taps,
                        channels, rows, mixed, channels});
  const float q_scale = 1.0f / std::sqrt(static_cast<float>(d));
  for (int64_t i = 0; i < rows; i++) {
    to_length(mixed + i * channels, d, q_scale);
    to_length(mixed + i * channels + d, d, 1.0f);
    const float* from = floats_of(value(op.gates), t0 + i);
    for (int64_t h = 0; h < heads; h++) {
      const int64_t head = op.value_head(unit, h);
      const float step = softplus(from[op.value_heads + head] + vector(op.dt_bias)[head]);
      gates[i * heads + h] = vector(op.rates)[head] * step;
      gates[(kStateChunk + i) * heads + h] = sigmoid(from[head]);
    }
  }
  RecurrentArgs args{};
  args.shape = shape;
  args.closed = closed;
  args.closed_to = closed_to;
  args.open = open;
  args.num_open = num_open;
  args.rows = rows;
  args.q = mixed;
  args.k = mixed + d;
  args.v = mixed + 2 * d;
  args.q_stride = args.k_stride = args.v_stride = channels;
  args.g = gates;
  args.beta = gates + kStateChunk * heads;
  args.gate_stride = heads;
  args.out = out;
  args.out_stride = values;
  args.scratch = rest;
  args.next = next;
  e.table_->recurrent(args);
  if (num_open + rows == kStateChunk) {
    std::copy_n(inputs + (kStateChunk - tail) * channels, tail * channels, closed_to + state);
  }
  const Rows& to = value(op.out);
  GatedNormArgs norm{};
  norm.x_stride = values;
  norm.z_stride = static_cast<int64_t>(x.stride / sizeof(float));
  norm.weight = vector(op.norm);
  norm.groups = op.tiled ? 1 : heads;  // that are adjacent in z and out
  norm.width = op.value_width;
  norm.eps = op.eps;
  norm.shared_weight = true;
  norm.out_stride = static_cast<int64_t>(to.stride / sizeof(float));
  norm.rows = rows;
  const int64_t z = 2 * keys + op.value_heads * width;
  for (int64_t h = 0; h < heads; h += norm.groups) {
    const int64_t head = op.value_head(unit, h);
    norm.x = out + h * width;
    norm.z = floats_of(x, t0) + z + head * width;
    norm.out = floats_of(to, t0) + head * width;
    e.table_->gated_norm(norm);
  }
}

}  // namespace cpuserve
