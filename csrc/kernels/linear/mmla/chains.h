// Matrix products of Arm for the chain kinds: bf16, and int8 with one scale per row.
// A sum of these kinds is one chain of additions over all of K.
#pragma once
#include "kernels/linear/channel.h"
#include "kernels/linear/mmla/tile.h"

namespace CPUSERVE_NS {
namespace {

template <class SumType>
struct MmlaChain {
  static constexpr int kPairs = 6;
  static constexpr int column_pairs(int pairs) { return pairs <= 3 ? 8 : 4; }
  static constexpr int64_t kUnitBytes = kLineBytes, kUnitSteps = 1, kPairBytes = kOperandBytes;
  static constexpr int64_t kBlock = 128;  // units of a K block: 12 rows of it take 12 KB of L1
  static constexpr bool kUnpacks = false;
  static void unpack(const uint8_t*, int64_t, uint8_t*) {}

  // Writes units [u0, u0 + units) of the rows to `to`, as [units][pairs of rows][2][8 bytes].
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
      // This loop is not unrolled, because gcc would load operands of several steps at once
      // and keep sums on the stack.
#pragma GCC unroll 1
      for (int64_t i = left < kBeat ? left : kBeat; i > 0; i--) step();
    }
    store_sums(t, sum);
  }
};

struct MmlaBf16 : MmlaChain<F> {
  static constexpr ActFormat kAct = ActFormat::bf16;
  static int64_t units(int64_t k) { return (k + 3) / 4; }
  static int64_t steps(int64_t k) { return units(k); }
  // Interleaves rows like MmlaChain::prepare, and sets the elements after the end of K to zeros,
  // because a row may have any values there.
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
  // Replaces the integer sums over all of K by the fp32 results.
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

}  // namespace
}  // namespace CPUSERVE_NS
