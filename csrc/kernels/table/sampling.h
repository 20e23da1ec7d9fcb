// The arguments of sampling.
#pragma once
#include <stddef.h>
#include <stdint.h>

namespace cpuserve {

constexpr int kMaxTop = 20;  // default limit of alternatives (top_logprobs) for a token

// Sets each logit to softcap * tanh(logit * scale / softcap), or to logit * scale if softcap is 0.
// Threads may divide a row anywhere, because each logit is independent of the others.
struct ScaleLogitsArgs {
  float* logits;
  int64_t count;
  float scale, softcap;
};

// Sampling of one row of logits. The steps, in order (the torch executor does the same):
//  1. logprob of any id = logit - logsumexp(logits) of the unmodified logits.
//  2. bias[i].value is added to logits[bias[i].id]. Then the logits of excluded ids become -inf:
//     ids that are not in `allowed` (if num_allowed >= 0), banned ids (the stop ids, until
//     min_tokens tokens are generated), and ids with bit 0 in the mask.
//  3. Penalties. For ids in the prompt or the output, a positive logit is divided by `repetition`,
//     and any other logit is multiplied by it. Then frequency * count + presence * (count > 0)
//     is subtracted, where count is how often the id occurs in the output.
//  4. If temperature < 1e-5, the result is the id of the largest logit (the lowest of the ids
//     with this logit). Otherwise logits are divided by the temperature.
//  5. Filters drop ids: min_p drops ids with p < min_p * p_max, then top_k keeps the k most
//     probable ids, then top_p keeps the shortest run of ids, in descending order of p,
//     with at least top_p of the mass that top_k kept. Of equal logits, the lower id is kept first.
//  6. u = uniform(seed, position) * the mass of the kept ids. The result is the first kept id,
//     in the order of ids, where the running sum of masses exceeds u. Sums are in double.
struct TokenBias {
  int32_t id;
  float value;
};
struct TokenCount {
  int32_t id;
  int32_t prompt;
  int32_t output;
};  // an entry with id < 0 is empty
struct SampleParams {
  float temperature, top_p, min_p;
  int32_t top_k;  // 0: no limit
  float repetition, frequency, presence;
  uint64_t seed;
  const TokenBias* bias;
  int32_t num_bias;
  const int32_t* allowed;
  int32_t num_allowed;  // number of ids in `allowed`, in ascending order; -1: all ids are allowed
  const int32_t* banned;
  int32_t num_banned;  // number of ids that this row must not sample (stop ids, min_tokens)
  const TokenCount* counts;
  int32_t num_counts;  // number of different ids in prompt and output; 0 if there are no penalties
};
// Returns the number of token ids in a block. The ids of a vocabulary
// are divided into at most kMaxBlocks blocks.
constexpr int kMaxBlocks = 2048;
constexpr int sample_block(int vocab) {
  return 256 * ((vocab + 256 * kMaxBlocks - 1) / (256 * kMaxBlocks));
}
// The kernel `sample` does all steps for a row of logits. Threads can share its passes:
// they first call sample_scan for all ids, and then sample_weigh for all ids. If shares_cut()
// is true for the row, threads may also share the cut of top_p: one thread calls sample_guess,
// all call sample_tally for all ids, one calls sample_cut, and all call sample_drop for all ids.
// At the end one thread calls `sample` with `prepared` set (and `cut`, if these four functions
// have run for the row), so that `sample` leaves out these passes. A call for ids [begin, end),
// which must be whole blocks, writes its results for these ids to the scratch memory.
// The sums of blocks are added in a fixed order, so results do not depend on the number of threads.
struct SampleArgs {
  float* logits;  // [vocab]; overwritten
  int32_t vocab;
  const SampleParams* params;  // nullptr: `target` is scored, nothing is sampled
  int32_t position;            // absolute position of the sampled token, the counter of the RNG
  int32_t target;              // id to score instead of sampling, -1 = sample
  int32_t num_top;             // number of alternatives (top_logprobs); -1: no logprobs at all
  const int32_t* mask;    // id i is allowed if bit i % 32 of word i / 32 is 1; nullptr: all ids
  int32_t token;          // out: the sampled token, or `target`
  float logprob;          // out: the log probability of `token`
  int32_t rank;           // out: 1 + number of ids with a larger logit
  int32_t* top_ids;       // out [num_top]: ids, most probable first; if equal, lower id first
  float* top_logprobs;    // out [num_top]
  void* scratch;          // scratch memory: vocab * 8 + 65536 bytes, 64-byte aligned
  bool prepared = false;  // sample_scan and sample_weigh have filled the scratch
  bool cut = false;       // sample_guess, sample_tally, sample_cut and sample_drop have run as well
};

inline bool is_greedy(const SampleParams& p) { return p.temperature < 1e-5f; }

// Whether steps 2 and 3 (bias to penalties) change logits, apart from the mask of step 2.
inline bool adjusts(const SampleParams& p) {
  return p.num_bias > 0 || p.num_allowed >= 0 || p.num_banned > 0 ||
         (p.num_counts > 0 && (p.repetition != 1.0f || p.frequency != 0.0f || p.presence != 0.0f));
}

// Whether threads can share the cut of top_p: no other filter comes before it, no logit changes,
// and no other step needs the masses.
inline bool shares_cut(const SampleArgs& a) {
  if (a.target >= 0 || !a.params || a.mask || a.num_top >= 0) return false;
  const SampleParams& p = *a.params;
  const bool filtered = p.min_p > 0.0f || (p.top_k > 0 && p.top_k < a.vocab);
  return p.top_p < 1.0f && !filtered && !is_greedy(p) && !adjusts(p);
}

// Returns a number in [0, 1): the top 53 bits of the finalizer of splitmix64
// for seed + golden ratio * (position + 1).
inline double uniform(uint64_t seed, uint64_t position) {
  uint64_t z = seed + 0x9e3779b97f4a7c15ull * (position + 1);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  z ^= z >> 31;
  return static_cast<double>(z >> 11) * (1.0 / 9007199254740992.0);
}

#define CPUSERVE_SAMPLING_KERNELS(X)                             \
  X(scale_logits, const ScaleLogitsArgs&)                        \
  X(sample_scan, const SampleArgs&, int32_t begin, int32_t end)  \
  X(sample_weigh, const SampleArgs&, int32_t begin, int32_t end) \
  X(sample_guess, const SampleArgs&)                             \
  X(sample_tally, const SampleArgs&, int32_t begin, int32_t end) \
  X(sample_cut, const SampleArgs&)                               \
  X(sample_drop, const SampleArgs&, int32_t begin, int32_t end)  \
  X(sample, SampleArgs&)

}  // namespace cpuserve
