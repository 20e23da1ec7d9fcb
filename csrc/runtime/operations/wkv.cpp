// The recurrent layers of RWKV.
#include "runtime/operations/wkv.h"

#include "base/check.h"
#include "runtime/operations/state_units.h"

namespace cpuserve {

void prepare(Wkv7Op& op, Program& p) {
  p.check_tokens("wkv7", {op.r, op.decay, op.key, op.v, op.rate, op.out});
  check_argument(op.heads >= 1 && op.key_width >= 1 && op.value_width >= 1, "wkv7: ", op.heads,
                 " heads of ", op.key_width, " and ", op.value_width,
                 " dimensions; all three must be at least 1");
  const int64_t keys = int64_t{op.heads} * op.key_width;
  const int64_t values = int64_t{op.heads} * op.value_width;
  for (const Id id : {op.r, op.decay, op.key, op.rate}) {
    check_argument(p.f32_value(id, "wkv7").width == keys && id != op.out,
                   "wkv7: an input has width ", p.value(id).width, ", not ", keys, ", or is out");
  }
  check_argument(p.f32_value(op.v, "wkv7 v").width == values &&
                     p.f32_value(op.out, "wkv7 out").width == values && op.v != op.out,
                 "wkv7: v and out must be two values of width ", values);
  check_argument(op.k_k != kNone && op.k_a != kNone && op.r_k != kNone,
                 "wkv7: a weight is missing");
  check_argument((op.norm == kNone) == (op.norm_bias == kNone),
                 "wkv7: the norm needs a weight and a bias");
  for (const Id id : {op.k_k, op.k_a, op.r_k}) p.check_vector(id, keys, "wkv7 weight");
  for (const Id id : {op.norm, op.norm_bias}) p.check_vector(id, values, "wkv7 norm");
  op.state = p.add_state(op.layer());
}

void run(const Wkv7Op& op, Worker& w) noexcept {
  each_unit(op, w, [&](int64_t unit, const ChunkRows& r) {
    const int64_t key = unit * op.key_width, value = unit * op.value_width;
    const auto row = [&](Id id, int64_t column, const float*& at, int64_t& stride) {
      at = floats_of(w.value(id), r.t0) + column;
      stride = float_stride(w.value(id));
    };
    Wkv7Args args{};
    args.key_width = op.key_width;
    args.value_width = op.value_width;
    set_chunk(args, op, unit, r, w);
    row(op.r, key, args.r, args.r_stride);
    row(op.decay, key, args.decay, args.decay_stride);
    row(op.key, key, args.key, args.key_stride);
    row(op.rate, key, args.rate, args.rate_stride);
    row(op.v, value, args.v, args.v_stride);
    args.k_k = w.vector(op.k_k) + key;
    args.k_a = w.vector(op.k_a) + key;
    args.r_k = w.vector(op.r_k) + key;
    args.norm = op.norm == kNone ? nullptr : w.vector(op.norm) + value;
    args.norm_bias = op.norm == kNone ? nullptr : w.vector(op.norm_bias) + value;
    args.eps = op.eps;
    args.out = floats_of(w.value(op.out), r.t0) + value;
    args.out_stride = float_stride(w.value(op.out));
    args.scratch = w.scratch;
    w.kernels().wkv7(args);
  });
}

size_t scratch_bytes(const Wkv7Op& op) {
  return wkv7_scratch_bytes(op.key_width, op.value_width) + kCarved;
}

void prepare(Wkv6Op& op, Program& p) {
  p.check_tokens("wkv6", {op.r, op.decay, op.key, op.v, op.out});
  check_argument(op.heads >= 1 && op.key_width >= 1 && op.value_width >= 1, "wkv6: ", op.heads,
                 " heads of ", op.key_width, " and ", op.value_width,
                 " dimensions; all three must be at least 1");
  check_argument(op.kv_heads >= 1 && op.heads % op.kv_heads == 0, "wkv6: ", op.heads,
                 " heads cannot share ", op.kv_heads, " heads of keys and values");
  const int64_t heads = op.heads, kv_heads = op.kv_heads;
  const int64_t keys = heads * op.key_width, values = heads * op.value_width;
  const auto check = [&](Id id, int64_t width) {
    check_argument(p.f32_value(id, "wkv6").width == width && id != op.out,
                   "wkv6: an input has width ", p.value(id).width, ", not ", width, ", or is out");
  };
  check(op.r, keys);
  check(op.decay, keys);
  check(op.key, kv_heads * op.key_width);
  check(op.v, kv_heads * op.value_width);
  check_argument(p.f32_value(op.out, "wkv6 out").width == values, "wkv6: out has width ",
                 p.value(op.out).width, ", not ", values);
  check_argument((op.norm == kNone) == (op.norm_bias == kNone),
                 "wkv6: the norm needs a weight and a bias");
  p.check_vector(op.bonus, keys, "wkv6 bonus");
  for (const Id id : {op.norm, op.norm_bias}) p.check_vector(id, values, "wkv6 norm");
  op.state = p.add_state(op.layer());
}

void run(const Wkv6Op& op, Worker& w) noexcept {
  const int64_t share = op.heads / op.kv_heads;
  each_unit(op, w, [&](int64_t unit, const ChunkRows& r) {
    const int64_t key = unit * op.key_width, value = unit * op.value_width;
    const auto row = [&](Id id, int64_t column, const float*& at, int64_t& stride) {
      at = floats_of(w.value(id), r.t0) + column;
      stride = float_stride(w.value(id));
    };
    Wkv6Args args{};
    args.key_width = op.key_width;
    args.value_width = op.value_width;
    set_chunk(args, op, unit, r, w);
    row(op.r, key, args.r, args.r_stride);
    row(op.decay, key, args.decay, args.decay_stride);
    row(op.key, unit / share * op.key_width, args.key, args.key_stride);
    row(op.v, unit / share * op.value_width, args.v, args.v_stride);
    args.bonus = op.bonus == kNone ? nullptr : w.vector(op.bonus) + key;
    args.norm = op.norm == kNone ? nullptr : w.vector(op.norm) + value;
    args.norm_bias = op.norm == kNone ? nullptr : w.vector(op.norm_bias) + value;
    args.eps = op.eps;
    args.scale = op.scale;
    args.out = floats_of(w.value(op.out), r.t0) + value;
    args.out_stride = float_stride(w.value(op.out));
    args.scratch = w.scratch;
    w.kernels().wkv6(args);
  });
}

size_t scratch_bytes(const Wkv6Op& op) {
  return wkv6_scratch_bytes(op.key_width, op.value_width) + kCarved;
}

}  // namespace cpuserve
