// Builds the KernelTable of each ISA level, and reports the levels in this build and the level that
// provides each entry.
//
// Each level extends the level below: its table has its own entries and, for the others, the
// entries of that level. "scalar" extends none and is extended by none. This file does not check
// which levels the CPU can run; csrc/cpu/features.h does.
#pragma once
#include <string_view>
#include <vector>

#include "kernels/table.h"

namespace cpuserve {

struct KernelEntry {
  const char* name;   // "linear.dense_bf16", "rms_norm", ...
  const char* level;  // the level that defines it
};

// Levels in this build, lowest first.
std::vector<const char*> compiled_levels();

// The complete table of a level; its `isa` is the level's name. nullptr if not in this build.
const KernelTable* find_kernels(std::string_view level);

// Every entry of a level's table with the level that provides it; empty if not in this build.
std::vector<KernelEntry> kernel_entries(std::string_view level);

}  // namespace cpuserve
