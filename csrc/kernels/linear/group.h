// The tile of the group kinds: int8 rows (q8g32, q8g128) times weights in groups
// of 32 or 128 elements of K. All elements of a row in one group have the same scale.
//
//   for each group:        f = fma(float(sum_k q_w q_x - kZero sum_x), s_w s_x, f)
//   then, with a minimum:  f = fma(min, s_x float(sum_x), f)
//
// f is a sum. q_w and s_w are codes and scales of weights, q_x and s_x codes and scales of rows,
// and sum_x is the sum of q_x over the group. linear/driver.h explains the other terms.
//
// A unit of a panel is { header of 16 scales and minima; lines of one or several groups }.
// A kind W defines kAct, kGroup, kUnit (weights of a column in a unit), kUnitBytes,
// kMinBytes, least() and kZero. It inherits the layout of quads (4 elements of K) in a 64-byte line
// from EightBits or FourBits. Integer sums are exact, so their order never changes a bit.
// The fp32 sums add groups in ascending order in every shape of tile.
#pragma once
#include "kernels/linear/driver.h"
#include "kernels/linear/source.h"

namespace CPUSERVE_NS {
namespace {

constexpr int kScaleBytes = kPanel * 2;

// The layout of 8-bit codes in lines, and their products. A line has one quad of each column.
struct EightBits {
  static constexpr int kQuadsPerLine = 1;
  using Sum = I;
  static constexpr bool kStartsFromAny = true;
  __attribute__((always_inline)) static inline I start() { return izero(); }
  __attribute__((always_inline)) static inline I finish(I x) { return x; }
  __attribute__((always_inline)) static inline Q quads(const uint8_t* line, int) {
    return load_quads(line);
  }
  __attribute__((always_inline)) static inline I dot(I acc, Q w, Q a) { return dot8(acc, w, a); }

  static int code(const uint8_t* lines, int column, int i) {
    return lines[(i / 4 * kPanel + column) * 4 + i % 4];
  }
};
// The layout and products of 4-bit codes.
// A line has two quads of each of 16 columns, so that one mask and one shift extract both quads.
// Byte j of column c in line r has k = 8 r + j in its low and k = 8 r + 4 + j in its high nibble.
struct FourBits {
  static constexpr int kQuadsPerLine = 2;
  using Sum = S;
  static constexpr bool kStartsFromAny = kWideS;
  __attribute__((always_inline)) static inline S start() { return szero(); }
  __attribute__((always_inline)) static inline I finish(S x) { return widen(x); }
  __attribute__((always_inline)) static inline Q quads(const uint8_t* line, int high) {
    return high ? high_nibbles(load_quads(line)) : low_nibbles(load_quads(line));
  }
  __attribute__((always_inline)) static inline S dot(S acc, Q w, Q a) { return sdot(acc, w, a); }

  static int code(const uint8_t* lines, int column, int i) {
    const int byte = lines[(i / 8 * kPanel + column) * 4 + i % 4];
    return i / 4 % 2 ? byte >> 4 : byte & 15;
  }
};

// The sizes of a unit of kind W: the bytes of its header, and its number of groups.
template <class W>
struct UnitOf {
  static_assert(W::kUnit % W::kGroup == 0, "a unit has whole groups");
  static constexpr int kHeader = kScaleBytes + W::kMinBytes, kGroups = W::kUnit / W::kGroup;
  static constexpr int kGroupLines = W::kGroup / 4 / W::kQuadsPerLine;
  static constexpr int kGroupBytes = kGroupLines * 64;
  static_assert(W::kUnitBytes == kHeader + kGroups * kGroupBytes, "a unit has nothing else");
};

// Returns the minima of columns [column, column + kLanes), which are fp16 in the header of a unit.
CPUSERVE_INLINE F half_minima(const uint8_t* header, int column) {
  return load_f16(reinterpret_cast<const uint16_t*>(header + kScaleBytes) + column);
}

// Returns -kZero * sum_x in every lane, where sum_x is the int32 at `sum`. kZero is 0, 8 or 128.
template <int kZero>
CPUSERVE_INLINE I zero_term(const uint8_t* sum) {
  const int32_t* at = reinterpret_cast<const int32_t*>(sum);
  if constexpr (kZero == 8) return isub(izero(), shl<3>(iload1(at)));
  if constexpr (kZero == 128) return isub(izero(), shl<7>(iload1(at)));
  return izero();
}

// The addresses of the group that a tile computes next, in its rows and in its weights.
// After each group, all pointers advance to the next group.
struct GroupAt {
  const uint8_t *x, *scales, *sums;  // in the first row: codes, scale and sum of the group
  size_t x_stride;
  const uint8_t* w;  // in the first panel: kHeader bytes before the lines of the group
  size_t panel_bytes;
  const uint8_t* ahead;  // in the first panel: the address to prefetch during this group
};

// Prefetches a cache line of a later group in each of NPF panels; `line` is the one in the first.
// Lines are prefetched one at a time between products: prefetching all lines of a group together
// would fill the miss buffers of the core, and later loads would wait. Lines are prefetched to L2,
// even if memory is the limit, because a prefetch to L1 occupies one of the 10 to 16 miss buffers
// of L1 for the latency of memory, which limits a core to a few bytes a cycle.
// On two cores of Granite Rapids with one, two and four rows, w4m_g128 reads 79, 77 and 71 %
// of the bandwidth with prefetches to L1, and 91, 90 and 82 % with prefetches to L2.
template <int NPF>
CPUSERVE_INLINE void fetch_line(const GroupAt& at, const uint8_t* line) {
  opaque(line);
#pragma GCC unroll 4
  for (int p = 0; p < NPF; p++) {
    prefetch_l2(line + static_cast<size_t>(p) * at.panel_bytes);
  }
  keep_here();
}

// Adds the products of a quad (4 elements of K) for MR rows x NV vectors of columns: the first quad
// (high = 0) or the second quad (high = 1) of the line at `lines`.
// For the first quad of a line, the function also prefetches the line at `ahead`.
template <class W, int NPF, int MR, int NV>
CPUSERVE_INLINE void quad_products(typename W::Sum (&acc)[MR][NV], const GroupAt& at,
                                   const uint8_t* ahead, int high, const uint8_t* lines,
                                   const uint8_t* quads) {
  // Each quad has one base pointer; otherwise gcc keeps offsets for each quad and row on the stack.
  opaque(lines);
  opaque(quads);
  if (high == 0) fetch_line<NPF>(at, ahead);
  Q wq[NV];
#pragma GCC unroll 16
  for (int v = 0; v < NV; v++) {
    const uint8_t* at_v =
        lines + static_cast<size_t>(v / kVecs) * at.panel_bytes + v % kVecs * kLanes * 4;
    wq[v] = W::quads(at_v, high);
  }
#pragma GCC unroll 16
  for (int r = 0; r < MR; r++) {
    const Q a =
        set1_quad(reinterpret_cast<const int8_t*>(quads + static_cast<size_t>(r) * at.x_stride));
#pragma GCC unroll 16
    for (int v = 0; v < NV; v++) acc[r][v] = add_product<W, MR * NV>(acc[r][v], wq[v], a);
  }
}

// Adds the products of eight quads (32 elements of K) of a group, from quad number `quad0` on.
template <class W, int NPF, int MR, int NV>
CPUSERVE_INLINE void octet_products(typename W::Sum (&acc)[MR][NV], const GroupAt& at, int quad0) {
  constexpr int kQuads = W::kQuadsPerLine;
  const uint8_t* w = at.w + UnitOf<W>::kHeader + quad0 / kQuads * 64;
  const uint8_t* x = at.x + quad0 * 4;
  const uint8_t* ahead = at.ahead + quad0 / kQuads * 64;
  if constexpr (loops_over_quads(MR * NV) &&
                (kQuads == 1 || kVecs > 1 || (W::kUnit > 32 && MR * NV >= 8))) {
    constexpr int kSecond = 1 / kQuads * 64, kPair = 2 / kQuads * 64;
#pragma GCC unroll 1
    for (int pair = 0; pair < 4; pair++) {
      quad_products<W, NPF>(acc, at, ahead, 0, w, x);
      quad_products<W, NPF>(acc, at, ahead + kSecond, 1 % kQuads, w + kSecond, x + 4);
      opaque(w += kPair);
      opaque(x += 8);
      opaque(ahead += kPair);
    }
  } else {
#pragma GCC unroll 8
    for (int quad = 0; quad < 8; quad++) {
      const int line = quad / kQuads * 64;
      quad_products<W, NPF>(acc, at, ahead + line, quad % kQuads, w + line, x + quad * 4);
    }
  }
}

// Computes the integer sums of one group for MR rows x NV vectors of columns.
template <class W, int NPF, int MR, int NV>
CPUSERVE_INLINE void group_sums(I (&out)[MR][NV], const GroupAt& at) {
  constexpr bool kStart = W::kStartsFromAny && W::kZero != 0;
  constexpr int kQuads = W::kGroup / 4;
  typename W::Sum acc[MR][NV];
#pragma GCC unroll 16
  for (int r = 0; r < MR; r++) {
    typename W::Sum first = W::start();
    if constexpr (kStart) {
      first = zero_term<W::kZero>(at.sums + static_cast<size_t>(r) * at.x_stride);
    }
#pragma GCC unroll 16
    for (int v = 0; v < NV; v++) acc[r][v] = first;
  }
  octet_products<W, NPF>(acc, at, 0);
  if constexpr (W::kStartsFromAny) {
#pragma GCC unroll 1
    for (int quad = 8; quad < kQuads; quad += 8) {
      octet_products<W, NPF>(acc, at, quad);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < MR; r++) {
#pragma GCC unroll 16
    for (int v = 0; v < NV; v++) {
      out[r][v] = W::finish(acc[r][v]);
      if constexpr (!kStart && W::kZero != 0) {
        out[r][v] =
            iadd(out[r][v], zero_term<W::kZero>(at.sums + static_cast<size_t>(r) * at.x_stride));
      }
    }
  }
  if constexpr (!W::kStartsFromAny) {  // 16-bit sums hold the products of at most eight quads
#pragma GCC unroll 1
    for (int quad = 8; quad < kQuads; quad += 8) {
#pragma GCC unroll 16
      for (int r = 0; r < MR; r++) {
#pragma GCC unroll 16
        for (int v = 0; v < NV; v++) acc[r][v] = W::start();
      }
      octet_products<W, NPF>(acc, at, quad);
#pragma GCC unroll 16
      for (int r = 0; r < MR; r++) {
#pragma GCC unroll 16
        for (int v = 0; v < NV; v++) out[r][v] = iadd(out[r][v], W::finish(acc[r][v]));
      }
    }
  }
}

// Scales the integer sums of one group and adds them to the fp32 sums,
// which are in registers (kKept) or in memory at `c`, with kStride floats from row to row.
// `header` points to the header of the unit in the first panel.
template <class W, int MR, int NV, bool kKept, int kStride>
CPUSERVE_INLINE void add_group(F (&f)[MR][NV], I (&dot)[MR][NV], const GroupAt& at,
                               const uint8_t* header, float* c) {
  F scale[NV], least[NV];
#pragma GCC unroll 16
  for (int v = 0; v < NV; v++) {
    const uint8_t* panel = header + static_cast<size_t>(v / kVecs) * at.panel_bytes;
    const int column = v % kVecs * kLanes;
    scale[v] = load_f16(reinterpret_cast<const uint16_t*>(panel) + column);
    if constexpr (W::kMinBytes != 0) least[v] = W::least(panel, column, scale[v]);
  }
#pragma GCC unroll 16
  for (int r = 0; r < MR; r++) {
    const size_t row = static_cast<size_t>(r) * at.x_stride;
    const F s = set1(*reinterpret_cast<const float*>(at.scales + row));
    F m = zero();
    if constexpr (W::kMinBytes != 0) {
      m = mul(s, to_float(iload1(reinterpret_cast<const int32_t*>(at.sums + row))));
    }
#pragma GCC unroll 16
    for (int v = 0; v < NV; v++) {
      float* kept = c + r * kStride + v * kLanes;
      F sum = kKept ? f[r][v] : load(kept);
      sum = fma(to_float(dot[r][v]), mul(scale[v], s), sum);
      if constexpr (W::kMinBytes != 0) sum = fma(least[v], m, sum);
      if constexpr (kKept) {
        f[r][v] = sum;
      } else {
        store(kept, sum);
      }
    }
  }
}

template <class W>
struct Grouped {
  static constexpr ActFormat kAct = W::kAct;
  static constexpr int64_t kUnitBytes = W::kUnitBytes, kWholeUnits = 1;
  static constexpr bool kSharesHeaders = false, kWidens = false, kNearBlocks = false;
  static constexpr bool kSizesCutPasses = false, kLineUnits = false, kUnpacks = false;
  // A group of 8-bit codes takes twice as long to read as a group of 4-bit codes, but as long
  // to multiply. So prefetching panels in turn (share_units) pays off up to more rows of a linear.
  // If dot products are emulated, multiplying takes much longer than reading. On Cascade Lake
  // at AVX-512, 8 to 16 rows of 4-bit kinds then run 1.03 to 1.29 times as fast without such turns.
  static constexpr int kTurns = kEmulatesDots                                    ? 0
                                : W::kQuadsPerLine == 1 && W::kUnit == W::kGroup ? 4
                                                                                 : 3;
  // A tile of at most kInRegisters sums keeps its fp32 sums and its integer sums in registers.
  // Larger tiles keep the fp32 sums in the buffer `c`, which stays in L1:
  // each sum is loaded and stored once for the 8 products of a group of 32.
  static constexpr int kInRegisters = kGroupVecs / 2 / kVecs;
  static constexpr int kInMemory = kGroupVecs / kVecs;
  // In one pass over the weights, a tile has one panel, because a core reads one stream
  // of memory faster than several streams, especially if the streams are short.
  // With K = 896, one row of w4m_g128 reads 98 % of the bandwidth of a plain read with one panel
  // at a time, and 79 % with two panels side by side.
  static constexpr int stream_panels(int) { return 1; }
  // The rows of a tile with two panels. A tile of 12 rows uses each unpacked code for twice
  // as many products as a tile of 6 rows, but its fp32 sums do not fit in registers
  // and are in memory. With groups of 128, each sum is loaded and stored once for 32 products,
  // and 12 rows are better: 24 to 512 rows of w4m_g128 run at 66 to 69 % of the dot-product peak
  // of Granite Rapids, and at 62 to 65 % with tiles of 6 rows.
  // With groups of 32, each sum is loaded and stored once for 8 products, and 6 rows are better:
  // 64 rows of w8_g32 run at 55 % of the dot-product peak, and at 53 % with tiles of 12 rows.
  static constexpr int kTall = W::kGroup == kWideGroup && kInMemory >= 24 ? 12 : 6;
  // A tile has at least 2 int8 rows, because a row of activations may consist of two (its terms),
  // even at level scalar, where the registers are too few for the sums of two rows.
  static constexpr int kRows = kVecs == 1 ? kTall : kInMemory < 2 ? 2 : kInMemory;
  // Up to this many rows take one pass over the weights, with tiles of one panel.
  // With more rows, computing takes longer than reading. Several tiles that read a strip
  // from the cache are then faster than one tall tile with fp32 sums in memory.
  // Measured with 12 rows of w4m: 17 GB/s with several tiles, and 15 GB/s with one tile.
  static constexpr int kStreamRows = kInRegisters < 12 ? kRows : W::kQuadsPerLine == 1 ? 10 : 8;
  static constexpr int kPanels = kInMemory / kRows < 2 ? 1 : 2;
  static constexpr int kHalfRows = kRows;
  static int64_t units(int64_t k) { return (k + W::kUnit - 1) / W::kUnit; }

  template <int MR, int NP, bool kNear, int NPF>
  static __attribute__((noinline)) void tile(const LinearTile& t) {
    using Unit = UnitOf<W>;
    constexpr int NV = NP * kVecs, kStride = sums_stride<kNear>();
    constexpr bool kKept = MR * NP <= kInRegisters;
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
    const uint8_t* scales = t.x + t.x_padded;
    float* const c = t.c;
    const int64_t group = t.u0 * Unit::kGroups;
    GroupAt at = {t.x + t.u0 * W::kUnit,
                  scales + group * 4,
                  scales + (t.x_padded / W::kGroup + group) * 4,
                  t.x_stride,
                  t.w + t.u0 * kUnitBytes,
                  t.panel_bytes,
                  nullptr};
    TileFetch<kNear> fetch(t, kUnitBytes);
    const int64_t ahead_step = fetch.step();
    for (int64_t u = t.u0; u < t.u1;) {
      for (const int64_t end = fetch.next(u, at.w, at.ahead); u < end; u++) {
        const uint8_t* header = at.w;
        // The loop is not unrolled, so that the code has one group even if a unit has many groups.
#pragma GCC unroll 1
        for (int i = 1; i <= Unit::kGroups; i++) {
          const bool last = i == Unit::kGroups;
          I dot[MR][NV];
          group_sums<W, NPF>(dot, at);
          if (last) fetch_line<NPF>(at, at.ahead + Unit::kGroupLines * 64);
          add_group<W, MR, NV, kKept, kStride>(f, dot, at, header, c);
          opaque(at.x += W::kGroup);
          opaque(at.scales += 4);
          opaque(at.sums += 4);
          opaque(at.w += Unit::kGroupBytes + (last ? Unit::kHeader : 0));
          opaque(at.ahead +=
                 last ? ahead_step - (Unit::kGroups - 1) * Unit::kGroupBytes : Unit::kGroupBytes);
        }
      }
    }
    if constexpr (kKept) {
#pragma GCC unroll 16
      for (int r = 0; r < MR; r++) {
#pragma GCC unroll 16
        for (int v = 0; v < NV; v++) store(t.c + r * kStride + v * kLanes, f[r][v]);
      }
    }
  }
};

template <class W>
size_t group_panel_bytes(int64_t k) noexcept {
  return static_cast<size_t>(Grouped<W>::units(k) * W::kUnitBytes);
}

// Returns the address of unit u of a panel.
template <class W>
inline const uint8_t* unit_at(const PackedWeight& w, int64_t panel, int64_t u) {
  return w.data + static_cast<size_t>(panel) * w.panel_bytes + u * W::kUnitBytes;
}

template <class W>
void pack_group(const PackArgs& a) noexcept {
  const int64_t units = Grouped<W>::units(a.k);
  for (int64_t u = 0; u < units; u++) {
    uint8_t* to = static_cast<uint8_t*>(a.panel) + u * W::kUnitBytes;
    for (int r = 0; r < kPanel; r++) W::pack_column(a, u, r, to);
  }
}

template <class W>
void group_row(const PackedWeight& w, int64_t n, float* out) noexcept {
  const int column = static_cast<int>(n % kPanel);
  for (int64_t u = 0; u * W::kUnit < w.k; u++) {
    float x[W::kUnit];
    W::read_column(unit_at<W>(w, n / kPanel, u), column, x);
    const int64_t left = w.k - u * W::kUnit, n = left < W::kUnit ? left : W::kUnit;
    memcpy(out + u * W::kUnit, x, sizeof(float) * static_cast<size_t>(n));
  }
}

template <class W>
constexpr LinearKernel group_kernel() {
  using Kind = Grouped<W>;
  return {W::kAct,           group_panel_bytes<W>, pack_group<W>,          run_linear<Kind>,
          group_row<W>,      Kind::kRows,          Kind::kPanels * kPanel, Kind::kPanels,
          Kind::kStreamRows, linear_block_k<Kind>};
}

}  // namespace
}  // namespace CPUSERVE_NS
