// The data caches of a core, from sysfs.
#pragma once
#include <cstdint>
#include <string>

namespace cpuserve {

// Bytes for one core: a cache that several cores share counts in equal parts, except L3. 0 =
// unknown.
struct CacheSizes {
  int64_t l1d = 0, l2 = 0;
  int64_t l3 = 0;  // all of it
};

// Reads the caches of `cpu` below `root`, and asks the C library for caches of this CPU that are
// not there (it asks CPUID); without a root, only the files count.
CacheSizes read_cache_sizes(int cpu, const std::string& root = "/sys/devices/system/cpu");

// The number of CPUs of a kernel list ("0-3,8"); 0 if it is none.
int count_cpus(const std::string& list);

}  // namespace cpuserve
