// Computes the probabilities of a tile of attention from its scores.
#pragma once
#include "kernels/generic/attention_chunk.h"

namespace CPUSERVE_NS {

// Multiplies the scores of the keys [lo, hi) that a row sees by the scales of these 8-bit keys.
template <class Kv>
static inline void scale_scores(const ChunkBlocks<Kv>& c, int lo, int hi, float* s) {
  for (int k = lo / kLanes * kLanes; k < hi; k += kLanes) {
    const float* scales = key_scales(c.k[k / kBlock], c.hd) + k % kBlock;
    store(s + k, mul(load(s + k), load(scales)));
  }
}

// Applies scale, softcap and position bias (ALiBi) to the scores of the keys that row r sees.
template <class Kv>
static inline void adjust_scores(const Tile<Kv>& t, int r, float* s) {
  float index[kLanes];
  for (int i = 0; i < kLanes; i++) index[i] = static_cast<float>(i);
  for (int k = t.lo[r] / kLanes * kLanes; k < t.hi[r]; k += kLanes) {
    F x = mul(load(s + k), set1(t.scale));
    if (t.softcap > 0) x = mul(set1(t.softcap), tanh(div(x, set1(t.softcap))));
    if (t.alibi) {
      // In encoders, keys after the row's position are as far away as those before it.
      const F ahead = add(load(index), set1(static_cast<float>(k - t.position[r])));
      x = fma(set1(t.slope[r]), min(ahead, sub(set1(0.0f), ahead)), x);
    }
    store(s + k, x);
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

// Sets the scores of masked keys to -inf. Only the first and the last vector of scores
// of the keys [lo, hi) that the row sees contain masked keys. Returns the largest score.
CPUSERVE_INLINE float mask_scores(float* s, int lo, int hi) {
  const int begin = lo / kLanes * kLanes, end = static_cast<int>(round_up(hi, kLanes));
  const int last = end - kLanes;
  const F none = set1(-INFINITY);
  if (lo > begin) store(s + begin, keep(load(s + begin), lo - begin, kLanes, none));
  if (hi < end) store(s + last, keep(load(s + last), 0, hi - last, none));
  return row_max(s, begin, end);
}

// Stores the probabilities p = 2^(s factor - m) of one row with scores s, rounded to Kv::Left.
// If values are codes, p is multiplied by the scale of the value before it is rounded. Returns l,
// the sum of the unrounded 2^(s factor - m), computed as one chain of additions per lane.
// Only the first and the last vector of keys can have masked lanes, which get probabilities of 0.
template <class Kv>
CPUSERVE_INLINE float exp_scores(const Tile<Kv>& t, const ChunkBlocks<Kv>& c, int r) {
  const F scale = set1(t.factor), below = set1(-t.m[r]);
  const float* s = t.s + r * kChunk;
  typename Kv::Left* p = t.p + place_in_p<Kv>(r, 0);
  const int lo = t.lo[r], hi = t.hi[r];
  F sum = zero();
  int k = lo / kLanes * kLanes;
  const auto scaled = [&](F e) __attribute__((always_inline)) {
    if constexpr (!Kv::kScaled) {
      return e;
    } else {
      return mul(e, load(value_scales<Kv>(c.v[k / kBlock], c.hd) + k % kBlock));
    }
  };
  const auto one = [&] { return Kv::exp2(fma(load(s + k), scale, below)); };
  const auto whole_vector = [&]() __attribute__((always_inline)) {
    const F e = one();
    sum = add(sum, e);
    const F left = scaled(e);
    k += kLanes;
    return left;
  };
  const auto cut = [&] {
    const F e = keep(one(), lo - k, hi - k, zero());
    sum = add(sum, e);
    Kv::store_p(p + place_in_p<Kv>(0, k), keep(scaled(e), lo - k, hi - k, zero()));
    k += kLanes;
  };
  if (lo > k) cut();
  const int whole = hi / kLanes * kLanes;
  if constexpr (!Kv::kRowPairs) {  // storing two vectors together takes fewer operations
#pragma GCC unroll 2
    while (k + kLanes < whole) {
      typename Kv::Left* to = p + k;
      const F x = whole_vector();
      Kv::store_p2(to, x, whole_vector());
    }
  }
#pragma GCC unroll 4
  while (k < whole) {
    typename Kv::Left* to = p + place_in_p<Kv>(0, k);
    Kv::store_p(to, whole_vector());
  }
  if (k < hi) cut();
  return reduce_add(sum);
}

// Sets the probabilities of a row that sees no key of the chunk to 0.
template <class Kv>
static inline void clear_p(const Tile<Kv>& t, int r) {
  constexpr int kSide = Kv::kRowPairs ? 4 : kChunk;
  for (int k = 0; k < kChunk; k += kSide) {
    memset(t.p + place_in_p<Kv>(r, k), 0, kSide * sizeof(*t.p));
  }
}

// Scales, adjusts and masks the scores of row r in place, then sets m to its largest exponent.
template <class Kv>
CPUSERVE_INLINE void find_top(Tile<Kv>& t, const ChunkBlocks<Kv>& c, int r) {
  t.m[r] = -INFINITY;
  if (t.lo[r] >= t.hi[r]) return;
  if constexpr (Kv::kScaled) scale_scores(c, t.lo[r], t.hi[r], t.s + r * kChunk);
  if (t.softcap > 0 || t.alibi) adjust_scores(t, r, t.s + r * kChunk);
  t.m[r] = t.factor * mask_scores(t.s + r * kChunk, t.lo[r], t.hi[r]);
}

// Computes the probabilities of the keys that row r sees, and l (Tile::l), from its scores and m.
template <class Kv>
CPUSERVE_INLINE void soften_row(Tile<Kv>& t, const ChunkBlocks<Kv>& c, int r) {
  t.l[r] = 0.0f;
  if (t.lo[r] < t.hi[r]) {
    t.l[r] = exp_scores(t, c, r);
  } else {
    clear_p(t, r);
  }
}

// Computes m and l (see struct Tile) and the probabilities of R rows from their scores.
template <class Kv>
CPUSERVE_INLINE void soften_scores(Tile<Kv>& t, const ChunkBlocks<Kv>& c, int R) {
  // All maxima are computed before the first exponential,
  // so that the reductions of different rows overlap.
  for (int r = 0; r < R; r++) find_top(t, c, r);
  for (int r = 0; r < R; r++) soften_row(t, c, r);
}

}  // namespace CPUSERVE_NS
