// CPU features, ISA levels, and the team.
#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include <algorithm>

#include "base/allocations.h"
#include "base/check.h"
#include "bindings/module.h"
#include "cpu/features.h"
#include "kernels/resolve.h"
#include "parallel/team.h"
#include "runtime/program.h"

namespace cpuserve {
namespace {

std::vector<std::string> runnable_levels() {
  std::vector<std::string> out;
  const std::vector<std::string> supported = supported_isa_levels(cpu_info());
  for (const char* level : compiled_levels()) {
    if (std::find(supported.begin(), supported.end(), level) != supported.end()) {
      out.emplace_back(level);
    }
  }
  return out;
}

py::dict features_dict() {
  const CpuInfo& cpu = cpu_info();
  py::dict out;
  out["arch"] = cpu.arch;
  out["vendor"] = cpu.vendor;
  out["model"] = cpu.model;
  out["features"] = cpu.features;
  out["tiles_refused"] = cpu.tiles_refused;
  out["l1d"] = cpu.l1d_bytes;
  out["l2"] = cpu.l2_bytes;
  out["l3"] = cpu.l3_bytes;
  return out;
}

py::dict table_dict(const std::string& isa) {
  runnable_kernels(isa);
  py::dict out;
  for (const KernelEntry& e : kernel_entries(isa)) {
    out[e.name] = e.level ? py::cast(e.level) : py::none();
  }
  return out;
}

}  // namespace

const KernelTable& runnable_kernels(const std::string& isa) {
  const std::vector<std::string> levels = runnable_levels();
  if (std::find(levels.begin(), levels.end(), isa) == levels.end()) {
    std::string list;
    for (const std::string& l : levels) list += (list.empty() ? "" : ", ") + l;
    const auto& known = known_isa_levels();
    const bool exists = std::find(known.begin(), known.end(), isa) != known.end();
    fail_argument("ISA level '", isa,
                  exists ? "' is not supported by this CPU or not in this build" : "' is unknown",
                  "; available levels: ", list);
  }
  return *find_kernels(isa);
}

void register_cpu(py::module_& m) {
  m.def("isa_levels", &runnable_levels);
  m.def("compiled_isa_levels", [] {
    const std::vector<const char*> levels = compiled_levels();
    return std::vector<std::string>(levels.begin(), levels.end());
  });
  m.def("cpu_features", &features_dict);
  m.def("resolve_table", &table_dict, py::arg("isa"));
  m.def("allocations", &allocations);
  m.def(
      "row_bytes",
      [](const std::string& format, int64_t width) {
        return row_bytes(parse_format(format), width);
      },
      py::arg("format"), py::arg("width"));

  py::class_<Team>(m, "Team")
      .def(py::init([](int threads, std::optional<std::vector<int>> cpus, bool passive_waits,
                       const std::vector<int>& ranks, const std::vector<int>& complexes) {
             return std::make_unique<Team>(threads, cpus.value_or(std::vector<int>{}),
                                           passive_waits, ranks, complexes);
           }),
           py::arg("threads"), py::arg("cpus") = py::none(), py::arg("passive_waits") = false,
           py::arg("ranks") = std::vector<int>{}, py::arg("complexes") = std::vector<int>{})
      .def("run", &Team::run, py::arg("main"))
      .def_property_readonly("threads", &Team::threads)
      .def_property_readonly("ranks", [](const Team& team) { return team.ranks().count(); })
      .def("placement", &Team::placement);
}

}  // namespace cpuserve
