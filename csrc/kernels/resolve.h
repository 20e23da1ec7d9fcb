// From ISA levels to one KernelTable: what this build has, and which level provides each entry.
//
// Levels form a ladder: a level's table has its own entries over those of the level below. "scalar"
// stands alone. Which levels a CPU can run is csrc/cpu/features.h's to say; nothing here asks it.
#pragma once
#include <string_view>
#include <vector>

#include "kernels/table.h"

namespace cpuserve {

struct KernelEntry {
  const char* name;   // "linear.dense_bf16", "rms_norm", ...
  const char* level;  // the level whose unit holds it
};

// Levels in this build, lowest first.
std::vector<const char*> compiled_levels();

// The complete table of a level; its `isa` is the level's name. nullptr if not in this build.
const KernelTable* find_kernels(std::string_view level);

// Every entry of a level's table with the level that provides it; empty if not in this build.
std::vector<KernelEntry> kernel_entries(std::string_view level);

}  // namespace cpuserve
