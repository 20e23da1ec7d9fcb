// The kernels of the weight kinds with codes in planes of bits: their tile (linear/planes.h),
// and how panels are packed and read.
#pragma once
#include "kernels/linear/planes.h"

namespace CPUSERVE_NS {
namespace {

// Chooses the tile of a kind: PlaneBlocks for units of 256 with q8g256 rows, otherwise PlaneGroups.
// All kinds with zero points and equal numbers of bits share the compiled code of one tile,
// which counts the groups of 32 weights after each header.
template <class W, bool kBlocks>
struct PlaneKindOf {
  using Type = PlaneGroups<W>;
};
template <class W>
struct PlaneKindOf<W, true> {
  using Type = PlaneBlocks<W>;
};
template <int kBits, int kWeights>
struct PlaneKindOf<Planes<ZeroBits<kBits, kWeights>>, false> {
  using Type = PlaneGroups<Planes<ZeroBits<kBits, 32>>>;
};
// IQ2_XS and IQ2_S are equal once they are packed.
template <class G>
struct TileBlockOf {
  using Type = G;
};
template <>
struct TileBlockOf<GgufIq2S> {
  using Type = GgufIq2Xs;
};
template <class G>
using TileBlock = typename TileBlockOf<G>::Type;
template <class W>
using PlaneKind = typename PlaneKindOf<W, W::kScaled>::Type;

template <class W>
size_t plane_panel_bytes(int64_t k) noexcept {
  return static_cast<size_t>((k + W::kUnit - 1) / W::kUnit * W::kUnitBytes);
}

// Packs a panel from source rows of the only source type of W. A null row is a row of zeros.
template <class W>
void pack_planes(const PackArgs& a) noexcept {
  BlockCodes c{};  // take() sets all members that pack_column reads
  for (int64_t u = 0; u * W::kUnit < a.k; u++) {
    uint8_t* to = static_cast<uint8_t*>(a.panel) + u * W::kUnitBytes;
    for (int r = 0; r < kPanel; r++) {
      const auto* row = static_cast<const uint8_t*>(a.rows[r]);
      if (row) {
        W::Block::take(row + u * W::Block::kBytes, c);
      } else {
        c = {};
      }
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
  using Kind = PlaneKind<Planes<TileBlock<G>>>;
  return {Kind::kAct,        plane_panel_bytes<W>, pack_planes<W>,         run_linear<Kind>,
          plane_row<W>,      Kind::kRows,          Kind::kPanels * kPanel, Kind::kPanels,
          Kind::kStreamRows, linear_block_k<Kind>};
}

}  // namespace
}  // namespace CPUSERVE_NS
