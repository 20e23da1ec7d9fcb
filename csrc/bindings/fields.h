// Sets the fields of C++ structs (base/fields.h) from arguments or attributes of Python.
#pragma once
#include <pybind11/stl.h>

#include <algorithm>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/fields.h"
#include "bindings/module.h"
#include "runtime/names.h"

namespace cpuserve {

// A field: its name, and a function that sets it from a value of Python. Arrays that the field
// then points to are added to `alive`.
struct FieldSetter {
  std::string name;
  void (*set)(void* to, py::handle passed, py::list& alive);
};

// The fields of a struct that Python sets; the last `defaults` of them may be missing.
struct FieldSetters {
  std::vector<FieldSetter> fields;
  size_t defaults;

  std::vector<std::string> names() const {
    std::vector<std::string> out;
    for (const FieldSetter& field : fields) out.push_back(field.name);
    return out;
  }
};

template <class S>
const FieldSetters& setters_of();

// Sets the fields of the struct `to` from positional and keyword arguments of `method`. Throws
// TypeError if an argument is missing, unknown, given twice, or of another type.
void set_from_arguments(const char* method, void* to, const FieldSetters& setters,
                        const py::args& args, const py::kwargs& kwargs, py::list& alive);
// Sets all fields of the struct `to` from the attributes of `from`; None keeps a default.
// Throws AttributeError if one is missing, and TypeError if it has another type.
void set_from_attributes(void* to, const FieldSetters& setters, py::handle from, py::list& alive);

template <class T, class = void>
constexpr bool kHasFields = false;
template <class T>
constexpr bool kHasFields<T, std::void_t<decltype(T::kFieldNames)>> = true;

// Returns a value that Python passed as a T. Python passes enums as strings (runtime/names.h),
// and structs as objects with attributes.
template <class T>
struct Received {
  static T of(py::handle passed, py::list& alive) {
    if constexpr (std::is_enum_v<T>) {
      return from_name<T>(py::cast<std::string>(passed));
    } else if constexpr (kHasFields<T>) {
      T out;
      set_from_attributes(&out, setters_of<T>(), passed, alive);
      return out;
    } else {
      return py::cast<T>(passed);
    }
  }
};
template <class T>
struct Received<std::optional<T>> {
  static std::optional<T> of(py::handle passed, py::list& alive) {
    return Received<T>::of(passed, alive);
  }
};
template <class T>
struct Received<Span<const T>> {
  static Span<const T> of(py::handle passed, py::list& alive) {
    const auto array = py::cast<Array<T>>(passed);
    alive.append(array);
    return span_of(array);
  }
};
template <>
struct Received<std::vector<int32_t>> {
  static std::vector<int32_t> of(py::handle passed, py::list&) {
    const auto array = py::cast<Array<int32_t>>(passed);
    return {array.data(), array.data() + array.size()};
  }
};
template <class T>
struct Received<std::vector<T>> {
  static std::vector<T> of(py::handle passed, py::list& alive) {
    std::vector<T> out;
    for (const py::handle each : py::cast<py::sequence>(passed)) {
      out.push_back(Received<T>::of(each, alive));
    }
    return out;
  }
};

template <class S, size_t I>
void set_field(void* to, py::handle passed, py::list& alive) {
  auto& field = std::get<I>(static_cast<S*>(to)->fields());
  field = Received<std::decay_t<decltype(field)>>::of(passed, alive);
}

template <class S, size_t... I>
FieldSetters make_setters(std::index_sequence<I...>) {
  FieldSetters out{{{std::string(), &set_field<S, I>}...}, S::kDefaults};
  const std::string names = S::kFieldNames;  // "x, out, column"
  size_t begin = 0;
  for (FieldSetter& field : out.fields) {
    const size_t end = std::min(names.find(", ", begin), names.size());
    field.name = names.substr(begin, end - begin);
    begin = end + 2;
  }
  return out;
}

template <class S>
const FieldSetters& setters_of() {
  using Fields = decltype(std::declval<S&>().fields());
  static const FieldSetters setters =
      make_setters<S>(std::make_index_sequence<std::tuple_size_v<Fields>>());
  return setters;
}

}  // namespace cpuserve
