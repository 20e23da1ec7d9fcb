// A pointer and a length (std::span is C++20).
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace cpuserve {

template <class T>
class Span {
 public:
  Span() = default;
  Span(T* data, int64_t size) : data_(data), size_(size) {}
  template <class U>
  Span(std::vector<U>& v) : data_(v.data()), size_(static_cast<int64_t>(v.size())) {}
  template <class U>
  Span(const std::vector<U>& v) : data_(v.data()), size_(static_cast<int64_t>(v.size())) {}

  T* data() const { return data_; }
  int64_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  T& operator[](int64_t i) const { return data_[i]; }
  T* begin() const { return data_; }
  T* end() const { return data_ + size_; }

 private:
  T* data_ = nullptr;
  int64_t size_ = 0;
};

}  // namespace cpuserve
