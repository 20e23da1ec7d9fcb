// The operations of latent attention (MLA).
#pragma once
#include "runtime/operations/operation.h"

namespace cpuserve {

// Multiplies columns of x by one matrix for each head. The `matrices` have consecutive ids,
// equal shape [n, k] and one weight kind. Head h multiplies columns [h * step, h * step + k)
// of x by matrix `first` + h, and writes columns [h * n, (h + 1) * n) of out.
struct HeadLinearOp {
  static constexpr const char* kName = "head_linear";
  Id x, out;
  std::vector<Id> matrices;
  int64_t step;
  int32_t heads = 0;
  Id first = kNone;  // the matrix of head 0
  CPUSERVE_FIELDS(x, out, matrices, step)
};
void prepare(HeadLinearOp& op, const Declarations& p);
void run(const HeadLinearOp& op, Worker& w) noexcept;
inline Accesses accesses(const HeadLinearOp& op, const Declarations&) {
  return claimed({any(op.x)}, {any(op.out)});
}

struct LatentStoreOp {
  static constexpr const char* kName = "latent_store_kv";
  Id q, latent, kv, out, layer;
  int32_t q_heads, nope, rank, rotary;
  Id cos, sin, norm;
  float eps;
  bool interleaved;
  CPUSERVE_FIELDS(q, latent, kv, out, layer, q_heads, nope, rank, rotary, cos, sin, norm, eps,
                  interleaved)
};
void prepare(const LatentStoreOp& op, Declarations& p);
void run(const LatentStoreOp& op, Worker& w) noexcept;
inline Accesses accesses(const LatentStoreOp& op, const Declarations&) {
  return {{own(op.q), own(op.latent), own(op.kv)}, {own(op.out), any(kCache)}};
}

using LatentOps = Family<HeadLinearOp, LatentStoreOp>;

}  // namespace cpuserve
