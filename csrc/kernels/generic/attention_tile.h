// One tile of attention: R rows against one chunk of kChunk keys, from an empty state.
//
// Score lanes are keys, so a stale key only spoils lanes that are blended away. Output lanes are
// columns and the chain runs over keys, so a stale value must not be multiplied at all: keys that
// every row of the tile sees go through the R-row tile, and each row's own first and last keys
// before and after it one row at a time. Accumulators pass through memory between the three, which
// is exact, so a row's chain is its own keys in ascending order whatever the tile.
//
// Scores, maxima and sinks are kept in base 2 (times log2 e): exp2 needs no multiplication first.
#pragma once
#include "kernels/generic/math.h"
#include "kernels/table.h"
#include "kernels/vec/vec.h"

namespace CPUSERVE_NS {

// How products are formed for each KvType: kStep dims (QK) or keys (PV) enter one multiply-add.
struct KvBf16 {
  using Elem = uint16_t;  // cache element
  using Left = uint16_t;  // q and probabilities
  using Vec = P;
  static constexpr int kStep = 2;
  CPUSERVE_INLINE Vec load(const Elem* p) { return load_pairs(p); }
  CPUSERVE_INLINE Vec broadcast(const Left* p) { return set1_pair(p); }
  CPUSERVE_INLINE F mac(F acc, Vec a, Vec b) { return dot2(acc, a, b); }
  CPUSERVE_INLINE void store_left(Left* p, F x) { store_bf16_normal(p, x); }
};
struct KvF16 {
  using Elem = uint16_t;
  using Left = float;
  using Vec = F;
  static constexpr int kStep = 1;
  CPUSERVE_INLINE Vec load(const Elem* p) { return load_f16(p); }
  CPUSERVE_INLINE Vec broadcast(const Left* p) { return set1(*p); }
  CPUSERVE_INLINE F mac(F acc, Vec a, Vec b) { return fma(a, b, acc); }
  CPUSERVE_INLINE void store_left(Left* p, F x) { store(p, x); }
};
struct KvF32 {
  using Elem = float;
  using Left = float;
  using Vec = F;
  static constexpr int kStep = 1;
  CPUSERVE_INLINE Vec load(const Elem* p) { return CPUSERVE_NS::load(p); }
  CPUSERVE_INLINE Vec broadcast(const Left* p) { return set1(*p); }
  CPUSERVE_INLINE F mac(F acc, Vec a, Vec b) { return fma(a, b, acc); }
  CPUSERVE_INLINE void store_left(Left* p, F x) { store(p, x); }
};

// Tile shapes: up to kTileRows rows by kWide vectors; up to kTallRows rows by half of that, so that
// a group of 7 or 8 heads reads each key from L1 once (8 x 2 accumulators cover the latency of two
// multiply-adds a cycle, and 10 loads feed 16 of them). kWide is a power of two so that strips tile
// the 32 keys of a block.
constexpr int kWide = kTileVecs >= 4 ? 4 : kTileVecs >= 2 ? 2 : 1;
constexpr int kTallRows = kWide == 4 ? 8 : kTileRows;
constexpr int kChunkBlocks = kChunk / kBlock;
constexpr int kSlack = 64;
constexpr float kLog2E = 1.44269504f;

template <int R>
static constexpr int strip_vecs() {
  return R <= kTileRows ? kWide : kWide / 2;
}

// The blocks of one chunk of one KV head: block b's keys at k[b], values at v[b]; ahead[b] is the
// distance in elements to the same block of the chunk that comes next, 0 = none.
template <class Kv>
struct ChunkBlocks {
  const typename Kv::Elem* k[kChunkBlocks];
  const typename Kv::Elem* v[kChunkBlocks];
  ptrdiff_t ahead[kChunkBlocks];
  int hd;  // padded
};

// Everything a tile reads and writes besides the cache. Row r sees keys [lo[r], hi[r]) of the chunk
// (lo == hi: none).
template <class Kv>
struct Tile {
  const typename Kv::Left* q;  // [hd / kStep][R][kStep]
  float* s;                    // [R][kChunk] scores, then kSlack floats a last strip may touch
  typename Kv::Left* p;        // [R][kChunk] probabilities
  typename Kv::Elem* edge;     // [hd][kStep] a masked pair of values
  float* o;                    // [R] rows of hd floats, ldo apart
  size_t ldo;
  int lo[kTallRows], hi[kTallRows];
  int position[kTallRows];  // of the row's token, from the chunk's first key
  float slope[kTallRows];
  float m[kTallRows], l[kTallRows];
  float scale, softcap;  // scale includes kLog2E unless softcap or alibi come after it
  bool alibi;
};

// Scores of R rows with keys [0, V * kLanes) of two neighbouring blocks a and b.
template <class Kv, int R, int V, bool kAhead>
static __attribute__((noinline)) void score_strip(const typename Kv::Left* q,
                                                  const typename Kv::Elem* a,
                                                  const typename Kv::Elem* b, ptrdiff_t ahead_a,
                                                  ptrdiff_t ahead_b, int steps, float scale,
                                                  float* s) {
  constexpr int kVec = kLanes * Kv::kStep, kRow = kBlock * Kv::kStep, kInBlock = kBlock / kLanes;
  F c[R][V];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) {
#pragma GCC unroll 4
    for (int j = 0; j < V; j++) c[r][j] = zero();
  }
  for (int d = 0; d < steps; d++) {
    typename Kv::Vec w[V];
#pragma GCC unroll 4
    for (int j = 0; j < V; j++) {
      const typename Kv::Elem* p = (j < kInBlock ? a : b) + j % kInBlock * kVec;
      w[j] = Kv::load(p);
      if (kAhead && j * kVec * sizeof(*p) % 64 == 0)
        prefetch_l2(p + (j < kInBlock ? ahead_a : ahead_b));
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      const typename Kv::Vec x = Kv::broadcast(q + r * Kv::kStep);
#pragma GCC unroll 4
      for (int j = 0; j < V; j++) c[r][j] = Kv::mac(c[r][j], x, w[j]);
    }
    q += R * Kv::kStep;
    a += kRow;
    b += kRow;
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) {
#pragma GCC unroll 4
    for (int j = 0; j < V; j++) store(s + r * kChunk + j * kLanes, mul(c[r][j], set1(scale)));
  }
}

// Scores of keys [begin, end): whole strips from the block of `begin` on. A strip of two blocks
// whose second lies past the last one computes the first twice: no block outside is touched.
template <class Kv, int R, bool kAhead>
static inline void score_keys(const Tile<Kv>& t, const ChunkBlocks<Kv>& c, int begin, int end) {
  constexpr int V = strip_vecs<R>(), kStrip = V * kLanes;
  const int last = (end - 1) / kBlock;
  for (int k = begin / kBlock * kBlock; k < end; k += kStrip) {
    const int b0 = k / kBlock, b1 = b0 < last ? b0 + 1 : b0;
    const int inside = k % kBlock * Kv::kStep;
    score_strip<Kv, R, V, kAhead>(t.q, c.k[b0] + inside, c.k[b1] + inside, c.ahead[b0], c.ahead[b1],
                                  c.hd / Kv::kStep, t.scale, t.s + k);
  }
}

// Softcap and position bias over a row's visible vectors, which then enter base 2.
template <class Kv>
static inline void adjust_scores(const Tile<Kv>& t, int r, float* s) {
  float index[kLanes];
  for (int i = 0; i < kLanes; i++) index[i] = static_cast<float>(i);
  for (int k = t.lo[r] / kLanes * kLanes; k < t.hi[r]; k += kLanes) {
    F x = load(s + k);
    if (t.softcap > 0) x = mul(set1(t.softcap), tanh(div(x, set1(t.softcap))));
    if (t.alibi) {
      const F distance = add(load(index), set1(static_cast<float>(k - t.position[r])));
      x = fma(set1(t.slope[r]), distance, x);
    }
    store(s + k, mul(x, set1(kLog2E)));
  }
}

CPUSERVE_INLINE float row_max(const float* s, int begin, int end) {
  F top0 = set1(-INFINITY), top1 = top0;
  int k = begin;
  for (; k + 2 * kLanes <= end; k += 2 * kLanes) {
    top0 = max(top0, load(s + k));
    top1 = max(top1, load(s + k + kLanes));
  }
  if (k < end) top0 = max(top0, load(s + k));
  return reduce_max(max(top0, top1));
}

// Blends the cut vectors at either end of a row's keys [lo, hi) to -inf; returns the largest score.
CPUSERVE_INLINE float mask_scores(float* s, int lo, int hi) {
  const int begin = lo / kLanes * kLanes, end = static_cast<int>(round_up(hi, kLanes));
  const int last = end - kLanes;
  const F none = set1(-INFINITY);
  if (lo > begin) store(s + begin, keep(load(s + begin), lo - begin, kLanes, none));
  if (hi < end) store(s + last, keep(load(s + last), 0, hi - last, none));
  return row_max(s, begin, end);
}

// Probabilities of one row: p = 2^(s - m) rounded to Left, l = sum of the unrounded p, one chain a
// lane. Cut vectors at either end are blended; those between need no test.
template <class Kv>
CPUSERVE_INLINE float exp_scores(const float* s, typename Kv::Left* p, int lo, int hi, float m) {
  const F top = set1(m);
  F sum = zero();
  int k = lo / kLanes * kLanes;
  const auto cut = [&] {
    const F e = keep(exp2_nonpositive(sub(load(s + k), top)), lo - k, hi - k, zero());
    sum = add(sum, e);
    Kv::store_left(p + k, e);
    k += kLanes;
  };
  if (lo > k) cut();
  const int whole = hi / kLanes * kLanes;
#pragma GCC unroll 4
  for (; k < whole; k += kLanes) {
    const F e = exp2_nonpositive(sub(load(s + k), top));
    sum = add(sum, e);
    Kv::store_left(p + k, e);
  }
  if (k < hi) cut();
  return reduce_add(sum);
}

// o[r][0 .. V * kLanes) += sum over keys [begin, end) of p[r][key] v[key], begin and end multiples
// of kStep. `column` is where the strip starts in a row of values.
template <class Kv, int R, int V, bool kAhead>
static __attribute__((noinline)) void value_strip(const ChunkBlocks<Kv>& blocks,
                                                  const typename Kv::Left* p, int begin, int end,
                                                  int column, float* o, size_t ldo) {
  constexpr int kVec = kLanes * Kv::kStep;
  const size_t row = static_cast<size_t>(blocks.hd) * Kv::kStep;
  F c[R][V];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) {
#pragma GCC unroll 4
    for (int j = 0; j < V; j++) c[r][j] = load(o + static_cast<size_t>(r) * ldo + j * kLanes);
  }
  for (int k = begin; k < end;) {
    const int b = k / kBlock, stop = end < (b + 1) * kBlock ? end : (b + 1) * kBlock;
    const typename Kv::Elem* v =
        blocks.v[b] + static_cast<size_t>(k % kBlock / Kv::kStep) * row + column * Kv::kStep;
    const ptrdiff_t ahead = blocks.ahead[b];
    for (; k < stop; k += Kv::kStep, v += row) {
      typename Kv::Vec w[V];
#pragma GCC unroll 4
      for (int j = 0; j < V; j++) {
        w[j] = Kv::load(v + j * kVec);
        if (kAhead && j * kVec * sizeof(*v) % 64 == 0) prefetch_l2(v + j * kVec + ahead);
      }
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        const typename Kv::Vec x = Kv::broadcast(p + r * kChunk + k);
#pragma GCC unroll 4
        for (int j = 0; j < V; j++) c[r][j] = Kv::mac(c[r][j], x, w[j]);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) {
#pragma GCC unroll 4
    for (int j = 0; j < V; j++) store(o + static_cast<size_t>(r) * ldo + j * kLanes, c[r][j]);
  }
}

// All columns of R rows, widest strips first; hd is a multiple of 16.
template <class Kv, int R, bool kAhead>
static inline void value_keys(const ChunkBlocks<Kv>& c, const typename Kv::Left* p, int begin,
                              int end, float* o, size_t ldo) {
  constexpr int V = strip_vecs<R>();
  int n = 0;
  for (; n + V * kLanes <= c.hd; n += V * kLanes) {
    value_strip<Kv, R, V, kAhead>(c, p, begin, end, n, o + n, ldo);
  }
  if constexpr (V > 2) {
    for (; n + 2 * kLanes <= c.hd; n += 2 * kLanes) {
      value_strip<Kv, R, 2, kAhead>(c, p, begin, end, n, o + n, ldo);
    }
  }
  if constexpr (V > 1) {
    for (; n < c.hd; n += kLanes) value_strip<Kv, R, 1, kAhead>(c, p, begin, end, n, o + n, ldo);
  }
}

// A step that only one of its two keys belongs to: the other's values may be stale and are zeroed.
template <class Kv>
static inline void value_edge(const Tile<Kv>& t, const ChunkBlocks<Kv>& c, int r, int visible) {
  if constexpr (Kv::kStep == 2) {
    const uint16_t* v =
        c.v[visible / kBlock] + static_cast<size_t>(visible % kBlock / 2) * c.hd * 2;
    const int half = visible & 1;
    for (int i = 0; i < c.hd; i++) {
      t.edge[2 * i] = half ? uint16_t{0} : v[2 * i];
      t.edge[2 * i + 1] = half ? v[2 * i + 1] : uint16_t{0};
    }
    ChunkBlocks<Kv> masked = c;
    masked.v[0] = t.edge;
    value_keys<Kv, 1, false>(masked, t.p + r * kChunk + (visible & ~1), 0, 2,
                             t.o + static_cast<size_t>(r) * t.ldo, t.ldo);
  }
}

// One row's keys [begin, end), where either end may cut a step in two.
template <class Kv>
static inline void value_row(const Tile<Kv>& t, const ChunkBlocks<Kv>& c, int r, int begin,
                             int end) {
  constexpr int S = Kv::kStep;
  if (begin >= end) return;
  if (begin % S != 0) value_edge(t, c, r, begin++);
  const int whole = end / S * S;
  if (begin < whole) {
    value_keys<Kv, 1, false>(c, t.p + r * kChunk, begin, whole,
                             t.o + static_cast<size_t>(r) * t.ldo, t.ldo);
  }
  if (whole < end && begin <= whole) value_edge(t, c, r, whole);
}

template <class Kv, int R, bool kAhead>
static inline void value_tile(const Tile<Kv>& t, const ChunkBlocks<Kv>& c) {
  constexpr int S = Kv::kStep;
  int begin = 0, end = kChunk;  // whole steps that every row with any key sees
  bool any = false;
  for (int r = 0; r < R; r++) {
    memset(t.o + static_cast<size_t>(r) * t.ldo, 0, static_cast<size_t>(c.hd) * sizeof(float));
    if (t.lo[r] >= t.hi[r]) continue;
    any = true;
    const int first = (t.lo[r] + S - 1) / S * S, last = t.hi[r] / S * S;
    begin = first > begin ? first : begin;
    end = last < end ? last : end;
  }
  if (!any) return;
  if (begin >= end) {
    for (int r = 0; r < R; r++) value_row(t, c, r, t.lo[r], t.hi[r]);
    return;
  }
  for (int r = 0; r < R; r++) {
    if (t.lo[r] < t.hi[r]) value_row(t, c, r, t.lo[r], begin);
  }
  value_keys<Kv, R, kAhead>(c, t.p, begin, end, t.o, t.ldo);
  for (int r = 0; r < R; r++) {
    if (t.lo[r] < t.hi[r]) {
      value_row(t, c, r, end, t.hi[r]);
    } else {
      memset(t.o + static_cast<size_t>(r) * t.ldo, 0, static_cast<size_t>(c.hd) * sizeof(float));
    }
  }
}

// m, l and o of R rows for one chunk; m = -inf, l = 0, o = 0 where a row sees none of its keys.
template <class Kv, int R, bool kAhead>
static void attend_chunk(Tile<Kv>& t, const ChunkBlocks<Kv>& c) {
  int begin = kChunk, end = 0;
  for (int r = 0; r < R; r++) {
    if (t.lo[r] >= t.hi[r]) continue;
    begin = t.lo[r] < begin ? t.lo[r] : begin;
    end = t.hi[r] > end ? t.hi[r] : end;
  }
  if (begin < end) score_keys<Kv, R, kAhead>(t, c, begin, end);
  // All maxima before the first exponential: a row's reduction then hides behind the other rows.
  for (int r = 0; r < R; r++) {
    t.m[r] = -INFINITY;
    if (t.lo[r] >= t.hi[r]) continue;
    if (t.softcap > 0 || t.alibi) adjust_scores(t, r, t.s + r * kChunk);
    t.m[r] = mask_scores(t.s + r * kChunk, t.lo[r], t.hi[r]);
  }
  for (int r = 0; r < R; r++) {
    typename Kv::Left* p = t.p + r * kChunk;
    t.l[r] = 0.0f;
    if (t.lo[r] < t.hi[r]) {
      t.l[r] = exp_scores<Kv>(t.s + r * kChunk, p, t.lo[r], t.hi[r], t.m[r]);
    } else {
      memset(p, 0, kChunk * sizeof(*p));
    }
  }
  value_tile<Kv, R, kAhead>(t, c);
}

}  // namespace CPUSERVE_NS
