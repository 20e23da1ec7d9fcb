// The paged KV cache: by rank [slab][layer][head of the rank] { K, V } [block of the slab], address
// space reserved once; a block's address never changes. Memory comes as blocks are used, low
// numbers first: while nothing runs, for what the next step could take, else when a step needs it.
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

  // Between steps, on all threads. `use` gives memory to blocks [0, blocks); `grow` to a few MB of
  // the `ahead` blocks after them, and says whether it left some out.
  void use(Team& team, int64_t blocks);
  bool grow(Team& team, int64_t ahead);
  // Bytes that have been given memory, in each arena from the first block on.
  size_t committed() const;

  // What `block` holds, as bytes, layer after layer. Only caches of equal layers and type
  // understand each other's; nothing in it depends on the block's number.
  size_t block_bytes() const { return block_bytes_; }
  void read_block(int64_t block, uint8_t* to) const;
  void write_block(int64_t block, const uint8_t* from);

 private:
  void place_rank(const Ranks& ranks, int rank);
  size_t slab_bytes(size_t rank, int64_t blocks) const;  // of slabs that hold the first `blocks`
  bool commit(Team& team, int64_t blocks, size_t pages_a_thread);

  int64_t num_blocks_, used_ = 0;
  size_t block_bytes_ = 0;
  KvType type_;
  std::vector<Buffer> arenas_;               // by rank, as the next two
  std::vector<size_t> rank_bytes_;           // of a block
  std::vector<size_t> committed_;            // bytes from the first on
  std::vector<std::vector<KvLayer>> heads_;  // [layer][head]
};

}  // namespace cpuserve
