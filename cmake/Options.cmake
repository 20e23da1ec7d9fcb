# Every switch of the build, with its help text; nothing else reads CPUSERVE_* variables.
option(CPUSERVE_TESTS "Build the C++ tests and register them with ctest" OFF)
option(CPUSERVE_WERROR "Treat compiler warnings as errors" OFF)
option(CPUSERVE_EXTENSION "Build the Python extension (off: C++ tests only, as for emulators)" ON)
set(CPUSERVE_LEVELS "" CACHE STRING "ISA levels to build, as scalar;avx2 (empty: all of the target)")
set(CPUSERVE_SANITIZE "" CACHE STRING "Sanitizers, as -fsanitize takes them: address,undefined | thread")
set(CPUSERVE_AVAILABLE_MEMORY_MB "" CACHE STRING "Memory the build may use (empty: ask the system)")
set(CPUSERVE_FAKE_COMPILER_VERSION "" CACHE STRING "Pretend the compiler has this version (tests)")
mark_as_advanced(CPUSERVE_AVAILABLE_MEMORY_MB CPUSERVE_FAKE_COMPILER_VERSION)
