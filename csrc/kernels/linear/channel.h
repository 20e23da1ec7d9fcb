// w8_channel and w8_channel_g128: int8 weights with one scale per output column, against int8 rows
// with one scale per row or per 128 of K.
//
//   row:   f = float(sum_k q_w q_x - zero sum_x) * (s_w s_x), integers over the whole row
//   g128:  f = fma(float(sum_k q_w q_x - zero sum_x), s_x, f) per group, then f * s_w
//
// The tile keeps MR rows x NP panels of int32 sums in registers and walks K a quad at a time; with
// one scale per row nothing but products is left in the loop. Per group, the fp32 sums share the
// registers where there is room, else they stay in `c`, which is in L1.
#pragma once
#include "kernels/linear/group.h"

namespace CPUSERVE_NS {
namespace {

constexpr size_t kChannelScales = kPanel * sizeof(float);  // behind a panel's weights

// Quads [u, end) of K into the integer sums; `ahead` is a prefetch base as in LinearTile.
template <int MR, int NV, bool kNear, int NPF>
CPUSERVE_INLINE void channel_products(I (&acc)[MR][NV], const LinearTile& t, int64_t u, int64_t end,
                                      const uint8_t* ahead) {
  constexpr int64_t kQuadBytes = kPanel * 4;
  const size_t panel_bytes = t.panel_bytes, x_stride = t.x_stride;
  const uint8_t* x = t.x + u * 4;
  const uint8_t* w = t.w + u * kQuadBytes;
  ahead += u * kQuadBytes;
  for (; u < end; u++) {
#pragma GCC unroll 4
    for (int p = 0; p < NPF; p++) {
      const uint8_t* line = ahead + static_cast<size_t>(p) * panel_bytes;
      kNear ? prefetch(line) : prefetch_l2(line);
    }
    Q wq[NV];
#pragma GCC unroll 16
    for (int v = 0; v < NV; v++) {
      wq[v] = load_quads(w + static_cast<size_t>(v / kVecs) * panel_bytes + v % kVecs * kLanes * 4);
    }
#pragma GCC unroll 16
    for (int r = 0; r < MR; r++) {
      const Q a = set1_quad(reinterpret_cast<const int8_t*>(x + static_cast<size_t>(r) * x_stride));
#pragma GCC unroll 16
      for (int v = 0; v < NV; v++) acc[r][v] = dot8(acc[r][v], wq[v], a);
    }
    x += 4;
    w += kQuadBytes;
    ahead += kQuadBytes;
  }
}

// The scales of vector v's columns.
CPUSERVE_INLINE F channel_scale(const LinearTile& t, int v) {
  const uint8_t* panel = t.w + static_cast<size_t>(v / kVecs) * t.panel_bytes;
  const uint8_t* scales = panel + t.panel_bytes - kChannelScales;
  return load(reinterpret_cast<const float*>(scales) + v % kVecs * kLanes);
}

// kGroupQuads: quads of K that share a row's scale; 0 = all of them.
template <int64_t kGroupQuads>
struct Channel {
  static constexpr ActFormat kAct = kGroupQuads ? ActFormat::q8g128 : ActFormat::q8row;
  static constexpr int64_t kUnitBytes = kPanel * 4;
  static constexpr int64_t kWholeUnits = kGroupQuads ? kGroupQuads : 1;
  static constexpr int kSums = kGroupVecs / kVecs;
  static constexpr int kRows = kSums < 6 ? kSums : 6;
  static constexpr int kPanels = kSums / kRows > 4 ? 4 : kSums / kRows;
  static constexpr int kStreamRows = kSums >= 24 ? 12 : kRows;
  static constexpr int stream_panels(int rows) {
    const int n = kSums / rows;
    return n > 4 ? 4 : n;
  }
  static int64_t units(int64_t k) { return (k + 3) / 4; }

  // The integer sums of quads [u, end), less the zero point's share where u is not a resumption.
  template <int MR, int NV, bool kNear, int NPF>
  static __attribute__((always_inline)) inline void walk(I (&acc)[MR][NV], const LinearTile& t,
                                                         int64_t u, int64_t end) {
    while (u < end) {  // at most twice: before and from `split`
      const bool late = u >= t.split;
      const int64_t stop = late || t.split > end ? end : t.split;
      channel_products<MR, NV, kNear, NPF>(acc, t, u, stop, late ? t.ahead1 : t.ahead0);
      u = stop;
    }
  }

  template <int MR, int NV>
  static __attribute__((always_inline)) inline void start(I (&acc)[MR][NV], const LinearTile& t,
                                                          const uint8_t* sums) {
#pragma GCC unroll 16
    for (int r = 0; r < MR; r++) {
      const I first = zero_term<kDot8Zero>(sums + static_cast<size_t>(r) * t.x_stride);
#pragma GCC unroll 16
      for (int v = 0; v < NV; v++) acc[r][v] = first;
    }
  }

  template <int MR, int NP, bool kNear, int NPF>
  static __attribute__((noinline)) void tile(const LinearTile& t) {
    if constexpr (kGroupQuads == 0) {
      row_tile<MR, NP, kNear, NPF>(t);
    } else {
      group_tile<MR, NP, kNear, NPF>(t);
    }
  }

  template <int MR, int NP, bool kNear, int NPF>
  static __attribute__((always_inline)) inline void row_tile(const LinearTile& t) {
    constexpr int NV = NP * kVecs, kStride = sums_stride<kNear>();
    const uint8_t* scale = t.x + t.x_padded;
    I acc[MR][NV];
    if (t.resume) {
#pragma GCC unroll 16
      for (int r = 0; r < MR; r++) {
#pragma GCC unroll 16
        for (int v = 0; v < NV; v++) acc[r][v] = load_bits(t.c + r * kStride + v * kLanes);
      }
    } else {
      start(acc, t, scale + sizeof(float));
    }
    walk<MR, NV, kNear, NPF>(acc, t, t.u0, t.u1);
#pragma GCC unroll 16
    for (int r = 0; r < MR; r++) {
      const F s =
          set1(*reinterpret_cast<const float*>(scale + static_cast<size_t>(r) * t.x_stride));
#pragma GCC unroll 16
      for (int v = 0; v < NV; v++) {
        float* c = t.c + r * kStride + v * kLanes;
        if (t.last) {
          store(c, mul(to_float(acc[r][v]), mul(channel_scale(t, v), s)));
        } else {
          store_bits(c, acc[r][v]);
        }
      }
    }
  }

  template <int MR, int NP, bool kNear, int NPF>
  static __attribute__((always_inline)) inline void group_tile(const LinearTile& t) {
    constexpr int NV = NP * kVecs, kStride = sums_stride<kNear>();
    constexpr bool kKept = 2 * MR * NP <= kSums;
    F f[MR][NV];
#pragma GCC unroll 16
    for (int r = 0; r < MR; r++) {
#pragma GCC unroll 16
      for (int v = 0; v < NV; v++) {
        float* c = t.c + r * kStride + v * kLanes;
        f[r][v] = t.resume ? load(c) : zero();
        if constexpr (!kKept) store(c, f[r][v]);
      }
    }
    const uint8_t* scales = t.x + t.x_padded + t.u0 / kGroupQuads * 4;
    const int64_t to_sums = t.x_padded / (4 * kGroupQuads) * 4;
    for (int64_t u = t.u0; u < t.u1; u += kGroupQuads, scales += 4) {
      I acc[MR][NV];
      start(acc, t, scales + to_sums);
      walk<MR, NV, kNear, NPF>(acc, t, u, u + kGroupQuads < t.u1 ? u + kGroupQuads : t.u1);
#pragma GCC unroll 16
      for (int r = 0; r < MR; r++) {
        const F s =
            set1(*reinterpret_cast<const float*>(scales + static_cast<size_t>(r) * t.x_stride));
#pragma GCC unroll 16
        for (int v = 0; v < NV; v++) {
          float* c = t.c + r * kStride + v * kLanes;
          const F sum = fma(to_float(acc[r][v]), s, kKept ? f[r][v] : load(c));
          if constexpr (kKept) {
            f[r][v] = sum;
          } else {
            store(c, sum);
          }
        }
      }
    }
    if constexpr (!kKept) {
      if (!t.last) return;
    }
#pragma GCC unroll 16
    for (int r = 0; r < MR; r++) {
#pragma GCC unroll 16
      for (int v = 0; v < NV; v++) {
        float* c = t.c + r * kStride + v * kLanes;
        const F sum = kKept ? f[r][v] : load(c);
        store(c, t.last ? mul(sum, channel_scale(t, v)) : sum);
      }
    }
  }
};

inline size_t channel_panel_bytes(int64_t k) noexcept {
  return static_cast<size_t>((k + 3) / 4 * 64) + kChannelScales;
}

// The scale of one source row: its own, or largest magnitude / 127.
inline float channel_scale_of(const PackArgs& a, int row) {
  if (!a.rows[row]) return 0.0f;
  if (a.source == SourceType::s8_channel) return read_as<float>(a.rows[row]);
  alignas(64) float x[kChunk64];
  F top = zero();
  for (int64_t k0 = 0; k0 < a.k; k0 += kChunk64) {
    const int n = static_cast<int>(a.k - k0 < kChunk64 ? a.k - k0 : kChunk64);
    memset(x, 0, sizeof x);
    read_floats(a.rows[row], a.source, k0, n, x);
    for (int i = 0; i < kChunk64; i += kLanes)
      top = max(top, max(load(x + i), sub(zero(), load(x + i))));
  }
  return reduce_max(top) / 127.0f;
}

// Elements [k0, k0 + n) of a row as bytes with zero 128; those up to kChunk64 as zeros.
inline void channel_bytes(const PackArgs& a, int row, int64_t k0, int n, float scale,
                          uint8_t* out) {
  alignas(64) int8_t q[kChunk64] = {};
  if (a.rows[row] && a.source == SourceType::s8_channel) {
    memcpy(q, static_cast<const int8_t*>(a.rows[row]) + 4 + k0, static_cast<size_t>(n));
  } else if (a.rows[row] && scale > 0.0f) {
    alignas(64) float x[kChunk64] = {};
    read_floats(a.rows[row], a.source, k0, n, x);
    const F s = set1(scale);
    for (int i = 0; i < kChunk64; i += kLanes) store_s8(q + i, round(div(load(x + i), s)));
  }
  for (int i = 0; i < kChunk64; i++) out[i] = static_cast<uint8_t>(q[i] ^ -128);
}

static void pack_channel(const PackArgs& a) noexcept {
  float scales[kPanel];
  for (int r = 0; r < kPanel; r++) scales[r] = channel_scale_of(a, r);
  uint8_t* to = static_cast<uint8_t*>(a.panel);
  alignas(64) uint8_t rows[kPanel][kChunk64];
  for (int64_t k0 = 0; k0 < a.k; k0 += kChunk64) {
    const int n = static_cast<int>(a.k - k0 < kChunk64 ? a.k - k0 : kChunk64);
    for (int r = 0; r < kPanel; r++) channel_bytes(a, r, k0, n, scales[r], rows[r]);
    for (int i = 0; i < n; i += 4) {
      for (int r = 0; r < kPanel; r++, to += 4) memcpy(to, &rows[r][i], 4);
    }
  }
  memcpy(to, scales, sizeof scales);
}

static void channel_row(const PackedWeight& w, int64_t n, float* out) noexcept {
  const uint8_t* panel = w.data + static_cast<size_t>(n / kPanel) * w.panel_bytes;
  const int64_t column = n % kPanel;
  const float scale =
      read_as<float>(panel + w.panel_bytes - kChannelScales + static_cast<size_t>(column) * 4);
  for (int64_t k = 0; k < w.k; k++) {
    out[k] = scale * static_cast<float>(panel[(k / 4 * kPanel + column) * 4 + k % 4] - 128);
  }
}

template <int64_t kGroupQuads>
constexpr LinearKernel channel_kernel() {
  using Kind = Channel<kGroupQuads>;
  return {Kind::kAct, channel_panel_bytes, pack_channel, run_linear<Kind>, channel_row};
}

}  // namespace
}  // namespace CPUSERVE_NS
