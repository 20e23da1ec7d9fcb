// Stores index keys, computes the index keys of pools, and scores index keys (table/index_keys.h).
#pragma once
#include "kernels/generic/attention.h"
#include "kernels/generic/rope_kv.h"
#include "kernels/table/index_keys.h"

namespace CPUSERVE_NS {

CPUSERVE_INLINE F widen(KvBf16, const uint16_t* p) { return load_bf16(p); }
CPUSERVE_INLINE F widen(KvF16, const uint16_t* p) { return load_f16(p); }
CPUSERVE_INLINE F widen(KvF32, const float* p) { return load(p); }
CPUSERVE_INLINE F widen(KvInt8, const uint8_t* p) { return load_s8(p); }
CPUSERVE_INLINE F widen(KvE4m3, const uint8_t* p) { return load_e4m3(p); }

static inline void store_index(const StoreIndexArgs& a) noexcept {
  with_kv(a.layer.type, [&](auto kv) {
    for (int64_t t = a.m0; t < a.m1; t++) {
      float* x = f32_row(a.x, t);
      const int64_t row = int64_t{a.positions[t]} * (a.rotary / 2);
      if (a.rotary > 0) rotate(x, a.cos + row, a.sin + row, a.rotary / 2);
      store_key_and_value<decltype(kv)>(a.layer, a.slots[t], 0, x, nullptr);
    }
  });
}

// Writes the hd_pad columns of the key in token slot `at` of a KV block to x, as fp32.
template <class Kv>
static inline void read_key(const KvLayer& kv, const uint8_t* block, int at, float* x) {
  constexpr int S = Kv::kSide;
  const typename Kv::Elem* keys = reinterpret_cast<const typename Kv::Elem*>(block);
  typename Kv::Elem v[kLanes];
  F factor = set1(1.0f);
  if constexpr (Kv::kScaled) factor = set1(key_scales(block, kv.hd_pad)[at]);
  for (int i = 0; i < kv.hd_pad; i += kLanes) {
    for (int j = 0; j < kLanes; j += S) {
      memcpy(v + j, keys + (i + j) * kBlock + at * S, S * sizeof(v[0]));
    }
    store(x + i, mul(widen(Kv{}, v), factor));
  }
}

// Writes to x the mean of the keys of a pool, which are the first a.width columns of `rows`
// [pool][stride]. If there are gates (a.ape), the softmax of the next a.width columns weights them.
static inline void mean_of_pool(const PoolIndexArgs& a, const float* rows, int stride, float* x) {
  const F part = set1(1.0f / static_cast<float>(a.pool));
  for (int i = 0; i < a.width; i += kLanes) {
    F sum = zero(), weights = zero(), top = set1(-INFINITY);
    const auto gate = [&](int p) {
      return add(load(rows + p * stride + a.width + i), load(a.ape + p * a.width + i));
    };
    for (int p = 0; a.ape && p < a.pool; p++) top = max(top, gate(p));
    for (int p = 0; p < a.pool; p++) {
      const F weight = a.ape ? exp2(mul(sub(gate(p), top), set1(kLog2E))) : part;
      weights = add(weights, weight);
      sum = fma(weight, load(rows + p * stride + i), sum);
    }
    store(x + i, a.ape ? div(sum, weights) : sum);
  }
}

static inline void pool_index(const PoolIndexArgs& a) noexcept {
  const int stride = a.raw.hd_pad, part = a.width / a.pool;
  float* rows = static_cast<float*>(a.scratch);
  float* x = rows + a.pool * stride;
  with_kv(a.raw.type, [&](auto kv) {
    using Kv = decltype(kv);
    for (int64_t i = a.first; i < a.last; i++) {
      const int64_t position = i * a.pool, row = position * (a.rotary / 2);
      const int32_t block = a.block_table[position / kBlock];
      const int slot = static_cast<int>(position % kBlock);
      for (int p = 0; p < a.pool; p++) {
        read_key<Kv>(a.raw, kv_block(a.raw, block, 0), slot + p, rows + p * stride);
      }
      mean_of_pool(a, rows, stride, x);
      if (a.norm) {
        scale_columns(x, x, a.width, 0.0f, rms_inverse(x, a.width, a.eps), a.norm, nullptr);
      }
      if (a.rotary > 0) rotate(x, a.cos + row, a.sin + row, a.rotary / 2);
      for (int p = 0; p < a.pool; p++) {
        store_key_and_value<Kv>(a.to, block * kBlock + slot + p, 0, x + p * part, nullptr);
      }
    }
  });
}

// Joins the parts of n index keys, from key `first` on, and writes the keys to `to` in the layout
// of fp32 keys in the KV cache, [block][width][kBlock].
template <class Kv>
static inline void join_keys(const ScoreIndexArgs& a, int64_t first, int n, float* to) {
  alignas(64) float part[kMaxHeadDim];
  for (int k = 0; k < n; k++) {
    float* key = to + k / kBlock * kBlock * a.width + k % kBlock;
    const int64_t position = (first + k) * a.pool;
    const uint8_t* block = kv_block(a.layer, a.block_table[position / kBlock], 0);
    for (int p = 0; p < a.pool; p++) {
      read_key<Kv>(a.layer, block, static_cast<int>(position % kBlock) + p, part);
      for (int i = 0; i < a.layer.head_dim; i++, key += kBlock) *key = part[i];
    }
  }
}

// The queries q of a token, as tiles of up to tile_rows() heads, and memory s for a tile's scores.
template <class Kv>
struct IndexQueries {
  typename Kv::Left* q;
  float* s;
};

template <class Kv>
static inline IndexQueries<Kv> gather_index_queries(const ScoreIndexArgs& a) {
  const IndexQueries<Kv> to = {static_cast<typename Kv::Left*>(a.scratch),
                               static_cast<float*>(a.scratch) + a.heads * a.width};
  for (int h = 0; h < a.heads;) {
    const int R = tile_rows<Kv>(a.heads - h);
    for (int r = 0; r < R; r++) {
      gather_query<Kv>(a.q, a.token, int64_t{h + r} * a.width, a.width, R,
                       to.q + h * a.width + r * Kv::kQuerySide);
    }
    h += R;
  }
  return to;
}

// Computes the scores of the first n keys of an attention chunk. Lanes after key n get scores
// of stale keys, and no caller reads these scores.
template <class Kv>
static inline void score_index_chunk(const ScoreIndexArgs& a, const IndexQueries<Kv>& queries,
                                     const ChunkBlocks<Kv>& c, int n, float* out) {
  Tile<Kv> t;
  t.s = queries.s;
  Fetch f;
  f.idle = static_cast<const uint8_t*>(a.scratch);
  f.near = true;
  f.count = f.now = 0;
  begin_piece(f, 0, 0);
  memset(out, 0, kChunk * sizeof(float));
  for (int h = 0; h < a.heads;) {
    const int R = tile_rows<Kv>(a.heads - h);
    t.q = queries.q + h * a.width;
    score_keys<Kv, Ahead::full>(t, c, R, 0, n, f);
    for (int r = 0; r < R; r++) {
      float* s = t.s + r * kChunk;
      if constexpr (Kv::kScaled) scale_scores<Kv>(c, 0, n, s);
      const F weight = set1(a.weights ? a.weights[h + r] : 1.0f);
      for (int k = 0; k < n; k += kLanes) {
        store(out + k, fma(weight, max(load(s + k), zero()), load(out + k)));
      }
    }
    h += R;
  }
}

template <class Kv>
static inline void score_whole_keys(const ScoreIndexArgs& a) {
  const IndexQueries<Kv> queries = gather_index_queries<Kv>(a);
  for (int64_t first = a.begin; first < a.end; first += kChunk) {
    const int n = static_cast<int>(a.end - first < kChunk ? a.end - first : kChunk);
    ChunkBlocks<Kv> c = {};
    c.hd = a.width;
    for (int b = 0; b * kBlock < n; b++) {
      const uint8_t* block = kv_block(a.layer, a.block_table[first / kBlock + b], 0);
      c.k[b] = reinterpret_cast<const typename Kv::Elem*>(block);
    }
    score_index_chunk(a, queries, c, n, a.scores + (first - a.begin));
  }
}

template <class Kv>
static inline void score_joined_keys(const ScoreIndexArgs& a) {
  const IndexQueries<KvF32> queries = gather_index_queries<KvF32>(a);
  float* keys = queries.s + 16 * kChunk + 64;
  for (int64_t first = a.begin; first < a.end; first += kChunk) {
    const int n = static_cast<int>(a.end - first < kChunk ? a.end - first : kChunk);
    join_keys<Kv>(a, first, n, keys);
    ChunkBlocks<KvF32> c = {};
    c.hd = a.width;
    for (int b = 0; b < kChunkBlocks; b++) c.k[b] = keys + b * kBlock * a.width;
    score_index_chunk(a, queries, c, n, a.scores + (first - a.begin));
  }
}

static inline void score_index(const ScoreIndexArgs& a) noexcept {
  with_kv(a.layer.type, [&](auto kv) {
    a.pool > 1 ? score_joined_keys<decltype(kv)>(a) : score_whole_keys<decltype(kv)>(a);
  });
}

}  // namespace CPUSERVE_NS
