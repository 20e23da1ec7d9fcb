// The operations that write the results of a step: logits and samples, or rows of hidden states.
#pragma once
#include "runtime/operations/operation.h"

namespace cpuserve {

struct LogitsOp {
  static constexpr const char* kName = "logits";
  Id x, matrix, bias;
  float scale, softcap;
  Id kept = kNone;  // the value that Executor::read_hidden reads instead of x
  CPUSERVE_FIELDS_WITH_DEFAULTS(1, x, matrix, bias, scale, softcap, kept)
};
void prepare(const LogitsOp& op, Declarations& p);
void run(const LogitsOp& op, Worker& w) noexcept;
inline Accesses accesses(const LogitsOp& op, const Declarations&) {
  if (op.kept == kNone) return claimed({any(op.x)}, {});
  return claimed({any(op.x), any(op.kept)}, {});
}

// Copies the rows of x that the step asks for, as the vectors of an embedding model.
struct HiddenOp {
  static constexpr const char* kName = "hidden";
  Id x;
  CPUSERVE_FIELDS(x)
};
void prepare(const HiddenOp& op, Declarations& p);
void run(const HiddenOp& op, Worker& w) noexcept;
inline Accesses accesses(const HiddenOp& op, const Declarations&) { return {{any(op.x)}, {}}; }

using ResultOps = Family<LogitsOp, HiddenOp>;

}  // namespace cpuserve
