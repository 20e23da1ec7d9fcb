// The samplers of llama.cpp. A chain of them changes and drops the candidates for the next token,
// in the order of the request. For requests without a chain, kernels sample (generic/sample.h).
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "base/fields.h"
#include "base/span.h"
#include "kernels/table.h"

namespace cpuserve {

// The samplers of a chain, as in STAGES of cpuserve/sampling/chain.py.
#define CPUSERVE_STAGES(X) \
  X(penalties)             \
  X(dry) X(top_n_sigma) X(top_k) X(typ_p) X(top_p) X(min_p) X(xtc) X(temperature) X(infill)
enum class Stage : int32_t {
#define CPUSERVE_NAME(name) name,
  CPUSERVE_STAGES(CPUSERVE_NAME)
#undef CPUSERVE_NAME
};

// The parameters of a sampler chain, which cpuserve/sampling/fields.py describes. Parameters
// that requests without a chain have as well (such as top_k) are in SampleParams.
//   dry_breaker_ids, dry_breaker_ends  the ids of all sequence breakers of the sampler dry,
//                                      and for each breaker the index after its last id
//   infill_prefixes                    for each token id, the longest other token that its text
//                                      begins with (-1: none); empty unless `stages` has infill
struct ChainSettings {
  std::vector<Stage> stages;
  int32_t min_keep = 0;
  float typical_p = 1, top_n_sigma = -1;
  float dynatemp_range = 0, dynatemp_exponent = 1;
  float xtc_probability = 0, xtc_threshold = 0.1f;
  float dry_multiplier = 0, dry_base = 1.75f;
  int32_t dry_allowed_length = 2, dry_penalty_last_n = -1;
  std::vector<int32_t> dry_breaker_ids, dry_breaker_ends, infill_prefixes;
  int32_t mirostat = 0;
  float mirostat_tau = 5, mirostat_eta = 0.1f, mirostat_mu = 10;
  bool post_sampling_probs = false;
  CPUSERVE_FIELDS(stages, min_keep, typical_p, top_n_sigma, dynatemp_range, dynatemp_exponent,
                  xtc_probability, xtc_threshold, dry_multiplier, dry_base, dry_allowed_length,
                  dry_penalty_last_n, dry_breaker_ids, dry_breaker_ends, infill_prefixes, mirostat,
                  mirostat_tau, mirostat_eta, mirostat_mu, post_sampling_probs)
};

// A token that no sampler has dropped. p is its probability, valid only after weigh() computed it.
struct Candidate {
  float logit;
  int32_t id;
  double p;
};

// The row of logits to sample.
//   place  for each id, 1 + its index in params.counts, or 0 if it is not counted;
//          null for a request without penalties
//   stops  the ids that may end the text now, in ascending order
struct ChainRow {
  const float* logits;
  const SampleParams& params;
  const int32_t* mask;
  const int32_t* place;
  Span<const int32_t> stops;
  int32_t position;
};

class SamplerChain {
 public:
  // room: the number of tokens that the request can still generate.
  // Throws std::invalid_argument for an unknown stage, or an id outside the vocabulary.
  SamplerChain(const ChainSettings& settings, int64_t vocab, Span<const int32_t> prompt,
               Span<const int32_t> output, int64_t room);

  // Returns the sampled id, or -1 if no id can be sampled.
  int32_t sample(const ChainRow& row) noexcept;
  // Appends the sampled token to the tokens that the sampler dry compares,
  // and updates mu of the sampler mirostat. A cancelled step calls no append, so it can run again.
  void append(int32_t token) noexcept;
  // Returns the largest surprise that mirostat allows for the next token.
  float mu() const { return settings_.mirostat_mu; }
  bool reports() const { return settings_.post_sampling_probs; }
  // Writes the `count` most likely candidates of the last sampled row and their logprobs,
  // and -1 and -inf after the last candidate. Returns the logprob of `token`.
  float report(int32_t token, int32_t count, int32_t* ids, float* logprobs) noexcept;

 private:
  bool load(const ChainRow& row) noexcept;
  void run(Stage stage, const ChainRow& row) noexcept;
  void order(size_t count) noexcept;
  double weigh() noexcept;
  template <class Keep>
  void keep_if(const Keep& keep) noexcept;
  void cut(size_t count) noexcept;

  void penalize(const ChainRow& row) noexcept;
  void dry() noexcept;
  int64_t dry_limit(int64_t length) const noexcept;
  void find_repeats(int64_t length) noexcept;
  void top_n_sigma() noexcept;
  void typical(float p) noexcept;
  void top_p(float p) noexcept;
  void min_p(float p) noexcept;
  void xtc(const ChainRow& row) noexcept;
  void temper(float temperature) noexcept;
  void divide(float temperature) noexcept;
  void infill(const ChainRow& row) noexcept;
  void merge_prefixes() noexcept;
  void mirostat() noexcept;
  int32_t draw(double u) noexcept;

  struct Breaker {  // a sequence breaker: ids [begin, end) of breaker_ids
    int32_t first, begin, end;
  };

  ChainSettings settings_;
  int64_t vocab_;
  float next_mu_;                  // mu after the last sampled token
  std::vector<Breaker> breakers_;  // in order of their first ids
  std::vector<Candidate> candidates_;
  size_t ordered_ = 0;            // number of candidates at the beginning that are sorted
  Candidate likely_stop_{};       // the most likely stop id; id -1 if no stop id may be sampled
  std::vector<int32_t> tokens_;   // prompt and output, for the sampler dry
  std::vector<int32_t> repeats_;  // by position: length of the repetition of the text's end there
  std::vector<int32_t> extends_;  // by id: 1 + the longest repetition that the id would extend
};

}  // namespace cpuserve
