// The Python bindings of the sampler: ChainSettings, and the methods of Executor that pass
// the sampling parameters of a request.
#include "bindings/sampler.h"

#include <pybind11/stl.h>

#include <optional>

namespace cpuserve {
namespace {

void admit(Executor& e, int64_t slot, float temperature, float top_p, float min_p, int32_t top_k,
           float repetition, float frequency, float presence, uint64_t seed, int64_t min_tokens,
           const Array<int32_t>& stop_ids, const Array<int32_t>& bias_ids,
           const Array<float>& bias_values, const std::optional<Array<int32_t>>& allowed,
           const Array<int32_t>& prompt, const Array<int32_t>& output,
           const Array<int32_t>& bad_ids, const Array<int32_t>& bad_ends,
           const Array<int32_t>& scored, int64_t last_n, const ChainSettings* chain) {
  SlotRequest r;
  r.temperature = temperature;
  r.top_p = top_p;
  r.min_p = min_p;
  r.top_k = top_k;
  r.repetition = repetition;
  r.frequency = frequency;
  r.presence = presence;
  r.seed = seed;
  r.min_tokens = min_tokens;
  r.stop_ids = span_of(stop_ids);
  r.bias_ids = span_of(bias_ids);
  r.bias_values = span_of(bias_values);
  r.has_allowed = allowed.has_value();
  if (allowed) r.allowed = span_of(*allowed);
  r.prompt = span_of(prompt);
  r.output = span_of(output);
  r.bad_ids = span_of(bad_ids);
  r.bad_ends = span_of(bad_ends);
  r.scored = span_of(scored);
  r.last_n = last_n;
  r.chain = chain;
  e.sampler().admit(slot, r);
}

// Defines a property of a Python class that copies an array of int32.
template <class Class>
void define_ids(Class& settings, const char* name, std::vector<int32_t> ChainSettings::*member) {
  settings.def_property(
      name, [member](const ChainSettings& s) { return s.*member; },
      [member](ChainSettings& s, const Array<int32_t>& ids) {
        s.*member = {ids.data(), ids.data() + ids.size()};
      });
}

void define_chain(py::module_& m) {
  py::class_<ChainSettings> settings(m, "ChainSettings");
  settings.def(py::init<>())
      .def_readwrite("min_keep", &ChainSettings::min_keep)
      .def_readwrite("typical_p", &ChainSettings::typical_p)
      .def_readwrite("top_n_sigma", &ChainSettings::top_n_sigma)
      .def_readwrite("dynatemp_range", &ChainSettings::dynatemp_range)
      .def_readwrite("dynatemp_exponent", &ChainSettings::dynatemp_exponent)
      .def_readwrite("xtc_probability", &ChainSettings::xtc_probability)
      .def_readwrite("xtc_threshold", &ChainSettings::xtc_threshold)
      .def_readwrite("dry_multiplier", &ChainSettings::dry_multiplier)
      .def_readwrite("dry_base", &ChainSettings::dry_base)
      .def_readwrite("dry_allowed_length", &ChainSettings::dry_allowed_length)
      .def_readwrite("dry_penalty_last_n", &ChainSettings::dry_penalty_last_n)
      .def_readwrite("mirostat", &ChainSettings::mirostat)
      .def_readwrite("mirostat_tau", &ChainSettings::mirostat_tau)
      .def_readwrite("mirostat_eta", &ChainSettings::mirostat_eta)
      .def_readwrite("mirostat_mu", &ChainSettings::mirostat_mu)
      .def_readwrite("post_sampling_probs", &ChainSettings::post_sampling_probs);
  define_ids(settings, "stages", &ChainSettings::stages);
  define_ids(settings, "breaker_ids", &ChainSettings::breaker_ids);
  define_ids(settings, "breaker_ends", &ChainSettings::breaker_ends);
  define_ids(settings, "prefixes", &ChainSettings::prefixes);
}

}  // namespace

void define_sampler(py::module_& m, py::class_<Executor>& executor) {
  define_chain(m);
  const py::tuple empty;  // default argument, which becomes a new empty array
  executor
      .def("admit", &admit, py::arg("slot"), py::kw_only(), py::arg("temperature"),
           py::arg("top_p"), py::arg("min_p"), py::arg("top_k"), py::arg("repetition"),
           py::arg("frequency"), py::arg("presence"), py::arg("seed"), py::arg("min_tokens"),
           py::arg("stop_ids"), py::arg("bias_ids"), py::arg("bias_values"), py::arg("allowed"),
           py::arg("prompt"), py::arg("output"), py::arg("bad_ids") = empty,
           py::arg("bad_ends") = empty, py::arg("scored") = empty, py::arg("last_n") = -1,
           py::arg("chain") = static_cast<const ChainSettings*>(nullptr))
      .def(
          "mirostat_mu",
          [](Executor& e, int64_t slot) {
            const SamplerChain* chain = e.sampler().checked_chain(slot);
            return chain ? chain->mu() : 0.0f;
          },
          py::arg("slot"))
      .def("release", [](Executor& e, int64_t slot) { e.release(slot); }, py::arg("slot"));
}

}  // namespace cpuserve
