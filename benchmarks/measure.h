// What the C++ benchmarks share: clocks, medians, memory in huge pages, and the kernels of a level.
#pragma once
#include <sys/mman.h>
#include <time.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "cpu/features.h"
#include "kernels/resolve.h"

namespace cpuserve {

inline double seconds_of_clock(clockid_t clock) {
  timespec t;
  clock_gettime(clock, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

// Returns the CPU time of this thread: it excludes time while another process has the core.
inline double thread_seconds() { return seconds_of_clock(CLOCK_THREAD_CPUTIME_ID); }

// Returns the middle one of the sorted values; 0 if there are none.
inline double median(std::vector<double> x) {
  if (x.empty()) return 0;
  std::sort(x.begin(), x.end());
  return x[x.size() / 2];
}

// Returns zeroed memory, which the process need not free because it ends soon. huge: advise the
// system to use huge pages, or not to.
inline uint8_t* reserve(size_t bytes, bool huge = true) {
  constexpr size_t kHuge = 2 << 20;
  void* p =
      mmap(nullptr, bytes + kHuge, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) {
    std::perror("mmap");
    std::exit(1);
  }
  const uintptr_t at = (reinterpret_cast<uintptr_t>(p) + kHuge - 1) & ~uintptr_t{kHuge - 1};
  madvise(reinterpret_cast<void*>(at), bytes, huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
  return reinterpret_cast<uint8_t*>(at);
}

// Returns the kernels of an ISA level; ends the process if the build or this CPU lacks it.
inline const KernelTable& kernels_of(const std::string& isa) {
  const std::vector<std::string> supported = supported_isa_levels(cpu_info());
  const KernelTable* table = find_kernels(isa);
  if (!table || std::find(supported.begin(), supported.end(), isa) == supported.end()) {
    std::fprintf(stderr, "level %s is not in this build or not on this CPU\n", isa.c_str());
    std::exit(2);
  }
  return *table;
}

}  // namespace cpuserve
