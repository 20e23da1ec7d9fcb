// One instruction-set unit: gathers the kernels, compiled for the level that includes this, into
// its KernelTable. An entry left null is inherited from the level below (kernels/resolve.cpp); a
// unit says what it provides before the include:
//
//   CPUSERVE_UNIT_ALL      everything
//   CPUSERVE_UNIT_GROUPED  the quantized linears (int8 dot products)
//   CPUSERVE_UNIT_BF16     the bf16 linear and attention (bf16 dot products)
#pragma once
#include CPUSERVE_VEC  // first: everything below is written in its terms

#include "kernels/linear/channel.h"
#include "kernels/linear/dense.h"
#include "kernels/linear/w4_group.h"
#include "kernels/linear/w4_wide.h"
#include "kernels/linear/w8_group.h"
#include "kernels/table.h"
#if defined(CPUSERVE_UNIT_ALL) || defined(CPUSERVE_UNIT_BF16)
#include "kernels/generic/attention.h"
#endif
#ifdef CPUSERVE_UNIT_ALL
#include "kernels/generic/activation.h"
#include "kernels/generic/add.h"
#include "kernels/generic/convert.h"
#include "kernels/generic/norm.h"
#include "kernels/generic/rope_kv.h"
#include "kernels/generic/sample.h"
#endif
#include "kernels/generic/probe.h"

namespace CPUSERVE_NS {
namespace {

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
#endif
#if defined(CPUSERVE_UNIT_ALL) || defined(CPUSERVE_UNIT_BF16)
  t.linear[static_cast<int>(WeightKind::dense_bf16)] = dense_kernel<Bf16Element>();
  t.attention = attention;
  t.attention_merge = attention_merge;
#endif
#ifdef CPUSERVE_UNIT_ALL
  t.linear[static_cast<int>(WeightKind::dense_f16)] = dense_kernel<F16Element>();
  t.linear[static_cast<int>(WeightKind::dense_f32)] = dense_kernel<F32Element>();
  t.rms_norm = rms_norm;
  t.layer_norm = layer_norm;
  t.convert = convert;
  t.add = add;
  t.activation = activation;
  t.rope_store = rope_store;
  t.sample = sample;
  t.probe_read = probe_read;
#endif
  t.probe_dot = probe_dot;
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
