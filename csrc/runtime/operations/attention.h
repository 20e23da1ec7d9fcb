// Attention, and the operations that prepare its queries, keys and values.
#pragma once
#include "kernels/generic/relative_attention.h"
#include "runtime/operations/operation.h"

namespace cpuserve {

// Rotates q and k of the value qkv, after norms if q_norm and k_norm are set.
// Stores k and v in the KV cache of `layer`,
// and writes the rotated queries to the value q [T, q_heads * round_up(head_dim, 16)].
struct RopeStoreOp {
  static constexpr const char* kName = "rope_store_kv";
  Id qkv, q, layer;
  int32_t q_heads, rotary;
  Id cos, sin, q_norm, k_norm;
  float eps;
  bool stores = true;  // false: an earlier op stored keys and values; qkv has only queries
  // The axis of each of the rotary / 2 frequencies: in a step with angles, the place of a token
  // on this axis (StepInput::angles) is the row of cos and sin. Empty: it is always the position.
  std::vector<int32_t> axes = {};
  int32_t axial = kNone;  // the index of the rope in Program::axial_ropes()
  CPUSERVE_FIELDS_WITH_DEFAULTS(2, qkv, q, layer, q_heads, rotary, cos, sin, q_norm, k_norm, eps,
                                stores, axes)
};
void prepare(RopeStoreOp& op, Declarations& p);
void run(const RopeStoreOp& op, Worker& w) noexcept;
inline Accesses accesses(const RopeStoreOp& op, const Declarations&) {
  return {{own(op.qkv)}, {own(op.q), own(op.qkv), any(kCache)}};
}

struct AttentionOp {
  static constexpr const char* kName = "attention";
  Id q, out, layer;
  int32_t q_heads;
  float scale;
  int32_t window;
  float softcap;
  Id slopes, sinks;
  bool causal = true;
  // The output of SelectKeysOp: the positions of the keys that each row reads. A row that sees
  // no more keys than this value has columns reads all of them.
  Id selection = kNone;
  // Whether neighbouring tokens with rows of the media buffer, which are a picture, see each other
  // in both directions; other tokens see no later token.
  bool spans = false;
  // The window of a row begins at the last multiple of `window`, which is a multiple of kChunk.
  bool sections = false;
  CPUSERVE_FIELDS_WITH_DEFAULTS(4, q, out, layer, q_heads, scale, window, softcap, slopes, sinks,
                                causal, selection, spans, sections)
};
void prepare(const AttentionOp& op, const Declarations& p);
void run(const AttentionOp& op, Worker& w) noexcept;
// Returns the bytes of scratch: the scratch of the kernel, then the values of a chunk in a latent
// layer, then copies of selected keys and values.
size_t attention_scratch(const AttentionOp& op, const Declarations& p, KvType type);
inline Accesses accesses(const AttentionOp& op, const Declarations&) {
  return claimed(with({any(op.q), any(kCache)}, op.selection != kNone, any(op.selection)),
                 {any(op.out)});
}

// Multiplies the first `width` columns of each row of x by factors[position of the row's token],
// where `factors` is a vector.
struct ScaleQueriesOp {
  static constexpr const char* kName = "scale_queries";
  Id x, factors;
  int64_t width;
  CPUSERVE_FIELDS(x, factors, width)
};
void prepare(const ScaleQueriesOp& op, Declarations& p);
void run(const ScaleQueriesOp& op, Worker& w) noexcept;
inline Accesses accesses(const ScaleQueriesOp& op, const Declarations&) {
  return changes({}, op.x);
}

// Rotates the first `rotary` dimensions of the first `heads` heads of each row of x.
// Models with norms after the rotation use this operation: their RopeStoreOp rotates nothing.
// If `paired`, rotates the last `rotary` dimensions of each head, where neighbours are a pair.
struct RotateOp {
  static constexpr const char* kName = "rotate";
  Id x;
  int32_t heads, head_dim, rotary;
  Id cos, sin;
  bool paired = false;
  CPUSERVE_FIELDS_WITH_DEFAULTS(1, x, heads, head_dim, rotary, cos, sin, paired)
};
void prepare(const RotateOp& op, Declarations& p);
void run(const RotateOp& op, Worker& w) noexcept;
inline Accesses accesses(const RotateOp& op, const Declarations&) { return changes({}, op.x); }

// Reorders the columns of each row.
// A row of x has the query and the gate of head 0, the query and the gate of head 1 and so on,
// and then other columns. A row of out has all queries, the other columns, and all gates.
struct SplitGatesOp {
  static constexpr const char* kName = "split_gates";
  Id x, out;
  int32_t heads, head_dim;
  CPUSERVE_FIELDS(x, out, heads, head_dim)
};
void prepare(const SplitGatesOp& op, const Declarations& p);
void run(const SplitGatesOp& op, Worker& w) noexcept;
inline Accesses accesses(const SplitGatesOp& op, const Declarations&) {
  return {{own(op.x)}, {own(op.out)}};
}

// Copies the first `begin` columns of x, and then `heads` heads of `from_width` columns, which have
// `to_width` columns in out: the last ones are left out, or zeros are added.
struct ResizeHeadsOp {
  static constexpr const char* kName = "resize_heads";
  Id x, out;
  int32_t begin, heads, from_width, to_width;
  CPUSERVE_FIELDS(x, out, begin, heads, from_width, to_width)
};
void prepare(const ResizeHeadsOp& op, const Declarations& p);
void run(const ResizeHeadsOp& op, Worker& w) noexcept;
inline Accesses accesses(const ResizeHeadsOp& op, const Declarations&) {
  return {{own(op.x)}, {own(op.out)}};
}

// Attention of whole sequences, where all tokens see each other and a score depends on the distance
// of the tokens: relative_attention() in kernels/generic/relative_attention.h has the formula.
// qkv [T, 3 * heads * width] has the queries, then the keys, then the values; nothing is cached.
// key_table, query_table: vectors [heads][width][rows] or kNone. bias_table: [heads][rows] or
// kNone. places: the row of each distance, from a key most - 1 tokens before the query to one as
// far after it, where `most` positions are the longest sequence.
struct RelativeAttentionOp {
  static constexpr const char* kName = "relative_attention";
  Id qkv, out;
  int32_t heads;
  float scale;
  Id key_table, query_table, bias_table, places;
  int32_t width = 0;           // columns of a head
  int64_t rows = 0, most = 0;  // rows of a table; positions
  CPUSERVE_FIELDS(qkv, out, heads, scale, key_table, query_table, bias_table, places)
};
void prepare(RelativeAttentionOp& op, Declarations& p);
void run(const RelativeAttentionOp& op, Worker& w) noexcept;
inline size_t scratch_bytes(const RelativeAttentionOp& op) {
  return relative_attention_scratch(op.most, op.width);
}
inline Accesses accesses(const RelativeAttentionOp& op, const Declarations&) {
  return claimed({any(op.qkv)}, {any(op.out)});
}

// Checks the cos and sin tables [positions][rotary / 2], and limits the positions of later steps
// to less than `positions`. Throws std::invalid_argument
// if a table does not consist of whole rows.
void check_rope(Declarations& p, const char* op, int32_t rotary, Id cos, Id sin);

using AttentionOps = Family<RopeStoreOp, AttentionOp, ScaleQueriesOp, RotateOp, SplitGatesOp,
                            ResizeHeadsOp, RelativeAttentionOp>;

}  // namespace cpuserve
