// Sums, factors, gates and copies of columns of rows.
#pragma once
#include "runtime/operations/operation.h"

namespace cpuserve {

constexpr int32_t kMaxParts = 8;  // of a row that MixPartsOp mixes

// Multiplies out by the sigmoid of x, from `column` on; `single`: of one gate; `plain`: by x
// itself.
struct GateOp {
  static constexpr const char* kName = "gate";
  Id x, out;
  int64_t column;
  bool single, plain;

  static constexpr auto fields() {
    return std::make_tuple(field("x", &GateOp::x), field("out", &GateOp::out),
                           field("column", &GateOp::column), field("single", &GateOp::single),
                           field("plain", &GateOp::plain));
  }
};
void prepare(const GateOp& op, const Program& p);
void run(const GateOp& op, Worker& w) noexcept;
inline Accesses accesses(const GateOp& op, const Program&) { return changes({own(op.x)}, op.out); }

// Adds x to columns of out from `column` on.
struct AddOp {
  static constexpr const char* kName = "add";
  Id x, out;
  int64_t column = 0;

  static constexpr auto fields() {
    return std::make_tuple(field("x", &AddOp::x), field("out", &AddOp::out),
                           optional("column", &AddOp::column));
  }
};
void prepare(const AddOp& op, const Program& p);
void run(const AddOp& op, Worker& w) noexcept;
inline Accesses accesses(const AddOp& op, const Program&) { return changes({own(op.x)}, op.out); }

// Multiplies x by the only number of a vector, or columns by one number each.
struct ScaleOp {
  static constexpr const char* kName = "scale";
  Id x, factor;

  static constexpr auto fields() {
    return std::make_tuple(field("x", &ScaleOp::x), field("factor", &ScaleOp::factor));
  }
};
void prepare(const ScaleOp& op, const Program& p);
void run(const ScaleOp& op, Worker& w) noexcept;
inline Accesses accesses(const ScaleOp& op, const Program&) { return changes({}, op.x); }

// out: columns of x from `column` on, then all of `more`, if it is a value.
struct ColumnsOp {
  static constexpr const char* kName = "columns";
  Id x, more, out;
  int64_t column;

  static constexpr auto fields() {
    return std::make_tuple(field("x", &ColumnsOp::x), field("more", &ColumnsOp::more),
                           field("out", &ColumnsOp::out), field("column", &ColumnsOp::column));
  }
};
void prepare(const ColumnsOp& op, const Program& p);
void run(const ColumnsOp& op, Worker& w) noexcept;
inline Accesses accesses(const ColumnsOp& op, const Program&) {
  return {with({own(op.x)}, op.more != kNone, own(op.more)), {own(op.out)}};
}

// x: `parts` equal parts of a row. The k gates of a token determine coefficients: rows of `weight`
// [parts * parts][k], or [parts][k] if `target` is a value, times their tanh. Without a target, a
// part grows by the sum of all parts, each times its coefficient, otherwise by 1 + its coefficient
// times (scale target - part `active`).
struct MixPartsOp {
  static constexpr const char* kName = "mix_parts";
  Id x, gates, target, weight;
  int32_t parts, active;
  float scale;

  static constexpr auto fields() {
    return std::make_tuple(field("x", &MixPartsOp::x), field("gates", &MixPartsOp::gates),
                           field("target", &MixPartsOp::target),
                           field("weight", &MixPartsOp::weight), field("parts", &MixPartsOp::parts),
                           field("active", &MixPartsOp::active),
                           field("scale", &MixPartsOp::scale));
  }
};
void prepare(const MixPartsOp& op, const Program& p);
void run(const MixPartsOp& op, Worker& w) noexcept;
inline Accesses accesses(const MixPartsOp& op, const Program&) {
  return changes(with({own(op.gates)}, op.target != kNone, own(op.target)), op.x);
}

// Parts of x get the root mean square of `like`; their own counts from floor.
struct MatchRmsOp {
  static constexpr const char* kName = "match_rms";
  Id x, like;
  float floor;

  static constexpr auto fields() {
    return std::make_tuple(field("x", &MatchRmsOp::x), field("like", &MatchRmsOp::like),
                           field("floor", &MatchRmsOp::floor));
  }
};
void prepare(const MatchRmsOp& op, const Program& p);
void run(const MatchRmsOp& op, Worker& w) noexcept;
inline Accesses accesses(const MatchRmsOp& op, const Program&) {
  return changes({own(op.like)}, op.x);
}

// The first `width` columns minus (mean + deviations standard deviations), or 0.
struct KeepTopOp {
  static constexpr const char* kName = "keep_top";
  Id x;
  int64_t width;
  float deviations;

  static constexpr auto fields() {
    return std::make_tuple(field("x", &KeepTopOp::x), field("width", &KeepTopOp::width),
                           field("deviations", &KeepTopOp::deviations));
  }
};
void prepare(const KeepTopOp& op, const Program& p);
void run(const KeepTopOp& op, Worker& w) noexcept;
inline Accesses accesses(const KeepTopOp& op, const Program&) { return changes({}, op.x); }

using ColumnOps = Family<GateOp, AddOp, ScaleOp, ColumnsOp, MixPartsOp, MatchRmsOp, KeepTopOp>;

}  // namespace cpuserve
