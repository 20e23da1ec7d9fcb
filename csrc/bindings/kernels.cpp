// Python bindings that call single kernels without an executor or a team, for tests and probes.
#include <omp.h>
#include <pybind11/stl.h>
#include <time.h>

#include <optional>

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
                           const Array<float>& x, int threads, const std::string& activation,
                           bool glu, const std::string& out_format) {
  check_argument(w.ndim() == 2 && w.shape(0) == n, "kernel_linear: w must be [n, row_bytes]");
  check_argument(x.ndim() == 2 && x.shape(1) == k, "kernel_linear: x must be [m, k]");
  check_argument(threads >= 1, "kernel_linear: threads must be at least 1, not ", threads);
  const KernelTable& table = runnable_kernels(isa);
  const int64_t m = x.shape(0);
  Program program(table, m, 1);
  const std::vector<int64_t> parts =
      glu ? std::vector<int64_t>{n / 2, n - n / 2} : std::vector<int64_t>{n};
  const Id id = program.add_matrix("w", parse_kind(kind), n, k, parts, glu);
  const Matrix& matrix = program.matrices()[static_cast<size_t>(id)];

  std::vector<SourceTensor> tensors;
  const uint8_t* at = w.data();
  const auto bytes = static_cast<size_t>(w.shape(1));
  for (int64_t rows : parts) {
    tensors.push_back({at, rows, bytes, parse_source(source), nullptr});
    at += static_cast<size_t>(rows) * bytes;
  }
  Weights weights(program, 1);
  Team alone(1, {});
  weights.load_matrix(alone, id, tensors);

  const LinearKernel& kernel = table.linear[static_cast<int>(matrix.kind)];
  Buffer x_memory, out_memory;
  const Rows rows = convert_rows(table, x, kernel.act, x_memory);
  const Rows out = place_rows(out_memory, m, matrix.out_width(), parse_format(out_format));
  Buffer scratch(kLinearScratch * static_cast<size_t>(threads));
  const Activation act = parse_activation(activation);
#pragma omp parallel num_threads(threads)
  {
    const int t = omp_get_thread_num();
    const int64_t panels = matrix.panels(), strips = (panels + kStripPanels - 1) / kStripPanels;
    const Range own = split(strips, t, omp_get_num_threads());
    const Range p{own.begin * kStripPanels, std::min(own.end * kStripPanels, panels)};
    LinearArgs args{};
    args.w = &weights.matrix(id, 0);
    args.x = rows.data;
    args.x_stride = rows.stride;
    args.m = m;
    args.panel0 = p.begin;
    args.panel1 = p.end;
    args.ep = {nullptr, act, glu, false, out};
    args.scratch = scratch.data() + kLinearScratch * static_cast<size_t>(t);
    if (p.size() > 0) kernel.run(args);
  }
  Array<float> result({m, out.width});
  for (int64_t r = 0; r < m; r++) read_row(out, r, result.mutable_data() + r * out.width);
  return result;
}

py::dict kernel_sample(const std::string& isa, const Array<float>& logits, float temperature,
                       float top_p, float min_p, int32_t top_k, float repetition, float frequency,
                       float presence, uint64_t seed, int32_t position,
                       const Array<int32_t>& bias_ids, const Array<float>& bias_values,
                       const std::optional<Array<int32_t>>& allowed, const Array<int32_t>& banned,
                       const Array<int32_t>& prompt, const Array<int32_t>& output, int32_t target,
                       int32_t num_top, const std::optional<Array<int32_t>>& mask) {
  const KernelTable& table = runnable_kernels(isa);
  const auto vocab = static_cast<int64_t>(logits.size());
  check_argument(vocab >= 1 && target < vocab && num_top <= vocab,
                 "kernel_sample: target or num_top is out of range");
  check_argument(!mask || mask->size() == mask_words(vocab),
                 "kernel_sample: the mask needs one bit for each logit");
  Sampler sampler(1, vocab, 1);
  SlotRequest r;
  r.temperature = temperature;
  r.top_p = top_p;
  r.min_p = min_p;
  r.top_k = top_k;
  r.repetition = repetition;
  r.frequency = frequency;
  r.presence = presence;
  r.seed = seed;
  r.min_tokens = output.size() + 1;  // not reached yet, so the ids in `banned` stay banned
  r.stop_ids = span_of(banned);
  r.bias_ids = span_of(bias_ids);
  r.bias_values = span_of(bias_values);
  r.has_allowed = allowed.has_value();
  if (allowed) r.allowed = span_of(*allowed);
  r.prompt = span_of(prompt);
  r.output = span_of(output);
  sampler.admit(0, r);

  Buffer row(static_cast<size_t>(vocab) * sizeof(float));
  Buffer scratch(static_cast<size_t>(vocab) * 8 + 65536);
  std::copy(logits.data(), logits.data() + vocab, reinterpret_cast<float*>(row.data()));
  const py::ssize_t tops = std::max(num_top, 0);
  Array<int32_t> top_ids(tops);
  Array<float> top_logprobs(tops);
  SampleArgs args{};
  args.logits = reinterpret_cast<float*>(row.data());
  args.vocab = static_cast<int32_t>(vocab);
  args.params = target < 0 ? &sampler.params(0) : nullptr;
  args.position = position;
  args.target = target;
  args.num_top = num_top;
  args.mask = mask ? mask->data() : nullptr;
  args.top_ids = top_ids.mutable_data();
  args.top_logprobs = top_logprobs.mutable_data();
  args.scratch = scratch.data();
  table.sample(args);
  py::dict out;
  out["token"] = args.token;
  out["logprob"] = args.logprob;
  out["rank"] = args.rank;
  out["top_ids"] = top_ids;
  out["top_logprobs"] = top_logprobs;
  return out;
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
        py::arg("w"), py::arg("n"), py::arg("k"), py::arg("x"), py::kw_only(),
        py::arg("threads") = 1, py::arg("activation") = "none", py::arg("glu") = false,
        py::arg("out_format") = "f32");
  // The default of array arguments is an empty tuple, which becomes an empty array in each call.
  // An array as a default would import numpy together with this module. This module must load
  // on any CPU, because it reports missing CPU features, but numpy needs newer CPUs.
  const py::tuple empty;
  m.def("kernel_sample", &kernel_sample, py::arg("isa"), py::arg("logits"), py::kw_only(),
        py::arg("temperature") = 1.0f, py::arg("top_p") = 1.0f, py::arg("min_p") = 0.0f,
        py::arg("top_k") = 0, py::arg("repetition") = 1.0f, py::arg("frequency") = 0.0f,
        py::arg("presence") = 0.0f, py::arg("seed") = 0, py::arg("position") = 0,
        py::arg("bias_ids") = empty, py::arg("bias_values") = empty,
        py::arg("allowed") = py::none(), py::arg("banned") = empty, py::arg("prompt") = empty,
        py::arg("output") = empty, py::arg("target") = -1, py::arg("num_top") = -1,
        py::arg("mask") = py::none());
  m.def("kernel_sample_times", &kernel_sample_times, py::arg("isa"), py::arg("logits"),
        py::arg("top_p"), py::arg("draws"));
}

}  // namespace cpuserve
