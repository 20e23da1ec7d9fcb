// The interface of the kernels: plain structs of arguments and one table of function
// pointers for each ISA level. The arguments of a kernel are in a file of table/, or at the top
// of the file of the kernel in generic/; only ISA units compile the other lines of such a file.
//
// Rules every kernel obeys:
//  * A kernel is noexcept and uses no allocation, I/O, globals or getenv; it gets scratch memory.
//  * Batch invariance: for one ISA level and weight kind, the bits of an output row depend only
//    on its own inputs, never on the number of rows, other rows, threads or the division of work.
//    A dot product over K is one chain of additions in ascending K for each output element
//    (lanes of a vector are output columns, so no sum is over the lanes of a vector).
//    Attention processes chunks of kChunk keys that begin at absolute multiples of kChunk.
//    Each chunk starts from an empty state, and chunks are merged in ascending order.
//  * Keys and values of masked or unused KV slots never enter a product, because 0 x NaN is NaN.
// An ISA translation unit may include only C headers and files under kernels/.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include "kernels/generic/activation.h"
#include "kernels/generic/add.h"
#include "kernels/generic/convert.h"
#include "kernels/generic/gated_norm.h"
#include "kernels/generic/hadamard_rows.h"
#include "kernels/generic/norm.h"
#include "kernels/generic/relative_attention.h"
#include "kernels/generic/selective_scan.h"
#include "kernels/generic/short_conv.h"
#include "kernels/table/attention.h"
#include "kernels/table/entries.h"
#include "kernels/table/index_keys.h"
#include "kernels/table/linear.h"
#include "kernels/table/recurrent.h"
#include "kernels/table/rows.h"
#include "kernels/table/sampling.h"
#include "kernels/table/weights.h"
#include "kernels/table/work_sizes.h"

namespace cpuserve {

// The types of products. KernelTable::probe_dot has a function that measures the rate of each type.
enum class DotKind : int32_t { f32 = 0, bf16, int8, int4, count };

// The kernels that have exactly one entry in the table: X(name, types of the arguments).
// The file with the arguments of a kernel has the kernel's line X(...) of this list. In an ISA unit
// with all kernels (isa/unit.h), the entry is the function of this name in kernels/generic/.
#define CPUSERVE_KERNELS(X)              \
  CPUSERVE_NORM_KERNELS(X)               \
  CPUSERVE_HADAMARD_KERNELS(X)           \
  CPUSERVE_CONVERT_KERNELS(X)            \
  CPUSERVE_ADD_KERNELS(X)                \
  CPUSERVE_ACTIVATION_KERNELS(X)         \
  CPUSERVE_STORE_KERNELS(X)              \
  CPUSERVE_INDEX_KERNELS(X)              \
  CPUSERVE_ENTRY_KERNELS(X)              \
  CPUSERVE_RECURRENT_KERNELS(X)          \
  CPUSERVE_SHORT_CONV_KERNELS(X)         \
  CPUSERVE_SELECTIVE_SCAN_KERNELS(X)     \
  CPUSERVE_GATED_NORM_KERNELS(X)         \
  CPUSERVE_RELATIVE_ATTENTION_KERNELS(X) \
  CPUSERVE_SAMPLING_KERNELS(X)

// The kernels of one ISA level.
// A level inherits the entries that its unit (isa/*.cpp) does not define.
struct KernelTable {
  const char* isa;
  LinearKernel linear[static_cast<int>(WeightKind::count)];
  AttentionKernel attention[static_cast<int>(KvType::count)];
  void (*attention_merge)(const AttentionMergeArgs&) noexcept;
#define CPUSERVE_ENTRY(name, ...) void (*name)(__VA_ARGS__) noexcept;
  CPUSERVE_KERNELS(CPUSERVE_ENTRY)
#undef CPUSERVE_ENTRY
  // Probes for the roofline. probe_read reads `bytes` bytes and returns their sum,
  // so that the compiler does not remove the reads. A function of probe_dot runs a loop of products
  // on registers `iterations` times and returns the number of operations: 2 for a multiply-add.
  // The functions for int8 and int4 use the products of weight kinds with 8 and 4 bits.
  uint64_t (*probe_read)(const void* data, size_t bytes) noexcept;
  double (*probe_dot[static_cast<int>(DotKind::count)])(int64_t iterations) noexcept;
};

}  // namespace cpuserve
