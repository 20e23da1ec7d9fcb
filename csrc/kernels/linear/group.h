// The tile of the quantized kinds: int8 rows (q8g32) against weights in groups of 32 of K.
//
//   f = fma(float(sum_k q_w q_x - zero sum_x), s_w s_x, f)      then, with a minimum,
//   f = fma(min, s_x float(sum_x), f)
//
// A kind W gives kGroupBytes, kMinBytes, kZero, kQuadsPerLine and how a 64-byte line holds quads.
// Integer sums are exact, so where and how they are taken never changes a bit; the fp32 chain runs
// over the groups in ascending order at every shape.
#pragma once
#include "kernels/linear/driver.h"
#include "kernels/linear/source.h"

namespace CPUSERVE_NS {
namespace {

constexpr int kScaleBytes = kPanel * 2;

// -zero sum_x in every lane; zero is a power of two.
template <int kZero>
CPUSERVE_INLINE I zero_term(const int32_t* sum) {
  if constexpr (kZero == 0) return izero();
  if constexpr (kZero == 8) return isub(izero(), shl<3>(iload1(sum)));
  if constexpr (kZero == 128) return isub(izero(), shl<7>(iload1(sum)));
}

// Integer sums of one group for MR rows x NV vectors.
template <class W, int MR, int NV>
CPUSERVE_INLINE void group_sums(I (&out)[MR][NV], const uint8_t* x, size_t x_stride,
                                const int32_t* sums, const uint8_t* w, size_t panel_bytes) {
  typename W::Sum acc[MR][NV];
  constexpr bool kStart = W::kStartsFromAny && W::kZero != 0;
#pragma GCC unroll 16
  for (int r = 0; r < MR; r++) {
    typename W::Sum first = W::start();
    if constexpr (kStart) {
      first = zero_term<W::kZero>(reinterpret_cast<const int32_t*>(
          reinterpret_cast<const uint8_t*>(sums) + static_cast<size_t>(r) * x_stride));
    }
#pragma GCC unroll 16
    for (int v = 0; v < NV; v++) acc[r][v] = first;
  }
#pragma GCC unroll 8
  for (int quad = 0; quad < 8; quad++) {
    Q wq[NV];
#pragma GCC unroll 16
    for (int v = 0; v < NV; v++) {
      const uint8_t* line = w + static_cast<size_t>(v / kVecs) * panel_bytes +
                            quad / W::kQuadsPerLine * 64 + v % kVecs * kLanes * 4;
      wq[v] = W::quads(line, quad % W::kQuadsPerLine);
    }
#pragma GCC unroll 16
    for (int r = 0; r < MR; r++) {
      const Q a = set1_quad(
          reinterpret_cast<const int8_t*>(x + static_cast<size_t>(r) * x_stride + quad * 4));
#pragma GCC unroll 16
      for (int v = 0; v < NV; v++) acc[r][v] = W::dot(acc[r][v], wq[v], a);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < MR; r++) {
#pragma GCC unroll 16
    for (int v = 0; v < NV; v++) {
      out[r][v] = W::finish(acc[r][v]);
      if constexpr (!kStart && W::kZero != 0) {
        out[r][v] =
            iadd(out[r][v],
                 zero_term<W::kZero>(reinterpret_cast<const int32_t*>(
                     reinterpret_cast<const uint8_t*>(sums) + static_cast<size_t>(r) * x_stride)));
      }
    }
  }
}

template <class W>
struct Grouped {
  static constexpr int64_t kUnitBytes = W::kGroupBytes;
  // fp32 sums share the registers with the integer ones up to so many of each; else they stay in
  // `c`, which is L1 resident: one load and one store a group of 8 products.
  static constexpr int kInRegisters = kGroupVecs / 2 / kVecs;
  static constexpr int kInMemory = kGroupVecs / kVecs;
  static constexpr int stream_panels(int rows) {
    int n = kInRegisters / rows;
    if (n < 2) n = kInMemory / rows < 2 ? 1 : 2;
    return n > 4 ? 4 : n;
  }
  static constexpr int kStreamRows = kVecs == 1 ? 12 : kInMemory;
  static constexpr int kRows = kVecs == 1 ? 6 : kInMemory;
  static constexpr int kPanels = stream_panels(kRows);
  static int64_t units(int64_t k) { return (k + kGroup - 1) / kGroup; }

  template <int MR, int NP, bool kNear, int NPF>
  static __attribute__((noinline)) void tile(const LinearTile& t) {
    constexpr int NV = NP * kVecs;
    constexpr bool kKept = MR * NP <= kInRegisters;
    const size_t panel_bytes = t.panel_bytes, x_stride = t.x_stride;
    const int64_t scales_at = t.x_padded, sums_at = t.x_padded + t.x_padded / kGroup * 4;
    F f[MR][NV];
#pragma GCC unroll 16
    for (int r = 0; r < MR; r++) {
#pragma GCC unroll 16
      for (int v = 0; v < NV; v++) {
        float* c = t.c + static_cast<size_t>(r) * t.ldc + v * kLanes;
        if constexpr (kKept) {
          f[r][v] = t.resume ? load(c) : zero();
        } else {
          if (!t.resume) store(c, zero());
        }
      }
    }
    int64_t u = t.u0;
    for (int part = 0; part < 2; part++) {
      const int64_t end = part ? t.u1 : t.split;
      const uint8_t* base = part ? t.ahead1 : t.ahead0;
      for (; u < end; u++) {
        const uint8_t* w = t.w + u * kUnitBytes;
        const uint8_t* ahead = base + u * kUnitBytes;
#pragma GCC unroll 4
        for (int p = 0; p < NPF; p++) {
#pragma GCC unroll 9
          for (int i = 0; i < kUnitBytes; i += 64) {
            const uint8_t* line = ahead + static_cast<size_t>(p) * panel_bytes + i;
            kNear ? prefetch(line) : prefetch_l2(line);
          }
        }
        const float* scales = reinterpret_cast<const float*>(t.x + scales_at) + u;
        const int32_t* sums = reinterpret_cast<const int32_t*>(t.x + sums_at) + u;
        I dot[MR][NV];
        group_sums<W>(dot, t.x + u * kGroup, x_stride, sums, w + kScaleBytes + W::kMinBytes,
                      panel_bytes);
        add_group<MR, NV, kKept>(f, dot, scales, sums, w, t);
      }
    }
    if constexpr (kKept) {
#pragma GCC unroll 16
      for (int r = 0; r < MR; r++) {
#pragma GCC unroll 16
        for (int v = 0; v < NV; v++) {
          store(t.c + static_cast<size_t>(r) * t.ldc + v * kLanes, f[r][v]);
        }
      }
    }
  }

  // One group's step of the fp32 chain.
  template <int MR, int NV, bool kKept>
  __attribute__((always_inline)) static inline void add_group(F (&f)[MR][NV], I (&dot)[MR][NV],
                                                              const float* scales,
                                                              const int32_t* sums, const uint8_t* w,
                                                              const LinearTile& t) {
    F scale[NV], least[NV];
#pragma GCC unroll 16
    for (int v = 0; v < NV; v++) {
      const uint16_t* at =
          reinterpret_cast<const uint16_t*>(w + static_cast<size_t>(v / kVecs) * t.panel_bytes) +
          v % kVecs * kLanes;
      scale[v] = load_f16(at);
      if constexpr (W::kMinBytes != 0) least[v] = load_f16(at + kPanel);
    }
#pragma GCC unroll 16
    for (int r = 0; r < MR; r++) {
      const size_t row = static_cast<size_t>(r) * t.x_stride;
      const F s =
          set1(*reinterpret_cast<const float*>(reinterpret_cast<const uint8_t*>(scales) + row));
      F m = zero();
      if constexpr (W::kMinBytes != 0) {
        m = mul(s, to_float(iload1(reinterpret_cast<const int32_t*>(
                       reinterpret_cast<const uint8_t*>(sums) + row))));
      }
#pragma GCC unroll 16
      for (int v = 0; v < NV; v++) {
        float* c = t.c + static_cast<size_t>(r) * t.ldc + v * kLanes;
        F sum = kKept ? f[r][v] : load(c);
        sum = fma(to_float(dot[r][v]), mul(scale[v], s), sum);
        if constexpr (W::kMinBytes != 0) sum = fma(least[v], m, sum);
        if constexpr (kKept) {
          f[r][v] = sum;
        } else {
          store(c, sum);
        }
      }
    }
  }
};

template <class W>
size_t group_panel_bytes(int64_t k) noexcept {
  return static_cast<size_t>(Grouped<W>::units(k) * W::kGroupBytes);
}

// Where group g of a panel begins, and element `k` of column `c` in it.
template <class W>
inline const uint8_t* group_at(const PackedWeight& w, int64_t panel, int64_t g) {
  return w.data + static_cast<size_t>(panel) * w.panel_bytes + g * W::kGroupBytes;
}

template <class W>
void pack_group(const PackArgs& a) noexcept {
  const int64_t groups = Grouped<W>::units(a.k);
  for (int64_t g = 0; g < groups; g++) {
    uint8_t* to = static_cast<uint8_t*>(a.panel) + g * W::kGroupBytes;
    for (int r = 0; r < kPanel; r++) W::pack_column(a, g, r, to);
  }
}

template <class W>
void group_row(const PackedWeight& w, int64_t n, float* out) noexcept {
  const int column = static_cast<int>(n % kPanel);
  for (int64_t g = 0; g * kGroup < w.k; g++) {
    float x[kGroup];
    W::read_column(group_at<W>(w, n / kPanel, g), column, x);
    const int64_t left = w.k - g * kGroup;
    memcpy(out + g * kGroup, x, sizeof(float) * static_cast<size_t>(left < kGroup ? left : kGroup));
  }
}

template <class W>
constexpr LinearKernel group_kernel() {
  return {ActFormat::q8g32, group_panel_bytes<W>, pack_group<W>, run_linear<Grouped<W>>,
          group_row<W>};
}

}  // namespace
}  // namespace CPUSERVE_NS
