// The tile of the kinds that are packed from kernels/linear/gguf_blocks.h: int8 rows (q8g32)
// against units of 32 or 256 weights, whose codes are stored as planes of bits.
//
// A unit of a panel is { factors; groups of 32 weights }. A group is kLow lines of the low bits of
// its codes and kHigh lines of the bits above them. A line has four bytes of each column:
//   4 low bits   byte (r, c, j): k = 8 r + j in its low and k = 8 r + 4 + j in its high nibble
//   2 bits       byte (r, c, j): bits 2 i and 2 i + 1 are those of k = 16 r + 4 i + j
//   1 bit        byte (c, j): bit i is that of k = 4 i + j
// Factors are
//   half, exponent  { fp16 d[16]; fp16 m[16] }, or the byte of an exponent [16]
//   bytes           { fp16 d[16]; fp16 m[16]; s8 scale[subs][16]; u8 least[subs][16] }
//   nibbles         { fp16 d[16]; fp16 m[16]; u8 both[subs][16] }, the scale in the low nibble
// without m and least where the kind has no minimum.
#pragma once
#include "kernels/linear/driver.h"
#include "kernels/linear/gguf_blocks.h"
#include "kernels/linear/source.h"

namespace CPUSERVE_NS {
namespace {

// Codes up to 15 take small sums, up to 127 sums of 32 bits. Values of tables are bytes with a zero
// of 128.
struct SmallCodes {
  using Sum = S;
  static constexpr bool kStartsFromAny = kWideS;
  CPUSERVE_INLINE S start() { return szero(); }
  CPUSERVE_INLINE I finish(S x) { return widen(x); }
  CPUSERVE_INLINE S dot(S acc, Q w, Q a) { return sdot(acc, w, a); }
};
struct WideCodes {
  using Sum = I;
  static constexpr bool kStartsFromAny = true;
  CPUSERVE_INLINE I start() { return izero(); }
  CPUSERVE_INLINE I finish(I x) { return x; }
  CPUSERVE_INLINE I dot(I acc, Q w, Q a) { return dot4_small(acc, w, a); }
};
struct TableCodes : WideCodes {
  CPUSERVE_INLINE I dot(I acc, Q w, Q a) { return dot8(acc, w, a); }
};
template <bool kTable, bool kSmall>
struct CodesOf {
  using Type = WideCodes;
};
template <bool kSmall>
struct CodesOf<true, kSmall> {
  using Type = TableCodes;
};
template <>
struct CodesOf<false, true> {
  using Type = SmallCodes;
};

template <class G>
struct Planes : CodesOf<G::kTable, G::kLow + G::kHigh <= 4>::Type {
  using Block = G;
  static constexpr int kUnit = G::kUnit, kGroups = kUnit / 32, kSub = G::kSub;
  static constexpr int kSubs = kUnit / kSub, kLines = G::kLow + G::kHigh;
  // Zero of the codes as the dot product takes them.
  static constexpr int kZero = G::kTable ? kDot8Zero : G::kZero;
  static constexpr bool kMin = G::kMin, kScaled = kUnit == 256;
  static constexpr int kHalves = G::kFactors == Factors::exponent ? 16 : kMin ? 64 : 32;
  static constexpr int kScaleBytesOfUnit = !kScaled                          ? 0
                                           : G::kFactors == Factors::nibbles ? kSubs * kPanel
                                           : kMin                            ? 2 * kSubs * kPanel
                                                                             : kSubs * kPanel;
  static constexpr int kHeader = kHalves + kScaleBytesOfUnit;
  static constexpr int64_t kUnitBytes = kHeader + kGroups * kLines * 64;
  // Lines to prefetch with each group.
  static constexpr int kFetchLines =
      static_cast<int>((kUnitBytes + kGroups * 64 - 1) / (kGroups * 64));
  static_assert(kFetchLines <= 8, "a line with each quad");

  // Quad i of a group; `line` points into its first line.
  template <int i>
  CPUSERVE_INLINE Q quad(const uint8_t* line) {
    Q x;
    if constexpr (G::kLow == 4) {
      x = load_quads(line + i / 2 * 64);
      x = i % 2 ? high_nibbles(x) : low_nibbles(x);
    } else {
      x = take_bits<i % 4 * 2, 0, 2>(load_quads(line + i / 4 * 64));
    }
    if constexpr (G::kHigh == 1) {
      x = either(x, take_bits<i, G::kLow, 1>(load_quads(line + G::kLow * 64)));
    }
    if constexpr (G::kHigh == 2) {
      x = either(x, take_bits<i % 4 * 2, G::kLow, 2>(load_quads(line + (G::kLow + i / 4) * 64)));
    }
    if constexpr (G::kTable) x = lookup16(G::values(), x);
    return x;
  }

  // Scale and minimum of columns [column, column + kLanes) for sub-block j of a unit.
  CPUSERVE_INLINE void factors(const uint8_t* unit, int64_t j, int column, F* scale, F* least) {
    const auto* halves = reinterpret_cast<const uint16_t*>(unit) + column;
    const uint8_t* small = unit + kHalves + j * kPanel + column;
    if constexpr (G::kFactors == Factors::exponent) {
      *scale = load_e8m0(unit + column);
    } else {
      *scale = load_f16(halves);
    }
    if constexpr (kMin) *least = load_f16(halves + kPanel);
    if constexpr (G::kFactors == Factors::bytes) {
      *scale = mul(*scale, load_s8(small));
      if constexpr (kMin) *least = mul(*least, load_s8(small + kSubs * kPanel));
    }
    if constexpr (G::kFactors == Factors::nibbles) {
      F low, high;
      load_nibbles(small, &low, &high);
      *scale = mul(*scale, low);
      *least = mul(*least, high);
    }
  }

  static void pack_column(const BlockCodes& c, int column, uint8_t* unit) {
    if constexpr (G::kFactors == Factors::exponent) {
      unit[column] = static_cast<uint8_t>(c.d);
    } else {
      memcpy(unit + column * 2, &c.d, 2);
      if constexpr (kMin) memcpy(unit + 32 + column * 2, &c.m, 2);
    }
    for (int j = 0; kScaled && j < kSubs; j++) {
      uint8_t* small = unit + kHalves + j * kPanel + column;
      if constexpr (G::kFactors == Factors::nibbles) {
        *small = static_cast<uint8_t>(c.scales[j] | c.leasts[j] << 4);
      } else {
        *small = static_cast<uint8_t>(c.scales[j]);
        if constexpr (kMin) small[kSubs * kPanel] = c.leasts[j];
      }
    }
    for (int g = 0; g < kGroups; g++) {
      uint32_t words[kLines] = {};
      for (int i = 0; i < 8; i++) {
        const uint32_t q = read_as<uint32_t>(c.q + g * 32 + i * 4);
        if constexpr (G::kLow == 4) words[i / 2] |= (q & 0x0f0f0f0fu) << i % 2 * 4;
        if constexpr (G::kLow == 2) words[i / 4] |= (q & 0x03030303u) << i % 4 * 2;
        const uint32_t high = q >> G::kLow;
        if constexpr (G::kHigh == 1) words[G::kLow] |= (high & 0x01010101u) << i;
        if constexpr (G::kHigh == 2) words[G::kLow + i / 4] |= (high & 0x03030303u) << i % 4 * 2;
      }
      uint8_t* lines = unit + kHeader + g * kLines * 64 + column * 4;
      for (int i = 0; i < kLines; i++) memcpy(lines + i * 64, words + i, 4);
    }
  }
  static void read_column(const uint8_t* unit, int column, BlockCodes& c) {
    if constexpr (G::kFactors == Factors::exponent) {
      c.d = unit[column];
    } else {
      c.d = half_at(unit + column * 2);
      if constexpr (kMin) c.m = half_at(unit + 32 + column * 2);
    }
    for (int j = 0; kScaled && j < kSubs; j++) {
      const uint8_t* small = unit + kHalves + j * kPanel + column;
      if constexpr (G::kFactors == Factors::nibbles) {
        c.scales[j] = *small & 15;
        c.leasts[j] = *small >> 4;
      } else {
        c.scales[j] = static_cast<int8_t>(*small);
        if constexpr (kMin) c.leasts[j] = small[kSubs * kPanel];
      }
    }
    for (int g = 0; g < kGroups; g++) {
      const uint8_t* lines = unit + kHeader + g * kLines * 64 + column * 4;
      uint32_t words[kLines];
      for (int i = 0; i < kLines; i++) words[i] = read_as<uint32_t>(lines + i * 64);
      for (int i = 0; i < 8; i++) {
        uint32_t q = 0;
        if constexpr (G::kLow == 4) q = words[i / 2] >> i % 2 * 4 & 0x0f0f0f0fu;
        if constexpr (G::kLow == 2) q = words[i / 4] >> i % 4 * 2 & 0x03030303u;
        if constexpr (G::kHigh == 1) q |= (words[G::kLow] >> i & 0x01010101u) << G::kLow;
        if constexpr (G::kHigh == 2) {
          q |= (words[G::kLow + i / 4] >> i % 4 * 2 & 0x03030303u) << G::kLow;
        }
        memcpy(c.q + g * 32 + i * 4, &q, 4);
      }
    }
  }
};

// The position of a tile in its rows and weights: a group of 32.
struct PlaneAt {
  const uint8_t *x, *scales, *sums;  // of the first row: values, their scale, their sum
  size_t x_stride;
  const uint8_t *unit, *lines;  // of the first panel
  size_t panel_bytes;
  const uint8_t* ahead;  // address to prefetch meanwhile, for the first panel
};

// Products of quads [kQuad, kEnd) of a group, for MR rows x NV vectors. A line of the weights ahead
// is fetched with each quad, not all at once: that would fill the miss buffers of the core.
template <class W, bool kNear, int NPF, int kQuad, int kEnd, int MR, int NV>
CPUSERVE_INLINE void plane_products(typename W::Sum (&acc)[MR][NV], const PlaneAt& at) {
  if constexpr (kQuad < kEnd) {
    // One base pointer per quad: otherwise gcc keeps an offset for each quad and row on the stack.
    const uint8_t* lines = at.lines;
    const uint8_t* quads = at.x + kQuad * 4;
    opaque(lines);
    opaque(quads);
    if constexpr (kQuad < W::kFetchLines) {
      const uint8_t* ahead = at.ahead + kQuad * 64;
      opaque(ahead);
#pragma GCC unroll 4
      for (int p = 0; p < NPF; p++) {
        const uint8_t* of_panel = ahead + static_cast<size_t>(p) * at.panel_bytes;
        kNear ? prefetch(of_panel) : prefetch_l2(of_panel);
      }
    }
    Q wq[NV];
#pragma GCC unroll 16
    for (int v = 0; v < NV; v++) {
      wq[v] = W::template quad<kQuad>(lines + static_cast<size_t>(v / kVecs) * at.panel_bytes +
                                      v % kVecs * kLanes * 4);
    }
#pragma GCC unroll 16
    for (int r = 0; r < MR; r++) {
      const Q a =
          set1_quad(reinterpret_cast<const int8_t*>(quads + static_cast<size_t>(r) * at.x_stride));
#pragma GCC unroll 16
      for (int v = 0; v < NV; v++) acc[r][v] = W::dot(acc[r][v], wq[v], a);
    }
    plane_products<W, kNear, NPF, kQuad + 1, kEnd>(acc, at);
  }
}

constexpr int log2_of(int x) { return x > 1 ? 1 + log2_of(x / 2) : 0; }

// Adds sub-block kPart of a group, sub-block j of its unit, to the fp32 chain: in registers, or in
// memory at `c` with kStride floats per row. sums_of_row(r) points at the sum of the row's values.
template <class W, bool kNear, int NPF, bool kKept, int kStride, int kPart, int MR, int NV,
          class Sums>
CPUSERVE_INLINE void add_sub(F (&f)[MR][NV], const PlaneAt& at, int64_t j, float* c,
                             const Sums& sums_of_row) {
  constexpr bool kZero = W::kZero != 0, kStart = kZero && W::kStartsFromAny;
  constexpr int kQuads = W::kSub / 4;
  const auto zero_term = [&](int r) __attribute__((always_inline)) {
    return isub(izero(), shl<log2_of(W::kZero)>(iload1(sums_of_row(r))));
  };
  typename W::Sum acc[MR][NV];
#pragma GCC unroll 16
  for (int r = 0; r < MR; r++) {
    typename W::Sum first = W::start();
    if constexpr (kStart) first = zero_term(r);
#pragma GCC unroll 16
    for (int v = 0; v < NV; v++) acc[r][v] = first;
  }
  plane_products<W, kNear, NPF, kPart * kQuads, (kPart + 1) * kQuads>(acc, at);
  F scale[NV], least[NV];
#pragma GCC unroll 16
  for (int v = 0; v < NV; v++) {
    W::factors(at.unit + static_cast<size_t>(v / kVecs) * at.panel_bytes, j, v % kVecs * kLanes,
               &scale[v], &least[v]);
  }
#pragma GCC unroll 16
  for (int r = 0; r < MR; r++) {
    const size_t row = static_cast<size_t>(r) * at.x_stride;
    const F s = set1(*reinterpret_cast<const float*>(at.scales + row));
    F m = zero();
    if constexpr (W::kMin) m = mul(s, to_float(iload1(sums_of_row(r))));
#pragma GCC unroll 16
    for (int v = 0; v < NV; v++) {
      float* kept = c + r * kStride + v * kLanes;
      I dot = W::finish(acc[r][v]);
      if constexpr (kZero && !kStart) dot = iadd(dot, zero_term(r));
      F sum = kKept ? f[r][v] : load(kept);
      sum = fma(to_float(dot), mul(scale[v], s), sum);
      if constexpr (W::kMin && W::kScaled) sum = fnma(least[v], m, sum);
      if constexpr (W::kMin && !W::kScaled) sum = fma(least[v], m, sum);
      if constexpr (kKept) {
        f[r][v] = sum;
      } else {
        store(kept, sum);
      }
    }
  }
}

template <class W>
struct PlaneKind {
  static constexpr ActFormat kAct = ActFormat::q8g32;
  static constexpr int64_t kUnitBytes = W::kUnitBytes, kWholeUnits = 1;
  static constexpr bool kWidens = false;
  // As in kernels/linear/group.h. Sanitizers make a tile of six rows take seconds to compile, and
  // ten kinds have a dozen of them, so instrumented tiles are low.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  static constexpr int kGroupVecsUsed = 2 * kVecs;
#else
  static constexpr int kGroupVecsUsed = kGroupVecs;
#endif
  static constexpr int kInRegisters = kGroupVecsUsed / 2 / kVecs;
  static constexpr int kInMemory = kGroupVecsUsed / kVecs;
  static constexpr int stream_panels(int) { return 1; }
  static constexpr int kRows = kVecs == 1 && kInMemory > 6 ? 6 : kInMemory < 2 ? 2 : kInMemory;
  static constexpr int kStreamRows = kInRegisters < 12 ? kRows : 8;
  static constexpr int kPanels = kInMemory / kRows < 2 ? 1 : 2;
  static constexpr int kHalfRows = kRows;
  static int64_t units(int64_t k) { return (k + W::kUnit - 1) / W::kUnit; }

  template <int MR, int NP, bool kNear, int NPF>
  static __attribute__((noinline)) void tile(const LinearTile& t) {
    constexpr int NV = NP * kVecs, kStride = sums_stride<kNear>();
    constexpr bool kKept = MR * NP <= kInRegisters, kSixteen = W::kSub == 16;
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
    const int64_t group0 = t.u0 * W::kGroups;
    PlaneAt at = {t.x + group0 * 32,
                  scales + group0 * 4,
                  scales + (t.x_padded / 32 + group0) * 4,
                  t.x_stride,
                  t.w + t.u0 * kUnitBytes,
                  nullptr,
                  t.panel_bytes,
                  nullptr};
    alignas(64) int32_t sums16[kSixteen ? MR : 1][16];
    int64_t u = t.u0;
    for (int part = 0; part < 2; part++) {
      const uint8_t* ahead = (part ? t.ahead1 : t.ahead0) + u * kUnitBytes;
      for (const int64_t end = part ? t.u1 : t.split; u < end; u++) {
        if constexpr (kSixteen) {
#pragma GCC unroll 1
          for (int r = 0; r < MR; r++) {
            const uint8_t* x = at.x + static_cast<size_t>(r) * at.x_stride;
            sums_of_16(reinterpret_cast<const int8_t*>(x), sums16[r]);
          }
        }
        at.lines = at.unit + W::kHeader;
        at.ahead = ahead;
#pragma GCC unroll 1
        for (int64_t g = 0; g < W::kGroups; g++) {
          if constexpr (kSixteen) {
            const auto first = [&](int r) __attribute__((always_inline)) {
              return &sums16[r][2 * g];
            };
            const auto second = [&](int r) __attribute__((always_inline)) {
              return &sums16[r][2 * g + 1];
            };
            add_sub<W, kNear, NPF, kKept, kStride, 0>(f, at, 2 * g, c, first);
            add_sub<W, kNear, NPF, kKept, kStride, 1>(f, at, 2 * g + 1, c, second);
          } else {
            const auto sum = [&](int r) __attribute__((always_inline)) {
              return reinterpret_cast<const int32_t*>(at.sums +
                                                      static_cast<size_t>(r) * at.x_stride);
            };
            add_sub<W, kNear, NPF, kKept, kStride, 0>(f, at, g, c, sum);
          }
          opaque(at.x += 32);
          opaque(at.scales += 4);
          opaque(at.sums += 4);
          opaque(at.lines += W::kLines * 64);
          opaque(at.ahead += W::kFetchLines * 64);
        }
        opaque(at.unit += kUnitBytes);
        opaque(ahead += kUnitBytes);
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
size_t plane_panel_bytes(int64_t k) noexcept {
  return static_cast<size_t>(PlaneKind<W>::units(k) * W::kUnitBytes);
}

// Rows are of the kind's own GGUF type; a missing row is one of zeros.
template <class W>
void pack_planes(const PackArgs& a) noexcept {
  for (int64_t u = 0; u < PlaneKind<W>::units(a.k); u++) {
    uint8_t* to = static_cast<uint8_t*>(a.panel) + u * W::kUnitBytes;
    for (int r = 0; r < kPanel; r++) {
      BlockCodes c{};
      const auto* row = static_cast<const uint8_t*>(a.rows[r]);
      if (row) W::Block::take(row + u * W::Block::kBytes, c);
      W::pack_column(c, r, to);
    }
  }
}

template <class W>
void plane_row(const PackedWeight& w, int64_t n, float* out) noexcept {
  const uint8_t* unit = w.data + static_cast<size_t>(n / kPanel) * w.panel_bytes;
  for (int64_t k = 0; k < w.k; k += W::kUnit, unit += W::kUnitBytes) {
    BlockCodes c{};
    float x[W::kUnit];
    W::read_column(unit, static_cast<int>(n % kPanel), c);
    block_floats<typename W::Block>(c, x);
    const int64_t left = w.k - k, some = left < W::kUnit ? left : W::kUnit;
    memcpy(out + k, x, sizeof(float) * static_cast<size_t>(some));
  }
}

template <class G>
constexpr LinearKernel plane_kernel() {
  using W = Planes<G>;
  using Kind = PlaneKind<W>;
  return {ActFormat::q8g32,  plane_panel_bytes<W>, pack_planes<W>,         run_linear<Kind>,
          plane_row<W>,      Kind::kRows,          Kind::kPanels * kPanel, Kind::kPanels,
          Kind::kStreamRows, linear_block_k<Kind>};
}

}  // namespace
}  // namespace CPUSERVE_NS
