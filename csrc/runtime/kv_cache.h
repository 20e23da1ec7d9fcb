// The paged KV cache: [slab][layer][head] { K, V } [block of the slab], address space reserved
// once; a block's address never changes. Memory comes as blocks are used, low numbers first: while
// nothing runs, for what the next step could take, else when a step needs it.
#pragma once
#include <vector>

#include "base/buffer.h"
#include "parallel/team.h"
#include "runtime/program.h"

namespace cpuserve {

class KvCache {
 public:
  KvCache(const std::vector<KvShape>& layers, int64_t num_blocks, KvType type);

  const KvLayer& layer(Id id) const { return layers_[static_cast<size_t>(id)]; }
  int64_t num_blocks() const { return num_blocks_; }
  KvType type() const { return type_; }
  const Buffer& arena() const { return arena_; }

  // Between steps, on all threads. `use` gives memory to blocks [0, blocks); `grow` to a few MB of
  // the `ahead` blocks after them, and says whether it left some out.
  void use(Team& team, int64_t blocks);
  bool grow(Team& team, int64_t ahead);
  // Bytes from the first block on that have been given memory.
  size_t committed() const { return committed_; }

  // What `block` holds, as bytes, layer after layer. Only caches of equal layers and type
  // understand each other's; nothing in it depends on the block's number.
  size_t block_bytes() const { return block_bytes_; }
  void read_block(int64_t block, uint8_t* to) const;
  void write_block(int64_t block, const uint8_t* from);

 private:
  size_t slab_bytes(int64_t blocks) const;  // of the slabs that hold the first `blocks`
  void commit(Team& team, size_t end);

  int64_t num_blocks_, used_ = 0;
  size_t committed_ = 0;
  size_t block_bytes_ = 0;
  KvType type_;
  Buffer arena_;
  std::vector<KvLayer> layers_;
};

}  // namespace cpuserve
