// The layout of the KV cache, and the arguments of attention.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include "kernels/table/rows.h"
#include "kernels/table/work_sizes.h"

namespace cpuserve {

constexpr int kBlock = 32;   // tokens of one KV block
constexpr int kChunk = 256;  // keys of one attention chunk (absolute position)

// KV cache geometry of one layer. Element type `KvType`; head_dim is padded to 16 (hd_pad).
// One head in one block, K or V:
//   bf16          K [hd_pad/2][kBlock][2]   V [kBlock/2][hd_pad][2]
//   f16, f32      K [hd_pad][kBlock]        V [kBlock][hd_pad]
//   int8, e4m3, e5m2   as f16 but of bytes; after them fp32 [kBlock]: the factor of
//                      the codes of a token (e4m3 codes widen to 1/256 of their value)
enum class KvType : int32_t { bf16 = 0, f16 = 1, f32 = 2, int8 = 3, e4m3 = 4, e5m2 = 5, count };
inline bool kv_scaled(KvType t) { return t >= KvType::int8; }
// Whether rope_store mixes the dimensions of q and k: k is multiplied by the Hadamard matrix H of n
// rows, where n is the largest power of two that divides head_dim, block by block, and q by H / n.
// Scores do not change.
inline bool kv_mixed(KvType t) { return t == KvType::int8; }
inline size_t kv_elem_bytes(KvType t) { return t == KvType::f32 ? 4 : kv_scaled(t) ? 1 : 2; }

// K or V of one head in one block.
inline size_t kv_half_bytes(KvType t, int32_t hd_pad) {
  return static_cast<size_t>(hd_pad) * kBlock * kv_elem_bytes(t) +
         (kv_scaled(t) ? kBlock * sizeof(float) : 0);
}

// The blocks of a slab are stored head by head, keys before values: the data that attention reads
// for one head is contiguous as long as the blocks of a sequence are consecutive.
constexpr int kSlabBlocks = 8;

struct KvLayer {
  uint8_t* base;        // this layer's first block
  size_t slab_stride;   // bytes from a slab of kSlabBlocks blocks to the next
  size_t block_stride;  // bytes from block b to b + 1 of a slab
  size_t head_stride;   // bytes from kv head h to h + 1 of a slab
  size_t value_offset;  // bytes from K to V of a head in a block; 0: the keys are the values
  int32_t kv_heads, head_dim, hd_pad;
  KvType type;
};

// K of one head in one block.
inline uint8_t* kv_block(const KvLayer& kv, int64_t block, int head) {
  return kv.base + static_cast<size_t>(block / kSlabBlocks) * kv.slab_stride +
         static_cast<size_t>(block % kSlabBlocks) * kv.block_stride +
         static_cast<size_t>(head) * kv.head_stride;
}

// Rotary embedding with "neox" pairing: dims i and i + rotary/2 are rotated together. cos/sin
// tables [max_position][rotary/2] fp32 (the scaling of Llama 3, YaRN and linear is in the table).
struct RopeStoreArgs {
  Rows qkv;  // f32 [T, (q_heads + 2 kv_heads) * head_dim]; q, k, v in this order
  Rows q;  // f32 [T, q_heads * hd_pad]: rotated (and mixed) q, zero padded; may be bf16 when kv is
           // bf16 or scaled
  KvLayer kv;
  int32_t q_heads;
  int32_t rotary;    // 0 = no rotation
  const float* cos;  // row = position
  const float* sin;
  const float* q_norm;  // [head_dim] rms norm per head before rotation, or nullptr
  const float* k_norm;
  float eps;
  const int32_t* positions;  // [T]
  const int32_t* slots;      // [T] block * kBlock + offset of each token's KV slot
  int64_t m0, m1;            // tokens
  // The location of each KV head, [kv_heads], for a layer that is divided among ranks; nullptr: all
  // are in `kv`.
  const KvLayer* pieces = nullptr;
};

// Compressed rows (MLA): the row of a token is key and value of the layer's only KV head. It
// consists of the first `rank` columns of kv, normalized, and its other `rotary` columns, rotated.
// A query consists of `rank` columns of `latent` and the last `rotary` columns of a head of q,
// rotated. Eight-bit rows are not mixed (kv_mixed).
struct LatentStoreArgs {
  Rows q;       // f32 [T, q_heads * (nope + rotary)]
  Rows latent;  // f32 [T, q_heads * rank]
  Rows kv;      // f32 [T, rank + rotary]
  Rows out;     // queries, as `q` of RopeStoreArgs
  KvLayer layer;
  int32_t q_heads, nope, rank, rotary;
  const float* cos;  // row = position
  const float* sin;
  const float* norm;  // [rank]
  float eps;
  bool
      interleaved;  // neighbouring columns are rotated as a pair, else columns i and i + rotary / 2
  const int32_t* positions;  // [T]
  const int32_t* slots;      // [T]
  int64_t m0, m1;            // tokens
};

// One unit of attention: rows (token, head of the group) of one KV head against chunks [chunk0,
// chunk1).
// Row r of the unit is token `t0 + r / group`, head `kv_head * group + r % group`.
struct AttentionArgs {
  Rows q;  // as written by rope_store
  KvLayer kv;
  int32_t kv_head, group;      // group = q_heads / kv_heads
  int64_t row0, rows;          // rows of the unit, row 0 = first row of token t0
  int64_t t0;                  // step token index of the sequence's first query token
  int32_t pos0;                // absolute position of token t0
  const int32_t* block_table;  // of the sequence
  int32_t chunk0, chunk1;      // chunks to visit (absolute position / kChunk)
  int32_t window;              // a row sees keys less than this far from it, 0 = any
  float scale, softcap;        // softcap 0 = none
  const float* slopes;         // [q_heads] ALiBi slopes or nullptr
  const float* sinks;          // [q_heads] attention sinks (logit) or nullptr
  // Result: if `partial` is null the chunks are merged here and rows go to `out` (format of the
  // o_proj's input). Else one partial per chunk: partial[(r * chunks + c - chunk0)] =
  // { m, l, 14 unused, o[hd_pad] } floats, and attention_merge finishes.
  Rows out;        // [T, q_heads * head_dim]; q8g32 only where head_dim % 32 == 0
  float* partial;  // slot of row 0, chunk0
  void* scratch;   // kAttentionScratch bytes
  // Number of chunks from one row of `partial` to the next, if several units share the chunks of
  // one sequence; 0 = chunk1 - chunk0.
  int64_t partial_stride;
  int32_t heads = 1;  // KV heads [kv_head, kv_head + heads) one after another; 1 with `partial`
  // Bytes of the scratch that rows may fill (WorkSizes::attention_bytes).
  int32_t scratch_bytes = kAttentionScratch / 2;
  // Where the keys are the values: memory for a chunk of values (kv_chunk_bytes), aligned to 64.
  void* values = nullptr;
  // 0: causal, a row sees keys up to its own. Else the keys of the sequence: a row sees those after
  // its own as well (encoders).
  int32_t keys = 0;
};
constexpr int kMaxHeadDim = 576;  // padded
struct AttentionKernel {
  void (*attend)(const AttentionArgs&) noexcept;
  // Heads wider than this (padded) take the kernel of the level below.
  int32_t widest_head = kMaxHeadDim;
  void (*attend_wider)(const AttentionArgs&) noexcept = nullptr;

  // The function for heads of this width (padded).
  auto for_head(int32_t hd_pad) const noexcept {
    return hd_pad > widest_head ? attend_wider : attend;
  }
  void operator()(const AttentionArgs& a) const noexcept { for_head(a.kv.hd_pad)(a); }
};
// K or V of one head in the blocks of a chunk.
inline size_t kv_chunk_bytes(KvType t, int32_t hd_pad) {
  return kv_half_bytes(t, hd_pad) * (kChunk / kBlock);
}

struct AttentionMergeArgs {
  const float* partial;  // [rows][chunks][16 + hd_pad]
  int64_t rows, chunks;
  int32_t kv_head, group, head_dim, hd_pad;
  int64_t row0, t0;
  const float* sinks;
  Rows out;
  void* scratch;
};

}  // namespace cpuserve
