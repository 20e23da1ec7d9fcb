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

  static constexpr auto fields() {
    return std::make_tuple(field("x", &HeadLinearOp::x), field("out", &HeadLinearOp::out),
                           field("matrices", &HeadLinearOp::matrices),
                           field("step", &HeadLinearOp::step));
  }
};
void prepare(HeadLinearOp& op, const Program& p);
void run(const HeadLinearOp& op, Worker& w) noexcept;
inline Accesses accesses(const HeadLinearOp& op, const Program&) {
  return claimed({any(op.x)}, {any(op.out)});
}

struct LatentStoreOp {
  static constexpr const char* kName = "latent_store_kv";
  Id q, latent, kv, out, layer;
  int32_t q_heads, nope, rank, rotary;
  Id cos, sin, norm;
  float eps;
  bool interleaved;

  static constexpr auto fields() {
    return std::make_tuple(
        field("q", &LatentStoreOp::q), field("latent", &LatentStoreOp::latent),
        field("kv", &LatentStoreOp::kv), field("out", &LatentStoreOp::out),
        field("layer", &LatentStoreOp::layer), field("q_heads", &LatentStoreOp::q_heads),
        field("nope", &LatentStoreOp::nope), field("rank", &LatentStoreOp::rank),
        field("rotary", &LatentStoreOp::rotary), field("cos", &LatentStoreOp::cos),
        field("sin", &LatentStoreOp::sin), field("norm", &LatentStoreOp::norm),
        field("eps", &LatentStoreOp::eps), field("interleaved", &LatentStoreOp::interleaved));
  }
};
void prepare(const LatentStoreOp& op, Program& p);
void run(const LatentStoreOp& op, Worker& w) noexcept;
inline Accesses accesses(const LatentStoreOp& op, const Program&) {
  return {{own(op.q), own(op.latent), own(op.kv)}, {own(op.out), any(kCache)}};
}

using LatentOps = Family<HeadLinearOp, LatentStoreOp>;

}  // namespace cpuserve
