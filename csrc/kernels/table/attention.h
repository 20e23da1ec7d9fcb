// The layout of the KV cache, and the arguments of attention.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include "kernels/table/rows.h"
#include "kernels/table/work_sizes.h"

namespace cpuserve {

constexpr int kBlock = 32;   // tokens of one KV block
constexpr int kChunk = 256;  // keys of one attention chunk; chunk c has positions from 256 c on

// The element type of the KV cache, and the layout of K and V of one head in one block.
// hd_pad is head_dim rounded up to 16.
//   bf16          K [hd_pad/2][kBlock][2]   V [kBlock/2][hd_pad][2]
//   f16, f32      K [hd_pad][kBlock]        V [kBlock][hd_pad]
//   int8, e4m3    like f16, but with elements of 1 byte, followed by fp32 scale[kBlock]
//                 with a scale for each token (e4m3 codes are read as 1/256 of their value,
//                 so their scales are 256 times larger)
//   int8_v4       K like int8         V [kBlock][hd_pad/32 rounded up][16], a byte for columns c
//   (its
//                 low 4 bits) and c + 16 of 32: codes of 16 levels, followed by fp32 scale[kBlock]
enum class KvType : int32_t { bf16 = 0, f16 = 1, f32 = 2, int8 = 3, e4m3 = 4, int8_v4 = 5, count };
inline bool kv_scaled(KvType t) { return t >= KvType::int8; }
// Returns whether rope_store mixes the dimensions of q and k, so that int8 codes lose less
// precision. It multiplies every n dimensions of k by the Hadamard matrix H of n rows, and of q
// by H / n, where n is the largest power of two that divides head_dim. Scores do not change.
inline bool kv_mixed(KvType t) { return t == KvType::int8 || t == KvType::int8_v4; }
// Returns whether rope_store also multiplies values by H. Attention then multiplies
// the output of each head by H / n, after all chunks are merged.
inline bool kv_mixes_values(KvType t) { return t == KvType::int8_v4; }
// Returns the type of a layer in a cache of type `t`; rows of latent layers are keys and values.
inline KvType kv_layer_type(KvType t, bool latent) {
  return latent && t == KvType::int8_v4 ? KvType::int8 : t;
}
// Returns the bytes of an element of K.
inline size_t kv_elem_bytes(KvType t) { return t == KvType::f32 ? 4 : kv_scaled(t) ? 1 : 2; }

// Returns the bytes of K of one head in one block.
inline size_t kv_key_bytes(KvType t, int32_t hd_pad) {
  return static_cast<size_t>(hd_pad) * kBlock * kv_elem_bytes(t) +
         (kv_scaled(t) ? kBlock * sizeof(float) : 0);
}
// Returns the bytes of the elements of one value (of half a pair of values, if K and V have pairs).
inline size_t kv_value_row_bytes(KvType t, int32_t hd_pad) {
  const auto columns = static_cast<size_t>(hd_pad);
  return t == KvType::int8_v4 ? (columns + 31) / 32 * 16 : columns * kv_elem_bytes(t);
}
// Returns the bytes of V of one head in one block.
inline size_t kv_value_bytes(KvType t, int32_t hd_pad) {
  return t == KvType::int8_v4 ? kBlock * (kv_value_row_bytes(t, hd_pad) + sizeof(float))
                              : kv_key_bytes(t, hd_pad);
}

// The number of KV blocks of a slab.
// A slab is stored head by head: for each head, K of all blocks and then V of all blocks.
// If the blocks of a sequence are consecutive, attention reads contiguous memory for a head.
constexpr int kSlabBlocks = 8;

// The addresses of the keys and values of one layer in the KV cache.
struct KvLayer {
  uint8_t* base;        // K of head 0 in block 0
  size_t slab_stride;   // bytes from a slab of kSlabBlocks blocks to the next
  size_t block_stride;  // bytes from K of block b to K of block b + 1 of the same slab
  size_t head_stride;   // bytes from KV head h to KV head h + 1
  // Bytes from K to V of a head in the first block of a slab; 0: keys are also the values (MLA).
  size_t value_offset;
  size_t value_stride;  // bytes from V of block b to V of block b + 1 of the same slab
  int32_t kv_heads, head_dim, hd_pad;
  KvType type;
};

// Returns the address of K of one head in one block.
inline uint8_t* kv_block(const KvLayer& kv, int64_t block, int head) {
  return kv.base + static_cast<size_t>(block / kSlabBlocks) * kv.slab_stride +
         static_cast<size_t>(block % kSlabBlocks) * kv.block_stride +
         static_cast<size_t>(head) * kv.head_stride;
}

// Returns the address of V of one head in one block; the keys are not the values (value_offset).
inline uint8_t* kv_values(const KvLayer& kv, int64_t block, int head) {
  return kv.base + static_cast<size_t>(block / kSlabBlocks) * kv.slab_stride +
         static_cast<size_t>(block % kSlabBlocks) * kv.value_stride +
         static_cast<size_t>(head) * kv.head_stride + kv.value_offset;
}

// Rotates q and k (rotary embedding) and stores k and v in the KV cache.
// Dimensions i and i + rotary/2 of a head form a pair ("neox" style). cos and sin are fp32 tables
// [max_position][rotary/2], which already contain any scaling (Llama 3, YaRN, linear).
struct RopeStoreArgs {
  Rows qkv;  // f32 [T, (q_heads + 2 kv_heads) * head_dim]; q, k, v in this order
  Rows q;    // output [T, q_heads * hd_pad]: rotated (and mixed) q, heads padded with zeros;
             // f32, or bf16 if the KV cache is bf16 or has scales (kv_scaled)
  KvLayer kv;
  int32_t q_heads;
  int32_t rotary;    // dimensions to rotate; 0 = none
  const float* cos;  // the row of a token is its position
  const float* sin;
  const float* q_norm;  // [head_dim] weights of the RMS norm before rotation; nullptr: no norm
  const float* k_norm;
  float eps;
  const int32_t* positions;  // [T]
  const int32_t* slots;      // [T] the KV slot of each token: block * kBlock + offset in the block
  int64_t m0, m1;            // tokens [m0, m1) are processed
  // [kv_heads] the location of each KV head, if a layer is divided among ranks;
  // nullptr: all heads are in `kv`.
  const KvLayer* pieces = nullptr;
};

// Stores the compressed rows of latent attention (MLA). The row of a token is both key and value
// of the only KV head of the layer. The row consists of the first `rank` columns of kv, normalized
// (RMS norm), and the other `rotary` columns of kv, rotated. The query of a head consists
// of `rank` columns of `latent` and the last `rotary` columns of the head in q, rotated.
// Unlike rope_store, this kernel does not mix rows before it rounds them to int8 (see kv_mixed).
struct LatentStoreArgs {
  Rows q;       // f32 [T, q_heads * (nope + rotary)]
  Rows latent;  // f32 [T, q_heads * rank]
  Rows kv;      // f32 [T, rank + rotary]
  Rows out;     // output: the rotated queries, in the format of RopeStoreArgs::q
  KvLayer layer;
  int32_t q_heads, nope, rank, rotary;
  const float* cos;  // the row of a token is its position
  const float* sin;
  const float* norm;  // [rank]
  float eps;
  bool interleaved;  // pairs to rotate: columns 2 i and 2 i + 1, or else i and i + rotary / 2
  const int32_t* positions;  // [T]
  const int32_t* slots;      // [T]
  int64_t m0, m1;            // tokens [m0, m1) are processed
};

#define CPUSERVE_STORE_KERNELS(X)     \
  X(rope_store, const RopeStoreArgs&) \
  X(latent_store, const LatentStoreArgs&)

// One attention unit: some rows of one sequence attend, in KV heads [kv_head, kv_head + heads),
// to chunks [chunk0, chunk1) of the keys of this sequence.
// Row r of a sequence is token `t0 + r / group` and query head `kv_head * group + r % group`.
struct AttentionArgs {
  Rows q;  // queries, as rope_store or latent_store writes them
  KvLayer kv;
  int32_t kv_head, group;      // group = q_heads / kv_heads, the query heads of a KV head
  int64_t row0, rows;          // the unit has rows [row0, row0 + rows); row 0 belongs to token t0
  int64_t t0;                  // index of the sequence's first token in the tokens of the step
  int32_t pos0;                // absolute position of token t0
  const int32_t* block_table;  // the KV blocks of the sequence
  int32_t chunk0, chunk1;      // range of chunks; the chunk of a key is its position / kChunk
  int32_t window;              // a row sees keys fewer than `window` positions away; 0: all keys
  float scale, softcap;        // if softcap is 0, scores are not capped
  const float* slopes;         // [q_heads] ALiBi slopes or nullptr
  const float* sinks;          // [q_heads] attention sinks (logit) or nullptr
  // The result. If `partial` is null, the unit merges its chunks and writes rows of `out` in the
  // input format of the output projection. Otherwise it writes a partial result per row and chunk:
  // the floats { m, l, 14 unused, o[hd_pad] }; generic/attention.h explains m, l and o.
  // The partial result of row row0 + r and chunk c has the index r * partial_stride + c - chunk0.
  // The kernel attention_merge computes `out` from the partial results.
  Rows out;        // the output [T, q_heads * head_dim]; q8g32 only where head_dim % 32 == 0
  float* partial;  // the partial result of the first row and chunk0
  void* scratch;   // kAttentionScratch bytes
  // The number of partial results from one row to the next in `partial`, if several units
  // compute different chunks of the same rows. 0: the unit has all chunks, so chunk1 - chunk0.
  int64_t partial_stride;
  int32_t heads = 1;  // computes KV heads [kv_head, kv_head + heads); 1 if `partial` is set
  // Bytes of scratch that vector kernels use: they stay in L2 (WorkSizes::attention_bytes).
  int32_t scratch_bytes = kAttentionScratch / 2;
  bool near_keys = true;  // whether decode prefetches keys and values to L1 (WorkSizes::near_keys)
  // Only for MLA, where the keys are also the values: memory for the values of a chunk
  // in the layout of V (kv_chunk_bytes() bytes, aligned to 64 bytes).
  void* values = nullptr;
  // 0: attention is causal, and a row sees the keys up to its own position. In encoders: the number
  // of keys of the sequence; a row then sees keys after its own position as well.
  int32_t keys = 0;
};
constexpr int kMaxHeadDim = 576;  // the largest hd_pad
struct AttentionKernel {
  void (*attend)(const AttentionArgs&) noexcept;
  // Heads with a larger hd_pad use attend_wider, the kernel of the ISA level below.
  int32_t widest_head = kMaxHeadDim;
  void (*attend_wider)(const AttentionArgs&) noexcept = nullptr;

  // Returns the function that computes heads of `hd_pad` columns.
  auto for_head(int32_t hd_pad) const noexcept {
    return hd_pad > widest_head ? attend_wider : attend;
  }
  void operator()(const AttentionArgs& a) const noexcept { for_head(a.kv.hd_pad)(a); }
};
// Returns the bytes of V of one head in one chunk.
inline size_t kv_chunk_bytes(KvType t, int32_t hd_pad) {
  return kv_value_bytes(t, hd_pad) * (kChunk / kBlock);
}

struct AttentionMergeArgs {
  const float* partial;  // partial results [rows][chunks][16 + hd_pad]
  int64_t rows, chunks;
  int32_t kv_head, group, head_dim, hd_pad;
  int64_t row0, t0;
  const float* sinks;
  Rows out;
  void* scratch;
  bool mixed_values = false;  // kv_mixes_values() of the KV cache
};

}  // namespace cpuserve
