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
  b.tile.edge = reinterpret_cast<typename Kv::Elem*>(take(width * 2 * sizeof(typename Kv::Elem)));
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
  constexpr int S = Kv::kStep;
  alignas(64) typename Kv::Left v[kLanes];
  for (int i = 0; i < hd; i += kLanes) {
    const uint8_t* row = row_at(q, token);
    if (q.format == ActFormat::bf16) {
      const uint16_t* x = reinterpret_cast<const uint16_t*>(row) + column + i;
      if constexpr (sizeof(v[0]) == sizeof(uint16_t)) {
        memcpy(v, x, sizeof v);
      } else {
        Kv::store_left(v, load_bf16(x));
      }
    } else {
      Kv::store_left(v, load(reinterpret_cast<const float*>(row) + column + i));
    }
    for (int j = 0; j < kLanes; j += S) {
      memcpy(to + static_cast<size_t>((i + j) / S) * R * S, v + j, S * sizeof(v[0]));
    }
  }
}

template <class Kv>
static inline void begin_rows(const AttentionArgs& a, int64_t first, int n, RowBlock<Kv>& b) {
  for (int r0 = 0; r0 < n;) {
    const int R = tile_rows(n - r0);
    for (int r = 0; r < R; r++) {
      const int64_t row = a.row0 + first + r0 + r;
      const int head = a.kv_head * a.group + static_cast<int>(row % a.group);
      gather_query<Kv>(a.q, a.t0 + row / a.group, static_cast<int64_t>(head) * a.kv.hd_pad,
                       a.kv.hd_pad, R, b.q + static_cast<size_t>(r0) * a.kv.hd_pad + r * Kv::kStep);
      b.m[r0 + r] = a.sinks ? a.sinks[head] * kLog2E : -INFINITY;
      b.l[r0 + r] = a.sinks ? 1.0f : 0.0f;
    }
    r0 += R;
  }
  memset(b.o, 0, static_cast<size_t>(n) * static_cast<size_t>(a.kv.hd_pad) * sizeof(float));
}

template <class Kv>
static inline const typename Kv::Elem* block_at(const AttentionArgs& a, int64_t index) {
  return reinterpret_cast<const typename Kv::Elem*>(
      a.kv.base + static_cast<size_t>(a.block_table[index]) * a.kv.block_stride +
      static_cast<size_t>(a.kv_head) * a.kv.head_stride);
}

// `count` blocks of the chunk exist; the pointers of others are never followed.
template <class Kv>
static inline void find_blocks(const AttentionArgs& a, int chunk, int count, ChunkBlocks<Kv>& c) {
  const size_t half = a.kv.head_stride / 2 / sizeof(typename Kv::Elem);
  c.hd = a.kv.hd_pad;
  for (int b = 0; b < kChunkBlocks; b++) {
    c.k[b] = b < count ? block_at<Kv>(a, chunk * kChunkBlocks + b) : nullptr;
    c.v[b] = b < count ? c.k[b] + half : nullptr;
    c.ahead[b] = 0;
  }
}

// Lets tile `index` of `tiles` fetch its share of the next chunk's blocks into L2 while it computes
// on this one's. Few tiles (decode) share all blocks; many (prefill) take two each, because more
// would wait for memory.
template <class Kv>
static inline bool look_ahead(const AttentionArgs& a, int chunk, int next_count, int index,
                              int tiles, ChunkBlocks<Kv>& c) {
  const int share = tiles < kChunkBlocks / 2 ? (kChunkBlocks + tiles - 1) / tiles : 2;
  bool any = false;
  for (int b = 0; b < kChunkBlocks; b++) {
    c.ahead[b] = 0;
    if (b / share != index || b >= next_count || !c.k[b]) continue;
    c.ahead[b] = block_at<Kv>(a, (chunk + 1) * kChunkBlocks + b) - c.k[b];
    any = true;
  }
  return any;
}

// Which keys of the chunk each row of the tile sees; false if none sees any.
template <class Kv>
static inline bool place_tile(const AttentionArgs& a, int64_t first, int R, int chunk,
                              Tile<Kv>& t) {
  const int key0 = chunk * kChunk;
  bool any = false;
  for (int r = 0; r < R; r++) {
    const int64_t row = a.row0 + first + r;
    const int at = a.pos0 + static_cast<int>(row / a.group) - key0;
    const int low = a.window > 0 ? at - a.window + 1 : 0;
    t.lo[r] = low < 0 ? 0 : low > kChunk ? kChunk : low;
    t.hi[r] = at + 1 < 0 ? 0 : at + 1 > kChunk ? kChunk : at + 1;
    t.position[r] = at;
    if (a.slopes) t.slope[r] = a.slopes[a.kv_head * a.group + static_cast<int>(row % a.group)];
    any |= t.lo[r] < t.hi[r];
  }
  return any;
}

template <class Kv, bool kAhead>
static inline void attend_tile(int R, Tile<Kv>& t, const ChunkBlocks<Kv>& c) {
  switch (R) {
    case 1:
      return attend_chunk<Kv, 1, kAhead>(t, c);
    case 2:
      return attend_chunk<Kv, 2, kAhead>(t, c);
    case 3:
      return attend_chunk<Kv, 3, kAhead>(t, c);
    case 4:
      return attend_chunk<Kv, 4, kAhead>(t, c);
    case 5:
      if constexpr (kTallRows >= 5) return attend_chunk<Kv, 5, kAhead>(t, c);
      break;
    case 6:
      if constexpr (kTallRows >= 6) return attend_chunk<Kv, 6, kAhead>(t, c);
      break;
    case 7:
      if constexpr (kTallRows >= 7) return attend_chunk<Kv, 7, kAhead>(t, c);
      break;
    default:
      if constexpr (kTallRows >= 8) return attend_chunk<Kv, 8, kAhead>(t, c);
      break;
  }
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
static inline void visit_tile(const AttentionArgs& a, int64_t first, int r0, int R, int chunk,
                              bool ahead, const ChunkBlocks<Kv>& c, RowBlock<Kv>& b) {
  const int hd = a.kv.hd_pad;
  Tile<Kv>& t = b.tile;
  const bool any = place_tile(a, first + r0, R, chunk, t);
  if (!any && !a.partial) return;
  const int64_t stride = a.partial_stride ? a.partial_stride : a.chunk1 - a.chunk0;
  const size_t slot = static_cast<size_t>(16 + hd);
  float* slots =
      a.partial ? a.partial + static_cast<size_t>((first + r0) * stride + chunk - a.chunk0) * slot
                : nullptr;
  t.q = b.q + static_cast<size_t>(r0) * static_cast<size_t>(hd);
  t.o = slots ? slots + 16 : b.chunk_o;
  t.ldo = slots ? static_cast<size_t>(stride) * slot : static_cast<size_t>(hd);
  ahead ? attend_tile<Kv, true>(R, t, c) : attend_tile<Kv, false>(R, t, c);
  if (!slots) {
    merge_tile(t, R, hd, b.m + r0, b.l + r0, b.o + static_cast<size_t>(r0) * t.ldo);
    return;
  }
  for (int r = 0; r < R; r++) {
    slots[static_cast<size_t>(r) * t.ldo] = t.m[r];
    slots[static_cast<size_t>(r) * t.ldo + 1] = t.l[r];
  }
}

static inline int count_tiles(int n) {
  int tiles = 0;
  for (; n > 0; tiles++) n -= tile_rows(n);
  return tiles;
}

// Rows [first, first + n) of the unit, n at most b.rows, through all chunks.
template <class Kv>
static inline void attend_rows(const AttentionArgs& a, int64_t first, int n, RowBlock<Kv>& b) {
  const int keys = a.pos0 + static_cast<int>((a.row0 + first + n - 1) / a.group) + 1;
  const int blocks = (keys + kBlock - 1) / kBlock, tiles = count_tiles(n);
  begin_rows(a, first, n, b);
  for (int chunk = a.chunk0; chunk < a.chunk1; chunk++) {
    ChunkBlocks<Kv> c;
    const int count = blocks - chunk * kChunkBlocks;
    const int next_count = chunk + 1 < a.chunk1 ? count - kChunkBlocks : 0;
    find_blocks(a, chunk, count, c);
    for (int r0 = 0, index = 0; r0 < n; index++) {
      const int R = tile_rows(n - r0);
      const bool ahead = next_count > 0 && look_ahead(a, chunk, next_count, index, tiles, c);
      visit_tile(a, first, r0, R, chunk, ahead, c, b);
      r0 += R;
    }
  }
}

template <class Kv>
static inline void attend_unit(const AttentionArgs& a) {
  RowBlock<Kv> b = carve_scratch<Kv>(a.scratch, a.kv.hd_pad);
  b.tile.scale = a.softcap > 0 || a.slopes ? a.scale : a.scale * kLog2E;
  b.tile.softcap = a.softcap;
  b.tile.alibi = a.slopes != nullptr;
  for (int64_t first = 0; first < a.rows; first += b.rows) {
    const int n = a.rows - first < b.rows ? static_cast<int>(a.rows - first) : b.rows;
    attend_rows(a, first, n, b);
    if (a.partial) continue;
    for (int r = 0; r < n; r++) {
      const int64_t row = a.row0 + first + r;
      finish_row(a.out, a.t0 + row / a.group, a.kv_head * a.group + static_cast<int>(row % a.group),
                 a.kv.head_dim, a.kv.hd_pad,
                 b.o + static_cast<size_t>(r) * static_cast<size_t>(a.kv.hd_pad), b.l[r]);
    }
  }
}

static inline void attention(const AttentionArgs& a) noexcept {
  switch (a.kv.type) {
    case KvType::bf16:
      return attend_unit<KvBf16>(a);
    case KvType::f16:
      return attend_unit<KvF16>(a);
    case KvType::f32:
      return attend_unit<KvF32>(a);
  }
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
