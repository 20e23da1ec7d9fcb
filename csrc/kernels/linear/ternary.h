// The kinds with one fp16 scale for 64 to 256 weights and no other factor, of 2 bits or of 1 bit:
//   w = scale * (code - 1)
// They are packed from the ternary types of GGUF (TQ2_0, Q2_0, PQ2_0) and from the signs of Q1_0,
// where a bit becomes the code 0 or 2. A unit of a panel is
//   { fp16 scale[16]; groups of 32 weights for each column }
// A group has one line of 64 bytes for each bit of a code. A line has four bytes of each column.
// Byte j of column c in line r has bits of these elements k of the group:
//   2 bits   bits 2 i and 2 i + 1 of the byte belong to k = 16 r + 4 i + j
//   1 bit    bit i of the byte belongs to k = 4 i + j (there is only line r = 0)
//
// Rows have a scale for 256 elements (q8g256). Sums of products are integers over a span: a unit,
// or half a unit of 256 weights, so that a span of 2-bit codes fits sums of 16 bits. Each span is
// added to the fp32 sums in one step. linear/driver.h explains the other terms.
#pragma once
#include "kernels/linear/gguf_blocks.h"
#include "kernels/linear/source.h"
#include "kernels/linear/unpacked.h"

namespace CPUSERVE_NS {
namespace {

// The source blocks. codes() writes the codes of a block: 0 to 3, and 1 is the code of weight 0.
struct GgufTq2_0 {
  static constexpr int kBits = 2, kUnit = 256, kBytes = 66;
  static uint16_t scale(const uint8_t* b) { return half_at(b + 64); }
  static void codes(const uint8_t* b, uint8_t* q) {
    memset(q, 0, kUnit);
    for (int h = 0; h < 2; h++) add_runs<2, 0>(b + 32 * h, 4, q + 128 * h);
  }
};
template <int kWeights>
struct GgufQ2_0 {
  static constexpr int kBits = 2, kUnit = kWeights, kBytes = 2 + kWeights / 4;
  static uint16_t scale(const uint8_t* b) { return half_at(b); }
  static void codes(const uint8_t* b, uint8_t* q) {
    for (int i = 0; i < kUnit; i += 4) {
      const uint32_t word = spread_codes<2>(b[2 + i / 4]);
      memcpy(q + i, &word, sizeof word);
    }
  }
};
struct GgufQ1_0 {
  static constexpr int kBits = 1, kUnit = 128, kBytes = 18;
  static uint16_t scale(const uint8_t* b) { return half_at(b); }
  static void codes(const uint8_t* b, uint8_t* q) {
    for (int i = 0; i < kUnit; i += 8) {
      const uint32_t bits = b[2 + i / 8];
      const uint32_t words[2] = {spread_codes<1>(bits) << 1, spread_codes<1>(bits >> 4) << 1};
      memcpy(q + i, words, sizeof words);
    }
  }
};

// The layout of a panel.
template <class B>
struct Ternary {
  using Block = B;
  using Sum = S;
  static constexpr int kBits = B::kBits, kUnit = B::kUnit;
  static constexpr int kSpan = kUnit < 128 ? kUnit : 128, kSpans = kUnit / kSpan;
  static constexpr int kGroups = kSpan / 32;          // of a span
  static constexpr int kLines = kBits, kHeader = 32;  // lines of a group; bytes of the scales
  static constexpr int64_t kUnitBytes = kHeader + kUnit / 32 * kLines * 64;
  static constexpr bool kUnpacked = false;
  static constexpr int kFetchEvery = 8 / kLines;  // quads for each cache line that is prefetched
  static constexpr int kLargest = kBits == 2 ? 3 : 2;
  static_assert(kWideS || kSpan / 4 * kProductsOfQuad * kLargest * 127 <= 32767,
                "a span fits the small sums");

  CPUSERVE_INLINE S dot(S acc, Q w, Q a) { return sdot(acc, w, a); }

  // Returns the codes of quad i (elements 4 i to 4 i + 3) of a group, for the columns of a vector.
  // `line` points to these columns in the first line of the group.
  template <int i>
  CPUSERVE_INLINE Q quad(const uint8_t* line) {
    if constexpr (kBits == 1) return take_bits<i, 1, 1>(load_quads(line));
    return take_bits<i % 4 * 2, 0, 2>(load_quads(line + i / 4 * 64));
  }

  static void pack_column(const uint8_t* block, int column, uint8_t* unit) {
    uint16_t scale = 0;
    uint8_t q[kUnit] = {};
    if (block) {
      scale = B::scale(block);
      B::codes(block, q);
    }
    memcpy(unit + column * 2, &scale, sizeof scale);
    for (int g = 0; g < kUnit / 32; g++) {
      uint32_t words[kLines] = {};
      for (int i = 0; i < 8; i++) {
        const uint32_t codes = read_as<uint32_t>(q + g * 32 + i * 4);
        if (kBits == 1) words[0] |= (codes >> 1 & 0x01010101u) << i;
        if (kBits == 2) words[i / 4 % kLines] |= (codes & 0x03030303u) << i % 4 * 2;
      }
      uint8_t* lines = unit + kHeader + g * kLines * 64 + column * 4;
      for (int i = 0; i < kLines; i++) memcpy(lines + i * 64, words + i, sizeof *words);
    }
  }
  static void read_column(const uint8_t* unit, int column, float* out) {
    const float scale = half_to_float(read_as<uint16_t>(unit + column * 2));
    for (int k = 0; k < kUnit; k++) {
      const int i = k % 32 / 4;  // the quad
      const uint8_t* line = unit + kHeader + (k / 32 * kLines + i / 4 % kLines) * 64;
      const int byte = line[column * 4 + k % 4];
      const int code = kBits == 1 ? (byte >> i & 1) * 2 : byte >> i % 4 * 2 & 3;
      out[k] = scale * static_cast<float>(code - 1);
    }
  }

  // Writes elements [k0, k0 + n) of a source row as fp32.
  static void read(const void* row, int64_t k0, int n, float* out) {
    for (int i = 0; i < n;) {
      const int64_t block = (k0 + i) / kUnit;
      const int first = static_cast<int>((k0 + i) % kUnit);
      const int end = n - i < kUnit - first ? first + n - i : kUnit;
      const uint8_t* b = static_cast<const uint8_t*>(row) + block * B::kBytes;
      const float scale = half_to_float(B::scale(b));
      uint8_t q[kUnit];
      B::codes(b, q);
      for (int j = first; j < end; j++, i++) out[i] = scale * static_cast<float>(q[j] - 1);
    }
  }
};

// Codes that are unpacked to bytes: a line for each quad of a group, apart from the scales.
template <class W>
struct UnpackedTernary : W {
  static constexpr bool kUnpacked = true;
  static constexpr int kLines = 8;
  static constexpr int kFetchEvery = 8;
  template <int i>
  CPUSERVE_INLINE Q quad(const uint8_t* line) {
    return load_quads(line + i * 64);
  }
};

// The addresses of the group of 32 weights that a tile computes next: in its rows and its panels.
struct TernaryAt {
  const uint8_t *x, *scale, *sums;  // in the first row: codes, the scale, sums over 32 codes
  size_t x_stride;
  const uint8_t *unit, *lines;      // in the first panel: the unit, and the lines of the group
  size_t panel_bytes, lines_apart;  // bytes from panel to panel: of units, and of lines
  const uint8_t* ahead;             // in the first panel: the address to prefetch during this group
};

// Adds the products of quads [i, 8) (4 elements of K) of a group for MR rows x NV vectors.
template <class W, int NPF, int i, int MR, int NV>
CPUSERVE_INLINE void ternary_quads(S (&acc)[MR][NV], const TernaryAt& at) {
  if constexpr (i < 8) {
    // Each quad has one base pointer; otherwise gcc keeps offsets for each quad and row.
    const uint8_t* lines = at.lines;
    const uint8_t* quads = at.x + i * 4;
    opaque(lines);
    opaque(quads);
    if constexpr (i % W::kFetchEvery == 0) {
      const uint8_t* ahead = at.ahead + i / W::kFetchEvery * 64;
      opaque(ahead);
#pragma GCC unroll 4
      for (int p = 0; p < NPF; p++) prefetch_l2(ahead + static_cast<size_t>(p) * at.panel_bytes);
      keep_here();
    }
    Q wq[NV];
#pragma GCC unroll 16
    for (int v = 0; v < NV; v++) {
      const size_t panel = static_cast<size_t>(v / kVecs) * at.lines_apart;
      wq[v] = W::template quad<i>(lines + panel + v % kVecs * kLanes * 4);
    }
#pragma GCC unroll 16
    for (int r = 0; r < MR; r++) {
      const Q a =
          set1_quad(reinterpret_cast<const int8_t*>(quads + static_cast<size_t>(r) * at.x_stride));
#pragma GCC unroll 16
      for (int v = 0; v < NV; v++) acc[r][v] = add_product<W, MR * NV>(acc[r][v], wq[v], a);
    }
    ternary_quads<W, NPF, i + 1>(acc, at);
  }
}

template <class W>
struct TernaryTiles {
  static constexpr ActFormat kAct = ActFormat::q8g256;
  using Unpacked = TernaryTiles<UnpackedTernary<W>>;
  static constexpr int64_t kUnitBytes = W::kUnitBytes, kWholeUnits = 256 / W::kUnit;
  static constexpr bool kSharesHeaders = false, kWidens = false, kNearBlocks = false;
  static constexpr bool kSizesCutPasses = false, kLineUnits = false;
  static constexpr int kUnitCodes = W::kUnit;
  static constexpr bool kUnpacks = kVecs == 1 || kUnpacksCodes;
  static constexpr int kPackedRows = 0;
  static constexpr int kTurns = W::kUnit < 256 && !kEmulatesDots ? 3 : 0;
  // Tiles have as many sums as in kernels/linear/planes.h.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  static constexpr int kSumsUsed = 2 * kVecs;
#else
  static constexpr int kSumsUsed = kGroupVecs;
#endif
  static constexpr int kInMemory = kSumsUsed / kVecs;
  static constexpr int stream_panels(int) { return 1; }
  static constexpr int kRows = kVecs == 1 && kInMemory > 6 ? 6 : kInMemory < 2 ? 2 : kInMemory;
  static constexpr int kStreamRows = kInMemory < 24 ? kRows : 8;
  static constexpr int kPanels = kInMemory / kRows < 2 ? 1 : 2;
  static constexpr int kHalfRows = kRows;
  static int64_t units(int64_t k) { return (k + W::kUnit - 1) / W::kUnit; }

  // Sets the addresses of unit u, whose header is at at.unit, in a row with its scales at `scales`.
  CPUSERVE_INLINE void set_unit(const LinearTile& t, int64_t u, TernaryAt& at) {
    const int64_t k = u * W::kUnit;
    at.scale = t.x + t.x_padded + k / 256 * 4;
    at.sums = t.x + t.x_padded + t.x_padded / 256 * 4 + k / 256 * kBlockSums + 32 + k % 256 / 16;
    if constexpr (!W::kUnpacked) at.lines = at.unit + W::kHeader;
  }

  template <int MR, int NP, bool kNear, int NPF>
  static __attribute__((noinline)) void tile(const LinearTile& t) {
    constexpr int NV = NP * kVecs, kStride = sums_stride<kNear>();
    float* const c = t.c;
    if (!t.resume) {
      for (int r = 0; r < MR; r++) {
        for (int v = 0; v < NV; v++) store(c + r * kStride + v * kLanes, zero());
      }
    }
    TernaryAt at = {t.x + t.u0 * W::kUnit,
                    nullptr,
                    nullptr,
                    t.x_stride,
                    t.w + t.u0 * kUnitBytes,
                    t.codes,
                    t.panel_bytes,
                    W::kUnpacked ? kCodesBytes : t.panel_bytes,
                    nullptr};
    TileFetch<kNear> fetch(t, kUnitBytes);
    const int64_t ahead_step = fetch.step();
    for (int64_t u = t.u0; u < t.u1;) {
      const uint8_t* ahead;
      for (const int64_t end = fetch.next(u, at.unit, ahead); u < end; u++) {
        set_unit(t, u, at);
        at.ahead = ahead;
#pragma GCC unroll 1
        for (int s = 0; s < W::kSpans; s++) {
          I sum[MR][NV];
          span_sums<NPF>(sum, at);
          add_span<kStride>(sum, at, c);
          at.sums += W::kGroups * 2;
        }
#pragma GCC unroll 4
        for (int p = 0; p < NPF; p++) {  // the rest of the unit, which is no whole number of lines
          prefetch_l2(at.ahead + static_cast<size_t>(p) * at.panel_bytes);
        }
        opaque(at.unit += kUnitBytes);
        opaque(ahead += ahead_step);
      }
    }
  }

  // Computes the sums of (code - 1) times the codes of the rows over a span.
  template <int NPF, int MR, int NV>
  CPUSERVE_INLINE void span_sums(I (&sum)[MR][NV], TernaryAt& at) {
    // Few sums have chains of additions of their own for each group: a dot product takes 4 or 5
    // cycles, and a core begins two in each cycle.
    constexpr bool kChains = kWideS && MR * NV < 4;
    S acc[MR][NV];
#pragma GCC unroll 16
    for (int r = 0; r < MR; r++) {
      I minus = izero();
#pragma GCC unroll 4
      for (int i = 0; i < W::kGroups / 2; i++) {
        const uint8_t* pair = at.sums + static_cast<size_t>(r) * at.x_stride + i * 4;
        minus =
            dot_words(minus, set1_quad(reinterpret_cast<const int8_t*>(pair)), as_words(iset1(-1)));
      }
#pragma GCC unroll 16
      for (int v = 0; v < NV; v++) {
        sum[r][v] = minus;
        if constexpr (kWideS && !kChains) {
          acc[r][v] = minus;
        } else {
          acc[r][v] = szero();
        }
      }
    }
#pragma GCC unroll 1
    for (int g = 0; g < W::kGroups; g++) {
      ternary_quads<W, NPF, 0>(acc, at);
      if constexpr (kChains) add_sums(sum, acc);
      opaque(at.x += 32);
      opaque(at.lines += W::kLines * 64);
      opaque(at.ahead += 8 / W::kFetchEvery * 64);
    }
    if constexpr (kWideS && !kChains) {
#pragma GCC unroll 16
      for (int r = 0; r < MR; r++) {
#pragma GCC unroll 16
        for (int v = 0; v < NV; v++) sum[r][v] = widen(acc[r][v]);
      }
    } else if constexpr (!kChains) {
      add_sums(sum, acc);
    }
  }
  // Adds `acc` to `sum`, and sets it to 0.
  template <int MR, int NV>
  CPUSERVE_INLINE void add_sums(I (&sum)[MR][NV], S (&acc)[MR][NV]) {
#pragma GCC unroll 16
    for (int r = 0; r < MR; r++) {
#pragma GCC unroll 16
      for (int v = 0; v < NV; v++) {
        sum[r][v] = iadd(sum[r][v], widen(acc[r][v]));
        acc[r][v] = szero();
      }
    }
  }

  // Scales the integer sums of a span and adds them to the fp32 sums.
  template <int kStride, int MR, int NV>
  CPUSERVE_INLINE void add_span(const I (&sum)[MR][NV], const TernaryAt& at, float* c) {
#pragma GCC unroll 16
    for (int v = 0; v < NV; v++) {
      const uint8_t* unit = at.unit + static_cast<size_t>(v / kVecs) * at.panel_bytes;
      const F scale = load_f16(reinterpret_cast<const uint16_t*>(unit) + v % kVecs * kLanes);
#pragma GCC unroll 16
      for (int r = 0; r < MR; r++) {
        const size_t row = static_cast<size_t>(r) * at.x_stride;
        float* to = c + r * kStride + v * kLanes;
        const F s = mul(scale, set1(*reinterpret_cast<const float*>(at.scale + row)));
        store(to, fma(to_float(sum[r][v]), s, load(to)));
      }
    }
  }

  // Writes the codes of units [t.u0, t.u1) of the first panel of t as bytes.
  static __attribute__((noinline)) void unpack(const LinearTile& t, uint8_t* to) {
    const uint8_t* unit = t.w + t.u0 * kUnitBytes;
    for (int64_t u = t.u0; u < t.u1; u++, unit += kUnitBytes) {
      const uint8_t* line = unit + W::kHeader;
      for (int g = 0; g < W::kUnit / 32; g++, line += W::kLines * 64, to += 8 * 64) {
        unpack_ternary<0>(line, to);
      }
    }
  }
  template <int i>
  CPUSERVE_INLINE void unpack_ternary(const uint8_t* line, uint8_t* to) {
    if constexpr (i < 8) {
      for (int v = 0; v < kVecs; v++) {
        const int column = v * kLanes * 4;
        store_quads(to + i * 64 + column, W::template quad<i>(line + column));
      }
      unpack_ternary<i + 1>(line, to);
    }
  }
  // The sums of unpacked codes start from the sums of the rows, which add_span needs anyway.
  static constexpr int kStarts = 0;
  static void put_starts(const uint8_t*, int64_t, int, int16_t*) {}
};

template <class W>
size_t ternary_panel_bytes(int64_t k) noexcept {
  return static_cast<size_t>(TernaryTiles<W>::units(k) * W::kUnitBytes);
}

template <class W>
void pack_ternary(const PackArgs& a) noexcept {
  for (int64_t u = 0; u < TernaryTiles<W>::units(a.k); u++) {
    uint8_t* to = static_cast<uint8_t*>(a.panel) + u * W::kUnitBytes;
    for (int r = 0; r < kPanel; r++) {
      const auto* row = static_cast<const uint8_t*>(a.rows[r]);
      W::pack_column(row ? row + u * W::Block::kBytes : nullptr, r, to);
    }
  }
}

template <class W>
void ternary_row(const PackedWeight& w, int64_t n, float* out) noexcept {
  const uint8_t* unit = w.data + static_cast<size_t>(n / kPanel) * w.panel_bytes;
  for (int64_t k = 0; k < w.k; k += W::kUnit, unit += W::kUnitBytes) {
    W::read_column(unit, static_cast<int>(n % kPanel), out + k);
  }
}

template <class B>
constexpr LinearKernel ternary_kernel() {
  using W = Ternary<B>;
  using Kind = TernaryTiles<W>;
  return {Kind::kAct,
          ternary_panel_bytes<W>,
          pack_ternary<W>,
          run_linear<Kind>,
          ternary_row<W>,
          Kind::kRows,
          Kind::kPanels * kPanel,
          Kind::kPanels,
          Kind::kStreamRows,
          linear_block_k<Kind>};
}

}  // namespace
}  // namespace CPUSERVE_NS
