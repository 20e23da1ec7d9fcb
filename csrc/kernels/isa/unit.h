// An ISA unit is a .cpp file of this directory. Each ISA unit includes this header,
// which compiles kernels for one ISA level and collects them in a KernelTable.
// A null entry of the table is inherited from the next lower ISA level (kernels/resolve.cpp).
// The macro that a unit defines before the include selects its kernels:
//
//   CPUSERVE_UNIT_ALL      all kernels
//   CPUSERVE_UNIT_GROUPED  the quantized linears (int8 dot products)
//   CPUSERVE_UNIT_BF16     the bf16 linear and attention (bf16 dot products)
//   CPUSERVE_UNIT_I8MM     the quantized linears with SMMLA
//   CPUSERVE_UNIT_BFMMLA   the bf16 linear with BFMMLA, attention with BFMMLA and BFDOT
//   CPUSERVE_UNIT_TILES    linears and attention on AMX tiles
#pragma once
#if defined(CPUSERVE_UNIT_I8MM) || defined(CPUSERVE_UNIT_BFMMLA)
#define CPUSERVE_UNIT_MMLA
#endif
#include CPUSERVE_VEC  // included first, because the files below use its primitives

#include "kernels/linear/kinds.h"
#include "kernels/table.h"
#if defined(CPUSERVE_UNIT_ALL) || defined(CPUSERVE_UNIT_BF16) || defined(CPUSERVE_UNIT_BFMMLA) || \
    defined(CPUSERVE_UNIT_TILES)
#include "kernels/generic/attention.h"
#endif
#ifdef CPUSERVE_UNIT_ALL
#include "kernels/generic/entries.h"
#include "kernels/generic/index_keys.h"
#include "kernels/generic/logits.h"
#include "kernels/generic/recurrent.h"
#include "kernels/generic/rope_kv.h"
#include "kernels/generic/sample.h"
#include "kernels/generic/wkv6.h"
#include "kernels/generic/wkv7.h"
#endif
#include "kernels/generic/probe.h"

namespace CPUSERVE_NS {
namespace {

// Sets the attention kernels for KV cache types that are multiplied as pairs of bf16:
// bf16 itself, and the types with codes of 8 and 4 bits, which are widened to bf16.
#if defined(CPUSERVE_UNIT_ALL) || defined(CPUSERVE_UNIT_BF16) || defined(CPUSERVE_UNIT_BFMMLA) || \
    defined(CPUSERVE_UNIT_TILES)
constexpr void set_pair_attention(KernelTable& t) {
  t.attention[static_cast<int>(KvType::bf16)] = attention_kernel<KvBf16>();
  t.attention[static_cast<int>(KvType::int8)] = attention_kernel<KvInt8>();
  t.attention[static_cast<int>(KvType::e4m3)] = attention_kernel<KvE4m3>();
  t.attention[static_cast<int>(KvType::int8_v4)] = attention_kernel<KvInt8V4>();
}
#endif

constexpr KernelTable make_table(const char* isa) {
  KernelTable t{};
  t.isa = isa;
#define CPUSERVE_SHARED_KIND(name, ...) \
  t.linear[static_cast<int>(WeightKind::name)] = linear_of<__VA_ARGS__>();
#define CPUSERVE_OWN_KIND(name, source, weights, bytes, ...) CPUSERVE_SHARED_KIND(name, __VA_ARGS__)
  CPUSERVE_WEIGHT_KINDS(CPUSERVE_SHARED_KIND, CPUSERVE_OWN_KIND)
#undef CPUSERVE_SHARED_KIND
#undef CPUSERVE_OWN_KIND
#if defined(CPUSERVE_UNIT_ALL) || defined(CPUSERVE_UNIT_BF16) || defined(CPUSERVE_UNIT_BFMMLA) || \
    defined(CPUSERVE_UNIT_TILES)
  set_pair_attention(t);
#endif
#if defined(CPUSERVE_UNIT_ALL) || defined(CPUSERVE_UNIT_BF16) || defined(CPUSERVE_UNIT_BFMMLA)
  t.attention_merge = attention_merge;
#endif
#ifdef CPUSERVE_UNIT_ALL
  t.attention[static_cast<int>(KvType::f16)] = attention_kernel<KvF16>();
  t.attention[static_cast<int>(KvType::f32)] = attention_kernel<KvF32>();
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
  // The levels below pack weights in the layout that these kernels read, so packing is inherited.
  for (LinearKernel& kernel : t.linear) {
    kernel.panel_bytes = nullptr;
    kernel.pack = nullptr;
    kernel.row = nullptr;
  }
#endif
  return t;
}

}  // namespace
}  // namespace CPUSERVE_NS

// Defines the only symbol that the unit exports: a function that returns its table.
#define CPUSERVE_EXPORT_TABLE(level)                                                \
  extern "C" __attribute__((visibility("hidden")))                                  \
  const cpuserve::KernelTable* cpuserve_isa_##level() {                             \
    static constexpr cpuserve::KernelTable table = CPUSERVE_NS::make_table(#level); \
    return &table;                                                                  \
  }
