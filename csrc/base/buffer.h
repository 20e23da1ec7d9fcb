// A buffer: memory with one owner, which is anonymous memory or a mapped part of a file.
// Anonymous memory reserves its address space first; a page is allocated when a thread first
// touches it, on the NUMA node of this thread. The pages of a file are in the page cache:
// the system drops them when memory is short, and reads them again when they are used.
#pragma once
#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

namespace cpuserve {

// A map from the start address of every mapping of this process to its bytes on each NUMA node
// (node -> bytes). pages_of_process() is slow, because the kernel walks all page tables for it.
using PagesOfProcess = std::map<uintptr_t, std::map<int, int64_t>>;
PagesOfProcess pages_of_process();

// The resident bytes of a mapping, and how many of them are in transparent huge pages.
struct Residency {
  int64_t resident = 0, huge = 0;
};
// A map from the start address of every mapping of this process to its resident bytes
// (empty on systems other than Linux). residency_of_process() is slow, like pages_of_process().
using ResidencyOfProcess = std::map<uintptr_t, Residency>;
ResidencyOfProcess residency_of_process();

class Buffer {
 public:
  static constexpr size_t kPage = size_t{2} << 20;  // one huge page, if the system has huge pages

  Buffer() = default;
  // Reserves zeroed memory, aligned to 2 MB and advised to use huge pages.
  // Reserving commits no memory. Throws std::runtime_error if the address space cannot be reserved.
  explicit Buffer(size_t bytes);
  // Maps `bytes` bytes of a file, rounded up to a multiple of 2 MB, from `offset` on,
  // which must be a multiple of 2 MB. The file must contain all these bytes.
  // If `writable`, writes go to the file. Throws std::runtime_error if the file cannot be mapped.
  Buffer(size_t bytes, int fd, size_t offset, bool writable);
  ~Buffer();
  Buffer(Buffer&& other) noexcept;
  Buffer& operator=(Buffer&& other) noexcept;

  uint8_t* data() const { return data_; }
  size_t size() const { return size_; }

  // Allocates the pages of bytes [begin, end), rounded outward to whole pages, on the NUMA node
  // of the calling thread. Contents stay, but no other thread may write to the pages meanwhile.
  void commit(size_t begin, size_t end) noexcept;

  // Makes the buffer read-only.
  void protect() noexcept;

  // Asks the system to read these bytes of a mapped file from disk, and does not wait for them.
  static void will_need(const uint8_t* begin, size_t bytes) noexcept;

  // Places pages that no thread has touched yet on NUMA node `node`,
  // or on another node if it is full. Returns 0, or an errno
  // if the system does not allow this (the default in containers) or does not support it.
  int prefer_node(int node) noexcept;

  // Places pages that no thread has touched yet on the NUMA nodes `nodes` in turn.
  // Returns 0 or an errno, like prefer_node.
  int interleave(const std::vector<int>& nodes) noexcept;

  // Returns the resident bytes of this buffer. `process` is the result of residency_of_process().
  Residency residency(const ResidencyOfProcess& process) const;

  // Returns the bytes of this buffer on each NUMA node (empty if the kernel does not report them).
  std::map<int, int64_t> nodes(const PagesOfProcess& pages) const;

 private:
  void reserve(size_t bytes);
  int set_policy(int policy, const int* nodes, size_t count) noexcept;
  void release() noexcept;
  uint8_t* mapping_ = nullptr;
  uint8_t* data_ = nullptr;
  size_t size_ = 0;
};

// Divides memory into successive arrays, each aligned to 64 bytes. A caller makes a Carver
// with a null base to find the total size of the arrays, and another with memory to place them.
class Carver {
 public:
  explicit Carver(uint8_t* base) : base_(base) {}
  template <class T>
  T* take(int64_t count) {
    T* p = reinterpret_cast<T*>(base_ + used_);
    used_ += (static_cast<size_t>(count) * sizeof(T) + 63) / 64 * 64;
    return p;
  }
  void align(size_t to) { used_ = (used_ + to - 1) / to * to; }
  size_t used() const { return used_; }

 private:
  uint8_t* base_;
  size_t used_ = 0;
};

}  // namespace cpuserve
