// One instruction-set unit: gathers the kernels, compiled for the level that includes this, into
// its KernelTable. An entry left null is inherited from the level below (kernels/resolve.cpp); a
// unit says what it provides before the include:
//
//   CPUSERVE_UNIT_ALL      everything
//   CPUSERVE_UNIT_GROUPED  the quantized linears (int8 dot products)
//   CPUSERVE_UNIT_BF16     the bf16 linear and attention (bf16 dot products)
#pragma once
#include CPUSERVE_VEC  // first: everything below is written in its terms

#include "kernels/linear/dense.h"
#include "kernels/linear/w4_group.h"
#include "kernels/linear/w8_group.h"
#include "kernels/table.h"
#if defined(CPUSERVE_UNIT_ALL) || defined(CPUSERVE_UNIT_BF16)
#if __has_include("kernels/generic/attention.h")
#define HAVE_attention
#include "kernels/generic/attention.h"
#endif
#endif
#ifdef CPUSERVE_UNIT_ALL
#if __has_include("kernels/generic/activation.h")
#define HAVE_activation
#include "kernels/generic/activation.h"
#endif
#if __has_include("kernels/generic/add.h")
#define HAVE_add
#include "kernels/generic/add.h"
#endif
#if __has_include("kernels/generic/convert.h")
#define HAVE_convert
#include "kernels/generic/convert.h"
#endif
#if __has_include("kernels/generic/norm.h")
#define HAVE_norm
#include "kernels/generic/norm.h"
#endif
#if __has_include("kernels/generic/rope_kv.h")
#define HAVE_rope_kv
#include "kernels/generic/rope_kv.h"
#endif
#if __has_include("kernels/generic/sample.h")
#define HAVE_sample
#include "kernels/generic/sample.h"
#endif
#endif
#if __has_include("kernels/generic/probe.h")
#define HAVE_probe
#include "kernels/generic/probe.h"
#endif

namespace CPUSERVE_NS {
namespace {

constexpr KernelTable make_table(const char* isa) {
  KernelTable t{};
  t.isa = isa;
#if defined(CPUSERVE_UNIT_ALL) || defined(CPUSERVE_UNIT_GROUPED)
  t.linear[static_cast<int>(WeightKind::w8_g32)] = group_kernel<W8Group>();
  t.linear[static_cast<int>(WeightKind::w4_g32)] = group_kernel<W4Group<false>>();
  t.linear[static_cast<int>(WeightKind::w4m_g32)] = group_kernel<W4Group<true>>();
#endif
#if defined(CPUSERVE_UNIT_ALL) || defined(CPUSERVE_UNIT_BF16)
  t.linear[static_cast<int>(WeightKind::dense_bf16)] = dense_kernel<Bf16Element>();
#ifdef HAVE_attention
  t.attention = attention;
#endif
#ifdef HAVE_attention
  t.attention_merge = attention_merge;
#endif
#endif
#ifdef CPUSERVE_UNIT_ALL
  t.linear[static_cast<int>(WeightKind::dense_f16)] = dense_kernel<F16Element>();
  t.linear[static_cast<int>(WeightKind::dense_f32)] = dense_kernel<F32Element>();
#ifdef HAVE_norm
  t.rms_norm = rms_norm;
#endif
#ifdef HAVE_norm
  t.layer_norm = layer_norm;
#endif
  t.convert = convert;
#ifdef HAVE_add
  t.add = add;
#endif
#ifdef HAVE_activation
  t.activation = activation;
#endif
#ifdef HAVE_rope_kv
  t.rope_store = rope_store;
#endif
#ifdef HAVE_sample
  t.sample = sample;
#endif
#ifdef HAVE_probe
  t.probe_read = probe_read;
#endif
#endif
#ifdef HAVE_probe
  t.probe_dot = probe_dot;
#endif
  return t;
}

}  // namespace
}  // namespace CPUSERVE_NS

// The unit's one exported symbol.
#define CPUSERVE_EXPORT_TABLE(level)                                                \
  extern "C" __attribute__((visibility("hidden"))) const cpuserve::KernelTable*     \
  cpuserve_isa_##level() {                                                          \
    static constexpr cpuserve::KernelTable table = CPUSERVE_NS::make_table(#level); \
    return &table;                                                                  \
  }
