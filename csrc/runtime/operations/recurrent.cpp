// The operations of recurrent layers.
#include "runtime/operations/recurrent.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "runtime/operations/dense.h"
#include "runtime/operations/state_units.h"

namespace cpuserve {
namespace {

constexpr float kLengthEps = 1e-6f;  // added to the squared length of a query or key

// Divides x by its Euclidean length and multiplies it by `scale`.
// The 16 partial sums, which compilers keep in vectors, are added in a fixed order.
void to_length(float* x, int64_t n, float scale) noexcept {
  float sums[16] = {};
  for (int64_t i = 0; i < n; i++) sums[i % 16] += x[i] * x[i];
  float sum = kLengthEps;
  for (const float s : sums) sum += s;
  const float factor = scale / std::sqrt(sum);
  for (int64_t i = 0; i < n; i++) x[i] *= factor;
}

// Copies to `known` the `kept` inputs of a convolution before open row `first`. These inputs
// are rows of `inputs` (inputs of this chunk) or of `tail` (the inputs before the chunk).
void copy_known(const float* inputs, const float* tail, int64_t first, int64_t kept,
                int64_t channels, float* known) noexcept {
  for (int64_t i = 0; i < kept; i++) {
    const int64_t row = first - kept + i;
    const float* from = row >= 0 ? inputs + row * channels : tail + (kept + row) * channels;
    std::copy_n(from, channels, known + i * channels);
  }
}

}  // namespace

void prepare(GatedDeltaOp& op, Declarations& p) {
  p.check_tokens("gated_delta", {op.x, op.gates, op.out});
  check_argument(op.key_heads >= 1 && op.value_heads >= 1 && op.value_heads % op.key_heads == 0,
                 "gated_delta: ", op.value_heads, " value heads cannot share ", op.key_heads,
                 " key heads evenly");
  check_argument(op.key_width >= 1 && op.value_width >= 1, "gated_delta: heads of ", op.key_width,
                 " and ", op.value_width, " dimensions; both must be at least 1");
  check_argument(op.taps >= 2 && op.taps <= kMaxTaps, "gated_delta: a convolution over ", op.taps,
                 " tokens is not between 2 and ", kMaxTaps);
  const int64_t values = int64_t{op.value_heads} * op.value_width;
  check_argument(p.f32_value(op.x, "gated_delta x").width == op.key_heads * op.channels() + values,
                 "gated_delta: x has width ", p.value(op.x).width, ", not ",
                 op.key_heads * op.channels() + values);
  check_argument(!op.by_row || op.key_heads == op.value_heads,
                 "gated_delta: states with a decay by row must not share keys");
  check_argument(op.bound <= 0.0f && (op.by_row || op.bound == 0.0f),
                 "gated_delta: only decays by row can have a bound, which must be negative");
  check_argument(
      p.f32_value(op.gates, "gated_delta gates").width == op.value_heads + op.decays(),
      "gated_delta: gates must have two columns for each value head, or one and its decays");
  check_argument(p.f32_value(op.out, "gated_delta out").width == values,
                 "gated_delta: out must have the width of all values, ", values);
  check_argument(op.conv != kNone && op.rates != kNone && op.dt_bias != kNone && op.norm != kNone,
                 "gated_delta: a weight is missing");
  p.check_vector(op.conv, op.key_heads * op.channels() * op.taps, "gated_delta conv");
  p.check_vector(op.rates, op.value_heads, "gated_delta rates");
  p.check_vector(op.dt_bias, op.decays(), "gated_delta dt_bias");
  p.check_vector(op.norm, op.value_width, "gated_delta norm");
  op.state = p.add_state(op.layer());
}

void prepare(ShortConvOp& op, Declarations& p) {
  p.check_tokens("short_conv", {op.x, op.out});
  const int64_t all = p.f32_value(op.out, "short_conv out").width;
  p.check_columns(op.x, op.column, all, "short_conv x");
  check_argument(op.x != op.out, "short_conv: out must not be x");
  check_argument(op.taps >= 2 && op.taps <= kMaxTaps, "short_conv: ", op.taps,
                 " tokens are not between 2 and ", kMaxTaps);
  check_argument(op.dilation >= 1 && op.kept() <= kStateChunk, "short_conv: ", op.taps,
                 " taps with dilation ", op.dilation, " reach back more than ", kStateChunk,
                 " tokens");
  check_argument(op.units >= 1 && all % op.units == 0, "short_conv: ", all,
                 " channels cannot form ", op.units, " equal units");
  check_argument(op.weight != kNone, "short_conv: the weight is missing");
  p.check_vector(op.weight, all * op.taps, "short_conv weight");
  p.check_vector(op.bias, all, "short_conv bias");
  op.channels = all / op.units;
  op.state = p.add_state(op.layer());
}

void prepare(Mamba2Op& op, Declarations& p) {
  p.check_tokens("mamba2", {op.x, op.out});
  check_argument(op.groups >= 1 && op.together >= 1 && op.heads >= 1 &&
                     op.heads % (int64_t{op.groups} * op.together) == 0,
                 "mamba2: ", op.heads, " heads cannot form ", op.groups, " groups of units of ",
                 op.together, " heads");
  check_argument(op.key_width >= 1 && op.value_width >= 1, "mamba2: states of ", op.key_width,
                 " and ", op.value_width, " dimensions; both must be at least 1");
  const int64_t width = op.values() + int64_t{2} * op.groups * op.key_width;
  check_argument(p.f32_value(op.x, "mamba2 x").width == width, "mamba2: x has width ",
                 p.value(op.x).width, ", not ", width);
  check_argument(p.f32_value(op.out, "mamba2 out").width == op.values(),
                 "mamba2: out must have the width of all values, ", op.values());
  check_argument(op.x != op.out && op.steps != op.out, "mamba2: out must not be an input");
  const bool stepped = op.steps != kNone;
  check_argument(
      op.rates != kNone && (op.dt_bias != kNone) == stepped && (op.d != kNone) == stepped,
      "mamba2: a weight is missing");
  if (stepped) {
    p.check_tokens("mamba2", {op.steps});
    p.check_columns(op.steps, op.column, op.heads, "mamba2 steps");
  }
  p.check_vector(op.rates, op.heads, "mamba2 rates");
  p.check_vector(op.dt_bias, op.heads, "mamba2 dt_bias");
  p.check_vector(op.d, op.heads, "mamba2 d");
  check_argument(op.low >= 0.0f && op.low <= op.high, "mamba2: steps from ", op.low, " to ",
                 op.high, " are no range of positive numbers");
  op.state = p.add_state(op.layer());
}

namespace {

// The parts of the scratch memory for a state unit of a gated delta layer.
struct DeltaScratch {
  float *known, *qkv, *gates, *out, *decays;
  uint8_t* kernel;

  DeltaScratch(const GatedDeltaOp& op, Carver carver)
      : known(carver.take<float>((op.taps - 1) * op.channels())),
        qkv(carver.take<float>(kStateChunk * op.channels())),
        gates(carver.take<float>(2 * kStateChunk * op.shape().heads)),
        out(carver.take<float>(kStateChunk * op.shape().heads * op.value_width)),
        decays(carver.take<float>(op.bounded_floats())),
        kernel(carver.take<uint8_t>(static_cast<int64_t>(recurrent_scratch_bytes(op.shape())))) {}
};

// Copies q, k and v of a key head from the rows of x to the open rows `to` of its unit.
void copy_delta_inputs(const GatedDeltaOp& op, int64_t unit, const ChunkRows& r, float* to,
                       Worker& w) noexcept {
  const Rows& x = w.value(op.x);
  const int64_t d = op.key_width, width = op.value_width, keys = op.key_heads * d;
  for (int64_t i = 0; i < r.rows; i++, to += op.channels()) {
    const float* from = floats_of(x, r.t0 + i);
    std::copy_n(from + unit * d, d, to);
    std::copy_n(from + keys + unit * d, d, to + d);
    for (int64_t h = 0; h < op.shape().heads; h++) {
      std::copy_n(from + 2 * keys + op.value_head(unit, h) * width, width, to + 2 * d + h * width);
    }
  }
}

// Scales q and k in `qkv` to length 1, multiplies q by 1 / sqrt(key_width), and computes g
// and beta for each row and value head. If `by_row` is set, the kernel computes g from `gates`.
void make_delta_gates(const GatedDeltaOp& op, int64_t unit, const ChunkRows& r, float* qkv,
                      float* gates, Worker& w) noexcept {
  const int64_t d = op.key_width, heads = op.shape().heads, channels = op.channels();
  const float q_scale = 1.0f / std::sqrt(static_cast<float>(d));
  for (int64_t i = 0; i < r.rows; i++) {
    to_length(qkv + i * channels, d, q_scale);
    to_length(qkv + i * channels + d, d, 1.0f);
    const float* from = floats_of(w.value(op.gates), r.t0 + i);
    for (int64_t h = 0; h < heads; h++) {
      const int64_t head = op.value_head(unit, h);
      gates[(kStateChunk + i) * heads + h] = op.beta * sigmoid(from[head]);
      if (op.by_row) continue;
      const float step = softplus(from[op.value_heads + head] + w.vector(op.dt_bias)[head]);
      gates[i * heads + h] = w.vector(op.rates)[head] * step;
    }
  }
}

// Writes rms_norm(results of a unit) * silu(z), or * sigmoid(z), to the columns of its value heads.
void write_delta_rows(const GatedDeltaOp& op, int64_t unit, const ChunkRows& r, const float* out,
                      Worker& w) noexcept {
  const Rows &x = w.value(op.x), &to = w.value(op.out);
  const int64_t heads = op.shape().heads, width = op.value_width;
  GatedNormArgs norm{};
  norm.x_stride = heads * width;
  norm.z_stride = float_stride(x);
  norm.weight = w.vector(op.norm);
  norm.groups = op.tiled ? 1 : heads;  // number of value heads that are adjacent in z and out
  norm.width = width;
  norm.eps = op.eps;
  norm.shared_weight = true;
  norm.out_stride = float_stride(to);
  norm.rows = r.rows;
  norm.sigmoid = op.sigmoid;
  const int64_t z = 2 * op.key_heads * int64_t{op.key_width} + op.value_heads * width;
  for (int64_t h = 0; h < heads; h += norm.groups) {
    const int64_t head = op.value_head(unit, h);
    norm.x = out + h * width;
    norm.z = floats_of(x, r.t0) + z + head * width;
    norm.out = floats_of(to, r.t0) + head * width;
    w.kernels().gated_norm(norm);
  }
}

// Sets `args` so that the kernel computes the decays g = bound sigmoid(rate (a + bias)) of a unit.
// The kernel computes -softplus(x), so x = log(exp(-g) - 1) is written to `decays`,
// the rate in `args` becomes 1, and the biases become 0.
void set_bounded_decays(const GatedDeltaOp& op, int64_t rows, RecurrentArgs& args, float* decays,
                        const Worker& w) noexcept {
  const int64_t width = op.key_width;
  for (int64_t i = 0; i < rows; i++) {
    for (int64_t d = 0; d < width; d++) {
      const float x = args.g[i * args.g_stride + d] + args.bias[d];
      const float g = std::min(op.bound * sigmoid(args.rate * x), -1e-30f);
      decays[i * width + d] = std::log(std::expm1(-g));
    }
  }
  args.g = decays;
  args.g_stride = width;
  args.bias = w.states().empty();
  args.rate = 1.0f;
}

void delta_rows(const GatedDeltaOp& op, int64_t unit, const ChunkRows& r, Worker& w) noexcept {
  const RecurrentShape shape = op.shape();
  const int64_t d = op.key_width, heads = shape.heads, channels = op.channels();
  const int64_t kept = op.taps - 1;
  const int64_t state = heads * d * op.value_width;  // floats before the kept inputs
  const float* closed = closed_of(op, unit, r, w);
  float* closed_to = w.states().closed(op.state, unit, r.slot);
  float* open = w.states().open(op.state, unit, r.slot);
  float* inputs = open + recurrent_open_floats(shape);  // [kStateChunk][channels]
  float* own = inputs + r.num_open * channels;
  const DeltaScratch scratch(op, Carver(w.scratch));
  copy_delta_inputs(op, unit, r, own, w);
  copy_known(inputs, closed + state, r.num_open, kept, channels, scratch.known);
  w.kernels().short_conv({own, channels, scratch.known,
                          w.vector(op.conv) + unit * op.taps * channels, nullptr, true, op.taps,
                          channels, r.rows, scratch.qkv, channels});
  make_delta_gates(op, unit, r, scratch.qkv, scratch.gates, w);
  RecurrentArgs args{};
  args.shape = shape;
  args.closed = closed;
  args.closed_to = closed_to;
  args.open = open;
  args.num_open = r.num_open;
  args.rows = r.rows;
  args.q = scratch.qkv;
  args.k = scratch.qkv + d;
  args.v = scratch.qkv + 2 * d;
  args.q_stride = args.k_stride = args.v_stride = channels;
  args.g = scratch.gates;
  args.beta = scratch.gates + kStateChunk * heads;
  args.g_stride = args.beta_stride = heads;
  if (op.by_row) {
    const Rows& gates = w.value(op.gates);
    args.g = floats_of(gates, r.t0) + op.value_heads + unit * d;
    args.g_stride = float_stride(gates);
    args.bias = w.vector(op.dt_bias) + unit * d;
    args.rate = -w.vector(op.rates)[unit];
    if (op.bound < 0.0f) set_bounded_decays(op, r.rows, args, scratch.decays, w);
  }
  args.out = scratch.out;
  args.out_stride = heads * op.value_width;
  args.scratch = scratch.kernel;
  args.next = next_of(op, unit, r, w);
  w.kernels().recurrent(args);
  if (r.closes()) {
    std::copy_n(inputs + (kStateChunk - kept) * channels, kept * channels, closed_to + state);
  }
  write_delta_rows(op, unit, r, scratch.out, w);
}

}  // namespace

void run(const GatedDeltaOp& op, Worker& w) noexcept {
  each_unit(op, w, [&](int64_t unit, const ChunkRows& r) { delta_rows(op, unit, r, w); });
}

size_t scratch_bytes(const GatedDeltaOp& op) {
  const RecurrentShape s = op.shape();
  const int64_t row = op.channels() + 2 * s.heads + s.heads * int64_t{s.value_width};
  const int64_t floats = kStateChunk * row + (op.taps - 1) * op.channels() + op.bounded_floats();
  return static_cast<size_t>(floats) * sizeof(float) + recurrent_scratch_bytes(s) + kCarved;
}

namespace {

void conv_rows(const ShortConvOp& op, int64_t unit, const ChunkRows& r, Worker& w) noexcept {
  const int64_t channels = op.channels, first = unit * channels, kept = op.kept();
  float* inputs = w.states().open(op.state, unit, r.slot);
  float* known = Carver(w.scratch).take<float>(kept * channels);
  const float* tail = closed_of(op, unit, r, w);  // the inputs of tokens before the chunk
  const Rows &x = w.value(op.x), &out = w.value(op.out);
  for (int64_t i = 0; i < r.rows; i++) {
    const float* from = floats_of(x, r.t0 + i) + op.column + first;
    std::copy_n(from, channels, inputs + (r.num_open + i) * channels);
  }
  copy_known(inputs, tail, r.num_open, kept, channels, known);
  ShortConvArgs args{};
  args.weight = w.vector(op.weight) + first;
  args.weight_stride = out.width;
  args.bias = op.bias == kNone ? nullptr : w.vector(op.bias) + first;
  args.silu = op.silu;
  args.taps = op.taps;
  args.channels = channels;
  args.out_stride = op.dilation * float_stride(out);
  args.x_stride = args.before_stride = op.dilation * channels;
  // Input rows that are `dilation` rows apart are the neighbouring rows of one call of the kernel.
  for (int64_t i = 0; i < std::min<int64_t>(op.dilation, r.rows); i++) {
    args.x = inputs + (r.num_open + i) * channels;
    args.before = known + i * channels;
    args.rows = (r.rows - i + op.dilation - 1) / op.dilation;
    args.out = floats_of(out, r.t0 + i) + first;
    w.kernels().short_conv(args);
  }
  if (r.closes()) {
    std::copy_n(inputs + (kStateChunk - kept) * channels, kept * channels,
                w.states().closed(op.state, unit, r.slot));
  }
}

}  // namespace

void run(const ShortConvOp& op, Worker& w) noexcept {
  each_unit(op, w, [&](int64_t unit, const ChunkRows& r) { conv_rows(op, unit, r, w); });
}

size_t scratch_bytes(const ShortConvOp& op) {
  return static_cast<size_t>(op.kept() * op.channels) * sizeof(float) + kCarved;
}

namespace {

// Mamba2 in terms of RecurrentArgs:
// the arrays k, q and v are B, C and x of Mamba2, beta is the time step dt, and g is dt * A.
void mamba2_rows(const Mamba2Op& op, int64_t unit, const ChunkRows& r, Worker& w) noexcept {
  const RecurrentShape shape = op.shape();
  const int64_t heads = op.together, head0 = unit * heads, width = op.value_width;
  const int64_t group = head0 / (op.heads / op.groups);

  Carver carver(w.scratch);
  float* gates = carver.take<float>(2 * kStateChunk * heads);
  uint8_t* rest = carver.take<uint8_t>(static_cast<int64_t>(recurrent_scratch_bytes(shape)));
  for (int64_t i = 0; i < r.rows; i++) {
    if (op.steps == kNone) {
      std::copy_n(w.vector(op.rates) + head0, heads, gates + i * heads);
      std::fill_n(gates + (kStateChunk + i) * heads, heads, 1.0f);
      continue;
    }
    const float* from = floats_of(w.value(op.steps), r.t0 + i) + op.column + head0;
    for (int64_t h = 0; h < heads; h++) {
      const float raw = softplus(from[h] + w.vector(op.dt_bias)[head0 + h]);
      const float dt = std::min(std::max(raw, op.low), op.high);
      gates[i * heads + h] = w.vector(op.rates)[head0 + h] * dt;
      gates[(kStateChunk + i) * heads + h] = dt;
    }
  }
  const Rows &x = w.value(op.x), &out = w.value(op.out);
  const float* row = floats_of(x, r.t0);
  RecurrentArgs args{};
  args.shape = shape;
  set_chunk(args, op, unit, r, w);
  args.v = row + head0 * width;
  args.k = row + op.values() + group * op.key_width;
  args.q = args.k + op.groups * op.key_width;
  args.q_stride = args.k_stride = args.v_stride = float_stride(x);
  args.g = gates;
  args.beta = gates + kStateChunk * heads;
  args.g_stride = args.beta_stride = heads;
  args.out = floats_of(out, r.t0) + head0 * width;
  args.out_stride = float_stride(out);
  args.scratch = rest;
  args.next = next_of(op, unit, r, w);
  w.kernels().recurrent(args);
  if (op.d == kNone) return;
  for (int64_t i = 0; i < r.rows; i++) {
    const float* v = args.v + i * args.v_stride;
    float* to = args.out + i * args.out_stride;
    for (int64_t h = 0; h < heads; h++, v += width, to += width) {
      const float d = w.vector(op.d)[head0 + h];
      for (int64_t c = 0; c < width; c++) to[c] += d * v[c];
    }
  }
}

}  // namespace

void run(const Mamba2Op& op, Worker& w) noexcept {
  each_unit(op, w, [&](int64_t unit, const ChunkRows& r) { mamba2_rows(op, unit, r, w); });
}

size_t scratch_bytes(const Mamba2Op& op) {
  const int64_t floats = kStateChunk * 2 * int64_t{op.together};
  return static_cast<size_t>(floats) * sizeof(float) + recurrent_scratch_bytes(op.shape()) +
         kCarved;
}

void prepare(SelectiveScanOp& op, Declarations& p) {
  p.check_tokens("selective_scan", {op.x, op.steps, op.b, op.c, op.gates, op.out});
  const int64_t all = p.f32_value(op.out, "selective_scan out").width;
  check_argument(op.units >= 1 && all % op.units == 0, "selective_scan: ", all,
                 " channels cannot form ", op.units, " equal units");
  check_argument(op.width >= 1, "selective_scan: states of ", op.width,
                 " rows; there must be at least 1");
  for (const Id id : {op.x, op.steps}) {
    check_argument(p.f32_value(id, "selective_scan").width == all, "selective_scan: an input has ",
                   "width ", p.value(id).width, ", not ", all);
  }
  for (const Id id : {op.b, op.c}) {
    check_argument(p.f32_value(id, "selective_scan").width == op.width,
                   "selective_scan: b or c has width ", p.value(id).width, ", not ", op.width);
  }
  p.check_columns(op.gates, op.column, all, "selective_scan gates");
  for (const Id id : {op.x, op.steps, op.b, op.c, op.gates}) {
    check_argument(id != op.out, "selective_scan: out must not be an input");
  }
  check_argument(op.rates != kNone && op.d != kNone, "selective_scan: a weight is missing");
  p.check_vector(op.rates, op.width * all, "selective_scan rates");
  p.check_vector(op.d, all, "selective_scan d");
  op.channels = all / op.units;
  op.state = p.add_state(op.layer());
}

void run(const SelectiveScanOp& op, Worker& w) noexcept {
  each_unit(op, w, [&](int64_t unit, const ChunkRows& r) {
    const int64_t first = unit * op.channels;
    const Rows &x = w.value(op.x), &steps = w.value(op.steps), &gates = w.value(op.gates);
    const Rows &b = w.value(op.b), &c = w.value(op.c), &out = w.value(op.out);
    SelectiveScanArgs args{};
    args.channels = op.channels;
    args.width = op.width;
    set_chunk(args, op, unit, r, w);
    args.x = floats_of(x, r.t0) + first;
    args.steps = floats_of(steps, r.t0) + first;
    args.z = floats_of(gates, r.t0) + op.column + first;
    args.b = floats_of(b, r.t0);
    args.c = floats_of(c, r.t0);
    args.x_stride = float_stride(x);
    args.steps_stride = float_stride(steps);
    args.z_stride = float_stride(gates);
    args.b_stride = float_stride(b);
    args.c_stride = float_stride(c);
    args.rates = w.vector(op.rates) + first;
    args.rates_stride = out.width;
    args.d = w.vector(op.d) + first;
    args.out = floats_of(out, r.t0) + first;
    args.out_stride = float_stride(out);
    w.kernels().selective_scan(args);
  });
}

void prepare(NgramEmbedOp& op, Declarations& p) {
  p.check_tokens("ngram_embed", {op.out});
  const auto heads = static_cast<int64_t>(op.sizes.size()), orders = op.longest() - 1;
  check_argument(orders >= 1 && orders < kStateChunk && heads >= 1 && heads % orders == 0,
                 "ngram_embed: ", heads, " heads cannot form ", orders, " equal groups");
  check_argument(!op.matrices.empty(), "ngram_embed: there are no matrices");
  const Matrix& one = p.matrix(op.matrices[0]);
  int64_t rows = 0;
  for (const Id id : op.matrices) {
    const Matrix& m = p.matrix(id);
    const bool last = id == op.matrices.back();
    check_argument(m.k == one.k && m.kind == one.kind && m.gathered == one.gathered && !m.glu &&
                       (last ? m.n <= one.n : m.n == one.n),
                   "ngram_embed: matrices ", one.name, " and ", m.name, " differ in shape");
    rows += m.n;
  }
  check_argument(p.f32_value(op.out, "ngram_embed out").width == heads * one.k,
                 "ngram_embed: out has width ", p.value(op.out).width, ", not ", heads * one.k);
  for (const int64_t size : op.sizes) {
    check_argument(size >= 1 && size <= rows, "ngram_embed: a head cannot have ", size, " rows");
    op.first.push_back(op.first.empty() ? 0 : op.first.back() + op.sizes[op.first.size() - 1]);
  }
  check_argument(op.first.back() + op.sizes.back() <= rows, "ngram_embed: the heads need ",
                 op.first.back() + op.sizes.back(), " rows, but the matrices have ", rows);
  check_argument(op.end >= 0, "ngram_embed: ", op.end, " is no token id");
  op.state = p.add_state(op.layer());
}

namespace {

// Returns the number of the n-gram embedding of head `head` for the token at open[at]. Open rows
// store 1 + the token id, or 0 for a token before the sequence; `kept` has those before the chunk.
int64_t ngram_row(const NgramEmbedOp& op, int64_t head, const float* open, const float* kept,
                  int64_t at) noexcept {
  const int64_t orders = op.longest() - 1;
  const int64_t n = 2 + head / (static_cast<int64_t>(op.sizes.size()) / orders);
  uint64_t mixed = 0;
  bool ended = false;
  for (int64_t i = 0; i < n; i++) {
    const float stored = at >= i ? open[at - i] : kept[orders + at - i];
    const int64_t id = ended || stored == 0.0f ? op.end : static_cast<int64_t>(stored) - 1;
    ended = i > 0 && id == op.end;
    mixed ^=
        static_cast<uint64_t>(id) * static_cast<uint64_t>(op.multipliers[static_cast<size_t>(i)]);
  }
  const auto h = static_cast<size_t>(head);
  return op.first[h] + static_cast<int64_t>(mixed % static_cast<uint64_t>(op.sizes[h]));
}

void ngram_rows(const NgramEmbedOp& op, int64_t unit, const ChunkRows& r, Worker& w) noexcept {
  const int64_t kept = op.longest() - 1;
  float* open = w.states().open(op.state, unit, r.slot);
  const float* before = closed_of(op, unit, r, w);
  for (int64_t i = 0; i < r.rows; i++) {
    open[r.num_open + i] = static_cast<float>(w.input().token_ids[r.t0 + i] + 1);
  }
  const Matrix& one = w.matrix(op.matrices[0]);
  MatrixRow reads[kStateChunk];
  for (int64_t i = 0; i < r.rows; i++) {
    const int64_t row = ngram_row(op, unit, open, before, r.num_open + i);
    reads[i] = {op.matrices[static_cast<size_t>(row / one.n)], row % one.n,
                floats_of(w.value(op.out), r.t0 + i) + unit * one.k};
  }
  read_matrix_rows({reads, r.rows}, w);
  if (r.closes()) {
    std::copy_n(open + kStateChunk - kept, kept, w.states().closed(op.state, unit, r.slot));
  }
}

}  // namespace

void run(const NgramEmbedOp& op, Worker& w) noexcept {
  each_unit(op, w, [&](int64_t unit, const ChunkRows& r) { ngram_rows(op, unit, r, w); });
}

}  // namespace cpuserve
