// Packs weights for matrix products of Arm, with 8 adjacent bytes of a column, and reads them back.
#pragma once
#include "kernels/linear/mmla/chains.h"
#include "kernels/linear/mmla/groups.h"

namespace CPUSERVE_NS {
namespace {

inline size_t mmla_dense_bytes(int64_t k) noexcept {
  return static_cast<size_t>(MmlaBf16::units(k) * kLineBytes);
}
inline size_t mmla_channel_bytes(int64_t k) noexcept {
  return static_cast<size_t>(MmlaChannel::units(k) * kLineBytes) + kChannelScales;
}
// unit_of_4 and unit_of_8 return the byte offset of word i (4 bytes) of a column
// in the codes of a unit, in the layouts with 4 and with 8 adjacent bytes of a column.
CPUSERVE_INLINE int unit_of_4(int i, int column) { return (i * kPanel + column) * 4; }
CPUSERVE_INLINE int unit_of_8(int i, int column) {
  return i / 2 * kLineBytes + column * kStepBytes + i % 2 * 4;
}
// Converts words x (number 2 i) and y (2 i + 1) of a column from one of these layouts to the other.
// 8-bit codes change between signed codes and codes plus 128. With 4-bit codes, the high nibbles
// of x and the low nibbles of y are exchanged. Calling the function twice restores x and y.
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

}  // namespace
}  // namespace CPUSERVE_NS
