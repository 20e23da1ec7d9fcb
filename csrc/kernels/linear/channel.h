// w8_channel and w8_channel_g128: int8 weights with one scale per output column,
// multiplied by int8 rows with one scale per row or per 128 elements of K.
//
//   w8_channel:       f = float(sum_k q_w q_x - 128 sum_x) * (s_w s_x), integers over the whole row
//   w8_channel_g128:  f = fma(float(sum_k q_w q_x - 128 sum_x), s_x, f) per group, then f * s_w
//
// f is a sum, q_w and s_w are codes and scales of weights, q_x and s_x codes and scales of rows,
// and sum_x is the sum of q_x over the same elements (table/weights.h).
//
// A tile keeps the int32 sums of MR rows x NP panels in registers and processes one quad
// (4 elements of K) at a time. If a row has one scale, the loop over K has only products.
// If a row has a scale for each group, a tile also has fp32 sums: in registers if there are enough,
// otherwise in the buffer `c`, which stays in L1.
#pragma once
#include "kernels/linear/group.h"

namespace CPUSERVE_NS {
namespace {

constexpr size_t kChannelScales = kPanel * sizeof(float);  // bytes of scales at the end of a panel

// The addresses that a tile has reached along K: x in its first row, w in its first panel,
// and `ahead` in the weights to prefetch.
struct ChannelAt {
  const uint8_t *x, *w, *ahead;
};

// Adds the products of the next `quads` quads of K (4 elements each) to the integer sums `acc`,
// and prefetches with each quad one cache line of each of NPF panels.
template <int NPF, int MR, int NV>
CPUSERVE_INLINE void channel_products(I (&acc)[MR][NV], ChannelAt& at, int64_t quads,
                                      const LinearTile& t) {
  const size_t x_stride = t.x_stride, panel_bytes = t.panel_bytes;
  const bool near = t.fetch_near;
  for (const uint8_t* end = at.x + quads * 4; at.x != end;) {
#pragma GCC unroll 4
    for (int p = 0; p < NPF; p++) {
      fetch_to(near, at.ahead + static_cast<size_t>(p) * panel_bytes);
    }
    Q wq[NV];
#pragma GCC unroll 16
    for (int v = 0; v < NV; v++) {
      wq[v] =
          load_quads(at.w + static_cast<size_t>(v / kVecs) * panel_bytes + v % kVecs * kLanes * 4);
    }
#pragma GCC unroll 16
    for (int r = 0; r < MR; r++) {
      const Q a =
          set1_quad(reinterpret_cast<const int8_t*>(at.x + static_cast<size_t>(r) * x_stride));
#pragma GCC unroll 16
      for (int v = 0; v < NV; v++) acc[r][v] = dot8(acc[r][v], wq[v], a);
    }
    at.x += 4;
    at.w += kPanel * 4;
    if constexpr (NPF > 0) at.ahead += kPanel * 4;
  }
}

// Does the same as channel_products for a tile over a K block. Such a tile prefetches
// cache lines of the next K block after every t.fetch_every quads.
template <int MR, int NV>
CPUSERVE_INLINE void channel_block(I (&acc)[MR][NV], ChannelAt& at, int64_t quads,
                                   const LinearTile& t) {
  for (int64_t n; quads > 0; quads -= n, at.ahead += kPanel * 4) {
    n = quads < t.fetch_every ? quads : t.fetch_every;
    fetch_ahead_lines(t, at.ahead);
    channel_products<0>(acc, at, n, t);
  }
}

// Returns the scales of the columns in vector v of a tile.
CPUSERVE_INLINE F channel_scale(const LinearTile& t, int v) {
  const uint8_t* panel = t.w + static_cast<size_t>(v / kVecs) * t.panel_bytes;
  const uint8_t* scales = panel + t.panel_bytes - kChannelScales;
  return load(reinterpret_cast<const float*>(scales) + v % kVecs * kLanes);
}

// kGroupQuads: the quads (4 elements of K) of a row that share one scale; 0: the whole row does.
template <int64_t kGroupQuads>
struct Channel {
  static constexpr ActFormat kAct = kGroupQuads ? ActFormat::q8g128 : ActFormat::q8row;
  static constexpr int64_t kUnitBytes = kPanel * 4;
  static constexpr int64_t kWholeUnits = kGroupQuads ? kGroupQuads : 1;
  static constexpr bool kSharesHeaders = false, kWidens = false;
  static constexpr bool kUnpacks = false;
  // K blocks stay in L1. The loop of a tile has little more than products,
  // so reading rows and weights from L2 would limit its speed,
  // especially while the next K block is prefetched from memory.
  // On Granite Rapids, 16 to 32 rows run 1.1 times as fast with K blocks in L1 as in L2.
  static constexpr bool kNearBlocks = true, kSizesCutPasses = false;
  static constexpr bool kLineUnits = true;
  static constexpr int kSums = kGroupVecs / kVecs;
  static constexpr int kRows = kSums < 6 ? kSums : 6;
  // With one scale per group, a tile has half as many sums, so that its fp32 sums stay
  // in registers. A 6 x 4 tile would have too many fp32 sums for the registers, and loading
  // and storing them would be a third of the cost of a group, besides the cost of its products.
  static constexpr int kTile = kGroupQuads && kSums >= 12 ? kSums / 2 : kSums;
  static constexpr int kPanels = kTile / kRows > 4 ? 4 : kTile / kRows;
  static constexpr int kHalfRows = kPanels == 4 ? 2 * kRows : kRows;
  // One pass over the weights takes at most 12 rows: a tile of 16 rows and one panel would load
  // an operand for nearly every product, and run at 0.9 times the rate of tiles over a strip.
  static constexpr int kStreamRows = kSums >= 24 ? 12 : kRows;
  // A tile has two panels even if registers suffice for three. A task has up to four panels,
  // and a tile of the fourth panel alone would have too few sums to hide the latency of a product:
  // with 8 rows, it would read 27 GB/s instead of 32 GB/s.
  static constexpr int stream_panels(int rows) {
    const int n = kSums / rows;
    return n > 4 ? 4 : n == 3 ? 2 : n;
  }
  static int64_t units(int64_t k) { return (k + 3) / 4; }

  // Returns the addresses of tile `t` at unit u of K (a unit is 4 elements of K).
  // The argument `ahead` is the address that the first unit of the tile, t.u0, prefetches.
  static ChannelAt from(const LinearTile& t, int64_t u, const uint8_t* ahead) {
    return {t.x + u * 4, t.w + u * kUnitBytes, ahead + (u - t.u0) * kUnitBytes};
  }

  template <int MR, int NV>
  static __attribute__((always_inline)) inline void start(I (&acc)[MR][NV], const uint8_t* sums,
                                                          size_t x_stride) {
#pragma GCC unroll 16
    for (int r = 0; r < MR; r++) {
      const I first = zero_term<kDot8Zero>(sums + static_cast<size_t>(r) * x_stride);
#pragma GCC unroll 16
      for (int v = 0; v < NV; v++) acc[r][v] = first;
    }
  }

  template <int MR, int NP, bool kNear, int NPF>
  static CPUSERVE_ONE_REGION __attribute__((noinline)) void tile(const LinearTile& t) {
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
      start(acc, scale + sizeof(float), t.x_stride);
    }
    ChannelAt at = from(t, t.u0, t.ahead0);
    if constexpr (kNear) {
      channel_products<NPF>(acc, at, t.split - t.u0, t);
      at = from(t, t.split, t.ahead1);
      channel_products<NPF>(acc, at, t.u1 - t.split, t);
    } else {
      channel_block(acc, at, t.u1 - t.u0, t);
    }
    float* const c = t.c;  // a local copy: stores to it cannot change `t`
    if (!t.last) {
#pragma GCC unroll 16
      for (int r = 0; r < MR; r++) {
#pragma GCC unroll 16
        for (int v = 0; v < NV; v++) store_bits(c + r * kStride + v * kLanes, acc[r][v]);
      }
      return;
    }
    F weight_scale[NV];
#pragma GCC unroll 16
    for (int v = 0; v < NV; v++) weight_scale[v] = channel_scale(t, v);
    const size_t x_stride = t.x_stride;
#pragma GCC unroll 16
    for (int r = 0; r < MR; r++) {
      const F s = set1(*reinterpret_cast<const float*>(scale + static_cast<size_t>(r) * x_stride));
#pragma GCC unroll 16
      for (int v = 0; v < NV; v++) {
        store(c + r * kStride + v * kLanes, mul(to_float(acc[r][v]), mul(weight_scale[v], s)));
      }
    }
  }

  template <int MR, int NP, bool kNear, int NPF>
  static __attribute__((always_inline)) inline void group_tile(const LinearTile& t) {
    constexpr int NV = NP * kVecs, kStride = sums_stride<kNear>();
    constexpr bool kKept = 2 * MR * NP <= kSums;
    float* c = t.c;
    const bool resume = t.resume;
    const size_t x_stride = t.x_stride;
    F f[MR][NV];
#pragma GCC unroll 16
    for (int r = 0; r < MR; r++) {
#pragma GCC unroll 16
      for (int v = 0; v < NV; v++) {
        f[r][v] = resume ? load(c + r * kStride + v * kLanes) : zero();
        if constexpr (!kKept) store(c + r * kStride + v * kLanes, f[r][v]);
      }
    }
    const uint8_t* scales = t.x + t.x_padded + t.u0 / kGroupQuads * 4;
    const int64_t to_sums = t.x_padded / (4 * kGroupQuads) * 4, end = t.u1;
    ChannelAt at = from(t, t.u0, t.ahead0);
    for (int64_t u = t.u0; u < end; u += kGroupQuads, scales += 4) {
      // Groups of K from unit `split` on prefetch from ahead1: weights of the next panels.
      // The group that contains `split` may prefetch from ahead0 or from ahead1.
      if (kNear && u >= t.split) at.ahead = t.ahead1 + (u - t.u0) * kUnitBytes;
      I acc[MR][NV];
      start(acc, scales + to_sums, x_stride);
      opaque(c);  // otherwise gcc keeps all sums of c in registers and spills them to the stack
      const int64_t quads = end - u < kGroupQuads ? end - u : kGroupQuads;
      if constexpr (kNear) {
        channel_products<NPF>(acc, at, quads, t);
      } else {
        channel_block(acc, at, quads, t);
      }
#pragma GCC unroll 16
      for (int r = 0; r < MR; r++) {
        const F s =
            set1(*reinterpret_cast<const float*>(scales + static_cast<size_t>(r) * x_stride));
#pragma GCC unroll 16
        for (int v = 0; v < NV; v++) {
          float* kept = c + r * kStride + v * kLanes;
          const F sum = fma(to_float(acc[r][v]), s, kKept ? f[r][v] : load(kept));
          if constexpr (kKept) {
            f[r][v] = sum;
          } else {
            store(kept, sum);
          }
        }
      }
    }
    F weight_scale[NV];
#pragma GCC unroll 16
    for (int v = 0; v < NV; v++) weight_scale[v] = t.last ? channel_scale(t, v) : set1(1.0f);
#pragma GCC unroll 16
    for (int r = 0; r < MR; r++) {
#pragma GCC unroll 16
      for (int v = 0; v < NV; v++) {
        float* kept = c + r * kStride + v * kLanes;
        store(kept, mul(kKept ? f[r][v] : load(kept), weight_scale[v]));
      }
    }
  }
};

inline size_t channel_panel_bytes(int64_t k) noexcept {
  return static_cast<size_t>((k + 3) / 4 * 64) + kChannelScales;
}

// Returns the scale of one source row: the scale that the row stores (s8_channel),
// or the largest magnitude of the row's elements divided by 127.
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

// Writes elements [k0, k0 + n) of a source row as int8 codes plus kZero (128 or 0),
// so that the byte kZero represents 0. The bytes from n up to kChunk64 become kZero.
template <int kZero>
void channel_bytes(const PackArgs& a, int row, int64_t k0, int n, float scale, uint8_t* out) {
  alignas(64) int8_t q[kChunk64] = {};
  if (a.rows[row] && a.source == SourceType::s8_channel) {
    memcpy(q, static_cast<const int8_t*>(a.rows[row]) + 4 + k0, static_cast<size_t>(n));
  } else if (a.rows[row] && scale > 0.0f) {
    alignas(64) float x[kChunk64] = {};
    read_floats(a.rows[row], a.source, k0, n, x);
    const F s = set1(scale);
    for (int i = 0; i < kChunk64; i += kLanes) store_s8(q + i, round(div(load(x + i), s)));
  }
  for (int i = 0; i < kChunk64; i++) out[i] = static_cast<uint8_t>(q[i] + kZero);
}

// Packs a panel from 16 source rows, which become the columns of the panel.
//   kSide  the number of adjacent bytes of a column in the packed layout
//   kZero  the byte that represents a weight of 0
template <int kSide = 4, int kZero = 128>
void pack_channel(const PackArgs& a) noexcept {
  float scales[kPanel];
  for (int r = 0; r < kPanel; r++) scales[r] = channel_scale_of(a, r);
  uint8_t* to = static_cast<uint8_t*>(a.panel);
  alignas(64) uint8_t rows[kPanel][kChunk64];
  for (int64_t k0 = 0; k0 < a.k; k0 += kChunk64) {
    const int n = static_cast<int>(a.k - k0 < kChunk64 ? a.k - k0 : kChunk64);
    for (int r = 0; r < kPanel; r++) channel_bytes<kZero>(a, r, k0, n, scales[r], rows[r]);
    for (int i = 0; i < n; i += kSide) {
      for (int r = 0; r < kPanel; r++, to += kSide) memcpy(to, &rows[r][i], kSide);
    }
  }
  memcpy(to, scales, sizeof scales);
}

template <int kSide = 4, int kZero = 128>
void channel_row(const PackedWeight& w, int64_t n, float* out) noexcept {
  const uint8_t* panel = w.data + static_cast<size_t>(n / kPanel) * w.panel_bytes;
  const int64_t column = n % kPanel;
  const float scale =
      read_as<float>(panel + w.panel_bytes - kChannelScales + static_cast<size_t>(column) * 4);
  for (int64_t k = 0; k < w.k; k++) {
    const uint8_t q = panel[(k / kSide * kPanel + column) * kSide + k % kSide];
    out[k] = scale * static_cast<float>(static_cast<int8_t>(q - kZero));
  }
}

template <int64_t kGroupQuads>
constexpr LinearKernel channel_kernel() {
  using Kind = Channel<kGroupQuads>;
  return {Kind::kAct,        channel_panel_bytes, pack_channel<>,         run_linear<Kind>,
          channel_row<>,     Kind::kRows,         Kind::kPanels * kPanel, Kind::kPanels,
          Kind::kStreamRows, linear_block_k<Kind>};
}

}  // namespace
}  // namespace CPUSERVE_NS
