# Finds pybind11, and lets targets include a copy of its headers in the build directory. pip installs
# pybind11 into a new directory for each isolated build, with new times of change, which would
# compile all bindings again. A copy changes only with the version.
macro(cpuserve_find_pybind11)  # a macro, because find_package sets variables
  find_package(pybind11 CONFIG REQUIRED)
  set(copy "${PROJECT_BINARY_DIR}/pybind11/include")
  file(GLOB_RECURSE headers RELATIVE "${pybind11_INCLUDE_DIR}" "${pybind11_INCLUDE_DIR}/*.h")
  foreach(header IN LISTS headers)
    configure_file("${pybind11_INCLUDE_DIR}/${header}" "${copy}/${header}" COPYONLY)
  endforeach()
  set(target pybind11::pybind11_headers)
  get_target_property(folders ${target} INTERFACE_INCLUDE_DIRECTORIES)
  list(TRANSFORM folders REPLACE "^${pybind11_INCLUDE_DIR}$" "${copy}")
  if(NOT copy IN_LIST folders)
    message(FATAL_ERROR "${target} has no include directory ${pybind11_INCLUDE_DIR}: ${folders}")
  endif()
  set_target_properties(${target} PROPERTIES INTERFACE_INCLUDE_DIRECTORIES "${folders}")
endmacro()
