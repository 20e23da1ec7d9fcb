// One ISA unit: collects the kernels, compiled for the level that includes this file, in its
// KernelTable. An entry left null is inherited from the level below (kernels/resolve.cpp); a
// unit defines its parts before the include:
//
//   CPUSERVE_UNIT_ALL      everything
//   CPUSERVE_UNIT_GROUPED  the quantized linears (int8 dot products)
//   CPUSERVE_UNIT_BF16     the bf16 linear and attention (bf16 dot products)
//   CPUSERVE_UNIT_I8MM     the quantized linears on SMMLA
//   CPUSERVE_UNIT_BFMMLA   the bf16 linear on BFMMLA, and attention (bf16 dot products)
//   CPUSERVE_UNIT_TILES    linears and attention on matrix tiles (AMX)
#pragma once
#if defined(CPUSERVE_UNIT_I8MM) || defined(CPUSERVE_UNIT_BFMMLA)
#define CPUSERVE_UNIT_MMLA
#endif
#include CPUSERVE_VEC  // first: the files below use its primitives

#include "kernels/linear/channel.h"
#include "kernels/linear/coded.h"
#include "kernels/linear/dense.h"
#include "kernels/linear/planes.h"
#include "kernels/linear/w4_group.h"
#include "kernels/linear/w4_wide.h"
#include "kernels/linear/w8_group.h"
#include "kernels/linear/zero_group.h"
#include "kernels/table.h"
#if defined(CPUSERVE_UNIT_ALL) || defined(CPUSERVE_UNIT_BF16) || defined(CPUSERVE_UNIT_BFMMLA) || \
    defined(CPUSERVE_UNIT_TILES)
#include "kernels/generic/attention.h"
#endif
#ifdef CPUSERVE_UNIT_TILES
#include "kernels/linear/tiles.h"
#endif
#ifdef CPUSERVE_UNIT_MMLA
#include "kernels/linear/mmla.h"
#endif
#ifdef CPUSERVE_UNIT_ALL
#include "kernels/generic/activation.h"
#include "kernels/generic/add.h"
#include "kernels/generic/convert.h"
#include "kernels/generic/gated_norm.h"
#include "kernels/generic/logits.h"
#include "kernels/generic/norm.h"
#include "kernels/generic/recurrent.h"
#include "kernels/generic/rope_kv.h"
#include "kernels/generic/sample.h"
#include "kernels/generic/short_conv.h"
#endif
#include "kernels/generic/probe.h"

namespace CPUSERVE_NS {
namespace {

// Attention over a cache with elements multiplied in pairs of bf16.
#if defined(CPUSERVE_UNIT_ALL) || defined(CPUSERVE_UNIT_BF16) || defined(CPUSERVE_UNIT_BFMMLA) || \
    defined(CPUSERVE_UNIT_TILES)
constexpr void set_pair_attention(KernelTable& t) {
  t.attention[static_cast<int>(KvType::bf16)] = attention_kernel<KvBf16>();
  t.attention[static_cast<int>(KvType::int8)] = attention_kernel<KvInt8>();
  t.attention[static_cast<int>(KvType::e4m3)] = attention_kernel<KvE4m3>();
  t.attention[static_cast<int>(KvType::e5m2)] = attention_kernel<KvE5m2>();
}
#endif

constexpr KernelTable make_table(const char* isa) {
  KernelTable t{};
  t.isa = isa;
#if defined(CPUSERVE_UNIT_ALL) || defined(CPUSERVE_UNIT_GROUPED)
  t.linear[static_cast<int>(WeightKind::w8_g32)] = group_kernel<W8Group>();
  t.linear[static_cast<int>(WeightKind::w4_g32)] = group_kernel<W4Group<false>>();
  t.linear[static_cast<int>(WeightKind::w4m_g32)] = group_kernel<W4Group<true>>();
  t.linear[static_cast<int>(WeightKind::w4m_g128)] = group_kernel<W4Wide>();
  t.linear[static_cast<int>(WeightKind::w8_channel)] = channel_kernel<0>();
  t.linear[static_cast<int>(WeightKind::w8_channel_g128)] = channel_kernel<kWideGroup / 4>();
  t.linear[static_cast<int>(WeightKind::q4_k)] = plane_kernel<GgufQ4K>();
  t.linear[static_cast<int>(WeightKind::q5_k)] = plane_kernel<GgufQ5K>();
  t.linear[static_cast<int>(WeightKind::q6_k)] = plane_kernel<GgufQ6K>();
  t.linear[static_cast<int>(WeightKind::q2_k)] = plane_kernel<GgufQ2K>();
  t.linear[static_cast<int>(WeightKind::q3_k)] = plane_kernel<GgufQ3K>();
  t.linear[static_cast<int>(WeightKind::q5_0)] = plane_kernel<GgufQ5<false>>();
  t.linear[static_cast<int>(WeightKind::q5_1)] = plane_kernel<GgufQ5<true>>();
  t.linear[static_cast<int>(WeightKind::iq4_nl)] = plane_kernel<GgufIq4Nl>();
  t.linear[static_cast<int>(WeightKind::iq4_xs)] = plane_kernel<GgufIq4Xs>();
  t.linear[static_cast<int>(WeightKind::mxfp4)] = plane_kernel<GgufMxfp4>();
  t.linear[static_cast<int>(WeightKind::w8z_g32)] = group_kernel<ZeroGroup<8, 32>>();
  t.linear[static_cast<int>(WeightKind::w8z_g128)] = group_kernel<ZeroGroup<8, 128>>();
  t.linear[static_cast<int>(WeightKind::w4z_g32)] = group_kernel<ZeroGroup<4, 32>>();
  t.linear[static_cast<int>(WeightKind::w4z_g64)] = group_kernel<ZeroGroup<4, 64>>();
  t.linear[static_cast<int>(WeightKind::w2z_g32)] = plane_kernel<ZeroBits<2, 32>>();
  t.linear[static_cast<int>(WeightKind::w2z_g64)] = plane_kernel<ZeroBits<2, 64>>();
  t.linear[static_cast<int>(WeightKind::w2z_g128)] = plane_kernel<ZeroBits<2, 128>>();
  t.linear[static_cast<int>(WeightKind::w2z_g256)] = plane_kernel<ZeroBits<2, 256>>();
  t.linear[static_cast<int>(WeightKind::w3z_g32)] = plane_kernel<ZeroBits<3, 32>>();
  t.linear[static_cast<int>(WeightKind::w3z_g64)] = plane_kernel<ZeroBits<3, 64>>();
  t.linear[static_cast<int>(WeightKind::w3z_g128)] = plane_kernel<ZeroBits<3, 128>>();
  t.linear[static_cast<int>(WeightKind::w3z_g256)] = plane_kernel<ZeroBits<3, 256>>();
#endif
#if defined(CPUSERVE_UNIT_ALL) || defined(CPUSERVE_UNIT_BF16)
  t.linear[static_cast<int>(WeightKind::dense_bf16)] = dense_kernel<Bf16Element>();
  t.linear[static_cast<int>(WeightKind::e4m3_g128)] = coded_kernel<F8Codes>();
  t.linear[static_cast<int>(WeightKind::nf4_g64)] = coded_kernel<TableCodes64<Nf4Table>>();
  t.linear[static_cast<int>(WeightKind::fp4_g64)] = coded_kernel<TableCodes64<Fp4Table>>();
  t.linear[static_cast<int>(WeightKind::nvfp4)] = coded_kernel<Nvfp4Codes>();
  set_pair_attention(t);
  t.attention_merge = attention_merge;
#endif
#ifdef CPUSERVE_UNIT_I8MM
  t.linear[static_cast<int>(WeightKind::w8_g32)] = mmla_group_kernel<W8Group>();
  t.linear[static_cast<int>(WeightKind::w4_g32)] = mmla_group_kernel<W4Group<false>>();
  t.linear[static_cast<int>(WeightKind::w4m_g32)] = mmla_group_kernel<W4Group<true>>();
  t.linear[static_cast<int>(WeightKind::w4m_g128)] = mmla_group_kernel<W4Wide>();
  t.linear[static_cast<int>(WeightKind::w8_channel)] = mmla_channel_kernel<MmlaChannel>();
  t.linear[static_cast<int>(WeightKind::w8_channel_g128)] =
      mmla_channel_kernel<MmlaChannelGroups>();
  t.linear[static_cast<int>(WeightKind::w8z_g32)] = mmla_group_kernel<ZeroGroup<8, 32>>();
  t.linear[static_cast<int>(WeightKind::w8z_g128)] = mmla_group_kernel<ZeroGroup<8, 128>>();
  t.linear[static_cast<int>(WeightKind::w4z_g32)] = mmla_group_kernel<ZeroGroup<4, 32>>();
  t.linear[static_cast<int>(WeightKind::w4z_g64)] = mmla_group_kernel<ZeroGroup<4, 64>>();
#endif
#ifdef CPUSERVE_UNIT_BFMMLA
  t.linear[static_cast<int>(WeightKind::dense_bf16)] = mmla_dense_kernel<MmlaBf16>();
  set_pair_attention(t);
  t.attention_merge = attention_merge;
#endif
#ifdef CPUSERVE_UNIT_TILES
  t.linear[static_cast<int>(WeightKind::dense_bf16)] =
      on_tiles<Bf16Tiles>(dense_kernel<Bf16Element>());
  t.linear[static_cast<int>(WeightKind::e4m3_g128)] =
      on_tiles<GroupTiles<RawCoded<F8Codes>>>(coded_kernel<F8Codes>());
  t.linear[static_cast<int>(WeightKind::nf4_g64)] =
      on_tiles<GroupTiles<RawCoded<TableCodes64<Nf4Table>>>>(
          coded_kernel<TableCodes64<Nf4Table>>());
  t.linear[static_cast<int>(WeightKind::fp4_g64)] =
      on_tiles<GroupTiles<RawCoded<TableCodes64<Fp4Table>>>>(
          coded_kernel<TableCodes64<Fp4Table>>());
  t.linear[static_cast<int>(WeightKind::nvfp4)] =
      on_tiles<GroupTiles<RawCoded<Nvfp4Codes>>>(coded_kernel<Nvfp4Codes>());
  t.linear[static_cast<int>(WeightKind::w8_g32)] =
      on_tiles<GroupTiles<RawGroup<W8Group>>>(group_kernel<W8Group>());
  t.linear[static_cast<int>(WeightKind::w4_g32)] =
      on_tiles<GroupTiles<RawGroup<W4Group<false>>>>(group_kernel<W4Group<false>>());
  t.linear[static_cast<int>(WeightKind::w4m_g32)] =
      on_tiles<GroupTiles<RawGroup<W4Group<true>>>>(group_kernel<W4Group<true>>());
  t.linear[static_cast<int>(WeightKind::w4m_g128)] =
      on_tiles<GroupTiles<RawGroup<W4Wide>>>(group_kernel<W4Wide>());
  t.linear[static_cast<int>(WeightKind::w8_channel)] = on_tiles<ChannelTiles>(channel_kernel<0>());
  t.linear[static_cast<int>(WeightKind::w8_channel_g128)] =
      on_tiles<GroupTiles<RawChannel<false>>>(channel_kernel<kWideGroup / 4>());
  t.linear[static_cast<int>(WeightKind::q4_k)] =
      on_tiles<BlockTiles<GgufQ4K>>(plane_kernel<GgufQ4K>());
  t.linear[static_cast<int>(WeightKind::q5_k)] =
      on_tiles<BlockTiles<GgufQ5K>>(plane_kernel<GgufQ5K>());
  t.linear[static_cast<int>(WeightKind::q6_k)] =
      on_tiles<BlockTiles<GgufQ6K>>(plane_kernel<GgufQ6K>());
  t.linear[static_cast<int>(WeightKind::q2_k)] =
      on_tiles<BlockTiles<GgufQ2K>>(plane_kernel<GgufQ2K>());
  t.linear[static_cast<int>(WeightKind::q3_k)] =
      on_tiles<BlockTiles<GgufQ3K>>(plane_kernel<GgufQ3K>());
  t.linear[static_cast<int>(WeightKind::q5_0)] =
      on_tiles<GroupTiles<RawPlanes<GgufQ5<false>>>>(plane_kernel<GgufQ5<false>>());
  t.linear[static_cast<int>(WeightKind::q5_1)] =
      on_tiles<GroupTiles<RawPlanes<GgufQ5<true>>>>(plane_kernel<GgufQ5<true>>());
  t.linear[static_cast<int>(WeightKind::iq4_nl)] =
      on_tiles<GroupTiles<RawPlanes<GgufIq4Nl>>>(plane_kernel<GgufIq4Nl>());
  t.linear[static_cast<int>(WeightKind::iq4_xs)] =
      on_tiles<BlockTiles<GgufIq4Xs>>(plane_kernel<GgufIq4Xs>());
  t.linear[static_cast<int>(WeightKind::mxfp4)] =
      on_tiles<GroupTiles<RawPlanes<GgufMxfp4>>>(plane_kernel<GgufMxfp4>());
  t.linear[static_cast<int>(WeightKind::w8z_g32)] =
      on_tiles<GroupTiles<RawGroup<ZeroGroup<8, 32>>>>(group_kernel<ZeroGroup<8, 32>>());
  t.linear[static_cast<int>(WeightKind::w8z_g128)] =
      on_tiles<GroupTiles<RawGroup<ZeroGroup<8, 128>>>>(group_kernel<ZeroGroup<8, 128>>());
  t.linear[static_cast<int>(WeightKind::w4z_g32)] =
      on_tiles<GroupTiles<RawGroup<ZeroGroup<4, 32>>>>(group_kernel<ZeroGroup<4, 32>>());
  t.linear[static_cast<int>(WeightKind::w4z_g64)] =
      on_tiles<GroupTiles<RawGroup<ZeroGroup<4, 64>>>>(group_kernel<ZeroGroup<4, 64>>());
  t.linear[static_cast<int>(WeightKind::w2z_g32)] =
      on_tiles<GroupTiles<RawPlanes<ZeroBits<2, 32>>>>(plane_kernel<ZeroBits<2, 32>>());
  t.linear[static_cast<int>(WeightKind::w2z_g64)] =
      on_tiles<GroupTiles<RawPlanes<ZeroBits<2, 64>>>>(plane_kernel<ZeroBits<2, 64>>());
  t.linear[static_cast<int>(WeightKind::w2z_g128)] =
      on_tiles<GroupTiles<RawPlanes<ZeroBits<2, 128>>>>(plane_kernel<ZeroBits<2, 128>>());
  t.linear[static_cast<int>(WeightKind::w2z_g256)] =
      on_tiles<GroupTiles<RawPlanes<ZeroBits<2, 256>>>>(plane_kernel<ZeroBits<2, 256>>());
  t.linear[static_cast<int>(WeightKind::w3z_g32)] =
      on_tiles<GroupTiles<RawPlanes<ZeroBits<3, 32>>>>(plane_kernel<ZeroBits<3, 32>>());
  t.linear[static_cast<int>(WeightKind::w3z_g64)] =
      on_tiles<GroupTiles<RawPlanes<ZeroBits<3, 64>>>>(plane_kernel<ZeroBits<3, 64>>());
  t.linear[static_cast<int>(WeightKind::w3z_g128)] =
      on_tiles<GroupTiles<RawPlanes<ZeroBits<3, 128>>>>(plane_kernel<ZeroBits<3, 128>>());
  t.linear[static_cast<int>(WeightKind::w3z_g256)] =
      on_tiles<GroupTiles<RawPlanes<ZeroBits<3, 256>>>>(plane_kernel<ZeroBits<3, 256>>());
  set_pair_attention(t);
#endif
#ifdef CPUSERVE_UNIT_ALL
  t.attention[static_cast<int>(KvType::f16)] = attention_kernel<KvF16>();
  t.attention[static_cast<int>(KvType::f32)] = attention_kernel<KvF32>();
  t.linear[static_cast<int>(WeightKind::dense_f16)] = dense_kernel<F16Element>();
  t.linear[static_cast<int>(WeightKind::dense_f32)] = dense_kernel<F32Element>();
#define CPUSERVE_ENTRY(name, ...) t.name = name;
  CPUSERVE_KERNELS(CPUSERVE_ENTRY)
#undef CPUSERVE_ENTRY
  t.probe_read = probe_read;
#endif
  constexpr auto dot = [](DotKind kind) { return static_cast<int>(kind); };
#ifdef CPUSERVE_UNIT_ALL
  t.probe_dot[dot(DotKind::f32)] = probe_f32;
#endif
#if !defined(CPUSERVE_UNIT_GROUPED) && !defined(CPUSERVE_UNIT_I8MM)
  t.probe_dot[dot(DotKind::bf16)] = probe_bf16;
#endif
#if !defined(CPUSERVE_UNIT_BF16) && !defined(CPUSERVE_UNIT_BFMMLA)
  t.probe_dot[dot(DotKind::int8)] = probe_bytes<W8Group>;
  t.probe_dot[dot(DotKind::int4)] = probe_bytes<W4Group<false>>;
#endif
#if !defined(CPUSERVE_UNIT_ALL) && !defined(CPUSERVE_UNIT_MMLA)
  for (LinearKernel& kernel : t.linear) {  // those below pack weights as these read them
    kernel.panel_bytes = nullptr;
    kernel.pack = nullptr;
    kernel.row = nullptr;
  }
#endif
  return t;
}

}  // namespace
}  // namespace CPUSERVE_NS

// The unit's one exported symbol.
#define CPUSERVE_EXPORT_TABLE(level)                                                \
  extern "C" __attribute__((visibility("hidden")))                                  \
  const cpuserve::KernelTable* cpuserve_isa_##level() {                             \
    static constexpr cpuserve::KernelTable table = CPUSERVE_NS::make_table(#level); \
    return &table;                                                                  \
  }
