#include "base/allocations.h"

#include <atomic>
#include <cstdlib>
#include <new>

namespace cpuserve {
namespace {
std::atomic<int64_t> count{0};
}  // namespace

int64_t allocations() noexcept { return count.load(std::memory_order_relaxed); }

}  // namespace cpuserve

#if defined(CPUSERVE_WRAP_MALLOC)
// With --wrap=X the linker redirects calls of X in this library to __wrap_X,
// and calls of __real_X to X in the C or C++ runtime (CMakeLists.txt lists the functions).
// The counter uses relaxed order, because no other memory access depends on it.
#define CPUSERVE_COUNTED(name, parameters, arguments)        \
  extern "C" void* __real_##name parameters;                 \
  extern "C" void* __wrap_##name parameters;                 \
  extern "C" void* __wrap_##name parameters {                \
    cpuserve::count.fetch_add(1, std::memory_order_relaxed); \
    return __real_##name arguments;                          \
  }
CPUSERVE_COUNTED(malloc, (size_t n), (n))
CPUSERVE_COUNTED(calloc, (size_t n, size_t size), (n, size))
CPUSERVE_COUNTED(realloc, (void* p, size_t n), (p, n))
CPUSERVE_COUNTED(aligned_alloc, (size_t align, size_t n), (align, n))
CPUSERVE_COUNTED(_Znwm, (size_t n), (n))  // operator new
CPUSERVE_COUNTED(_Znam, (size_t n), (n))  // operator new[]
CPUSERVE_COUNTED(_ZnwmSt11align_val_t, (size_t n, size_t align), (n, align))
CPUSERVE_COUNTED(_ZnamSt11align_val_t, (size_t n, size_t align), (n, align))
#undef CPUSERVE_COUNTED
#endif
