// One tile of attention: R rows against one chunk of kChunk keys, from an empty state.
//
// QK has one lane per key, and masked lanes are discarded, so stale keys do no harm there. PV has
// one lane per output column and sums over keys, so masked keys must be skipped: their values may
// be stale. Keys that every row of the tile sees go through the tile of R rows. The first and last
// keys, which only some rows see, are multiplied before and after it, together for neighbouring
// rows that see the same ones. Accumulators pass through memory between these three parts, which is
// exact, so a row always sums its own keys in ascending order, whatever the tile.
//
// Scores, maxima and sinks are in base 2 (times log2 e), so that exp2 needs no multiplication
// first.
#pragma once
#include "kernels/generic/math.h"
#include "kernels/table.h"
#include "kernels/vec/vec.h"

namespace CPUSERVE_NS {

// Tile shapes on vectors: up to kTileRows rows by kWide vectors; up to kTallRows rows by half of
// that, so that a group of 7 or 8 heads reads each key from L1 once (8 x 2 accumulators cover the
// latency of two multiply-adds a cycle, and 10 loads feed 16 of them). kWide is a power of two so
// that strips tile the 32 keys of a block.
constexpr int kWide = kTileVecs >= 4 ? 4 : kTileVecs >= 2 ? 2 : 1;
constexpr int kTallRows = kWide == 4 ? 8 : kTileRows;
// Rows of a tile, at least, where a unit has more than one: then the last two are equal parts
// (tile_rows in attention.h).
constexpr int kLeastOfMany = (kTallRows + 1) / 2;

// Whether two and more rows are multiplied in pairs, by BFMMLA (attention_pairs.h).
#ifdef CPUSERVE_UNIT_BFMMLA
constexpr bool kBf16Pairs = true;
#else
constexpr bool kBf16Pairs = false;
#endif

// How products are formed for each KvType: kStep dims (QK) or keys (PV) enter one multiply-add,
// kSide of them stored side by side, the others one row of the block further. kMatrixTiles: both
// products run on matrix tiles (attention_matrix.h), of up to kMostRows rows. kRowPairs: on rows in
// pairs: q has kQuerySide dims, and `p` as many keys, next to each other.
struct KvBf16 {
  static constexpr bool kMatrixTiles = false;
  static constexpr bool kRowPairs = kBf16Pairs;
  static constexpr int kQuerySide = kBf16Pairs ? 4 : 2;
  static constexpr int kMostRows = kTallRows;
  using Elem = uint16_t;  // cache element
  using Left = uint16_t;  // q, and probabilities (store_p)
  using Vec = P;
  static constexpr int kStep = 2, kSide = 2;
  static constexpr bool kScaled = false;
  CPUSERVE_INLINE Vec load(const Elem* p, int) { return load_pairs(p); }
  CPUSERVE_INLINE Vec broadcast(const Left* p) { return set1_pair(p); }
  CPUSERVE_INLINE F mac(F acc, Vec a, Vec b) { return dot2(acc, a, b); }
  CPUSERVE_INLINE Vec keep_first(Vec x) { return interleave_top(even(x), zero()); }
  CPUSERVE_INLINE Vec keep_second(Vec x) { return interleave_top(zero(), odd(x)); }
  CPUSERVE_INLINE F exp2(F x) { return exp2_coarse(x); }
  CPUSERVE_INLINE void store_left(Left* p, F x) { store_bf16(p, x); }
  CPUSERVE_INLINE void store_p(Left* p, F x) { store_bf16_normal(p, x); }
  CPUSERVE_INLINE void store_p2(Left* p, F x, F y) { store_bf16_normal2(p, x, y); }
};
// Products of single floats: every vector holds one dim or one key.
struct SingleProducts {
  static constexpr bool kMatrixTiles = false;
  static constexpr bool kRowPairs = false;
  static constexpr int kQuerySide = 1;
  static constexpr int kMostRows = kTallRows;
  using Left = float;
  using Vec = F;
  static constexpr int kStep = 1, kSide = 1;
  static constexpr bool kScaled = false;
  CPUSERVE_INLINE Vec broadcast(const Left* p) { return set1(*p); }
  CPUSERVE_INLINE F mac(F acc, Vec a, Vec b) { return fma(a, b, acc); }
  CPUSERVE_INLINE Vec keep_first(Vec x) { return x; }
  CPUSERVE_INLINE Vec keep_second(Vec x) { return x; }
  CPUSERVE_INLINE F exp2(F x) { return exp2_nonpositive(x); }
  CPUSERVE_INLINE void store_left(Left* p, F x) { store(p, x); }
  CPUSERVE_INLINE void store_p(Left* p, F x) { store(p, x); }
  CPUSERVE_INLINE void store_p2(Left* p, F x, F y) {
    store(p, x);
    store(p + kLanes, y);
  }
};
struct KvF16 : SingleProducts {
  using Elem = uint16_t;
  CPUSERVE_INLINE Vec load(const Elem* p, int) { return load_f16(p); }
};
struct KvF32 : SingleProducts {
  using Elem = float;
  CPUSERVE_INLINE Vec load(const Elem* p, int) { return CPUSERVE_NS::load(p); }
};

// 8-bit codes become pairs of bf16, exactly. The scale of a token multiplies its score, and for
// values its probability before that is rounded.
struct ScaledProducts : KvBf16 {
  using Elem = uint8_t;
  static constexpr int kSide = 1;
  static constexpr bool kScaled = true;
};
struct KvInt8 : ScaledProducts {
  static constexpr float kLargest = 127.0f, kWiden = 1.0f;
  CPUSERVE_INLINE Vec load(const Elem* p, int row) {
    return interleave_top(load_s8(p), load_s8(p + row));
  }
};
struct KvE4m3 : ScaledProducts {
  static constexpr float kLargest = 448.0f, kWiden = 256.0f;
  CPUSERVE_INLINE Vec load(const Elem* p, int row) {
    return interleave_top(load_e4m3(p), load_e4m3(p + row));
  }
};
struct KvE5m2 : ScaledProducts {
  static constexpr float kLargest = 57344.0f, kWiden = 1.0f;
  CPUSERVE_INLINE Vec load(const Elem* p, int row) {
    return interleave_top(load_e5m2(p), load_e5m2(p + row));
  }
};

// Calls run(products) for the products of a cache of `type`.
template <class Run>
static inline void with_kv(KvType type, const Run& run) noexcept {
  switch (type) {
    case KvType::bf16:
      return run(KvBf16{});
    case KvType::f16:
      return run(KvF16{});
    case KvType::f32:
      return run(KvF32{});
    case KvType::int8:
      return run(KvInt8{});
    case KvType::e4m3:
      return run(KvE4m3{});
    case KvType::e5m2:
      return run(KvE5m2{});
    case KvType::count:
      return;
  }
}

// The scales of the tokens in K or V of a block, [kBlock]: their codes are multiplied with them.
CPUSERVE_INLINE float* key_scales(uint8_t* half, int hd) {
  return reinterpret_cast<float*>(half + hd * kBlock);
}
CPUSERVE_INLINE const float* key_scales(const uint8_t* half, int hd) {
  return reinterpret_cast<const float*>(half + hd * kBlock);
}

// The place of key k of row r in the probabilities: [R][kChunk], or with rows in pairs [R /
// 2][kChunk / 4][2][4]. On matrix tiles a row begins where its scores begin, which are twice as
// wide.
template <class Kv>
constexpr int place_in_p(int r, int k) {
  if (Kv::kMatrixTiles) return r * 2 * kChunk + k;
  if (!Kv::kRowPairs) return r * kChunk + k;
  return r / 2 * 2 * kChunk + k / 4 * 8 + r % 2 * 4 + k % 4;
}

constexpr int kChunkBlocks = kChunk / kBlock;
constexpr int kSlack = 64;
constexpr int kValueSpan = 64;
constexpr float kLog2E = 1.44269504f;

// Vectors of keys or columns that R rows take side by side.
constexpr int strip_vecs(int R) { return R <= kTileRows ? kWide : kWide / 2; }
constexpr int half_strip_vecs(int R) { return strip_vecs(R) > 1 ? strip_vecs(R) / 2 : 1; }

// The blocks of one chunk of one KV head: block b's keys at k[b], values at v[b].
template <class Kv>
struct ChunkBlocks {
  const typename Kv::Elem* k[kChunkBlocks];
  const typename Kv::Elem* v[kChunkBlocks];
  int hd;  // padded
};

// Prefetches lines of K and V in the order of use, a few with every step of a
// tile, so that memory always has work. Only a few at a time, because a core drops prefetches that
// arrive faster than memory delivers. Decode prefetches into L1, where the accesses of one sequence
// also train the hardware prefetcher (6 to 9 % faster than into L2 at group 8). Prefill, which
// returns to a chunk with every tile, prefetches into L2. After the last piece, `at` stays on one
// line.
struct Fetch {
  const uint8_t* at;
  const uint8_t* stop;
  size_t step;                             // bytes from line to line, 0 = nothing left
  const uint8_t* piece[4 * kChunkBlocks];  // of this chunk, then of the next
  int index, count, now;                   // now: pieces of this chunk
  size_t bytes;                            // of a piece
  const uint8_t* idle;
};
constexpr int kLead = 2;  // number of pieces prefetched ahead of their use: one strip of keys

static inline void begin_piece(Fetch& f, int index, size_t into) {
  f.index = index;
  if (index < f.count) {
    f.at = f.piece[index] + into;
    f.stop = f.piece[index] + f.bytes;
    f.step = 64;
  } else {
    f.at = f.idle;
    f.step = 0;
    f.stop = reinterpret_cast<const uint8_t*>(UINTPTR_MAX);
  }
}

// How many lines a step of scores or values prefetches. full: as many as it uses, for decode (one
// tile per chunk). light: fewer, for prefill, which has many tiles per chunk.
enum class Ahead { light, full };

template <Ahead kAhead>
CPUSERVE_INLINE void fetch_lines(Fetch& f, int lines) {
  if (lines == 0) return;
  for (int i = 0; i < lines; i++, f.at += f.step) {
    kAhead == Ahead::full ? prefetch(f.at) : prefetch_l2(f.at);
  }
  if (f.at >= f.stop) begin_piece(f, f.index + 1, 0);
}

template <class Kv, Ahead kAhead, bool kValues>
static constexpr int step_lines(int vecs) {
  if (kAhead == Ahead::light) return kValues ? 0 : 1;
  const int lines = vecs * kLanes * Kv::kStep * static_cast<int>(sizeof(typename Kv::Elem)) / 64;
  return lines > 1 ? lines : 1;
}

// Everything a tile reads and writes besides the cache. Row r sees keys [lo[r], hi[r]) of the chunk
// (lo == hi: none).
template <class Kv>
struct Tile {
  const typename Kv::Left* q;  // [hd / side][R][side]; on matrix tiles [R][hd in whole tiles]
  float* s;                    // [R][kChunk] scores, then kSlack floats a last strip may touch
  typename Kv::Left* p;        // probabilities (place_in_p)
  float* o;                    // [R] rows of hd floats, ldo apart
  size_t ldo;
  int lo[Kv::kMostRows], hi[Kv::kMostRows];
  int position[Kv::kMostRows];  // of the row's token, from the chunk's first key
  float slope[Kv::kMostRows];
  float m[Kv::kMostRows], l[Kv::kMostRows];
  uint8_t* spare;  // memory of spare_bytes(hd), for matrix tiles
  float scale;     // of a score, without kLog2E
  float factor;    // the factor that makes a score, after softcap and alibi, an exponent of 2
  float softcap;
  bool alibi;
};

// Products of R rows with keys [0, V * kLanes) of two neighbouring blocks a and b.
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
    typename Kv::Vec w[V];
#pragma GCC unroll 4
    for (int j = 0; j < V; j++)
      w[j] = Kv::load((j < kInBlock ? a : b) + j % kInBlock * kVec, kBlock);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      const typename Kv::Vec x = Kv::broadcast(q + r * Kv::kStep);
#pragma GCC unroll 4
      for (int j = 0; j < V; j++) c[r][j] = Kv::mac(c[r][j], x, w[j]);
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

// The same for two or more rows where they are multiplied in pairs.
template <class Kv, int R, int V, Ahead kAhead>
static void score_pairs(const typename Kv::Left* q, const typename Kv::Elem* a,
                        const typename Kv::Elem* b, int hd, float* s, Fetch& next);

// Multiplies the visible scores of a row by the scales of the keys.
template <class Kv>
static inline void scale_scores(const ChunkBlocks<Kv>& c, int lo, int hi, float* s) {
  for (int k = lo / kLanes * kLanes; k < hi; k += kLanes) {
    const float* scales = key_scales(c.k[k / kBlock], c.hd) + k % kBlock;
    store(s + k, mul(load(s + k), load(scales)));
  }
}

// Applies scale, softcap and position bias to the visible scores of a row.
template <class Kv>
static inline void adjust_scores(const Tile<Kv>& t, int r, float* s) {
  float index[kLanes];
  for (int i = 0; i < kLanes; i++) index[i] = static_cast<float>(i);
  for (int k = t.lo[r] / kLanes * kLanes; k < t.hi[r]; k += kLanes) {
    F x = mul(load(s + k), set1(t.scale));
    if (t.softcap > 0) x = mul(set1(t.softcap), tanh(div(x, set1(t.softcap))));
    if (t.alibi) {
      const F distance = add(load(index), set1(static_cast<float>(k - t.position[r])));
      x = fma(set1(t.slope[r]), distance, x);
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

// Sets the masked lanes of the first and last vector of a row's keys [lo, hi) to -inf. Returns the
// largest score.
CPUSERVE_INLINE float mask_scores(float* s, int lo, int hi) {
  const int begin = lo / kLanes * kLanes, end = static_cast<int>(round_up(hi, kLanes));
  const int last = end - kLanes;
  const F none = set1(-INFINITY);
  if (lo > begin) store(s + begin, keep(load(s + begin), lo - begin, kLanes, none));
  if (hi < end) store(s + last, keep(load(s + last), 0, hi - last, none));
  return row_max(s, begin, end);
}

// Probabilities of one row: p = 2^(s factor - m), times the scale of the value if it has one,
// rounded to Left. l = sum of the unrounded 2^(s factor - m), one chain per lane. Only the vectors
// at the ends, which the mask cuts, are blended; those between need no test.
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
      return mul(e, load(key_scales(c.v[k / kBlock], c.hd) + k % kBlock));
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
  if constexpr (!Kv::kRowPairs) {  // two vectors are packed in fewer operations than one and one
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

// o[r][0 .. V * kLanes) (+)= sum over keys [begin, end) of p[r][key] v[key]. `column` is where the
// strip starts in a row of values. If only one key of the first or last step belongs to the range,
// the values of the other one may be stale and are set to zero. `fresh`: start from zero instead of
// from o.
template <class Kv, int R, int V, Ahead kAhead>
static __attribute__((noinline)) void value_strip(const ChunkBlocks<Kv>& blocks,
                                                  const typename Kv::Left* p, int begin, int end,
                                                  int column, bool fresh, float* o, size_t ldo,
                                                  Fetch& next) {
  constexpr int kVec = kLanes * Kv::kSide, S = Kv::kStep;
  const int hd = blocks.hd;
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
    return blocks.v[k / kBlock] + k % kBlock / S * hd * S + column * Kv::kSide;
  };
  const auto multiply = [&](int k) __attribute__((always_inline)) {
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      const typename Kv::Vec x = Kv::broadcast(p + place_in_p<Kv>(r, k));
#pragma GCC unroll 4
      for (int j = 0; j < V; j++) c[r][j] = Kv::mac(c[r][j], x, w[j]);
    }
  };
  int k = begin;
  if (k % S != 0) {
    k--;
#pragma GCC unroll 4
    for (int j = 0; j < V; j++) w[j] = Kv::keep_second(Kv::load(at(k) + j * kVec, hd));
    multiply(k);
    k += S;
  }
  for (const int whole = end / S * S; k < whole;) {
    const int block_end = (k / kBlock + 1) * kBlock, stop = whole < block_end ? whole : block_end;
    for (const typename Kv::Elem* v = at(k); k < stop; k += S, v += hd * S) {
      fetch_lines<kAhead>(f, step_lines<Kv, kAhead, true>(V));
#pragma GCC unroll 4
      for (int j = 0; j < V; j++) w[j] = Kv::load(v + j * kVec, hd);
      multiply(k);
    }
  }
  if (k < end) {
#pragma GCC unroll 4
    for (int j = 0; j < V; j++) w[j] = Kv::keep_first(Kv::load(at(k) + j * kVec, hd));
    multiply(k);
  }
  next = f;
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) {
#pragma GCC unroll 4
    for (int j = 0; j < V; j++) store(o + static_cast<size_t>(r) * ldo + j * kLanes, c[r][j]);
  }
}

// The same for whole groups of 4 keys, for two or more rows where they are multiplied in pairs.
template <class Kv, int R, int V, Ahead kAhead>
static void value_pairs(const ChunkBlocks<Kv>& blocks, const typename Kv::Left* p, int begin,
                        int end, int column, bool fresh, float* o, size_t ldo, Fetch& next);

// Rows in pairs take the whole groups of 4 keys; the rest before and after them is one step of
// two keys each. BFMMLA sums as two BFDOTs do, so a row's bits are the same either way.
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

// The functions that multiply strips, for each number of rows. Only they are compiled for a number
// of rows: what surrounds them takes it as an argument, which costs an indirect call for each strip
// and saves half of the code of attention.
template <class Kv>
struct Strips {
  using Score = void (*)(const typename Kv::Left* q, const typename Kv::Elem* a,
                         const typename Kv::Elem* b, int hd, float* s, Fetch& next);
  using Value = void (*)(const ChunkBlocks<Kv>& blocks, const typename Kv::Left* p, int begin,
                         int end, int column, bool fresh, float* o, size_t ldo, Fetch& next);
  struct OfRows {
    Score score, half_score;      // of strip_vecs and half_strip_vecs vectors of keys
    Value value, value2, value1;  // of strip_vecs, 2 and 1 vectors of columns
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

// Products of R rows with keys [begin, end), in whole strips from the block of `begin` on. If half
// a strip is enough for the last keys, half a strip.
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

// All columns of R rows, widest strips first; hd is a multiple of 16.
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

// In decode, strips of columns alternate every kValueSpan keys: a strip that ran through the whole
// chunk would touch the pages of all its values long before their lines were prefetched.
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

// Rows [r, r + n) of the tile, which all see keys [begin, end).
template <class Kv, Ahead kAhead>
static void value_rows(const Tile<Kv>& t, const ChunkBlocks<Kv>& c, int r, int n, int begin,
                       int end, bool fresh, Fetch& f) {
  value_keys<Kv, kAhead>(c, t.p + place_in_p<Kv>(r, 0), n, begin, end, fresh,
                         t.o + static_cast<size_t>(r) * t.ldo, t.ldo, f);
}

// The keys that all rows with visible keys in the chunk see, in whole steps.
struct Common {
  int begin = 0, end = kChunk;
  bool any = false, same = true;  // same: no row sees other keys
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

// Multiplies the keys of [from, to) that a row sees, for runs of rows that see the same ones; where
// rows are stored in pairs, for single rows.
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

// The scales of the values are used before the values, but are stored after them.
template <class Kv>
static inline void fetch_value_scales(const ChunkBlocks<Kv>& c) {
  for (const typename Kv::Elem* v : c.v) {
    if (!v) continue;
    const float* scales = key_scales(v, c.hd);
    prefetch(scales);
    prefetch(scales + kBlock / 2);
  }
}

// Keys of the chunk that any of the R rows sees; begin >= end where none does.
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

// Probabilities of 0 for a row that sees no key of the chunk.
template <class Kv>
static inline void clear_p(const Tile<Kv>& t, int r) {
  constexpr int kSide = Kv::kRowPairs ? 4 : kChunk;
  for (int k = 0; k < kChunk; k += kSide) {
    memset(t.p + place_in_p<Kv>(r, k), 0, kSide * sizeof(*t.p));
  }
}

// m of a row, from its scores.
template <class Kv>
CPUSERVE_INLINE void find_top(Tile<Kv>& t, const ChunkBlocks<Kv>& c, int r) {
  t.m[r] = -INFINITY;
  if (t.lo[r] >= t.hi[r]) return;
  if constexpr (Kv::kScaled) scale_scores(c, t.lo[r], t.hi[r], t.s + r * kChunk);
  if (t.softcap > 0 || t.alibi) adjust_scores(t, r, t.s + r * kChunk);
  t.m[r] = t.factor * mask_scores(t.s + r * kChunk, t.lo[r], t.hi[r]);
}

// l of a row and the probabilities of the keys it sees, from its scores and m.
template <class Kv>
CPUSERVE_INLINE void soften_row(Tile<Kv>& t, const ChunkBlocks<Kv>& c, int r) {
  t.l[r] = 0.0f;
  if (t.lo[r] < t.hi[r]) {
    t.l[r] = exp_scores(t, c, r);
  } else {
    clear_p(t, r);
  }
}

// From the R rows' scores to m, l and the probabilities of the keys each sees.
template <class Kv>
CPUSERVE_INLINE void soften_scores(Tile<Kv>& t, const ChunkBlocks<Kv>& c, int R) {
  // All maxima before the first exponential: the reduction of a row then overlaps with the other
  // rows.
  for (int r = 0; r < R; r++) find_top(t, c, r);
  for (int r = 0; r < R; r++) soften_row(t, c, r);
}

// m, l and o of R rows for one chunk; m = -inf, l = 0, o = 0 where a row sees none of its keys.
template <class Kv, Ahead kAhead>
static void attend_chunk(Tile<Kv>& t, const ChunkBlocks<Kv>& c, int R, Fetch& f) {
  const KeyRange keys = visible_keys(t, R);
  if constexpr (Kv::kScaled && kAhead == Ahead::full) fetch_value_scales(c);
  if (keys.begin < keys.end) score_keys<Kv, kAhead>(t, c, R, keys.begin, keys.end, f);
  soften_scores(t, c, R);
  value_tile<Kv, kAhead>(t, c, R, f);
}

}  // namespace CPUSERVE_NS
