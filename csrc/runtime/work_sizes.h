// Computes the work sizes (block sizes) of the kernels from the caches and the vendor of a CPU.
#pragma once
#include <string_view>

#include "cpu/caches.h"
#include "kernels/table.h"

namespace cpuserve {

// Returns the work sizes for a core with these caches. A cache size of 0 is unknown:
// work sizes that depend on it keep their defaults. `vendor` is CpuInfo::vendor.
WorkSizes work_sizes_for(const CacheSizes& caches, std::string_view vendor) noexcept;

// Throws std::invalid_argument if a kernel cannot work with these sizes.
void check_work_sizes(const WorkSizes& sizes);

// The fields of WorkSizes, each with its key in Python and in the output of `doctor`.
struct WorkSizeField {
  const char* name;
  int32_t WorkSizes::*value;
};
constexpr WorkSizeField kWorkSizeFields[] = {
    {"strip_bytes", &WorkSizes::strip_bytes},         {"rows", &WorkSizes::rows},
    {"near_bytes", &WorkSizes::near_bytes},           {"ahead_bytes", &WorkSizes::ahead_bytes},
    {"float_pass_rows", &WorkSizes::float_pass_rows}, {"far_pass_rows", &WorkSizes::far_pass_rows},
    {"near_blocks", &WorkSizes::near_blocks},         {"near_keys", &WorkSizes::near_keys},
    {"attention_bytes", &WorkSizes::attention_bytes}};

}  // namespace cpuserve
