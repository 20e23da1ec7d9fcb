// Paged attention: row tiles walk the chunks of their sequence; chunk results are merged in
// ascending order, here or by attention_merge. Same tile, same merge for prefill and decode.
#pragma once
#include <float.h>

#include "kernels/generic/attention_tile.h"
#include "kernels/generic/convert.h"

namespace CPUSERVE_NS {

// x = 2^(before - after), y = 2^(m - after) with after = max(before, m); -inf (nothing seen yet,
// or nothing seen in this chunk) gives a factor of 0.
CPUSERVE_INLINE void merge_factors(F before, F m, float* x, float* y) {
  const F after = max(set1(-FLT_MAX), max(before, m));  // -inf - -inf would be NaN
  store(x, exp2(sub(before, after)));
  store(y, exp2(sub(m, after)));
}

CPUSERVE_INLINE F merge_columns(F o, F x, F chunk_o, F y) { return fma(chunk_o, y, mul(o, x)); }

// out = o / l for one row and head; a row that saw nothing is 0.
static inline void finish_row(const Rows& out, int64_t token, int head, int head_dim, int hd,
                              float* o, float l) {
  const F inverse = set1(l == 0.0f ? 0.0f : 1.0f / l);
  for (int i = 0; i < hd; i += kLanes) store(o + i, mul(load(o + i), inverse));
  store_row(out, token, static_cast<int64_t>(head) * head_dim, o, head_dim);
}

// Rows of a unit in flight: the tiles' queries and running results, carved from the scratch.
template <class Kv>
struct RowBlock {
  static constexpr int kMaxRows = 256;
  typename Kv::Left* q;  // tiles one after another
  float* o;              // [rows][hd]
  float* chunk_o;        // [kTallRows][hd]
  float* m;
  float* l;
  int rows;  // capacity
  Tile<Kv> tile;
};

// Fits kAttentionScratch: 24 KB of scores and probabilities, the tile's own result, m and l, and
// as many rows of q and o as the rest holds (256 rows at hd 64, 96 at hd 256).
template <class Kv>
static inline RowBlock<Kv> carve_scratch(void* scratch, int hd) {
  RowBlock<Kv> b;
  uint8_t* p = static_cast<uint8_t*>(scratch);
  uint8_t* const end = p + kAttentionScratch;
  const auto take = [&p](size_t bytes) {
    uint8_t* at = p;
    p += (bytes + 63) / 64 * 64;
    return at;
  };
  const size_t width = static_cast<size_t>(hd);
  b.tile.s = reinterpret_cast<float*>(take((kTallRows * kChunk + kSlack) * sizeof(float)));
  b.tile.p =
      reinterpret_cast<typename Kv::Left*>(take(kTallRows * kChunk * sizeof(typename Kv::Left)));
  b.chunk_o = reinterpret_cast<float*>(take(kTallRows * width * sizeof(float)));
  b.m = reinterpret_cast<float*>(take((RowBlock<Kv>::kMaxRows + 16) * sizeof(float)));
  b.l = reinterpret_cast<float*>(take((RowBlock<Kv>::kMaxRows + 16) * sizeof(float)));
  const size_t row = width * (sizeof(float) + sizeof(typename Kv::Left));
  const size_t fit = (static_cast<size_t>(end - p) - 64) / row;
  b.rows = fit < RowBlock<Kv>::kMaxRows ? static_cast<int>(fit) : RowBlock<Kv>::kMaxRows;
  b.o = reinterpret_cast<float*>(take(static_cast<size_t>(b.rows) * width * sizeof(float)));
  b.q = reinterpret_cast<typename Kv::Left*>(p);
  return b;
}

// Height of the next tile when n rows are left: a whole small group, else even parts.
static inline int tile_rows(int n) {
  if (n <= kTallRows) return n;
  if (n <= 2 * kTallRows) return (n + 1) / 2;
  return kTileRows;
}

// One q row as this KvType multiplies it, spread over [hd / kStep][R][kStep].
template <class Kv>
static inline void gather_query(const Rows& q, int64_t token, int64_t column, int hd, int R,
                                typename Kv::Left* to) {
  using Left = typename Kv::Left;
  constexpr int S = Kv::kStep;
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
  for (int i = 0; i < hd; i += S, to += R * S) memcpy(to, from + i, S * sizeof(Left));
}

// A row of the unit: token of the step and head. Advancing is cheaper than dividing by the group.
struct RowPlace {
  int64_t token;  // counted from a.t0
  int head;       // of the group
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

// Queries of many rows come from far: ask for all of them before the first is needed.
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
  if (n > kTallRows) fetch_queries<Kv>(a, kv_head, first, n);
  RowPlace at = place_of(a, first);
  for (int r0 = 0; r0 < n;) {
    const int R = tile_rows(n - r0);
    for (int r = 0; r < R; r++, advance(at, a.group)) {
      const int head = kv_head * a.group + at.head;
      gather_query<Kv>(a.q, a.t0 + at.token, static_cast<int64_t>(head) * a.kv.hd_pad, a.kv.hd_pad,
                       R, b.q + static_cast<size_t>(r0) * a.kv.hd_pad + r * Kv::kStep);
      b.m[r0 + r] = a.sinks ? a.sinks[head] * kLog2E : -INFINITY;
      b.l[r0 + r] = a.sinks ? 1.0f : 0.0f;
    }
    r0 += R;
  }
  memset(b.o, 0, static_cast<size_t>(n) * static_cast<size_t>(a.kv.hd_pad) * sizeof(float));
}

static inline const uint8_t* block_at(const AttentionArgs& a, int kv_head, int64_t index) {
  return kv_block(a.kv, a.block_table[index], kv_head);
}

// `count` blocks of the chunk exist; the pointers of others are never followed.
template <class Kv>
static inline void find_blocks(const AttentionArgs& a, int kv_head, int chunk, int count,
                               ChunkBlocks<Kv>& c) {
  using Elem = typename Kv::Elem;
  c.hd = a.kv.hd_pad;
  for (int b = 0; b < kChunkBlocks; b++) {
    const uint8_t* block = b < count ? block_at(a, kv_head, chunk * kChunkBlocks + b) : nullptr;
    c.k[b] = reinterpret_cast<const Elem*>(block);
    c.v[b] = block ? reinterpret_cast<const Elem*>(block + a.kv.value_offset) : nullptr;
  }
}

// Appends the blocks of one chunk to what `f` will ask for, keys before values.
static inline void add_chunk(const AttentionArgs& a, int kv_head, int chunk, int blocks, Fetch& f) {
  const int left = blocks - chunk * kChunkBlocks;
  const int count = left < kChunkBlocks ? left : kChunkBlocks;
  for (int b = 0; b < count; b++) {
    const uint8_t* block = block_at(a, kv_head, chunk * kChunkBlocks + b);
    f.piece[f.count + b] = block;
    f.piece[f.count + count + b] = block + a.kv.value_offset;
  }
  f.count += count > 0 ? 2 * count : 0;
}

// Before `chunk` of `kv_head`: what comes after it is the next chunk, or the first one of the
// unit's next head; `blocks` of the sequence exist. Decode asks for this chunk's lines too, a strip
// of keys ahead of using them, from where it had got to; prefill only for what comes after.
static inline void look_ahead(const AttentionArgs& a, int kv_head, int chunk, int blocks,
                              bool dense, Fetch& f) {
  const bool same = chunk + 1 < a.chunk1;
  const int ran = f.index - f.now;  // pieces of this chunk asked for already, and into which
  const size_t into = f.step ? static_cast<size_t>(f.at - f.piece[f.index]) : 0;
  f.bytes = kv_half_bytes(a.kv.type, a.kv.hd_pad);
  f.count = 0;
  if (dense) add_chunk(a, kv_head, chunk, blocks, f);
  f.now = f.count;
  if (same) {
    add_chunk(a, kv_head, chunk + 1, blocks, f);
  } else if (kv_head + 1 < a.kv_head + a.heads) {
    add_chunk(a, kv_head + 1, a.chunk0, blocks, f);
  }
  if (!dense) return begin_piece(f, 0, 0);
  // Pieces of eight bits are half as long.
  const int lead = kv_scaled(a.kv.type) ? 4 * kLead : kLead;
  ran < lead ? begin_piece(f, lead, 0) : begin_piece(f, ran, into);
}

// Which keys of the chunk each row of the tile sees; false if none sees any.
template <class Kv>
static inline bool place_tile(const AttentionArgs& a, int kv_head, int64_t first, int R, int chunk,
                              Tile<Kv>& t) {
  const int key0 = chunk * kChunk;
  bool any = false;
  RowPlace place = place_of(a, first);
  for (int r = 0; r < R; r++, advance(place, a.group)) {
    const int at = a.pos0 + static_cast<int>(place.token) - key0;
    const int low = a.window > 0 ? at - a.window + 1 : 0;
    t.lo[r] = low < 0 ? 0 : low > kChunk ? kChunk : low;
    t.hi[r] = at + 1 < 0 ? 0 : at + 1 > kChunk ? kChunk : at + 1;
    t.position[r] = at;
    if (a.slopes) t.slope[r] = a.slopes[kv_head * a.group + place.head];
    any |= t.lo[r] < t.hi[r];
  }
  return any;
}

template <class Kv>
static inline void attend_tile(int R, bool dense, Tile<Kv>& t, const ChunkBlocks<Kv>& c, Fetch& f) {
  with_rows(
      R, [&](auto rows) __attribute__((always_inline)) {
        constexpr int kRows = decltype(rows)::value;
        dense ? attend_chunk<Kv, kRows, Ahead::dense>(t, c, f)
              : attend_chunk<Kv, kRows, Ahead::thin>(t, c, f);
      });
}

// Folds a tile's chunk into the running rows. A row without a visible key in it has y = 0 and x =
// 1: m and l stay as they are; o is skipped because -0 + 0 would lose its sign.
template <class Kv>
static inline void merge_tile(const Tile<Kv>& t, int R, int hd, float* m, float* l, float* o) {
  alignas(64) float x[16], y[16];
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

// One tile, one chunk: into its slots of a.partial, or folded into the running rows.
template <class Kv>
static inline void visit_tile(const AttentionArgs& a, int kv_head, int64_t first, int r0, int R,
                              int chunk, bool dense, const ChunkBlocks<Kv>& c, Fetch& f,
                              RowBlock<Kv>& b) {
  const int hd = a.kv.hd_pad;
  Tile<Kv>& t = b.tile;
  const bool any = place_tile(a, kv_head, first + r0, R, chunk, t);
  if (!any && !a.partial) return;
  const int64_t stride = a.partial_stride ? a.partial_stride : a.chunk1 - a.chunk0;
  const size_t slot = static_cast<size_t>(16 + hd);
  float* slots =
      a.partial ? a.partial + static_cast<size_t>((first + r0) * stride + chunk - a.chunk0) * slot
                : nullptr;
  t.q = b.q + static_cast<size_t>(r0) * static_cast<size_t>(hd);
  t.o = slots ? slots + 16 : b.chunk_o;
  t.ldo = slots ? static_cast<size_t>(stride) * slot : static_cast<size_t>(hd);
  attend_tile<Kv>(R, dense, t, c, f);
  if (!slots) {
    merge_tile(t, R, hd, b.m + r0, b.l + r0, b.o + static_cast<size_t>(r0) * t.ldo);
    return;
  }
  for (int r = 0; r < R; r++) {
    slots[static_cast<size_t>(r) * t.ldo] = t.m[r];
    slots[static_cast<size_t>(r) * t.ldo + 1] = t.l[r];
  }
}

// Rows [first, first + n) of one KV head, n at most b.rows, through all chunks.
template <class Kv>
static inline void attend_rows(const AttentionArgs& a, int kv_head, int64_t first, int n,
                               RowBlock<Kv>& b) {
  const int keys = a.pos0 + static_cast<int>((a.row0 + first + n - 1) / a.group) + 1;
  const int blocks = (keys + kBlock - 1) / kBlock;
  const bool dense = n <= kTallRows;  // one tile
  Fetch f;
  f.idle = static_cast<const uint8_t*>(a.scratch);
  f.count = 0;
  begin_piece(f, 0, 0);
  f.now = 0;
  begin_rows(a, kv_head, first, n, b);
  for (int chunk = a.chunk0; chunk < a.chunk1; chunk++) {
    ChunkBlocks<Kv> c;
    find_blocks(a, kv_head, chunk, blocks - chunk * kChunkBlocks, c);
    look_ahead(a, kv_head, chunk, blocks, dense, f);
    for (int r0 = 0; r0 < n;) {
      const int R = tile_rows(n - r0);
      visit_tile(a, kv_head, first, r0, R, chunk, dense, c, f, b);
      r0 += R;
    }
  }
}

template <class Kv>
static inline void finish_rows(const AttentionArgs& a, int kv_head, int64_t first, int n,
                               const RowBlock<Kv>& b) {
  RowPlace at = place_of(a, first);
  for (int r = 0; r < n; r++, advance(at, a.group)) {
    finish_row(a.out, a.t0 + at.token, kv_head * a.group + at.head, a.kv.head_dim, a.kv.hd_pad,
               b.o + static_cast<size_t>(r) * static_cast<size_t>(a.kv.hd_pad), b.l[r]);
  }
}

template <class Kv>
static inline void attend_unit(const AttentionArgs& a) {
  RowBlock<Kv> b = carve_scratch<Kv>(a.scratch, a.kv.hd_pad);
  const bool adjusted = a.softcap > 0 || a.slopes;
  b.tile.scale = a.scale;
  b.tile.factor = adjusted ? kLog2E : a.scale * kLog2E;
  b.tile.softcap = a.softcap;
  b.tile.alibi = a.slopes != nullptr;
  for (int kv_head = a.kv_head; kv_head < a.kv_head + a.heads; kv_head++) {
    for (int64_t first = 0; first < a.rows; first += b.rows) {
      const int n = a.rows - first < b.rows ? static_cast<int>(a.rows - first) : b.rows;
      attend_rows(a, kv_head, first, n, b);
      if (!a.partial) finish_rows(a, kv_head, first, n, b);
    }
  }
}

static inline void attention(const AttentionArgs& a) noexcept {
  with_kv(a.kv.type, [&](auto kv) { attend_unit<decltype(kv)>(a); });
}

// Factors of `n` partials of one row, starting from m and l, which are advanced.
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

// The same folding as merge_tile, a row at a time: factors of many chunks first (one vector of
// exponentials instead of one each), then each column's chain in registers.
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
    finish_row(a.out, a.t0 + row / a.group, head, a.head_dim, a.hd_pad, o, l);
  }
}

}  // namespace CPUSERVE_NS
