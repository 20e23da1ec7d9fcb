// The Python bindings of the Program and of the methods that add its operations.
#include "runtime/program.h"

#include <pybind11/stl.h>

#include "bindings/module.h"
#include "runtime/names.h"

namespace cpuserve {
namespace {

Activation from_name(const std::string& name, Activation) { return parse_activation(name); }
Score from_name(const std::string& name, Score) { return parse_score(name); }

// The name of a field of an operation, and a function that sets it from an argument of Python.
struct FieldSetter {
  const char* name;
  bool has_default;
  void (*set)(void* op, py::handle passed);
};

// Converts an argument that Python passed to T. Python passes enums as strings (runtime/names.h).
template <class T>
T received(py::handle passed) {
  if constexpr (std::is_enum_v<T>) {
    return from_name(py::cast<std::string>(passed), T{});
  } else {
    return py::cast<T>(passed);
  }
}

template <class Op, size_t I>
constexpr FieldSetter setter() {
  constexpr auto field = std::get<I>(Op::fields());
  using Field = std::remove_const_t<decltype(field)>;
  return {field.name, Field::kHasDefault, [](void* op, py::handle passed) {
            static_cast<Op*>(op)->*std::get<I>(Op::fields()).member =
                received<typename Field::Type>(passed);
          }};
}

// Sets the fields of an operation from the positional and keyword arguments of a call.
// Throws TypeError if an argument is missing, unknown, given twice, or of another type.
void set_fields(const char* method, void* op, Span<const FieldSetter> fields, const py::args& args,
                const py::kwargs& kwargs) {
  const auto refuse = [&](const std::string& why) {
    throw py::type_error(std::string(method) + "(): " + why);
  };
  const auto num_args = static_cast<int64_t>(args.size());
  if (num_args > fields.size()) {
    refuse("takes at most " + std::to_string(fields.size()) + " arguments, got " +
           std::to_string(num_args));
  }
  size_t num_named = 0;
  for (int64_t i = 0; i < fields.size(); i++) {
    const FieldSetter& field = fields[i];
    const bool is_named = kwargs.contains(field.name);
    num_named += is_named;
    if (is_named && i < num_args) refuse(std::string("has two values for ") + field.name);
    if (!is_named && i >= num_args) {
      if (!field.has_default) refuse(std::string("needs a value for ") + field.name);
      continue;
    }
    const py::object passed =
        is_named ? py::object(kwargs[field.name]) : py::object(args[static_cast<size_t>(i)]);
    try {
      field.set(op, passed);
    } catch (const py::cast_error&) {
      refuse(std::string("cannot read the value of ") + field.name + ": " +
             std::string(py::repr(passed)));
    }
  }
  if (num_named < kwargs.size()) refuse("got an argument that is no field of the operation");
}

template <class Op, size_t... I>
void add_operation(Program& p, const py::args& args, const py::kwargs& kwargs,
                   std::index_sequence<I...>) {
  static constexpr FieldSetter kFields[] = {setter<Op, I>()...};
  Op op{};
  set_fields(Op::kName, &op, {kFields, sizeof...(I)}, args, kwargs);
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
  (define_method(program, Ops::kName,
                 [](Program& p, const py::args& args, const py::kwargs& kwargs) {
                   using Fields = decltype(Ops::fields());
                   add_operation<Ops>(p, args, kwargs,
                                      std::make_index_sequence<std::tuple_size_v<Fields>>());
                 }),
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
