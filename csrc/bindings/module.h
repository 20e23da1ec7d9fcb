// Declarations that the source files of the bindings share.
// Each of these files registers its own part of cpuserve._C (cpuserve/_C.pyi).
#pragma once
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <map>
#include <string>

#include "base/span.h"
#include "kernels/table.h"

namespace cpuserve {

namespace py = pybind11;

void register_build(py::module_& m);
void register_cpu(py::module_& m);
void register_program(py::module_& m);
void register_executor(py::module_& m);
void register_kernels(py::module_& m);
void register_ngrams(py::module_& m);

// Returns the kernels of an ISA level.
// If this CPU cannot run the level, throws a ValueError that lists the levels that it can run.
const KernelTable& runnable_kernels(const std::string& isa);

// work_sizes_map returns the fields of `sizes` by name. work_sizes_of returns a copy of `sizes`,
// but with the fields of `given`. It throws ValueError for an unknown field,
// and for sizes that a kernel cannot use.
using WorkSizeMap = std::map<std::string, int32_t>;
WorkSizeMap work_sizes_map(const WorkSizes& sizes);
WorkSizes work_sizes_of(const WorkSizeMap& given, WorkSizes sizes);

template <class T>
using Array = py::array_t<T, py::array::c_style>;

template <class T>
Span<const T> span_of(const Array<T>& array) {
  return {array.data(), static_cast<int64_t>(array.size())};
}

}  // namespace cpuserve
