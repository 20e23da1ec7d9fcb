#include "bindings/fields.h"

namespace cpuserve {
namespace {

constexpr py::ssize_t kLongestShown = 80;  // characters of a value in an error

[[noreturn]] void refuse(const std::string& why) { throw py::type_error(why); }

void set(const FieldSetter& field, const std::string& start, void* to, py::handle passed,
         py::list& alive) {
  try {
    field.set(to, passed, alive);
  } catch (const py::cast_error&) {
    refuse(start + "cannot read the value of " + field.name + ": " +
           std::string(py::str(py::repr(passed)[py::slice(0, kLongestShown, 1)])));
  }
}

}  // namespace

void set_from_arguments(const char* method, void* to, const FieldSetters& setters,
                        const py::args& args, const py::kwargs& kwargs, py::list& alive) {
  const std::vector<FieldSetter>& fields = setters.fields;
  const std::string start = std::string(method) + "(): ";
  if (args.size() > fields.size()) {
    refuse(start + "takes at most " + std::to_string(fields.size()) + " arguments, got " +
           std::to_string(args.size()));
  }
  size_t num_named = 0;
  for (size_t i = 0; i < fields.size(); i++) {
    const FieldSetter& field = fields[i];
    const bool is_named = kwargs.contains(field.name.c_str());
    num_named += is_named;
    if (is_named && i < args.size()) refuse(start + "has two values for " + field.name);
    if (is_named) {
      set(field, start, to, kwargs[field.name.c_str()], alive);
    } else if (i < args.size()) {
      set(field, start, to, args[i], alive);
    } else if (i + setters.defaults < fields.size()) {
      refuse(start + "needs a value for " + field.name);
    }
  }
  if (num_named < kwargs.size())
    refuse(start + "got an argument that is no field of the operation");
}

void set_from_attributes(void* to, const FieldSetters& setters, py::handle from, py::list& alive) {
  for (const FieldSetter& field : setters.fields) {
    const py::object value = from.attr(field.name.c_str());
    if (!value.is_none()) set(field, "", to, value, alive);
  }
}

}  // namespace cpuserve
