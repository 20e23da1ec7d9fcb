// Unpacks the ternary kinds (linear/ternary.h) to lines of signed bytes for AMX tiles.
#pragma once
#include "kernels/linear/ternary.h"
#include "kernels/linear/tiles/groups.h"

namespace CPUSERVE_NS {
namespace {

// A group is a span: 64 or 128 weights, whose sums are scaled at once.
template <class B>
struct RawTernary {
  using W = Ternary<B>;
  static constexpr int kGroup = W::kSpan, kLines = kGroup / 4;
  static constexpr int kGroupsOfScale = 256 / kGroup;
  static constexpr int kVectorRows = kPlaneVectorRows;
  static constexpr bool kScales = true, kLeast = false, kFloats = false, kAsStored = false;
  using Vectors = TernaryTiles<W>;
  using FewRows = RawTernary;
  using Product = S8S8Product;
  static constexpr ActFormat kAct = Vectors::kAct;
  static int64_t lines(int64_t k) { return Vectors::units(k) * W::kUnit / 4; }
  static const uint8_t* at(const uint8_t* panel, int64_t group) {
    return panel + group / W::kSpans * W::kUnitBytes;
  }
  static void unpack(const uint8_t* panel, int64_t group, int64_t, uint8_t* to) {
    const uint8_t* from = at(panel, group) + W::kHeader;
    from += group % W::kSpans * W::kGroups * W::kLines * 64;
    for (int g = 0; g < W::kGroups; g++, from += W::kLines * 64, to += 8 * kTileLineBytes) {
      put_quads<0>(from, to);
    }
  }
  template <int i>
  CPUSERVE_INLINE void put_quads(const uint8_t* from, uint8_t* to) {
    if constexpr (i < 8) {
      put_line(to, quad_line<W, i>(from) - static_cast<uint8_t>(1));
      put_quads<i + 1>(from, to + kTileLineBytes);
    }
  }
  CPUSERVE_INLINE void factors(const uint8_t* panel, int64_t group, int column, F* scale, F*) {
    *scale = load_f16(reinterpret_cast<const uint16_t*>(at(panel, group)) + column);
  }
  CPUSERVE_INLINE F add_least(F, F, F sum) { return sum; }
};

}  // namespace
}  // namespace CPUSERVE_NS
