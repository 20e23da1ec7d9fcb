// The operations of compressed attention: entries of pools of tokens, and attention to them.
#pragma once
#include "kernels/table.h"
#include "runtime/operations/operation.h"

namespace cpuserve {

// Stores in layer `to` the entries of the pools that end with a token of the step
// (PoolEntriesArgs). `raw` is the first of the layers with keys and gates: with `overlap` the
// layers of keys for the next pool, of keys, of gates for the next pool and of gates, else the
// layers of keys and of gates. x is the value that the last of these layers stores.
struct PoolEntriesOp {
  static constexpr const char* kName = "pool_entries";
  Id x, raw, to;
  int32_t width, pool;
  bool overlap;
  Id ape, norm;
  float eps;
  int32_t rotary;
  Id cos, sin;
  CPUSERVE_FIELDS(x, raw, to, width, pool, overlap, ape, norm, eps, rotary, cos, sin)
  int32_t series() const { return overlap ? 2 : 1; }
};
void prepare(const PoolEntriesOp& op, Declarations& p);
void run(const PoolEntriesOp& op, Worker& w) noexcept;
inline size_t scratch_bytes(const PoolEntriesOp& op) { return pool_entries_scratch(op.width); }
inline Accesses accesses(const PoolEntriesOp& op, const Declarations&) {
  return {{own(op.x), any(kIndexCache)}, {own(op.x), any(kIndexCache)}};
}

// out = the attention of q to entries in layer `entries` and then to the rows of the last `window`
// tokens in layer `layer`, with one softmax. Keys are also the values. Without `entries` there are
// only the rows. `selection` is the output of SelectKeysOp with the same pools: the entries that
// a token reads. Without it, a token reads the entries of all pools that end before or with it.
struct EntryAttentionOp {
  static constexpr const char* kName = "entry_attention";
  Id q, out, layer;
  int32_t q_heads, window;
  float scale;
  Id sinks, entries, selection;
  int32_t pool;
  CPUSERVE_FIELDS(q, out, layer, q_heads, window, scale, sinks, entries, selection, pool)
};
void prepare(const EntryAttentionOp& op, const Declarations& p);
void run(const EntryAttentionOp& op, Worker& w) noexcept;
// Returns the bytes of scratch: the scratch of the kernel, the values of a chunk, and then copies
// of all rows that a token reads.
size_t entry_scratch(const EntryAttentionOp& op, const Declarations& p, KvType type);
inline Accesses accesses(const EntryAttentionOp& op, const Declarations&) {
  AccessList reads = with({any(op.q)}, op.selection != kNone, any(op.selection));
  reads.push_back(any(kIndexCache));
  return claimed(reads, {any(op.out)});
}

using EntryOps = Family<PoolEntriesOp, EntryAttentionOp>;

}  // namespace cpuserve
