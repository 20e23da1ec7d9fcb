// Counts the heap allocations of this library, to test that a step allocates nothing.
// Calls of malloc, operator new and similar functions are wrapped at link time (--wrap).
#pragma once
#include <cstdint>

namespace cpuserve {

int64_t allocations() noexcept;  // the number of heap allocations so far

}  // namespace cpuserve
