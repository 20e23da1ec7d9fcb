// Matrix products of Arm for the group kinds, which have a scale for every kGroup elements of K.
//
// A view V of the weights is a class that reads the operands and the factors
// (scales and minima) of a unit, either from packed or from unpacked weights:
//   kBytes   bytes of a unit
//   kHeader  bytes of a unit before its operands
//   kGroups  groups of a unit
//   kSteps   steps (8 bytes of K) of a group
//   kCut     whether the last group may have fewer steps than kSteps
//   kScales  whether a column has a scale for each group
//   kLeast   whether a column has a minimum for each group
//   kZero    the code of a weight of 0
//   Q operand(lines, step, c)    the codes of column pair c in one step
//   F scale(header, pair0, c)    the scales of column pair pair0 + c, for the two rows of a product
//   F least(header, pair0, c)    the minima of column pair pair0 + c, for the two rows of a product
#pragma once
#include "kernels/linear/mmla/chains.h"
#include "kernels/linear/w4_group.h"
#include "kernels/linear/w4_wide.h"
#include "kernels/linear/w8_group.h"

namespace CPUSERVE_NS {
namespace {

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

// Returns the number of vectors of factors (scales, sums) that prepare_groups writes
// before the codes of a group, for a pair of rows.
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

// Writes the groups of units [u0, u0 + units) of the rows to `to`. For each pair of rows 0 and 1,
// a group has the scales {s0, s0, s1, s1}; with kLeast then scale * sum of codes in the same order,
// or with kZero the start values of the integer sums; then the codes [steps][pairs][2][8 bytes].
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

// The view of the packed weights of kind W. A line of 4-bit codes has the codes of one step
// in its low nibbles and the codes of the next step in its high nibbles.
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
  // Returns the scales of four columns (two pairs of columns) from `column` on.
  static __attribute__((always_inline)) inline F scales(const uint8_t* header, int column) {
    return load_f16(reinterpret_cast<const uint16_t*>(header) + column);
  }
  // Returns the factors of the two columns of pair c, twice: once for each row of a product.
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

// The view of unpacked weights: fp32 factors as vectors for pairs of columns, then codes as bytes.
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

}  // namespace
}  // namespace CPUSERVE_NS
