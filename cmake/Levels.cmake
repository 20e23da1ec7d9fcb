# The ISA levels of a build, from CPUSERVE_LEVELS: "all" levels of the target's architecture, those
# that the CPU of this machine runs ("native"), or a list ("avx2,avx512").
#
# Only "native" looks at the CPU of the machine. It leaves the level scalar out if the CPU runs a
# better one.
function(cpuserve_choose_levels)
  string(REGEX REPLACE "[, ]+" ";" levels "${CPUSERVE_LEVELS}")
  if(levels STREQUAL "")
    set(levels all)
  elseif(levels STREQUAL "native")
    cpuserve_levels_of_this_cpu(levels)
  endif()
  set_property(GLOBAL PROPERTY CPUSERVE_CHOSEN_LEVELS "${levels}")
endfunction()

function(cpuserve_levels_of_this_cpu result)
  cpuserve_target_arch(target)
  cpuserve_arch_of("${CMAKE_HOST_SYSTEM_PROCESSOR}" here)
  if(CMAKE_CROSSCOMPILING OR NOT here STREQUAL target)
    message(FATAL_ERROR " CPUSERVE_LEVELS=native builds for the CPU of this machine (${here}), which "
                        "cannot be asked about another machine (${target}). Set "
                        "CPUSERVE_LEVELS=all, or name the levels of the target.")
  endif()
  try_run(ran compiled
          SOURCES "${PROJECT_SOURCE_DIR}/cmake/native_levels.cpp"
                  "${PROJECT_SOURCE_DIR}/csrc/cpu/features.cpp"
          NO_CACHE
          CMAKE_FLAGS "-DINCLUDE_DIRECTORIES=${PROJECT_SOURCE_DIR}/csrc"
          COMPILE_OUTPUT_VARIABLE log RUN_OUTPUT_VARIABLE levels
          CXX_STANDARD 17 CXX_STANDARD_REQUIRED ON)
  if(NOT compiled OR NOT ran EQUAL 0 OR levels STREQUAL "")
    message(FATAL_ERROR " CPUSERVE_LEVELS=native could not ask this CPU for its instructions: set "
                        "CPUSERVE_LEVELS=all, or name the levels.\n${log}${levels}")
  endif()
  list(LENGTH levels count)
  if(count GREATER 1)
    list(REMOVE_ITEM levels scalar)
  endif()
  set(${result} ${levels} PARENT_SCOPE)
endfunction()

# Sets `result` to whether the build has `level`.
function(cpuserve_is_chosen level result)
  get_property(chosen GLOBAL PROPERTY CPUSERVE_CHOSEN_LEVELS)
  set_property(GLOBAL APPEND PROPERTY CPUSERVE_KNOWN_LEVELS ${level})
  if(chosen STREQUAL "all" OR level IN_LIST chosen)
    set(${result} TRUE PARENT_SCOPE)
    set_property(GLOBAL APPEND PROPERTY CPUSERVE_BUILT_LEVELS ${level})
  else()
    set(${result} FALSE PARENT_SCOPE)
  endif()
endfunction()

# Stops if a level of the list is unknown, or extends a level that the build does not have: a level
# without all kernels needs a lower one that has them (CPUSERVE_UNIT_ALL), and not the level scalar.
function(cpuserve_check_levels)
  get_property(chosen GLOBAL PROPERTY CPUSERVE_CHOSEN_LEVELS)
  get_property(known GLOBAL PROPERTY CPUSERVE_KNOWN_LEVELS)
  get_property(built GLOBAL PROPERTY CPUSERVE_BUILT_LEVELS)
  list(JOIN known ", " names)
  set(unknown ${chosen})
  list(REMOVE_ITEM unknown all ${known})
  list(LENGTH chosen count)
  if(unknown OR (count GREATER 1 AND "all" IN_LIST chosen))
    message(FATAL_ERROR " CPUSERVE_LEVELS=${CPUSERVE_LEVELS}: give all, native, or levels of this "
                        "architecture, separated by commas: ${names}.")
  endif()
  set(whole "")
  foreach(level IN LISTS known)
    file(STRINGS "${PROJECT_SOURCE_DIR}/csrc/kernels/isa/${level}.cpp" all REGEX "CPUSERVE_UNIT_ALL")
    if(all AND NOT level STREQUAL "scalar")
      list(APPEND below ${level})
    endif()
    if(NOT level IN_LIST built)
      continue()
    elseif(all)
      set(whole ${level})
    elseif(whole STREQUAL "" OR whole STREQUAL "scalar")
      list(JOIN below " or " below)
      message(FATAL_ERROR " CPUSERVE_LEVELS=${CPUSERVE_LEVELS}: the level ${level} has some kernels "
                          "only and takes the others from a lower level: add ${below}.")
    endif()
  endforeach()
  list(JOIN built ", " names)
  message(STATUS "cpuserve: ISA levels ${names}; CPUSERVE_LEVELS=native, all or a list changes them")
endfunction()
