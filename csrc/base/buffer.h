// Memory with one owner: address space is reserved at once, pages come with the first touch, so the
// thread that touches a page decides the node it lies on.
#pragma once
#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

namespace cpuserve {

// Start of every mapping of this process -> bytes by NUMA node. Reading it walks all page tables.
using PagesOfProcess = std::map<uintptr_t, std::map<int, int64_t>>;
PagesOfProcess pages_of_process();

class Buffer {
 public:
  static constexpr size_t kPage = size_t{2} << 20;  // one huge page, if the system gives them

  Buffer() = default;
  // Zeroed memory, aligned to 2 MB and advised to be backed by huge pages from 2 MB up. Reserving
  // commits nothing. Throws std::runtime_error when the address space is refused.
  explicit Buffer(size_t bytes);
  ~Buffer();
  Buffer(Buffer&& other) noexcept;
  Buffer& operator=(Buffer&& other) noexcept;

  uint8_t* data() const { return data_; }
  size_t size() const { return size_; }

  // Backs pages [begin, end), offsets in bytes rounded outward to whole pages, by memory of the
  // calling thread's node; contents stay. Nobody else may be writing there.
  void commit(size_t begin, size_t end) noexcept;

  // Asks for pages that are still to be touched on memory of `node`, elsewhere when that is full.
  // 0, or the errno of a system that does not allow it (a container's default) or know it.
  int prefer_node(int node) noexcept;

  // The same with one page after another from each of `nodes` in turn.
  int interleave(const std::vector<int>& nodes) noexcept;

  // Bytes of this range that are resident, and of those in transparent huge pages (Linux; else 0).
  struct Residency {
    int64_t resident = 0, huge = 0;
  };
  Residency residency() const;

  // Bytes of this range by the NUMA node they are on, where the kernel tells.
  std::map<int, int64_t> nodes(const PagesOfProcess& pages) const;

 private:
  int set_policy(int policy, const int* nodes, size_t count) noexcept;
  void release() noexcept;
  uint8_t* mapping_ = nullptr;
  uint8_t* data_ = nullptr;
  size_t size_ = 0;
};

// Hands out 64-byte aligned pieces of a Buffer in order; sizes are added up first, then taken.
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
