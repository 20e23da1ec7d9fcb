# CPUSERVE_SANITIZE=address,undefined or thread. gcc's libgomp is not instrumented: under the thread
# sanitizer the team's std::thread twin runs (csrc/parallel/team.cpp).
function(cpuserve_sanitize target)
  if(NOT CPUSERVE_SANITIZE)
    return()
  endif()
  target_compile_options(${target} PRIVATE -fsanitize=${CPUSERVE_SANITIZE} -fno-omit-frame-pointer
                                           -g)
  target_link_options(${target} PUBLIC -fsanitize=${CPUSERVE_SANITIZE})
endfunction()
