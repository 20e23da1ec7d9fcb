// Unpacks the weights of group kinds to lines that AMX tiles can load, as signed bytes or bf16,
// and reads the scales and minima of these weights.
#pragma once
#include "kernels/linear/channel.h"
#include "kernels/linear/coded.h"
#include "kernels/linear/plane_kernels.h"
#include "kernels/linear/tiles/job.h"
#include "kernels/linear/w4_group.h"
#include "kernels/linear/w4_wide.h"
#include "kernels/linear/w8_group.h"

namespace CPUSERVE_NS {
namespace {

// Lines of 64 bytes, as vector types of the compiler, which generates code for any register width.
#pragma GCC diagnostic ignored "-Wpsabi"  // safe, because no function call passes these types
typedef uint8_t LineBytes __attribute__((vector_size(64), aligned(1), may_alias));
CPUSERVE_INLINE LineBytes line_at(const uint8_t* p) {
  return *reinterpret_cast<const LineBytes*>(p);
}
CPUSERVE_INLINE void put_line(uint8_t* p, LineBytes x) { *reinterpret_cast<LineBytes*>(p) = x; }

// Returns a line with quad kQuad (4 codes) of each column, for a kind with planes of bits.
// The packed lines of the group begin at `from`.
template <class W, int kQuad>
CPUSERVE_INLINE LineBytes quad_line(const uint8_t* from) {
  LineBytes x;
  for (int v = 0; v < kVecs; v++) {
    const Q q = W::template quad<kQuad>(from + v * kLanes * 4);
    memcpy(reinterpret_cast<uint8_t*>(&x) + v * kLanes * 4, &q, sizeof q);
  }
  return x;
}

// Unpacks the groups of a kind W of linear/group.h to signed bytes.
template <class W>
struct RawGroup {
  using Unit = UnitOf<W>;
  static constexpr int kGroup = W::kGroup, kLines = kGroup / 4, kGroupsOfScale = 1;
  static constexpr int kVectorRows = kGroupVectorRows;
  static constexpr bool kScales = true, kLeast = W::kMinBytes != 0, kFloats = false;
  static constexpr bool kAsStored = false;
  using Vectors = Grouped<W>;
  using FewRows = RawGroup;
  using Product = S8S8Product;
  static constexpr ActFormat kAct = W::kAct;
  static int64_t lines(int64_t k) { return (k + kGroup - 1) / kGroup * kLines; }
  static const uint8_t* at(const uint8_t* panel, int64_t group) {
    return panel + group / Unit::kGroups * W::kUnitBytes;
  }
  static void unpack(const uint8_t* panel, int64_t group, int64_t, uint8_t* to) {
    const uint8_t* from =
        at(panel, group) + Unit::kHeader + group % Unit::kGroups * Unit::kGroupBytes;
    for (int i = 0; i < kLines / W::kQuadsPerLine; i++, from += kTileLineBytes) {
      const LineBytes x = line_at(from);
      if constexpr (W::kQuadsPerLine == 1) {
        put_line(to + i * kTileLineBytes, x ^ 0x80);
      } else {
        const uint8_t zero = W::kMinBytes ? 0 : 8;
        put_line(to + 2 * i * kTileLineBytes, (x & 15) - zero);
        put_line(to + (2 * i + 1) * kTileLineBytes, (x >> 4) - zero);
      }
    }
  }
  CPUSERVE_INLINE void factors(const uint8_t* panel, int64_t group, int column, F* scale,
                               F* least) {
    const uint8_t* header = at(panel, group);
    *scale = load_f16(reinterpret_cast<const uint16_t*>(header) + column);
    if constexpr (kLeast) *least = W::least(header, column, *scale);
  }
  CPUSERVE_INLINE F add_least(F least, F x, F sum) { return fma(least, x, sum); }
};
template <bool kUnsigned>
struct ChannelProduct : S8U8Product {};
template <>
struct ChannelProduct<false> : S8S8Product {};

// w8_channel_g128: a panel has no scales between its lines, and the last group may be incomplete.
// With kStored, AMX tiles load the packed lines themselves,
// as bytes where 128 represents 0; the sums are then corrected by 128 times the sums of the rows.
// kStored is for up to 32 rows: they use a weight once, so unpacking would take half of the time.
template <bool kStored>
struct RawChannel {
  static constexpr int kGroup = kWideGroup, kLines = kGroup / 4, kGroupsOfScale = 1;
  static constexpr int kVectorRows = kGroupVectorRows;
  static constexpr bool kScales = false, kLeast = false, kFloats = false, kAsStored = kStored;
  using Vectors = Channel<kWideGroup / 4>;
  using Product = ChannelProduct<kStored>;
  using FewRows = RawChannel<true>;
  static constexpr ActFormat kAct = Vectors::kAct;
  static int64_t lines(int64_t k) { return (k + kGroup - 1) / kGroup * kLines; }
  // With kStored, copies and pads only an incomplete last group.
  static void unpack(const uint8_t* panel, int64_t group, int64_t k, uint8_t* to) {
    const int64_t lines = (k + 3) / 4 - group * kLines;
    if (kStored && lines >= kLines) return;
    const uint8_t zero = kStored ? 0 : 0x80;
    const uint8_t* from = panel + group * kLines * kTileLineBytes;
    for (int64_t i = 0; i < kLines; i++) {
      LineBytes x = {};
      if (i < lines) x = line_at(from + i * kTileLineBytes) ^ zero;
      put_line(to + i * kTileLineBytes, x);
    }
  }
};

// Unpacks the kinds of linear/planes.h without small scales and minima (plane_layout.h).
// A unit of these kinds has one or several groups of 32 weights.
template <class G>
struct RawPlanes {
  using W = Planes<G>;
  static constexpr int kGroup = 32, kLines = kGroup / 4, kGroupsOfScale = 1;
  static constexpr int kVectorRows = kPlaneVectorRows;
  static constexpr bool kScales = true, kLeast = W::kMin, kFloats = false, kAsStored = false;
  using Vectors = PlaneKind<W>;
  using FewRows = RawPlanes;
  using Product = S8S8Product;
  static constexpr ActFormat kAct = Vectors::kAct;
  static int64_t lines(int64_t k) { return Vectors::units(k) * kLines; }
  static const uint8_t* at(const uint8_t* panel, int64_t group) {
    return panel + group / W::kGroups * W::kUnitBytes;
  }
  static void unpack(const uint8_t* panel, int64_t group, int64_t, uint8_t* to) {
    put_quads<0>(at(panel, group) + W::kHeader + group % W::kGroups * W::kLines * 64, to);
  }
  template <int kQuad>
  CPUSERVE_INLINE void put_quads(const uint8_t* from, uint8_t* to) {
    if constexpr (kQuad < kLines) {
      put_line(to, quad_line<W, kQuad>(from) - static_cast<uint8_t>(G::kZero));
      put_quads<kQuad + 1>(from, to + kTileLineBytes);
    }
  }
  CPUSERVE_INLINE void factors(const uint8_t* panel, int64_t group, int column, F* scale,
                               F* least) {
    W::factors(at(panel, group), column, scale, least);
  }
  CPUSERVE_INLINE F add_least(F least, F x, F sum) { return fma(least, x, sum); }
};

// Unpacks float codes (linear/coded.h) to lines of bf16. K is a multiple of 32: whole AMX tiles.
template <class C>
struct RawCoded {
  static constexpr int kGroup = C::kGroup, kLines = kGroup / 2, kGroupsOfScale = 1;
  static constexpr int kVectorRows = 0;
  static constexpr bool kScales = true, kLeast = false, kFloats = true, kAsStored = false;
  using Vectors = void;
  using FewRows = RawCoded;
  using Product = Bf16Product;
  static constexpr ActFormat kAct = ActFormat::bf16;
  static int64_t lines(int64_t k) { return k / 2; }
  static const uint8_t* at(const uint8_t* panel, int64_t group) {
    return panel + group * C::bytes(kGroup);
  }
  static void unpack(const uint8_t* panel, int64_t group, int64_t k, uint8_t* to) {
    C::template widen<false>(at(panel, group), group_size<C>(k, group),
                             reinterpret_cast<uint16_t*>(to), 0);
  }
  CPUSERVE_INLINE void factors(const uint8_t* panel, int64_t group, int column, F* scale, F*) {
    *scale = C::scale(at(panel, group), column);
  }
};

}  // namespace
}  // namespace CPUSERVE_NS
