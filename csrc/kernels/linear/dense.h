// dense_bf16, dense_f16, dense_f32: weights in their own float type, sums in fp32.
//
// A tile keeps the fp32 sums of several rows and up to 4 panels of 16 columns in registers.
// linear/driver.h explains the terms. Each step along K loads the weights of all its columns once
// and broadcasts an element (a pair in bf16) of each row. On AVX-512, a tile of 6 rows x 64 columns
// uses 29 of 32 registers: 24 for sums, 4 for weights and 1 for the broadcast element.
// A step has 10 loads (4 of weights, 6 of elements of rows) for 24 products (6 rows x 4 vectors).
// A core can do two loads and two products in a cycle, so the products are the limit.
#pragma once
#include "kernels/linear/driver.h"
#include "kernels/linear/source.h"

namespace CPUSERVE_NS {
namespace {

// A step of K has kPhases products for each output element. Without a bf16 dot product there
// are two: first the product of the even elements of a pair, then of the odd ones, as dot2 does.
// In this case, linears of many rows widen the rows to fp32 before tiles read them (driver.h),
// because widening them in the tile would take an operation for every one to four products.
// Few rows are widened in the tile, because tiles of few rows wait for memory anyway.
struct Bf16Element {
  using Packed = uint16_t;
  static constexpr ActFormat kAct = ActFormat::bf16;
  static constexpr SourceType kSource = SourceType::bf16;
  static constexpr int kPerStep = 2, kPhases = kNativeDot2 ? 1 : 2;
  static constexpr bool kWidens = !kNativeDot2;
  static constexpr int64_t kActBytes = 4;
  static void from_floats(const float* x, uint16_t* out, int n) {
    for (int i = 0; i < n; i += kLanes) store_bf16(out + i, load(x + i));
  }
  static float to_float(uint16_t x) {
    float f;
    read_bf16(&x, 1, &f);
    return f;
  }
};
struct F16Element {
  using Packed = uint16_t;
  static constexpr ActFormat kAct = ActFormat::f32;
  static constexpr SourceType kSource = SourceType::f16;
  static constexpr int kPerStep = 1, kPhases = 1;
  static constexpr bool kWidens = false;
  static constexpr int64_t kActBytes = 4;
  static void from_floats(const float* x, uint16_t* out, int n) {
    for (int i = 0; i < n; i += kLanes) store_f16(out + i, load(x + i));
  }
  static float to_float(uint16_t x) { return half_to_float(x); }
};
struct F32Element {
  using Packed = float;
  static constexpr ActFormat kAct = ActFormat::f32;
  static constexpr SourceType kSource = SourceType::f32;
  static constexpr int kPerStep = 1, kPhases = 1;
  static constexpr bool kWidens = false;
  static constexpr int64_t kActBytes = 4;
  static void from_floats(const float* x, float* out, int n) {
    memcpy(out, x, sizeof(float) * static_cast<size_t>(n));
  }
  static float to_float(float x) { return x; }
};

// weight_of returns vector v of the weights at `line`: one element or pair of K, or of a pair only
// the even (kPhase 0) or the odd element (kPhase 1). act_of returns the same elements of the row
// of activations at x in every lane. product returns `sum` plus the product of a and w.
template <class E, int kPhase>
CPUSERVE_INLINE auto weight_of(const uint8_t* line, int v) {
  if constexpr (sizeof(typename E::Packed) == 4) {
    return load(reinterpret_cast<const float*>(line) + v * kLanes);
  } else if constexpr (E::kPerStep == 1) {
    return load_f16(reinterpret_cast<const uint16_t*>(line) + v * kLanes);
  } else {
    const P pairs = load_pairs(reinterpret_cast<const uint16_t*>(line) + v * kLanes * 2);
    if constexpr (kNativeDot2) {
      return pairs;
    } else if constexpr (kPhase == 0) {
      return even(pairs);
    } else {
      return odd(pairs);
    }
  }
}
template <class E, int kPhase, bool kWide>
CPUSERVE_INLINE auto act_of(const uint8_t* x) {
  if constexpr (E::kPerStep == 1 || kWide) {
    return set1(reinterpret_cast<const float*>(x)[kPhase]);
  } else {
    const P pairs = set1_pair(reinterpret_cast<const uint16_t*>(x));
    if constexpr (kNativeDot2) {
      return pairs;
    } else if constexpr (kPhase == 0) {
      return even(pairs);
    } else {
      return odd(pairs);
    }
  }
}
CPUSERVE_INLINE F product(F sum, F a, F w) { return fma(a, w, sum); }
CPUSERVE_INLINE F product(F sum, P a, P w) { return dot2(sum, a, w); }

template <class E, int kPhase, bool kWide, int MR, int NV>
CPUSERVE_INLINE void dense_phase(F (&sum)[MR][NV], const uint8_t* x, size_t x_stride,
                                 const uint8_t* w, size_t panel_bytes) {
  decltype(weight_of<E, kPhase>(w, 0)) wv[NV];
#pragma GCC unroll 16
  for (int v = 0; v < NV; v++) {
    wv[v] = weight_of<E, kPhase>(w + static_cast<size_t>(v / kVecs) * panel_bytes, v % kVecs);
  }
#pragma GCC unroll 16
  for (int r = 0; r < MR; r++) {
    const auto a = act_of<E, kPhase, kWide>(x + static_cast<size_t>(r) * x_stride);
#pragma GCC unroll 16
    for (int v = 0; v < NV; v++) sum[r][v] = product(sum[r][v], a, wv[v]);
  }
}

template <class E>
struct Dense {
  static constexpr int64_t kUnitBytes =
      kPanel * E::kPerStep * static_cast<int64_t>(sizeof(typename E::Packed));
  static constexpr int kSums = kTileRows * kTileVecs;
  static constexpr int kRows = kSums / kVecs >= 24 ? 6 : kSums / kVecs < 6 ? kSums / kVecs : 6;
  static constexpr int kPanels = kSums / kVecs / kRows >= 4 ? 4 : kSums / kVecs / kRows;
  static constexpr int kHalfRows = kPanels == 4 ? 2 * kRows : kRows;
  // Widening rows in the tile needs more registers: on a CPU with 16 registers,
  // tiles of 6 x 2 sums would keep operands on the stack, which halves their rate.
  static constexpr int kStreamRows = kSums / kVecs >= 24         ? (E::kWidens ? 8 : 16)
                                     : E::kWidens && kSums == 12 ? 4
                                                                 : kRows;
  // In one pass over the weights, a tile has one panel, because a core reads one stream
  // of memory faster than several streams, especially if the streams are short.
  // With K = 896 and 8 rows, reading one panel at a time reaches 98 % of the bandwidth
  // of a plain read, and reading three panels side by side reaches 89 %.
  static constexpr int stream_panels(int) { return 1; }
  static int64_t units(int64_t k) { return (k + E::kPerStep - 1) / E::kPerStep; }
  static constexpr bool kSharesHeaders = false, kWidens = E::kWidens, kNearBlocks = false;
  static constexpr bool kSizesCutPasses = true, kLineUnits = true;
  static constexpr bool kUnpacks = false;
  // Rows are widened 32 elements (16 units of K) at a time; their padding ends at such a multiple.
  static constexpr int64_t kWholeUnits = kWidens ? 16 : 1;
  static constexpr ActFormat kAct = E::kAct;

  template <int MR, int NP, bool kNear, int NPF>
  static __attribute__((noinline)) void tile(const LinearTile& t) {
    constexpr int NV = NP * kVecs;
    constexpr bool kWide = kWidens && !kNear;
    constexpr int64_t kActBytes = kWide ? 2 * sizeof(float) : E::kActBytes;
    F sum[MR][NV];
#pragma GCC unroll 16
    for (int r = 0; r < MR; r++) {
#pragma GCC unroll 16
      for (int v = 0; v < NV; v++) {
        sum[r][v] = t.resume ? load(t.c + r * sums_stride<kNear>() + v * kLanes) : zero();
      }
    }
    const size_t panel_bytes = t.panel_bytes, x_stride = t.x_stride;
    const bool near = t.fetch_near;
    const uint8_t* x = t.x + (t.u0 - t.x_u0) * kActBytes;
    const uint8_t* w = t.w + t.u0 * kUnitBytes;
    const uint8_t* ahead = t.ahead0;
    // An iteration prefetches consecutive lines. In a pass over the weights (kNear) there are
    // two iterations: the units of K before `split`, and the units from `split` on.
    // A tile over a K block has one iteration for each line of the next block that it prefetches.
    for (int64_t u = t.u0; u < t.u1;) {
      int64_t end = kNear && u < t.split ? t.split : t.u1;
      if constexpr (kNear) {
        if (u == t.split) ahead = t.ahead1 + (u - t.u0) * kUnitBytes;
      } else {
        fetch_ahead_lines(t, ahead);
        ahead += kUnitBytes;
        if (end - u > t.fetch_every) end = u + t.fetch_every;
      }
      for (; u < end; u++) {
#pragma GCC unroll 4
        for (int p = 0; p < NPF; p++) {
          fetch_to(near, ahead + static_cast<size_t>(p) * panel_bytes);
        }
        dense_phase<E, 0, kWide>(sum, x, x_stride, w, panel_bytes);
        if constexpr (E::kPhases == 2) dense_phase<E, 1, kWide>(sum, x, x_stride, w, panel_bytes);
        x += kActBytes;
        w += kUnitBytes;
        if constexpr (NPF > 0) ahead += kUnitBytes;
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < MR; r++) {
#pragma GCC unroll 16
      for (int v = 0; v < NV; v++) {
        store(t.c + r * sums_stride<kNear>() + v * kLanes, sum[r][v]);
      }
    }
  }
};

template <class E>
size_t dense_panel_bytes(int64_t k) noexcept {
  return static_cast<size_t>(Dense<E>::units(k) * Dense<E>::kUnitBytes);
}

// Converts elements [k0, k0 + n) of one source row to the packed type.
// If the source has the same type, the bits do not change.
template <class E>
inline void read_elements(const PackArgs& a, int row, int64_t k0, int n, typename E::Packed* out) {
  using T = typename E::Packed;
  if (a.rows[row] && a.source == E::kSource) {
    memcpy(out, static_cast<const T*>(a.rows[row]) + k0, sizeof(T) * static_cast<size_t>(n));
    return;
  }
  float x[kChunk64] = {};
  read_floats(a.rows[row], a.source, k0, n, x);
  E::from_floats(x, out, kChunk64);
}

// Packs a panel from 16 source rows. kSide: the adjacent elements of a column in the panel.
template <class E, int kSide = E::kPerStep>
void pack_dense(const PackArgs& a) noexcept {
  using T = typename E::Packed;
  T rows[kPanel][kChunk64];
  T* to = static_cast<T*>(a.panel);
  for (int64_t k0 = 0; k0 < a.k; k0 += kChunk64) {
    const int n = static_cast<int>(a.k - k0 < kChunk64 ? a.k - k0 : kChunk64);
    memset(rows, 0, sizeof rows);
    for (int r = 0; r < kPanel; r++) read_elements<E>(a, r, k0, n, rows[r]);
    for (int i = 0; i < n; i += kSide) {
      for (int r = 0; r < kPanel; r++, to += kSide) memcpy(to, &rows[r][i], sizeof(T) * kSide);
    }
  }
}

template <class E, int kSide = E::kPerStep>
void dense_row(const PackedWeight& w, int64_t n, float* out) noexcept {
  using T = typename E::Packed;
  const T* panel =
      reinterpret_cast<const T*>(w.data + static_cast<size_t>(n / kPanel) * w.panel_bytes);
  const int64_t column = n % kPanel;
  for (int64_t k = 0; k < w.k; k++) {
    out[k] = E::to_float(panel[(k / kSide * kPanel + column) * kSide + k % kSide]);
  }
}

template <class E>
constexpr LinearKernel dense_kernel() {
  using Kind = Dense<E>;
  LinearKernel kernel{
      E::kAct,     dense_panel_bytes<E>,   pack_dense<E>, run_linear<Kind>,  dense_row<E>,
      Kind::kRows, Kind::kPanels * kPanel, Kind::kPanels, Kind::kStreamRows, linear_block_k<Kind>};
  kernel.sizes_cut_passes = Kind::kSizesCutPasses;
  return kernel;
}

}  // namespace
}  // namespace CPUSERVE_NS
