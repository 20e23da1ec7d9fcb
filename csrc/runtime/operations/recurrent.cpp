// The operations of recurrent layers.
#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "runtime/worker.h"

namespace cpuserve {
namespace {

constexpr float kLengthEps = 1e-6f;  // of the squared length of a query or key

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

void Program::gated_delta(GatedDeltaOp op) {
  check_tokens("gated_delta", {op.x, op.gates, op.out});
  check_argument(op.key_heads >= 1 && op.value_heads >= 1 && op.value_heads % op.key_heads == 0,
                 "gated_delta: ", op.value_heads, " value heads cannot share ", op.key_heads,
                 " key heads evenly");
  check_argument(op.key_width >= 1 && op.value_width >= 1, "gated_delta: heads of ", op.key_width,
                 " and ", op.value_width, " dimensions; both must be at least 1");
  check_argument(op.taps >= 2 && op.taps <= kMaxTaps, "gated_delta: a convolution over ", op.taps,
                 " tokens is not between 2 and ", kMaxTaps);
  const int64_t values = int64_t{op.value_heads} * op.value_width;
  check_argument(f32_value(op.x, "gated_delta x").width == op.key_heads * op.channels() + values,
                 "gated_delta: x has width ", value(op.x).width, ", not ",
                 op.key_heads * op.channels() + values);
  check_argument(f32_value(op.gates, "gated_delta gates").width == int64_t{2} * op.value_heads,
                 "gated_delta: gates must have two columns for each value head");
  check_argument(f32_value(op.out, "gated_delta out").width == values,
                 "gated_delta: out must have the width of all values, ", values);
  check_argument(op.conv != kNone && op.rates != kNone && op.dt_bias != kNone && op.norm != kNone,
                 "gated_delta: a weight is missing");
  check_vector(op.conv, op.key_heads * op.channels() * op.taps, "gated_delta conv");
  check_vector(op.rates, op.value_heads, "gated_delta rates");
  check_vector(op.dt_bias, op.value_heads, "gated_delta dt_bias");
  check_vector(op.norm, op.value_width, "gated_delta norm");
  op.state = static_cast<Id>(states_.size());
  states_.push_back(op.layer());
  ops_.emplace_back(op);
}

void Program::short_conv(ShortConvOp op) {
  check_tokens("short_conv", {op.x, op.out});
  const int64_t all = f32_value(op.out, "short_conv out").width;
  check_columns(op.x, op.column, all, "short_conv x");
  check_argument(op.x != op.out, "short_conv: out must not be x");
  check_argument(op.taps >= 2 && op.taps <= kMaxTaps, "short_conv: ", op.taps,
                 " tokens are not between 2 and ", kMaxTaps);
  check_argument(op.units >= 1 && all % op.units == 0, "short_conv: ", all,
                 " channels cannot form ", op.units, " equal units");
  check_argument(op.weight != kNone, "short_conv: the weight is missing");
  check_vector(op.weight, all * op.taps, "short_conv weight");
  check_vector(op.bias, all, "short_conv bias");
  op.channels = all / op.units;
  op.state = static_cast<Id>(states_.size());
  states_.push_back(op.layer());
  ops_.emplace_back(op);
}

void Program::mamba2(Mamba2Op op) {
  check_tokens("mamba2", {op.x, op.steps, op.out});
  check_argument(op.groups >= 1 && op.together >= 1 && op.heads >= 1 &&
                     op.heads % (int64_t{op.groups} * op.together) == 0,
                 "mamba2: ", op.heads, " heads cannot form ", op.groups, " groups of units of ",
                 op.together, " heads");
  check_argument(op.key_width >= 1 && op.value_width >= 1, "mamba2: states of ", op.key_width,
                 " and ", op.value_width, " dimensions; both must be at least 1");
  const int64_t width = op.values() + int64_t{2} * op.groups * op.key_width;
  check_argument(f32_value(op.x, "mamba2 x").width == width, "mamba2: x has width ",
                 value(op.x).width, ", not ", width);
  check_columns(op.steps, op.column, op.heads, "mamba2 steps");
  check_argument(f32_value(op.out, "mamba2 out").width == op.values(),
                 "mamba2: out must have the width of all values, ", op.values());
  check_argument(op.x != op.out && op.steps != op.out, "mamba2: out must not be an input");
  check_argument(op.rates != kNone && op.dt_bias != kNone && op.d != kNone,
                 "mamba2: a weight is missing");
  check_vector(op.rates, op.heads, "mamba2 rates");
  check_vector(op.dt_bias, op.heads, "mamba2 dt_bias");
  check_vector(op.d, op.heads, "mamba2 d");
  check_argument(op.low >= 0.0f && op.low <= op.high, "mamba2: steps from ", op.low, " to ",
                 op.high, " are no range of positive numbers");
  op.state = static_cast<Id>(states_.size());
  states_.push_back(op.layer());
  ops_.emplace_back(op);
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

}  // namespace cpuserve
