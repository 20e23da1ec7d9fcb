#include "runtime/program.h"

#include <pybind11/stl.h>

#include "bindings/module.h"
#include "runtime/names.h"

namespace cpuserve {
namespace {

Activation from_name(const std::string& name, Activation) { return parse_activation(name); }
Score from_name(const std::string& name, Score) { return parse_score(name); }

// Python passes a field of type T as this type: a choice by its name, all else as it is.
template <class T>
using Passed = std::conditional_t<std::is_enum_v<T>, std::string, T>;
template <class T>
T received(Passed<T> passed) {
  if constexpr (std::is_enum_v<T>) {
    return from_name(passed, T{});
  } else {
    return passed;
  }
}

template <class Op, size_t I>
using FieldOf = std::tuple_element_t<I, decltype(Op::fields())>;

template <class Op, size_t I>
auto argument() {
  constexpr auto field = std::get<I>(Op::fields());
  if constexpr (FieldOf<Op, I>::kHasDefault) {
    return py::arg(field.name) = Op{}.*field.member;
  } else {
    return py::arg(field.name);
  }
}

// The method that adds an operation, with its fields as arguments.
template <class Op, size_t... I>
void define_method(py::class_<Program>& program, std::index_sequence<I...>) {
  program.def(
      Op::kName,
      [](Program& p, Passed<typename FieldOf<Op, I>::Type>... passed) {
        Op op{};
        ((op.*std::get<I>(Op::fields()).member =
              received<typename FieldOf<Op, I>::Type>(std::move(passed))),
         ...);
        p.add(std::move(op));
      },
      argument<Op, I>()...);
}

template <class... Ops>
void define_methods(py::class_<Program>& program, const std::variant<Ops...>&) {
  (define_method<Ops>(program,
                      std::make_index_sequence<std::tuple_size_v<decltype(Ops::fields())>>()),
   ...);
}

}  // namespace

void register_program(py::module_& m) {
  py::class_<Program> program(m, "Program");
  program
      .def(py::init([](const std::string& isa, int64_t max_tokens, int64_t max_seqs) {
             return std::make_unique<Program>(runnable_kernels(isa), max_tokens, max_seqs);
           }),
           py::arg("isa"), py::arg("max_tokens"), py::arg("max_seqs"))
      .def(
          "value",
          [](Program& p, std::string name, int64_t width, const std::string& format,
             int32_t copies) {
            return p.add_value(std::move(name), width, parse_format(format), copies);
          },
          py::arg("name"), py::arg("width"), py::arg("format"), py::arg("copies") = 1)
      .def(
          "matrix",
          [](Program& p, std::string name, const std::string& kind, int64_t n, int64_t k,
             std::vector<int64_t> parts, bool glu) {
            return p.add_matrix(std::move(name), parse_kind(kind), n, k, std::move(parts), glu);
          },
          py::arg("name"), py::arg("kind"), py::arg("n"), py::arg("k"), py::arg("parts"),
          py::arg("glu"))
      .def(
          "table",
          [](Program& p, std::string name, const std::string& kind, int64_t n, int64_t k) {
            return p.add_table(std::move(name), parse_kind(kind), n, k);
          },
          py::arg("name"), py::arg("kind"), py::arg("n"), py::arg("k"))
      .def(
          "packed_bytes",
          [](const Program& p, const std::string& kind, int64_t n, int64_t k) {
            return p.packed_bytes(parse_kind(kind), n, k);
          },
          py::arg("kind"), py::arg("n"), py::arg("k"))
      .def("vector", &Program::add_vector, py::arg("name"), py::arg("count"))
      .def(
          "kv_layer",
          [](Program& p, int32_t kv_heads, int32_t head_dim, int32_t group) {
            return p.add_kv_layer(kv_heads, head_dim, group);
          },
          py::arg("kv_heads"), py::arg("head_dim"), py::arg("group") = 0)
      .def(
          "latent_layer",
          [](Program& p, int32_t width, int32_t group) {
            return p.add_kv_layer(1, width, group, true);
          },
          py::arg("width"), py::arg("group") = 0)
      .def_property_readonly("weight_bytes", &Program::weight_bytes)
      .def_property_readonly("packed_layout", &Program::packed_layout)
      .def_property_readonly("state_bytes", &Program::state_bytes)
      .def_property_readonly("kv_block_bytes",
                             [](const Program& p) { return p.kv_block_bytes(KvType::bf16); });
  define_methods(program, Op{});
}

}  // namespace cpuserve
