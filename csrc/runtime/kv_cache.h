// The paged KV cache: by rank [slab][layer][head of the rank] { K, V } [block of the slab], address
// space reserved once; a block's address never changes. Memory comes with the slabs that are used:
// while nothing runs, for what the next step could take, else when a step needs it.
#pragma once
#include <vector>

#include "base/buffer.h"
#include "parallel/team.h"
#include "runtime/program.h"

namespace cpuserve {

class KvCache {
 public:
  KvCache(const std::vector<KvShape>& layers, int64_t num_blocks, KvType type,
          const Ranks& ranks = 1);

  // Where each KV head of a layer lies, [kv_heads]: equal for the heads of one rank.
  const KvLayer* heads(Id layer) const { return heads_[static_cast<size_t>(layer)].data(); }
  int64_t num_blocks() const { return num_blocks_; }
  KvType type() const { return type_; }
  // By rank; that of a rank without heads is empty.
  std::vector<Buffer>& arenas() { return arenas_; }
  const std::vector<Buffer>& arenas() const { return arenas_; }

  // A block that is about to be written; `use`, between steps and on all threads, gives memory to
  // all of them. Not to the blocks below: a stream may own one above those that wait for a prompt.
  void want(int64_t block) {
    const auto slab = static_cast<size_t>(block / kSlabBlocks);
    if (!has_memory_[slab]) wanted_.push_back(slab);
    has_memory_[slab] = true;
    used_ = block < used_ ? used_ : block + 1;
  }
  void use(Team& team);
  // The same for a few MB of the blocks up to `ahead` above the highest used so far; says whether
  // it left some out.
  bool grow(Team& team, int64_t ahead);
  // Bytes that have been given memory.
  size_t committed() const;

  // What `block` holds, as bytes, layer after layer. Only caches of equal layers and type
  // understand each other's; nothing in it depends on the block's number.
  size_t block_bytes() const { return block_bytes_; }
  void read_block(int64_t block, uint8_t* to) const;
  void write_block(int64_t block, const uint8_t* from);

 private:
  void place_rank(const Ranks& ranks, int rank);
  size_t slab_bytes(size_t rank, int64_t blocks) const;  // of slabs that hold the first `blocks`
  bool list_pages(size_t rank, size_t begin, size_t end, size_t most);
  void commit_listed(Team& team);

  int64_t num_blocks_, used_ = 0;
  size_t block_bytes_ = 0;
  KvType type_;
  std::vector<Buffer> arenas_;                // by rank, as the next three
  std::vector<size_t> rank_bytes_;            // of a block
  std::vector<std::vector<bool>> committed_;  // huge pages
  std::vector<std::vector<size_t>> pages_;    // those to give memory next
  std::vector<bool> has_memory_;              // slabs
  std::vector<size_t> wanted_;                // slabs
  std::vector<std::vector<KvLayer>> heads_;   // [layer][head]
};

}  // namespace cpuserve
