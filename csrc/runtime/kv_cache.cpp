#include "runtime/kv_cache.h"

#include "base/check.h"

namespace cpuserve {

KvCache::KvCache(const std::vector<KvShape>& layers, int64_t num_blocks, KvType type)
    : num_blocks_(num_blocks), type_(type) {
  check_argument(num_blocks >= 1 && num_blocks <= INT32_MAX / kBlock, "cannot have ", num_blocks,
                 " KV blocks; 1 to ", INT32_MAX / kBlock, " work");
  size_t bytes = 0;
  for (const KvShape& s : layers) {
    const size_t half_head = static_cast<size_t>(s.hd_pad) * kBlock * kv_elem_bytes(type);
    const size_t block = 2 * half_head * static_cast<size_t>(s.kv_heads);
    layers_.push_back({nullptr, block, 2 * half_head, s.kv_heads, s.head_dim, s.hd_pad, type});
    bytes += block * static_cast<size_t>(num_blocks);
  }
  arena_ = Buffer(bytes);
  uint8_t* base = arena_.data();
  for (KvLayer& layer : layers_) {
    layer.base = base;
    base += layer.block_stride * static_cast<size_t>(num_blocks);
  }
}

}  // namespace cpuserve
