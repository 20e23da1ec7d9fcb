// The arguments of the kernels for index keys. An indexer scores the index keys of a sequence,
// and attention reads only the keys and values of the tokens with the highest scores.
// Index keys are rows of a latent layer of the KV cache (a layer with keys only).
#pragma once
#include "kernels/table/attention.h"

namespace cpuserve {

// Rotates the first `rotary` columns of tokens [m0, m1) of x, in place, and stores their rows in
// `layer`. Columns i and i + rotary / 2 are rotated as a pair.
struct StoreIndexArgs {
  Rows x;  // f32 [T, layer.head_dim]
  KvLayer layer;
  int32_t rotary;    // 0 = none
  const float* cos;  // the row of a token is its position
  const float* sin;
  const int32_t* positions;  // [T]
  const int32_t* slots;      // [T]
  int64_t m0, m1;
};

// Computes the scores of index keys [begin, end) for one token:
//   scores[key - begin] = sum over heads h, in ascending order, of weights[h] * max(0, q_h . key)
// If `pool` is more than 1, a key belongs to `pool` tokens, and the row of each of these tokens
// in `layer` has a part of it. Floats after the last score, up to a multiple of kChunk, may change.
struct ScoreIndexArgs {
  Rows q;                // f32 [T, heads * width], or wider
  const float* weights;  // [heads] of the token; nullptr: all are 1
  KvLayer layer;
  const int32_t* block_table;
  int64_t token;
  int32_t heads, width, pool;  // width: the columns of a key, a multiple of 16
  int64_t begin, end;          // begin is a multiple of kChunk
  float* scores;
  void* scratch;  // score_index_scratch() bytes
};
// Returns the bytes of scratch that score_index needs: for the queries of a token, the scores
// of a tile, and the keys of an attention chunk in fp32.
inline size_t score_index_scratch(int32_t heads, int32_t width, int32_t pool) {
  const size_t keys = pool > 1 ? kChunk : 0, tile = 16 * kChunk + 64;
  const size_t columns = static_cast<size_t>(width);
  return ((static_cast<size_t>(heads) + keys) * columns + tile) * sizeof(float);
}

// Computes the keys of pools [first, last) of a sequence, and stores them in `to`. A pool is `pool`
// consecutive tokens. The row of a token in `raw` has a key and, if `ape` is given, a gate for each
// column. The key of a pool is the mean of the keys of its tokens. If there are gates, each column
// weights the mean by the softmax of gate + ape. With `norm` the key gets an RMS norm. Then it is
// rotated by the angle of the pool's first token. The row of token i gets part i of its columns.
struct PoolIndexArgs {
  KvLayer raw, to;
  const int32_t* block_table;
  int32_t pool, width;  // width: the columns of a key, a multiple of 16
  const float* ape;     // [pool][width] or nullptr
  const float* norm;    // [width] or nullptr
  float eps;
  int32_t rotary;    // 0 = none
  const float* cos;  // the row of a token is its position
  const float* sin;
  int64_t first, last;
  void* scratch;  // pool_index_scratch() bytes
};
inline size_t pool_index_scratch(int32_t raw_width, int32_t pool) {
  return static_cast<size_t>(pool + 1) * static_cast<size_t>(raw_width + 16) * sizeof(float);
}

#define CPUSERVE_INDEX_KERNELS(X)       \
  X(store_index, const StoreIndexArgs&) \
  X(pool_index, const PoolIndexArgs&)   \
  X(score_index, const ScoreIndexArgs&)

}  // namespace cpuserve
