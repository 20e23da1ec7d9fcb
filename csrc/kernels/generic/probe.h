// What this machine can do at most: bytes read and multiply-adds done in a second.
#pragma once
#include "kernels/table.h"
#include "kernels/vec/vec.h"

namespace CPUSERVE_NS {

CPUSERVE_INLINE uint64_t lane_sum(I x) {
  int32_t lanes[kLanes];
  memcpy(lanes, &x, sizeof lanes);
  uint64_t sum = 0;
  for (int i = 0; i < kLanes; i++) sum += static_cast<uint64_t>(lanes[i]);
  return sum;
}

// Sum of all bytes: eight streams of vectors side by side in one pass, summed by a dot product with
// ones. A lane takes at most 4 x 255 a vector, so 2 MB of vectors fit 31 bits at any vector length.
static inline uint64_t probe_read(const void* data, size_t bytes) noexcept {
  constexpr size_t kVec = kLanes * 4, kStep = 8 * kVec, kBatch = size_t{2} << 20, kAhead = 2048;
  const int8_t one[4] = {1, 1, 1, 1};
  const Q ones = set1_quad(one);
  const uint8_t* p = static_cast<const uint8_t*>(data);
  const uint8_t* const end = p + bytes;
  uint64_t sum = 0;
  while (p + kStep <= end) {
    const size_t left = static_cast<size_t>(end - p);
    const uint8_t* const stop = p + (left < kBatch ? left : kBatch) / kStep * kStep;
    I s[4] = {izero(), izero(), izero(), izero()};
    for (; p < stop; p += kStep) {
      for (size_t i = 0; i < kStep; i += 64) prefetch(p + kAhead + i);
#pragma GCC unroll 8
      for (size_t i = 0; i < 8; i++) s[i % 4] = dot4(s[i % 4], load_quads(p + i * kVec), ones);
    }
    sum += lane_sum(iadd(s[0], s[1])) + lane_sum(iadd(s[2], s[3]));
  }
  for (; p < end; p++) sum += *p;
  return sum;
}

struct DotF32 {
  using Acc = F;
  using Vec = F;
  static constexpr int kDepth = 1;
  CPUSERVE_INLINE Acc start() { return zero(); }
  CPUSERVE_INLINE Vec load(const uint8_t* p) {
    return CPUSERVE_NS::load(reinterpret_cast<const float*>(p));
  }
  CPUSERVE_INLINE Vec broadcast(const uint8_t* p) {
    return set1(*reinterpret_cast<const float*>(p));
  }
  CPUSERVE_INLINE Acc dot(Acc c, Vec a, Vec b) { return fma(a, b, c); }
};
struct DotBf16 {
  using Acc = F;
  using Vec = P;
  static constexpr int kDepth = 2;
  CPUSERVE_INLINE Acc start() { return zero(); }
  CPUSERVE_INLINE Vec load(const uint8_t* p) {
    return load_pairs(reinterpret_cast<const uint16_t*>(p));
  }
  CPUSERVE_INLINE Vec broadcast(const uint8_t* p) {
    return set1_pair(reinterpret_cast<const uint16_t*>(p));
  }
  CPUSERVE_INLINE Acc dot(Acc c, Vec a, Vec b) { return dot2(c, a, b); }
};
struct DotInt8 {
  using Acc = I;
  using Vec = Q;
  static constexpr int kDepth = 4;
  CPUSERVE_INLINE Acc start() { return izero(); }
  CPUSERVE_INLINE Vec load(const uint8_t* p) { return load_quads(p); }
  CPUSERVE_INLINE Vec broadcast(const uint8_t* p) {
    return set1_quad(reinterpret_cast<const int8_t*>(p));
  }
  CPUSERVE_INLINE Acc dot(Acc c, Vec a, Vec b) { return dot4(c, b, a); }
};

// A whole register tile on operands in L1, which a kernel cannot beat. The barrier makes operands
// unknown in each iteration, so that no part of an emulated product moves out of the loop.
template <class D>
static inline double dot_loop(int64_t iterations) {
  alignas(64) uint8_t operands[kTileVecs * 64 + kTileRows * 4] = {};
  const uint8_t* p = operands;
  typename D::Acc c[kTileRows][kTileVecs];
#pragma GCC unroll 16
  for (int r = 0; r < kTileRows; r++) {
#pragma GCC unroll 16
    for (int j = 0; j < kTileVecs; j++) c[r][j] = D::start();
  }
  for (int64_t i = 0; i < iterations; i++) {
    asm volatile("" : "+r"(p) : : "memory");
    typename D::Vec b[kTileVecs];
#pragma GCC unroll 16
    for (int j = 0; j < kTileVecs; j++) b[j] = D::load(p + j * 64);
#pragma GCC unroll 16
    for (int r = 0; r < kTileRows; r++) {
      const typename D::Vec a = D::broadcast(p + kTileVecs * 64 + r * 4);
#pragma GCC unroll 16
      for (int j = 0; j < kTileVecs; j++) c[r][j] = D::dot(c[r][j], a, b[j]);
    }
  }
  typename D::Acc kept[kTileRows][kTileVecs];
  memcpy(kept, c, sizeof kept);
  const void* sink = kept;
  asm volatile("" : : "r"(sink) : "memory");
  return 2.0 * D::kDepth * kLanes * kTileRows * kTileVecs * static_cast<double>(iterations);
}

static inline double probe_dot(int kind, int64_t iterations) noexcept {
  switch (kind) {
    case 0:
      return dot_loop<DotF32>(iterations);
    case 1:
      return dot_loop<DotBf16>(iterations);
    default:
      return dot_loop<DotInt8>(iterations);
  }
}

}  // namespace CPUSERVE_NS
