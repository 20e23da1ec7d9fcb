# Stops with a list of supported compilers if this compiler cannot build the kernels: gcc 11.2 and
# clang 14 are the first versions with all intrinsics for AVX512-BF16 and AMX. The blank at the
# beginning of the messages keeps CMake from breaking their lines.
function(cpuserve_check_compiler)
  set(version "${CMAKE_CXX_COMPILER_VERSION}")
  if(CPUSERVE_FAKE_COMPILER_VERSION)
    set(version "${CPUSERVE_FAKE_COMPILER_VERSION}")
  endif()
  set(minimum_GNU 11.2)
  set(minimum_Clang 14)
  set(minimum_AppleClang 15)
  set(minimum "${minimum_${CMAKE_CXX_COMPILER_ID}}")
  if(NOT minimum)
    message(FATAL_ERROR " cpuserve needs gcc 11.2, clang 14 or Apple clang 15 (or newer); found "
                        "${CMAKE_CXX_COMPILER_ID} ${version} (${CMAKE_CXX_COMPILER}). "
                        "Install one and set CXX to it.")
  endif()
  if(version VERSION_LESS minimum)
    message(FATAL_ERROR " cpuserve needs gcc 11.2, clang 14 or Apple clang 15 (or newer); found "
                        "${CMAKE_CXX_COMPILER_ID} ${version} (${CMAKE_CXX_COMPILER}), older than "
                        "${minimum}. Install a newer compiler and set CXX to it, for example "
                        "CXX=g++-12.")
  endif()
endfunction()
