// Sums over the columns of a row.
#pragma once
#include <cstdint>

namespace cpuserve {

// Returns the sum of f(i) over i < n. The order of the additions depends only on n:
// there are 16 partial sums, which the compiler keeps in vectors.
template <class F>
float sum_of(int64_t n, const F& f) noexcept {
  constexpr int kSums = 16;
  float sums[kSums] = {};
  int64_t i = 0;
  for (; i + kSums <= n; i += kSums) {
    for (int j = 0; j < kSums; j++) sums[j] += f(i + j);
  }
  for (int j = 0; i < n; i++, j++) sums[j] += f(i);
  float sum = 0.0f;
  for (const float s : sums) sum += s;
  return sum;
}

// Returns the mean of f(x[i]) over i < n.
template <class F>
float mean_of(const float* x, int64_t n, const F& f) noexcept {
  return sum_of(n, [&](int64_t i) { return f(x[i]); }) / static_cast<float>(n);
}

inline float square(float x) noexcept { return x * x; }

}  // namespace cpuserve
