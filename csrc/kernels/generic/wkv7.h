// The generalized delta rule (wkv7). kernels/table/recurrent.h has the formulas (Wkv7Args).
//
// The products with the closed state are computed in the tiles of generic/recurrent.h.
// Decays are at least exp(-exp(-1/2)), and their product over a chunk is at least 6e-5. Open rows
// are therefore divided by it once, and the dot products of two rows need no exponential.
#pragma once
#include "kernels/generic/norm.h"
#include "kernels/generic/recurrent.h"

#define CPUSERVE_NOINLINE __attribute__((noinline))

namespace CPUSERVE_NS {

// The open rows of a head, and the arrays of a call in the memory of a Recurrence.
struct Wkv7Rows {
  static constexpr int64_t C = kStateChunk;

  int64_t key_row, value_row;    // floats from one row to the next
  float *keys, *removals;        // [C][key_row]: exp(-G_i) k_i and exp(-G_i) b_i
  float* sums;                   // [C][key_row]: G_i
  float *values, *removed;       // [C][value_row]: v_i and m_i
  float *z, *q;                  // [rows][key_row]: exp(G_{t-1}) z_t and exp(G_t) r_t
  float *z_b, *z_k, *q_b, *q_k;  // [rows][C]: dot products of these rows and the open rows
  float* out;                    // [rows][value_row]: S_t^T r_t
  float bonus[kStateChunk];      // r_t . (r_k k_t)

  __attribute__((always_inline)) Wkv7Rows(const Wkv7Args& a, const Recurrence& r)
      : key_row(r.key_row), value_row(r.value_row), bonus{} {
    keys = a.open;
    removals = keys + C * key_row;
    sums = removals + C * key_row;
    values = sums + C * key_row;
    removed = values + C * value_row;
    z = r.faded;
    q = r.faded + C * key_row;
    z_b = r.kk;
    z_k = r.kq;
    q_b = r.to_u;
    q_k = r.to_out;
    out = r.closing;
  }
};

// Writes the open row of token t of the call, and its rows z and q.
static CPUSERVE_NOINLINE void wkv7_append(const Wkv7Args& a, Wkv7Rows& o, int64_t t) {
  const int64_t n = a.num_open + t, row = o.key_row, width = a.key_width;
  const float *key = a.key + t * a.key_stride, *r = a.r + t * a.r_stride;
  const float *decay = a.decay + t * a.decay_stride, *rate = a.rate + t * a.rate_stride;
  float *z = o.z + t * row, *q = o.q + t * row;
  float *k = o.keys + n * row, *b = o.removals + n * row, *sum = o.sums + n * row;
  const auto get = [width](const float* p, int64_t d) {
    const int left = static_cast<int>(width - d);
    return left >= kLanes ? load(p + d) : load_n(p + d, left);
  };
  F squares = zero(), dots = zero();
  for (int64_t d = 0; d < width; d += kLanes) {
    const F x = mul(get(key, d), get(a.k_k, d));
    store(z + d, x);
    squares = fma(x, x, squares);
  }
  const float length = sqrtf(reduce_add(squares));
  const F inverse = set1(1.0f / (length > 1e-12f ? length : 1e-12f));
  for (int64_t d = 0; d < row; d += kLanes) {
    if (d >= width) {
      float* const padded[] = {z + d, q + d, k + d, b + d, sum + d};
      for (float* p : padded) store(p, zero());
      continue;
    }
    const F one = set1(1.0f), x = get(key, d), step = sigmoid(get(rate, d));
    const F before = n > 0 ? load(sum - row + d) : zero();
    const F now = fma(set1(-0.60653066f), sigmoid(get(decay, d)), before);
    const F fade = decayed(now), rise = div(one, fade);
    const F unit = mul(load(z + d), inverse), y = get(r, d);
    const F grown = fma(mul(x, get(a.k_a, d)), sub(step, one), x);
    store(z + d, mul(decayed(before), unit));
    store(q + d, mul(fade, y));
    store(k + d, mul(rise, grown));
    store(b + d, mul(rise, mul(step, unit)));
    store(sum + d, now);
    dots = fma(mul(y, get(a.r_k, d)), grown, dots);
  }
  o.bonus[t] = reduce_add(dots);
  copy_padded(o.values + n * o.value_row, a.v + t * a.v_stride, a.value_width, o.value_row);
}

// Computes the dot products of x and y with rows 0 to `last`, four rows at a time
// (if fewer remain, the last row is repeated).
static CPUSERVE_NOINLINE void wkv7_dots(const float* x, const float* y, const float* rows,
                                        int64_t row, int64_t last, float* by_x, float* by_y) {
  constexpr int kRows = 4;
  for (int64_t i = 0; i <= last; i += kRows) {
    const float* at[kRows];
    F sx[kRows], sy[kRows];
#pragma GCC unroll 8
    for (int j = 0; j < kRows; j++) {
      at[j] = rows + (i + j < last ? i + j : last) * row;
      sx[j] = sy[j] = zero();
    }
    for (int64_t d = 0; d < row; d += kLanes) {
      const F u = load(x + d), v = load(y + d);
#pragma GCC unroll 8
      for (int j = 0; j < kRows; j++) {
        const F k = load(at[j] + d);
        sx[j] = fma(k, u, sx[j]);
        sy[j] = fma(k, v, sy[j]);
      }
    }
    reduce_add4(sx[0], sx[1], sx[2], sx[3], by_x + i);
    reduce_add4(sy[0], sy[1], sy[2], sy[3], by_y + i);
  }
}

// Computes m and S^T r of all tokens of the call, for W registers of columns from column c on.
// The rows of the chunk are added in ascending order to the products with the closed state.
template <int W>
static CPUSERVE_NOINLINE void wkv7_solve(const Wkv7Args& a, const Wkv7Rows& o, const float* states,
                                         int64_t c) {
  const int64_t row = o.value_row;
  for (int64_t t = 0; t < a.rows; t++) {
    const int64_t n = a.num_open + t, dots = t * kStateChunk;
    const float *m_sums = states + t * row + c, *out_sums = states + (a.rows + t) * row + c;
    F m[W], out[W];
#pragma GCC unroll 8
    for (int w = 0; w < W; w++) {
      m[w] = load(m_sums + w * kLanes);
      out[w] = load(out_sums + w * kLanes);
    }
    const auto add_row = [&](int64_t i, bool both) {
      const float *v = o.values + i * row + c, *by_m = o.removed + i * row + c;
      const F qk = set1(o.q_k[dots + i]), qb = set1(o.q_b[dots + i]);
      const F zk = set1(o.z_k[dots + i]), zb = set1(o.z_b[dots + i]);
#pragma GCC unroll 8
      for (int w = 0; w < W; w++) {
        const F x = load(v + w * kLanes), y = load(by_m + w * kLanes);
        out[w] = fma(qb, y, fma(qk, x, out[w]));
        if (both) m[w] = fma(zb, y, fma(zk, x, m[w]));
      }
    };
    for (int64_t i = 0; i < n; i++) add_row(i, true);
#pragma GCC unroll 8
    for (int w = 0; w < W; w++) store(o.removed + n * row + c + w * kLanes, sub(zero(), m[w]));
    add_row(n, false);
#pragma GCC unroll 8
    for (int w = 0; w < W; w++) store(o.out + t * row + c + w * kLanes, out[w]);
  }
}

// Computes rows [d, d + R) of the state after a full chunk, W registers of columns from column c
// on:
//   S <- exp(G_end) (S + sum_i exp(-G_i) k_i (x) v_i + exp(-G_i) b_i (x) m_i)
template <int R, int W, bool kTail>
static CPUSERVE_NOINLINE void wkv7_close(const Wkv7Args& a, const Wkv7Rows& o, int64_t d,
                                         int64_t c) {
  const int64_t width = a.value_width, at = d * width + c;
  const int tail = static_cast<int>(width - c);
  F sum[R][W];
#pragma GCC unroll 8
  for (int i = 0; i < R; i++) {
    const float* from = a.closed + at + i * width;
#pragma GCC unroll 8
    for (int w = 0; w < W; w++) {
      sum[i][w] = kTail ? load_n(from, tail) : load(from + w * kLanes);
    }
  }
  for (int64_t t = 0; t < kStateChunk; t++) {
    const float *k = o.keys + t * o.key_row + d, *b = o.removals + t * o.key_row + d;
    const float *v = o.values + t * o.value_row + c, *m = o.removed + t * o.value_row + c;
#pragma GCC unroll 8
    for (int w = 0; w < W; w++) {
      const F x = load(v + w * kLanes), y = load(m + w * kLanes);
#pragma GCC unroll 8
      for (int i = 0; i < R; i++) sum[i][w] = fma(set1(b[i]), y, fma(set1(k[i]), x, sum[i][w]));
    }
  }
  const float* end = o.sums + (kStateChunk - 1) * o.key_row + d;
#pragma GCC unroll 8
  for (int i = 0; i < R; i++) {
    float* to = a.closed_to + at + i * width;
    const F fade = decayed(set1(end[i]));
#pragma GCC unroll 8
    for (int w = 0; w < W; w++) {
      const F x = mul(fade, sum[i][w]);
      kTail ? store_n(to, x, tail) : store(to + w * kLanes, x);
    }
  }
}

// Writes the results of token t: the norm of S_t^T r_t, if there is one, plus bonus_t v_t.
static CPUSERVE_NOINLINE void wkv7_write(const Wkv7Args& a, const Wkv7Rows& o, int64_t t) {
  const int n = static_cast<int>(a.value_width);
  float *x = o.out + t * o.value_row, *out = a.out + t * a.out_stride;
  const float* v = o.values + (a.num_open + t) * o.value_row;
  if (a.norm != nullptr) scale_to_norm(x, x, n, a.norm, a.norm_bias, a.eps);
  const F bonus = set1(o.bonus[t]);
  int c = 0;
  for (; c + kLanes <= n; c += kLanes) store(out + c, fma(bonus, load(v + c), load(x + c)));
  if (c < n) store_n(out + c, fma(bonus, load_n(v + c, n - c), load_n(x + c, n - c)), n - c);
}

static inline void wkv7(const Wkv7Args& a) noexcept {
  RecurrentArgs args{};
  args.shape = wkv7_shape(a.key_width, a.value_width);
  args.closed = a.closed;
  args.open = a.open;
  args.num_open = a.num_open;
  args.rows = a.rows;
  args.scratch = a.scratch;
  const Recurrence r(args);
  Wkv7Rows o(a, r);
  const int64_t width = a.value_width, key_row = o.key_row;
  for (int64_t t = 0; t < a.rows; t++) wkv7_append(a, o, t);
  const auto panel = [&](int64_t c, auto wide, auto tail) {
    in_tiles(r.vectors, [&](int64_t first, auto height) {
      constexpr int R = decltype(height)::value, W = decltype(wide)::value;
      panel_tile<R, W, decltype(tail)::value != 0, false>(r, 0, first, c);
    });
  };
  over_last_columns(over_columns<kTileVecs>(0, width, panel), width, panel);
  for (int64_t t = 0; t < a.rows; t++) {
    const float *z = o.z + t * key_row, *q = o.q + t * key_row;
    const int64_t last = a.num_open + t, at = t * kStateChunk;
    wkv7_dots(z, q, o.removals, key_row, last, o.z_b + at, o.q_b + at);
    wkv7_dots(z, q, o.keys, key_row, last, o.z_k + at, o.q_k + at);
  }
  const auto solve = [&](int64_t c, auto wide, auto) {
    wkv7_solve<decltype(wide)::value>(a, o, r.sums, c);
  };
  over_last_columns(over_columns<kTileVecs>(0, width, solve), width, solve);
  for (int64_t t = 0; t < a.rows; t++) wkv7_write(a, o, t);
  if (!r.closes) return;
  in_tiles<kTileRows / 2>(a.key_width, [&](int64_t d, auto height) {
    const auto close = [&](int64_t c, auto wide, auto tail) {
      constexpr int R = decltype(height)::value, W = decltype(wide)::value;
      wkv7_close<R, W, decltype(tail)::value != 0>(a, o, d, c);
    };
    over_last_columns(over_columns<kTileVecs>(0, width, close), width, close);
  });
}

}  // namespace CPUSERVE_NS

#undef CPUSERVE_NOINLINE
