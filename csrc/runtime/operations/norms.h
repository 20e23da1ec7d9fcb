// Norms of rows, and their products with Hadamard matrices.
#pragma once
#include "runtime/operations/operation.h"

namespace cpuserve {

// Computes the RMS norm of each row. With `groups`, a row has that many equal parts,
// and the mean square of each part is computed from its own columns.
struct RmsNormOp {
  static constexpr const char* kName = "rms_norm";
  Id x, out, weight;
  float eps;
  int32_t groups = 1;
  CPUSERVE_FIELDS_WITH_DEFAULTS(1, x, out, weight, eps, groups)
};
void prepare(const RmsNormOp& op, const Declarations& p);
void run(const RmsNormOp& op, Worker& w) noexcept;
inline Accesses accesses(const RmsNormOp& op, const Declarations&) {
  return {{own(op.x)}, {own(op.out)}};
}

struct LayerNormOp {
  static constexpr const char* kName = "layer_norm";
  Id x, out, weight, bias;
  float eps;
  CPUSERVE_FIELDS(x, out, weight, bias, eps)
};
void prepare(const LayerNormOp& op, const Declarations& p);
void run(const LayerNormOp& op, Worker& w) noexcept;
inline Accesses accesses(const LayerNormOp& op, const Declarations&) {
  return {{own(op.x)}, {own(op.out)}};
}

// Applies RMS norm, in place, to `parts` consecutive parts of the columns of x from `column` on.
// A part is as wide as `weight`, and its mean square is computed from its own columns only.
struct PartNormOp {
  static constexpr const char* kName = "part_norm";
  Id x, weight;
  int64_t column;
  int32_t parts;
  float eps;
  CPUSERVE_FIELDS(x, weight, column, parts, eps)
};
void prepare(const PartNormOp& op, const Declarations& p);
void run(const PartNormOp& op, Worker& w) noexcept;
inline Accesses accesses(const PartNormOp& op, const Declarations&) { return changes({}, op.x); }

// Applies layer norm, in place, to `parts` equal parts of the columns of x from `column` on.
// `weight` and `bias` (if it is not kNone) have the columns of all parts, one after another.
struct PartLayerNormOp {
  static constexpr const char* kName = "part_layer_norm";
  Id x, weight, bias;
  int64_t column;
  int32_t parts;
  float eps;
  CPUSERVE_FIELDS(x, weight, bias, column, parts, eps)
};
void prepare(const PartLayerNormOp& op, const Declarations& p);
void run(const PartLayerNormOp& op, Worker& w) noexcept;
inline Accesses accesses(const PartLayerNormOp& op, const Declarations&) {
  return changes({}, op.x);
}

// Computes the RMS norm of x * silu(z); the gates z begin at column `column` of the value z.
// A row has `groups` equal parts, and the mean square of each part is computed separately.
struct GatedNormOp {
  static constexpr const char* kName = "gated_norm";
  Id x, z, out, weight;
  int32_t groups;
  int64_t column;
  float eps;
  CPUSERVE_FIELDS(x, z, out, weight, groups, column, eps)
};
void prepare(const GatedNormOp& op, const Declarations& p);
void run(const GatedNormOp& op, Worker& w) noexcept;
inline Accesses accesses(const GatedNormOp& op, const Declarations&) {
  return {{own(op.x), own(op.z)}, {own(op.out)}};
}

// Multiplies each block of `block` columns by a Hadamard matrix H, and columns by signs:
// out = H (signs * x), or with `inverse` signs * (H x). Before, heads of `head` columns may move
// (kernels/generic/hadamard_rows.h).
struct HadamardOp {
  static constexpr const char* kName = "hadamard";
  Id x, out, signs;
  int32_t block;
  bool inverse;
  int64_t head, key_heads;
  CPUSERVE_FIELDS(x, out, signs, block, inverse, head, key_heads)
};
void prepare(const HadamardOp& op, const Declarations& p);
void run(const HadamardOp& op, Worker& w) noexcept;
inline Accesses accesses(const HadamardOp& op, const Declarations&) {
  return {{own(op.x)}, {own(op.out)}};
}

using NormOps =
    Family<RmsNormOp, LayerNormOp, PartNormOp, PartLayerNormOp, GatedNormOp, HadamardOp>;

}  // namespace cpuserve
