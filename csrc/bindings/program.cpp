#include "runtime/program.h"

#include <pybind11/stl.h>

#include "bindings/module.h"
#include "runtime/names.h"

namespace cpuserve {

void register_program(py::module_& m) {
  py::class_<Program>(m, "Program")
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
      .def("embed", &Program::embed, py::arg("out"), py::arg("matrix"), py::arg("scale"))
      .def("position_embed", &Program::position_embed, py::arg("x"), py::arg("table"),
           py::arg("rows"), py::arg("offset"))
      .def(
          "rms_norm",
          [](Program& p, Id x, Id out, Id weight, float eps) {
            p.norm({x, out, weight, kNone, eps, false});
          },
          py::arg("x"), py::arg("out"), py::arg("weight"), py::arg("eps"))
      .def(
          "layer_norm",
          [](Program& p, Id x, Id out, Id weight, Id bias, float eps) {
            p.norm({x, out, weight, bias, eps, true});
          },
          py::arg("x"), py::arg("out"), py::arg("weight"), py::arg("bias"), py::arg("eps"))
      .def(
          "part_norm",
          [](Program& p, Id x, Id weight, int64_t column, int32_t parts, float eps) {
            p.part_norm({x, weight, column, parts, eps});
          },
          py::arg("x"), py::arg("weight"), py::arg("column"), py::arg("parts"), py::arg("eps"))
      .def(
          "convert",
          [](Program& p, Id x, Id out, Id order, Id routing) {
            p.convert({x, out, order, routing});
          },
          py::arg("x"), py::arg("out"), py::arg("order") = kNone, py::arg("routing") = kNone)
      .def(
          "linear",
          [](Program& p, Id x, Id out, Id matrix, Id bias, const std::string& activation, bool glu,
             bool add, int64_t out_column) {
            p.linear({x, out, matrix, bias, parse_activation(activation), add, out_column}, glu);
          },
          py::arg("x"), py::arg("out"), py::arg("matrix"), py::arg("bias"), py::arg("activation"),
          py::arg("glu"), py::arg("add"), py::arg("out_column"))
      .def(
          "route",
          [](Program& p, Id x, Id out, int32_t experts, int32_t chosen, const std::string& score,
             bool renormalize, float scale, Id bias, int32_t groups, int32_t kept, int32_t best,
             Id factors) {
            p.route({x, out, experts, chosen, parse_score(score), renormalize, scale, bias, groups,
                     kept, best, factors});
          },
          py::arg("x"), py::arg("out"), py::arg("experts"), py::arg("chosen"), py::arg("score"),
          py::arg("renormalize"), py::arg("scale"), py::arg("bias"), py::arg("groups") = 1,
          py::arg("kept") = 1, py::arg("best") = 1, py::arg("factors") = kNone)
      .def(
          "adapter",
          [](Program& p, Id out, int32_t adapters, Id scales) {
            p.adapter({out, adapters, scales});
          },
          py::arg("out"), py::arg("adapters"), py::arg("scales"))
      .def(
          "spread", [](Program& p, Id x, Id routing, Id out) { p.spread({x, routing, out}); },
          py::arg("x"), py::arg("routing"), py::arg("out"))
      .def(
          "expert_linear",
          [](Program& p, Id x, Id routing, Id out, const std::vector<Id>& matrices,
             const std::vector<Id>& biases, const std::string& activation, bool glu) {
            p.expert_linear({x, routing, out, kNone, kNone, 0, parse_activation(activation)},
                            matrices, biases, glu);
          },
          py::arg("x"), py::arg("routing"), py::arg("out"), py::arg("matrices"), py::arg("biases"),
          py::arg("activation"), py::arg("glu"))
      .def(
          "combine",
          [](Program& p, Id x, Id routing, Id out, bool add) { p.combine({x, routing, out, add}); },
          py::arg("x"), py::arg("routing"), py::arg("out"), py::arg("add") = true)
      .def(
          "rope_store_kv",
          [](Program& p, Id qkv, Id q, Id layer, int32_t q_heads, int32_t rotary, Id cos, Id sin,
             Id q_norm, Id k_norm, float eps, bool stores) {
            p.rope_store({qkv, q, layer, q_heads, rotary, cos, sin, q_norm, k_norm, eps, stores});
          },
          py::arg("qkv"), py::arg("q"), py::arg("layer"), py::arg("q_heads"), py::arg("rotary"),
          py::arg("cos"), py::arg("sin"), py::arg("q_norm"), py::arg("k_norm"), py::arg("eps"),
          py::arg("stores") = true)
      .def(
          "head_linear",
          [](Program& p, Id x, Id out, const std::vector<Id>& matrices, int64_t step) {
            p.head_linear({x, out, kNone, 0, step}, matrices);
          },
          py::arg("x"), py::arg("out"), py::arg("matrices"), py::arg("step"))
      .def(
          "latent_store_kv",
          [](Program& p, Id q, Id latent, Id kv, Id out, Id layer, int32_t q_heads, int32_t nope,
             int32_t rank, int32_t rotary, Id cos, Id sin, Id norm, float eps, bool interleaved) {
            p.latent_store({q, latent, kv, out, layer, q_heads, nope, rank, rotary, cos, sin, norm,
                            eps, interleaved});
          },
          py::arg("q"), py::arg("latent"), py::arg("kv"), py::arg("out"), py::arg("layer"),
          py::arg("q_heads"), py::arg("nope"), py::arg("rank"), py::arg("rotary"), py::arg("cos"),
          py::arg("sin"), py::arg("norm"), py::arg("eps"), py::arg("interleaved"))
      .def(
          "attention",
          [](Program& p, Id q, Id out, Id layer, int32_t q_heads, float scale, int32_t window,
             float softcap, Id slopes, Id sinks, bool causal) {
            p.attention({q, out, layer, q_heads, window, scale, softcap, slopes, sinks, causal});
          },
          py::arg("q"), py::arg("out"), py::arg("layer"), py::arg("q_heads"), py::arg("scale"),
          py::arg("window"), py::arg("softcap"), py::arg("slopes"), py::arg("sinks"),
          py::arg("causal") = true)
      .def(
          "split_gates",
          [](Program& p, Id x, Id out, int32_t heads, int32_t head_dim) {
            p.split_gates({x, out, heads, head_dim});
          },
          py::arg("x"), py::arg("out"), py::arg("heads"), py::arg("head_dim"))
      .def(
          "gate",
          [](Program& p, Id x, Id out, int64_t column, bool single, bool plain) {
            p.gate({x, out, column, single, plain});
          },
          py::arg("x"), py::arg("out"), py::arg("column"), py::arg("single"), py::arg("plain"))
      .def(
          "gated_norm",
          [](Program& p, Id x, Id z, Id out, Id weight, int32_t groups, int64_t column, float eps) {
            p.gated_norm({x, z, out, weight, groups, column, eps});
          },
          py::arg("x"), py::arg("z"), py::arg("out"), py::arg("weight"), py::arg("groups"),
          py::arg("column"), py::arg("eps"))
      .def(
          "gated_delta",
          [](Program& p, Id x, Id gates, Id out, int32_t key_heads, int32_t value_heads,
             int32_t key_width, int32_t value_width, int32_t taps, Id conv, Id rates, Id dt_bias,
             Id norm, float eps, bool tiled) {
            p.gated_delta({x, gates, out, kNone, key_heads, value_heads, key_width, value_width,
                           taps, conv, rates, dt_bias, norm, eps, tiled});
          },
          py::arg("x"), py::arg("gates"), py::arg("out"), py::arg("key_heads"),
          py::arg("value_heads"), py::arg("key_width"), py::arg("value_width"), py::arg("taps"),
          py::arg("conv"), py::arg("rates"), py::arg("dt_bias"), py::arg("norm"), py::arg("eps"),
          py::arg("tiled"))
      .def(
          "short_conv",
          [](Program& p, Id x, Id out, int64_t column, int32_t units, int32_t taps, Id weight,
             Id bias,
             bool silu) { p.short_conv({x, out, kNone, column, units, taps, weight, bias, silu}); },
          py::arg("x"), py::arg("out"), py::arg("column"), py::arg("units"), py::arg("taps"),
          py::arg("weight"), py::arg("bias"), py::arg("silu"))
      .def(
          "mamba2",
          [](Program& p, Id x, Id steps, Id out, int32_t heads, int32_t groups, int32_t key_width,
             int32_t value_width, int32_t together, int64_t column, Id rates, Id dt_bias, Id d,
             float low, float high) {
            p.mamba2({x, steps, out, kNone, heads, groups, key_width, value_width, together, column,
                      rates, dt_bias, d, low, high});
          },
          py::arg("x"), py::arg("steps"), py::arg("out"), py::arg("heads"), py::arg("groups"),
          py::arg("key_width"), py::arg("value_width"), py::arg("together"), py::arg("column"),
          py::arg("rates"), py::arg("dt_bias"), py::arg("d"), py::arg("low"), py::arg("high"))
      .def(
          "add", [](Program& p, Id x, Id out, int64_t column) { p.add({x, out, column}); },
          py::arg("x"), py::arg("out"), py::arg("column") = 0)
      .def(
          "scale", [](Program& p, Id x, Id factor) { p.scale({x, factor}); }, py::arg("x"),
          py::arg("factor"))
      .def(
          "columns",
          [](Program& p, Id x, Id more, Id out, int64_t column) {
            p.columns({x, more, out, column});
          },
          py::arg("x"), py::arg("more"), py::arg("out"), py::arg("column"))
      .def(
          "mix_parts",
          [](Program& p, Id x, Id gates, Id target, Id weight, int32_t parts, int32_t active,
             float scale) { p.mix_parts({x, gates, target, weight, parts, active, scale}); },
          py::arg("x"), py::arg("gates"), py::arg("target"), py::arg("weight"), py::arg("parts"),
          py::arg("active"), py::arg("scale"))
      .def(
          "match_rms",
          [](Program& p, Id x, Id like, float floor) { p.match_rms({x, like, floor}); },
          py::arg("x"), py::arg("like"), py::arg("floor"))
      .def(
          "keep_top",
          [](Program& p, Id x, int64_t width, float deviations) {
            p.keep_top({x, width, deviations});
          },
          py::arg("x"), py::arg("width"), py::arg("deviations"))
      .def(
          "activation",
          [](Program& p, Id x, Id out, const std::string& activation, bool glu) {
            p.activation({x, out, parse_activation(activation), glu});
          },
          py::arg("x"), py::arg("out"), py::arg("activation"), py::arg("glu"))
      .def(
          "logits",
          [](Program& p, Id x, Id matrix, Id bias, float scale, float softcap) {
            p.logits({x, matrix, bias, scale, softcap});
          },
          py::arg("x"), py::arg("matrix"), py::arg("bias"), py::arg("scale"), py::arg("softcap"))
      .def("hidden", &Program::hidden, py::arg("x"))
      .def_property_readonly("weight_bytes", &Program::weight_bytes)
      .def_property_readonly("packed_layout", &Program::packed_layout)
      .def_property_readonly("state_bytes", &Program::state_bytes)
      .def_property_readonly("kv_block_bytes",
                             [](const Program& p) { return p.kv_block_bytes(KvType::bf16); });
}

}  // namespace cpuserve
