// The kernel API: plain structs (table/), plain function pointers, one table per ISA level.
//
// Rules every kernel obeys:
//  * noexcept, no allocation, no I/O, no globals, no getenv; scratch comes from the caller.
//  * Batch invariance: for one ISA level and weight kind, an output row depends on its own inputs
//    only, bit for bit: never on m, on its neighbours, on the task split or on threads. A dot
//    product over K is one accumulator chain in ascending K (one chain per output element; lanes
//    are output columns, so no horizontal sums). Attention works in kChunk-key chunks of absolute
//    position, each from an empty state, merged in ascending order.
//  * Masked or stale KV slots never reach a product (0 x NaN is NaN).
// Only C headers and files under kernels/ may be included by an ISA translation unit.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include "kernels/table/attention.h"
#include "kernels/table/linear.h"
#include "kernels/table/recurrent.h"
#include "kernels/table/rows.h"
#include "kernels/table/rowwise.h"
#include "kernels/table/sampling.h"
#include "kernels/table/weights.h"
#include "kernels/table/work_sizes.h"

namespace cpuserve {

// The products that a probe measures.
enum class DotKind : int32_t { f32 = 0, bf16, int8, int4, count };

// The kernels with one entry in the table: X(name, types of the arguments). A unit that
// defines everything (isa/unit.h) takes the function of the same name from kernels/generic/.
#define CPUSERVE_KERNELS(X)                                      \
  X(rms_norm, const NormArgs&)                                   \
  X(layer_norm, const NormArgs&)                                 \
  X(convert, const ConvertArgs&)                                 \
  X(add, const AddArgs&)                                         \
  X(activation, const ActivationArgs&)                           \
  X(rope_store, const RopeStoreArgs&)                            \
  X(latent_store, const LatentStoreArgs&)                        \
  X(recurrent, const RecurrentArgs&)                             \
  X(short_conv, const ShortConvArgs&)                            \
  X(gated_norm, const GatedNormArgs&)                            \
  X(scale_logits, const ScaleLogitsArgs&)                        \
  X(sample_scan, const SampleArgs&, int32_t begin, int32_t end)  \
  X(sample_weigh, const SampleArgs&, int32_t begin, int32_t end) \
  X(sample, SampleArgs&)

// One ISA level's kernels. A level inherits the entries it does not override (isa/*.cpp).
struct KernelTable {
  const char* isa;
  LinearKernel linear[static_cast<int>(WeightKind::count)];
  AttentionKernel attention[static_cast<int>(KvType::count)];
  void (*attention_merge)(const AttentionMergeArgs&) noexcept;
#define CPUSERVE_ENTRY(name, ...) void (*name)(__VA_ARGS__) noexcept;
  CPUSERVE_KERNELS(CPUSERVE_ENTRY)
#undef CPUSERVE_ENTRY
  // Roofline probes. probe_read returns the sum of all bytes that it read, so that the compiler
  // removes nothing. A function of probe_dot runs `iterations` of a loop of products on registers
  // and returns the operations done; int8 and int4 are the products of the 8- and 4-bit kinds.
  uint64_t (*probe_read)(const void* data, size_t bytes) noexcept;
  double (*probe_dot[static_cast<int>(DotKind::count)])(int64_t iterations) noexcept;
};

}  // namespace cpuserve
