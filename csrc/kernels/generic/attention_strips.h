// The two products of attention: R query rows by a strip of keys (QK), and R rows of probabilities
// by a strip of value columns (PV). A strip here is the keys or columns of a register tile.
#pragma once
#include "kernels/generic/attention_chunk.h"

namespace CPUSERVE_NS {

// Adds x[r] w[j] to the sums c, where x[r] is the float at left + r * stride. With kInOrder, gcc
// finishes a sum before the next one. This saves spills in QK of bf16 (1.15 x with 6 rows), but
// delays QK of 8-bit codes (0.9 x).
template <bool kInOrder, int R, int V>
CPUSERVE_INLINE void add_singles(F (&c)[R][V], const float* left, int stride, const F (&w)[V]) {
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) {
    const F x = set1(left[r * stride]);
#pragma GCC unroll 4
    for (int j = 0; j < V; j++) {
      c[r][j] = fma(x, w[j], c[r][j]);
      if constexpr (kInOrder) c[r][j] = in_order(c[r][j]);
    }
  }
}

// Hides the origin of a pointer from the compiler. With kSplit, a step reads the first elements
// of its pairs, multiplies them, and reads the pairs again: otherwise gcc keeps both elements of
// all pairs in registers, and spills the sums.
template <class T>
CPUSERVE_INLINE T* read_again(T* p) {
  asm("" : "+r"(p));
  return p;
}

// Stores in s the scores of R rows and V * kLanes keys: the keys of block a, then of block b.
template <class Kv, int R, int V, Ahead kAhead>
static __attribute__((noinline)) void score_strip(const typename Kv::Left* q,
                                                  const typename Kv::Elem* a,
                                                  const typename Kv::Elem* b, int hd, float* s,
                                                  Fetch& next) {
  constexpr int kVec = kLanes * Kv::kSide, kInBlock = kBlock / kLanes;
  const int steps = hd / Kv::kStep;
  Fetch f = next;
  F c[R][V];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) {
#pragma GCC unroll 4
    for (int j = 0; j < V; j++) c[r][j] = zero();
  }
  for (int d = 0; d < steps; d++) {
    fetch_lines<kAhead>(f, step_lines<Kv, kAhead, false>(V));
    const auto at = [&](int j) { return (j < kInBlock ? a : b) + j % kInBlock * kVec; };
    if constexpr (Kv::kSplit) {
      F w[V];
#pragma GCC unroll 4
      for (int j = 0; j < V; j++) w[j] = Kv::first(at(j), kBlock);
      add_singles<!Kv::kScaled>(c, q, 2, w);
      a = read_again(a);
      b = read_again(b);
#pragma GCC unroll 4
      for (int j = 0; j < V; j++) w[j] = Kv::second(at(j), kBlock);
      add_singles<!Kv::kScaled>(c, q + 1, 2, w);
    } else {
      typename Kv::Vec w[V];
#pragma GCC unroll 4
      for (int j = 0; j < V; j++) w[j] = Kv::load(at(j), kBlock);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        const typename Kv::Vec x = Kv::broadcast(q + r * Kv::kStep);
#pragma GCC unroll 4
        for (int j = 0; j < V; j++) c[r][j] = Kv::mac(c[r][j], x, w[j]);
      }
    }
    q += R * Kv::kStep;
    a += kBlock * Kv::kStep;
    b += kBlock * Kv::kStep;
  }
  next = f;
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) {
#pragma GCC unroll 4
    for (int j = 0; j < V; j++) store(s + r * kChunk + j * kLanes, c[r][j]);
  }
}

// Does the same as score_strip for two or more rows:
// multiplies the rows in pairs with BFMMLA (attention_pairs.h).
template <class Kv, int R, int V, Ahead kAhead>
static void score_pairs(const typename Kv::Left* q, const typename Kv::Elem* a,
                        const typename Kv::Elem* b, int hd, float* s, Fetch& next);

// Adds to o[r][0 .. V * kLanes) the sum of p[r][key] v[key] over keys [begin, end).
// The strip begins at `column` of the values. A step multiplies two keys. If only one of them
// is in the range, the values of the other key may be stale and are set to zero.
// If `fresh` is true, the sums start from zero instead of from o.
template <class Kv, int R, int V, Ahead kAhead>
static __attribute__((noinline)) void value_strip(const ChunkBlocks<Kv>& blocks,
                                                  const typename Kv::Left* p, int begin, int end,
                                                  int column, bool fresh, float* o, size_t ldo,
                                                  Fetch& next) {
  using Values = typename Kv::Values;
  constexpr int S = Kv::kStep;
  const int width = Values::width(blocks.hd);
  Fetch f = next;
  F c[R][V];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) {
#pragma GCC unroll 4
    for (int j = 0; j < V; j++)
      c[r][j] = fresh ? zero() : load(o + static_cast<size_t>(r) * ldo + j * kLanes);
  }
  typename Kv::Vec w[V];
  const auto at = [&](int k) {
    return blocks.v[k / kBlock] + k % kBlock / S * width * S + Values::offset(column);
  };
  const auto load_at = [&](const typename Kv::Elem* v, int j) __attribute__((always_inline)) {
    return Values::template load<V>(v, column, j, width);
  };
  const auto multiply = [&](int k) __attribute__((always_inline)) {
    if constexpr (Kv::kSplit) {
      F half[V];
#pragma GCC unroll 4
      for (int j = 0; j < V; j++) half[j] = even(w[j]);
      add_singles<false>(c, p + place_in_p<Kv>(0, k), kChunk, half);
#pragma GCC unroll 4
      for (int j = 0; j < V; j++) half[j] = odd(w[j]);
      add_singles<false>(c, p + place_in_p<Kv>(0, k) + 1, kChunk, half);
    } else {
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        const typename Kv::Vec x = Kv::broadcast(p + place_in_p<Kv>(r, k));
#pragma GCC unroll 4
        for (int j = 0; j < V; j++) c[r][j] = Kv::mac(c[r][j], x, w[j]);
      }
    }
  };
  int k = begin;
  if (k % S != 0) {
    k--;
#pragma GCC unroll 4
    for (int j = 0; j < V; j++) w[j] = Kv::keep_second(load_at(at(k), j));
    multiply(k);
    k += S;
  }
  for (const int whole = end / S * S; k < whole;) {
    const int block_end = (k / kBlock + 1) * kBlock, stop = whole < block_end ? whole : block_end;
    for (const typename Kv::Elem* v = at(k); k < stop; k += S, v += width * S) {
      fetch_lines<kAhead>(f, step_lines<Kv, kAhead, true>(V));
      if constexpr (Kv::kSplit) {
        F half[V];
#pragma GCC unroll 4
        for (int j = 0; j < V; j++) half[j] = Values::template first<V>(v, column, j, width);
        add_singles<false>(c, p + place_in_p<Kv>(0, k), kChunk, half);
        const typename Kv::Elem* again = read_again(v);
#pragma GCC unroll 4
        for (int j = 0; j < V; j++) half[j] = Values::template second<V>(again, column, j, width);
        add_singles<false>(c, p + place_in_p<Kv>(0, k) + 1, kChunk, half);
        continue;
      }
#pragma GCC unroll 4
      for (int j = 0; j < V; j++) w[j] = load_at(v, j);
      multiply(k);
    }
  }
  if (k < end) {
#pragma GCC unroll 4
    for (int j = 0; j < V; j++) w[j] = Kv::keep_first(load_at(at(k), j));
    multiply(k);
  }
  next = f;
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) {
#pragma GCC unroll 4
    for (int j = 0; j < V; j++) store(o + static_cast<size_t>(r) * ldo + j * kLanes, c[r][j]);
  }
}

// Does the same as value_strip for two or more rows and a multiple of 4 keys:
// multiplies the rows in pairs with BFMMLA.
template <class Kv, int R, int V, Ahead kAhead>
static void value_pairs(const ChunkBlocks<Kv>& blocks, const typename Kv::Left* p, int begin,
                        int end, int column, bool fresh, float* o, size_t ldo, Fetch& next);

// Multiplies keys [begin, end): with value_pairs 4 keys at a time, and with value_strip the up to
// 3 keys at either end that are no whole group of 4. BFMMLA adds in the same order as two BFDOTs,
// so value_pairs and value_strip compute the same bits.
template <class Kv, int R, int V, Ahead kAhead>
static __attribute__((noinline)) void value_pairs_and_rest(const ChunkBlocks<Kv>& c,
                                                           const typename Kv::Left* p, int begin,
                                                           int end, int column, bool fresh,
                                                           float* o, size_t ldo, Fetch& f) {
  const int first = (begin + 3) / 4 * 4, last = end / 4 * 4;
  if (first >= last) {
    return value_strip<Kv, R, V, kAhead>(c, p, begin, end, column, fresh, o, ldo, f);
  }
  if (begin < first) {
    value_strip<Kv, R, V, Ahead::light>(c, p, begin, first, column, fresh, o, ldo, f);
  }
  value_pairs<Kv, R, V, kAhead>(c, p, first, last, column, fresh && begin == first, o, ldo, f);
  if (last < end) {
    value_strip<Kv, R, V, Ahead::light>(c, p, last, end, column, false, o, ldo, f);
  }
}

// The functions that multiply strips, compiled separately for each number of rows R.
// The functions that call them are compiled once and take R as an argument:
// this costs an indirect call for each strip, but saves half of the machine code of attention.
template <class Kv>
struct Strips {
  using Score = void (*)(const typename Kv::Left* q, const typename Kv::Elem* a,
                         const typename Kv::Elem* b, int hd, float* s, Fetch& next);
  using Value = void (*)(const ChunkBlocks<Kv>& blocks, const typename Kv::Left* p, int begin,
                         int end, int column, bool fresh, float* o, size_t ldo, Fetch& next);
  struct OfRows {
    Score score, half_score;      // for strips of strip_vecs and half_strip_vecs vectors of keys
    Value value, value2, value1;  // for strips of strip_vecs, 2 and 1 vectors of columns
  };
  OfRows of[kTallRows];
};

template <class Kv, int R, int V, Ahead kAhead>
static constexpr typename Strips<Kv>::Score score_function() {
  if constexpr (kAhead == Ahead::light && R < kLeastOfMany) {
    return nullptr;
  } else if constexpr (Kv::kRowPairs && R > 1) {
    return score_pairs<Kv, R, V, kAhead>;
  } else {
    return score_strip<Kv, R, V, kAhead>;
  }
}
template <class Kv, int R, int V, Ahead kAhead>
static constexpr typename Strips<Kv>::Value value_function() {
  if constexpr (V > strip_vecs(R)) {
    return nullptr;
  } else if constexpr (Kv::kRowPairs && R > 1) {
    return value_pairs_and_rest<Kv, R, V, kAhead>;
  } else {
    return value_strip<Kv, R, V, kAhead>;
  }
}
template <class Kv, Ahead kAhead, int R = 1>
static constexpr void fill_strips(Strips<Kv>& strips) {
  constexpr int V = strip_vecs(R);
  strips.of[R - 1] = {score_function<Kv, R, V, kAhead>(),
                      score_function<Kv, R, half_strip_vecs(R), kAhead>(),
                      value_function<Kv, R, V, kAhead>(), value_function<Kv, R, 2, kAhead>(),
                      value_function<Kv, R, 1, kAhead>()};
  if constexpr (R < kTallRows) fill_strips<Kv, kAhead, R + 1>(strips);
}
template <class Kv, Ahead kAhead>
static constexpr Strips<Kv> make_strips() {
  Strips<Kv> strips{};
  fill_strips<Kv, kAhead>(strips);
  return strips;
}
template <class Kv, Ahead kAhead>
static inline const typename Strips<Kv>::OfRows& strips_of(int R) {
  static constexpr Strips<Kv> strips = make_strips<Kv, kAhead>();
  return strips.of[R - 1];
}

}  // namespace CPUSERVE_NS
