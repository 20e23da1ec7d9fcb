#include "runtime/kv_cache.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "base/check.h"

namespace cpuserve {

KvCache::KvCache(const std::vector<KvShape>& layers, int64_t num_blocks, KvType type,
                 const Ranks& ranks)
    : num_blocks_(num_blocks), type_(type) {
  check_argument(num_blocks >= 1 && num_blocks <= INT32_MAX / kBlock, "cannot have ", num_blocks,
                 " KV blocks; 1 to ", INT32_MAX / kBlock, " work");
  for (const KvShape& s : layers) {
    const size_t half = kv_half_bytes(type, s.hd_pad);
    const KvLayer head{
        nullptr,    0,        half, 2 * kSlabBlocks * half, kSlabBlocks * half, s.kv_heads,
        s.head_dim, s.hd_pad, type};
    heads_.emplace_back(static_cast<size_t>(s.kv_heads), head);
    block_bytes_ += 2 * half * static_cast<size_t>(s.kv_heads);
  }
  for (int rank = 0; rank < ranks.count(); rank++) place_rank(ranks, rank);
}

// A slab's layers lie one after another: what a request has stored is close together, so first
// touches and huge pages follow the tokens in use, not the number of layers (24 layers in regions
// of their own cost 24 pages of 2 MB for the first 32 tokens; measured: 4 % of a 1,024-token
// prompt). Inside, a head's blocks follow each other: attention reads runs of 32 KB at head_dim
// 64, which are a third faster than runs of 4 KB in every 64 KB.
void KvCache::place_rank(const Ranks& ranks, int rank) {
  const auto each_head = [&](const auto& use) {
    for (std::vector<KvLayer>& layer : heads_) {
      const auto count = static_cast<int64_t>(layer.size());
      for (int64_t h = 0; h < count; h++) {
        if (ranks.owner_of_middle(h, count) == rank) use(layer[static_cast<size_t>(h)], h);
      }
    }
  };
  size_t block = 0;
  each_head([&](const KvLayer& head, int64_t) { block += head.head_stride / kSlabBlocks; });
  rank_bytes_.push_back(block);
  committed_.push_back(0);
  arenas_.emplace_back(slab_bytes(static_cast<size_t>(rank), num_blocks_));
  auto at = reinterpret_cast<uintptr_t>(arenas_.back().data());
  each_head([&](KvLayer& head, int64_t h) {
    // Where head 0 would lie: kernels count heads from the layer's first.
    head.base = reinterpret_cast<uint8_t*>(at - static_cast<uintptr_t>(h) * head.head_stride);
    head.slab_stride = kSlabBlocks * block;
    at += head.head_stride;
  });
}

size_t KvCache::slab_bytes(size_t rank, int64_t blocks) const {
  return static_cast<size_t>(round_up(blocks, kSlabBlocks)) * rank_bytes_[rank];
}

size_t KvCache::committed() const {
  return std::accumulate(committed_.begin(), committed_.end(), size_t{0});
}

void KvCache::use(Team& team, int64_t blocks) {
  if (blocks <= used_) return;
  used_ = blocks;
  commit(team, blocks, SIZE_MAX);
}

bool KvCache::grow(Team& team, int64_t ahead) {
  return commit(team, std::min(used_ + ahead, num_blocks_), 1);
}

// Gives memory to the first `blocks`, in whole huge pages that the threads of a rank take in turn
// (two that fault on one page would both clear it), but to no more pages a thread than said; true
// when that leaves some out.
bool KvCache::commit(Team& team, int64_t blocks, size_t pages_a_thread) {
  constexpr size_t kPage = Buffer::kPage;
  const auto pages = [](size_t bytes) { return (bytes + kPage - 1) / kPage; };
  bool needed = false, left = false;
  for (size_t r = 0; r < arenas_.size(); r++) {
    needed |= pages(slab_bytes(r, blocks)) > committed_[r] / kPage;
  }
  if (!needed) return false;
  // Pages of rank r to get now, from committed_[r] on. A thread that sits out is no reason for its
  // rank to get fewer: crews are known inside only.
  const auto count = [&](size_t r) {
    const size_t wanted = pages(slab_bytes(r, blocks)), have = committed_[r] / kPage;
    const auto threads = static_cast<size_t>(team.ranks().threads_of(static_cast<int>(r)).size());
    const size_t most = pages_a_thread > wanted ? wanted : pages_a_thread * threads;
    return wanted > have ? std::min(wanted - have, most) : 0;
  };
  team.dispatch([&](int thread, int) noexcept {
    const Crew crew = team.crew(thread);
    const auto r = static_cast<size_t>(crew.rank);
    const size_t first = committed_[r] / kPage, last = first + count(r);
    for (size_t p = first + static_cast<size_t>(thread - crew.first); p < last;
         p += static_cast<size_t>(crew.size)) {
      arenas_[r].commit(p * kPage, (p + 1) * kPage);
    }
  });
  for (size_t r = 0; r < arenas_.size(); r++) {
    committed_[r] += kPage * count(r);
    left |= pages(slab_bytes(r, blocks)) > committed_[r] / kPage;
  }
  return left;
}

// Calls copy(keys or values in the cache, bytes) for every half of `block`: layer by layer, head by
// head, whatever the ranks.
template <class Copy>
static void each_half(const std::vector<std::vector<KvLayer>>& heads, int64_t block,
                      const Copy& copy) {
  for (const std::vector<KvLayer>& layer : heads) {
    for (size_t h = 0; h < layer.size(); h++) {
      const size_t half = kv_half_bytes(layer[h].type, layer[h].hd_pad);
      uint8_t* keys = kv_block(layer[h], block, static_cast<int>(h));
      copy(keys, half);
      copy(keys + layer[h].value_offset, half);
    }
  }
}

void KvCache::read_block(int64_t block, uint8_t* to) const {
  each_half(heads_, block, [&](const uint8_t* half, size_t bytes) {
    std::memcpy(to, half, bytes);
    to += bytes;
  });
}

void KvCache::write_block(int64_t block, const uint8_t* from) {
  each_half(heads_, block, [&](uint8_t* half, size_t bytes) {
    std::memcpy(half, from, bytes);
    from += bytes;
  });
}

}  // namespace cpuserve
