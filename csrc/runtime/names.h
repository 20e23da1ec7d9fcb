// Parses the strings that Python passes for row formats, weight kinds and other enums.
#pragma once
#include <string>

#include "kernels/table.h"

namespace cpuserve {

// Returns the value of an enum with this name: an ActFormat, WeightKind, SourceType, Activation,
// KvType, Score, Stage or MediaToken.
// Throws std::invalid_argument, with a list of the known names, for an unknown one.
template <class E>
E from_name(const std::string& name);
const char* kind_name(WeightKind kind);

}  // namespace cpuserve
