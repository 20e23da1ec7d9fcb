// Recurrent layers whose decays follow from tokens (wkv6). kernels/table/recurrent.h has the
// formulas (Wkv6Args).
//
// They are Mamba2 with a decay of each row of the state: products with the closed state, sums over
// open rows and the closing of a chunk are in generic/recurrent.h. Decays have no lower
// limit, so that each product of two rows needs exponentials (wkv7 divides by decays instead).
#pragma once
#include "kernels/generic/norm.h"
#include "kernels/generic/recurrent.h"

#define CPUSERVE_NOINLINE __attribute__((noinline))

namespace CPUSERVE_NS {

// Writes the open row of token t of the call, and its q twice: as it is, and times the decay of the
// closed state until then. Returns the factor of its own v: q . (bonus k), or q . k.
static CPUSERVE_NOINLINE float wkv6_append(const Wkv6Args& a, const Recurrence& r, int64_t t) {
  const int64_t n = a.num_open + t, row = r.key_row, width = a.key_width;
  const float *key = a.key + t * a.key_stride, *query = a.r + t * a.r_stride;
  const float* decay = a.decay + t * a.decay_stride;
  float *k = r.keys + n * row, *sum = r.decay + n * row;
  float *q = r.queries + t * row, *faded = r.faded + (kStateChunk + t) * row;
  const auto get = [width](const float* p, int64_t d) {
    const int left = static_cast<int>(width - d);
    return left >= kLanes ? load(p + d) : load_n(p + d, left);
  };
  F dots = zero();
  for (int64_t d = 0; d < row; d += kLanes) {
    if (d >= width) {
      float* const padded[] = {k + d, sum + d, q + d, faded + d};
      for (float* p : padded) store(p, zero());
      continue;
    }
    const F g = max(set1(-30.0f), sub(zero(), exp(get(decay, d))));
    const F before = n > 0 ? load(sum - row + d) : zero(), now = add(before, g);
    const F y = mul(set1(a.scale), get(query, d));
    F x = get(key, d), own = x;
    if (a.bonus == nullptr) {
      own = x = mul(x, sub(set1(1.0f), decayed(g)));
    } else {
      own = mul(x, get(a.bonus, d));
    }
    store(k + d, x);
    store(sum + d, now);
    store(q + d, y);
    store(faded + d, mul(decayed(a.bonus == nullptr ? now : before), y));
    dots = fma(own, y, dots);
  }
  return reduce_add(dots);
}

// Computes the dot products of q of token t and the keys of the rows before it, times their decays
// until the state is multiplied by q; two rows at a time (if one remains, it is computed twice).
// Four would not fit in the registers of AVX2 beside the exponential.
static CPUSERVE_NOINLINE void wkv6_dots(const Wkv6Args& a, const Recurrence& r, int64_t t) {
  constexpr int kRows = 2;
  const int64_t n = a.num_open + t, row = r.key_row;
  const float *q = r.queries + t * row, *now = r.decay + (a.bonus == nullptr ? n : n - 1) * row;
  for (int64_t i = 0; i < n; i += kRows) {
    int64_t at[kRows];
    F sums[kRows];
#pragma GCC unroll 8
    for (int j = 0; j < kRows; j++) {
      at[j] = (i + j < n ? i + j : n - 1) * row;
      sums[j] = zero();
    }
    for (int64_t d = 0; d < row; d += kLanes) {
      const F y = load(q + d), g = load(now + d);
#pragma GCC unroll 8
      for (int j = 0; j < kRows; j++) {
        const F faded = decayed(sub(g, load(r.decay + at[j] + d)));
        sums[j] = fma(mul(load(r.keys + at[j] + d), faded), y, sums[j]);
      }
    }
#pragma GCC unroll 8
    for (int j = 0; j < kRows; j++) r.kq[t * kStateChunk + i + j] = reduce_add(sums[j]);
  }
}

// Normalizes the result of token t.
static CPUSERVE_NOINLINE void wkv6_norm(const Wkv6Args& a, int64_t t) {
  float* x = a.out + t * a.out_stride;
  scale_to_norm(x, x, static_cast<int>(a.value_width), a.norm, a.norm_bias, a.eps);
}

static inline void wkv6(const Wkv6Args& a) noexcept {
  RecurrentArgs args{};
  args.shape = wkv6_shape(a.key_width, a.value_width);
  args.closed = a.closed;
  args.closed_to = a.closed_to;
  args.open = a.open;
  args.num_open = a.num_open;
  args.rows = a.rows;
  args.k = a.key;
  args.q = a.r;
  args.v = a.v;
  args.k_stride = a.key_stride;
  args.q_stride = a.r_stride;
  args.v_stride = a.v_stride;
  args.out = a.out;
  args.out_stride = a.out_stride;
  args.scratch = a.scratch;
  Recurrence r(args);
  r.a.beta = r.fade;  // ones: v is added as it is
  UnitFetch fetch(r);
  for (int64_t t = 0; t < a.rows; t++) {
    const float own = wkv6_append(a, r, t);
    wkv6_dots(a, r, t);
    r.kq[t * kStateChunk + a.num_open + t] = own;
  }
  panel_products(r, 0, fetch);
  row_decay_products(r);
  in_tiles(a.rows, [&](int64_t row, auto height) {
    const auto tile = [&](int64_t c, auto wide, auto tail) {
      solve_tile<false, decltype(height)::value, decltype(wide)::value, decltype(tail)::value != 0>(
          r, 0, r.sums, row, c);
    };
    over_last_columns(over_columns<kTileVecs>(0, a.value_width, tile), a.value_width, tile);
  });
  if (r.closes) close_state(r, 0, fetch);
  for (int64_t t = 0; a.norm != nullptr && t < a.rows; t++) wkv6_norm(a, t);
}

}  // namespace CPUSERVE_NS

#undef CPUSERVE_NOINLINE
