#include "runtime/kv_cache.h"

#include <algorithm>
#include <cstring>

#include "base/check.h"

namespace cpuserve {

KvCache::KvCache(const std::vector<KvShape>& layers, int64_t num_blocks, KvType type)
    : num_blocks_(num_blocks), type_(type) {
  check_argument(num_blocks >= 1 && num_blocks <= INT32_MAX / kBlock, "cannot have ", num_blocks,
                 " KV blocks; 1 to ", INT32_MAX / kBlock, " work");
  // A slab's layers lie one after another: what a request has stored is close together, so first
  // touches and huge pages follow the tokens in use, not the number of layers (24 layers in regions
  // of their own cost 24 pages of 2 MB for the first 32 tokens; measured: 4 % of a 1,024-token
  // prompt). Inside, a head's blocks follow each other: attention reads runs of 32 KB at head_dim
  // 64, which are a third faster than runs of 4 KB in every 64 KB.
  for (const KvShape& s : layers) {
    const size_t half = kv_half_bytes(type, s.hd_pad);
    layers_.push_back({nullptr, 0, half, 2 * kSlabBlocks * half, kSlabBlocks * half, s.kv_heads,
                       s.head_dim, s.hd_pad, type});
    block_bytes_ += 2 * half * static_cast<size_t>(s.kv_heads);
  }
  arena_ = Buffer(slab_bytes(num_blocks));
  uint8_t* base = arena_.data();
  for (KvLayer& layer : layers_) {
    layer.base = base;
    layer.slab_stride = kSlabBlocks * block_bytes_;
    base += layer.head_stride * static_cast<size_t>(layer.kv_heads);
  }
}

size_t KvCache::slab_bytes(int64_t blocks) const {
  return static_cast<size_t>(round_up(blocks, kSlabBlocks)) * block_bytes_;
}

void KvCache::use(Team& team, int64_t blocks) {
  if (blocks <= used_) return;
  used_ = blocks;
  commit(team, slab_bytes(blocks));
}

bool KvCache::grow(Team& team, int64_t ahead) {
  const size_t wanted = slab_bytes(std::min(used_ + ahead, num_blocks_));
  if (wanted <= committed_) return false;
  commit(team, std::min(wanted, committed_ + Buffer::kPage * static_cast<size_t>(team.threads())));
  return wanted > committed_;
}

// Up to `end` bytes, rounded up to whole huge pages, which the threads take in turn: two that fault
// on one page would both clear it.
void KvCache::commit(Team& team, size_t end) {
  constexpr size_t kPage = Buffer::kPage;
  const size_t first = committed_ / kPage, last = (end + kPage - 1) / kPage;
  if (first >= last) return;
  team.dispatch([&](int thread, int threads) noexcept {
    for (size_t p = first + static_cast<size_t>(thread); p < last;
         p += static_cast<size_t>(threads)) {
      arena_.commit(p * kPage, (p + 1) * kPage);
    }
  });
  committed_ = std::min(last * kPage, arena_.size());
}

// Calls copy(keys or values in the cache, bytes) for every half of `block`.
template <class Copy>
static void each_half(const std::vector<KvLayer>& layers, int64_t block, const Copy& copy) {
  for (const KvLayer& layer : layers) {
    const size_t half = kv_half_bytes(layer.type, layer.hd_pad);
    for (int32_t head = 0; head < layer.kv_heads; head++) {
      uint8_t* keys = kv_block(layer, block, head);
      copy(keys, half);
      copy(keys + layer.value_offset, half);
    }
  }
}

void KvCache::read_block(int64_t block, uint8_t* to) const {
  each_half(layers_, block, [&](const uint8_t* half, size_t bytes) {
    std::memcpy(to, half, bytes);
    to += bytes;
  });
}

void KvCache::write_block(int64_t block, const uint8_t* from) {
  each_half(layers_, block, [&](uint8_t* half, size_t bytes) {
    std::memcpy(half, from, bytes);
    from += bytes;
  });
}

}  // namespace cpuserve
