// What the binding units share. Each registers its own part of cpuserve._C (cpuserve/_C.pyi).
#pragma once
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <string>

#include "base/span.h"
#include "kernels/table.h"

namespace cpuserve {

namespace py = pybind11;

void register_cpu(py::module_& m);
void register_program(py::module_& m);
void register_executor(py::module_& m);
void register_kernels(py::module_& m);

// The kernels of a level this CPU can run; ValueError, naming those it can, for any other.
const KernelTable& runnable_kernels(const std::string& isa);

template <class T>
using Array = py::array_t<T, py::array::c_style>;

template <class T>
Span<const T> span_of(const Array<T>& array) {
  return {array.data(), static_cast<int64_t>(array.size())};
}

}  // namespace cpuserve
