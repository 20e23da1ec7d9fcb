// The sizes of the data caches of a core.
#pragma once
#include <cstdint>
#include <string>

namespace cpuserve {

// Sizes in bytes; 0 = unknown. l1d and l2 are for one core:
// the size of a shared cache is divided by the number of cores that share it.
struct CacheSizes {
  int64_t l1d = 0, l2 = 0;
  int64_t l3 = 0;  // the size of the whole L3, even if other cores share it
};

// Reads the cache sizes of `cpu` from the files of sysfs in `root`. If sysfs has neither L1 nor L2,
// uses sysconf of the C library, which reads CPUID of the current CPU.
CacheSizes read_cache_sizes(int cpu, const std::string& root = "/sys/devices/system/cpu");

// Returns the number of CPUs in a kernel list like "0-3,8", or 0 if the text is no such list.
int count_cpus(const std::string& list);

}  // namespace cpuserve
