// The Python bindings of CPU features, ISA levels, and the team of threads.
#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include <algorithm>

#include "base/allocations.h"
#include "base/check.h"
#include "bindings/module.h"
#include "cpu/caches.h"
#include "cpu/features.h"
#include "kernels/resolve.h"
#include "parallel/team.h"
#include "runtime/names.h"
#include "runtime/program.h"
#include "runtime/work_sizes.h"

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
  const CacheSizes caches = read_cache_sizes(0);
  py::dict out;
  out["arch"] = cpu.arch;
  out["vendor"] = cpu.vendor;
  out["model"] = cpu.model;
  out["features"] = cpu.features;
  out["tiles_refused"] = cpu.tiles_refused;
  out["l1d"] = caches.l1d;
  out["l2"] = caches.l2;
  out["l3"] = caches.l3;
  return out;
}

// Returns a dict for each weight kind: the size of the register tile for many rows (tile_rows,
// tile_columns), the most rows that a linear multiplies in one pass over the weights (pass_rows),
// and the elements of K in one K block of a matrix with K = `k` (block_k).
py::dict geometry_dict(const std::string& isa, int64_t k, const WorkSizeMap& given) {
  const KernelTable& table = runnable_kernels(isa);
  const WorkSizes sizes = work_sizes_of(given, WorkSizes{});
  py::dict out;
  for (int i = 0; i < static_cast<int>(WeightKind::count); i++) {
    const LinearKernel& kernel = table.linear[i];
    py::dict of;
    of["tile_rows"] = kernel.tile_rows;
    of["tile_columns"] = kernel.tile_columns;
    const int most = kernel.sizes_cut_passes ? sizes.float_pass_rows : kernel.pass_rows;
    of["pass_rows"] = std::min(most, kernel.pass_rows);
    of["block_k"] = kernel.block_k(k, sizes);
    out[kind_name(static_cast<WeightKind>(i))] = of;
  }
  return out;
}

// Returns the cache sizes of a core in bytes,
// and the block sizes of the kernels (WorkSizes) that follow from them.
py::dict sizes_of_cpu(int cpu) {
  const CacheSizes caches = read_cache_sizes(cpu);
  py::dict out;
  out["l1d"] = caches.l1d;
  out["l2"] = caches.l2;
  out["sizes"] = work_sizes_map(work_sizes_for(caches, cpu_info().vendor));
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

WorkSizeMap work_sizes_map(const WorkSizes& sizes) {
  WorkSizeMap out;
  for (const WorkSizeField& f : kWorkSizeFields) out[f.name] = sizes.*f.value;
  return out;
}

WorkSizes work_sizes_of(const WorkSizeMap& given, WorkSizes sizes) {
  for (const auto& [name, value] : given) {
    const auto field = std::find_if(std::begin(kWorkSizeFields), std::end(kWorkSizeFields),
                                    [&, &name = name](const auto& f) { return name == f.name; });
    check_argument(field != std::end(kWorkSizeFields), "work sizes: there is no '", name, "'");
    sizes.*field->value = value;
  }
  check_work_sizes(sizes);
  return sizes;
}

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
  m.def("cpu_isa_levels", [] { return supported_isa_levels(cpu_info()); });
  m.def("compiled_isa_levels", [] {
    const std::vector<const char*> levels = compiled_levels();
    return std::vector<std::string>(levels.begin(), levels.end());
  });
  m.def("cpu_features", &features_dict);
  m.def("work_sizes", &sizes_of_cpu, py::arg("cpu") = 0);
  m.def(
      "check_work_sizes", [](const WorkSizeMap& sizes) { work_sizes_of(sizes, WorkSizes{}); },
      py::arg("sizes"));
  m.def("linear_geometry", &geometry_dict, py::arg("isa"), py::arg("k"), py::arg("sizes"));
  m.def("resolve_table", &table_dict, py::arg("isa"));
  m.def("allocations", &allocations);
  m.def(
      "row_bytes",
      [](const std::string& format, int64_t width) {
        return row_bytes(from_name<ActFormat>(format), width);
      },
      py::arg("format"), py::arg("width"));

  py::class_<Team>(m, "Team")
      .def(py::init([](int threads, std::optional<CpuSets> cpus, bool passive_waits,
                       const std::vector<int>& ranks, const std::vector<int>& complexes,
                       const std::vector<int>& speeds) {
             return std::make_unique<Team>(threads, cpus.value_or(CpuSets{}), passive_waits, ranks,
                                           complexes, speeds);
           }),
           py::arg("threads"), py::arg("cpus") = py::none(), py::arg("passive_waits") = false,
           py::arg("ranks") = std::vector<int>{}, py::arg("complexes") = std::vector<int>{},
           py::arg("speeds") = std::vector<int>{})
      .def("run", &Team::run, py::arg("main"))
      .def_property_readonly("threads", &Team::threads)
      .def_property_readonly("ranks", [](const Team& team) { return team.ranks().count(); })
      .def("placement", &Team::placement)
      .def("waited_ns", &Team::waited_ns);
}

}  // namespace cpuserve
