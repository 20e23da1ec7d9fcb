// The Python bindings of the Executor, without its sampler.
#include "runtime/executor.h"

#include <pybind11/stl.h>
#include <unistd.h>

#include <cerrno>
#include <memory>
#include <optional>

#include "base/check.h"
#include "bindings/module.h"
#include "bindings/sampler.h"
#include "runtime/names.h"

namespace cpuserve {
namespace {

using Words = Array<int32_t>;
using SourceTuple = std::tuple<Array<uint8_t>, std::string, std::optional<Array<int32_t>>>;

using MatrixTuple = std::tuple<Id, std::vector<SourceTuple>>;

SourceTensor source_of(const SourceTuple& source) {
  const auto& [data, type, order] = source;
  check_argument(data.ndim() == 2, "load_matrix: a source is [rows, row_bytes], not ", data.ndim(),
                 "-dimensional");
  check_argument(!order || order->size() == data.shape(0),
                 "load_matrix: the row order must have one entry for each row");
  return {data.data(), data.shape(0), static_cast<size_t>(data.shape(1)),
          from_name<SourceType>(type), order ? order->data() : nullptr};
}

void load_matrices(Executor& e, const std::vector<MatrixTuple>& matrices,
                   const std::vector<Array<uint8_t>>& ahead) {
  std::vector<std::vector<SourceTensor>> parts;
  std::vector<MatrixSource> sources;
  for (const auto& [id, tuples] : matrices) {
    parts.emplace_back();
    for (const SourceTuple& tuple : tuples) parts.back().push_back(source_of(tuple));
  }
  for (size_t i = 0; i < parts.size(); i++) sources.push_back({std::get<0>(matrices[i]), parts[i]});
  std::vector<Span<const uint8_t>> bytes;
  for (const Array<uint8_t>& array : ahead) bytes.push_back(span_of(array));
  const py::gil_scoped_release release;
  e.weights().load_matrices(e.team(), sources, bytes);
}

void load_matrix(Executor& e, Id matrix, const std::vector<SourceTuple>& sources) {
  load_matrices(e, {{matrix, sources}}, {});
}

// Returns a numpy view of memory that the executor owns. The view keeps the executor `self` alive.
template <class T>
py::array view(const py::object& self, std::vector<T>& data, std::vector<py::ssize_t> shape) {
  return py::array_t<T>(std::move(shape), data.data(), self);
}

// Returns a list of read-only numpy views: for each rank, its memory of packed matrices.
py::list arenas_view(const py::object& self) {
  py::list out;
  for (const Buffer& arena : self.cast<Executor&>().weights().matrix_arenas()) {
    py::array_t<uint8_t> bytes({static_cast<py::ssize_t>(arena.size())}, arena.data(), self);
    py::setattr(bytes.attr("flags"), "writeable", py::bool_(false));
    out.append(bytes);
  }
  return out;
}

// Returns a numpy view of the vectors that HiddenOp copied, fp32 [max_tokens / fold, hidden_width].
py::array vectors_view(const py::object& self) {
  auto& e = self.cast<Executor&>();
  return view(self, e.results().vectors,
              {static_cast<py::ssize_t>(e.program().max_tokens() / e.program().fold()),
               e.program().hidden_width()});
}

py::array top_view(const py::object& self, bool ids) {
  auto& e = self.cast<Executor&>();
  const std::vector<py::ssize_t> shape{static_cast<py::ssize_t>(e.results().tokens.size()),
                                       static_cast<py::ssize_t>(e.max_top())};
  return ids ? view(self, e.results().top_ids, shape) : view(self, e.results().top_logprobs, shape);
}

template <class T>
auto row_view(std::vector<T> StepResults::*member) {
  return [member](const py::object& self) {
    std::vector<T>& data = self.cast<Executor&>().results().*member;
    return view(self, data, {static_cast<py::ssize_t>(data.size())});
  };
}

Array<float> to_array(const TapMatrix& m) {
  Array<float> out({m.rows, m.width});
  std::copy(m.data.begin(), m.data.end(), out.mutable_data());
  return out;
}

py::tuple tap(Executor& e, const Words& words, int64_t op) {
  Tap result;
  {
    const py::gil_scoped_release release;
    result = e.tap(span_of(words), op);
  }
  py::list inputs;
  for (const TapMatrix& m : result.inputs) inputs.append(to_array(m));
  return py::make_tuple(inputs, to_array(result.output));
}

Array<float> step_logits(Executor& e, const Words& words) {
  Array<float> out({e.count_rows(span_of(words)), e.program().vocab()});
  float* data = out.mutable_data();
  const py::gil_scoped_release release;
  e.step_logits(span_of(words), data);
  return out;
}

Array<uint8_t> read_blocks(const Executor& e, const Words& blocks, int32_t group) {
  const auto bytes = static_cast<py::ssize_t>(e.kv_block_bytes());
  Array<uint8_t> out({static_cast<py::ssize_t>(blocks.size()), bytes});
  uint8_t* data = out.mutable_data();
  const Span<const int32_t> span = span_of(blocks);
  const py::gil_scoped_release release;
  e.read_blocks(span, group, data);
  return out;
}

void write_blocks(Executor& e, const Words& blocks, const Array<uint8_t>& data, int32_t group) {
  const auto wanted = blocks.size() * static_cast<py::ssize_t>(e.kv_block_bytes());
  check_argument(data.size() == wanted, "write_blocks: ", blocks.size(), " blocks need ", wanted,
                 " bytes, but got ", data.size());
  const Span<const int32_t> span = span_of(blocks);
  const uint8_t* from = data.data();
  const py::gil_scoped_release release;
  e.write_blocks(span, group, from);
}

Array<uint8_t> read_snapshot(const Executor& e, int64_t slot) {
  Array<uint8_t> out(static_cast<py::ssize_t>(e.snapshot_bytes()));
  uint8_t* data = out.mutable_data();
  const py::gil_scoped_release release;
  e.read_snapshot(slot, data);
  return out;
}

void write_snapshot(Executor& e, int64_t slot, const Array<uint8_t>& data) {
  const auto wanted = static_cast<py::ssize_t>(e.snapshot_bytes());
  check_argument(data.size() == wanted, "write_snapshot: ", wanted, " bytes are needed, but got ",
                 data.size());
  const uint8_t* from = data.data();
  const py::gil_scoped_release release;
  e.write_snapshot(slot, from);
}

int probe_kind(const std::string& kind) {
  const std::vector<std::string> names{"f32", "bf16", "int8", "int4"};
  for (size_t i = 0; i < names.size(); i++) {
    if (names[i] == kind) return static_cast<int>(i);
  }
  fail_argument("unknown dot-product probe '", kind, "'; known: f32, bf16, int8, int4");
}

const auto free_gil = py::call_guard<py::gil_scoped_release>();

// Defines the methods that load weights.
void define_loads(py::class_<Executor>& executor) {
  executor
      .def("load_matrices", &load_matrices, py::arg("matrices"),
           py::arg("ahead") = std::vector<Array<uint8_t>>())
      .def("load_matrix", &load_matrix, py::arg("matrix"), py::arg("sources"))
      .def(
          "load_table",
          [](Executor& e, Id matrix, const Array<uint8_t>& rows, const std::string& type) {
            e.weights().load_table(matrix, source_of({rows, type, std::nullopt}));
          },
          py::keep_alive<1, 3>(), py::arg("matrix"), py::arg("rows").noconvert(), py::arg("type"))
      .def(
          "load_vector",
          [](Executor& e, Id vector, const Array<float>& data) {
            e.weights().load_vector(vector, span_of(data));
          },
          py::arg("vector"), py::arg("data"))
      .def(
          "read_packed",
          [](Executor& e, int fd, size_t offset) { e.weights().read_packed(e.team(), fd, offset); },
          py::arg("fd"), py::arg("offset") = 0, free_gil)
      .def("seal_packed", [](Executor& e) { e.weights().seal(); })
      .def("skip_digest", [](Executor& e) { e.weights().skip_digest(); })
      .def_property_readonly("packed_digest",
                             [](Executor& e) { return e.weights().packed_digest(); })
      .def_property_readonly("packed_arenas", &arenas_view);
}

// Defines the methods that run steps, and the properties with their results.
void define_steps(py::class_<Executor>& executor) {
  executor
      .def(
          "step",
          [](Executor& e, const Words& words, const std::optional<Words>& masks) {
            const Span<const int32_t> span = span_of(words);
            const Span<const int32_t> bits = masks ? span_of(*masks) : Span<const int32_t>{};
            const py::gil_scoped_release release;
            return e.step(span, bits);
          },
          py::arg("words").noconvert(), py::arg("masks").noconvert() = py::none())
      .def(
          "start",
          [](Executor& e, const Words& words, int64_t first) {
            const Span<const int32_t> span = span_of(words);
            const py::gil_scoped_release release;
            e.start(span, first);
          },
          py::arg("words").noconvert(), py::arg("first") = 0)
      .def("advance", &Executor::advance, py::arg("seconds"), py::arg("last") = -1, free_gil)
      .def(
          "write_patches",
          [](Executor& e, const Array<uint8_t>& rows) {
            const Span<const uint8_t> span = span_of(rows);
            const py::gil_scoped_release release;
            e.write_patches(span);
          },
          py::arg("rows").noconvert())
      .def(
          "read_hidden",
          [](const Executor& e, const Words& rows) {
            Array<float> out(
                {static_cast<py::ssize_t>(rows.size()), static_cast<py::ssize_t>(e.kept_width())});
            e.read_hidden(span_of(rows), out.mutable_data());
            return out;
          },
          py::arg("rows").noconvert())
      .def("tap", &tap, py::arg("words").noconvert(), py::arg("op_index"))
      .def("step_logits", &step_logits, py::arg("words").noconvert())
      .def_property_readonly("tokens", row_view(&StepResults::tokens))
      .def_property_readonly("logprobs", row_view(&StepResults::logprobs))
      .def_property_readonly("ranks", row_view(&StepResults::ranks))
      .def_property_readonly("top_ids", [](const py::object& self) { return top_view(self, true); })
      .def_property_readonly("top_logprobs",
                             [](const py::object& self) { return top_view(self, false); })
      .def_property_readonly("vectors", &vectors_view);
}

ExpertPool& pool_of(Executor& e) {
  check_argument(e.weights().pool() != nullptr, "all matrices are in memory: there is no pool");
  return *e.weights().pool();
}

py::dict expert_counts(Executor& e) {
  const ExpertPool& pool = pool_of(e);
  const ExpertCounts counts = pool.counts();
  py::dict out;
  out["hits"] = counts.hits;
  out["misses"] = counts.misses;
  out["bytes_read"] = counts.bytes_read;
  out["wait_ns"] = counts.wait_ns;
  out["errors"] = counts.errors;
  out["guessed"] = counts.guessed;
  out["guessed_right"] = counts.guessed_right;
  out["held"] = counts.held;
  out["units"] = pool.units();
  out["slots"] = pool.slots();
  out["bytes"] = pool.bytes();
  return out;
}

// Lets before(bytes) decide about each read: it returns the bytes to read, or a negative errno.
// The threads that read call it with the GIL.
ExpertPool::Read read_after(const std::optional<py::function>& before) {
  if (!before) return {};
  // A thread may drop the last copy, so the function is deleted with the GIL.
  const std::shared_ptr<py::function> call(new py::function(*before), [](py::function* f) {
    const py::gil_scoped_acquire acquire;
    delete f;
  });
  return [call](int fd, void* to, size_t bytes, size_t offset) -> int64_t {
    int64_t allowed = 0;
    {
      const py::gil_scoped_acquire acquire;
      try {
        allowed = (*call)(bytes).cast<int64_t>();
      } catch (py::error_already_set& error) {  // a mistake of a test must not end the process
        error.discard_as_unraisable("before_read");
        allowed = -EIO;
      }
    }
    if (allowed < 0) {
      errno = static_cast<int>(-allowed);
      return -1;
    }
    return pread(fd, to, static_cast<size_t>(allowed), static_cast<off_t>(offset));
  };
}

// Defines the methods of the pool of experts.
void define_pool(py::class_<Executor>& executor) {
  executor.def_property_readonly("expert_counts", &expert_counts)
      .def_property_readonly("expert_heat",
                             [](Executor& e) {
                               const std::vector<float> heat = pool_of(e).heat();
                               return Array<float>(static_cast<py::ssize_t>(heat.size()),
                                                   heat.data());
                             })
      .def(
          "warm_experts",
          [](Executor& e, const Array<float>& heat) { pool_of(e).warm(span_of(heat)); },
          py::arg("heat"))
      .def_property_readonly("failed_sequences", &Executor::failed_sequences)
      .def_property_readonly("parked_sequences", &Executor::parked_sequences)
      .def_property_readonly("expert_error", [](Executor& e) { return pool_of(e).error(); });
}

// Defines the methods that copy the bytes of KV blocks and of recurrent states.
void define_blocks(py::class_<Executor>& executor) {
  executor.def_property_readonly("kv_block_bytes", &Executor::kv_block_bytes)
      .def("read_blocks", &read_blocks, py::arg("blocks").noconvert(), py::arg("group") = 0)
      .def_property_readonly("snapshot_bytes", &Executor::snapshot_bytes)
      .def("read_snapshot", &read_snapshot, py::arg("slot"))
      .def("write_snapshot", &write_snapshot, py::arg("slot"), py::arg("data").noconvert())
      .def("write_blocks", &write_blocks, py::arg("blocks").noconvert(),
           py::arg("data").noconvert(), py::arg("group") = 0)
      .def("grow_kv", &Executor::grow_kv, free_gil)
      .def(
          "write_media",
          [](Executor& e, int64_t first, const Array<float>& rows) {
            const Span<const float> span = span_of(rows);
            const py::gil_scoped_release release;
            e.write_media(first, span);
          },
          py::arg("first"), py::arg("rows").noconvert());
}

// Defines the methods that return the operations of a step, their times, and its progress.
void define_profile(py::class_<Executor>& executor) {
  executor.def_property_readonly("step_allocations", &Executor::step_allocations)
      .def("num_ops", [](const Executor& e) { return e.program().ops().size(); })
      .def(
          "op_name",
          [](const Executor& e, int64_t index) {
            const auto& ops = e.program().ops();
            check_argument(index >= 0 && index < static_cast<int64_t>(ops.size()),
                           "there is no op ", index);
            return op_name(ops[static_cast<size_t>(index)]);
          },
          py::arg("index"))
      .def("op_times",
           [](const Executor& e) {
             const std::vector<double>& s = e.op_seconds();
             return Array<double>(static_cast<py::ssize_t>(s.size()), s.data());
           })
      .def("profile", &Executor::profile, py::arg("on"))
      .def("cancel", &Executor::cancel, py::arg("on") = true)
      .def_property_readonly("progress", &Executor::progress);
}

// Defines the methods that measure bandwidth, products, barriers and linears.
void define_probes(py::class_<Executor>& executor) {
  executor.def("probe_bandwidth", &Executor::probe_bandwidth, py::arg("seconds"), free_gil)
      .def(
          "probe_dot",
          [](Executor& e, const std::string& kind, double seconds) {
            return e.probe_dot(probe_kind(kind), seconds);
          },
          py::arg("kind"), py::arg("seconds"), free_gil)
      .def("probe_barrier", &Executor::probe_barrier, py::arg("rounds"), free_gil)
      .def("probe_linears", &Executor::probe_linears, py::arg("rows"), py::arg("first"),
           py::arg("count"), free_gil)
      .def_property_readonly("num_linears", &Executor::num_linears)
      .def_property(
          "work_sizes", [](const Executor& e) { return work_sizes_map(e.work_sizes()); },
          [](Executor& e, const WorkSizeMap& given) {
            e.set_work_sizes(work_sizes_of(given, e.work_sizes()));
          });
}

// Defines the methods that return how much memory is used and on which NUMA nodes it is.
void define_memory(py::class_<Executor>& executor) {
  executor.def_property_readonly("memory", &Executor::memory)
      .def_property_readonly("binding",
                             [](const Executor& e) {
                               const MemoryBinding& b = e.binding();
                               py::dict out;
                               out["mode"] = b.mode;
                               out["error"] = b.error;
                               out["nodes"] = b.nodes;
                               return out;
                             })
      .def("interleave", &Executor::interleave, py::arg("nodes"))
      .def_property_readonly("memory_nodes", [](const Executor& e) {
        const MemoryNodes on = e.memory_nodes();
        py::dict out;
        out["weights"] = on.weights;
        out["kv"] = on.kv;
        return out;
      });
}

}  // namespace

void register_executor(py::module_& m) {
  m.def(
      "packed_file_bytes",
      [](const Team& team, const Program& p) { return packed_file_bytes(p, team.ranks()); },
      py::arg("team"), py::arg("program"));
  m.def(
      "pooled_bytes",
      [](const Team& team, const Program& p) {
        const PooledBytes bytes = pooled_bytes(p, team.ranks());
        return py::make_tuple(bytes.others, bytes.experts, bytes.least_pool);
      },
      py::arg("team"), py::arg("program"));
#if PYBIND11_VERSION_HEX >= 0x03000000
  // Readers that call before_read need the GIL, and the destructor waits for them.
  py::class_<Executor> executor(m, "Executor", py::release_gil_before_calling_cpp_dtor());
#else
  py::class_<Executor> executor(m, "Executor");
#endif
  executor.def(
      py::init([](Team& team, const Program& program, int64_t num_blocks,
                  const std::string& kv_type, int64_t num_slots, int64_t max_top,
                  int64_t num_states, int packed_fd, bool packed_writable, int64_t packed_offset,
                  int64_t num_media, int64_t rows_per_seq, size_t packed_pool,
                  const std::optional<py::function>& before_read, const Executor* kv_owner,
                  const std::vector<Id>& kv_layers) {
        return std::make_unique<Executor>(
            team, program, num_blocks, from_name<KvType>(kv_type), num_slots, max_top, num_states,
            PackedFile{packed_fd, packed_writable, static_cast<size_t>(packed_offset), packed_pool,
                       read_after(before_read)},
            num_media, rows_per_seq, SharedKv{kv_owner, kv_layers});
      }),
      py::keep_alive<1, 2>(), py::keep_alive<1, 3>(), py::keep_alive<1, 16>(), py::arg("team"),
      py::arg("program"), py::arg("num_blocks"), py::arg("kv_type"), py::arg("num_slots"),
      py::arg("max_top") = 20, py::arg("num_states") = 0, py::arg("packed_fd") = -1,
      py::arg("packed_writable") = false, py::arg("packed_offset") = 0, py::arg("num_media") = 0,
      py::arg("rows_per_seq") = 1, py::arg("packed_pool") = 0, py::arg("before_read") = py::none(),
      py::arg("kv_owner") = py::none(), py::arg("kv_layers") = std::vector<Id>{});
  define_sampler(executor);
  define_loads(executor);
  define_steps(executor);
  define_blocks(executor);
  define_pool(executor);
  define_profile(executor);
  define_probes(executor);
  define_memory(executor);
}

}  // namespace cpuserve
