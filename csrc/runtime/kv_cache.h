// The paged KV cache: [block][layer][head] { K, V }, address space reserved once, pages committed
// by the first thread that stores into them; a block's address never changes.
#pragma once
#include <vector>

#include "base/buffer.h"
#include "runtime/program.h"

namespace cpuserve {

class KvCache {
 public:
  KvCache(const std::vector<KvShape>& layers, int64_t num_blocks, KvType type);

  const KvLayer& layer(Id id) const { return layers_[static_cast<size_t>(id)]; }
  int64_t num_blocks() const { return num_blocks_; }
  KvType type() const { return type_; }
  const Buffer& arena() const { return arena_; }

  // What `block` holds, as bytes, layer after layer. Only caches of equal layers and type
  // understand each other's; nothing in it depends on the block's number.
  size_t block_bytes() const { return block_bytes_; }
  void read_block(int64_t block, uint8_t* to) const;
  void write_block(int64_t block, const uint8_t* from);

 private:
  int64_t num_blocks_;
  size_t block_bytes_ = 0;
  KvType type_;
  Buffer arena_;
  std::vector<KvLayer> layers_;
};

}  // namespace cpuserve
