// The paged KV cache: for each rank [slab][layer][head of the rank] { K, V } [block of the slab].
// A block holds the layers of one group, whichever: all groups place their layers at the beginning
// of a block, so any block can serve any of them, and a block is as large as the largest group
// needs. Where the layers of groups differ in shape, the blocks of a slab would overlap in this
// order, and the order is [slab][block of the slab][layer][head of the rank] { K, V } instead.
// A latent layer has only K.
//
// Its address space is reserved once, and the address of a block never changes. Memory is allocated
// slab by slab: between steps for blocks that the next step could use, otherwise when a step needs
// it.
#pragma once
#include <vector>

#include "base/buffer.h"
#include "parallel/team.h"
#include "runtime/program.h"

namespace cpuserve {

class KvCache {
 public:
  KvCache(const std::vector<CacheLayer>& layers, int64_t num_blocks, KvType type,
          const Ranks& ranks = 1);

  // The location of each KV head of a layer, [kv_heads]. The heads of one rank have equal entries.
  const KvLayer* heads(Id layer) const { return heads_[static_cast<size_t>(layer)].data(); }
  int32_t group(Id layer) const { return groups_[static_cast<size_t>(layer)]; }
  int64_t num_blocks() const { return num_blocks_; }
  KvType type() const { return type_; }
  // By rank. The arena of a rank without heads is empty.
  std::vector<Buffer>& arenas() { return arenas_; }
  const std::vector<Buffer>& arenas() const { return arenas_; }

  // `want` notes a block that is about to be written. `use`, between steps and on all threads,
  // allocates memory for all noted blocks. It does not allocate memory for the blocks below them: a
  // running request may own a block above those that waiting prompts will use.
  void want(int64_t block) {
    const auto slab = static_cast<size_t>(block / kSlabBlocks);
    if (!has_memory_[slab]) wanted_.push_back(slab);
    has_memory_[slab] = true;
    used_ = block < used_ ? used_ : block + 1;
  }
  void use(Team& team);
  // The same for a few MB of the blocks up to `ahead` above the highest one used so far. Returns
  // whether some of them still have no memory.
  bool grow(Team& team, int64_t ahead);
  // Returns the allocated bytes.
  size_t committed() const;

  // Copies the contents of `block`, which belongs to `group`, layer by layer, and zeros for what
  // the group does not use. Only caches with equal layers and type can exchange these bytes. They
  // do not depend on the number of the block.
  size_t block_bytes() const { return block_bytes_; }
  void read_block(int64_t block, int32_t group, uint8_t* to) const;
  void write_block(int64_t block, int32_t group, const uint8_t* from);

 private:
  void place_rank(const Ranks& ranks, int rank, int32_t groups);
  size_t slab_bytes(size_t rank, int64_t blocks) const;  // of slabs that hold the first `blocks`
  bool list_pages(size_t rank, size_t begin, size_t end, size_t most);
  void commit_listed(Team& team);

  template <class Copy>
  void each_half(int64_t block, int32_t group, const Copy& copy) const;

  int64_t num_blocks_, used_ = 0;
  size_t block_bytes_ = 0;
  KvType type_;
  std::vector<int32_t> groups_;               // by layer
  std::vector<Buffer> arenas_;                // by rank, as the next four
  std::vector<size_t> rank_bytes_;            // of a block, whatever its group
  std::vector<std::vector<bool>> committed_;  // huge pages
  std::vector<size_t> first_bare_;            // at most the first page that has no memory
  std::vector<std::vector<size_t>> pages_;    // pages that get memory next
  std::vector<bool> has_memory_;              // slabs
  std::vector<size_t> wanted_;                // slabs
  std::vector<std::vector<KvLayer>> heads_;   // [layer][head]
};

}  // namespace cpuserve
