// Short convolutions and Mamba2 in a step, and the norm that ends a Mamba2 layer.
#include <algorithm>

#include "runtime/worker.h"

namespace cpuserve {

void Executor::Worker::operator()(const ShortConvOp& op) noexcept {
  each_unit(op, [&](int64_t unit, const ChunkRows& r) { conv_rows(op, unit, r); });
}

void Executor::Worker::conv_rows(const ShortConvOp& op, int64_t unit, const ChunkRows& r) noexcept {
  const int64_t channels = op.channels, first = unit * channels, kept = op.taps - 1;
  float* inputs = e.states_.open(op.state, unit, r.slot);
  float* known = Carver(scratch).take<float>(kept * channels);
  const float* tail = closed_of(op, unit, r);  // the inputs before the chunk
  const Rows &x = value(op.x), &out = value(op.out);
  for (int64_t i = 0; i < r.rows; i++) {
    const float* from = floats_of(x, r.t0 + i) + op.column + first;
    std::copy_n(from, channels, inputs + (r.num_open + i) * channels);
  }
  for (int64_t i = 0; i < kept; i++) {  // the inputs before row num_open
    const int64_t row = r.num_open - kept + i;
    const float* from = row >= 0 ? inputs + row * channels : tail + (kept + row) * channels;
    std::copy_n(from, channels, known + i * channels);
  }
  ShortConvArgs args{};
  args.x = inputs + r.num_open * channels;
  args.x_stride = channels;
  args.before = known;
  args.weight = vector(op.weight) + first;
  args.weight_stride = out.width;
  args.bias = op.bias == kNone ? nullptr : vector(op.bias) + first;
  args.silu = op.silu;
  args.taps = op.taps;
  args.channels = channels;
  args.rows = r.rows;
  args.out = floats_of(out, r.t0) + first;
  args.out_stride = float_stride(out);
  e.table_->short_conv(args);
  if (r.closes()) {
    std::copy_n(inputs + (kStateChunk - kept) * channels, kept * channels,
                e.states_.closed(op.state, unit, r.slot));
  }
}

void Executor::Worker::operator()(const Mamba2Op& op) noexcept {
  each_unit(op, [&](int64_t unit, const ChunkRows& r) { mamba2_rows(op, unit, r); });
}

// k, q and v are B, C and x. The step dt is the kernel's beta, and g is dt times A.
void Executor::Worker::mamba2_rows(const Mamba2Op& op, int64_t unit, const ChunkRows& r) noexcept {
  const RecurrentShape shape = op.shape();
  const int64_t heads = op.together, head0 = unit * heads, width = op.value_width;
  const int64_t group = head0 / (op.heads / op.groups);

  Carver carver(scratch);
  float* gates = carver.take<float>(2 * kStateChunk * heads);
  uint8_t* rest = carver.take<uint8_t>(static_cast<int64_t>(recurrent_scratch_bytes(shape)));
  for (int64_t i = 0; i < r.rows; i++) {
    const float* from = floats_of(value(op.steps), r.t0 + i) + op.column + head0;
    for (int64_t h = 0; h < heads; h++) {
      const float raw = softplus(from[h] + vector(op.dt_bias)[head0 + h]);
      const float dt = std::min(std::max(raw, op.low), op.high);
      gates[i * heads + h] = vector(op.rates)[head0 + h] * dt;
      gates[(kStateChunk + i) * heads + h] = dt;
    }
  }
  const Rows &x = value(op.x), &out = value(op.out);
  const float* row = floats_of(x, r.t0);
  RecurrentArgs args{};
  args.shape = shape;
  args.closed = closed_of(op, unit, r);
  args.closed_to = e.states_.closed(op.state, unit, r.slot);
  args.open = e.states_.open(op.state, unit, r.slot);
  args.num_open = r.num_open;
  args.rows = r.rows;
  args.v = row + head0 * width;
  args.k = row + op.values() + group * op.key_width;
  args.q = args.k + op.groups * op.key_width;
  args.q_stride = args.k_stride = args.v_stride = float_stride(x);
  args.g = gates;
  args.beta = gates + kStateChunk * heads;
  args.gate_stride = heads;
  args.out = floats_of(out, r.t0) + head0 * width;
  args.out_stride = float_stride(out);
  args.scratch = rest;
  args.next = next_of(op, unit, r);
  e.table_->recurrent(args);
  for (int64_t i = 0; i < r.rows; i++) {
    const float* v = args.v + i * args.v_stride;
    float* to = args.out + i * args.out_stride;
    for (int64_t h = 0; h < heads; h++, v += width, to += width) {
      const float d = vector(op.d)[head0 + h];
      for (int64_t c = 0; c < width; c++) to[c] += d * v[c];
    }
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
