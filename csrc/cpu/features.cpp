#include "cpu/features.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <fstream>

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace cpuserve {
namespace {

struct LevelNeeds {
  const char* level;
  std::vector<const char*> features;  // beyond the level before it
};

#if defined(__x86_64__)
const char* const kArch = "x86_64";

const std::vector<LevelNeeds>& levels() {
  static const std::vector<LevelNeeds> table = {
      {"scalar", {}},
      {"avx2", {"avx2", "fma", "f16c", "bmi1", "bmi2", "abm", "movbe"}},
      {"avx512", {"avx512f", "avx512bw", "avx512dq", "avx512vl"}},
      {"avx512_vnni", {"avx512_vnni"}},
      {"avx512_bf16", {"avx512_bf16"}},
  };
  return table;
}

struct Regs {
  uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
};

Regs cpuid(uint32_t leaf, uint32_t subleaf) {
  Regs r;
  __get_cpuid_count(leaf, subleaf, &r.eax, &r.ebx, &r.ecx, &r.edx);
  return r;
}

// Which register states the operating system saves and restores (XCR0). A CPU bit alone is not
// enough: where the OS does not save zmm, using it corrupts other processes or faults.
uint64_t saved_states(const Regs& leaf1) {
  constexpr uint32_t kOsxsave = 1u << 27;
  if (!(leaf1.ecx & kOsxsave)) return 0;
  uint32_t low = 0, high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (static_cast<uint64_t>(high) << 32) | low;
}

struct FeatureBit {
  const char* name;
  uint32_t Regs::*reg;
  int bit;
};

constexpr FeatureBit kLeaf1[] = {
    {"pni", &Regs::ecx, 0},     {"ssse3", &Regs::ecx, 9},  {"sse4_1", &Regs::ecx, 19},
    {"sse4_2", &Regs::ecx, 20}, {"movbe", &Regs::ecx, 22}, {"popcnt", &Regs::ecx, 23},
};
constexpr FeatureBit kLeaf1Avx[] = {
    {"fma", &Regs::ecx, 12}, {"avx", &Regs::ecx, 28}, {"f16c", &Regs::ecx, 29}};
constexpr FeatureBit kLeaf7[] = {{"bmi1", &Regs::ebx, 3}, {"bmi2", &Regs::ebx, 8}};
constexpr FeatureBit kLeaf7Avx[] = {{"avx2", &Regs::ebx, 5}};
constexpr FeatureBit kLeaf7Avx512[] = {
    {"avx512f", &Regs::ebx, 16},       {"avx512dq", &Regs::ebx, 17},
    {"avx512cd", &Regs::ebx, 28},      {"avx512bw", &Regs::ebx, 30},
    {"avx512vl", &Regs::ebx, 31},      {"avx512vbmi", &Regs::ecx, 1},
    {"avx512_vbmi2", &Regs::ecx, 6},   {"avx512_vnni", &Regs::ecx, 11},
    {"avx512_bitalg", &Regs::ecx, 12}, {"avx512_vpopcntdq", &Regs::ecx, 14},
    {"avx512_fp16", &Regs::edx, 23},
};
constexpr FeatureBit kLeaf7Amx[] = {
    {"amx_bf16", &Regs::edx, 22}, {"amx_tile", &Regs::edx, 24}, {"amx_int8", &Regs::edx, 25}};
constexpr FeatureBit kLeaf7Sub1Avx[] = {{"avx_vnni", &Regs::eax, 4}};
constexpr FeatureBit kLeaf7Sub1Avx512[] = {{"avx512_bf16", &Regs::eax, 5}};
constexpr FeatureBit kLeafExtended[] = {{"abm", &Regs::ecx, 5}};

template <size_t N>
void collect(const Regs& regs, const FeatureBit (&bits)[N], bool usable, CpuInfo& cpu) {
  if (!usable) return;
  for (const FeatureBit& f : bits) {
    if (regs.*f.reg >> f.bit & 1) cpu.features.emplace_back(f.name);
  }
}

std::string registers_text(std::initializer_list<uint32_t> registers) {
  std::string text;
  for (uint32_t r : registers) {
    char bytes[4];
    std::memcpy(bytes, &r, 4);
    text.append(bytes, 4);
  }
  text = text.c_str();  // up to the first NUL
  const size_t first = text.find_first_not_of(' ');
  const size_t last = text.find_last_not_of(' ');
  return first == std::string::npos ? "" : text.substr(first, last - first + 1);
}

void identify(CpuInfo& cpu) {
  const Regs leaf0 = cpuid(0, 0);
  cpu.vendor = registers_text({leaf0.ebx, leaf0.edx, leaf0.ecx});
  if (cpuid(0x80000000u, 0).eax >= 0x80000004u) {
    const Regs a = cpuid(0x80000002u, 0), b = cpuid(0x80000003u, 0), c = cpuid(0x80000004u, 0);
    cpu.model = registers_text(
        {a.eax, a.ebx, a.ecx, a.edx, b.eax, b.ebx, b.ecx, b.edx, c.eax, c.ebx, c.ecx, c.edx});
  }
  const Regs leaf1 = cpuid(1, 0), leaf7 = cpuid(7, 0), leaf7_1 = cpuid(7, 1);
  const uint64_t saved = saved_states(leaf1);
  const bool avx = (saved & 0x6) == 0x6;              // xmm, ymm
  const bool avx512 = avx && (saved & 0xe0) == 0xe0;  // mask registers, zmm
  const bool amx = (saved & 0x60000) == 0x60000;      // tile config, tile data
  collect(leaf1, kLeaf1, true, cpu);
  collect(leaf1, kLeaf1Avx, avx, cpu);
  collect(leaf7, kLeaf7, true, cpu);
  collect(leaf7, kLeaf7Avx, avx, cpu);
  collect(leaf7, kLeaf7Avx512, avx512, cpu);
  collect(leaf7, kLeaf7Amx, amx, cpu);
  collect(leaf7_1, kLeaf7Sub1Avx, avx, cpu);
  collect(leaf7_1, kLeaf7Sub1Avx512, avx512, cpu);
  collect(cpuid(0x80000001u, 0), kLeafExtended, true, cpu);
}

#elif defined(__aarch64__)
const char* const kArch = "aarch64";

const std::vector<LevelNeeds>& levels() {
  static const std::vector<LevelNeeds> table = {
      {"scalar", {}},
      {"neon", {"asimd"}},
      {"neon_dotprod", {"asimddp"}},
      {"neon_i8mm_bf16", {"i8mm", "bf16"}},
  };
  return table;
}

#if defined(__linux__)
// Bit numbers are the kernel's ABI (arch/arm64/include/uapi/asm/hwcap.h); spelled out because
// older libc headers lack the newer names.
struct HwcapBit {
  const char* name;
  unsigned long type;
  int bit;
};
constexpr HwcapBit kHwcaps[] = {
    {"fp", AT_HWCAP, 0},     {"asimd", AT_HWCAP, 1},    {"atomics", AT_HWCAP, 8},
    {"fphp", AT_HWCAP, 9},   {"asimdhp", AT_HWCAP, 10}, {"asimddp", AT_HWCAP, 20},
    {"sve", AT_HWCAP, 22},   {"sve2", AT_HWCAP2, 1},    {"i8mm", AT_HWCAP2, 13},
    {"bf16", AT_HWCAP2, 14}, {"sme", AT_HWCAP2, 23},
};

void identify(CpuInfo& cpu) {
  for (const HwcapBit& h : kHwcaps) {
    if (getauxval(h.type) >> h.bit & 1) cpu.features.emplace_back(h.name);
  }
  std::ifstream midr("/sys/devices/system/cpu/cpu0/regs/identification/midr_el1");
  std::string text;
  if (midr >> text) {
    const unsigned long value = std::stoul(text, nullptr, 16);
    const unsigned long implementer = value >> 24 & 0xff;
    cpu.vendor = implementer == 0x41   ? "ARM"
                 : implementer == 0xc0 ? "Ampere"
                 : implementer == 0x61 ? "Apple"
                                       : "implementer " + std::to_string(implementer);
    cpu.model = "part " + std::to_string(value >> 4 & 0xfff);
  }
}
#else
void identify(CpuInfo& cpu) {  // every Apple silicon has these
  cpu.vendor = "Apple";
  cpu.features = {"asimd", "asimddp"};
}
#endif
#endif

std::string first_word(const std::string& path) {
  std::ifstream file(path);
  std::string word;
  file >> word;
  return word;
}

int64_t parse_bytes(const std::string& text) {  // "48K", "32768K", "1M"
  if (text.empty() || text[0] < '0' || text[0] > '9') return 0;
  size_t end = 0;
  const int64_t value = std::stoll(text, &end);
  const char unit = end < text.size() ? text[end] : ' ';
  return unit == 'K' ? value << 10 : unit == 'M' ? value << 20 : value;
}

int64_t* size_of_level(CpuInfo& cpu, const std::string& level) {
  return level == "1"   ? &cpu.l1d_bytes
         : level == "2" ? &cpu.l2_bytes
         : level == "3" ? &cpu.l3_bytes
                        : nullptr;
}

void read_caches(CpuInfo& cpu) {
  for (int i = 0; i < 8; i++) {
    const std::string at = "/sys/devices/system/cpu/cpu0/cache/index" + std::to_string(i) + "/";
    if (first_word(at + "type") == "Instruction") continue;
    int64_t* size = size_of_level(cpu, first_word(at + "level"));
    if (size) *size = parse_bytes(first_word(at + "size"));
  }
#if defined(_SC_LEVEL1_DCACHE_SIZE)
  const auto ask = [](int name, int64_t& size) {
    if (size == 0) size = std::max<int64_t>(0, sysconf(name));
  };
  ask(_SC_LEVEL1_DCACHE_SIZE, cpu.l1d_bytes);
  ask(_SC_LEVEL2_CACHE_SIZE, cpu.l2_bytes);
  ask(_SC_LEVEL3_CACHE_SIZE, cpu.l3_bytes);
#endif
}

CpuInfo read_cpu() {
  CpuInfo cpu;
  cpu.arch = kArch;
  identify(cpu);
  read_caches(cpu);
  return cpu;
}

}  // namespace

bool CpuInfo::has(std::string_view feature) const {
  return std::find(features.begin(), features.end(), feature) != features.end();
}

const CpuInfo& cpu_info() {
  static const CpuInfo info = read_cpu();
  return info;
}

const std::vector<std::string>& known_isa_levels() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> out;
    for (const LevelNeeds& l : levels()) out.emplace_back(l.level);
    return out;
  }();
  return names;
}

std::vector<std::string> supported_isa_levels(const CpuInfo& cpu) {
  std::vector<std::string> out;
  for (const LevelNeeds& l : levels()) {
    for (const char* f : l.features) {
      if (!cpu.has(f)) return out;  // levels are nested: none above this one either
    }
    out.emplace_back(l.level);
  }
  return out;
}

}  // namespace cpuserve
