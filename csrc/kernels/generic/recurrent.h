// Gated delta nets and Mamba2. kernels/table/recurrent.h has the formulas, and the terms chunk,
// closed state and open row. generic/recurrence.h has the arrays of a call, such as kk and fade.
//
// A vector register has neighbouring columns of the state S, one in each lane.
// S^T k and S^T q are computed as in a linear: each lane adds products in ascending order
// of the elements of k or q. A column of u and of the result depends only on the same column of S.
// Only the dot products k_i . k_t and k_i . q_t are summed across lanes, in a fixed order.
//
// A kernel call with few tokens is limited by reading the states; its other work must take less
// time than these reads. A call with many tokens is limited by its products, which are computed
// in register tiles as in linear/dense.h. Sums have the same order in both cases. A state is closed
// (updated by its chunk) right after the rows of the chunk are computed, while the state is in L2.
#pragma once
#include "kernels/generic/recurrence.h"

namespace CPUSERVE_NS {

// Calls call(Height<n>{}) for an n in [1, kMost], so that n is a constant in the called function.
template <int N>
struct Height {
  static constexpr int value = N;
};
template <int kMost, int N = 1, class Call>
CPUSERVE_INLINE void with_height(int n, const Call& call) {
  if constexpr (N == kMost) {
    call(Height<N>{});
  } else {
    n == N ? call(Height<N>{}) : with_height<kMost, N + 1>(n, call);
  }
}
// Divides rows [0, n) into as few tiles of up to kMost rows as possible, of nearly equal heights.
// Calls call(first row, Height<rows>) for each tile.
template <int kMost = kTileRows, class Call>
CPUSERVE_INLINE void in_tiles(int64_t n, const Call& call) {
  const int64_t tiles = (n + kMost - 1) / kMost, least = n / tiles, higher = n % tiles;
  for (int64_t i = 0, row = 0; i < tiles; i++) {
    const int64_t rows = least + (i < higher ? 1 : 0);
    with_height<kMost>(static_cast<int>(rows), [&](auto height) { call(row, height); });
    row += rows;
  }
}

// Adds to sum[i] the products of vector r.vector[first + i] and `rows` rows of a state:
//   sum[i] += sum over d < rows of vector[begin + d] * s[d]
// s[d] are W registers of neighbouring columns of row d of the state, and `s` points to row 0.
// With kFetch, the function also prefetches the same number of rows from `ahead` on.
template <int R, int W, bool kTail, bool kFetch>
CPUSERVE_INLINE void add_products(F (&sum)[R][W], const Recurrence& r, int64_t first, int64_t begin,
                                  int64_t rows, const float* s, const float* ahead, int tail) {
  const int64_t width = r.a.shape.value_width;
  const float* x[R];
#pragma GCC unroll 8
  for (int i = 0; i < R; i++) x[i] = r.vector[first + i] + begin;
  for (int64_t d = 0; d < rows; d++, s += width, ahead += width) {
#pragma GCC unroll 8
    for (int i = 0; i < W * kLanes && kFetch; i += 16) prefetch(ahead + i);
    F state[W];
#pragma GCC unroll 8
    for (int w = 0; w < W; w++) state[w] = kTail ? load_n(s, tail) : load(s + w * kLanes);
#pragma GCC unroll 8
    for (int i = 0; i < R; i++) {
      const F k = set1(x[i][d]);
#pragma GCC unroll 8
      for (int w = 0; w < W; w++) sum[i][w] = fma(k, state[w], sum[i][w]);
    }
  }
}

// Multiplies some columns of a state (W registers, from column c on)
// with R vectors, from vector `first` on.
template <int R, int W, bool kTail, bool kFetch>
static CPUSERVE_NOINLINE void panel_tile(const Recurrence& r, int64_t head, int64_t first,
                                         int64_t c) {
  constexpr int64_t kAhead = 512;  // floats from the rows in use to the rows to prefetch from L2
  const int64_t width = r.a.shape.value_width, depth = r.a.shape.key_width, row = r.value_row;
  const float* state = r.a.closed + head * depth * width + c;
  F sum[R][W];
#pragma GCC unroll 8
  for (int i = 0; i < R; i++) {
#pragma GCC unroll 8
    for (int w = 0; w < W; w++) sum[i][w] = zero();
  }
  add_products<R, W, kTail, kFetch>(sum, r, first, 0, depth, state, state + kAhead,
                                    static_cast<int>(width - c));
  float* sums = r.sums + first * row + c;
#pragma GCC unroll 8
  for (int i = 0; i < R; i++, sums += row) {
#pragma GCC unroll 8
    for (int w = 0; w < W; w++) store(sums + w * kLanes, sum[i][w]);
  }
}

// Rows [begin, begin + rows) of one state. stream_products adds the products of these rows
// with all vectors (k and q of the tokens) to `sums`.
struct StreamRows {
  const float *state, *ahead;
  int64_t begin, rows;
  float* sums;  // [vectors][value_row]
};
template <int R, int W, bool kTail>
static CPUSERVE_NOINLINE void stream_tile(const Recurrence& r, const StreamRows& s, int64_t c) {
  const int64_t row = r.value_row;
  const int tail = static_cast<int>(r.a.shape.value_width - c);
  F sum[R][W];
  float* sums = s.sums + c;
#pragma GCC unroll 8
  for (int i = 0; i < R; i++, sums += row) {
#pragma GCC unroll 8
    for (int w = 0; w < W; w++) sum[i][w] = s.begin ? load(sums + w * kLanes) : zero();
  }
  add_products<R, W, kTail, true>(sum, r, 0, s.begin, s.rows, s.state + c, s.ahead + c, tail);
  sums = s.sums + c;
#pragma GCC unroll 8
  for (int i = 0; i < R; i++, sums += row) {
#pragma GCC unroll 8
    for (int w = 0; w < W; w++) store(sums + w * kLanes, sum[i][w]);
  }
}

// over_columns calls call(c, Height<kWide>, Height<0>) for each kWide registers of columns from c
// on (up to `width`), and returns the first column that remains. over_last_columns does so for
// single registers, then calls call(c, Height<1>, Height<1>) for columns that fill no register.
template <int kWide, class Call>
CPUSERVE_INLINE int64_t over_columns(int64_t c, int64_t width, const Call& call) {
  for (; c + kWide * kLanes <= width; c += kWide * kLanes) call(c, Height<kWide>{}, Height<0>{});
  return c;
}
template <class Call>
CPUSERVE_INLINE void over_last_columns(int64_t c, int64_t width, const Call& call) {
  c = over_columns<1>(c, width, call);
  if (c < width) call(c, Height<1>{}, Height<1>{});
}

// Multiplies many vectors with the state of one head, some columns of the state at a time.
// The first tile of vectors brings these columns into L1 or at least L2,
// and reading them from L2 is fast enough for the other tiles.
static CPUSERVE_NOINLINE void panel_products(const Recurrence& r, int64_t head, UnitFetch& fetch) {
  const int64_t width = r.a.shape.value_width;
  const auto panel = [&](int64_t c, auto wide, auto tail) {
    in_tiles(r.vectors, [&](int64_t first, auto height) {
      constexpr int R = decltype(height)::value, W = decltype(wide)::value;
      constexpr bool kTail = decltype(tail)::value != 0;
      fetch.few();
      first == 0 ? panel_tile<R, W, kTail, true>(r, head, first, c)
                 : panel_tile<R, W, kTail, false>(r, head, first, c);
    });
  };
  over_last_columns(over_columns<kTileVecs>(0, width, panel), width, panel);
}

// Multiplies few vectors with the states of heads [head, end) in turn,
// some rows of each state at a time. Near the end of these states, the cache lines
// to prefetch belong to the heads from `end` on, or to the state unit that is computed next.
static CPUSERVE_NOINLINE void stream_products(const Recurrence& r, int64_t head, int64_t end,
                                              UnitFetch& fetch) {
  constexpr int64_t kRowFloats = 256, kAheadFloats = 512;
  const int64_t width = r.a.shape.value_width, depth = r.a.shape.key_width;
  const int64_t state_floats = depth * width;
  const int64_t block = width < kRowFloats ? kRowFloats / width : 1;
  const int64_t ahead = width < kAheadFloats ? kAheadFloats / width : 1;
  const float* const now = r.a.closed + head * state_floats;
  const float* const next = end < r.a.shape.heads ? r.a.closed + end * state_floats : r.a.next;
  with_height<kFewVectors>(r.vectors, [&](auto height) {
    constexpr int R = decltype(height)::value;
    for (int64_t begin = 0; begin < depth; begin += block) {
      const int64_t rows = depth - begin < block ? depth - begin : block;
      const bool ends = begin + ahead >= depth && next != nullptr;
      const float* later =
          ends ? next + (begin + ahead - depth) * width : now + (begin + ahead) * width;
      StreamRows s{now + begin * width, later, begin, rows, r.sums};
      for (int64_t h = head; h < end; h++) {
        fetch.few();
        const auto tile = [&](int64_t c, auto wide, auto tail) {
          stream_tile<R, decltype(wide)::value, decltype(tail)::value != 0>(r, s, c);
        };
        int64_t c = 0;
        if constexpr (R <= 2) c = over_columns<2 * kTileVecs>(c, width, tile);
        c = over_columns<kTileVecs>(c, width, tile);
        over_last_columns(c, width, tile);
        s.state += state_floats;
        s.ahead += state_floats;
        s.sums += r.vectors * r.value_row;
      }
    }
  });
}

// Computes k_i . k_t (delta rule only) and k_i . q_t for rows t in [first, first + T) of this call
// and all rows i of the chunk up to the last row t, four rows i at a time
// (if fewer than four remain, the last row is repeated). With kByRow, each product is multiplied
// by exp(G_t - G_i) of its row of the state. The results for rows i after row t may have any value.
template <bool kDelta, bool kByRow, int T>
static CPUSERVE_NOINLINE void key_tile(const Recurrence& r, int64_t first) {
  constexpr int kRows = 4;
  const int64_t row = r.key_row, last = r.a.num_open + first + T - 1;
  const float* const k = r.keys + (last - T + 1) * row;
  const float* const q = r.queries + first * row;
  const float* const decay = kByRow ? r.decay + (last - T + 1) * row : nullptr;
  for (int64_t i = 0; i <= last; i += kRows) {
    const float* rows[kRows];
    const float* decays[kRows];
    F by_k[T][kRows], by_q[T][kRows];
#pragma GCC unroll 8
    for (int j = 0; j < kRows; j++) {
      const int64_t at = (i + j < last ? i + j : last) * row;
      rows[j] = r.keys + at;
      decays[j] = kByRow ? r.decay + at : nullptr;
#pragma GCC unroll 8
      for (int t = 0; t < T; t++) by_k[t][j] = by_q[t][j] = zero();
    }
    for (int64_t d = 0; d < row; d += kLanes) {
      F x[T], y[T];
#pragma GCC unroll 8
      for (int t = 0; t < T; t++) {
        if (kDelta) x[t] = load(k + t * row + d);
        y[t] = load(q + t * row + d);
      }
#pragma GCC unroll 8
      for (int j = 0; j < kRows; j++) {
        const F key = load(rows[j] + d);
#pragma GCC unroll 8
        for (int t = 0; t < T; t++) {
          const F z =
              kByRow ? mul(key, decayed(sub(load(decay + t * row + d), load(decays[j] + d)))) : key;
          if (kDelta) by_k[t][j] = fma(z, x[t], by_k[t][j]);
          by_q[t][j] = fma(z, y[t], by_q[t][j]);
        }
      }
    }
#pragma GCC unroll 8
    for (int t = 0; t < T; t++) {
      const int64_t at = (first + t) * kStateChunk + i;
      const F(&a)[kRows] = by_k[t], (&b)[kRows] = by_q[t];
      if (kDelta) reduce_add4(a[0], a[1], a[2], a[3], r.kk + at);
      reduce_add4(b[0], b[1], b[2], b[3], r.kq + at);
    }
  }
}
template <bool kDelta>
static inline void key_products(const Recurrence& r) {
  constexpr int kSums = kTileRows * kTileVecs, kMost = kSums / (kDelta ? 12 : 6);
  in_tiles<(kMost > 1 ? kMost : 1)>(r.a.rows, [&](int64_t first, auto height) {
    constexpr int T = decltype(height)::value;
    r.a.shape.by_row ? key_tile<true, true, T>(r, first) : key_tile<kDelta, false, T>(r, first);
  });
}

// Does the same as decay_products for by_row, where kk, kq and the sums include the decay already.
static CPUSERVE_NOINLINE void row_decay_products(const Recurrence& r) {
  for (int64_t i = 0; i < 2 * kStateChunk; i++) r.fade[i] = 1.0f;
  for (int64_t i = 0; i < r.a.rows * kStateChunk; i += kLanes) {
    store(r.to_u + i, load(r.kk + i));
    store(r.to_out + i, load(r.kq + i));
  }
  if (!r.closes) return;
  const float* last = r.decay + (kStateChunk - 1) * r.key_row;
  for (int64_t d = 0; d < r.key_row; d += kLanes) {
    const F end = load(last + d);
    store(r.row_fade + d, decayed(end));
    for (int64_t i = d; i < kStateChunk * r.key_row; i += r.key_row) {
      store(r.ending + i, mul(decayed(sub(end, load(r.decay + i))), load(r.keys + i)));
    }
  }
}

// Computes fade, to_u and to_out of one head. Element i of row t of to_u and to_out is not used,
// and may have any value, if row i of the chunk comes after row t.
template <bool kDelta>
static CPUSERVE_NOINLINE void decay_products(const Recurrence& r, int64_t head) {
  if (r.a.shape.by_row) return row_decay_products(r);
  const float* decay = r.decay + head * kStateChunk;
  const F end = set1(decay[kStateChunk - 1]);
  for (int64_t i = 0; i < kStateChunk; i += kLanes) {
    store(r.fade + i, decayed(load(decay + i)));
    if (r.closes) store(r.fade + kStateChunk + i, decayed(sub(end, load(decay + i))));
  }
  for (int64_t t = 0; t < r.a.rows; t++) {
    const F now = set1(decay[r.a.num_open + t]);
    for (int64_t i = 0; i < kStateChunk; i += kLanes) {
      const int64_t at = t * kStateChunk + i;
      const F faded = decayed(sub(now, load(decay + i)));
      if (kDelta) store(r.to_u + at, mul(faded, load(r.kk + at)));
      store(r.to_out + at, mul(faded, load(r.kq + at)));
    }
  }
}

// Computes u and the results of a tile: rows [first, first + T) of this call, W registers
// of columns from column c on. The sums start from products with the closed state.
// Then the rows of the chunk before this tile are added, and at last the earlier rows of this tile.
template <bool kDelta, int T, int W, bool kTail>
static CPUSERVE_NOINLINE void solve_tile(const Recurrence& r, int64_t head, float* sums,
                                         int64_t first, int64_t c) {
  const int64_t row = r.value_row, column = head * r.a.shape.value_width + c;
  const int64_t before = r.a.num_open + first;
  const int tail = static_cast<int>(r.a.shape.value_width - c);
  float* const kept_sums = sums + first * row + c;
  const float* to_u = r.to_u + first * kStateChunk;
  const float* out_sums = kept_sums + (r.vectors - r.a.rows) * row;
  const float* to_out = r.to_out + first * kStateChunk;
  F kept[T][W], out[T][W];
#pragma GCC unroll 8
  for (int t = 0; t < T; t++) {
    const F fade = set1(r.fade[before + t]);
#pragma GCC unroll 8
    for (int w = 0; w < W; w++) {
      const int64_t at = t * row + w * kLanes;
      kept[t][w] = kDelta ? mul(fade, load(kept_sums + at)) : zero();
      out[t][w] = mul(fade, load(out_sums + at));
    }
  }
  // If this call has a whole chunk, no later call needs the u of the chunk:
  // u then overwrites the sums that it is computed from.
  float *u = (r.whole ? sums : r.u + head * kStateChunk * row) + c,
        *closing = r.closing + before * row + c;
  for (int64_t i = 0; i < before; i++, u += row) {
    F x[W];
#pragma GCC unroll 8
    for (int w = 0; w < W; w++) x[w] = load(u + w * kLanes);
#pragma GCC unroll 8
    for (int t = 0; t < T; t++) {
      const F by_u = set1(to_u[t * kStateChunk + i]), by_out = set1(to_out[t * kStateChunk + i]);
#pragma GCC unroll 8
      for (int w = 0; w < W; w++) {
        if (kDelta) kept[t][w] = fma(by_u, x[w], kept[t][w]);
        out[t][w] = fma(by_out, x[w], out[t][w]);
      }
    }
  }
#pragma GCC unroll 8
  for (int t = 0; t < T; t++, u += row, closing += row) {
    const F until_end = set1(r.fade[kStateChunk + before + t]);
    const float* v = r.a.v + (first + t) * r.a.v_stride + column;
    float* result = r.a.out + (first + t) * r.a.out_stride + column;
    const F beta = set1(r.a.beta[(first + t) * r.a.beta_stride + head]);
#pragma GCC unroll 8
    for (int w = 0; w < W; w++) {
      const F value = kTail ? load_n(v, tail) : load(v + w * kLanes);
      const F x = mul(beta, kDelta ? sub(value, kept[t][w]) : value);
      store(u + w * kLanes, x);
      if (r.closes) store(closing + w * kLanes, mul(until_end, x));
#pragma GCC unroll 8
      for (int later = t; later < T; later++) {
        const int64_t at = later * kStateChunk + before + t;
        if (kDelta && later > t) kept[later][w] = fma(set1(to_u[at]), x, kept[later][w]);
        out[later][w] = fma(set1(to_out[at]), x, out[later][w]);
      }
      kTail ? store_n(result, out[t][w], tail) : store(result + w * kLanes, out[t][w]);
    }
  }
}

// Computes a tile of the state of a head after a full chunk (see close_state):
// rows [d, d + R) of the state, and W registers of its columns from column c on.
template <int R, int W, bool kTail>
static CPUSERVE_NOINLINE void close_tile(const Recurrence& r, int64_t head, int64_t d, int64_t c) {
  const int64_t width = r.a.shape.value_width;
  const int tail = static_cast<int>(width - c);
  const int64_t at = (head * r.a.shape.key_width + d) * width + c;
  const bool by_row = r.a.shape.by_row;
  F sum[R][W];
#pragma GCC unroll 8
  for (int i = 0; i < R; i++) {
#pragma GCC unroll 8
    for (int w = 0; w < W; w++) sum[i][w] = zero();
  }
  const float *u = r.closing + c, *k = (by_row ? r.ending : r.keys) + d;
  const int64_t u_step = r.value_row, k_step = r.key_row;
  // Each of the kStateChunk steps prefetches kSpan floats,
  // an equal part of the next R rows of the state.
  constexpr int64_t kSpan = R * W * kLanes / kStateChunk;
  const float* ahead = r.a.closed + (head * r.a.shape.key_width + d + R) * width + R * c;
  for (int64_t t = 0; t < kStateChunk; t++, u += u_step, k += k_step, ahead += kSpan) {
    prefetch(ahead);
    if (kSpan > 16) prefetch(ahead + 16);
    F row[W];
#pragma GCC unroll 8
    for (int w = 0; w < W; w++) row[w] = load(u + w * kLanes);
#pragma GCC unroll 8
    for (int i = 0; i < R; i++) {
      const F key = set1(k[i]);
#pragma GCC unroll 8
      for (int w = 0; w < W; w++) sum[i][w] = fma(key, row[w], sum[i][w]);
    }
  }
  const float* from = r.a.closed + at;
  float* to = r.a.closed_to + at;
#pragma GCC unroll 8
  for (int i = 0; i < R; i++, from += width, to += width) {
    const F fade = set1(by_row ? r.row_fade[d + i] : r.fade[kStateChunk - 1]);
#pragma GCC unroll 8
    for (int w = 0; w < W; w++) {
      const F x = fma(fade, kTail ? load_n(from, tail) : load(from + w * kLanes), sum[i][w]);
      kTail ? store_n(to, x, tail) : store(to + w * kLanes, x);
    }
  }
}

// Updates the state of a head by its full chunk, where (x) is the outer product and i ascends:
//   S <- exp(G_end) S + sum_i k_i (x) (exp(G_end - G_i) u_i)
// If the decay is a vector (by_row), exp(G_end - G_i) multiplies k_i instead of u_i.
static CPUSERVE_NOINLINE void close_state(const Recurrence& r, int64_t head, UnitFetch& fetch) {
  const int64_t width = r.a.shape.value_width, row = r.value_row;
  const float* u = r.u + head * kStateChunk * row;
  for (int64_t i = 0; i < r.a.num_open; i++) {
    const F by = set1(r.fade[kStateChunk + i]);
    for (int64_t c = 0; c < row; c += kLanes) {
      store(r.closing + i * row + c, mul(by, load(u + i * row + c)));
    }
  }
  in_tiles(r.a.shape.key_width, [&](int64_t d, auto height) {
    const auto tile = [&](int64_t c, auto wide, auto tail) {
      fetch.few();
      close_tile<decltype(height)::value, decltype(wide)::value, decltype(tail)::value != 0>(
          r, head, d, c);
    };
    over_last_columns(over_columns<kTileVecs>(0, width, tile), width, tile);
  });
}

template <bool kDelta>
static inline void recurrent_unit(const Recurrence& r) {
  const RecurrentArgs& a = r.a;
  const int64_t width = a.shape.value_width;
  append_rows(r);
  UnitFetch fetch(r);
  const bool few = r.vectors <= kFewVectors;
  const int64_t heads = a.shape.heads, together = few ? kStreams : 1;
  for (int64_t first = 0; first < heads; first += together) {
    const int64_t end = first + together < heads ? first + together : heads;
    few ? stream_products(r, first, end, fetch) : panel_products(r, first, fetch);
    if (first == 0) key_products<kDelta>(r);
    for (int64_t head = first; head < end; head++) {
      float* sums = r.sums + (head - first) * r.vectors * r.value_row;
      decay_products<kDelta>(r, head);
      in_tiles<kDelta ? kTileRows / 2 : kTileRows>(a.rows, [&](int64_t row, auto height) {
        const auto tile = [&](int64_t c, auto wide, auto tail) {
          solve_tile<kDelta, decltype(height)::value, decltype(wide)::value,
                     decltype(tail)::value != 0>(r, head, sums, row, c);
        };
        over_last_columns(over_columns<kTileVecs>(0, width, tile), width, tile);
      });
      if (r.closes) close_state(r, head, fetch);
    }
  }
}

static inline void recurrent(const RecurrentArgs& a) noexcept {
  const Recurrence r(a);
  a.shape.delta ? recurrent_unit<true>(r) : recurrent_unit<false>(r);
}

}  // namespace CPUSERVE_NS

#undef CPUSERVE_NOINLINE
