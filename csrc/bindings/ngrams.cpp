// The Python bindings of the index that guesses tokens (cpuserve/core/speculation/ngram.py).
#include <pybind11/stl.h>

#include "bindings/module.h"
#include "runtime/ngram_index.h"

namespace cpuserve {
namespace {

using Tokens = std::vector<int32_t>;

Span<const int32_t> span_of_tokens(const Tokens& tokens) {
  return {tokens.data(), static_cast<int64_t>(tokens.size())};
}

}  // namespace

void register_ngrams(py::module_& m) {
  py::class_<NgramChances, std::shared_ptr<NgramChances>>(m, "NgramChances").def(py::init<>());
  py::class_<NgramIndex>(m, "NgramIndex")
      .def(py::init<int32_t, int32_t, std::shared_ptr<NgramChances>, int64_t>(), py::arg("least"),
           py::arg("most"), py::arg("shared"), py::arg("tokens"))
      .def(
          "add", [](NgramIndex& index, const Tokens& t) { index.add(span_of_tokens(t)); },
          py::arg("tokens"))
      .def(
          "advance", [](NgramIndex& index, const Tokens& t) { index.advance(span_of_tokens(t)); },
          py::arg("tokens"))
      .def("guess", &NgramIndex::guess, py::arg("count"))
      .def("chances", &NgramIndex::chances, py::arg("count"))
      .def_property_readonly("bytes", &NgramIndex::bytes);
}

}  // namespace cpuserve
