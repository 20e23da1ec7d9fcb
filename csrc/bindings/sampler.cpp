// The Python bindings of the sampler: the methods of Executor that admit and release requests.
#include "bindings/sampler.h"

#include "bindings/fields.h"

namespace cpuserve {

void define_sampler(py::class_<Executor>& executor) {
  executor
      .def(
          "admit",
          [](Executor& e, int64_t slot, py::handle request) {
            py::list alive;
            e.sampler().admit(slot, Received<SlotRequest>::of(request, alive));
          },
          py::arg("slot"), py::arg("request"))
      .def(
          "mirostat_mu",
          [](Executor& e, int64_t slot) {
            const SamplerChain* chain = e.sampler().checked_chain(slot);
            return chain ? chain->mu() : 0.0f;
          },
          py::arg("slot"))
      .def("release", [](Executor& e, int64_t slot) { e.release(slot); }, py::arg("slot"));
}

}  // namespace cpuserve
