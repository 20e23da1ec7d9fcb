#include "runtime/names.h"

#include "base/check.h"
#include "runtime/choices.h"
#include "runtime/sampler_chain.h"

namespace cpuserve {
namespace {

template <class E>
struct Name {
  const char* text;
  E value;
};

// The texts for the values of an enum, and the word for it in errors.
template <class E>
struct Names;

#define NAME(name, ...) {#name, Enum::name},
#define OWN_NAME(name, source, ...) {#source, Enum::source},

template <>
struct Names<ActFormat> {
  using Enum = ActFormat;
  static constexpr const char* kWhat = "row format";
  static constexpr Name<Enum> kAll[] = {NAME(f32) NAME(bf16) NAME(q8g32) NAME(q8g32x2) NAME(q8g128)
                                            NAME(q8row) NAME(q8g256) NAME(q8g256x2)};
};
template <>
struct Names<WeightKind> {
  using Enum = WeightKind;
  static constexpr const char* kWhat = "weight kind";
  static constexpr Name<Enum> kAll[] = {CPUSERVE_WEIGHT_KINDS(NAME, NAME)};
};
template <>
struct Names<SourceType> {
  using Enum = SourceType;
  static constexpr const char* kWhat = "source type";
  static constexpr Name<Enum> kAll[] = {CPUSERVE_SHARED_SOURCES(NAME)
                                            CPUSERVE_WEIGHT_KINDS(CPUSERVE_NOTHING, OWN_NAME)};
};
template <>
struct Names<Activation> {
  using Enum = Activation;
  static constexpr const char* kWhat = "activation";
  static constexpr Name<Enum> kAll[] = {CPUSERVE_ACTIVATIONS(NAME)};
};
template <>
struct Names<KvType> {
  static constexpr const char* kWhat = "KV type";
  static constexpr Name<KvType> kAll[] = {{"bf16", KvType::bf16},     {"f16", KvType::f16},
                                          {"f32", KvType::f32},       {"int8", KvType::int8},
                                          {"fp8_e4m3", KvType::e4m3}, {"int8_v4", KvType::int8_v4}};
};
template <>
struct Names<Score> {
  using Enum = Score;
  static constexpr const char* kWhat = "router score";
  static constexpr Name<Enum> kAll[] = {NAME(softmax) NAME(sigmoid) NAME(chosen_softmax) NAME(
      near_softmax) NAME(chosen_sigmoid) NAME(sqrt_softplus)};
};
template <>
struct Names<MediaToken> {
  using Enum = MediaToken;
  static constexpr const char* kWhat = "treatment of tokens with media";
  static constexpr Name<Enum> kAll[] = {NAME(id) NAME(row) NAME(zero) NAME(other)};
};
template <>
struct Names<Stage> {
  using Enum = Stage;
  static constexpr const char* kWhat = "sampler";
  static constexpr Name<Enum> kAll[] = {CPUSERVE_STAGES(NAME)};
};

#undef NAME
#undef OWN_NAME

}  // namespace

template <class E>
E from_name(const std::string& name) {
  std::string known;
  for (const Name<E>& n : Names<E>::kAll) {
    if (name == n.text) return n.value;
    known += std::string(known.empty() ? "" : ", ") + n.text;
  }
  fail_argument("unknown ", Names<E>::kWhat, " '", name, "'; known: ", known);
}

template ActFormat from_name(const std::string&);
template WeightKind from_name(const std::string&);
template SourceType from_name(const std::string&);
template Activation from_name(const std::string&);
template KvType from_name(const std::string&);
template Score from_name(const std::string&);
template Stage from_name(const std::string&);
template MediaToken from_name(const std::string&);

const char* kind_name(WeightKind kind) {
  for (const auto& n : Names<WeightKind>::kAll) {
    if (n.value == kind) return n.text;
  }
  return "?";
}

}  // namespace cpuserve
