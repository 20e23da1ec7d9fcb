// Sums, factors, gates and copies of columns of rows.
#pragma once
#include "runtime/operations/operation.h"

namespace cpuserve {

constexpr int32_t kMaxParts = 8;  // the most parts of a row that MixPartsOp can mix

// Multiplies the columns of out by sigmoid(gate).
// The gates are columns of x from `column` on, and each gate multiplies `columns` columns of out.
// If `plain` is true, the factor is the gate itself instead of its sigmoid.
struct GateOp {
  static constexpr const char* kName = "gate";
  Id x, out;
  int64_t column, columns;
  bool plain;
  CPUSERVE_FIELDS(x, out, column, columns, plain)
};
void prepare(const GateOp& op, const Declarations& p);
void run(const GateOp& op, Worker& w) noexcept;
inline Accesses accesses(const GateOp& op, const Declarations&) {
  return changes({own(op.x)}, op.out);
}

// Multiplies equal parts of the columns of out by softplus(gate).
// Each column of x is the gate of one part.
struct SoftGateOp {
  static constexpr const char* kName = "soft_gate";
  Id x, out;
  CPUSERVE_FIELDS(x, out)
};
void prepare(const SoftGateOp& op, const Declarations& p);
void run(const SoftGateOp& op, Worker& w) noexcept;
inline Accesses accesses(const SoftGateOp& op, const Declarations&) {
  return changes({own(op.x)}, op.out);
}

// The activation xIELU (Apertus), with alpha_p, alpha_n and beta in the vector `factors`:
// beta * x + alpha_p * x^2 for positive x, else beta * x + alpha_n * (exp(x) - 1 - x).
struct XieluOp {
  static constexpr const char* kName = "xielu";
  Id x, factors;
  CPUSERVE_FIELDS(x, factors)
};
void prepare(const XieluOp& op, const Declarations& p);
void run(const XieluOp& op, Worker& w) noexcept;
inline Accesses accesses(const XieluOp& op, const Declarations&) { return changes({}, op.x); }

// out = x + (to - x) * s, where s is the vector `weight`, or sigmoid(gates) without one.
// If `plain` is true, s is `gates` itself instead of its sigmoid.
struct LerpOp {
  static constexpr const char* kName = "lerp";
  Id x, to, gates, weight, out;
  bool plain = false;
  CPUSERVE_FIELDS_WITH_DEFAULTS(1, x, to, gates, weight, out, plain)
};
void prepare(const LerpOp& op, const Declarations& p);
void run(const LerpOp& op, Worker& w) noexcept;
inline Accesses accesses(const LerpOp& op, const Declarations&) {
  return {with({own(op.x), own(op.to)}, op.gates != kNone, own(op.gates)), {own(op.out)}};
}

// Adds x to the columns of out from `column` on.
struct AddOp {
  static constexpr const char* kName = "add";
  Id x, out;
  int64_t column = 0;
  CPUSERVE_FIELDS_WITH_DEFAULTS(1, x, out, column)
};
void prepare(const AddOp& op, const Declarations& p);
void run(const AddOp& op, Worker& w) noexcept;
inline Accesses accesses(const AddOp& op, const Declarations&) {
  return changes({own(op.x)}, op.out);
}

// Multiplies x by the vector `factor`, which has one element for all columns,
// or one for each column. The vector `less`, if it is set, is first subtracted from each row.
struct ScaleOp {
  static constexpr const char* kName = "scale";
  Id x, factor;
  Id less = kNone;
  CPUSERVE_FIELDS_WITH_DEFAULTS(1, x, factor, less)
};
void prepare(const ScaleOp& op, const Declarations& p);
void run(const ScaleOp& op, Worker& w) noexcept;
inline Accesses accesses(const ScaleOp& op, const Declarations&) { return changes({}, op.x); }

// Copies columns of x, from `column` on, to the first columns of out.
// If the id `more` is not kNone, the columns of that value follow them in out.
struct ColumnsOp {
  static constexpr const char* kName = "columns";
  Id x, more, out;
  int64_t column;
  CPUSERVE_FIELDS(x, more, out, column)
};
void prepare(const ColumnsOp& op, const Declarations& p);
void run(const ColumnsOp& op, Worker& w) noexcept;
inline Accesses accesses(const ColumnsOp& op, const Declarations&) {
  return {with({own(op.x)}, op.more != kNone, own(op.more)), {own(op.out)}};
}

// Writes x to out with every value limited to [bounds[0], bounds[1]], where `bounds` is a vector.
// If out is kNone, the values of x itself are limited.
struct ClipOp {
  static constexpr const char* kName = "clip";
  Id x, bounds, out;
  CPUSERVE_FIELDS(x, bounds, out)
};
void prepare(const ClipOp& op, const Declarations& p);
void run(const ClipOp& op, Worker& w) noexcept;
inline Accesses accesses(const ClipOp& op, const Declarations&) {
  return {{own(op.x)}, {own(op.out == kNone ? op.x : op.out)}};
}

// Mixes the `parts` equal parts of each row of x (AltUp of Gemma 3n).
// The coefficients of a token are c = weight . tanh(gates), where a row of `gates` has k columns.
//   without a target: weight [parts * parts][k]; part p += sum over q of c[p * parts + q] * part q
//   with a target:    weight [parts][k]; part p += (1 + c[p]) * (scale * target - part `active`)
// The right-hand sides use the values that the parts had before the operation.
struct MixPartsOp {
  static constexpr const char* kName = "mix_parts";
  Id x, gates, target, weight;
  int32_t parts, active;
  float scale;
  CPUSERVE_FIELDS(x, gates, target, weight, parts, active, scale)
};
void prepare(const MixPartsOp& op, const Declarations& p);
void run(const MixPartsOp& op, Worker& w) noexcept;
inline Accesses accesses(const MixPartsOp& op, const Declarations&) {
  return changes(with({own(op.gates)}, op.target != kNone, own(op.target)), op.x);
}

// Scales each part of x, which is as wide as `like`,
// so that its root mean square becomes equal to the root mean square of `like`.
// If the mean square of a part is less than `floor`, the scale is computed with `floor` instead.
struct MatchRmsOp {
  static constexpr const char* kName = "match_rms";
  Id x, like;
  float floor;
  CPUSERVE_FIELDS(x, like, floor)
};
void prepare(const MatchRmsOp& op, const Declarations& p);
void run(const MatchRmsOp& op, Worker& w) noexcept;
inline Accesses accesses(const MatchRmsOp& op, const Declarations&) {
  return changes({own(op.like)}, op.x);
}

// Replaces each value v in the first `width` columns of a row by max(0, v - cutoff),
// where cutoff is the mean of these columns plus `deviations` times their standard deviation.
struct KeepTopOp {
  static constexpr const char* kName = "keep_top";
  Id x;
  int64_t width;
  float deviations;
  CPUSERVE_FIELDS(x, width, deviations)
};
void prepare(const KeepTopOp& op, const Declarations& p);
void run(const KeepTopOp& op, Worker& w) noexcept;
inline Accesses accesses(const KeepTopOp& op, const Declarations&) { return changes({}, op.x); }

// Limits the columns of x, which may have several rows for each token (GLM-5.3). The first half,
// the gates, is limited to at most `gates` (0: `limit`); the second half, `up`, to [-limit, limit].
struct LimitOp {
  static constexpr const char* kName = "limit";
  Id x;
  float limit, gates = 0;
  CPUSERVE_FIELDS_WITH_DEFAULTS(1, x, limit, gates)
};
void prepare(const LimitOp& op, const Declarations& p);
void run(const LimitOp& op, Worker& w) noexcept;
Accesses accesses(const LimitOp& op, const Declarations& p);

using ColumnOps = Family<GateOp, LerpOp, SoftGateOp, XieluOp, AddOp, ScaleOp, ColumnsOp, ClipOp,
                         MixPartsOp, MatchRmsOp, KeepTopOp, LimitOp>;

}  // namespace cpuserve
