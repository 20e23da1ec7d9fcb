// Recurrent layers with a decay for each row of a state, which follows from the token.
#include "runtime/operations/wkv.h"

#include "base/check.h"
#include "runtime/operations/state_units.h"

namespace cpuserve {
namespace {

// Refuses sizes below 1, and a norm with only one of its two vectors, or of another width.
template <class Op>
void check_heads(const Op& op, const Declarations& p) {
  check_argument(op.heads >= 1 && op.key_width >= 1 && op.value_width >= 1, Op::kName, ": ",
                 op.heads, " heads of ", op.key_width, " and ", op.value_width,
                 " dimensions; all three must be at least 1");
  check_argument((op.norm == kNone) == (op.norm_bias == kNone), Op::kName,
                 ": the norm needs a weight and a bias");
  const int64_t values = int64_t{op.heads} * op.value_width;
  for (const Id id : {op.norm, op.norm_bias}) p.check_vector(id, values, "wkv norm");
}

// Sets the arguments that a call of either kind has, but for the rows of inputs.
template <class Args, class Op>
Args chunk_args(const Op& op, Worker& w, int64_t unit, const ChunkRows& r) {
  const int64_t value = unit * op.value_width;
  Args args{};
  args.key_width = op.key_width;
  args.value_width = op.value_width;
  set_chunk(args, op, unit, r, w);
  args.norm = op.norm == kNone ? nullptr : w.vector(op.norm) + value;
  args.norm_bias = op.norm == kNone ? nullptr : w.vector(op.norm_bias) + value;
  args.eps = op.eps;
  args.out = floats_of(w.value(op.out), r.t0) + value;
  args.out_stride = float_stride(w.value(op.out));
  args.scratch = w.scratch;
  return args;
}

// Returns a function that sets `at` to the first row of an input in the chunk, from `column` on,
// and its stride.
auto input_rows(const Worker& w, const ChunkRows& r) {
  return [&](Id id, int64_t column, const float*& at, int64_t& stride) {
    at = floats_of(w.value(id), r.t0) + column;
    stride = float_stride(w.value(id));
  };
}

}  // namespace

void prepare(Wkv7Op& op, Declarations& p) {
  p.check_tokens("wkv7", {op.r, op.decay, op.key, op.v, op.rate, op.out});
  check_heads(op, p);
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
  for (const Id id : {op.k_k, op.k_a, op.r_k}) p.check_vector(id, keys, "wkv7 weight");
  op.state = p.add_state(op.layer());
}

void run(const Wkv7Op& op, Worker& w) noexcept {
  each_unit(op, w, [&](int64_t unit, const ChunkRows& r) {
    const int64_t key = unit * op.key_width, value = unit * op.value_width;
    const auto row = input_rows(w, r);
    Wkv7Args args = chunk_args<Wkv7Args>(op, w, unit, r);
    row(op.r, key, args.r, args.r_stride);
    row(op.decay, key, args.decay, args.decay_stride);
    row(op.key, key, args.key, args.key_stride);
    row(op.rate, key, args.rate, args.rate_stride);
    row(op.v, value, args.v, args.v_stride);
    args.k_k = w.vector(op.k_k) + key;
    args.k_a = w.vector(op.k_a) + key;
    args.r_k = w.vector(op.r_k) + key;
    w.kernels().wkv7(args);
  });
}

size_t scratch_bytes(const Wkv7Op& op) {
  return wkv7_scratch_bytes(op.key_width, op.value_width) + kCarved;
}

void prepare(Wkv6Op& op, Declarations& p) {
  p.check_tokens("wkv6", {op.r, op.decay, op.key, op.v, op.out});
  check_heads(op, p);
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
  p.check_vector(op.bonus, keys, "wkv6 bonus");
  op.state = p.add_state(op.layer());
}

void run(const Wkv6Op& op, Worker& w) noexcept {
  const int64_t share = op.heads / op.kv_heads;
  each_unit(op, w, [&](int64_t unit, const ChunkRows& r) {
    const int64_t key = unit * op.key_width;
    const auto row = input_rows(w, r);
    Wkv6Args args = chunk_args<Wkv6Args>(op, w, unit, r);
    row(op.r, key, args.r, args.r_stride);
    row(op.decay, key, args.decay, args.decay_stride);
    row(op.key, unit / share * op.key_width, args.key, args.key_stride);
    row(op.v, unit / share * op.value_width, args.v, args.v_stride);
    args.bonus = op.bonus == kNone ? nullptr : w.vector(op.bonus) + key;
    args.scale = op.scale;
    w.kernels().wkv6(args);
  });
}

size_t scratch_bytes(const Wkv6Op& op) {
  return wkv6_scratch_bytes(op.key_width, op.value_width) + kCarved;
}

}  // namespace cpuserve
