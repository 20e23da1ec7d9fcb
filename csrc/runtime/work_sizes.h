// From the caches and the vendor of a CPU to the work sizes of the kernels. A pure function.
#pragma once
#include <string_view>

#include "cpu/caches.h"
#include "kernels/table.h"

namespace cpuserve {

// Sizes for a core with these caches; a size of 0 is unknown, and keeps what depends on it at its
// default. vendor: CpuInfo::vendor.
WorkSizes work_sizes_for(const CacheSizes& caches, std::string_view vendor) noexcept;

// Throws std::invalid_argument if a kernel could not work with these sizes.
void check_work_sizes(const WorkSizes& sizes);

// Every size under the name that Python and doctor use for it.
struct WorkSizeField {
  const char* name;
  int32_t WorkSizes::*value;
};
constexpr WorkSizeField kWorkSizeFields[] = {{"strip_bytes", &WorkSizes::strip_bytes},
                                             {"rows", &WorkSizes::rows},
                                             {"near_bytes", &WorkSizes::near_bytes},
                                             {"ahead_bytes", &WorkSizes::ahead_bytes},
                                             {"float_pass_rows", &WorkSizes::float_pass_rows},
                                             {"far_pass_rows", &WorkSizes::far_pass_rows},
                                             {"near_blocks", &WorkSizes::near_blocks},
                                             {"attention_bytes", &WorkSizes::attention_bytes}};

}  // namespace cpuserve
