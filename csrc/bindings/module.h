// Declarations that the binding units share. Each unit registers its own part of cpuserve._C
// (cpuserve/_C.pyi).
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

// Returns the kernels of a level that this CPU can run. Throws ValueError that lists the available
// levels for any other.
const KernelTable& runnable_kernels(const std::string& isa);

// The fields of WorkSizes by name; and `sizes` with the given ones. Throws ValueError for a name
// that does not exist and for sizes that a kernel cannot work with.
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
