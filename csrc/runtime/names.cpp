#include "runtime/names.h"

#include "base/check.h"

namespace cpuserve {
namespace {

template <class E>
struct Name {
  const char* text;
  E value;
};

constexpr Name<ActFormat> kFormats[] = {
    {"f32", ActFormat::f32},         {"bf16", ActFormat::bf16},        {"q8g32", ActFormat::q8g32},
    {"q8g32x2", ActFormat::q8g32x2}, {"q8g128", ActFormat::q8g128},    {"q8row", ActFormat::q8row},
    {"q8g256", ActFormat::q8g256},   {"q8g256x2", ActFormat::q8g256x2}};

constexpr Name<WeightKind> kKinds[] = {
#define NAME(name, ...) {#name, WeightKind::name},
    CPUSERVE_WEIGHT_KINDS(NAME, NAME)
#undef NAME
};
constexpr Name<SourceType> kSources[] = {
#define NAME(name, ...) {#name, SourceType::name},
#define OWN_NAME(name, source, ...) {#source, SourceType::source},
    CPUSERVE_SHARED_SOURCES(NAME) CPUSERVE_WEIGHT_KINDS(CPUSERVE_NOTHING, OWN_NAME)
#undef NAME
#undef OWN_NAME
};
constexpr Name<Activation> kActivations[] = {{"none", Activation::none},
                                             {"relu", Activation::relu},
                                             {"relu2", Activation::relu2},
                                             {"gelu", Activation::gelu},
                                             {"gelu_tanh", Activation::gelu_tanh},
                                             {"silu", Activation::silu},
                                             {"clamped_swiglu", Activation::clamped_swiglu}};
constexpr Name<KvType> kKvTypes[] = {{"bf16", KvType::bf16},     {"f16", KvType::f16},
                                     {"f32", KvType::f32},       {"int8", KvType::int8},
                                     {"fp8_e4m3", KvType::e4m3}, {"fp8_e5m2", KvType::e5m2}};

constexpr Name<Score> kScores[] = {{"softmax", Score::softmax},
                                   {"sigmoid", Score::sigmoid},
                                   {"chosen_softmax", Score::chosen_softmax}};

template <class E, size_t N>
E parse(const Name<E> (&names)[N], const std::string& text, const char* what) {
  std::string known;
  for (const Name<E>& n : names) {
    if (text == n.text) return n.value;
    known += std::string(known.empty() ? "" : ", ") + n.text;
  }
  fail_argument("unknown ", what, " '", text, "'; known: ", known);
}

}  // namespace

ActFormat parse_format(const std::string& name) { return parse(kFormats, name, "row format"); }
WeightKind parse_kind(const std::string& name) { return parse(kKinds, name, "weight kind"); }
SourceType parse_source(const std::string& name) { return parse(kSources, name, "source type"); }
Activation parse_activation(const std::string& name) {
  return parse(kActivations, name, "activation");
}
KvType parse_kv_type(const std::string& name) { return parse(kKvTypes, name, "KV type"); }
Score parse_score(const std::string& name) { return parse(kScores, name, "router score"); }
const char* kind_name(WeightKind kind) {
  for (const auto& n : kKinds) {
    if (n.value == kind) return n.text;
  }
  return "?";
}

}  // namespace cpuserve
