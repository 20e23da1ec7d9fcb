// The operations of indexers, which select the keys that attention reads.
#pragma once
#include "kernels/table.h"
#include "runtime/operations/operation.h"

namespace cpuserve {

// Rotates the first `rotary` dimensions of each row of x, and stores the rows in the latent KV
// layer `layer`. If `interleaved`, dimensions 2 i and 2 i + 1 of x are a pair, and the rows get
// the first dimensions of all pairs, then the second ones.
struct StoreIndexOp {
  static constexpr const char* kName = "store_index_keys";
  Id x, layer;
  int32_t rotary;
  Id cos, sin;
  bool interleaved;
  CPUSERVE_FIELDS(x, layer, rotary, cos, sin, interleaved)
};
void prepare(const StoreIndexOp& op, Declarations& p);
void run(const StoreIndexOp& op, Worker& w) noexcept;
inline Accesses accesses(const StoreIndexOp& op, const Declarations&) {
  return {{own(op.x)}, {own(op.x), any(kIndexCache)}};
}

// Stores in layer `to` the index keys of the pools that end with a token of the step. A pool is
// `pool` tokens. The row of a token in layer `raw` has a key of `width` columns, and with `ape` as
// many gates. The key of a pool is the mean of these keys, weighted by the softmax of gate + ape.
// It is normalized if there is `norm`, and its first `rotary` columns are rotated by the angle
// of the pool's first token. `raw` stores the value x.
struct PoolIndexOp {
  static constexpr const char* kName = "pool_index_keys";
  Id x, raw, to;
  int32_t width, pool;
  Id ape, norm;
  float eps;
  int32_t rotary;
  Id cos, sin;
  CPUSERVE_FIELDS(x, raw, to, width, pool, ape, norm, eps, rotary, cos, sin)
};
void prepare(const PoolIndexOp& op, Declarations& p);
void run(const PoolIndexOp& op, Worker& w) noexcept;
inline size_t scratch_bytes(const PoolIndexOp& op) {
  return pool_index_scratch(2 * op.width, op.pool);
}
inline Accesses accesses(const PoolIndexOp& op, const Declarations&) {
  return {{own(op.x), any(kIndexCache)}, {own(op.x), any(kIndexCache)}};
}

// Writes to each row of out the positions of the keys that attention reads, in ascending order, and
// then -1: the positions of the `keep` index keys with the highest scores, and the positions
// after the last whole pool. A row that sees at most `out.width` keys selects all of them. An index
// key belongs to `pool` tokens. Its score is the sum over heads of weight * max(0, query . key),
// where all weights are 1 without `weights`.
// If index keys have equal scores, the keys at lower positions are selected first.
struct SelectKeysOp {
  static constexpr const char* kName = "select_keys";
  Id q, weights, out, layer;
  int32_t heads, keep, pool;
  int32_t width = 0;  // the elements of an index key; prepare() sets it
  CPUSERVE_FIELDS(q, weights, out, layer, heads, keep, pool)
  int64_t most() const { return (int64_t{keep} + 1) * pool - 1; }  // the width of out
};
void prepare(SelectKeysOp& op, const Declarations& p);
void run(const SelectKeysOp& op, Worker& w) noexcept;
size_t scratch_bytes(const SelectKeysOp& op);
inline Accesses accesses(const SelectKeysOp& op, const Declarations&) {
  AccessList reads = with({any(op.q)}, op.weights != kNone, any(op.weights));
  reads.push_back(any(kIndexCache));
  return claimed(reads, {any(op.out)});
}

using IndexerOps = Family<StoreIndexOp, PoolIndexOp, SelectKeysOp>;

}  // namespace cpuserve
