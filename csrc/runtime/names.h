// Parses the strings that Python passes for row formats, weight kinds and other enums.
#pragma once
#include <string>

#include "kernels/table.h"
#include "runtime/operations/experts.h"

namespace cpuserve {

// For an unknown name, the parse functions throw std::invalid_argument.
// The message lists the known names.
ActFormat parse_format(const std::string& name);
WeightKind parse_kind(const std::string& name);
SourceType parse_source(const std::string& name);
Activation parse_activation(const std::string& name);
KvType parse_kv_type(const std::string& name);
Score parse_score(const std::string& name);
const char* kind_name(WeightKind kind);

}  // namespace cpuserve
