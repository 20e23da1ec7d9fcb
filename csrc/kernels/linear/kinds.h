// The families of weight kinds. A family is a class template with the kernels of similar kinds
// at the ISA level of this translation unit.
// CPUSERVE_WEIGHT_KINDS in kernels/table/weights.h lists the family of each kind. A family has
//   kDot         the type of its products: f32, bf16 or int8
//   kMmla        whether it has kernels on matrix products of Arm
//   vectors()    the kernel on vectors
//   tiles()      the kernel on matrix tiles (AMX)
//   products()   the kernel on matrix products of Arm
//   read()       writes elements [k0, k0 + n) of a source row as fp32;
//                only in families with kinds that have a source type of their own
#pragma once
#include "kernels/linear/channel.h"
#include "kernels/linear/coded.h"
#include "kernels/linear/dense.h"
#include "kernels/linear/plane_kernels.h"
#include "kernels/linear/source.h"
#include "kernels/linear/ternary.h"
#include "kernels/linear/w4_group.h"
#include "kernels/linear/w4_wide.h"
#include "kernels/linear/w8_group.h"
#include "kernels/linear/zero_group.h"
#ifdef CPUSERVE_UNIT_TILES
#include "kernels/linear/tiles.h"
#include "kernels/linear/tiles/ternary.h"
#endif
#ifdef CPUSERVE_UNIT_MMLA
#include "kernels/linear/mmla.h"
#endif

namespace CPUSERVE_NS {
namespace {

template <class E>
struct DenseFamily {
  static constexpr DotKind kDot = E::kAct == ActFormat::bf16 ? DotKind::bf16 : DotKind::f32;
  static constexpr bool kMmla = true;
  static constexpr LinearKernel vectors() { return dense_kernel<E>(); }
#ifdef CPUSERVE_UNIT_TILES
  static constexpr LinearKernel tiles() { return on_tiles<Bf16Tiles>(vectors()); }
#endif
#ifdef CPUSERVE_UNIT_BFMMLA
  static constexpr LinearKernel products() { return mmla_dense_kernel<MmlaBf16>(); }
#endif
};

template <class W>
struct GroupFamily {
  static constexpr DotKind kDot = DotKind::int8;
  static constexpr bool kMmla = true;
  static void read(const void* row, int64_t k0, int n, float* out) {
    W::Block::read(row, k0, n, out);
  }
  static constexpr LinearKernel vectors() { return group_kernel<W>(); }
#ifdef CPUSERVE_UNIT_TILES
  static constexpr LinearKernel tiles() { return on_tiles<GroupTiles<RawGroup<W>>>(vectors()); }
#endif
#ifdef CPUSERVE_UNIT_I8MM
  static constexpr LinearKernel products() { return mmla_group_kernel<W>(); }
#endif
};

// kGroupQuads: the quads (4 elements of K) of a row that share one scale; 0: the whole row does.
template <int kGroupQuads>
struct ChannelFamily {
  static constexpr DotKind kDot = DotKind::int8;
  static constexpr bool kMmla = true;
  static constexpr LinearKernel vectors() { return channel_kernel<kGroupQuads>(); }
#ifdef CPUSERVE_UNIT_TILES
  static constexpr LinearKernel tiles() {
    if constexpr (kGroupQuads == 0) return on_tiles<ChannelTiles>(vectors());
    return on_tiles<GroupTiles<RawChannel<false>>>(vectors());
  }
#endif
#ifdef CPUSERVE_UNIT_I8MM
  static constexpr LinearKernel products() {
    if constexpr (kGroupQuads == 0) return mmla_channel_kernel<MmlaChannel>();
    return mmla_channel_kernel<MmlaChannelGroups>();
  }
#endif
};

template <class G>
struct PlaneFamily {
  static constexpr DotKind kDot = DotKind::int8;
  static constexpr bool kMmla = false;
  static void read(const void* row, int64_t k0, int n, float* out) {
    if constexpr (G::kFactors == Factors::zero_points) return G::Source::read(row, k0, n, out);
    read_blocks<G>(row, k0, n, out);
  }
  static constexpr LinearKernel vectors() { return plane_kernel<G>(); }
#ifdef CPUSERVE_UNIT_TILES
  static constexpr LinearKernel tiles() {
    if constexpr (has_small(G::kFactors)) return on_tiles<BlockTiles<TileBlock<G>>>(vectors());
    return on_tiles<GroupTiles<RawPlanes<G>>>(vectors());
  }
#endif
};

template <class B>
struct TernaryFamily {
  static constexpr DotKind kDot = DotKind::int8;
  static constexpr bool kMmla = false;
  static void read(const void* row, int64_t k0, int n, float* out) {
    Ternary<B>::read(row, k0, n, out);
  }
  static constexpr LinearKernel vectors() { return ternary_kernel<B>(); }
#ifdef CPUSERVE_UNIT_TILES
  static constexpr LinearKernel tiles() { return on_tiles<GroupTiles<RawTernary<B>>>(vectors()); }
#endif
};

template <class C>
struct CodedFamily {
  static constexpr DotKind kDot = DotKind::bf16;
  static constexpr bool kMmla = false;
  static void read(const void* row, int64_t k0, int n, float* out) { C::read(row, k0, n, out); }
  static constexpr LinearKernel vectors() { return coded_kernel<C>(); }
#ifdef CPUSERVE_UNIT_TILES
  static constexpr LinearKernel tiles() { return on_tiles<GroupTiles<RawCoded<C>>>(vectors()); }
#endif
};

// Returns the kernel that this ISA unit (translation unit) defines for a family,
// or an empty kernel if the ISA level inherits the kernel from the level below.
template <class Family>
constexpr LinearKernel linear_of() {
#if defined(CPUSERVE_UNIT_ALL)
  return Family::vectors();
#elif defined(CPUSERVE_UNIT_TILES)
  if constexpr (Family::kDot != DotKind::f32) return Family::tiles();
#elif defined(CPUSERVE_UNIT_GROUPED)
  if constexpr (Family::kDot == DotKind::int8) return Family::vectors();
#elif defined(CPUSERVE_UNIT_BF16)
  if constexpr (Family::kDot == DotKind::bf16) return Family::vectors();
#elif defined(CPUSERVE_UNIT_I8MM)
  if constexpr (Family::kDot == DotKind::int8 && Family::kMmla) return Family::products();
#elif defined(CPUSERVE_UNIT_BFMMLA)
  if constexpr (Family::kDot == DotKind::bf16 && Family::kMmla) return Family::products();
#endif
  return {};
}

inline void read_floats(const void* row, SourceType type, int64_t k0, int n, float* out) {
  if (!row) {
    memset(out, 0, static_cast<size_t>(n) * sizeof(float));
    return;
  }
  switch (type) {
#define OWN_READ(name, source, weights, bytes, ...) \
  case SourceType::source:                          \
    return __VA_ARGS__::read(row, k0, n, out);
    CPUSERVE_WEIGHT_KINDS(CPUSERVE_NOTHING, OWN_READ)
#undef OWN_READ
    default:
      return read_shared(row, type, k0, n, out);
  }
}

}  // namespace
}  // namespace CPUSERVE_NS
