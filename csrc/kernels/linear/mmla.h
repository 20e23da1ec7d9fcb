// Linears on matrix products of Arm: int8 and 4-bit kinds with SMMLA, dense_bf16 with BFMMLA.
//
// Panels hold 8 bytes of a column side by side instead of 4 (kernels/table.h): a line of a panel is
// 16 columns of 8 bytes, 8 int8 or 4 bf16 of K, and two neighbouring columns of it are one operand.
// The other operand is 8 bytes of two rows, so rows are first interleaved in pairs. The last of an
// odd number of rows is paired with itself: a single row then takes as many products as it would
// take dot products, and every number of rows runs the same instructions on a row.
//
// A tile is up to kPairs pairs of rows by 8 or 4 pairs of columns, with its sums in registers.
// Chain kinds have one scale for all of K, or none: 6 x 4 products of a step need 10 loads, fewer
// than the 3 for 4 products that Neoverse V1 and V2 can do. Group kinds keep the fp32 sums in
// registers in addition to the integer sums of a group: 3 x 4 of each.
//
// Few rows stream over the packed panels. Many rows share a block of K of a strip; its weights
// are first unpacked into bytes and fp32 scales where they are not already such bytes.
#pragma once
#include "kernels/linear/channel.h"
#include "kernels/linear/dense.h"
#include "kernels/linear/driver.h"
#include "kernels/linear/w4_group.h"
#include "kernels/linear/w4_wide.h"
#include "kernels/linear/w8_group.h"
#include "kernels/vec/mmla.h"

namespace CPUSERVE_NS {
namespace {

constexpr int kStepBytes = 8;                    // of a row or column in one product
constexpr int kOperandBytes = 2 * kStepBytes;    // of two of them
constexpr int kColumnPairs = kPanel / 2;         // of a panel
constexpr int kLineBytes = kPanel * kStepBytes;  // of a panel in one step
constexpr int kBeat = 4;                         // steps between two prefetches
constexpr size_t kPreparedBytes = 64 << 10;      // prepared rows
constexpr size_t kUnpackedBytes = 16 << 10;      // unpacked weights of one panel

struct MmlaScratch {
  float sums[kSumsFloats];
  uint8_t rows[kPreparedBytes];
  uint8_t lines[kStripPanels][kUnpackedBytes];
};
static_assert(sizeof(MmlaScratch) <= kLinearScratch, "the scratch of a call holds all of it");

// A tile over `units` units of K (a step of a chain kind, the groups after a header of a group
// kind).
struct MmlaTile {
  const uint8_t* a;  // prepared rows
  const uint8_t* b;  // weights of the panel, packed or unpacked
  int pair0;         // first pair of columns
  int64_t units;
  int64_t steps;  // of K; fewer than in all units where the last group is cut short
  float* c;       // sums of the first row and column
  int c_stride;
  bool resume;  // c holds the sums of the units before
  LineFetch fetch;
};

// Rows to prepare: `rows` rows from `x` on, of `padded` elements.
struct MmlaRows {
  const uint8_t* x;
  size_t stride;
  int64_t padded;
  int rows;
  int64_t k;
};
CPUSERVE_INLINE int pairs_of(int64_t rows) { return static_cast<int>((rows + 1) / 2); }

// Calls put(pair, first row, second row) for each pair of rows.
template <class Put>
CPUSERVE_INLINE void for_each_pair(const MmlaRows& r, const Put& put) {
  for (int p = 0; p < pairs_of(r.rows); p++) {
    const uint8_t* first = r.x + static_cast<size_t>(2 * p) * r.stride;
    put(p, first, 2 * p + 1 < r.rows ? first + r.stride : first);
  }
}

// Interleaves `steps` steps of two rows, rounded up to an even number; `stride` bytes from a step
// to the next.
CPUSERVE_INLINE void interleave(const uint8_t* first, const uint8_t* second, int64_t steps,
                                uint8_t* to, size_t stride) {
  for (int64_t s = 0; s < steps; s += 2, to += 2 * stride) {
    const Q x = load_quads(first + s * kStepBytes), y = load_quads(second + s * kStepBytes);
    store_quads(to, first_halves(x, y));
    store_quads(to + stride, last_halves(x, y));
  }
}

// Sums are in `c` row by row; in registers each vector has two columns of two rows.
template <int RP, int CP, class Sum>
CPUSERVE_INLINE void load_sums(const MmlaTile& t, Sum (&sum)[RP][CP]) {
#pragma GCC unroll 8
  for (int r = 0; r < RP; r++) {
    const float* row = t.c + 2 * r * t.c_stride;
#pragma GCC unroll 4
    for (int c = 0; c < CP; c += 2) {
      const F first = load(row + 2 * c), second = load(row + t.c_stride + 2 * c);
      from_floats(first_halves(first, second), &sum[r][c]);
      from_floats(last_halves(first, second), &sum[r][c + 1]);
    }
  }
}
template <int RP, int CP, class Sum>
CPUSERVE_INLINE void store_sums(const MmlaTile& t, const Sum (&sum)[RP][CP]) {
#pragma GCC unroll 8
  for (int r = 0; r < RP; r++) {
    float* row = t.c + 2 * r * t.c_stride;
#pragma GCC unroll 4
    for (int c = 0; c < CP; c += 2) {
      const F even = as_floats(sum[r][c]), odd = as_floats(sum[r][c + 1]);
      store(row + 2 * c, first_halves(even, odd));
      store(row + t.c_stride + 2 * c, last_halves(even, odd));
    }
  }
}

// The products of one step; weight(c) is the operand of column pair c. The shorter side stays in
// registers.
template <int RP, int CP, class Sum, class Weight>
CPUSERVE_INLINE void step_products(Sum (&sum)[RP][CP], const uint8_t* a, const Weight& weight) {
  if constexpr (RP > CP) {
    Q w[CP];
#pragma GCC unroll 8
    for (int c = 0; c < CP; c++) w[c] = weight(c);
#pragma GCC unroll 8
    for (int r = 0; r < RP; r++) {
      const Q x = load_quads(a + r * kOperandBytes);
#pragma GCC unroll 8
      for (int c = 0; c < CP; c++) sum[r][c] = mmla(sum[r][c], x, w[c]);
    }
  } else {
    Q x[RP];
#pragma GCC unroll 8
    for (int r = 0; r < RP; r++) x[r] = load_quads(a + r * kOperandBytes);
#pragma GCC unroll 8
    for (int c = 0; c < CP; c++) {
      const Q w = weight(c);
#pragma GCC unroll 8
      for (int r = 0; r < RP; r++) sum[r][c] = mmla(sum[r][c], x[r], w);
    }
  }
}

// -- chain kinds: one chain of products over K
template <class SumType>
struct MmlaChain {
  static constexpr int kPairs = 6;
  static constexpr int column_pairs(int pairs) { return pairs <= 3 ? 8 : 4; }
  static constexpr int64_t kUnitBytes = kLineBytes, kUnitSteps = 1, kPairBytes = kOperandBytes;
  static constexpr int64_t kBlock = 128;  // 12 rows of it are 12 KB, which stay in L1
  static constexpr bool kUnpacks = false;
  static void unpack(const uint8_t*, int64_t, uint8_t*) {}

  // Units [u0, u0 + units) of the rows as [units][pairs][2][8 bytes].
  static void prepare(const MmlaRows& r, int64_t u0, int64_t units, uint8_t* to) {
    const size_t stride = static_cast<size_t>(pairs_of(r.rows)) * kOperandBytes;
    for_each_pair(r, [&](int p, const uint8_t* first, const uint8_t* second) {
      const int64_t at = u0 * kStepBytes;
      interleave(first + at, second + at, units, to + p * kOperandBytes, stride);
    });
  }

  template <bool, int RP, int CP>
  static CPUSERVE_IN_ORDER __attribute__((noinline)) void tile(const MmlaTile& t) {
    SumType sum[RP][CP] = {};
    if (t.resume) load_sums(t, sum);
    const uint8_t* a = t.a;
    const uint8_t* b = t.b + t.pair0 * kOperandBytes;
    LineFetch fetch = t.fetch;
    const auto step = [&]() __attribute__((always_inline)) {
      step_products(
          sum, a, [&](int c) __attribute__((always_inline)) {
            return load_quads(b + c * kOperandBytes);
          });
      opaque(a += RP * kOperandBytes);
      opaque(b += kLineBytes);
    };
    for (int64_t left = t.units; left > 0; left -= kBeat) {
      fetch.step();
      // Not unrolled: gcc would load operands of several steps at once and keep sums on the stack.
#pragma GCC unroll 1
      for (int64_t i = left < kBeat ? left : kBeat; i > 0; i--) step();
    }
    store_sums(t, sum);
  }
};

// -- group kinds: a scale for every kGroup of K
//
// A view V of the weights has the operands of a unit of groups and the factors of its columns:
//   kBytes of a unit; kHeader of it before the operands; kGroups of it; kSteps of a group
//   kCut: the last group may have fewer steps than kSteps
//   kScales: columns have a scale; kLeast: and a minimum; kZero: the code of 0
//   Q operand(lines, step, c)       F scale(header, pair0, c)  F least(header, pair0, c)
template <class V, int RP, int CP>
CPUSERVE_INLINE void group_steps(I (&acc)[RP][CP], const uint8_t* a, const uint8_t* lines,
                                 int64_t steps) {
  const auto step = [&](int s) __attribute__((always_inline)) {
    step_products(
        acc, a + s * RP * kOperandBytes, [&](int c) __attribute__((always_inline)) {
          return V::operand(lines, s, c);
        });
  };
  int64_t s = 0;
#pragma GCC unroll 4
  for (; s + kBeat <= steps; s += kBeat) {
#pragma GCC unroll 4
    for (int i = 0; i < kBeat; i++) step(i);
    opaque(a += kBeat * RP * kOperandBytes);
    opaque(lines += V::kBeatBytes);
  }
  if constexpr (V::kCut) {
    for (; s < steps; s++) {
      step(0);
      a += RP * kOperandBytes;
      lines += kLineBytes;
    }
  }
}

template <class V, int RP, int CP>
CPUSERVE_INLINE void add_sums(F (&f)[RP][CP], const I (&acc)[RP][CP], const uint8_t* a,
                              const uint8_t* header, int pair0) {
  const float* factors = reinterpret_cast<const float*>(a);
#pragma GCC unroll 8
  for (int c = 0; c < CP; c++) {
    F scale = zero(), least = zero();
    if constexpr (V::kScales) scale = V::scale(header, pair0, c);
    if constexpr (V::kLeast) least = V::least(header, pair0, c);
#pragma GCC unroll 8
    for (int r = 0; r < RP; r++) {
      const F s = load(factors + r * 4);
      f[r][c] = fma(unbiased(acc[r][c]), V::kScales ? mul(scale, s) : s, f[r][c]);
      if constexpr (V::kLeast) f[r][c] = fma(least, load(factors + (RP + r) * 4), f[r][c]);
    }
  }
}

// Vectors before the steps of a prepared pair of rows.
template <class V>
constexpr int factors_of() {
  static_assert(!V::kLeast || V::kZero == 0, "codes with a minimum have no zero");
  return V::kLeast || V::kZero != 0 ? 2 : 1;
}

template <class V, int RP, int CP>
CPUSERVE_INLINE void group_tile(const MmlaTile& t) {
  constexpr int kFactors = factors_of<V>();
  F f[RP][CP] = {};
  if (t.resume) load_sums(t, f);
  const uint8_t* a = t.a;
  const uint8_t* header = t.b;
  const uint8_t* lines = t.b + V::kHeader + t.pair0 * kOperandBytes;
  LineFetch fetch = t.fetch;
  int64_t left = t.steps;
  for (int64_t u = 0; u < t.units; u++) {
    fetch.step();
#pragma GCC unroll 1
    for (int i = 0; i < V::kGroups; i++, left -= V::kSteps) {
      I acc[RP][CP];
#pragma GCC unroll 8
      for (int r = 0; r < RP; r++) {
        I start = iset1(kSumBias);
        if constexpr (V::kZero != 0) {
          const float* starts = reinterpret_cast<const float*>(a + RP * kOperandBytes);
          start = load_bits(starts + r * 4);
        }
#pragma GCC unroll 8
        for (int c = 0; c < CP; c++) acc[r][c] = start;
      }
      const uint8_t* rows = a + RP * kFactors * kOperandBytes;
      if (V::kCut && left < V::kSteps) {
        group_steps<V>(acc, rows, lines, left);
      } else {
        group_steps<V>(acc, rows, lines, V::kSteps);
      }
      add_sums<V>(f, acc, a, header, t.pair0);
      opaque(a += RP * (kFactors + V::kSteps) * kOperandBytes);
      opaque(lines += V::kGroupBytes);
    }
    opaque(header += V::kBytes);
    opaque(lines += V::kHeader);
  }
  store_sums(t, f);
}

// The groups of units [u0, u0 + units) of the rows, each as the scales of pairs {s0, s0, s1, s1};
// with kLeast also s times the sum of the group, or with kZero what its integer sums start from;
// then [steps][pairs][2][8 bytes].
template <class V>
static inline void prepare_groups(const MmlaRows& r, int64_t u0, int64_t units, uint8_t* to) {
  constexpr int kGroup = V::kSteps * kStepBytes;
  const size_t stride = static_cast<size_t>(pairs_of(r.rows)) * kOperandBytes;
  for_each_pair(r, [&](int p, const uint8_t* first, const uint8_t* second) {
    const int64_t to_sums = r.padded / kGroup * 4;
    uint8_t* at = to + p * kOperandBytes;
    for (int64_t g = u0 * V::kGroups; g < (u0 + units) * V::kGroups; g++) {
      const uint8_t *scale0 = first + r.padded + g * 4, *scale1 = second + r.padded + g * 4;
      const float s0 = read_as<float>(scale0), s1 = read_as<float>(scale1);
      const auto sum0 = read_as<int32_t>(scale0 + to_sums);
      const auto sum1 = read_as<int32_t>(scale1 + to_sums);
      store(reinterpret_cast<float*>(at), of_rows(s0, s1));
      at += stride;
      if constexpr (V::kLeast) {
        const auto least0 = s0 * static_cast<float>(sum0), least1 = s1 * static_cast<float>(sum1);
        store(reinterpret_cast<float*>(at), of_rows(least0, least1));
        at += stride;
      }
      if constexpr (V::kZero != 0) {
        const int32_t start0 = kSumBias - V::kZero * sum0, start1 = kSumBias - V::kZero * sum1;
        store_bits(reinterpret_cast<float*>(at), of_rows(start0, start1));
        at += stride;
      }
      interleave(first + g * kGroup, second + g * kGroup, V::kSteps, at, stride);
      at += V::kSteps * stride;
    }
  });
}

// Packed groups of W. A line of 4-bit codes holds two steps, in its low and in its high nibbles.
template <class W>
struct PackedView {
  static constexpr bool kScales = true, kLeast = W::kMinBytes != 0, kCut = false;
  static constexpr int kZero = W::kQuadsPerLine == 1 ? 0 : W::kZero;
  static constexpr int kSteps = W::kGroup / kStepBytes, kPerLine = W::kQuadsPerLine;
  static constexpr int kHeader = UnitOf<W>::kHeader, kBytes = W::kUnitBytes;
  static constexpr int kGroups = UnitOf<W>::kGroups, kGroupBytes = UnitOf<W>::kGroupBytes;
  static constexpr int kBeatBytes = kBeat / kPerLine * kLineBytes;

  static __attribute__((always_inline)) inline Q operand(const uint8_t* lines, int s, int c) {
    const Q x = load_quads(lines + s / kPerLine * kLineBytes + c * kOperandBytes);
    if constexpr (kPerLine == 1) {
      return x;
    } else {
      return s % 2 ? high_nibbles(x) : low_nibbles(x);
    }
  }
  // Factors of four columns, which two pairs have; pair0 is even.
  static __attribute__((always_inline)) inline F scales(const uint8_t* header, int column) {
    return load_f16(reinterpret_cast<const uint16_t*>(header) + column);
  }
  // Those of the columns of pair c, twice.
  static __attribute__((always_inline)) inline F pair(F four, int c) {
    return c % 2 ? last_halves(four, four) : first_halves(four, four);
  }
  static __attribute__((always_inline)) inline F scale(const uint8_t* header, int pair0, int c) {
    return pair(scales(header, 2 * pair0 + c / 2 * 4), c);
  }
  static __attribute__((always_inline)) inline F least(const uint8_t* header, int pair0, int c) {
    const int column = 2 * pair0 + c / 2 * 4;
    return pair(W::least(header, column, scales(header, column)), c);
  }
};

// Unpacked groups: the factors of pairs of columns as vectors, then bytes.
template <class W>
struct UnpackedView {
  static constexpr bool kScales = true, kLeast = W::kMinBytes != 0, kCut = false;
  static constexpr int kZero = PackedView<W>::kZero, kSteps = W::kGroup / kStepBytes;
  static constexpr int kFactorBytes = kColumnPairs * kOperandBytes;
  static constexpr int kHeader = (kLeast ? 2 : 1) * kFactorBytes;
  static constexpr int kGroups = UnitOf<W>::kGroups, kGroupBytes = kSteps * kLineBytes;
  static constexpr int kBytes = kHeader + kGroups * kGroupBytes;
  static constexpr int kBeatBytes = kBeat * kLineBytes;

  static __attribute__((always_inline)) inline Q operand(const uint8_t* lines, int s, int c) {
    return load_quads(lines + s * kLineBytes + c * kOperandBytes);
  }
  static __attribute__((always_inline)) inline F scale(const uint8_t* header, int pair0, int c) {
    return load(reinterpret_cast<const float*>(header + (pair0 + c) * kOperandBytes));
  }
  static __attribute__((always_inline)) inline F least(const uint8_t* header, int pair0, int c) {
    return scale(header + kFactorBytes, pair0, c);
  }
};

template <class W>
struct MmlaGroup {
  using Packed = PackedView<W>;
  using Unpacked = UnpackedView<W>;
  static constexpr ActFormat kAct = W::kAct;
  static constexpr int kPairs = 3;
  static constexpr int column_pairs(int pairs) { return pairs == 1 ? 8 : 4; }
  static constexpr int64_t kUnitBytes = W::kUnitBytes;
  static constexpr int64_t kUnitSteps = Packed::kGroups * Packed::kSteps;
  static constexpr int64_t kPairBytes =
      Packed::kGroups * (factors_of<Packed>() + Packed::kSteps) * kOperandBytes;
  static constexpr int64_t kBlock = kUnpackedBytes / Unpacked::kBytes;
  static constexpr bool kUnpacks = true;
  static int64_t units(int64_t k) { return (k + W::kUnit - 1) / W::kUnit; }
  static int64_t steps(int64_t k) { return units(k) * kUnitSteps; }

  static void unpack(const uint8_t* from, int64_t units, uint8_t* to) {
    for (int64_t u = 0; u < units; u++, from += Packed::kBytes, to += Unpacked::kBytes) {
      float* factors = reinterpret_cast<float*>(to);
      for (int c = 0; c < kColumnPairs; c++) {
        store(factors + 4 * c, Packed::scale(from, 0, c));
        if constexpr (Packed::kLeast) {
          store(factors + 4 * (kColumnPairs + c), Packed::least(from, 0, c));
        }
      }
      const uint8_t* lines = from + Packed::kHeader;
      uint8_t* bytes = to + Unpacked::kHeader;
      for (int s = 0; s < kUnitSteps; s += 2) {
        for (int c = 0; c < kColumnPairs; c++) {
          for (int i = s; i < s + 2; i++) {
            const Q x = Packed::operand(lines, i, c);
            store_quads(bytes + i * kLineBytes + c * kOperandBytes, x);
          }
        }
      }
    }
  }
  static void prepare(const MmlaRows& r, int64_t u0, int64_t units, uint8_t* to) {
    prepare_groups<Packed>(r, u0, units, to);
  }
  template <bool kUnpacked, int RP, int CP>
  static CPUSERVE_IN_ORDER __attribute__((noinline)) void tile(const MmlaTile& t) {
    if constexpr (kUnpacked) {
      group_tile<Unpacked, RP, CP>(t);
    } else {
      group_tile<Packed, RP, CP>(t);
    }
  }
  static void finish_sums(const LinearArgs&, const MmlaRows&, int64_t, int, float*, int) {}
};

// -- the kinds without groups in memory
struct MmlaBf16 : MmlaChain<F> {
  static constexpr ActFormat kAct = ActFormat::bf16;
  static int64_t units(int64_t k) { return (k + 3) / 4; }
  static int64_t steps(int64_t k) { return units(k); }
  // Bytes after K in a row may be anything: zeros replace them.
  static void prepare(const MmlaRows& r, int64_t u0, int64_t units, uint8_t* to) {
    MmlaChain<F>::prepare(r, u0, units, to);
    const int64_t beyond = (u0 + units) * 4 - r.k;
    if (beyond <= 0) return;
    const int pairs = pairs_of(r.rows);
    const size_t n = static_cast<size_t>(beyond) * 2;
    for (int p = 0; p < 2 * pairs; p++) {
      uint8_t* end = to + ((units - 1) * 2 * pairs + p + 1) * kStepBytes;
      memset(end - n, 0, n);
    }
  }
  static void finish_sums(const LinearArgs&, const MmlaRows&, int64_t, int, float*, int) {}
};

CPUSERVE_INLINE const float* scales_of_panel(const PackedWeight& w, int64_t panel) {
  const uint8_t* end = w.data + static_cast<size_t>(panel + 1) * w.panel_bytes;
  return reinterpret_cast<const float*>(end - kChannelScales);
}

struct MmlaChannel : MmlaChain<I> {
  static constexpr ActFormat kAct = ActFormat::q8row;
  static int64_t units(int64_t k) { return (k + 7) / 8; }
  static int64_t steps(int64_t k) { return units(k); }
  // From the integer sums of whole rows to their values.
  static void finish_sums(const LinearArgs& a, const MmlaRows& r, int64_t panel0, int panels,
                          float* c, int stride) {
    for (int p = 0; p < panels; p++) {
      const float* scales = scales_of_panel(*a.w, panel0 + p);
      for (int row = 0; row < r.rows; row++) {
        const F s = set1(read_as<float>(r.x + static_cast<size_t>(row) * r.stride + r.padded));
        float* to = c + row * stride + p * kPanel;
        for (int i = 0; i < kPanel; i += kLanes) {
          store(to + i, mul(to_float(load_bits(to + i)), mul(load(scales + i), s)));
        }
      }
    }
  }
};

struct ChannelView {
  static constexpr bool kScales = false, kLeast = false, kCut = true;
  static constexpr int kSteps = kWideGroup / kStepBytes, kGroups = 1, kZero = 0, kHeader = 0;
  static constexpr int kBytes = kSteps * kLineBytes, kGroupBytes = kBytes;
  static constexpr int kBeatBytes = kBeat * kLineBytes;
  static __attribute__((always_inline)) inline Q operand(const uint8_t* lines, int s, int c) {
    return load_quads(lines + s * kLineBytes + c * kOperandBytes);
  }
};
struct MmlaChannelGroups {
  static constexpr ActFormat kAct = ActFormat::q8g128;
  static constexpr int kPairs = 3;
  static constexpr int column_pairs(int pairs) { return pairs == 1 ? 8 : 4; }
  static constexpr int64_t kUnitBytes = ChannelView::kBytes, kUnitSteps = ChannelView::kSteps;
  static constexpr int64_t kPairBytes = (1 + ChannelView::kSteps) * kOperandBytes;
  static constexpr int64_t kBlock = 8;
  static constexpr bool kUnpacks = false;
  static void unpack(const uint8_t*, int64_t, uint8_t*) {}
  static int64_t units(int64_t k) { return (k + kWideGroup - 1) / kWideGroup; }
  static int64_t steps(int64_t k) { return (k + 7) / 8; }
  static void prepare(const MmlaRows& r, int64_t u0, int64_t units, uint8_t* to) {
    prepare_groups<ChannelView>(r, u0, units, to);
  }
  template <bool, int RP, int CP>
  static CPUSERVE_IN_ORDER __attribute__((noinline)) void tile(const MmlaTile& t) {
    group_tile<ChannelView, RP, CP>(t);
  }
  static void finish_sums(const LinearArgs& a, const MmlaRows& r, int64_t panel0, int panels,
                          float* c, int stride) {
    for (int p = 0; p < panels; p++) {
      const float* scales = scales_of_panel(*a.w, panel0 + p);
      for (int row = 0; row < r.rows; row++) {
        float* to = c + row * stride + p * kPanel;
        for (int i = 0; i < kPanel; i += kLanes) store(to + i, mul(load(to + i), load(scales + i)));
      }
    }
  }
};

// -- the loops
template <class Kind, bool kUnpacked, int RP = 1>
CPUSERVE_INLINE void call_mmla(int pairs, const MmlaTile& t) {
  if (pairs == RP) return Kind::template tile<kUnpacked, RP, Kind::column_pairs(RP)>(t);
  if constexpr (RP < Kind::kPairs) call_mmla<Kind, kUnpacked, RP + 1>(pairs, t);
}

// All columns of one panel; every tile of them asks for its share of the lines to prefetch.
template <class Kind, bool kUnpacked>
CPUSERVE_INLINE void run_panel(int pairs, MmlaTile& t, const uint8_t* next, int64_t lines,
                               bool near) {
  const int wide = Kind::column_pairs(pairs);
  const int64_t share = (lines * wide + kColumnPairs - 1) / kColumnPairs;
  float* const c = t.c;
  for (t.pair0 = 0; t.pair0 < kColumnPairs; t.pair0 += wide, next += share * 64) {
    const int64_t beats = Kind::kUnitBytes > kLineBytes ? t.units : t.units / kBeat;
    t.fetch.at = next;
    t.fetch.left = beats ? share : 0;
    t.fetch.a_step = beats ? (share + beats - 1) / beats : 0;
    t.fetch.near = near;
    t.c = c + 2 * t.pair0;
    call_mmla<Kind, kUnpacked>(pairs, t);
  }
  t.c = c;
}

template <class Kind>
CPUSERVE_INLINE MmlaRows rows_of_call(const LinearArgs& a) {
  return {static_cast<const uint8_t*>(a.x), a.x_stride / static_cast<size_t>(a.terms),
          padded_width(Kind::kAct, a.w->k), static_cast<int>(a.m) * a.terms, a.w->k};
}

// Up to one tile of rows: every panel is read once, in the order of memory.
template <class Kind>
CPUSERVE_INLINE void stream_mmla(const LinearArgs& a) {
  const PackedWeight& w = *a.w;
  const MmlaRows rows = rows_of_call<Kind>(a);
  MmlaScratch& scratch = *static_cast<MmlaScratch*>(a.scratch);
  const int pairs = pairs_of(rows.rows);
  const int64_t units = Kind::units(w.k), steps = Kind::steps(w.k);
  // Two tiles side by side take turns over a block that stays in L1.
  const int64_t block = Kind::column_pairs(pairs) == kColumnPairs ? units : Kind::kBlock;
  const bool plain = plain_f32(a.ep);
  Kind::prepare(rows, 0, units, scratch.rows);
  MmlaTile t;
  t.c_stride = sums_stride<true>();
  for (int64_t p0 = a.panel0; p0 < a.panel1; p0 += kSpanPanels) {
    const int span = static_cast<int>(a.panel1 - p0 < kSpanPanels ? a.panel1 - p0 : kSpanPanels);
    for (int p = 0; p < span; p++) {
      const uint8_t* panel = w.data + static_cast<size_t>(p0 + p) * w.panel_bytes;
      t.c = scratch.sums + p * kPanel;
      for (int64_t u0 = 0; u0 < units; u0 += block) {
        t.units = u0 + block < units ? block : units - u0;
        t.steps = steps - u0 * Kind::kUnitSteps;
        t.resume = u0 > 0;
        t.a = scratch.rows + u0 * Kind::kPairBytes * pairs;
        t.b = panel + u0 * Kind::kUnitBytes;
        run_panel<Kind, false>(pairs, t, t.b + a.sizes.ahead_bytes, t.units * Kind::kUnitBytes / 64,
                               true);
      }
    }
    Kind::finish_sums(a, rows, p0, span, scratch.sums, t.c_stride);
    finish_terms(a, plain, 0, rows.rows, p0, span, scratch.sums, t.c_stride);
  }
}

// The number of rows that share a run of the epilogue (see kFinishTiles).
constexpr int64_t kFinishRows = 24;

// Many rows: a block of K of a strip stays in L2 while all rows pass over it, one tile of rows,
// which stays in L1, after another.
template <class Kind>
CPUSERVE_INLINE void blocked_mmla(const LinearArgs& a) {
  const PackedWeight& w = *a.w;
  const MmlaRows all = rows_of_call<Kind>(a);
  MmlaScratch& scratch = *static_cast<MmlaScratch*>(a.scratch);
  const bool plain = plain_f32(a.ep);
  const int64_t units = Kind::units(w.k), steps = Kind::steps(w.k), total = panels_of(w);
  constexpr int kWidth = sums_stride<false>();
  MmlaTile t;
  t.c_stride = kWidth;
  for (int64_t row0 = 0; row0 < all.rows; row0 += a.sizes.rows) {
    MmlaRows block = all;
    block.x += static_cast<size_t>(row0) * all.stride;
    block.rows = static_cast<int>(all.rows - row0 < a.sizes.rows ? all.rows - row0 : a.sizes.rows);
    const int64_t tiles = (block.rows + 2 * Kind::kPairs - 1) / (2 * Kind::kPairs);
    const int64_t height = round_up((block.rows + tiles - 1) / tiles, 2);  // equal tiles, even
    for (int64_t panel0 = a.panel0; panel0 < a.panel1; panel0 += kStripPanels) {
      const int64_t left = a.panel1 - panel0;
      const int panels = static_cast<int>(left < kStripPanels ? left : kStripPanels);
      const uint8_t* strip = w.data + static_cast<size_t>(panel0) * w.panel_bytes;
      for (int64_t u0 = 0; u0 < units; u0 += Kind::kBlock) {
        t.units = u0 + Kind::kBlock < units ? Kind::kBlock : units - u0;
        t.steps = steps - u0 * Kind::kUnitSteps;
        t.resume = u0 > 0;
        const bool last = u0 + t.units == units;
        const size_t offset = static_cast<size_t>(u0 * Kind::kUnitBytes);
        if constexpr (Kind::kUnpacks) {
          for (int p = 0; p < panels; p++) {
            const uint8_t* from = strip + static_cast<size_t>(p) * w.panel_bytes + offset;
            Kind::unpack(from, t.units, scratch.lines[p]);
          }
        }
        // Meanwhile the next block is fetched into L2: of this strip, or the first of the next.
        const size_t next = last ? kStripPanels * w.panel_bytes
                                 : offset + static_cast<size_t>(t.units * Kind::kUnitBytes);
        const bool fetched = !last || panel0 + 2 * kStripPanels <= total;
        const int64_t lines = fetched ? t.units * Kind::kUnitBytes / 64 : 0;
        const int64_t share = (lines + tiles - 1) / tiles;
        for (int64_t row = 0, i = 0; row < block.rows; row += height, i++) {
          MmlaRows some = block;
          some.x += static_cast<size_t>(row) * all.stride;
          some.rows = static_cast<int>(block.rows - row < height ? block.rows - row : height);
          if (last) {
            fetch_output(a.ep, (row0 + row) / a.terms, some.rows / a.terms, panel0, panels);
          }
          Kind::prepare(some, u0, t.units, scratch.rows);
          t.a = scratch.rows;
          for (int p = 0; p < panels; p++) {
            const uint8_t* panel = strip + static_cast<size_t>(p) * w.panel_bytes;
            t.b = Kind::kUnpacks ? scratch.lines[p] : panel + offset;
            t.c = scratch.sums + row * kWidth + p * kPanel;
            run_panel<Kind, Kind::kUnpacks>(pairs_of(some.rows), t, panel + next + i * share * 64,
                                            share, false);
          }
        }
      }
      Kind::finish_sums(a, block, panel0, panels, scratch.sums, kWidth);
      for (int64_t row = 0; row < block.rows; row += kFinishRows) {
        const int64_t rest = block.rows - row;
        finish_terms(a, plain, (row0 + row) / a.terms,
                     static_cast<int>(rest < kFinishRows ? rest : kFinishRows), panel0, panels,
                     scratch.sums + row * kWidth, kWidth);
      }
    }
  }
}

template <class Kind>
void run_mmla(const LinearArgs& a) noexcept {
  if (a.m <= 0 || a.panel0 >= a.panel1) return;
  const int64_t rows = a.m * a.terms;
  // Interleaving rounds the steps up to an even number.
  const int64_t prepared = (Kind::units(a.w->k) + 1) * Kind::kPairBytes * pairs_of(rows);
  if (rows <= 2 * Kind::kPairs && prepared <= static_cast<int64_t>(kPreparedBytes)) {
    stream_mmla<Kind>(a);
  } else {
    blocked_mmla<Kind>(a);
  }
}

// -- packing
inline size_t mmla_dense_bytes(int64_t k) noexcept {
  return static_cast<size_t>(MmlaBf16::units(k) * kLineBytes);
}
inline size_t mmla_channel_bytes(int64_t k) noexcept {
  return static_cast<size_t>(MmlaChannel::units(k) * kLineBytes) + kChannelScales;
}
// The place of unit i (4 bytes) of a column among the codes of a group, with 4 or 8 bytes of a
// column side by side.
CPUSERVE_INLINE int unit_of_4(int i, int column) { return (i * kPanel + column) * 4; }
CPUSERVE_INLINE int unit_of_8(int i, int column) {
  return i / 2 * kLineBytes + column * kStepBytes + i % 2 * 4;
}
// Turns units 2 i and 2 i + 1 of one layout into the other: 8-bit codes lose or get their
// zero of 128, and of 4-bit codes two quads change places. Doing it twice changes nothing.
template <class W>
CPUSERVE_INLINE void turn_units(uint32_t* x, uint32_t* y) {
  constexpr uint32_t kLow = 0x0f0f0f0fu;
  if constexpr (W::kQuadsPerLine == 1) {
    *x ^= 0x80808080u;
    *y ^= 0x80808080u;
  } else {
    const uint32_t low = (*x & kLow) | (*y & kLow) << 4;
    *y = (*x >> 4 & kLow) | (*y & ~kLow);
    *x = low;
  }
}
template <class W>
CPUSERVE_INLINE void turn_column(const uint8_t* from, int (*from_unit)(int, int), uint8_t* to,
                                 int (*to_unit)(int, int), int column) {
  constexpr int kUnits = W::kUnit / 4 / W::kQuadsPerLine;
  for (int i = 0; i < kUnits; i += 2) {
    auto x = read_as<uint32_t>(from + from_unit(i, column));
    auto y = read_as<uint32_t>(from + from_unit(i + 1, column));
    turn_units<W>(&x, &y);
    memcpy(to + to_unit(i, column), &x, 4);
    memcpy(to + to_unit(i + 1, column), &y, 4);
  }
}
template <class W>
void pack_mmla_group(const PackArgs& a) noexcept {
  constexpr int kHeader = PackedView<W>::kHeader;
  const int64_t units = Grouped<W>::units(a.k);
  for (int64_t u = 0; u < units; u++) {
    uint8_t* to = static_cast<uint8_t*>(a.panel) + u * W::kUnitBytes;
    uint8_t unit[W::kUnitBytes];
    for (int c = 0; c < kPanel; c++) {
      W::pack_column(a, u, c, unit);
      turn_column<W>(unit + kHeader, unit_of_4, to + kHeader, unit_of_8, c);
    }
    memcpy(to, unit, kHeader);
  }
}
template <class W>
void mmla_group_row(const PackedWeight& w, int64_t n, float* out) noexcept {
  constexpr int kHeader = PackedView<W>::kHeader;
  const int column = static_cast<int>(n % kPanel);
  for (int64_t u = 0; u * W::kUnit < w.k; u++) {
    const uint8_t* from = unit_at<W>(w, n / kPanel, u);
    uint8_t unit[W::kUnitBytes];
    memcpy(unit, from, kHeader);
    turn_column<W>(from + kHeader, unit_of_8, unit + kHeader, unit_of_4, column);
    float x[W::kUnit];
    W::read_column(unit, column, x);
    const int64_t left = w.k - u * W::kUnit, some = left < W::kUnit ? left : W::kUnit;
    memcpy(out + u * W::kUnit, x, sizeof(float) * static_cast<size_t>(some));
  }
}

// A tile is half a panel or one; but a task interleaves its rows for itself, which two panels make
// worth it.
constexpr int kTaskPanels = 2;

// L1 sets the K block: the prepared rows of a tile stay there, and unpacked weights.
template <class Kind>
int64_t mmla_block_k(int64_t k, const WorkSizes&) noexcept {
  return elements_of(k, Kind::units(k), Kind::kBlock);
}

template <class Kind>
constexpr LinearKernel mmla_dense_kernel() {
  return {Kind::kAct,
          mmla_dense_bytes,
          pack_dense<Bf16Element, kStepBytes / 2>,
          run_mmla<Kind>,
          dense_row<Bf16Element, kStepBytes / 2>,
          2 * Kind::kPairs,
          2 * Kind::column_pairs(Kind::kPairs),
          kTaskPanels,
          2 * Kind::kPairs,
          mmla_block_k<Kind>,
          kStepBytes};
}
template <class Kind>
constexpr LinearKernel mmla_channel_kernel() {
  return {Kind::kAct,
          mmla_channel_bytes,
          pack_channel<kStepBytes, 0>,
          run_mmla<Kind>,
          channel_row<kStepBytes, 0>,
          2 * Kind::kPairs,
          2 * Kind::column_pairs(Kind::kPairs),
          kTaskPanels,
          2 * Kind::kPairs,
          mmla_block_k<Kind>,
          kStepBytes};
}
template <class W>
constexpr LinearKernel mmla_group_kernel() {
  return {W::kAct,
          group_panel_bytes<W>,
          pack_mmla_group<W>,
          run_mmla<MmlaGroup<W>>,
          mmla_group_row<W>,
          2 * MmlaGroup<W>::kPairs,
          2 * MmlaGroup<W>::column_pairs(MmlaGroup<W>::kPairs),
          kTaskPanels,
          2 * MmlaGroup<W>::kPairs,
          mmla_block_k<MmlaGroup<W>>,
          kStepBytes};
}

}  // namespace
}  // namespace CPUSERVE_NS
