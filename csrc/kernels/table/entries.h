// The arguments of the kernels for entries. An entry is a row of the KV cache for a pool of tokens,
// which later tokens read instead of the rows of these tokens (compressed attention of DeepSeek
// V4). Entries are in a latent layer of the KV cache (a layer with keys only), in equal parts: each
// of the last min(pool, kBlock) tokens of a pool stores one part. So an entry is in one KV block.
#pragma once
#include "kernels/table/attention.h"

namespace cpuserve {

// Returns the number of tokens that store a part of an entry.
constexpr int32_t entry_parts(int32_t pool) { return pool < kBlock ? pool : kBlock; }

// Computes entries [first, last) of a sequence and stores them in `to`. A pool is `pool` tokens.
// Each token has a key and a gate of `width` columns in keys[1] and gates[1]. If `overlap` is set,
// it has another key and gate in keys[0] and gates[0], which belong to the next pool. An entry is
// the mean of all keys of its pool; each column weights it by the softmax of gate + ape.
// It gets an RMS norm, and its last `rotary` columns are rotated by the angle of the pool's first
// token, each two neighbours as a pair.
struct PoolEntriesArgs {
  KvLayer keys[2], gates[2], to;
  const int32_t *block_table, *to_table;  // of the layers of keys and gates, and of `to`
  int32_t pool, width;                    // width: a multiple of 16
  bool overlap;
  const float* ape;   // [pool][width], or with overlap [pool][2][width]
  const float* norm;  // [width]
  float eps;
  int32_t rotary;    // 0 = none
  const float* cos;  // the row of a token is its position
  const float* sin;
  int64_t first, last;
  void* scratch;  // pool_entries_scratch() bytes
};
inline size_t pool_entries_scratch(int32_t width) {
  return 5 * static_cast<size_t>(width) * sizeof(float);
}

// Copies n rows of a sequence, which are in equal parts like entries, to the layer `to`, where they
// are the whole rows of tokens from `at` on. Block b of `to` has the number b. Row i is entry
// chosen[i * pool] / pool, or without `chosen` entry first + i. If `pool` is 1, a row is the row
// of a token.
struct GatherEntriesArgs {
  KvLayer from, to;
  const int32_t* block_table;
  int32_t pool;
  const float* chosen;
  int64_t first, n, at;
};

#define CPUSERVE_ENTRY_KERNELS(X)         \
  X(pool_entries, const PoolEntriesArgs&) \
  X(gather_entries, const GatherEntriesArgs&)

}  // namespace cpuserve
