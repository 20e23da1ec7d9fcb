// The operations of rows in parts (AltUp), and of rows by their means.
#include <algorithm>
#include <cmath>

#include "runtime/worker.h"

namespace cpuserve {
namespace {

constexpr int kSums = 16;       // partial sums of a row: the compiler keeps them in vectors
constexpr int64_t kPiece = 64;  // columns of all parts that are mixed at once

// The mean of f(x[i]) over i, in an order that depends on n alone.
template <class F>
float mean_of(const float* x, int64_t n, const F& f) noexcept {
  float sums[kSums] = {};
  int64_t i = 0;
  for (; i + kSums <= n; i += kSums) {
    for (int j = 0; j < kSums; j++) sums[j] += f(x[i + j]);
  }
  for (int j = 0; i < n; i++, j++) sums[j] += f(x[i]);
  float sum = 0.0f;
  for (const float s : sums) sum += s;
  return sum / static_cast<float>(n);
}

float square(float x) noexcept { return x * x; }

}  // namespace

void Executor::Worker::operator()(const ColumnsOp& op) noexcept {
  const Rows& out = value(op.out);
  const int64_t more = op.more == kNone ? 0 : value(op.more).width, own = out.width - more;
  const Range mine = share(tokens());
  for (int64_t t = mine.begin; t < mine.end; t++) {
    float* to = floats_of(out, t);
    std::copy_n(floats_of(value(op.x), t) + op.column, own, to);
    if (more > 0) std::copy_n(floats_of(value(op.more), t), more, to + own);
  }
}

void Executor::Worker::operator()(const MixPartsOp& op) noexcept {
  const Rows &x = value(op.x), &gates = value(op.gates);
  const int64_t parts = op.parts, width = x.width / parts, k = gates.width;
  const bool targeted = op.target != kNone;
  const int64_t count = targeted ? parts : parts * parts;
  const Range mine = share(tokens());
  for (int64_t t = mine.begin; t < mine.end; t++) {
    float* row = floats_of(x, t);
    const float *gate = floats_of(gates, t), *weight = vector(op.weight);
    float c[kMaxParts * kMaxParts] = {};
    for (int64_t j = 0; j < k; j++) {
      const float g = std::tanh(gate[j]);
      for (int64_t i = 0; i < count; i++) c[i] += weight[i * k + j] * g;
    }
    const float* target = targeted ? floats_of(value(op.target), t) : nullptr;
    for (int64_t at = 0; at < width; at += kPiece) {
      const int64_t n = std::min(kPiece, width - at);
      float was[kMaxParts][kPiece];
      for (int64_t p = 0; p < parts; p++) std::copy_n(row + p * width + at, n, was[p]);
      if (targeted) {
        float* change = was[op.active];
        for (int64_t i = 0; i < n; i++) change[i] = op.scale * target[at + i] - change[i];
      }
      for (int64_t p = 0; p < parts; p++) {
        float* to = row + p * width + at;
        const int64_t first = targeted ? op.active : 0, last = targeted ? first + 1 : parts;
        for (int64_t q = first; q < last; q++) {
          const float by = targeted ? 1.0f + c[p] : c[p * parts + q];
          for (int64_t i = 0; i < n; i++) to[i] += by * was[q][i];
        }
      }
    }
  }
}

void Executor::Worker::operator()(const MatchRmsOp& op) noexcept {
  const Rows &x = value(op.x), &like = value(op.like);
  const Range mine = share(tokens());
  for (int64_t t = mine.begin; t < mine.end; t++) {
    const float wanted = std::sqrt(mean_of(floats_of(like, t), like.width, square));
    for (int64_t at = 0; at < x.width; at += like.width) {
      float* part = floats_of(x, t) + at;
      const float own = std::sqrt(std::max(mean_of(part, like.width, square), op.floor));
      for (int64_t i = 0; i < like.width; i++) part[i] *= wanted / own;
    }
  }
}

void Executor::Worker::operator()(const KeepTopOp& op) noexcept {
  const Range mine = share(tokens());
  for (int64_t t = mine.begin; t < mine.end; t++) {
    float* x = floats_of(value(op.x), t);
    const float mean = mean_of(x, op.width, [](float v) { return v; });
    const float variance = mean_of(x, op.width, [&](float v) { return square(v - mean); });
    const float cutoff = mean + std::sqrt(variance) * op.deviations;
    for (int64_t i = 0; i < op.width; i++) x[i] = std::max(x[i] - cutoff, 0.0f);
  }
}

}  // namespace cpuserve
