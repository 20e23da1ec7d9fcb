# Defines one object library for each ISA unit (the kernels of one ISA level). A unit is compiled
# with explicit flags that do not depend on the build machine. Also writes the list of the units in
# this build for kernels/resolve.cpp.
#
#   cpuserve_add_isa(avx2 FLAGS -mavx2 -mfma SYMBOL cpuserve_isa_avx2)
#
# compiles csrc/kernels/isa/avx2.cpp. SYMBOL is the only function that the unit exports,
#   extern "C" const cpuserve::KernelTable* cpuserve_isa_avx2();
# kernels/isa_units.inc (generated) holds CPUSERVE_ISA_UNIT(avx2, cpuserve_isa_avx2), lowest level
# first. After the compilation, CheckIsaLeaks.cmake checks the symbols of the object, except in a
# sanitized build.
set(CPUSERVE_GENERATED_DIR "${CMAKE_CURRENT_BINARY_DIR}/generated")

function(cpuserve_target_arch result)
  set(processor "${CMAKE_SYSTEM_PROCESSOR}")
  if(CMAKE_OSX_ARCHITECTURES)
    set(processor "${CMAKE_OSX_ARCHITECTURES}")
  endif()
  cpuserve_arch_of("${processor}" arch)
  if(NOT arch MATCHES "^(x86_64|aarch64)$")
    message(FATAL_ERROR "cpuserve has kernels for x86_64 and aarch64; the target is "
                        "'${processor}'. Build on or cross-compile for one of these.")
  endif()
  set(${result} ${arch} PARENT_SCOPE)
endfunction()

# Sets `result` to x86_64 or aarch64 for the names that systems have for them.
function(cpuserve_arch_of processor result)
  string(TOLOWER "${processor}" arch)
  if(arch STREQUAL "amd64")
    set(arch x86_64)
  elseif(arch STREQUAL "arm64")
    set(arch aarch64)
  endif()
  set(${result} "${arch}" PARENT_SCOPE)
endfunction()

function(cpuserve_add_isa level)
  cmake_parse_arguments(arg "" "SYMBOL" "FLAGS" ${ARGN})
  cpuserve_is_chosen(${level} chosen)
  if(NOT chosen)
    return()
  endif()
  set(target cpuserve_isa_${level})
  add_library(${target} OBJECT kernels/isa/${level}.cpp)
  target_include_directories(${target} PRIVATE "${PROJECT_SOURCE_DIR}/csrc")
  # -ffp-contract=off: no compiler may fuse a product and a sum into one operation, so that all
  # compilers generate the same arithmetic. Without traps and errno the compiler can vectorize
  # loops.
  target_compile_options(${target} PRIVATE -O3 ${arg_FLAGS} -ffp-contract=off -fno-math-errno
                                           -fno-trapping-math -fno-exceptions -fno-rtti
                                           -fvisibility=hidden)
  # gcc collects garbage when its heap has grown by this percentage (default: 100). avx512 is the
  # largest unit: gcc 12 compiles it with 933 MB of memory; 40 %
  # reduces this to 669 MB for 5 % more time.
  if(level STREQUAL "avx512")
    target_compile_options(${target} PRIVATE
                           $<$<CXX_COMPILER_ID:GNU>:SHELL:--param ggc-min-expand=40>)
  endif()
  set_target_properties(${target} PROPERTIES POSITION_INDEPENDENT_CODE ON)
  cpuserve_warnings(${target})
  # A sanitized build inlines little, so its units have symbols that the check of symbols refuses.
  # This does no harm, because a sanitized build runs only on the machine that built it. The kernels
  # compile faster if the checks of the address sanitizer are function calls.
  cpuserve_sanitize(${target})
  if(CPUSERVE_SANITIZE MATCHES address AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    target_compile_options(${target} PRIVATE
                           "SHELL:--param asan-instrumentation-with-call-threshold=0")
  endif()
  set_property(GLOBAL APPEND PROPERTY CPUSERVE_ISA_UNITS "CPUSERVE_ISA_UNIT(${level}, ${arg_SYMBOL})")
  set_property(GLOBAL APPEND PROPERTY CPUSERVE_ISA_TARGETS ${target})

  if(CPUSERVE_SANITIZE)
    return()
  endif()
  set(stamp "${CPUSERVE_GENERATED_DIR}/${level}.leakcheck")
  add_custom_command(
    OUTPUT "${stamp}"
    COMMAND ${CMAKE_COMMAND} -DNM=${CMAKE_NM} "-DOBJECTS=$<TARGET_OBJECTS:${target}>"
            -DSYMBOL=${arg_SYMBOL} -DSTAMP=${stamp}
            -P "${PROJECT_SOURCE_DIR}/cmake/CheckIsaLeaks.cmake"
    DEPENDS $<TARGET_OBJECTS:${target}> "${PROJECT_SOURCE_DIR}/cmake/CheckIsaLeaks.cmake"
    VERBATIM COMMENT "Checking that ${level} leaks no symbol")
  add_custom_target(${target}_leaks ALL DEPENDS "${stamp}")
  add_dependencies(${target}_leaks ${target})
  set_property(GLOBAL APPEND PROPERTY CPUSERVE_ISA_CHECKS "${stamp}")
endfunction()

# Writes the list of units and adds all of them to `target`, a static library. Targets that link
# this library wait for the checks of symbols. The sources of `target` do not wait, so that they
# keep a core busy while another core compiles the last unit.
function(cpuserve_link_isa_units target)
  cpuserve_check_levels()
  get_property(units GLOBAL PROPERTY CPUSERVE_ISA_UNITS)
  get_property(targets GLOBAL PROPERTY CPUSERVE_ISA_TARGETS)
  list(JOIN units "\n" text)
  file(GENERATE OUTPUT "${CPUSERVE_GENERATED_DIR}/kernels/isa_units.inc" CONTENT "${text}\n")
  target_include_directories(${target} PRIVATE "${CPUSERVE_GENERATED_DIR}")
  foreach(unit IN LISTS targets)
    target_sources(${target} PRIVATE $<TARGET_OBJECTS:${unit}>)
  endforeach()
  if(CMAKE_GENERATOR MATCHES "Ninja")
    get_property(checks GLOBAL PROPERTY CPUSERVE_ISA_CHECKS)
    set_property(TARGET ${target} PROPERTY INTERFACE_LINK_DEPENDS "${checks}")
  else()  # Makefiles have no rule for a file of another target, so `target` waits for the checks
    list(TRANSFORM targets APPEND _leaks OUTPUT_VARIABLE checks)
    if(NOT CPUSERVE_SANITIZE)
      add_dependencies(${target} ${checks})
    endif()
  endif()
endfunction()
