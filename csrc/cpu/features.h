// The features that the CPU and its operating system support.
// features.cpp is compiled for the baseline of the architecture, so that it runs on any CPU.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace cpuserve {

struct CpuInfo {
  std::string arch;                   // "x86_64" or "aarch64"
  std::string vendor;                 // as reported by CPUID or MIDR: "AuthenticAMD", "Arm" ...
  std::string model;                  // brand string, may be empty
  std::vector<std::string> features;  // in the spelling of lscpu; only if the OS supports them
  bool tiles_refused = false;  // the CPU has AMX, but the OS does not let this process use it

  bool has(std::string_view feature) const;
};

// The functions that return feature bits of x86. Tests replace them to simulate another CPU.
struct X86Source {
  struct Regs {
    uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
  };
  Regs (*cpuid)(uint32_t leaf, uint32_t subleaf);
  uint64_t (*saved_states)();  // XCR0: the registers that the OS saves; read only with OSXSAVE
  bool (*allow_tiles)();       // requests permission to use the tile registers of AMX
};
std::vector<std::string> x86_features(const X86Source& source);

// Returns whether the CPU has AMX that is not in `features`, the result of x86_features,
// because the OS does not save the tile registers or refused permission to use them.
bool lacks_permission_for_tiles(const X86Source& source, const std::vector<std::string>& features);

// Returns the features of an Apple CPU.
// has(key) returns whether the sysctl value `key` exists and is not 0.
std::vector<std::string> apple_features(bool (*has)(const char* key));

// Returns the features of this CPU, which are read only at the first call.
// Any thread may call this function.
const CpuInfo& cpu_info();

// Returns all ISA levels of this architecture, lowest first ("scalar", "avx2", ...),
// including levels that this CPU does not support.
const std::vector<std::string>& known_isa_levels();

// Returns the level that `level` extends, or "" for "scalar" and for unknown levels.
// A CPU needs the features of both levels,
// and kernels that `level` does not define are taken from the level that it extends.
std::string isa_level_base(std::string_view level);

// Returns the levels that `cpu` has all features for, lowest first. The list always has "scalar".
std::vector<std::string> supported_isa_levels(const CpuInfo& cpu);

}  // namespace cpuserve
