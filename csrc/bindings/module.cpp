// The Python module cpuserve._C.
#include "bindings/module.h"

PYBIND11_MODULE(_C, m) {
  m.doc() = "The native extension of cpuserve; see _C.pyi.";
  cpuserve::register_build(m);
  cpuserve::register_cpu(m);
  cpuserve::register_program(m);
  cpuserve::register_executor(m);
  cpuserve::register_kernels(m);
  cpuserve::register_ngrams(m);
}
