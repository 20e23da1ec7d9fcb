// Prints the ISA levels that this CPU runs, lowest first, as a list of CMake.
// Levels.cmake runs this program for CPUSERVE_LEVELS=native.
#include <cstdio>

#include "cpu/features.h"

int main() {
  const char* separator = "";
  for (const std::string& level : cpuserve::supported_isa_levels(cpuserve::cpu_info())) {
    std::printf("%s%s", separator, level.c_str());
    separator = ";";
  }
}
