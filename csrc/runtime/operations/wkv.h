// Recurrent layers with a decay for each row of a state, which follows from the token.
#pragma once
#include "runtime/operations/recurrent.h"

namespace cpuserve {

// The generalized delta rule between projections (Wkv7Args in kernels/table/recurrent.h).
// r, decay, key and rate have a column for each key element of all heads; v and out, for values.
// The vectors k_k, k_a and r_k are [heads * key_width]. norm and norm_bias, of a layer norm
// of each head, are [heads * value_width], or kNone. A unit of the state is a head.
struct Wkv7Op {
  static constexpr const char* kName = "wkv7";
  Id r, decay, key, v, rate, out;
  int32_t heads, key_width, value_width;
  Id k_k, k_a, r_k, norm, norm_bias;
  float eps;
  Id state = kNone;
  CPUSERVE_FIELDS(r, decay, key, v, rate, out, heads, key_width, value_width, k_k, k_a, r_k, norm,
                  norm_bias, eps)

  StateLayer layer() const {
    return {heads, int64_t{key_width} * value_width, wkv7_open_floats(key_width, value_width)};
  }
};
void prepare(Wkv7Op& op, Declarations& p);
void run(const Wkv7Op& op, Worker& w) noexcept;
inline Accesses accesses(const Wkv7Op& op, const Declarations&) {
  return claimed({any(op.r), any(op.decay), any(op.key), any(op.v), any(op.rate)}, {any(op.out)});
}
size_t scratch_bytes(const Wkv7Op& op);

// A layer with decays of tokens between its projections (Wkv6Args in kernels/table/recurrent.h).
// r and decay have a column for each key element of all heads, out for each value element.
// key and v have the columns of kv_heads heads, and equal numbers of heads read one of them.
// The vector bonus is [heads * key_width], or kNone. norm and norm_bias, of a layer norm of each
// head, are [heads * value_width], or kNone. A unit of the state is a head.
struct Wkv6Op {
  static constexpr const char* kName = "wkv6";
  Id r, decay, key, v, out;
  int32_t heads, kv_heads, key_width, value_width;
  Id bonus, norm, norm_bias;
  float eps, scale;
  Id state = kNone;
  CPUSERVE_FIELDS(r, decay, key, v, out, heads, kv_heads, key_width, value_width, bonus, norm,
                  norm_bias, eps, scale)

  StateLayer layer() const {
    return {heads, int64_t{key_width} * value_width, wkv6_open_floats(key_width, value_width)};
  }
};
void prepare(Wkv6Op& op, Declarations& p);
void run(const Wkv6Op& op, Worker& w) noexcept;
inline Accesses accesses(const Wkv6Op& op, const Declarations&) {
  return claimed({any(op.r), any(op.decay), any(op.key), any(op.v)}, {any(op.out)});
}
size_t scratch_bytes(const Wkv6Op& op);

using WkvOps = Family<Wkv6Op, Wkv7Op>;

}  // namespace cpuserve
