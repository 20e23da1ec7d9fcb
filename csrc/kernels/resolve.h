// Builds the KernelTable of each ISA level.
// Reports which levels are in this build, and which level provides each entry of a table.
//
// A level extends a lower level (isa_level_base): kernels that it does not define are the kernels
// of the lower level. "scalar" extends no level, and no level takes kernels from it.
// This file does not check which levels the CPU can run; csrc/cpu/features.h does.
#pragma once
#include <string_view>
#include <vector>

#include "kernels/table.h"

namespace cpuserve {

struct KernelEntry {
  const char* name;   // "linear.dense_bf16", "rms_norm", ...
  const char* level;  // the ISA level that defines this entry
};

// Returns the levels in this build, lowest first.
std::vector<const char*> compiled_levels();

// Returns the complete table of a level, with `isa` set to its name.
// Returns nullptr if the level is not in this build.
const KernelTable* find_kernels(std::string_view level);

// Returns every entry of the table of a level, with the level that provides it.
// The list is empty if the level is not in this build.
std::vector<KernelEntry> kernel_entries(std::string_view level);

}  // namespace cpuserve
