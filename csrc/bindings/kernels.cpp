// Python bindings that call single kernels without an executor or a team, for tests and probes.
#include <pybind11/stl.h>
#include <time.h>

#include "base/check.h"
#include "bindings/module.h"
#include "runtime/executor.h"
#include "runtime/names.h"
#include "runtime/program.h"
#include "runtime/rows.h"

namespace cpuserve {
namespace {

// Sets `memory` to a new buffer for `count` rows of `width` columns, and returns these rows.
Rows place_rows(Buffer& memory, int64_t count, int64_t width, ActFormat format) {
  const size_t stride = row_bytes(format, width);
  memory = Buffer(stride * static_cast<size_t>(count));
  return {memory.data(), stride, width, format};
}

Rows convert_rows(const KernelTable& table, const Array<float>& x, ActFormat format,
                  Buffer& memory) {
  const int64_t m = x.shape(0), k = x.shape(1);
  Buffer plain_memory;
  const Rows plain = place_rows(plain_memory, m, k, ActFormat::f32);
  for (int64_t r = 0; r < m; r++) {
    std::copy(x.data() + r * k, x.data() + (r + 1) * k, reinterpret_cast<float*>(row_of(plain, r)));
  }
  const Rows rows = place_rows(memory, m, k, format);
  table.convert({plain, rows, 0, m});
  return rows;
}

Array<float> kernel_linear(const std::string& isa, const std::string& kind,
                           const std::string& source, const Array<uint8_t>& w, int64_t n, int64_t k,
                           const Array<float>& x) {
  check_argument(w.ndim() == 2 && w.shape(0) == n, "kernel_linear: w must be [n, row_bytes]");
  check_argument(x.ndim() == 2 && x.shape(1) == k, "kernel_linear: x must be [m, k]");
  const KernelTable& table = runnable_kernels(isa);
  const int64_t m = x.shape(0);
  Program program(table, m, 1);
  const Id id = program.add_matrix("w", from_name<WeightKind>(kind), n, k, {n}, false);
  const Matrix& matrix = program.matrices()[static_cast<size_t>(id)];

  const std::vector<SourceTensor> tensors{
      {w.data(), n, static_cast<size_t>(w.shape(1)), from_name<SourceType>(source), nullptr}};
  Weights weights(program, 1);
  Team alone(1, {});
  weights.load_matrix(alone, id, tensors);

  const LinearKernel& kernel = table.linear[static_cast<int>(matrix.kind)];
  Buffer x_memory, out_memory;
  const Rows rows = convert_rows(table, x, kernel.act, x_memory);
  const Rows out = place_rows(out_memory, m, matrix.out_width(), ActFormat::f32);
  Buffer scratch(kLinearScratch);
  LinearArgs args{};
  args.w = &weights.matrix(id, 0);
  args.x = rows.data;
  args.x_stride = rows.stride;
  args.m = m;
  args.panel0 = 0;
  args.panel1 = matrix.panels();
  args.ep = {nullptr, Activation::none, false, false, out};
  args.scratch = scratch.data();
  kernel.run(args);
  Array<float> result({m, out.width});
  for (int64_t r = 0; r < m; r++) read_row(out, r, result.mutable_data() + r * out.width);
  return result;
}

double thread_seconds() {
  timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

Array<double> kernel_sample_times(const std::string& isa, const Array<float>& logits, float top_p,
                                  int64_t draws) {
  const KernelTable& table = runnable_kernels(isa);
  const auto vocab = static_cast<size_t>(logits.size());
  check_argument(vocab >= 1 && draws >= 1,
                 "kernel_sample_times: needs at least one logit and one draw");
  Buffer row(vocab * sizeof(float));
  Buffer scratch(vocab * 8 + 65536);
  SampleParams params{};
  params.temperature = 1.0f;
  params.top_p = top_p;
  params.repetition = 1.0f;
  params.num_allowed = -1;
  SampleArgs args{};
  args.logits = reinterpret_cast<float*>(row.data());
  args.vocab = static_cast<int32_t>(vocab);
  args.params = &params;
  args.target = -1;
  args.num_top = -1;
  args.scratch = scratch.data();
  Array<double> seconds(static_cast<py::ssize_t>(draws));
  for (int64_t i = 0; i < draws; i++) {
    std::copy(logits.data(), logits.data() + vocab, args.logits);
    params.seed = static_cast<uint64_t>(i);
    const double start = thread_seconds();
    table.sample(args);
    seconds.mutable_data()[i] = thread_seconds() - start;
  }
  return seconds;
}

}  // namespace

void register_kernels(py::module_& m) {
  m.def("kernel_linear", &kernel_linear, py::arg("isa"), py::arg("kind"), py::arg("source"),
        py::arg("w"), py::arg("n"), py::arg("k"), py::arg("x"));
  m.def("kernel_sample_times", &kernel_sample_times, py::arg("isa"), py::arg("logits"),
        py::arg("top_p"), py::arg("draws"));
}

}  // namespace cpuserve
