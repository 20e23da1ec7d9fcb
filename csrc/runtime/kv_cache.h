// The paged KV cache. The memory of each rank (its arena) has the order
//   [slab][layer][head of the rank] { K, V } [block of the slab]
// A slab is 8 blocks, and a block has the keys and values of 32 tokens in all layers of one group.
// Any block can belong to any cache group, because the first layer of every group is at offset 0.
// A block is therefore as large as the largest group needs. If layers of groups differ in shape,
// blocks of one slab that belong to different groups would overlap. The order is then
//   [slab][block of the slab][layer][head of the rank] { K, V }
// A latent layer (MLA) has only K.
//
// The address space is reserved once, and the address of a block never changes.
// Memory is allocated slab by slab:
// between steps for blocks that the next step could use, otherwise when a step needs a block.
#pragma once
#include <vector>

#include "base/buffer.h"
#include "parallel/team.h"
#include "runtime/declarations.h"

namespace cpuserve {

class KvCache {
 public:
  KvCache(const std::vector<CacheLayer>& layers, int64_t num_blocks, KvType type,
          const Ranks& ranks = 1);
  // A view of some layers of `owner`, which must live longer: layer i is its layer `of[i]`.
  // The view has no memory of its own, and nothing may be written through it.
  // Throws std::invalid_argument if a layer does not exist, or has another shape.
  KvCache(const std::vector<CacheLayer>& layers, const KvCache& owner, const std::vector<Id>& of);

  // Returns the location of each KV head of a layer, [kv_heads]. Heads in the memory of one rank
  // have equal entries.
  const KvLayer* heads(Id layer) const { return heads_[static_cast<size_t>(layer)].data(); }
  int32_t group(Id layer) const { return groups_[static_cast<size_t>(layer)]; }
  int64_t num_blocks() const { return num_blocks_; }
  KvType type() const { return type_; }
  // Returns the arena of each rank, which is empty for a rank without KV heads.
  std::vector<Buffer>& arenas() { return arenas_; }
  const std::vector<Buffer>& arenas() const { return arenas_; }

  // want() records a block that the next step will write. use() runs before the step,
  // on all threads, and allocates memory for the recorded blocks. Blocks with lower numbers
  // that were not recorded get no memory yet: prompts that still wait may use such blocks later.
  void want(int64_t block) {
    const auto slab = static_cast<size_t>(block / kSlabBlocks);
    if (!has_memory_[slab]) wanted_.push_back(slab);
    has_memory_[slab] = true;
    used_ = block < used_ ? used_ : block + 1;
  }
  void use(Team& team);
  // Allocates a few MB of memory for the `ahead` blocks after the highest block used so far.
  // Returns true if some of these blocks still have no memory.
  bool grow(Team& team, int64_t ahead);
  // Returns how many bytes of the cache have memory.
  size_t committed() const;

  // Copies the contents of `block`, which belongs to `group`, to or from block_bytes() bytes,
  // layer by layer. If the group uses less than a block, the other bytes are zeros.
  // Two caches can exchange these bytes if their layers and element types are equal:
  // the bytes depend neither on the number of the block nor on the number of ranks.
  size_t block_bytes() const { return block_bytes_; }
  void read_block(int64_t block, int32_t group, uint8_t* to) const;
  void write_block(int64_t block, int32_t group, const uint8_t* from);

 private:
  void place_rank(const Ranks& ranks, int rank, int32_t groups);
  size_t slab_bytes(size_t rank, int64_t blocks) const;  // bytes of the slabs of `blocks` blocks
  bool list_pages(size_t rank, size_t begin, size_t end, size_t most);
  void commit_listed(Team& team);

  template <class Copy>
  void each_half(int64_t block, int32_t group, const Copy& copy) const;

  int64_t num_blocks_, used_ = 0;
  size_t block_bytes_ = 0;
  KvType type_;
  std::vector<int32_t> groups_;               // by layer: its cache group
  std::vector<Buffer> arenas_;                // by rank: its memory
  std::vector<size_t> rank_bytes_;            // by rank: bytes of its part of a block
  std::vector<std::vector<bool>> committed_;  // [rank][2 MB page]: whether the page has memory
  std::vector<size_t> first_bare_;            // by rank: the first page that may be without memory
  std::vector<std::vector<size_t>> pages_;    // by rank: pages that get memory next
  std::vector<bool> has_memory_;              // by slab: whether want() recorded one of its blocks
  std::vector<size_t> wanted_;                // slabs that get memory before the next step
  std::vector<std::vector<KvLayer>> heads_;   // [layer][head]
};

}  // namespace cpuserve
