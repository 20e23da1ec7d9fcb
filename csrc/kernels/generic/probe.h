// Measures the limits of this machine: bytes read and multiply-adds done per second.
#pragma once
#include "kernels/linear/w4_group.h"
#include "kernels/linear/w8_group.h"
#ifdef CPUSERVE_UNIT_TILES
#include "kernels/generic/matrix_job.h"
#endif
#ifdef CPUSERVE_UNIT_MMLA
#include "kernels/vec/mmla.h"
#endif
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

// Returns the sum of all bytes of `data`. Each iteration reads eight vectors and sums their bytes
// with dot products by ones. A lane adds at most 4 x 255 per vector,
// so sums over kBatch bytes (2 MB) stay below 2^31 at any vector length.
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
struct DotBf16 {  // used only at ISA levels with an instruction for dot2
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
// In each iteration, multiplies operands in L1 for a whole register tile; no kernel can be faster.
// Returns the number of operations, where a multiply-add counts as two.
// In each iteration, an asm barrier hides the operands from the compiler,
// so that it cannot move a part of an emulated product out of the loop.
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

// Adds products over 32 elements of K to the sums c of R rows x V vectors,
// with the dot product of the weight kind W. kAtOnce vectors are multiplied by all rows together:
// if a product is emulated, the operands of two vectors and the sums do not fit 16 registers.
template <class W, int kAtOnce, int R, int V>
CPUSERVE_INLINE void byte_products(typename W::Sum (&c)[R][V], const uint8_t* p) {
#pragma GCC unroll 32
  for (int part = 0; part < 8 * V / kAtOnce; part++) {
    asm volatile("" : "+r"(p) : : "memory");
    const int first = part * kAtOnce % V;
    Q w[kAtOnce];
#pragma GCC unroll 16
    for (int j = 0; j < kAtOnce; j++) w[j] = load_quads(p + (first + j) * 64);
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
      const Q a = set1_quad(reinterpret_cast<const int8_t*>(p + V * 64 + r * 4));
#pragma GCC unroll 16
      for (int j = 0; j < kAtOnce; j++) {
        c[r][first + j] = add_product<W, R * V>(c[r][first + j], w[j], a);
      }
    }
  }
}

// Does the same as dot_loop for the quantized kind W, with as many sums as its register tile.
// 8-bit and 4-bit weights differ on CPUs without dot-product instructions:
// only sums of 4-bit weights fit in 16 bits; they are widened to 32 bits after 32 elements of K.
// With 16 registers (AVX2 without VNNI), the totals leave space for the 16-bit sums of three rows.
template <class W>
static inline double byte_loop(int64_t iterations) {
  constexpr bool kFew = kEmulatesDots && kVecs == 2;
  constexpr int kSums = kFew && !W::kStartsFromAny ? 3 : kGroupVecs / kVecs;
  constexpr int R = kSums < 6 ? kSums : 6, V = kSums / R * kVecs,
                kAtOnce = kFew && W::kStartsFromAny ? 1 : V;
  alignas(64) const uint8_t operands[V * 64 + R * 4] = {};
  I total[R][V];
#pragma GCC unroll 16
  for (int r = 0; r < R; r++) {
#pragma GCC unroll 16
    for (int j = 0; j < V; j++) total[r][j] = izero();
  }
  for (int64_t i = 0; i < iterations; i++) {
    if constexpr (W::kStartsFromAny) {
      byte_products<W, kAtOnce>(total, operands);
    } else {
      typename W::Sum c[R][V];
#pragma GCC unroll 16
      for (int r = 0; r < R; r++) {
#pragma GCC unroll 16
        for (int j = 0; j < V; j++) c[r][j] = W::start();
      }
      byte_products<W, kAtOnce>(c, operands);
#pragma GCC unroll 16
      for (int r = 0; r < R; r++) {
#pragma GCC unroll 16
        for (int j = 0; j < V; j++) total[r][j] = iadd(total[r][j], W::finish(c[r][j]));
      }
    }
  }
  I kept[R][V];
  memcpy(kept, total, sizeof kept);
  const void* sink = kept;
  asm volatile("" : : "r"(sink) : "memory");
  return 2.0 * 32 * kLanes * R * V * static_cast<double>(iterations);
}

#ifdef CPUSERVE_UNIT_TILES
// Does the same as dot_loop for AMX: each iteration runs the four products of a job on operands
// that stay in AMX tiles. `depth` is the number of elements of K that a product sums.
template <class Product>
static inline double tile_loop(int depth, int64_t iterations) {
  alignas(64) const uint8_t zeros[kTileBytes] = {};
  configure_job(kJobRows, kTileLines);
  zero_sums<2, 2>();
  tile_load<4>(zeros, kTileLineBytes);
  tile_load<5>(zeros, kTileLineBytes);
  tile_load<6>(zeros, kTileLineBytes);
  tile_load<7>(zeros, kTileLineBytes);
  for (int64_t i = 0; i < iterations; i++) {
    Product::template dot<0, 4, 6>();
    Product::template dot<1, 4, 7>();
    Product::template dot<2, 5, 6>();
    Product::template dot<3, 5, 7>();
  }
  tile_release();
  return 2.0 * depth * kJobRows * kJobColumns * kTileRows16 * static_cast<double>(iterations);
}
#endif

#ifdef CPUSERVE_UNIT_MMLA
// Does the same as dot_loop for SMMLA and BFMMLA, with the tallest register tile
// of linear/mmla.h on operands in L1. `depth` is the number of elements of K that a product sums.
template <class Sum>
static inline double mmla_loop(int depth, int64_t iterations) {
  constexpr int R = 6, C = 4;
  alignas(64) const uint8_t operands[(R + C) * 16] = {};
  const uint8_t* p = operands;
  Sum sum[R][C] = {};
  for (int64_t i = 0; i < iterations; i++) {
    asm volatile("" : "+r"(p) : : "memory");
    Q w[C];
#pragma GCC unroll 8
    for (int c = 0; c < C; c++) w[c] = load_quads(p + c * 16);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      const Q x = load_quads(p + (C + r) * 16);
#pragma GCC unroll 8
      for (int c = 0; c < C; c++) sum[r][c] = mmla(sum[r][c], x, w[c]);
    }
  }
  Sum kept[R][C];
  memcpy(kept, sum, sizeof kept);
  const void* sink = kept;
  asm volatile("" : : "r"(sink) : "memory");
  return 2.0 * depth * 4 * R * C * static_cast<double>(iterations);
}
#endif

// The functions of KernelTable::probe_dot, with the products that kernels of this ISA level use.
static inline double probe_f32(int64_t iterations) noexcept { return dot_loop<DotF32>(iterations); }

static inline double probe_bf16(int64_t iterations) noexcept {
#if defined(CPUSERVE_UNIT_TILES)
  return tile_loop<Bf16Product>(2 * kTileLines, iterations);
#elif defined(CPUSERVE_UNIT_BFMMLA)
  return mmla_loop<F>(4, iterations);
#else
  // Without bf16 dot products, kernels multiply bf16 values widened to fp32, at the rate of fp32.
  return kNativeDot2 ? dot_loop<DotBf16>(iterations) : dot_loop<DotF32>(iterations);
#endif
}

template <class W>
static inline double probe_bytes(int64_t iterations) noexcept {
#if defined(CPUSERVE_UNIT_TILES)
  return tile_loop<S8S8Product>(4 * kTileLines, iterations);
#elif defined(CPUSERVE_UNIT_I8MM)
  return mmla_loop<I>(8, iterations);
#else
  return byte_loop<W>(iterations);
#endif
}

}  // namespace CPUSERVE_NS
