// Attention, and the operations around it.
#pragma once
#include "runtime/operations/operation.h"

namespace cpuserve {

// q: a separate value [T, q_heads * round_up(head_dim, 16)] for the rotated q. Rotates q and k in
// place first.
struct RopeStoreOp {
  static constexpr const char* kName = "rope_store_kv";
  Id qkv, q, layer;
  int32_t q_heads, rotary;
  Id cos, sin, q_norm, k_norm;
  float eps;
  bool stores = true;  // else there are only queries, and an earlier op stores keys and values

  static constexpr auto fields() {
    return std::make_tuple(field("qkv", &RopeStoreOp::qkv), field("q", &RopeStoreOp::q),
                           field("layer", &RopeStoreOp::layer),
                           field("q_heads", &RopeStoreOp::q_heads),
                           field("rotary", &RopeStoreOp::rotary), field("cos", &RopeStoreOp::cos),
                           field("sin", &RopeStoreOp::sin), field("q_norm", &RopeStoreOp::q_norm),
                           field("k_norm", &RopeStoreOp::k_norm), field("eps", &RopeStoreOp::eps),
                           optional("stores", &RopeStoreOp::stores));
  }
};
void prepare(const RopeStoreOp& op, Program& p);
void run(const RopeStoreOp& op, Worker& w) noexcept;
inline Accesses accesses(const RopeStoreOp& op, const Program&) {
  return {{own(op.qkv)}, {own(op.q), own(op.qkv), any(kCache)}};
}

struct AttentionOp {
  static constexpr const char* kName = "attention";
  Id q, out, layer;
  int32_t q_heads;
  float scale;
  int32_t window;
  float softcap;
  Id slopes, sinks;
  bool causal = true;

  static constexpr auto fields() {
    return std::make_tuple(
        field("q", &AttentionOp::q), field("out", &AttentionOp::out),
        field("layer", &AttentionOp::layer), field("q_heads", &AttentionOp::q_heads),
        field("scale", &AttentionOp::scale), field("window", &AttentionOp::window),
        field("softcap", &AttentionOp::softcap), field("slopes", &AttentionOp::slopes),
        field("sinks", &AttentionOp::sinks), optional("causal", &AttentionOp::causal));
  }
};
void prepare(const AttentionOp& op, const Program& p);
void run(const AttentionOp& op, Worker& w) noexcept;
inline Accesses accesses(const AttentionOp& op, const Program&) {
  return claimed({any(op.q), any(kCache)}, {any(op.out)});
}

// x: [query, gate] of each head, then more; out: queries, the rest, gates.
struct SplitGatesOp {
  static constexpr const char* kName = "split_gates";
  Id x, out;
  int32_t heads, head_dim;

  static constexpr auto fields() {
    return std::make_tuple(field("x", &SplitGatesOp::x), field("out", &SplitGatesOp::out),
                           field("heads", &SplitGatesOp::heads),
                           field("head_dim", &SplitGatesOp::head_dim));
  }
};
void prepare(const SplitGatesOp& op, const Program& p);
void run(const SplitGatesOp& op, Worker& w) noexcept;
inline Accesses accesses(const SplitGatesOp& op, const Program&) {
  return {{own(op.x)}, {own(op.out)}};
}

// Checks the tables of a rotation of `rotary` columns. Their rows limit the positions of a step.
void check_rope(Program& p, const char* op, int32_t rotary, Id cos, Id sin);

using AttentionOps = Family<RopeStoreOp, AttentionOp, SplitGatesOp>;

}  // namespace cpuserve
