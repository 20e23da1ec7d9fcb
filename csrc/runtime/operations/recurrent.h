// The operations of recurrent layers.
#pragma once
#include "kernels/table.h"
#include "runtime/operations/operation.h"

namespace cpuserve {

// A gated delta rule layer, with the convolution before it and the norm after it.
// A unit of the state is one key head.
//   conv     a vector [key_heads][taps][channels of a key head: q, k, v]
//   rates    a vector [value_heads] with -exp(A_log)
//   tiled    true: value head v belongs to key head v % key_heads;
//            false: the value heads of a key head follow one another
//   beta     a factor: the beta of a token is beta * sigmoid(b)
//   by_row   each row of a state has a decay of its own;
//            `gates` then has b of all heads, and after them a of all rows of the states
//   sigmoid  the gate of the norm is sigmoid(z) instead of silu(z)
//   bound    if not 0, the logarithm of the decay of a row is at least `bound` (GLM-5.3):
//            it is bound * sigmoid(exp(A_log) (a + dt_bias))
struct GatedDeltaOp {
  static constexpr const char* kName = "gated_delta";
  Id x, gates, out;
  int32_t key_heads, value_heads, key_width, value_width, taps;
  Id conv, rates, dt_bias, norm;
  float eps;
  bool tiled;
  float beta = 1.0f;
  bool by_row = false, sigmoid = false;
  float bound = 0.0f;
  Id state = kNone;
  CPUSERVE_FIELDS_WITH_DEFAULTS(4, x, gates, out, key_heads, value_heads, key_width, value_width,
                                taps, conv, rates, dt_bias, norm, eps, tiled, beta, by_row, sigmoid,
                                bound)

  int64_t value_head(int64_t key_head, int64_t h) const {  // value head h of a key head
    return tiled ? h * key_heads + key_head : key_head * (value_heads / key_heads) + h;
  }
  RecurrentShape shape() const {  // the shape of a state unit, which is one key head
    return {key_width, value_width, value_heads / key_heads, true, by_row};
  }
  int64_t decays() const { return int64_t{value_heads} * (by_row ? key_width : 1); }
  int64_t bounded_floats() const { return bound < 0.0f ? kStateChunk * key_width : 0; }
  int64_t channels() const { return 2 * key_width + shape().heads * int64_t{value_width}; }
  StateLayer layer() const {
    const RecurrentShape s = shape();
    return {key_heads, s.heads * int64_t{key_width} * value_width + (taps - 1) * channels(),
            recurrent_open_floats(s) + kStateChunk * channels()};
  }
};
void prepare(GatedDeltaOp& op, Declarations& p);
void run(const GatedDeltaOp& op, Worker& w) noexcept;
inline Accesses accesses(const GatedDeltaOp& op, const Declarations&) {
  return claimed({any(op.x), any(op.gates)}, {any(op.out)});
}

// A causal convolution of columns of x, from `column` on; there are as many columns as in `out`.
// The vector `weight` is [taps][columns of out]. Neighbouring taps are `dilation` tokens apart.
// A unit of the state is one of `units` equal parts of the columns.
struct ShortConvOp {
  static constexpr const char* kName = "short_conv";
  Id x, out;
  int64_t column;
  int32_t units, taps;
  Id weight, bias;
  bool silu;
  int32_t dilation = 1;
  Id state = kNone;
  int64_t channels = 0;  // columns of a state unit
  CPUSERVE_FIELDS_WITH_DEFAULTS(1, x, out, column, units, taps, weight, bias, silu, dilation)

  int64_t kept() const { return int64_t{taps - 1} * dilation; }  // earlier tokens that are read
  StateLayer layer() const { return {units, kept() * channels, kStateChunk * channels}; }
};
void prepare(ShortConvOp& op, Declarations& p);
void run(const ShortConvOp& op, Worker& w) noexcept;
inline Accesses accesses(const ShortConvOp& op, const Declarations&) {
  return claimed({any(op.x)}, {any(op.out)});
}

// A Mamba2 layer without its convolution and its norm. The vector `rates` [heads] is -exp(A_log).
// A unit of the state is `together` consecutive heads of one group,
// which use the same keys (B) and queries (C). If `steps` is kNone, all time steps are 1, and
// dt_bias and d are kNone as well: the decays of lightning attention do not depend on the token.
struct Mamba2Op {
  static constexpr const char* kName = "mamba2";
  Id x, steps, out;
  int32_t heads, groups, key_width, value_width, together;
  int64_t column;  // first column of the time steps in the value `steps`
  Id rates, dt_bias, d;
  float low, high;  // limits of a time step dt
  Id state = kNone;
  CPUSERVE_FIELDS(x, steps, out, heads, groups, key_width, value_width, together, column, rates,
                  dt_bias, d, low, high)

  RecurrentShape shape() const { return {key_width, value_width, together, false}; }
  int32_t unit_count() const { return heads / together; }
  int64_t values() const { return int64_t{heads} * value_width; }
  StateLayer layer() const {
    return {unit_count(), int64_t{together} * key_width * value_width,
            recurrent_open_floats(shape())};
  }
};
void prepare(Mamba2Op& op, Declarations& p);
void run(const Mamba2Op& op, Worker& w) noexcept;
inline Accesses accesses(const Mamba2Op& op, const Declarations&) {
  return claimed(with({any(op.x)}, op.steps != kNone, any(op.steps)), {any(op.out)});
}

// A Mamba 1 layer between its projections (kernels/generic/selective_scan.h); z begins at `column`
// of `gates`. The vector `rates` [width][channels] is -exp(A_log).
// A unit of the state is one of `units` equal parts of the channels.
struct SelectiveScanOp {
  static constexpr const char* kName = "selective_scan";
  Id x, steps, b, c, gates, out;
  int32_t width, units;
  int64_t column;
  Id rates, d;
  Id state = kNone;
  int64_t channels = 0;  // of a state unit
  CPUSERVE_FIELDS(x, steps, b, c, gates, out, width, units, column, rates, d)

  StateLayer layer() const {
    return {units, width * channels, selective_scan_open_floats(channels, width)};
  }
};
void prepare(SelectiveScanOp& op, Declarations& p);
void run(const SelectiveScanOp& op, Worker& w) noexcept;
inline Accesses accesses(const SelectiveScanOp& op, const Declarations&) {
  return claimed({any(op.x), any(op.steps), any(op.b), any(op.c), any(op.gates)}, {any(op.out)});
}

// Looks up a row of n-gram embeddings for each head of every token; the n-grams end with the token.
// `sizes` has the number of rows of each head. The heads form equal groups for n = 2, 3, ...
// With token ids t_0 (the token), t_1 (the token before it) and so on, head h reads row
// (t_0 m_0 ^ t_1 m_1 ^ ... ^ t_(n-1) m_(n-1)) mod sizes[h], after the rows of the heads before,
// where m are the `multipliers`. Tokens before the sequence count as `end`, and so do tokens
// before the last `end` among t_1, t_2, ... (Qwen4-Exp). The rows are in `matrices` of equal shape,
// one after another; the last one may have fewer rows. A unit of the state is one head.
struct NgramEmbedOp {
  static constexpr const char* kName = "ngram_embed";
  Id out;
  std::vector<Id> matrices;
  std::vector<int64_t> sizes, multipliers;
  int32_t end;
  Id state = kNone;
  std::vector<int64_t> first = {};  // by head: its first row in the matrices
  CPUSERVE_FIELDS(out, matrices, sizes, multipliers, end)

  int64_t longest() const { return static_cast<int64_t>(multipliers.size()); }
  StateLayer layer() const {
    return {static_cast<int32_t>(sizes.size()), longest() - 1, kStateChunk};
  }
};
void prepare(NgramEmbedOp& op, Declarations& p);
void run(const NgramEmbedOp& op, Worker& w) noexcept;
inline Accesses accesses(const NgramEmbedOp& op, const Declarations&) {
  return claimed({}, {any(op.out)});
}

size_t scratch_bytes(const GatedDeltaOp& op);
size_t scratch_bytes(const ShortConvOp& op);
size_t scratch_bytes(const Mamba2Op& op);

using RecurrentOps = Family<GatedDeltaOp, ShortConvOp, Mamba2Op, SelectiveScanOp, NgramEmbedOp>;

}  // namespace cpuserve
