#include "runtime/kv_cache.h"

#include <algorithm>
#include <cstring>

#include "base/check.h"

namespace cpuserve {

KvCache::KvCache(const std::vector<KvShape>& layers, int64_t num_blocks, KvType type)
    : num_blocks_(num_blocks), type_(type) {
  check_argument(num_blocks >= 1 && num_blocks <= INT32_MAX / kBlock, "cannot have ", num_blocks,
                 " KV blocks; 1 to ", INT32_MAX / kBlock, " work");
  // A block's layers lie one after another: what a request has stored is contiguous, so first
  // touches and huge pages follow the tokens in use, not the number of layers (24 layers in regions
  // of their own cost 24 pages of 2 MB for the first 32 tokens; measured: 4 % of a 1,024-token
  // prompt).
  for (const KvShape& s : layers) {
    const size_t half_head = static_cast<size_t>(s.hd_pad) * kBlock * kv_elem_bytes(type);
    layers_.push_back({nullptr, 0, 2 * half_head, s.kv_heads, s.head_dim, s.hd_pad, type});
    block_bytes_ += 2 * half_head * static_cast<size_t>(s.kv_heads);
  }
  arena_ = Buffer(block_bytes_ * static_cast<size_t>(num_blocks));
  uint8_t* base = arena_.data();
  for (KvLayer& layer : layers_) {
    layer.base = base;
    layer.block_stride = block_bytes_;
    base += layer.head_stride * static_cast<size_t>(layer.kv_heads);
  }
}

void KvCache::use(Team& team, int64_t blocks) {
  if (blocks <= used_) return;
  used_ = blocks;
  commit(team, static_cast<size_t>(blocks) * block_bytes_);
}

bool KvCache::grow(Team& team, int64_t ahead) {
  const size_t wanted = static_cast<size_t>(std::min(used_ + ahead, num_blocks_)) * block_bytes_;
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

void KvCache::read_block(int64_t block, uint8_t* to) const {
  std::memcpy(to, arena_.data() + static_cast<size_t>(block) * block_bytes_, block_bytes_);
}

void KvCache::write_block(int64_t block, const uint8_t* from) {
  std::memcpy(arena_.data() + static_cast<size_t>(block) * block_bytes_, from, block_bytes_);
}

}  // namespace cpuserve
