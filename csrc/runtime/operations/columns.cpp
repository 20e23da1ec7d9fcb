// Sums, factors, gates and copies of columns of rows.
#include "runtime/operations/columns.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "runtime/operations/sums.h"
#include "runtime/worker.h"

namespace cpuserve {
namespace {

constexpr int64_t kPiece = 64;  // columns of each part that MixPartsOp mixes at a time

}  // namespace

void prepare(const GateOp& op, const Declarations& p) {
  p.check_tokens("gate", {op.x, op.out});
  const int64_t width = p.f32_value(op.out, "gate out").width;
  check_argument(op.columns >= 1 && width % op.columns == 0, "gate: out has width ", width,
                 ", which is no multiple of the ", op.columns, " columns of a gate");
  const int64_t gates = width / op.columns;
  check_argument(
      op.x != op.out && op.column >= 0 && op.column + gates <= p.f32_value(op.x, "gate x").width,
      "gate: x has width ", p.value(op.x).width, ", which does not hold ", gates,
      " gates from column ", op.column, " on");
}

void run(const GateOp& op, Worker& w) noexcept {
  const Rows &x = w.value(op.x), &out = w.value(op.out);
  const Range mine = w.share(w.tokens());
  for (int64_t t = mine.begin; t < mine.end; t++) {
    const float* gates = floats_of(x, t) + op.column;
    float* to = floats_of(out, t);
    if (op.columns > 1) {
      for (int64_t i = 0; i < out.width; i += op.columns, gates++) {
        const float gate = op.plain ? gates[0] : sigmoid(gates[0]);
        for (int64_t j = 0; j < op.columns; j++) to[i + j] *= gate;
      }
    } else if (op.plain) {
      for (int64_t i = 0; i < out.width; i++) to[i] *= gates[i];
    } else {
      for (int64_t i = 0; i < out.width; i++) to[i] *= sigmoid(gates[i]);
    }
  }
}

void prepare(const SoftGateOp& op, const Declarations& p) {
  p.check_tokens("soft_gate", {op.x, op.out});
  const int64_t gates = p.f32_value(op.x, "soft_gate x").width;
  const int64_t width = p.f32_value(op.out, "soft_gate out").width;
  check_argument(op.x != op.out && width % gates == 0, "soft_gate: ", width,
                 " columns are not equal parts for ", gates, " gates");
}

void run(const SoftGateOp& op, Worker& w) noexcept {
  const Rows &x = w.value(op.x), &out = w.value(op.out);
  const int64_t width = out.width / x.width;
  const Range mine = w.share(w.tokens());
  for (int64_t t = mine.begin; t < mine.end; t++) {
    const float* gates = floats_of(x, t);
    float* to = floats_of(out, t);
    for (int64_t g = 0; g < x.width; g++, to += width) {
      const float z = gates[g];
      const float factor = std::max(z, 0.0f) + std::log1p(std::exp(-std::fabs(z)));
      for (int64_t i = 0; i < width; i++) to[i] *= factor;
    }
  }
}

void prepare(const XieluOp& op, const Declarations& p) {
  p.check_tokens("xielu", {op.x});
  p.f32_value(op.x, "xielu x");
  check_argument(op.factors != kNone, "xielu: the factors are missing");
  p.check_vector(op.factors, 3, "xielu factors");
}

void run(const XieluOp& op, Worker& w) noexcept {
  const Rows& x = w.value(op.x);
  const float* factors = w.vector(op.factors);
  const float alpha_p = factors[0], alpha_n = factors[1], beta = factors[2];
  const Range mine = w.share(w.tokens());
  for (int64_t t = mine.begin; t < mine.end; t++) {
    float* row = floats_of(x, t);
    for (int64_t i = 0; i < x.width; i++) {
      const float v = row[i];
      row[i] = beta * v + (v > 0 ? alpha_p * v * v : alpha_n * (std::exp(v) - 1.0f - v));
    }
  }
}

void prepare(const LerpOp& op, const Declarations& p) {
  p.check_tokens("lerp", {op.x, op.to, op.out});
  const int64_t width = p.f32_value(op.out, "lerp out").width;
  check_argument((op.gates == kNone) != (op.weight == kNone),
                 "lerp: there must be either gates or a weight");
  for (const Id id : {op.x, op.to, op.gates}) {
    if (id == kNone) continue;
    p.check_tokens("lerp", {id});
    check_argument(p.f32_value(id, "lerp").width == width && id != op.out,
                   "lerp: an input has width ", p.value(id).width, ", not ", width, ", or is out");
  }
  p.check_vector(op.weight, width, "lerp weight");
}

void run(const LerpOp& op, Worker& w) noexcept {
  const Rows &x = w.value(op.x), &to = w.value(op.to), &out = w.value(op.out);
  const Range mine = w.share(w.tokens());
  for (int64_t t = mine.begin; t < mine.end; t++) {
    const float *from = floats_of(x, t), *towards = floats_of(to, t);
    float* y = floats_of(out, t);
    const bool fixed = op.weight != kNone;
    const float* gates = fixed ? w.vector(op.weight) : floats_of(w.value(op.gates), t);
    if (fixed || op.plain) {
      for (int64_t i = 0; i < out.width; i++) y[i] = from[i] + (towards[i] - from[i]) * gates[i];
      continue;
    }
    for (int64_t i = 0; i < out.width; i++) {
      y[i] = from[i] + (towards[i] - from[i]) * sigmoid(gates[i]);
    }
  }
}

void prepare(const AddOp& op, const Declarations& p) {
  p.check_tokens("add", {op.x, op.out});
  p.check_columns(op.out, op.column, p.f32_value(op.x, "add x").width, "add out");
}

void run(const AddOp& op, Worker& w) noexcept {
  const Range rows = w.share(w.tokens());
  Rows out = w.value(op.out);
  out.data = static_cast<float*>(out.data) + op.column;
  out.width = w.value(op.x).width;
  if (rows.size() > 0) w.kernels().add({w.value(op.x), out, rows.begin, rows.end});
}

void prepare(const ScaleOp& op, const Declarations& p) {
  p.check_rows("scale", {op.x});
  const int64_t width = p.f32_value(op.x, "scale x").width;
  check_argument(op.factor != kNone, "scale: the factor is missing");
  p.check_vector(op.factor, p.vector(op.factor).count == 1 ? 1 : width, "scale factor");
  p.check_vector(op.less, width, "scale less");
}

void run(const ScaleOp& op, Worker& w) noexcept {
  const Rows& x = w.value(op.x);
  const float *factors = w.vector(op.factor), *less = w.vector(op.less);
  const bool single = w.program().vectors()[static_cast<size_t>(op.factor)].count == 1;
  const Range rows = w.share(w.rows(op.x));
  for (int64_t r = rows.begin; r < rows.end; r++) {
    float* to = floats_of(x, r);
    for (int64_t i = 0; less && i < x.width; i++) to[i] -= less[i];
    for (int64_t i = 0; i < x.width; i++) to[i] *= factors[single ? 0 : i];
  }
}

void prepare(const ColumnsOp& op, const Declarations& p) {
  p.check_rows("columns", {op.x, op.out});
  int64_t width = p.f32_value(op.out, "columns out").width;
  if (op.more != kNone) {
    p.check_rows("columns", {op.x, op.more});
    width -= p.f32_value(op.more, "columns more").width;
  }
  check_argument(width >= 1, "columns: out has no columns for those of x");
  p.check_columns(op.x, op.column, width, "columns x");
  check_argument(op.x != op.out && op.more != op.out, "columns: out must not be an input");
}

void run(const ColumnsOp& op, Worker& w) noexcept {
  const Rows& out = w.value(op.out);
  const int64_t more = op.more == kNone ? 0 : w.value(op.more).width, own = out.width - more;
  const Range mine = w.share(w.rows(op.out));
  for (int64_t t = mine.begin; t < mine.end; t++) {
    float* to = floats_of(out, t);
    std::copy_n(floats_of(w.value(op.x), t) + op.column, own, to);
    if (more > 0) std::copy_n(floats_of(w.value(op.more), t), more, to + own);
  }
}

void prepare(const ClipOp& op, const Declarations& p) {
  const Id out = op.out == kNone ? op.x : op.out;
  p.check_rows("clip", {op.x, out});
  check_argument(p.f32_value(op.x, "clip x").width == p.value(out).width,
                 "clip: x and out differ in width");
  check_argument(op.x != op.out, "clip: out must not be an input");
  check_argument(op.bounds != kNone, "clip: the bounds are missing");
  p.check_vector(op.bounds, 2, "clip bounds");
}

void run(const ClipOp& op, Worker& w) noexcept {
  const Rows &x = w.value(op.x), &out = w.value(op.out == kNone ? op.x : op.out);
  const float *bounds = w.vector(op.bounds), low = bounds[0], high = bounds[1];
  const bool plain = out.format == ActFormat::f32;
  // The stride is 0, so that every row is the row in the scratch memory.
  const Rows one{w.scratch, 0, out.width, ActFormat::f32};
  const Range mine = w.share(w.rows(op.x));
  for (int64_t r = mine.begin; r < mine.end; r++) {
    const float* from = floats_of(x, r);
    float* to = plain ? floats_of(out, r) : reinterpret_cast<float*>(w.scratch);
    // A NaN stays one, because std::min and std::max return their first operand.
    for (int64_t i = 0; i < x.width; i++) to[i] = std::min(std::max(from[i], low), high);
    if (!plain) w.kernels().convert({one, out, r, r + 1});
  }
}

void prepare(const MixPartsOp& op, const Declarations& p) {
  p.check_tokens("mix_parts", {op.x, op.gates});
  const int64_t width = p.f32_value(op.x, "mix_parts x").width;
  check_argument(op.parts >= 1 && op.parts <= kMaxParts && width % op.parts == 0,
                 "mix_parts: ", width, " columns cannot form ", op.parts,
                 " equal parts, of at most ", kMaxParts);
  check_argument(op.active >= 0 && op.active < op.parts, "mix_parts: there is no part ", op.active);
  int64_t rows = op.parts;
  if (op.target == kNone) {
    rows *= op.parts;
  } else {
    p.check_tokens("mix_parts", {op.target});
    check_argument(p.f32_value(op.target, "mix_parts target").width == width / op.parts,
                   "mix_parts: the target has width ", p.value(op.target).width,
                   ", not that of a part, ", width / op.parts);
  }
  check_argument(op.x != op.gates && op.x != op.target, "mix_parts: x must not be another input");
  check_argument(op.weight != kNone, "mix_parts: the weight is missing");
  p.check_vector(op.weight, rows * p.f32_value(op.gates, "mix_parts gates").width,
                 "mix_parts weight");
}

void run(const MixPartsOp& op, Worker& w) noexcept {
  const Rows &x = w.value(op.x), &gates = w.value(op.gates);
  const int64_t parts = op.parts, width = x.width / parts, k = gates.width;
  const bool targeted = op.target != kNone;
  const int64_t count = targeted ? parts : parts * parts;
  const Range mine = w.share(w.tokens());
  for (int64_t t = mine.begin; t < mine.end; t++) {
    float* row = floats_of(x, t);
    const float *gate = floats_of(gates, t), *weight = w.vector(op.weight);
    float c[kMaxParts * kMaxParts] = {};
    for (int64_t j = 0; j < k; j++) {
      const float g = std::tanh(gate[j]);
      for (int64_t i = 0; i < count; i++) c[i] += weight[i * k + j] * g;
    }
    const float* target = targeted ? floats_of(w.value(op.target), t) : nullptr;
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

void prepare(const MatchRmsOp& op, const Declarations& p) {
  p.check_tokens("match_rms", {op.x, op.like});
  const int64_t width = p.f32_value(op.x, "match_rms x").width;
  check_argument(op.x != op.like && width % p.f32_value(op.like, "match_rms like").width == 0,
                 "match_rms: ", width, " columns are not parts of ", p.value(op.like).width);
  check_argument(op.floor > 0.0f, "match_rms: the floor must be positive, not ", op.floor);
}

void run(const MatchRmsOp& op, Worker& w) noexcept {
  const Rows &x = w.value(op.x), &like = w.value(op.like);
  const Range mine = w.share(w.tokens());
  for (int64_t t = mine.begin; t < mine.end; t++) {
    const float wanted = std::sqrt(mean_of(floats_of(like, t), like.width, square));
    for (int64_t at = 0; at < x.width; at += like.width) {
      float* part = floats_of(x, t) + at;
      const float own = std::sqrt(std::max(mean_of(part, like.width, square), op.floor));
      for (int64_t i = 0; i < like.width; i++) part[i] *= wanted / own;
    }
  }
}

void prepare(const KeepTopOp& op, const Declarations& p) {
  p.check_tokens("keep_top", {op.x});
  check_argument(op.width >= 1, "keep_top: there must be at least 1 column, not ", op.width);
  p.check_columns(op.x, 0, op.width, "keep_top x");
}

void run(const KeepTopOp& op, Worker& w) noexcept {
  const Range mine = w.share(w.tokens());
  for (int64_t t = mine.begin; t < mine.end; t++) {
    float* x = floats_of(w.value(op.x), t);
    const float mean = mean_of(x, op.width, [](float v) { return v; });
    const float variance = mean_of(x, op.width, [&](float v) { return square(v - mean); });
    const float cutoff = mean + std::sqrt(variance) * op.deviations;
    for (int64_t i = 0; i < op.width; i++) x[i] = std::max(x[i] - cutoff, 0.0f);
  }
}

void prepare(const LimitOp& op, const Declarations& p) {
  const int64_t width = p.f32_value(op.x, "limit x").width;
  check_argument(width % 2 == 0, "limit: ", width, " columns do not have equal halves");
  check_argument(op.limit > 0.0f && op.gates >= 0.0f, "limit: the limit must be positive, not ",
                 op.limit);
}

Accesses accesses(const LimitOp& op, const Declarations& p) {
  const Access rows = {op.x, p.value(op.x).copies};
  return {{rows}, {rows}};
}

void run(const LimitOp& op, Worker& w) noexcept {
  const Rows& x = w.value(op.x);
  const int64_t half = x.width / 2;
  const float most = op.gates > 0 ? op.gates : op.limit;
  const Range mine = w.share(w.rows(op.x));
  for (int64_t r = mine.begin; r < mine.end; r++) {
    float *gate = floats_of(x, r), *up = gate + half;
    // std::min and std::max keep a NaN: they return their first operand if a comparison is false.
    for (int64_t i = 0; i < half; i++) gate[i] = std::min(gate[i], most);
    for (int64_t i = 0; i < half; i++) up[i] = std::max(std::min(up[i], op.limit), -op.limit);
  }
}

}  // namespace cpuserve
