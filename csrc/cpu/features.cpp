#include "cpu/features.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <fstream>

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#endif
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace cpuserve {
namespace {

struct LevelNeeds {
  const char* level;
  const char* base;                   // the level that this level extends, or nullptr
  std::vector<const char*> features;  // features that this level needs in addition to its base
};

using Regs = X86Source::Regs;

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
constexpr int kTileBit = 24;
constexpr FeatureBit kLeaf7Amx[] = {
    {"amx_bf16", &Regs::edx, 22}, {"amx_tile", &Regs::edx, kTileBit}, {"amx_int8", &Regs::edx, 25}};
constexpr FeatureBit kLeaf7Sub1Avx[] = {{"avx_vnni", &Regs::eax, 4}};
constexpr FeatureBit kLeaf7Sub1Avx512[] = {{"avx512_bf16", &Regs::eax, 5}};
constexpr FeatureBit kLeafExtended[] = {{"abm", &Regs::ecx, 5}};

template <size_t N>
void collect(const Regs& regs, const FeatureBit (&bits)[N], bool usable,
             std::vector<std::string>& features) {
  if (!usable) return;
  for (const FeatureBit& f : bits) {
    if (regs.*f.reg >> f.bit & 1) features.emplace_back(f.name);
  }
}

#if defined(__x86_64__)
const char* const kArch = "x86_64";

const std::vector<LevelNeeds>& levels() {
  static const std::vector<LevelNeeds> table = {
      {"scalar", nullptr, {}},
      {"avx2", "scalar", {"avx2", "fma", "f16c", "bmi1", "bmi2", "abm", "movbe"}},
#ifdef CPUSERVE_MODELS  // C++ models replace these instructions (cmake/Options.cmake)
      {"avx_vnni", "avx2", {}},
#else
      {"avx_vnni", "avx2", {"avx_vnni"}},
#endif
      {"avx512", "avx2", {"avx512f", "avx512bw", "avx512dq", "avx512vl"}},
      {"avx512_vnni", "avx512", {"avx512_vnni"}},
      {"avx512_bf16", "avx512_vnni", {"avx512_bf16"}},
#ifdef CPUSERVE_MODELS
      {"amx", "avx2", {}},
#else
      {"amx", "avx512_bf16", {"amx_tile", "amx_bf16", "amx_int8"}},
#endif
  };
  return table;
}

Regs cpuid(uint32_t leaf, uint32_t subleaf) {
  Regs r;
  __get_cpuid_count(leaf, subleaf, &r.eax, &r.ebx, &r.ecx, &r.edx);
  return r;
}

uint64_t saved_states() {
  uint32_t low = 0, high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (static_cast<uint64_t>(high) << 32) | low;
}

// Requests permission to use the tile registers of AMX, for all threads of the process.
// Linux ends a process that uses them without permission. Returns false if Linux refuses.
bool allow_tiles() {
#if defined(__linux__)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // asm/prctl.h: ARCH_REQ_XCOMP_PERM
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

std::string registers_text(std::initializer_list<uint32_t> registers) {
  std::string text;
  for (uint32_t r : registers) {
    char bytes[4];
    std::memcpy(bytes, &r, 4);
    text.append(bytes, 4);
  }
  text = text.c_str();  // drops the text from the first NUL byte on
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
  const X86Source source{cpuid, saved_states, allow_tiles};
  cpu.features = x86_features(source);
  cpu.tiles_refused = lacks_permission_for_tiles(source, cpu.features);
}

#elif defined(__aarch64__)
const char* const kArch = "aarch64";

const std::vector<LevelNeeds>& levels() {
  static const std::vector<LevelNeeds> table = {
      {"scalar", nullptr, {}},
      {"neon", "scalar", {"asimd"}},
      {"neon_dotprod", "neon", {"asimddp"}},
      {"neon_i8mm", "neon_dotprod", {"i8mm"}},
      {"neon_bf16", "neon_i8mm", {"bf16"}},  // no CPU has bf16 without i8mm: Armv8.6 requires both
  };
  return table;
}

#if defined(__linux__)
// The bit of a CPU feature in the auxiliary vector of Linux on Arm.
// The bit numbers are part of the ABI of the kernel (arch/arm64/include/uapi/asm/hwcap.h).
// The constants are numbers here, because older libc headers lack the newer names.
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
bool has_key(const char* key) {
  int value = 0;
  size_t size = sizeof value;
  return sysctlbyname(key, &value, &size, nullptr, 0) == 0 && value != 0;
}

void identify(CpuInfo& cpu) {
  cpu.vendor = "Apple";
  cpu.features = apple_features(has_key);
}
#endif
#endif

CpuInfo read_cpu() {
  CpuInfo cpu;
  cpu.arch = kArch;
  identify(cpu);
  return cpu;
}

}  // namespace

std::vector<std::string> x86_features(const X86Source& source) {
  constexpr uint32_t kOsxsave = 1u << 27;
  const Regs leaf1 = source.cpuid(1, 0), leaf7 = source.cpuid(7, 0), leaf7_1 = source.cpuid(7, 1);
  // The bits of CPUID are not enough: if the operating system does not save the registers
  // that an instruction uses, the instruction faults or corrupts data of other processes.
  const uint64_t saved = leaf1.ecx & kOsxsave ? source.saved_states() : 0;
  const bool avx = (saved & 0x6) == 0x6;              // saves xmm and ymm
  const bool avx512 = avx && (saved & 0xe0) == 0xe0;  // saves mask registers and zmm
  const bool tiles = (saved & 0x60000) == 0x60000 && leaf7.edx >> kTileBit & 1;
  std::vector<std::string> features;
  collect(leaf1, kLeaf1, true, features);
  collect(leaf1, kLeaf1Avx, avx, features);
  collect(leaf7, kLeaf7, true, features);
  collect(leaf7, kLeaf7Avx, avx, features);
  collect(leaf7, kLeaf7Avx512, avx512, features);
  collect(leaf7, kLeaf7Amx, tiles && source.allow_tiles(), features);
  collect(leaf7_1, kLeaf7Sub1Avx, avx, features);
  collect(leaf7_1, kLeaf7Sub1Avx512, avx512, features);
  collect(source.cpuid(0x80000001u, 0), kLeafExtended, true, features);
  return features;
}

bool lacks_permission_for_tiles(const X86Source& source, const std::vector<std::string>& features) {
  const bool has_tiles = source.cpuid(7, 0).edx >> kTileBit & 1;
  return has_tiles && std::find(features.begin(), features.end(), "amx_tile") == features.end();
}

std::vector<std::string> apple_features(bool (*has)(const char* key)) {
  std::vector<std::string> features{"asimd", "asimddp"};  // every Apple silicon has these
  if (has("hw.optional.arm.FEAT_I8MM")) features.emplace_back("i8mm");  // since M2, like bf16
  if (has("hw.optional.arm.FEAT_BF16")) features.emplace_back("bf16");
  return features;
}

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

std::string isa_level_base(std::string_view level) {
  for (const LevelNeeds& l : levels()) {
    if (level == l.level && l.base) return l.base;
  }
  return "";
}

std::vector<std::string> supported_isa_levels(const CpuInfo& cpu) {
  std::vector<std::string> out;
  const auto supported = [&](const char* level) {
    return std::find(out.begin(), out.end(), level) != out.end();
  };
  for (const LevelNeeds& l : levels()) {
    const bool has_all = std::all_of(l.features.begin(), l.features.end(),
                                     [&](const char* feature) { return cpu.has(feature); });
    if (has_all && (!l.base || supported(l.base))) out.emplace_back(l.level);
  }
  return out;
}

}  // namespace cpuserve
