# A script that fails if an object file of an ISA unit defines a weak or unique symbol, or a global
# symbol other than the function that returns its table. The linker keeps only one copy of a weak
# symbol. If it kept the copy of an inline function from the AVX-512 unit, an older CPU would fail
# with an illegal instruction in unrelated code.
foreach(object IN LISTS OBJECTS)
  execute_process(COMMAND ${NM} -C --defined-only ${object} OUTPUT_VARIABLE out RESULT_VARIABLE rc
                  ERROR_VARIABLE err)
  if(NOT rc EQUAL 0)
    message(FATAL_ERROR "${NM} failed on ${object}: ${err}")
  endif()
  string(REPLACE ";" "," out "${out}")
  string(REPLACE "\n" ";" lines "${out}")
  set(found FALSE)
  foreach(line IN LISTS lines)
    if(line MATCHES "^[0-9a-f]+ ([A-Zuvw]) _?(.*)$")  # other lower-case letters: local symbols
      set(type "${CMAKE_MATCH_1}")
      set(name "${CMAKE_MATCH_2}")
      if(type STREQUAL "T" AND name STREQUAL SYMBOL)
        set(found TRUE)
      else()
        list(APPEND leaks "${type} ${name}")
      endif()
    endif()
  endforeach()
  if(NOT found)
    message(FATAL_ERROR "${object} does not define ${SYMBOL}")
  endif()
endforeach()
if(leaks)
  list(JOIN leaks "\n  " text)
  message(FATAL_ERROR "Symbols leak out of an ISA unit (make them static or always_inline, and "
                      "include only C headers):\n  ${text}")
endif()
file(WRITE "${STAMP}" "")
