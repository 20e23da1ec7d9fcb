// Facts about this build, which `cpuserve --version` prints: compiler, C library and so on.
#include <pybind11/stl.h>

#include <map>
#include <string>

#include "bindings/module.h"

namespace cpuserve {
namespace {

#if defined(__x86_64__)
constexpr const char* kArch = "x86_64";
#else
constexpr const char* kArch = "aarch64";
#endif

// Returns the C library that this build was compiled for.
// A system with an older C library may not be able to load the extension.
std::string c_library() {
#if defined(__GLIBC__)
  return "glibc " + std::to_string(__GLIBC__) + "." + std::to_string(__GLIBC_MINOR__);
#elif defined(__APPLE__)
  return "macOS";
#else
  return "another C library than glibc";
#endif
}

std::map<std::string, std::string> build_facts() {
  return {{"arch", kArch},
          {"baseline", CPUSERVE_BASELINE},
          {"build_type", CPUSERVE_BUILD_TYPE},
          {"c_library", c_library()},
          {"compiler", CPUSERVE_COMPILER},
          {"levels", CPUSERVE_BUILT_FOR},
          {"python", PY_VERSION}};
}

}  // namespace

void register_build(py::module_& m) { m.def("build_facts", &build_facts); }

}  // namespace cpuserve
