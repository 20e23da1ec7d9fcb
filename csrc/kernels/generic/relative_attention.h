// Attention of encoders, with scores that depend on the distance between query and key.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include "kernels/table/rows.h"

namespace cpuserve {

// The query rows that a call computes at most, which share the copies that the call makes.
constexpr int64_t kRelativeRows = 64;
// Keys are copied in multiples of this number, the lanes of four vectors of the widest level.
constexpr int64_t kRelativeKeys = 64;

// Computes rows [row0, row0 + rows) of a head, for a sequence of n tokens that all see each other:
//   s_ij = scale (q_i . k_j + q_i . key_r + query_r . k_j) + bias_r
//   out_i = sum over j of softmax(s_i)_j v_j
// where r = places[j - i] is the row of the distance in the tables (DeBERTa: key_r, query_r;
// T5: bias_r). A table that is nullptr is left out.
// All sums over columns and keys have one order, whatever the other rows of the call.
struct RelativeAttentionArgs {
  const float *q, *k, *v;                // the columns of the head in the row of the first token
  int64_t stride;                        // floats from a token to the next one, in q, k and v
  int64_t n, row0, rows;                 // rows: 1 to kRelativeRows
  int32_t width;                         // columns of the head
  const float *key_table, *query_table;  // [width][count]
  const float* bias_table;               // [count]
  int64_t count;
  const float* places;  // places[d] for -n < d < n, as floats
  float scale;
  float* out;  // the columns of the head in the row of the first token
  int64_t out_stride;
  void* scratch;  // relative_attention_scratch() bytes
};

// Returns the bytes of scratch for sequences of up to n tokens: scores, the keys column by column,
// and for each column the entries of both tables by distance.
inline size_t relative_attention_scratch(int64_t n, int32_t width) {
  const auto keys = static_cast<size_t>(round_up(n, kRelativeKeys)), rows = size_t{kRelativeRows};
  const auto columns = static_cast<size_t>(width);
  return (rows * keys + columns * keys + (2 * columns + 1) * (keys + rows)) * sizeof(float) + 64;
}

#define CPUSERVE_RELATIVE_ATTENTION_KERNELS(X) X(relative_attention, const RelativeAttentionArgs&)

}  // namespace cpuserve

#ifdef CPUSERVE_VEC  // in an ISA unit
#include "kernels/generic/math.h"

namespace CPUSERVE_NS {

// The copies of a call: keys [width][row] column by column, with zeros after the last one; and the
// tables by distance [width][window], where entry m is for a key m - last tokens after the query.
struct RelativeCopies {
  float *scores, *keys, *by_query, *by_key, *bias;
  int64_t row, window, last;

  explicit RelativeCopies(const RelativeAttentionArgs& a)
      : row(round_up(a.n, kRelativeKeys)), window(row + kRelativeRows), last(a.row0 + a.rows - 1) {
    const uintptr_t base = (reinterpret_cast<uintptr_t>(a.scratch) + 63) & ~uintptr_t{63};
    scores = reinterpret_cast<float*>(base);
    keys = scores + kRelativeRows * row;
    by_query = keys + a.width * row;
    by_key = by_query + a.width * window;
    bias = by_key + a.width * window;
  }
};

static inline void copy_keys(const RelativeAttentionArgs& a, const RelativeCopies& c) {
  for (int64_t j = 0; j < c.row; j++) {
    for (int64_t d = 0; d < a.width; d++) {
      c.keys[d * c.row + j] = j < a.n ? a.k[j * a.stride + d] : 0.0f;
    }
  }
}

// Writes the entries of a table [columns][count] by distance. Distances that no pair of tokens has
// get the entry of the largest distance, and no result depends on them.
static inline void copy_table(const RelativeAttentionArgs& a, const RelativeCopies& c,
                              const float* table, int64_t columns, float* to) {
  if (!table) return;
  for (int64_t d = 0; d < columns; d++, table += a.count, to += c.window) {
    for (int64_t m = 0; m < c.window; m++) {
      const int64_t distance = m - c.last < a.n ? m - c.last : a.n - 1;
      to[m] = table[static_cast<int64_t>(a.places[distance])];
    }
  }
}

// Computes the scores of a query row for the keys of four vectors from key j on.
template <bool kByQuery, bool kByKey>
CPUSERVE_INLINE void relative_scores(const RelativeAttentionArgs& a, const RelativeCopies& c,
                                     int64_t i, int64_t j, float* scores) {
  const float* q = a.q + i * a.stride;
  const int64_t shift = j + c.last - i;
  F sum[4], more[4];
#pragma GCC unroll 4
  for (int v = 0; v < 4; v++) sum[v] = more[v] = zero();
  for (int64_t d = 0; d < a.width; d++) {
    const F factor = set1(q[d]);
#pragma GCC unroll 4
    for (int v = 0; v < 4; v++) {
      const F key = load(c.keys + d * c.row + j + v * kLanes);
      F of = key;
      if (kByQuery) of = add(key, load(c.by_query + d * c.window + shift + v * kLanes));
      sum[v] = fma(factor, of, sum[v]);
      if (kByKey) {
        more[v] = fma(key, load(c.by_key + d * c.window + shift + v * kLanes), more[v]);
      }
    }
  }
#pragma GCC unroll 4
  for (int v = 0; v < 4; v++) {
    F s = mul(add(sum[v], more[v]), set1(a.scale));
    if (a.bias_table) s = add(s, load(c.bias + shift + v * kLanes));
    store(scores + j + v * kLanes, s);
  }
}

// Replaces n scores by exp(score - the largest one), and returns 1 / their sum.
static inline float soften_scores(float* scores, int64_t n) {
  const float least = -__builtin_inff();
  F most = set1(least);
  for (int64_t j = 0; j < n; j += kLanes) {
    const int left = static_cast<int>(n - j < kLanes ? n - j : kLanes);
    most = max(most, keep(load(scores + j), 0, left, set1(least)));
  }
  const F largest = set1(reduce_max(most));
  F sum = zero();
  for (int64_t j = 0; j < n; j += kLanes) {
    const int left = static_cast<int>(n - j < kLanes ? n - j : kLanes);
    const F p = decayed(sub(load(scores + j), largest));
    store(scores + j, p);
    sum = add(sum, keep(p, 0, left, zero()));
  }
  return 1.0f / reduce_add(sum);
}

// Adds the values of all keys, weighted by the scores of kRows rows, for a vector of columns at d.
template <int kRows, bool kTail>
CPUSERVE_INLINE void relative_values(const RelativeAttentionArgs& a, const RelativeCopies& c,
                                     const float* factor, int64_t row, int64_t d, int left) {
  F sum[kRows];
#pragma GCC unroll 8
  for (int i = 0; i < kRows; i++) sum[i] = zero();
  const float* scores = c.scores + row * c.row;
  for (int64_t j = 0; j < a.n; j++) {
    const float* at = a.v + j * a.stride + d;
    const F value = kTail ? load_n(at, left) : load(at);
#pragma GCC unroll 8
    for (int i = 0; i < kRows; i++) sum[i] = fma(set1(scores[i * c.row + j]), value, sum[i]);
  }
#pragma GCC unroll 8
  for (int i = 0; i < kRows; i++) {
    float* to = a.out + (a.row0 + row + i) * a.out_stride + d;
    const F mean = mul(sum[i], set1(factor[row + i]));
    kTail ? store_n(to, mean, left) : store(to, mean);
  }
}

template <int kRows>
static inline void relative_columns(const RelativeAttentionArgs& a, const RelativeCopies& c,
                                    const float* factor, int64_t row) {
  for (int64_t d = 0; d < a.width; d += kLanes) {
    const int left = static_cast<int>(a.width - d);
    if (left < kLanes) {
      relative_values<kRows, true>(a, c, factor, row, d, left);
    } else {
      relative_values<kRows, false>(a, c, factor, row, d, kLanes);
    }
  }
}

static inline void relative_attention(const RelativeAttentionArgs& a) noexcept {
  const RelativeCopies c(a);
  copy_keys(a, c);
  copy_table(a, c, a.key_table, a.width, c.by_query);
  copy_table(a, c, a.query_table, a.width, c.by_key);
  copy_table(a, c, a.bias_table, 1, c.bias);
  float factor[kRelativeRows];
  for (int64_t j = 0; j < a.n; j += 4 * kLanes) {
    for (int64_t r = 0; r < a.rows; r++) {
      const int64_t i = a.row0 + r;
      float* scores = c.scores + r * c.row;
      if (a.key_table && a.query_table) {
        relative_scores<true, true>(a, c, i, j, scores);
      } else if (a.key_table) {
        relative_scores<true, false>(a, c, i, j, scores);
      } else if (a.query_table) {
        relative_scores<false, true>(a, c, i, j, scores);
      } else {
        relative_scores<false, false>(a, c, i, j, scores);
      }
    }
  }
  for (int64_t r = 0; r < a.rows; r++) factor[r] = soften_scores(c.scores + r * c.row, a.n);
  int64_t row = 0;
  for (; row + 8 <= a.rows; row += 8) relative_columns<8>(a, c, factor, row);
  for (; row < a.rows; row++) relative_columns<1>(a, c, factor, row);
}

}  // namespace CPUSERVE_NS
#endif
