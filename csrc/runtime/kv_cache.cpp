#include "runtime/kv_cache.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "base/check.h"

namespace cpuserve {

// Returns whether the blocks of a slab may be interleaved (first order in kv_cache.h). They do not
// overlap if layer i of every group has the shape of layer i in the group with the most layers.
static bool groups_alike(const std::vector<CacheLayer>& layers, int32_t groups) {
  std::vector<std::vector<CacheLayer>> of(static_cast<size_t>(groups));
  for (const CacheLayer& s : layers) of[static_cast<size_t>(s.group)].push_back(s);
  const auto shorter = [](const auto& a, const auto& b) { return a.size() < b.size(); };
  const auto& most = *std::max_element(of.begin(), of.end(), shorter);
  const auto same = [](const CacheLayer& a, const CacheLayer& b) {
    return a.kv_heads == b.kv_heads && a.hd_pad == b.hd_pad && a.latent == b.latent;
  };
  return std::all_of(of.begin(), of.end(), [&](const auto& group) {
    return std::equal(group.begin(), group.end(), most.begin(), same);
  });
}

KvCache::KvCache(const std::vector<CacheLayer>& layers, int64_t num_blocks, KvType type,
                 const Ranks& ranks)
    : num_blocks_(num_blocks), type_(type) {
  check_argument(num_blocks >= 1 && num_blocks <= INT32_MAX / kBlock, "cannot have ", num_blocks,
                 " KV blocks; 1 to ", INT32_MAX / kBlock, " work");
  int32_t groups = 1;
  for (const CacheLayer& s : layers) groups = std::max(groups, s.group + 1);
  const bool alike = groups_alike(layers, groups);
  const size_t together = alike ? kSlabBlocks : 1;  // number of blocks that are interleaved
  std::vector<size_t> bytes(static_cast<size_t>(groups));
  for (const CacheLayer& s : layers) {
    const KvType own = kv_layer_type(type, s.latent);
    const size_t keys = kv_key_bytes(own, s.hd_pad), head_bytes = s.head_bytes(type);
    const KvLayer head{nullptr,
                       0,
                       alike ? keys : 0,
                       together * head_bytes,
                       s.latent ? 0 : together * keys,
                       alike ? head_bytes - keys : 0,
                       s.kv_heads,
                       s.head_dim,
                       s.hd_pad,
                       own};
    heads_.emplace_back(static_cast<size_t>(s.kv_heads), head);
    groups_.push_back(s.group);
    bytes[static_cast<size_t>(s.group)] += head_bytes * static_cast<size_t>(s.kv_heads);
  }
  block_bytes_ = *std::max_element(bytes.begin(), bytes.end());
  for (int rank = 0; rank < ranks.count(); rank++) place_rank(ranks, rank, groups);
  has_memory_.resize(static_cast<size_t>(round_up(num_blocks, kSlabBlocks) / kSlabBlocks));
  wanted_.reserve(has_memory_.size());
}

KvCache::KvCache(const std::vector<CacheLayer>& layers, const KvCache& owner,
                 const std::vector<Id>& of)
    : num_blocks_(owner.num_blocks_),
      type_(owner.type_),
      rank_bytes_(owner.arenas_.size()),
      committed_(owner.arenas_.size()),
      first_bare_(owner.arenas_.size()),
      pages_(owner.arenas_.size()),
      has_memory_(owner.has_memory_.size(), true) {
  check_argument(of.size() == layers.size(), of.size(), " shared KV layers for ", layers.size(),
                 " of the program");
  for (size_t i = 0; i < layers.size(); i++) {
    const CacheLayer& s = layers[i];
    check_argument(of[i] >= 0 && static_cast<size_t>(of[i]) < owner.heads_.size(),
                   "there is no KV layer ", of[i], "; there are ", owner.heads_.size());
    const std::vector<KvLayer>& heads = owner.heads_[static_cast<size_t>(of[i])];
    const KvLayer& head = heads.front();
    check_argument(head.kv_heads == s.kv_heads && head.head_dim == s.head_dim &&
                       (head.value_offset == 0) == s.latent,
                   "KV layer ", of[i], " has ", head.kv_heads, " heads of ", head.head_dim,
                   ", and the program needs ", s.kv_heads, " of ", s.head_dim);
    heads_.push_back(heads);
    groups_.push_back(s.group);
  }
  arenas_.resize(owner.arenas_.size());
}

// Places the KV heads of a rank in a new arena. The layers of a slab follow one another,
// so all keys and values of a token are close together, and the number of pages
// in use depends on tokens, not on layers. (With a region for each of 24 layers,
// the first 32 tokens used 24 pages of 2 MB, which took 4 % of the time of a 1,024-token prompt.)
// Inside a layer the blocks of a head follow one another, so attention reads runs of 32 KB
// (at head_dim 64), which is a third faster than reading runs of 4 KB that are 64 KB apart.
void KvCache::place_rank(const Ranks& ranks, int rank, int32_t groups) {
  const auto each_head = [&](int32_t group, const auto& use) {
    for (size_t l = 0; l < heads_.size(); l++) {
      if (groups_[l] != group) continue;
      const auto count = static_cast<int64_t>(heads_[l].size());
      for (int64_t h = 0; h < count; h++) {
        if (ranks.owner_of_middle(h, count) == rank) use(heads_[l][static_cast<size_t>(h)], h);
      }
    }
  };
  const auto bytes = [](const KvLayer& head) {
    return kv_key_bytes(head.type, head.hd_pad) +
           (head.value_offset ? kv_value_bytes(head.type, head.hd_pad) : 0);
  };
  size_t block = 0;
  for (int32_t g = 0; g < groups; g++) {
    size_t own = 0;
    each_head(g, [&](const KvLayer& head, int64_t) { own += bytes(head); });
    block = std::max(block, own);
  }
  rank_bytes_.push_back(block);
  arenas_.emplace_back(slab_bytes(static_cast<size_t>(rank), num_blocks_));
  committed_.emplace_back(arenas_.back().size() / Buffer::kPage);
  first_bare_.push_back(0);
  pages_.emplace_back().reserve(committed_.back().size());  // list_pages() must not allocate
  for (int32_t g = 0; g < groups; g++) {
    auto at = reinterpret_cast<uintptr_t>(arenas_.back().data());
    each_head(g, [&](KvLayer& head, int64_t h) {
      // `base` is where head 0 of the layer would be in this arena,
      // because kernels number the heads of a layer from 0 on every rank.
      head.base = reinterpret_cast<uint8_t*>(at - static_cast<uintptr_t>(h) * head.head_stride);
      head.slab_stride = kSlabBlocks * block;
      if (head.block_stride == 0) head.block_stride = head.value_stride = block;
      at += head.head_stride;
    });
  }
}

size_t KvCache::slab_bytes(size_t rank, int64_t blocks) const {
  return static_cast<size_t>(round_up(blocks, kSlabBlocks)) * rank_bytes_[rank];
}

size_t KvCache::committed() const {
  size_t pages = 0;
  for (const std::vector<bool>& rank : committed_) {
    pages += static_cast<size_t>(std::count(rank.begin(), rank.end(), true));
  }
  return pages * Buffer::kPage;
}

void KvCache::use(Team& team) {
  if (wanted_.empty()) return;
  for (const size_t slab : wanted_) {
    const auto block = static_cast<int64_t>(slab) * kSlabBlocks;
    for (size_t r = 0; r < arenas_.size(); r++) {
      list_pages(r, slab_bytes(r, block), slab_bytes(r, block + 1), SIZE_MAX);
    }
  }
  wanted_.clear();
  commit_listed(team);
}

bool KvCache::grow(Team& team, int64_t ahead) {
  bool left = false;
  for (size_t r = 0; r < arenas_.size(); r++) {
    const size_t threads = team.ranks().threads_of(static_cast<int>(r)).size();
    left |= list_pages(r, 0, slab_bytes(r, std::min(used_ + ahead, num_blocks_)), threads);
  }
  commit_listed(team);
  return left;
}

// Adds to pages_[rank] the pages of bytes [begin, end) that have no memory, at most `most` pages.
// Returns true if more of these pages have no memory.
bool KvCache::list_pages(size_t rank, size_t begin, size_t end, size_t most) {
  constexpr size_t kPage = Buffer::kPage;
  size_t& first = first_bare_[rank];
  while (first < committed_[rank].size() && committed_[rank][first]) first++;
  for (size_t page = std::max(begin / kPage, first); page < (end + kPage - 1) / kPage; page++) {
    if (committed_[rank][page]) continue;
    if (pages_[rank].size() == most) return true;
    pages_[rank].push_back(page);
    committed_[rank][page] = true;
  }
  return false;
}

// Allocates memory for the pages in pages_. Each page is touched by one thread of its rank:
// if two threads touched a new page at the same time, the kernel would clear two pages.
void KvCache::commit_listed(Team& team) {
  constexpr size_t kPage = Buffer::kPage;
  const auto some = [](const std::vector<size_t>& pages) { return !pages.empty(); };
  if (std::none_of(pages_.begin(), pages_.end(), some)) return;
  team.run_on_all([&](int thread, int) noexcept {
    const RankThreads peers = team.rank_threads(thread);
    const auto r = static_cast<size_t>(peers.rank);
    for (auto i = static_cast<size_t>(thread - peers.first); i < pages_[r].size();
         i += static_cast<size_t>(peers.size)) {
      arenas_[r].commit(pages_[r][i] * kPage, (pages_[r][i] + 1) * kPage);
    }
  });
  for (std::vector<size_t>& pages : pages_) pages.clear();
}

// Calls copy(address, bytes) for the keys and for the values of every head in `block`,
// in the order of layers and heads, which is the same for any number of ranks.
template <class Copy>
void KvCache::each_half(int64_t block, int32_t group, const Copy& copy) const {
  for (size_t l = 0; l < heads_.size(); l++) {
    if (groups_[l] != group) continue;
    for (size_t h = 0; h < heads_[l].size(); h++) {
      const KvLayer& head = heads_[l][h];
      const int at = static_cast<int>(h);
      copy(kv_block(head, block, at), kv_key_bytes(head.type, head.hd_pad));
      if (!head.value_offset) continue;
      copy(kv_values(head, block, at), kv_value_bytes(head.type, head.hd_pad));
    }
  }
}

void KvCache::read_block(int64_t block, int32_t group, uint8_t* to) const {
  uint8_t* const end = to + block_bytes_;
  each_half(block, group, [&](const uint8_t* half, size_t bytes) {
    std::memcpy(to, half, bytes);
    to += bytes;
  });
  std::memset(to, 0, static_cast<size_t>(end - to));
}

void KvCache::write_block(int64_t block, int32_t group, const uint8_t* from) {
  each_half(block, group, [&](uint8_t* half, size_t bytes) {
    std::memcpy(half, from, bytes);
    from += bytes;
  });
}

}  // namespace cpuserve
