// What the CPU, and the operating system on it, can run. Compiled for the baseline, without wide
// instructions, so that it may be asked anywhere.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace cpuserve {

struct CpuInfo {
  std::string arch;                   // "x86_64" or "aarch64"
  std::string vendor;                 // as CPUID or MIDR gives it: "AuthenticAMD", "Arm" ...
  std::string model;                  // brand string, may be empty
  std::vector<std::string> features;  // as lscpu names them; only what the OS lets us use
  int64_t l1d_bytes = 0, l2_bytes = 0, l3_bytes = 0;  // of one core's view; 0 = unknown

  bool has(std::string_view feature) const;
};

// Read once, on first use; thread-safe.
const CpuInfo& cpu_info();

// The ISA levels of this architecture, lowest first ("scalar", "avx2", ...), whether or not this
// CPU has them.
const std::vector<std::string>& known_isa_levels();

// The levels whose every feature `cpu` has, lowest first; "scalar" always.
std::vector<std::string> supported_isa_levels(const CpuInfo& cpu);

}  // namespace cpuserve
