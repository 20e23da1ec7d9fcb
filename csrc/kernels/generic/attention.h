// Paged attention. A row is one query head of one token, and a tile is some rows that are computed
// together. A unit is one call of the kernel: rows of one sequence and KV head, and some chunks
// of kChunk (256) keys (table/attention.h). A tile computes a softmax over one chunk,
// and the results of chunks are merged in ascending order, here or by attention_merge.
// Prefill and decode use the same code for tiles and for merging.
//
// The result of a row for some chunks has three parts: the maximum m of its scores, the sum l
// of 2^(score - m), and o, the sum of the values times 2^(score - m). The output is o / l.
//
// In all attention files, QK is the product of queries and keys, PV is the product of probabilities
// and values, and hd is head_dim rounded up to a multiple of 16.
#pragma once
#include <float.h>

#include "kernels/generic/attention_tile.h"
#include "kernels/generic/convert.h"
#include "kernels/generic/hadamard.h"
#ifdef CPUSERVE_UNIT_TILES
#include "kernels/generic/attention_matrix.h"
#endif
#ifdef CPUSERVE_UNIT_BFMMLA
#include "kernels/generic/attention_pairs.h"
#endif

namespace CPUSERVE_NS {

// Computes the factors that merge a running result (with maximum `before`)
// and the result of a chunk (with maximum m). The merged maximum is after = max(before, m).
// Factors: x = 2^(before - after) for the running result, and y = 2^(m - after) for the chunk.
// If a maximum is -inf (no visible key so far, or none in this chunk), its factor is 0.
CPUSERVE_INLINE void merge_factors(F before, F m, float* x, float* y) {
  const F after = max(set1(-FLT_MAX), max(before, m));  // -inf - -inf would be NaN
  store(x, exp2(sub(before, after)));
  store(y, exp2(sub(m, after)));
}

CPUSERVE_INLINE F merge_columns(F o, F x, F chunk_o, F y) { return fma(chunk_o, y, mul(o, x)); }

// Writes out = o / l for one row; a row without visible keys becomes 0.
// mixed: the values are mixed (kv_mixes_values), so o has to be multiplied by the inverse.
static inline void finish_row(const Rows& out, int64_t token, int head, int head_dim, int hd,
                              bool mixed, float* o, float l) {
  const F inverse = set1(l == 0.0f ? 0.0f : 1.0f / l);
  for (int i = 0; i < hd; i += kLanes) store(o + i, mul(load(o + i), inverse));
  if (mixed) mix_query(o, head_dim);
  store_row(out, token, static_cast<int64_t>(head) * head_dim, o, head_dim);
}

// The rows of an attention unit that fit in scratch memory, with their queries and running results.
template <class Kv>
struct RowBlock {
  static constexpr int kMaxRows = 256;
  typename Kv::Left* q;  // queries of the rows, tile after tile
  float* o;              // running results o of the rows, [rows][hd]
  float* chunk_o;        // result of a tile for one chunk, [Kv::kMostRows][hd]
  float* m;              // running maxima of the scores, [rows]
  float* l;              // running sums of 2^(score - m), [rows]
  int rows;              // number of rows that fit in the scratch memory
  Tile<Kv> tile[Kv::kMatrixTiles ? 2 : 1];
  uint16_t* widened;  // AMX tiles only: 8-bit keys and values of a chunk, widened to bf16
};

// Returns the number of elements from one row of q to the next: hd. AMX tiles read 32 dims
// of a head at a time, so for kernels on AMX tiles it is hd rounded up to a multiple of 32.
template <class Kv>
CPUSERVE_INLINE size_t query_width(int hd) {
  return static_cast<size_t>(Kv::kMatrixTiles ? round_up(hd, 32) : hd);
}

// Divides the scratch memory into scores, probabilities and the result of each tile, the running m
// and l of the rows, and as many rows of q and o as fit in the remaining bytes.
// With vector kernels, scores and probabilities take 24 KB, and everything at most a.scratch_bytes,
// to stay in L2 (256 KB are enough for 256 rows at hd 64, or 96 rows at hd 256).
// With AMX tiles, scores and probabilities take 64 KB, widened keys and values take up to 256 KB,
// and the whole scratch has at most kAttentionScratch bytes.
template <class Kv>
static inline RowBlock<Kv> carve_scratch(const AttentionArgs& a, int hd) {
  RowBlock<Kv> b;
  uint8_t* p = static_cast<uint8_t*>(a.scratch);
  uint8_t* const end =
      p + (Kv::kMatrixTiles ? kAttentionScratch : static_cast<size_t>(a.scratch_bytes));
  const auto take = [&p](size_t bytes) {
    uint8_t* at = p;
    p += (bytes + 63) / 64 * 64;
    return at;
  };
  const size_t width = static_cast<size_t>(hd);
  constexpr size_t kRows = Kv::kMostRows;
  for (Tile<Kv>& tile : b.tile) {
    tile.s = reinterpret_cast<float*>(take((kRows * kChunk + kSlack) * sizeof(float)));
    // On AMX tiles, the bf16 probabilities of a row overwrite its fp32 scores from front to back.
    // The two tiles that are computed at the same time then take 64 KB instead of 96 KB,
    // so that more of their data stays in L1.
    uint8_t* const left = Kv::kMatrixTiles ? reinterpret_cast<uint8_t*>(tile.s)
                                           : take(kRows * kChunk * sizeof(typename Kv::Left));
    tile.p = reinterpret_cast<typename Kv::Left*>(left);
  }
  b.chunk_o = reinterpret_cast<float*>(take(kRows * width * sizeof(float)));
#ifdef CPUSERVE_UNIT_TILES
  if constexpr (Kv::kMatrixTiles) {
    b.tile[0].spare = b.tile[1].spare = take(spare_bytes(hd));
    b.widened = reinterpret_cast<uint16_t*>(take(widened_bytes<Kv>(hd)));
  }
#endif
  b.m = reinterpret_cast<float*>(take((RowBlock<Kv>::kMaxRows + 16) * sizeof(float)));
  b.l = reinterpret_cast<float*>(take((RowBlock<Kv>::kMaxRows + 16) * sizeof(float)));
  const size_t row = width * sizeof(float) + query_width<Kv>(hd) * sizeof(typename Kv::Left);
  const size_t fit = (static_cast<size_t>(end - p) - 64) / row;
  b.rows = fit < RowBlock<Kv>::kMaxRows ? static_cast<int>(fit) : RowBlock<Kv>::kMaxRows;
  b.o = reinterpret_cast<float*>(take(static_cast<size_t>(b.rows) * width * sizeof(float)));
  b.q = reinterpret_cast<typename Kv::Left*>(p);
  return b;
}

// Returns the number of rows of the next tile if n rows remain: n if one tile can take n rows,
// half of n if two tiles can (only in vector kernels), otherwise the rows of a full tile.
template <class Kv>
static inline int tile_rows(int n) {
  if constexpr (Kv::kMatrixTiles) return n < Kv::kMostRows ? n : Kv::kMostRows;
  if (n <= kTallRows) return n;
  if (n <= 2 * kTallRows) return (n + 1) / 2;
  // If rows are multiplied in pairs (attention_pairs.h), a full tile has kTallRows (8) rows.
  // A tile of 4 pairs of rows by 4 operands needs fewer loads
  // and interleavings per product than a tile of 3 pairs by 8 operands.
  return Kv::kRowPairs ? kTallRows : kTileRows;
}

// Copies one row of q to its position in the layout of a tile, [hd / kQuerySide][R][kQuerySide],
// and converts it to Kv::Left. For matrix tiles the row is contiguous and padded with zeros.
template <class Kv>
static inline void gather_query(const Rows& q, int64_t token, int64_t column, int hd, int R,
                                typename Kv::Left* to) {
  using Left = typename Kv::Left;
  constexpr int S = Kv::kQuerySide;
  alignas(64) Left converted[kMaxHeadDim];
  const Left* from = converted;
  const uint8_t* row = row_at(q, token);
  if (q.format != ActFormat::bf16) {
    const float* x = reinterpret_cast<const float*>(row) + column;
    for (int i = 0; i < hd; i += kLanes) Kv::store_left(converted + i, load(x + i));
  } else if constexpr (sizeof(Left) == sizeof(uint16_t)) {
    from = reinterpret_cast<const uint16_t*>(row) + column;
  } else {
    const uint16_t* x = reinterpret_cast<const uint16_t*>(row) + column;
    for (int i = 0; i < hd; i += kLanes) Kv::store_left(converted + i, load_bf16(x + i));
  }
  if constexpr (Kv::kMatrixTiles) {
    const size_t n = static_cast<size_t>(hd);
    memcpy(to, from, n * sizeof(Left));
    memset(to + n, 0, (query_width<Kv>(hd) - n) * sizeof(Left));
  } else {
    for (int i = 0; i < hd; i += S, to += R * S) memcpy(to, from + i, S * sizeof(Left));
  }
}

// The token and the query head of a row.
// Advancing from row to row is cheaper than dividing the index of each row by a.group.
struct RowPlace {
  int64_t token;  // index of the token of the row, counted from a.t0
  int head;       // index of the query head, counted from the first query head of the KV head
};
CPUSERVE_INLINE RowPlace place_of(const AttentionArgs& a, int64_t first) {
  const int64_t row = a.row0 + first;
  return {row / a.group, static_cast<int>(row % a.group)};
}
CPUSERVE_INLINE void advance(RowPlace& p, int group) {
  if (++p.head == group) {
    p.head = 0;
    p.token++;
  }
}

// Prefetches the queries of rows [first, first + n). Called only if there is more than one tile,
// because the queries of fewer rows are still in a cache near the core.
template <class Kv>
static inline void fetch_queries(const AttentionArgs& a, int kv_head, int64_t first, int n) {
  const size_t element = a.q.format == ActFormat::bf16 ? sizeof(uint16_t) : sizeof(float);
  const size_t bytes = static_cast<size_t>(a.group) * static_cast<size_t>(a.kv.hd_pad) * element;
  for (int64_t t = (a.row0 + first) / a.group; t <= (a.row0 + first + n - 1) / a.group; t++) {
    const uint8_t* row = row_at(a.q, a.t0 + t) + static_cast<size_t>(kv_head) * bytes;
    for (size_t i = 0; i < bytes; i += 64) prefetch(row + i);
  }
}

template <class Kv>
static inline void begin_rows(const AttentionArgs& a, int kv_head, int64_t first, int n,
                              RowBlock<Kv>& b) {
  if (n > Kv::kMostRows) fetch_queries<Kv>(a, kv_head, first, n);
  RowPlace at = place_of(a, first);
  for (int r0 = 0; r0 < n;) {
    const int R = tile_rows<Kv>(n - r0);
    const size_t width = query_width<Kv>(a.kv.hd_pad);
    const size_t step = Kv::kMatrixTiles ? width : static_cast<size_t>(Kv::kQuerySide);
    for (int r = 0; r < R; r++, advance(at, a.group)) {
      const int head = kv_head * a.group + at.head;
      gather_query<Kv>(a.q, a.t0 + at.token, static_cast<int64_t>(head) * a.kv.hd_pad, a.kv.hd_pad,
                       R, b.q + static_cast<size_t>(r0) * width + static_cast<size_t>(r) * step);
      b.m[r0 + r] = a.sinks ? a.sinks[head] * kLog2E : -INFINITY;
      b.l[r0 + r] = a.sinks ? 1.0f : 0.0f;
    }
    r0 += R;
  }
  memset(b.o, 0, static_cast<size_t>(n) * static_cast<size_t>(a.kv.hd_pad) * sizeof(float));
}

// Return the addresses of K and of V of a KV head in the block with this index of the sequence.
static inline const uint8_t* keys_at(const AttentionArgs& a, int kv_head, int64_t index) {
  return kv_block(a.kv, a.block_table[index], kv_head);
}
static inline const uint8_t* values_at(const AttentionArgs& a, int kv_head, int64_t index) {
  return kv_values(a.kv, a.block_table[index], kv_head);
}

// For MLA, where keys are also the values: copies the keys of a KV block to the layout of values.
// In bf16, [hd / 2][kBlock][2] becomes [kBlock / 2][hd][2]; else [hd][kBlock] becomes [kBlock][hd].
// Token slots that were never written may contain any bytes.
template <class Kv>
static inline void values_of_keys(const typename Kv::Elem* keys, int hd, typename Kv::Elem* to) {
  using Elem = typename Kv::Elem;
  if constexpr (Kv::kSide == 2) {
    static_assert(sizeof(Elem) == 2, "two pairs are 64 bits");
    for (int d = 0; d < hd; d += 2, keys += 2 * kBlock) {
      for (int t = 0; t < kBlock; t += 2) {
        uint64_t x;
        memcpy(&x, keys + 2 * t, sizeof x);
        x = (x & 0xffff00000000ffff) | (x >> 16 & 0xffff0000) | (x << 16 & 0xffff00000000);
        memcpy(to + t * hd + 2 * d, &x, sizeof x);
      }
    }
  } else {
    for (int d = 0; d < hd; d++, keys += kBlock) {
      for (int t = 0; t < kBlock; t++) to[t * hd + d] = keys[t];
    }
  }
  if constexpr (Kv::kScaled) memcpy(to + kBlock * hd, keys, kBlock * sizeof(float));
}

// Sets the addresses of the KV blocks of a chunk. Only its first `count` blocks exist:
// the addresses of later blocks are never read.
template <class Kv>
static inline void find_blocks(const AttentionArgs& a, int kv_head, int chunk, int count,
                               ChunkBlocks<Kv>& c) {
  using Elem = typename Kv::Elem;
  c.hd = a.kv.hd_pad;
  for (int b = 0; b < kChunkBlocks; b++) {
    c.k[b] = c.v[b] = nullptr;
    if (b >= count) continue;
    const int64_t index = chunk * kChunkBlocks + b;
    c.k[b] = reinterpret_cast<const Elem*>(keys_at(a, kv_head, index));
    if (a.kv.value_offset) {
      c.v[b] = reinterpret_cast<const Elem*>(values_at(a, kv_head, index));
      continue;
    }
    uint8_t* values =
        static_cast<uint8_t*>(a.values) + static_cast<size_t>(b) * kv_value_bytes(a.kv.type, c.hd);
    values_of_keys<Kv>(c.k[b], c.hd, reinterpret_cast<Elem*>(values));
    c.v[b] = reinterpret_cast<const Elem*>(values);
  }
}

// Appends the K halves and then the V halves of a chunk's blocks to the pieces that `f` prefetches.
static inline void add_chunk(const AttentionArgs& a, int kv_head, int chunk, int blocks, Fetch& f) {
  const int left = blocks - chunk * kChunkBlocks;
  const int count = left < kChunkBlocks ? left : kChunkBlocks;
  const int halves = a.kv.value_offset ? 2 : 1;
  const size_t key_bytes = kv_key_bytes(a.kv.type, a.kv.hd_pad);
  const size_t value_bytes = kv_value_bytes(a.kv.type, a.kv.hd_pad);
  for (int b = 0; b < count; b++) {
    const int64_t index = chunk * kChunkBlocks + b;
    f.piece[f.count + b] = {keys_at(a, kv_head, index), key_bytes};
    if (halves == 2) f.piece[f.count + count + b] = {values_at(a, kv_head, index), value_bytes};
  }
  f.count += count > 0 ? halves * count : 0;
}

// Selects the memory that `f` prefetches while `chunk` of `kv_head` is computed: the next chunk,
// or after the last chunk the first chunk of the next KV head. The sequence has `blocks` KV blocks.
// In decode (`dense`), `f` first prefetches cache lines of the current chunk, kLead pieces ahead
// of their use, and continues at the line where the prefetches of the previous chunk stopped.
static inline void look_ahead(const AttentionArgs& a, int kv_head, int chunk, int blocks,
                              bool dense, Fetch& f) {
  const bool same = chunk + 1 < a.chunk1;
  const int ran = f.index - f.now;  // number of pieces of `chunk` that are already prefetched
  const size_t into = f.step ? static_cast<size_t>(f.at - f.piece[f.index].begin) : 0;
  f.count = 0;
  if (dense) add_chunk(a, kv_head, chunk, blocks, f);
  f.now = f.count;
  if (same) {
    add_chunk(a, kv_head, chunk + 1, blocks, f);
  } else if (kv_head + 1 < a.kv_head + a.heads) {
    add_chunk(a, kv_head + 1, a.chunk0, blocks, f);
  }
  if (!dense) return begin_piece(f, 0, 0);
  // Pieces of 8-bit elements are half as long, so more of them are prefetched ahead.
  const int lead = kv_scaled(a.kv.type) ? 4 * kLead : kLead;
  ran < lead ? begin_piece(f, lead, 0) : begin_piece(f, ran, into);
}

// Returns the position after the last key that a row of the token at `position` sees.
static inline int end_of_keys(const AttentionArgs& a, int position) {
  if (a.keys == 0) return position + 1;
  return a.window > 0 && a.window < a.keys - position ? position + a.window : a.keys;
}

// Sets t.lo and t.hi: the range of the chunk's keys that each row of the tile sees.
// Returns false if no row of the tile sees a key of the chunk.
template <class Kv>
static inline bool place_tile(const AttentionArgs& a, int kv_head, int64_t first, int R, int chunk,
                              Tile<Kv>& t) {
  const int key0 = chunk * kChunk;
  bool any = false;
  RowPlace place = place_of(a, first);
  for (int r = 0; r < R; r++, advance(place, a.group)) {
    const int at = a.pos0 + static_cast<int>(place.token) - key0;
    const int low = a.window > 0 ? at - a.window + 1 : 0;
    const int high = end_of_keys(a, at + key0) - key0;
    t.lo[r] = low < 0 ? 0 : low > kChunk ? kChunk : low;
    t.hi[r] = high < 0 ? 0 : high > kChunk ? kChunk : high;
    t.position[r] = at;
    if (a.slopes) t.slope[r] = a.slopes[kv_head * a.group + place.head];
    any |= t.lo[r] < t.hi[r];
  }
  return any;
}

// Merges the result of a tile for one chunk into the running m, l and o of its rows.
// For a row that sees no key of the chunk, the factors are y = 0 and x = 1: m and l do not change,
// and o is not updated, because an update would turn -0 into 0 (-0 + 0 = 0).
template <class Kv>
static inline void merge_tile(const Tile<Kv>& t, int R, int hd, float* m, float* l, float* o) {
  alignas(64) float x[Kv::kMostRows + 16], y[Kv::kMostRows + 16];
  for (int r = 0; r < R; r += kLanes) {
    const int n = R - r;
    merge_factors(load_n(m + r, n), load_n(t.m + r, n), x + r, y + r);
    store_n(l + r, merge_columns(load_n(l + r, n), load(x + r), load_n(t.l + r, n), load(y + r)),
            n);
    store_n(m + r, max(load_n(m + r, n), load_n(t.m + r, n)), n);
  }
  for (int r = 0; r < R; r++) {
    if (t.m[r] == -INFINITY) continue;
    const F wx = set1(x[r]), wy = set1(y[r]);
    const float* from = t.o + static_cast<size_t>(r) * t.ldo;
    float* to = o + static_cast<size_t>(r) * static_cast<size_t>(hd);
    for (int i = 0; i < hd; i += kLanes) {
      store(to + i, merge_columns(load(to + i), wx, load(from + i), wy));
    }
  }
}

// Returns the address in a.partial of the partial result of one row for one chunk. After it come
// the partial results of the same row for later chunks. a.partial must not be null.
static inline float* partial_slots(const AttentionArgs& a, int64_t row, int chunk) {
  const int64_t stride = a.partial_stride ? a.partial_stride : a.chunk1 - a.chunk0;
  return a.partial + static_cast<size_t>(row * stride + chunk - a.chunk0) *
                         static_cast<size_t>(16 + a.kv.hd_pad);
}

// The arguments that all tiles of a RowBlock have in common, for one KV head.
struct UnitRows {
  const AttentionArgs& a;
  int kv_head;
  int64_t first;  // the first row of the RowBlock, counted from the first row of the unit
};

// Prepares a tile for rows [r0, r0 + R) of a RowBlock and one chunk. Returns false if the tile has
// nothing to compute: no row sees a key of the chunk, and the unit writes no partial results.
template <class Kv>
static inline bool begin_tile(const UnitRows& u, int r0, int R, int chunk, const RowBlock<Kv>& b,
                              Tile<Kv>& t) {
  const AttentionArgs& a = u.a;
  const bool any = place_tile(a, u.kv_head, u.first + r0, R, chunk, t);
  if (!any && !a.partial) return false;
  const int hd = a.kv.hd_pad;
  t.q = b.q + static_cast<size_t>(r0) * query_width<Kv>(hd);
  t.o = b.chunk_o;
  t.ldo = static_cast<size_t>(hd);
  if (a.partial) {
    float* slots = partial_slots(a, u.first + r0, chunk);
    t.o = slots + 16;
    t.ldo = static_cast<size_t>(partial_slots(a, u.first + r0 + 1, chunk) - slots);
  }
  return true;
}

// Ends a tile: merges its result into the running results of its rows. If the unit writes partial
// results instead, their o is in place already (begin_tile), and this function stores m and l.
template <class Kv>
static inline void end_tile(const UnitRows& u, int r0, int R, const RowBlock<Kv>& b,
                            const Tile<Kv>& t) {
  if (!u.a.partial) {
    const int hd = u.a.kv.hd_pad;
    return merge_tile(t, R, hd, b.m + r0, b.l + r0,
                      b.o + static_cast<size_t>(r0) * static_cast<size_t>(hd));
  }
  for (int r = 0; r < R; r++) {
    float* slot = t.o - 16 + static_cast<size_t>(r) * t.ldo;
    slot[0] = t.m[r];
    slot[1] = t.l[r];
  }
}

// Computes rows [0, n) of a RowBlock for one chunk.
// Only the first `count` KV blocks of the chunk exist.
template <class Kv>
static inline void visit_chunk(const UnitRows& u, int n, int chunk, int count, bool dense, Fetch& f,
                               RowBlock<Kv>& b) {
  ChunkBlocks<Kv> c;
  find_blocks(u.a, u.kv_head, chunk, count, c);
  Tile<Kv>& t = b.tile[0];
  for (int r0 = 0, R; r0 < n; r0 += R) {
    R = tile_rows<Kv>(n - r0);
    if (!begin_tile(u, r0, R, chunk, b, t)) continue;
    dense ? attend_chunk<Kv, Ahead::full>(t, c, R, f) : attend_chunk<Kv, Ahead::light>(t, c, R, f);
    end_tile(u, r0, R, b, t);
  }
}

#ifdef CPUSERVE_UNIT_TILES
// Does the same as visit_chunk, with products on AMX tiles.
template <class Kv>
static inline void visit_on_tiles(const UnitRows& u, int n, int chunk, int count, bool dense,
                                  Fetch& f, RowBlock<Kv>& b) {
  ChunkBlocks<Kv> c;
  find_blocks(u.a, u.kv_head, chunk, count, c);
  // KV blocks before the sliding window of the first row may not exist any more.
  const int position = u.a.pos0 + static_cast<int>(place_of(u.a, u.first).token);
  const int low = u.a.window > 0 ? position - u.a.window + 1 - chunk * kChunk : 0;
  const int begin_block = low > 0 ? low / kBlock : 0, end_block = at_most(count, kChunkBlocks);
  constexpr int kRows = Kv::kMostRows;
  if (dense) {
    Tile<Kv>& t = b.tile[0];
    if (!begin_tile(u, 0, n, chunk, b, t)) return;
    const PairBlocks pairs = pair_blocks<Kv, Ahead::full>(c, begin_block, end_block, b.widened, f);
    attend_alone(t, n, c, pairs, f);
    return end_tile(u, 0, n, b, t);
  }
  const PairBlocks pairs = pair_blocks<Kv, Ahead::light>(c, begin_block, end_block, b.widened, f);
  const auto begin = [&](int i, Tile<Kv>& t) {
    const int R = tile_rows<Kv>(n - i * kRows);
    return begin_tile(u, i * kRows, R, chunk, b, t) ? R : 0;
  };
  const auto end = [&](int i, const Tile<Kv>& t, int R) { end_tile(u, i * kRows, R, b, t); };
  attend_many((n + kRows - 1) / kRows, b.tile, c, pairs, f, begin, end);
}
#endif

// Computes rows [first, first + n) of a unit for one KV head and all its chunks; n <= b.rows.
template <class Kv>
static inline void attend_rows(const AttentionArgs& a, int kv_head, int64_t first, int n,
                               RowBlock<Kv>& b) {
  const int keys = end_of_keys(a, a.pos0 + static_cast<int>((a.row0 + first + n - 1) / a.group));
  const int blocks = (keys + kBlock - 1) / kBlock;
  const bool dense = n <= Kv::kMostRows;  // all rows fit in one tile, as in decode
  Fetch f;
  f.idle = static_cast<const uint8_t*>(a.scratch);
  f.near = a.near_keys;
  f.count = 0;
  begin_piece(f, 0, 0);
  f.now = 0;
  begin_rows(a, kv_head, first, n, b);
  for (int chunk = a.chunk0; chunk < a.chunk1; chunk++) {
    look_ahead(a, kv_head, chunk, blocks, dense, f);
    const UnitRows u = {a, kv_head, first};
    const int count = blocks - chunk * kChunkBlocks;
    if constexpr (Kv::kMatrixTiles) {
      visit_on_tiles(u, n, chunk, count, dense, f, b);
    } else {
      visit_chunk(u, n, chunk, count, dense, f, b);
    }
  }
}

template <class Kv>
static inline void finish_rows(const AttentionArgs& a, int kv_head, int64_t first, int n,
                               const RowBlock<Kv>& b) {
  RowPlace at = place_of(a, first);
  for (int r = 0; r < n; r++, advance(at, a.group)) {
    finish_row(a.out, a.t0 + at.token, kv_head * a.group + at.head, a.kv.head_dim, a.kv.hd_pad,
               kv_mixes_values(a.kv.type),
               b.o + static_cast<size_t>(r) * static_cast<size_t>(a.kv.hd_pad), b.l[r]);
  }
}

template <class Kv>
static inline void attend_unit(const AttentionArgs& a) {
  RowBlock<Kv> b = carve_scratch<Kv>(a, a.kv.hd_pad);
  const bool adjusted = a.softcap > 0 || a.slopes;
  for (Tile<Kv>& tile : b.tile) {
    tile.scale = a.scale;
    tile.factor = adjusted ? kLog2E : a.scale * kLog2E;
    tile.softcap = a.softcap;
    tile.alibi = a.slopes != nullptr;
  }
  for (int kv_head = a.kv_head; kv_head < a.kv_head + a.heads; kv_head++) {
    for (int64_t first = 0; first < a.rows; first += b.rows) {
      const int n = a.rows - first < b.rows ? static_cast<int>(a.rows - first) : b.rows;
      attend_rows(a, kv_head, first, n, b);
      if (!a.partial) finish_rows(a, kv_head, first, n, b);
    }
  }
}

template <class Kv>
static void attention(const AttentionArgs& a) noexcept {
#ifdef CPUSERVE_UNIT_TILES
  attend_unit<OnTiles<Kv>>(a);
  tile_release();
#else
  attend_unit<Kv>(a);
#endif
}

// Returns the attention kernel for a cache with elements of type Kv.
template <class Kv>
static constexpr AttentionKernel attention_kernel() {
  AttentionKernel kernel{attention<Kv>};
#ifdef CPUSERVE_UNIT_TILES
  if (Kv::kScaled) kernel.widest_head = kWidestScaledHead;
#endif
  return kernel;
}

// Computes the factors x and y that merge `n` partial results of one row into a running result,
// and updates the maximum m and the sum l of the running result.
static inline void merge_row_factors(const float* partial, size_t slot, int n, float* m, float* l,
                                     float* x, float* y) {
  constexpr int kBatch = 64;
  alignas(64) float before[kBatch + 16] = {}, chunk[kBatch + 16] = {};
  for (int c = 0; c < n; c++) {
    before[c] = *m;
    chunk[c] = partial[static_cast<size_t>(c) * slot];
    *m = *m > chunk[c] ? *m : chunk[c];
  }
  for (int c = 0; c < n; c += kLanes)
    merge_factors(load(before + c), load(chunk + c), x + c, y + c);
  F sum = set1(*l);
  for (int c = 0; c < n; c++) {
    const float chunk_l = partial[static_cast<size_t>(c) * slot + 1];
    sum = merge_columns(sum, set1(x[c]), set1(chunk_l), set1(y[c]));
  }
  *l = reduce_max(sum);
}

// Merges the partial results of rows, with the same operations as merge_tile.
// For each row, first computes the factors of many chunks, with kLanes chunks in a vector.
// Then sums each column of the output o over the chunks in a register.
static inline void attention_merge(const AttentionMergeArgs& a) noexcept {
  constexpr int kBatch = 64;
  alignas(64) float x[kBatch + 16], y[kBatch + 16];
  float* o = static_cast<float*>(a.scratch);
  const size_t slot = static_cast<size_t>(16 + a.hd_pad);
  for (int64_t r = 0; r < a.rows; r++) {
    const int64_t row = a.row0 + r;
    const int head = a.kv_head * a.group + static_cast<int>(row % a.group);
    float m = a.sinks ? a.sinks[head] * kLog2E : -INFINITY, l = a.sinks ? 1.0f : 0.0f;
    memset(o, 0, static_cast<size_t>(a.hd_pad) * sizeof(float));
    for (int64_t c0 = 0; c0 < a.chunks; c0 += kBatch) {
      const float* p = a.partial + static_cast<size_t>(r * a.chunks + c0) * slot;
      const int n = a.chunks - c0 < kBatch ? static_cast<int>(a.chunks - c0) : kBatch;
      merge_row_factors(p, slot, n, &m, &l, x, y);
      for (int i = 0; i < a.hd_pad; i += kLanes) {
        F sum = load(o + i);
        for (int c = 0; c < n; c++) {
          const float* from = p + static_cast<size_t>(c) * slot;
          if (from[0] == -INFINITY) continue;
          sum = merge_columns(sum, set1(x[c]), load(from + 16 + i), set1(y[c]));
        }
        store(o + i, sum);
      }
    }
    finish_row(a.out, a.t0 + row / a.group, head, a.head_dim, a.hd_pad, a.mixed_values, o, l);
  }
}

}  // namespace CPUSERVE_NS
