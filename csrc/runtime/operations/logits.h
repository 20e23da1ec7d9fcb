// The operations that write the results of a step: logits and samples, or rows of hidden states.
#pragma once
#include "runtime/operations/operation.h"

namespace cpuserve {

struct LogitsOp {
  static constexpr const char* kName = "logits";
  Id x, matrix, bias;
  float scale, softcap;

  static constexpr auto fields() {
    return std::make_tuple(field("x", &LogitsOp::x), field("matrix", &LogitsOp::matrix),
                           field("bias", &LogitsOp::bias), field("scale", &LogitsOp::scale),
                           field("softcap", &LogitsOp::softcap));
  }
};
void prepare(const LogitsOp& op, Program& p);
void run(const LogitsOp& op, Worker& w) noexcept;
inline Accesses accesses(const LogitsOp& op, const Program&) { return claimed({any(op.x)}, {}); }

// Copies the rows of x that the step asks for, as the vectors of an embedding model.
struct HiddenOp {
  static constexpr const char* kName = "hidden";
  Id x;

  static constexpr auto fields() { return std::make_tuple(field("x", &HiddenOp::x)); }
};
void prepare(const HiddenOp& op, Program& p);
void run(const HiddenOp& op, Worker& w) noexcept;
inline Accesses accesses(const HiddenOp& op, const Program&) { return {{any(op.x)}, {}}; }

using ResultOps = Family<LogitsOp, HiddenOp>;

}  // namespace cpuserve
