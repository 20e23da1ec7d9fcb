#include "cpu/caches.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <sstream>

#if defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace cpuserve {
namespace {

std::string first_word(const std::string& path) {
  std::ifstream file(path);
  std::string word;
  file >> word;
  return word;
}

int64_t parse_bytes(const std::string& text) {  // "48K", "32768K", "1M"
  char* end = nullptr;
  const int64_t value = std::max<int64_t>(0, std::strtoll(text.c_str(), &end, 10));
  return *end == 'K' ? value << 10 : *end == 'M' ? value << 20 : value;
}

int64_t* size_of_level(CacheSizes& caches, const std::string& level) {
  return level == "1"   ? &caches.l1d
         : level == "2" ? &caches.l2
         : level == "3" ? &caches.l3
                        : nullptr;
}

#if defined(__APPLE__)
int64_t apple_value(const char* key) {
  int64_t value = 0;
  size_t size = sizeof value;
  return sysctlbyname(key, &value, &size, nullptr, 0) == 0 ? value : 0;
}

// Asks macOS for the cache sizes of the fast cores of an Apple CPU.
// All cores of a cluster share one L2, so its size is divided by the number of cores.
void ask_system(CacheSizes& caches) {
  caches.l1d = apple_value("hw.perflevel0.l1dcachesize");
  caches.l2 = apple_value("hw.perflevel0.l2cachesize") /
              std::max<int64_t>(1, apple_value("hw.perflevel0.cpusperl2"));
}
#elif defined(_SC_LEVEL1_DCACHE_SIZE)
void ask_system(CacheSizes& caches) {
  const auto ask = [](int name, int64_t& size) {
    if (size == 0) size = std::max<int64_t>(0, sysconf(name));
  };
  ask(_SC_LEVEL1_DCACHE_SIZE, caches.l1d);
  ask(_SC_LEVEL2_CACHE_SIZE, caches.l2);
  ask(_SC_LEVEL3_CACHE_SIZE, caches.l3);
}
#else
void ask_system(CacheSizes&) {}
#endif

}  // namespace

int count_cpus(const std::string& list) {
  std::istringstream parts(list);
  int count = 0;
  for (std::string part; std::getline(parts, part, ',');) {
    char* end = nullptr;
    const long first = std::strtol(part.c_str(), &end, 10);
    if (end == part.c_str()) return 0;
    const long last = *end == '-' ? std::strtol(end + 1, nullptr, 10) : first;
    count += static_cast<int>(std::max(0L, last - first + 1));
  }
  return count;
}

CacheSizes read_cache_sizes(int cpu, const std::string& root) {
  CacheSizes caches;
  const std::string folder = root + "/cpu" + std::to_string(cpu) + "/";
  const int threads = std::max(1, count_cpus(first_word(folder + "topology/thread_siblings_list")));
  for (int i = 0; i < 8; i++) {
    const std::string at = folder + "cache/index" + std::to_string(i) + "/";
    const std::string level = first_word(at + "level");
    int64_t* size = size_of_level(caches, level);
    if (!size || first_word(at + "type") == "Instruction") continue;
    const int sharing = count_cpus(first_word(at + "shared_cpu_list"));
    const int cores = level == "3" ? 1 : std::max(1, sharing / threads);
    *size = parse_bytes(first_word(at + "size")) / cores;
  }
  if (caches.l1d == 0 && caches.l2 == 0) ask_system(caches);
  return caches;
}

}  // namespace cpuserve
