// The Python bindings of the Program and of the methods that add its operations.
#include "runtime/program.h"

#include <pybind11/stl.h>

#include "bindings/fields.h"

namespace cpuserve {
namespace {

template <class Op>
void add_operation(Program& p, const py::args& args, const py::kwargs& kwargs) {
  Op op{};
  py::list alive;
  set_from_arguments(Op::kName, &op, setters_of<Op>(), args, kwargs, alive);
  p.add(std::move(op));
}

// Defines the method that adds an operation. All these methods have one C++ type,
// because the compiler needs 10 MB of memory for each type of a method.
void define_method(py::class_<Program>& program, const char* name,
                   void (*add)(Program&, const py::args&, const py::kwargs&)) {
  program.def(name, [add](Program& p, const py::args& args, const py::kwargs& kwargs) {
    add(p, args, kwargs);
  });
}

template <class... Ops>
void define_methods(py::class_<Program>& program, const std::variant<Ops...>&) {
  (define_method(program, Ops::kName, &add_operation<Ops>), ...);
}

// Returns the fields of each operation, by its method.
template <class... Ops>
std::map<std::string, std::vector<std::string>> operation_fields(const std::variant<Ops...>&) {
  return {{Ops::kName, setters_of<Ops>().names()}...};
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
          [](Program& p, std::string name, int64_t width, const std::string& format, int32_t copies,
             int32_t fold) {
            return p.add_value(std::move(name), width, from_name<ActFormat>(format), copies, fold);
          },
          py::arg("name"), py::arg("width"), py::arg("format"), py::arg("copies") = 1,
          py::arg("fold") = 1)
      .def(
          "matrix",
          [](Program& p, std::string name, const std::string& kind, int64_t n, int64_t k,
             std::vector<int64_t> parts, bool glu) {
            return p.add_matrix(std::move(name), from_name<WeightKind>(kind), n, k,
                                std::move(parts), glu);
          },
          py::arg("name"), py::arg("kind"), py::arg("n"), py::arg("k"), py::arg("parts"),
          py::arg("glu"))
      .def(
          "table",
          [](Program& p, std::string name, const std::string& kind, int64_t n, int64_t k) {
            return p.add_table(std::move(name), from_name<WeightKind>(kind), n, k);
          },
          py::arg("name"), py::arg("kind"), py::arg("n"), py::arg("k"))
      .def(
          "packed_bytes",
          [](const Program& p, const std::string& kind, int64_t n, int64_t k) {
            return p.packed_bytes(from_name<WeightKind>(kind), n, k);
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
  m.def("operation_fields", [] { return operation_fields(Op{}); });
}

}  // namespace cpuserve
