// Operations of hyper-connections.
#include "runtime/operations/streams.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "runtime/operations/sums.h"
#include "runtime/worker.h"

namespace cpuserve {
namespace {

constexpr int64_t kColumns = 64;     // columns of each stream that SpreadStreamsOp mixes at a time
constexpr float kLeastGate = 1e-6f;  // the minimum of |d| in GateStreamsOp

// Checks that x consists of streams as wide as the value `part`, and returns the number of streams.
int64_t check_streams(const char* op, Id x, Id part, const Declarations& p) {
  p.check_tokens(op, {x, part});
  const int64_t all = p.f32_value(x, op).width, width = p.f32_value(part, op).width;
  check_argument(all % width == 0 && all / width <= kMaxStreams, op, ": ", all,
                 " columns are not at most ", kMaxStreams, " streams of ", width);
  return all / width;
}

void check_weights(const char* op, Id weights, int64_t count, const Declarations& p) {
  p.check_tokens(op, {weights});
  check_argument(p.f32_value(weights, op).width >= count, op, ": value ", p.value(weights).name,
                 " has fewer than ", count, " weights");
}

// Divides n numbers, which are `step` floats apart in memory, by (their sum + `floor`).
void normalize(float* x, int64_t n, int64_t step, float floor) noexcept {
  float sum = floor;
  for (int64_t i = 0; i < n; i++) sum += x[i * step];
  for (int64_t i = 0; i < n; i++) x[i * step] /= sum;
}

// Replaces n numbers by their softmax and adds `floor` to each.
void soften(float* x, int64_t n, float floor) noexcept {
  const float most = *std::max_element(x, x + n);
  float sum = 0.0f;
  for (int64_t i = 0; i < n; i++) sum += x[i] = std::exp(x[i] - most);
  for (int64_t i = 0; i < n; i++) x[i] = x[i] / sum + floor;
}

}  // namespace

void prepare(const StreamWeightsOp& op, const Declarations& p) {
  p.check_tokens(op.kName, {op.x, op.weights});
  check_argument(op.streams >= 1 && op.streams <= kMaxStreams, "stream_weights: ", op.streams,
                 " streams are not between 1 and ", kMaxStreams);
  check_argument(op.parts >= 1 && op.parts <= 3, "stream_weights: ", op.parts,
                 " parts, not 1 to 3");
  const int64_t n = op.streams, count = op.columns();
  check_argument(p.f32_value(op.x, "stream_weights x").width % n == 0 && op.x != op.weights,
                 "stream_weights: x does not consist of ", n, " streams");
  check_argument(p.f32_value(op.weights, "stream_weights weights").width == count,
                 "stream_weights: value ", p.value(op.weights).name, " has width ",
                 p.value(op.weights).width, ", not ", count);
  check_argument(op.scales != kNone && op.base != kNone, "stream_weights: a vector is missing");
  p.check_vector(op.scales, op.parts, "stream_weights scales");
  p.check_vector(op.base, count, "stream_weights base");
  check_argument(op.rounds >= 1 && op.floor >= 0.0f,
                 "stream_weights: there must be at least 1 round, and no negative floor");
}

void run(const StreamWeightsOp& op, Worker& w) noexcept {
  const Rows &x = w.value(op.x), &weights = w.value(op.weights);
  const int64_t n = op.streams;
  const float *scales = w.vector(op.scales), *base = w.vector(op.base);
  const float more = op.parts < 3 ? op.floor : 0.0f;  // is added to weights of the output
  const Range mine = w.share(w.tokens());
  for (int64_t t = mine.begin; t < mine.end; t++) {
    const float rms = 1.0f / std::sqrt(mean_of(floats_of(x, t), x.width, square) + op.eps);
    float* to = floats_of(weights, t);
    for (int64_t i = 0; i < weights.width; i++) {
      const float z = to[i] * rms * scales[std::min<int64_t>(i / n, 2)] + base[i];
      to[i] = i < n ? sigmoid(z) + op.floor : i < 2 * n ? op.most * sigmoid(z) + more : z;
    }
    if (op.parts < 3) continue;
    float* mix = to + 2 * n;
    for (int64_t j = 0; j < n; j++) soften(mix + j * n, n, op.floor);
    for (int64_t i = 0; i < n; i++) normalize(mix + i, n, n, op.floor);
    for (int32_t round = 1; round < op.rounds; round++) {
      for (int64_t j = 0; j < n; j++) normalize(mix + j * n, n, 1, op.floor);
      for (int64_t i = 0; i < n; i++) normalize(mix + i, n, n, op.floor);
    }
  }
}

void prepare(const MergeStreamsOp& op, const Declarations& p) {
  const int64_t streams = check_streams(op.kName, op.x, op.out, p);
  check_argument(op.x != op.out && op.weights != op.out, "merge_streams: out must not be an input");
  if (op.weights != kNone) check_weights(op.kName, op.weights, streams, p);
}

void run(const MergeStreamsOp& op, Worker& w) noexcept {
  const Rows &x = w.value(op.x), &out = w.value(op.out);
  const Range mine = w.share(w.tokens());
  for (int64_t t = mine.begin; t < mine.end; t++) {
    const float *from = floats_of(x, t), *weights = nullptr;
    if (op.weights != kNone) weights = floats_of(w.value(op.weights), t);
    float* to = floats_of(out, t);
    for (int64_t i = 0; i < x.width / out.width; i++, from += out.width) {
      const float by = weights ? weights[i] * op.scale : op.scale;
      for (int64_t c = 0; c < out.width; c++) to[c] = (i ? to[c] : 0.0f) + by * from[c];
    }
  }
}

void prepare(const SpreadStreamsOp& op, const Declarations& p) {
  const int64_t n = check_streams(op.kName, op.x, op.y, p);
  check_argument(op.x != op.y && op.x != op.weights, "spread_streams: x must not be another input");
  check_weights(op.kName, op.weights, op.mixed ? n * (n + 2) : op.given ? 2 * n : n, p);
}

void run(const SpreadStreamsOp& op, Worker& w) noexcept {
  const Rows &x = w.value(op.x), &y = w.value(op.y);
  const int64_t width = y.width, n = x.width / width;
  const Range mine = w.share(w.tokens());
  for (int64_t t = mine.begin; t < mine.end; t++) {
    float* row = floats_of(x, t);
    const float *added = floats_of(y, t), *weights = floats_of(w.value(op.weights), t);
    if (!op.mixed) {
      for (int64_t i = 0; i < n; i++, row += width) {
        const float by = op.given ? weights[n + i] : 2.0f * sigmoid(weights[i]);
        for (int64_t c = 0; c < width; c++) row[c] += by * added[c];
      }
      continue;
    }
    const float *own = weights + n, *mix = weights + 2 * n;
    for (int64_t at = 0; at < width; at += kColumns) {
      const int64_t count = std::min(kColumns, width - at);
      float was[kMaxStreams][kColumns];
      for (int64_t j = 0; j < n; j++) std::copy_n(row + j * width + at, count, was[j]);
      for (int64_t i = 0; i < n; i++) {
        float* to = row + i * width + at;
        for (int64_t c = 0; c < count; c++) to[c] = own[i] * added[at + c];
        for (int64_t j = 0; j < n; j++) {
          for (int64_t c = 0; c < count; c++) to[c] += mix[j * n + i] * was[j][c];
        }
      }
    }
  }
}

void prepare(const GateStreamsOp& op, const Declarations& p) {
  check_streams(op.kName, op.out, op.values, p);
  p.check_tokens(op.kName, {op.keys, op.queries});
  const int64_t all = p.value(op.out).width;
  check_argument(p.f32_value(op.keys, "gate_streams keys").width == all &&
                     p.f32_value(op.queries, "gate_streams queries").width == all,
                 "gate_streams: keys and queries must have the width of out, ", all);
  check_argument(op.out != op.values && op.out != op.keys && op.out != op.queries,
                 "gate_streams: out must not be an input");
}

void run(const GateStreamsOp& op, Worker& w) noexcept {
  const Rows &values = w.value(op.values), &out = w.value(op.out);
  const int64_t width = values.width;
  const Range mine = w.share(w.tokens());
  for (int64_t t = mine.begin; t < mine.end; t++) {
    const float *key = floats_of(w.value(op.keys), t), *query = floats_of(w.value(op.queries), t);
    const float* value = floats_of(values, t);
    float* to = floats_of(out, t);
    for (int64_t at = 0; at < out.width; at += width) {
      const float d = sum_of(width, [&](int64_t i) { return key[at + i] * query[at + i]; }) /
                      std::sqrt(static_cast<float>(width));
      const float size = std::sqrt(std::max(std::fabs(d), kLeastGate));
      const float gate = sigmoid(d > 0.0f ? size : d < 0.0f ? -size : d);
      for (int64_t i = 0; i < width; i++) to[at + i] = gate * value[i];
    }
  }
}

}  // namespace cpuserve
