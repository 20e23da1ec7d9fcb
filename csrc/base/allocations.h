// Counts heap allocations made by this library's code, so that a test can hold "a step allocates
// nothing". operator new is replaced, and malloc and its kin are wrapped at link time (--wrap).
#pragma once
#include <cstdint>

namespace cpuserve {

int64_t allocations() noexcept;

}  // namespace cpuserve
