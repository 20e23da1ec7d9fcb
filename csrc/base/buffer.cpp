#include "base/buffer.h"

#include <sys/mman.h>

#if defined(__linux__)
#include <sys/syscall.h>
#endif
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <utility>

#include "base/check.h"

#ifndef MAP_NORESERVE
#define MAP_NORESERVE 0
#endif
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // Linux 5.14; older kernels return EINVAL
#endif

namespace cpuserve {
namespace {
constexpr size_t kHuge = Buffer::kPage;
size_t round_to_huge(size_t bytes) { return (bytes + kHuge - 1) / kHuge * kHuge; }
}  // namespace

// Reserves 2 MB more than needed, so that the buffer can begin at a multiple of 2 MB.
// The unused bytes around the buffer stay inaccessible: accesses beyond its ends then fault,
// and the kernel never merges this mapping with another one, which residency() relies on.
void Buffer::reserve(size_t bytes) {
  size_ = round_to_huge(bytes);
  void* raw =
      mmap(nullptr, size_ + kHuge, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (raw == MAP_FAILED) {
    fail_system("cannot reserve ", size_ >> 20, " MB of memory: ", std::strerror(errno),
                ". Lower the KV cache size, or raise the address-space limit (ulimit -v).");
  }
  mapping_ = static_cast<uint8_t*>(raw);
  data_ = reinterpret_cast<uint8_t*>(round_to_huge(reinterpret_cast<uintptr_t>(raw)));
}

Buffer::Buffer(size_t bytes) {
  if (bytes == 0) return;
  reserve(bytes);
  if (mprotect(data_, size_, PROT_READ | PROT_WRITE) != 0) {
    const int error = errno;
    release();
    fail_system("cannot map ", bytes >> 20, " MB of memory: ", std::strerror(error));
  }
#ifdef MADV_HUGEPAGE
  madvise(data_, size_, MADV_HUGEPAGE);  // only a hint: without huge pages access is slower
#endif
}

Buffer::Buffer(size_t bytes, int fd, size_t offset, bool writable) {
  if (bytes == 0) return;
  reserve(bytes);
  const int access = writable ? PROT_READ | PROT_WRITE : PROT_READ;
  if (mmap(data_, size_, access, MAP_SHARED | MAP_FIXED, fd, static_cast<off_t>(offset)) ==
      MAP_FAILED) {
    const int error = errno;
    release();
    fail_system("cannot map a file of ", bytes >> 20, " MB: ", std::strerror(error));
  }
}

Buffer::~Buffer() { release(); }

Buffer::Buffer(Buffer&& other) noexcept
    : mapping_(std::exchange(other.mapping_, nullptr)),
      data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)) {}

Buffer& Buffer::operator=(Buffer&& other) noexcept {
  std::swap(mapping_, other.mapping_);
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

void Buffer::release() noexcept {
  if (mapping_) munmap(mapping_, size_ + kHuge);
  mapping_ = data_ = nullptr;
  size_ = 0;
}

void Buffer::commit(size_t begin, size_t end) noexcept {
  constexpr size_t kSmall = 4096;
  begin = begin / kSmall * kSmall;
  end = std::min((end + kSmall - 1) / kSmall * kSmall, size_);
  if (begin >= end || madvise(data_ + begin, end - begin, MADV_POPULATE_WRITE) == 0) return;
  for (size_t at = begin; at < end; at += kSmall) {
    volatile uint8_t* byte = data_ + at;
    *byte = *byte;
  }
}

void Buffer::protect() noexcept {
  if (data_) mprotect(data_, size_, PROT_READ);
}

void Buffer::will_need(const uint8_t* begin, size_t bytes) noexcept {
  // One call of madvise reads at most the read-ahead size of the disk,
  // and Linux ignores the rest of the range.
  // The read-ahead size is 128 KB or more unless an administrator has reduced it.
  constexpr size_t kMost = 128 << 10;
  static const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));  // 64 KB on some Arm
  const uintptr_t end = reinterpret_cast<uintptr_t>(begin) + bytes;
  for (uintptr_t at = reinterpret_cast<uintptr_t>(begin) / page * page; at < end; at += kMost) {
    madvise(reinterpret_cast<void*>(at), std::min<size_t>(kMost, end - at), MADV_WILLNEED);
  }
}

// The policy is not MPOL_BIND: with MPOL_BIND the kernel kills the process when the node is full,
// but with MPOL_PREFERRED and MPOL_INTERLEAVE it takes memory of another node.
int Buffer::prefer_node(int node) noexcept {
  constexpr int kPreferred = 1;
  return set_policy(kPreferred, &node, 1);
}

int Buffer::interleave(const std::vector<int>& nodes) noexcept {
  constexpr int kInterleave = 3;
  return set_policy(kInterleave, nodes.data(), nodes.size());
}

#if defined(__linux__)
int Buffer::set_policy(int policy, const int* nodes, size_t count) noexcept {
  constexpr size_t kNodes = 1024, kBits = 8 * sizeof(unsigned long);
  std::array<unsigned long, kNodes / kBits> mask{};
  for (size_t i = 0; i < count; i++) {
    if (nodes[i] < 0 || static_cast<size_t>(nodes[i]) >= kNodes) return EINVAL;
    const auto node = static_cast<size_t>(nodes[i]);
    mask[node / kBits] |= 1ul << (node % kBits);
  }
  if (!data_) return 0;
  // The argument maxnode is kNodes + 1, because the kernel reads maxnode - 1 bits of the mask.
  const long failed = syscall(SYS_mbind, data_, size_, policy, mask.data(), kNodes + 1, 0u);
  return failed ? errno : 0;
}
#else
int Buffer::set_policy(int, const int*, size_t) noexcept { return ENOSYS; }
#endif

ResidencyOfProcess residency_of_process() {
  ResidencyOfProcess out;
  std::ifstream smaps("/proc/self/smaps");
  std::string line;
  Residency* mapping = nullptr;
  while (std::getline(smaps, line)) {
    unsigned long low = 0, high = 0;
    long kb = 0;
    if (std::sscanf(line.c_str(), "%lx-%lx ", &low, &high) == 2) {
      mapping = &out[low];
    } else if (mapping && std::sscanf(line.c_str(), "Rss: %ld kB", &kb) == 1) {
      mapping->resident = int64_t{kb} << 10;
    } else if (mapping && std::sscanf(line.c_str(), "AnonHugePages: %ld kB", &kb) == 1) {
      mapping->huge = int64_t{kb} << 10;
    }
  }
  return out;
}

Residency Buffer::residency(const ResidencyOfProcess& process) const {
  Residency out;
  const auto base = reinterpret_cast<uintptr_t>(data_);
  const auto end = process.lower_bound(base + size_);
  for (auto mapping = process.lower_bound(base); mapping != end; ++mapping) {
    out.resident += mapping->second.resident;
    out.huge += mapping->second.huge;
  }
  return out;
}

// Reads numa_maps, because containers that refuse the system call move_pages still have this file.
// A line is "7f8a00000000 prefer:1 anon=512 N0=12 N1=500 kernelpagesize_kB=4": 12 pages of 4 KB
// of the mapping at this address are on NUMA node 0, and 500 pages are on node 1.
PagesOfProcess pages_of_process() {
  PagesOfProcess out;
  std::ifstream maps("/proc/self/numa_maps");
  std::string line;
  while (std::getline(maps, line)) {
    std::istringstream words(line);
    uintptr_t start = 0;
    words >> std::hex >> start;
    std::map<int, int64_t> pages;
    int64_t page_kb = 4;
    for (std::string word; words >> word;) {
      int node = 0;
      long count = 0;
      if (std::sscanf(word.c_str(), "N%d=%ld", &node, &count) == 2) pages[node] = count;
      if (std::sscanf(word.c_str(), "kernelpagesize_kB=%ld", &count) == 1) page_kb = count;
    }
    for (const auto& [node, count] : pages) out[start][node] = (count * page_kb) << 10;
  }
  return out;
}

std::map<int, int64_t> Buffer::nodes(const PagesOfProcess& pages) const {
  std::map<int, int64_t> out;
  const auto base = reinterpret_cast<uintptr_t>(data_);
  const auto end = pages.lower_bound(base + size_);
  for (auto mapping = pages.lower_bound(base); mapping != end; ++mapping) {
    for (const auto& [node, bytes] : mapping->second) out[node] += bytes;
  }
  return out;
}

}  // namespace cpuserve
