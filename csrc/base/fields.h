// Structs with fields that are known at run time, so that bindings can set them from Python.
#pragma once
#include <cstddef>
#include <tuple>

// Declares, inside a struct, which of its fields Python sets, by their own names and in this
// order (bindings/fields.h). Other fields of the struct are private to C++.
// With CPUSERVE_FIELDS_WITH_DEFAULTS, the last `defaults` of them have default values.
#define CPUSERVE_FIELDS_WITH_DEFAULTS(defaults, ...)       \
  static constexpr const char* kFieldNames = #__VA_ARGS__; \
  static constexpr std::size_t kDefaults = defaults;       \
  auto fields() { return std::tie(__VA_ARGS__); }
#define CPUSERVE_FIELDS(...) CPUSERVE_FIELDS_WITH_DEFAULTS(0, __VA_ARGS__)
