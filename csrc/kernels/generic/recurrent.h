// Gated delta nets and Mamba2: kernels/table.h has the formulas.
//
// Lanes are columns of the state, so S^T k and S^T q are chains in ascending order of the key's
// elements, as in a linear. A column of u and of the result needs that column of the state only.
// k_i . k_t has the only sums across lanes; their order is the same for all pairs of rows.
//
// One token is bound by reading the state, so all that it does besides is to stay behind the
// memory: it reads blocks of consecutive rows, asks for the block after the one in use, and
// meanwhile for the open rows that come next. Many tokens are bound by their products, with tiles
// as in linear/dense.h. Neither changes the order of a sum. A state is closed one head at a time,
// right after that head's rows, while it is still in L2.
#pragma once
#include "kernels/generic/convert.h"
#include "kernels/generic/math.h"
#include "kernels/table.h"

namespace CPUSERVE_NS {

// A unit's memory, and what has been computed of it.
struct Recurrence {
  static constexpr int64_t C = kStateChunk;

  RecurrentArgs a;
  int64_t key_row, value_row;  // floats from row to row, whole vectors
  float* keys;                 // [C][key_row]; zeros behind key_width
  float* u;                    // [heads][C][value_row]
  float* decay;                // [heads][C], G
  float* queries;              // [rows][key_row]; zeros behind key_width
  float* closing;              // [C][key_row] keys times the decay until the chunk's end
  float* sums;                 // [vectors][value_row] the closed state times a vector
  float *kk, *kq;              // [rows][C] k_i . k_t and k_i . q_t
  float *to_u, *to_out;        // [rows][C] the same times exp(G_t - G_i)
  float* fade;                 // [C] exp(G_i); [C] exp(G_end - G_i)
  int vectors;                 // k (delta only) and then q of each row
  const float* vector[2 * kStateChunk];

  explicit Recurrence(const RecurrentArgs& args)
      : a(args),
        key_row(recurrent_row_floats(args.shape.key_width)),
        value_row(recurrent_row_floats(args.shape.value_width)) {
    keys = a.open;
    u = keys + C * key_row;
    decay = u + a.shape.heads * C * value_row;
    const uintptr_t scratch = (reinterpret_cast<uintptr_t>(a.scratch) + 63) & ~uintptr_t{63};
    queries = reinterpret_cast<float*>(scratch);
    closing = queries + C * key_row;
    sums = closing + C * key_row;
    kk = sums + 2 * C * value_row;
    kq = kk + C * C;
    to_u = kq + C * C;
    to_out = to_u + C * C;
    fade = to_out + C * C;
    const int rows = static_cast<int>(a.rows);
    vectors = a.shape.delta ? 2 * rows : rows;
    for (int t = 0; t < rows; t++) {
      vector[t] = keys + (a.num_open + t) * key_row;
      vector[vectors - rows + t] = queries + t * key_row;
    }
  }
};

CPUSERVE_INLINE void copy_padded(float* to, const float* x, int64_t width, int64_t row) {
  copy_f32(to, x, static_cast<int>(width));
  for (int64_t i = width; i < row; i++) to[i] = 0.0f;
}

static inline void append_rows(const Recurrence& r) {
  const RecurrentArgs& a = r.a;
  for (int64_t t = 0; t < a.rows; t++) {
    const int64_t n = a.num_open + t;
    copy_padded(r.keys + n * r.key_row, a.k + t * a.k_stride, a.shape.key_width, r.key_row);
    copy_padded(r.queries + t * r.key_row, a.q + t * a.q_stride, a.shape.key_width, r.key_row);
    for (int64_t head = 0; head < a.shape.heads; head++) {
      float* decay = r.decay + head * kStateChunk + n;
      *decay = (n ? decay[-1] : 0.0f) + a.g[t * a.gate_stride + head];
    }
  }
}

// Calls f with 1 <= n <= kTileRows as a type.
template <int N>
struct Height {
  static constexpr int value = N;
};
template <int N = 1, class Call>
CPUSERVE_INLINE void with_height(int n, const Call& call) {
  if constexpr (N == kTileRows) {
    call(Height<N>{});
  } else {
    n == N ? call(Height<N>{}) : with_height<N + 1>(n, call);
  }
}
// Divides [0, n) into the fewest pieces of up to kTileRows, all about as high as each other, and
// calls f with the first row of each and its height as a type.
template <class Call>
CPUSERVE_INLINE void in_tiles(int64_t n, const Call& call) {
  const int64_t tiles = (n + kTileRows - 1) / kTileRows;
  for (int64_t i = 0, row = 0; i < tiles; i++) {
    const int64_t end = n * (i + 1) / tiles;
    with_height(static_cast<int>(end - row), [&](auto height) { call(row, height); });
    row = end;
  }
}

// Lines that are fetched beside the state, in pieces.
struct Aside {
  struct Piece {
    const float *at, *end;
  } piece[2];
  int64_t step;  // lines at a time

  void fetch() {
    for (int64_t i = 0; i < step; i++) {
      Piece& p = piece[piece[0].at >= piece[0].end];
      if (p.at >= p.end) return;
      prefetch_l2(p.at);
      p.at += 16;
    }
  }
};

// Rows [row0, row0 + rows) of one state.
struct StateBlock {
  const float* state;  // of row0
  int64_t row0, rows;
  int64_t ahead;  // floats from a row to the one to fetch with it
};

// Adds the products of R vectors with a block to W vectors of columns from c.
template <int R, int W, bool kTail>
static inline void state_tile(const Recurrence& r, const StateBlock& b, int64_t first, int64_t c) {
  const int64_t width = r.a.shape.value_width;
  const int tail = static_cast<int>(width - c);
  float* const sums = r.sums + first * r.value_row + c;
  const float* x[R];
  F sum[R][W];
#pragma GCC unroll 8
  for (int i = 0; i < R; i++) {
    x[i] = r.vector[first + i] + b.row0;
#pragma GCC unroll 8
    for (int w = 0; w < W; w++) {
      sum[i][w] = b.row0 ? load(sums + i * r.value_row + w * kLanes) : zero();
    }
  }
  const float* s = b.state + c;
  for (int64_t d = 0; d < b.rows; d++, s += width) {
#pragma GCC unroll 8
    for (int i = 0; i < W * kLanes; i += 16) prefetch(s + b.ahead + i);
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
#pragma GCC unroll 8
  for (int i = 0; i < R; i++) {
#pragma GCC unroll 8
    for (int w = 0; w < W; w++) store(sums + i * r.value_row + w * kLanes, sum[i][w]);
  }
}

// Calls run(c, W as a type, whether it is a tail) for all columns [0, width), with W = kWide where
// as many vectors are left.
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

// The products of all vectors with the state of one head. Blocks are small for few vectors, so that
// what is fetched ahead arrives in time; otherwise they are as large as L1 allows besides the sums.
static inline void state_products(const Recurrence& r, int64_t head, Aside& aside) {
  const int64_t width = r.a.shape.value_width, depth = r.a.shape.key_width;
  const int64_t floats = r.vectors <= 2 ? 1024 : 4096;
  const int64_t block = floats > width ? floats / width : 1;
  const int64_t blocks = (depth + block - 1) / block;
  int64_t lines = 0;
  for (const Aside::Piece& p : aside.piece) lines += (p.end - p.at + 15) / 16;
  aside.step = (lines + blocks - 1) / blocks;
  const float* state = r.a.closed + head * depth * width;
  for (int64_t row = 0; row < depth; row += block) {
    const int64_t rows = depth - row < block ? depth - row : block;
    const StateBlock b{state + row * width, row, rows, block * width};
    aside.fetch();
    in_tiles(r.vectors, [&](int64_t first, auto height) {
      constexpr int R = decltype(height)::value;
      const auto tile = [&](int64_t c, auto wide, auto tail) {
        state_tile<R, decltype(wide)::value, decltype(tail)::value != 0>(r, b, first, c);
      };
      int64_t c = 0;
      if constexpr (R <= 2) c = over_columns<2 * kTileVecs>(c, width, tile);
      c = over_columns<kTileVecs>(c, width, tile);
      over_last_columns(c, width, tile);
    });
  }
}

// k_i . k_t and k_i . q_t for all rows t of this call and i <= t.
template <bool kDelta>
static inline void key_products(const Recurrence& r) {
  for (int64_t t = 0; t < r.a.rows; t++) {
    const int64_t n = r.a.num_open + t;
    const float *k = r.keys + n * r.key_row, *q = r.queries + t * r.key_row;
    for (int64_t i = 0; i <= n; i++) {
      const float* key = r.keys + i * r.key_row;
      F with_k = zero(), with_q = zero();
      for (int64_t d = 0; d < r.key_row; d += kLanes) {
        const F x = load(key + d);
        if (kDelta) with_k = fma(x, load(k + d), with_k);
        with_q = fma(x, load(q + d), with_q);
      }
      if (kDelta) r.kk[t * kStateChunk + i] = reduce_add(with_k);
      r.kq[t * kStateChunk + i] = reduce_add(with_q);
    }
  }
}

// What the rows of one head are multiplied by. Lanes behind row t hold anything and are not used.
template <bool kDelta>
static inline void decay_products(const Recurrence& r, int64_t head) {
  const float* decay = r.decay + head * kStateChunk;
  for (int64_t i = 0; i < kStateChunk; i += kLanes) store(r.fade + i, exp(load(decay + i)));
  for (int64_t t = 0; t < r.a.rows; t++) {
    const F now = set1(decay[r.a.num_open + t]);
    for (int64_t i = 0; i < kStateChunk; i += kLanes) {
      const int64_t at = t * kStateChunk + i;
      const F faded = exp(sub(now, load(decay + i)));
      if (kDelta) store(r.to_u + at, mul(faded, load(r.kk + at)));
      store(r.to_out + at, mul(faded, load(r.kq + at)));
    }
  }
}

// u and the result of all rows of this call, for W vectors of columns from c.
template <bool kDelta, int W, bool kTail>
static inline void solve_tile(const Recurrence& r, int64_t head, int64_t c) {
  const int64_t width = r.a.shape.value_width;
  const int tail = static_cast<int>(width - c);
  const float* read = r.sums + (r.vectors - r.a.rows) * r.value_row + c;
  float* const u = r.u + head * kStateChunk * r.value_row + c;
  for (int64_t t = 0; t < r.a.rows; t++) {
    const int64_t n = r.a.num_open + t;
    const float *to_u = r.to_u + t * kStateChunk, *to_out = r.to_out + t * kStateChunk;
    const F fade = set1(r.fade[n]);
    F kept[W], out[W];
#pragma GCC unroll 8
    for (int w = 0; w < W; w++) {
      const int64_t at = t * r.value_row + w * kLanes;
      if (kDelta) kept[w] = mul(fade, load(r.sums + at + c));
      out[w] = mul(fade, load(read + at));
    }
    for (int64_t i = 0; i < n; i++) {
      const F by_u = kDelta ? set1(to_u[i]) : zero(), by_out = set1(to_out[i]);
#pragma GCC unroll 8
      for (int w = 0; w < W; w++) {
        const F x = load(u + i * r.value_row + w * kLanes);
        if (kDelta) kept[w] = fma(by_u, x, kept[w]);
        out[w] = fma(by_out, x, out[w]);
      }
    }
    const float* v = r.a.v + t * r.a.v_stride + head * width + c;
    float* to = r.a.out + t * r.a.out_stride + head * width + c;
    const F beta = set1(r.a.beta[t * r.a.gate_stride + head]), by_out = set1(to_out[n]);
#pragma GCC unroll 8
    for (int w = 0; w < W; w++) {
      F x = kTail ? load_n(v, tail) : load(v + w * kLanes);
      if (kDelta) x = sub(x, kept[w]);
      x = mul(beta, x);
      store(u + n * r.value_row + w * kLanes, x);
      x = fma(by_out, x, out[w]);
      kTail ? store_n(to, x, tail) : store(to + w * kLanes, x);
    }
  }
}

// Rows [d, d + R) and W vectors of columns of the state after a full chunk.
template <int R, int W, bool kTail>
static inline void close_tile(const Recurrence& r, int64_t head, int64_t d, int64_t c) {
  const int64_t width = r.a.shape.value_width;
  const int tail = static_cast<int>(width - c);
  const int64_t at = (head * r.a.shape.key_width + d) * width + c;
  const float* from = r.a.closed + at;
  float* to = r.a.closed_to + at;
  const F fade = set1(r.fade[kStateChunk - 1]);
  F sum[R][W];
#pragma GCC unroll 8
  for (int i = 0; i < R; i++) {
#pragma GCC unroll 8
    for (int w = 0; w < W; w++) {
      const float* p = from + i * width + w * kLanes;
      sum[i][w] = mul(fade, kTail ? load_n(p, tail) : load(p));
    }
#pragma GCC unroll 8
    for (int w = 0; w < W * kLanes; w += 16) prefetch(from + (R + i) * width + w);
  }
  const float* u = r.u + head * kStateChunk * r.value_row + c;
  const float* k = r.closing + d;
  for (int64_t t = 0; t < kStateChunk; t++, u += r.value_row, k += r.key_row) {
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
#pragma GCC unroll 8
  for (int i = 0; i < R; i++) {
#pragma GCC unroll 8
    for (int w = 0; w < W; w++) {
      float* p = to + i * width + w * kLanes;
      kTail ? store_n(p, sum[i][w], tail) : store(p, sum[i][w]);
    }
  }
}

// S <- exp(G_end) S + sum_i (exp(G_end - G_i) k_i) (x) u_i, i ascending
static inline void close_state(const Recurrence& r, int64_t head) {
  const int64_t width = r.a.shape.value_width;
  const float* decay = r.decay + head * kStateChunk;
  float* until_end = r.fade + kStateChunk;
  const F end = set1(decay[kStateChunk - 1]);
  for (int64_t i = 0; i < kStateChunk; i += kLanes) {
    store(until_end + i, exp(sub(end, load(decay + i))));
  }
  for (int64_t i = 0; i < kStateChunk; i++) {
    const F by = set1(until_end[i]);
    for (int64_t d = 0; d < r.key_row; d += kLanes) {
      const int64_t at = i * r.key_row + d;
      store(r.closing + at, mul(by, load(r.keys + at)));
    }
  }
  in_tiles(r.a.shape.key_width, [&](int64_t d, auto height) {
    const auto tile = [&](int64_t c, auto wide, auto tail) {
      close_tile<decltype(height)::value, decltype(wide)::value, decltype(tail)::value != 0>(
          r, head, d, c);
    };
    over_last_columns(over_columns<kTileVecs>(0, width, tile), width, tile);
  });
}

template <bool kDelta>
static inline void recurrent_unit(const Recurrence& r) {
  constexpr int kSolveVecs = 4;  // as many chains as keep two multipliers busy
  const RecurrentArgs& a = r.a;
  const int64_t width = a.shape.value_width, open = a.num_open + a.rows;
  append_rows(r);
  for (int64_t head = 0; head < a.shape.heads; head++) {
    const float* u = r.u + head * kStateChunk * r.value_row;
    Aside aside{
        {{r.keys, head ? r.keys : r.keys + a.num_open * r.key_row}, {u, u + open * r.value_row}},
        0};
    state_products(r, head, aside);
    if (head == 0) key_products<kDelta>(r);
    decay_products<kDelta>(r, head);
    const auto tile = [&](int64_t c, auto wide, auto tail) {
      solve_tile<kDelta, decltype(wide)::value, decltype(tail)::value != 0>(r, head, c);
    };
    over_last_columns(over_columns<kSolveVecs>(0, width, tile), width, tile);
    if (open == kStateChunk) close_state(r, head);
  }
}

static inline void recurrent(const RecurrentArgs& a) noexcept {
  const Recurrence r(a);
  a.shape.delta ? recurrent_unit<true>(r) : recurrent_unit<false>(r);
}

}  // namespace CPUSERVE_NS
