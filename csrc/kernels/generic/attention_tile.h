// One tile of attention: R query rows and one chunk of kChunk keys. The result of a tile is
// for its chunk alone. generic/attention.h explains the terms, such as QK, PV and hd.
//
// QK has one lane per key, and masked lanes are discarded, so stale keys do no harm in QK.
// PV has one lane per output column and sums over keys, so it skips masked keys, because their
// values may be stale. PV multiplies the keys that every row of the tile sees with all R rows
// together. The first and last keys, which only some rows see, are multiplied before and after
// the common keys, together for neighbouring rows that see the same keys. Between these parts sums
// pass through memory, which is exact, so a row sums its keys in ascending order in any tile.
//
// Exponents, maxima and attention sinks are stored multiplied by log2 e,
// so that exp2 computes probabilities without another multiplication.
#pragma once
#include "kernels/generic/attention_softmax.h"
#include "kernels/generic/attention_strips.h"

namespace CPUSERVE_NS {

// Computes the scores of R rows for keys [begin, end), in strips of keys from the start of the KV
// block of `begin` on. The last strip is half as wide if it then still contains the last keys.
template <class Kv, Ahead kAhead>
static inline void score_keys(const Tile<Kv>& t, const ChunkBlocks<Kv>& c, int R, int begin,
                              int end, Fetch& next) {
  const auto& strips = strips_of<Kv, kAhead>(R);
  const int strip = strip_vecs(R) * kLanes, half = half_strip_vecs(R) * kLanes;
  for (int k = begin / kBlock * kBlock; k < end;) {
    const int b0 = k / kBlock, inside = k % kBlock * Kv::kSide;
    const typename Kv::Elem* a = c.k[b0] + inside;
    if (end - k > half) {
      const typename Kv::Elem* b = strip > kBlock ? c.k[b0 + 1] : a;
      strips.score(t.q, a, b, c.hd, t.s + k, next);
      k += strip;
    } else {
      strips.half_score(t.q, a, a, c.hd, t.s + k, next);
      k += half;
    }
  }
}

static inline int at_least(int x, int low) { return x < low ? low : x; }
static inline int at_most(int x, int high) { return x < high ? x : high; }

// Computes PV for R rows and all hd columns, widest strips first; hd is a multiple of 16.
template <class Kv, Ahead kAhead>
static inline void value_columns(const ChunkBlocks<Kv>& c, const typename Kv::Left* p, int R,
                                 int begin, int end, bool fresh, float* o, size_t ldo, Fetch& f) {
  const auto& strips = strips_of<Kv, kAhead>(R);
  const int V = strip_vecs(R);
  int n = 0;
  for (; n + V * kLanes <= c.hd; n += V * kLanes) {
    strips.value(c, p, begin, end, n, fresh, o + n, ldo, f);
  }
  for (; V > 2 && n + 2 * kLanes <= c.hd; n += 2 * kLanes) {
    strips.value2(c, p, begin, end, n, fresh, o + n, ldo, f);
  }
  for (; V > 1 && n < c.hd; n += kLanes) {
    strips.value1(c, p, begin, end, n, fresh, o + n, ldo, f);
  }
}

// Computes PV for R rows and keys [begin, end). In decode, each strip of columns adds kValueSpan
// keys before the next strip adds the same keys. A strip that added all keys of the chunk
// in one loop would read values that are not prefetched yet.
template <class Kv, Ahead kAhead>
static inline void value_keys(const ChunkBlocks<Kv>& c, const typename Kv::Left* p, int R,
                              int begin, int end, bool fresh, float* o, size_t ldo, Fetch& f) {
  const bool turns = kAhead == Ahead::full && c.hd > strip_vecs(R) * kLanes;
  for (int k = begin; k < end;) {
    const int stop = turns ? at_most((k / kValueSpan + 1) * kValueSpan, end) : end;
    value_columns<Kv, kAhead>(c, p, R, k, stop, fresh && k == begin, o, ldo, f);
    k = stop;
  }
}

// Computes PV for rows [r, r + n) of the tile, which all see keys [begin, end).
template <class Kv, Ahead kAhead>
static void value_rows(const Tile<Kv>& t, const ChunkBlocks<Kv>& c, int r, int n, int begin,
                       int end, bool fresh, Fetch& f) {
  value_keys<Kv, kAhead>(c, t.p + place_in_p<Kv>(r, 0), n, begin, end, fresh,
                         t.o + static_cast<size_t>(r) * t.ldo, t.ldo, f);
}

// The range of keys that every row of a tile sees, in whole steps of kStep keys.
// Rows that see no key of the chunk are left out.
struct Common {
  int begin = 0, end = kChunk;
  bool any = false, same = true;  // any: some row sees a key; same: rows see equal ranges of keys
};

template <class Kv>
static inline Common common_keys(const Tile<Kv>& t, int R) {
  constexpr int S = Kv::kStep;
  Common c;
  for (int r = 0; r < R; r++) {
    c.same &= t.lo[r] == t.lo[0] && t.hi[r] == t.hi[0];
    if (t.lo[r] >= t.hi[r]) continue;
    c.any = true;
    const int first = (t.lo[r] + S - 1) / S * S, last = t.hi[r] / S * S;
    c.begin = first > c.begin ? first : c.begin;
    c.end = last < c.end ? last : c.end;
  }
  return c;
}

// Computes PV for keys [from, to), where rows may see different keys.
// Neighbouring rows that see the same keys are computed together.
// With kRowPairs each row is computed alone, because the probabilities of two rows are interleaved.
template <class Kv, Ahead kAhead>
static inline void value_edges(const Tile<Kv>& t, const ChunkBlocks<Kv>& c, int R, int from, int to,
                               bool fresh, Fetch& f) {
  for (int r = 0; r < R;) {
    const int begin = at_least(t.lo[r], from), end = at_most(t.hi[r], to);
    int n = 1;
    while (!Kv::kRowPairs && r + n < R && at_least(t.lo[r + n], from) == begin &&
           at_most(t.hi[r + n], to) == end) {
      n++;
    }
    if (begin < end) value_rows<Kv, kAhead>(t, c, r, n, begin, end, fresh, f);
    r += n;
  }
}

// Sets the output o to 0 for rows that see no key of the chunk, or for all R rows if `all` is true.
template <class Kv>
static inline void clear_rows(const Tile<Kv>& t, int R, int hd, bool all) {
  for (int r = 0; r < R; r++) {
    if (!all && t.lo[r] < t.hi[r]) continue;
    memset(t.o + static_cast<size_t>(r) * t.ldo, 0, static_cast<size_t>(hd) * sizeof(float));
  }
}

template <class Kv, Ahead kAhead>
static inline void value_tile(const Tile<Kv>& t, const ChunkBlocks<Kv>& c, int R, Fetch& f) {
  const Common seen = common_keys(t, R);
  if (!seen.any) return clear_rows(t, R, c.hd, true);
  if (seen.same) {
    value_keys<Kv, kAhead>(c, t.p, R, t.lo[0], t.hi[0], true, t.o, t.ldo, f);
    return;
  }
  if (seen.begin >= seen.end) {
    value_edges<Kv, Ahead::light>(t, c, R, 0, kChunk, true, f);
    return clear_rows(t, R, c.hd, false);
  }
  const bool head = seen.begin > 0;
  if (head) {
    clear_rows(t, R, c.hd, true);
    value_edges<Kv, Ahead::light>(t, c, R, 0, seen.begin, false, f);
  }
  value_keys<Kv, kAhead>(c, t.p, R, seen.begin, seen.end, !head, t.o, t.ldo, f);
  value_edges<Kv, Ahead::light>(t, c, R, seen.end, kChunk, false, f);
  clear_rows(t, R, c.hd, false);
}

// Prefetches the scales of 8-bit values. The scales are used before the values but stored after
// them, so prefetches in the order of memory (Fetch) would be too late.
template <class Kv>
static inline void fetch_value_scales(const ChunkBlocks<Kv>& c) {
  for (const typename Kv::Elem* v : c.v) {
    if (!v) continue;
    const float* scales = value_scales<Kv>(v, c.hd);
    prefetch(scales);
    prefetch(scales + kBlock / 2);
  }
}

// The range of the chunk's keys that any row of a tile sees; begin >= end if no row sees a key.
struct KeyRange {
  int begin = kChunk, end = 0;
};
template <class Kv>
static inline KeyRange visible_keys(const Tile<Kv>& t, int R) {
  KeyRange keys;
  for (int r = 0; r < R; r++) {
    if (t.lo[r] >= t.hi[r]) continue;
    keys.begin = t.lo[r] < keys.begin ? t.lo[r] : keys.begin;
    keys.end = t.hi[r] > keys.end ? t.hi[r] : keys.end;
  }
  return keys;
}

// Computes m, l and o (see struct Tile) of R rows for one chunk.
// A row that sees no key of the chunk gets m = -inf, l = 0 and o = 0.
template <class Kv, Ahead kAhead>
static void attend_chunk(Tile<Kv>& t, const ChunkBlocks<Kv>& c, int R, Fetch& f) {
  const KeyRange keys = visible_keys(t, R);
  if constexpr (Kv::kScaled && kAhead == Ahead::full) fetch_value_scales(c);
  if (keys.begin < keys.end) score_keys<Kv, kAhead>(t, c, R, keys.begin, keys.end, f);
  soften_scores(t, c, R);
  value_tile<Kv, kAhead>(t, c, R, f);
}

}  // namespace CPUSERVE_NS
