// The sampler state of every request slot: parameters, logit bias, token counts.
// Tables are allocated when a request is admitted, so that a step allocates nothing.
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "base/span.h"
#include "kernels/table.h"
#include "runtime/repeat_ban.h"
#include "runtime/sampler_chain.h"

namespace cpuserve {

// The sampling parameters of a request, as in cpuserve/sampling/slot.py.
//   allowed_token_ids  if set, only these ids may be sampled
//   prompt, output     the token ids of the prompt and of the output so far;
//                      may be empty without penalties, min_tokens, bad words and a chain
//   bad_word_ids       the last id of a bad word is banned
//                      while the output ends with the other ids of this word
//   banned_ngram_size  if above 0, no n-gram of so many tokens occurs twice in the output
//   banned_ngram_window  how many of the last tokens this looks at; -1: all (repeat_ban.h)
//   exempt_ids         ids that may complete such an n-gram
//   scored_ids         if not empty, the ids that get logprobs instead of the usual alternatives
//                      of each sampled token
//   penalty_window     if at least 0, penalties count only so many last ids of the text,
//                      and ids of the prompt count as output
//   chain              the samplers of llama.cpp (sampler_chain.h); not set: the kernels sample
struct SlotRequest {
  float temperature = 1, top_p = 1, min_p = 0;
  int32_t top_k = 0;
  float repetition_penalty = 1, frequency_penalty = 0, presence_penalty = 0;
  uint64_t seed = 0;
  int64_t min_tokens = 0;
  Span<const int32_t> stop_ids;
  std::map<int32_t, float> logit_bias;
  std::optional<Span<const int32_t>> allowed_token_ids;
  Span<const int32_t> prompt, output;
  std::vector<std::vector<int32_t>> bad_word_ids;
  int64_t banned_ngram_size = 0, banned_ngram_window = -1;
  Span<const int32_t> exempt_ids;
  Span<const int32_t> scored_ids;
  int64_t penalty_window = -1;
  std::optional<ChainSettings> chain;
  CPUSERVE_FIELDS(temperature, top_p, min_p, top_k, repetition_penalty, frequency_penalty,
                  presence_penalty, seed, min_tokens, stop_ids, logit_bias, allowed_token_ids,
                  prompt, output, bad_word_ids, banned_ngram_size, banned_ngram_window, exempt_ids,
                  scored_ids, penalty_window, chain)
};

class Sampler {
 public:
  // max_outputs: the most tokens that any request can generate.
  Sampler(int64_t num_slots, int64_t vocab, int64_t max_outputs);

  // Throws std::invalid_argument for an id outside the vocabulary, or a slot that does not exist.
  void admit(int64_t slot, const SlotRequest& request);
  void release(int64_t slot);
  bool admitted(int64_t slot) const { return slots_[static_cast<size_t>(slot)].used; }

  // Returns the parameters to sample the next token of the request slot.
  // The result is valid until the next admit, release or append.
  const SampleParams& params(int64_t slot) const {
    return slots_[static_cast<size_t>(slot)].params;
  }
  const std::vector<int32_t>& scored(int64_t slot) const {
    return slots_[static_cast<size_t>(slot)].scored;
  }
  // Returns the sampler chain of a request slot, or null if the kernels sample its tokens.
  SamplerChain* chain(int64_t slot) const { return slots_[static_cast<size_t>(slot)].chain.get(); }
  // Does the same as chain(). Throws std::invalid_argument for a request slot that does not exist.
  const SamplerChain* checked_chain(int64_t index) { return slot(index).chain.get(); }
  // Returns the token id that the sampler chain of the slot samples (SamplerChain::sample).
  int32_t sample(int64_t slot, const float* logits, const int32_t* mask, int32_t position) noexcept;
  // Adds a sampled token to the token counts of the slot, and adds 1 to its number of generated
  // tokens (for min_tokens). A token of -1 (nothing was sampled) has no effect.
  void append(int64_t slot, int32_t token) noexcept;

 private:
  struct Slot {
    bool used = false;
    SampleParams params{};
    std::vector<int32_t> allowed, scored;
    std::vector<TokenBias> bias;
    // Stop ids, then space for the last id of each bad word and of each n-gram of `repeats`.
    std::vector<int32_t> banned;
    int64_t num_stops = 0;
    int64_t outputs_until_stop = 0;  // tokens to generate before stop ids are allowed
    std::vector<int32_t> bad_ids, bad_ends;
    std::vector<int32_t> recent;  // the last output ids: as many as the longest bad word needs
    size_t most_recent = 0;
    std::unique_ptr<RepeatBan> repeats;
    // `counts` is a compact list of the ids in the prompt and output.
    // For each id of the vocabulary, `place` has 1 + the index of the id in `counts`,
    // or 0 if the id is not in `counts`. Both arrays are null if the request has no penalties.
    std::unique_ptr<TokenCount[]> counts;
    std::unique_ptr<int32_t[]> place;
    int64_t capacity = 0;
    // The last ids, if penalties count only these (penalty_window). The next id replaces the one at
    // `oldest`.
    std::vector<int32_t> window;
    size_t window_size = 0, oldest = 0;
    std::unique_ptr<SamplerChain> chain;
  };

  Slot& slot(int64_t index);
  void check_ids(const char* what, Span<const int32_t> ids) const;
  void make_counts(Slot& s, const SlotRequest& request);
  static void add_recent(Slot& s, int32_t token) noexcept;
  static void ban(Slot& s) noexcept;
  static void count(Slot& s, int32_t token) noexcept;
  static TokenCount* count_of(Slot& s, int32_t token) noexcept;

  int64_t vocab_, max_outputs_;
  std::vector<Slot> slots_;
};

}  // namespace cpuserve
