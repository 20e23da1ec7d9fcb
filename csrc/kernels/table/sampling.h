// The arguments of sampling.
#pragma once
#include <stddef.h>
#include <stdint.h>

namespace cpuserve {

constexpr int kMaxTop = 20;  // default limit of alternatives per logprob request

// logits = softcap * tanh(logits * scale / softcap), or logits * scale where softcap is 0. Each
// logit is independent, so a row may be split anywhere.
struct ScaleLogitsArgs {
  float* logits;
  int64_t count;
  float scale, softcap;
};

// Sampling of one row of logits. The steps, in order (the torch executor does the same):
//  1. logprob of any id = logit - logsumexp(logits) of the unmodified logits.
//  2. bias[i].value is added to logits[bias[i].id]; if num_allowed >= 0 all other ids become -inf;
//     the first min_tokens outputs ban the stop ids; ids with bit 0 in the mask become -inf.
//  3. repetition penalty on ids seen in prompt or output (logit > 0 ? / p : * p), then
//     - frequency * count_output - presence * (count_output > 0).
//  4. temperature < 1e-5: the largest logit, lowest id on ties. Else logits / temperature.
//  5. keep: min_p (p >= min_p * p_max), then top_k (largest k, ties by lower id), then top_p (the
//     shortest prefix in descending order, ties by lower id, with a mass of at least top_p of the
//     mass that top_k kept).
//  6. u = uniform(seed, position) * kept mass; the result is the first kept id, in id order, where
//     the running sum exceeds u. Sums run in double in id order.
struct TokenBias {
  int32_t id;
  float value;
};
struct TokenCount {
  int32_t id;
  int32_t prompt;
  int32_t output;
};  // id < 0: empty
struct SampleParams {
  float temperature, top_p, min_p;
  int32_t top_k;  // 0 = all
  float repetition, frequency, presence;
  uint64_t seed;
  const TokenBias* bias;
  int32_t num_bias;
  const int32_t* allowed;
  int32_t num_allowed;  // sorted; -1 = all
  const int32_t* banned;
  int32_t num_banned;  // this row's banned ids (min_tokens)
  const TokenCount* counts;
  int32_t num_counts;  // compact list of the ids seen so far, or empty
};
// The ids of a row are divided into at most kMaxBlocks blocks of this many.
constexpr int kMaxBlocks = 2048;
constexpr int sample_block(int vocab) {
  return 256 * ((vocab + 256 * kMaxBlocks - 1) / (256 * kMaxBlocks));
}
// sample does all of it. Before that, threads can share two passes over the row, which then sample
// leaves out: sample_scan for all ids, then sample_weigh for all ids. They fill the scratch for
// ids [begin, end), where begin and end (other than the last) are multiples of a block. Since sums
// over blocks are added in one order, the result is the same.
struct SampleArgs {
  float* logits;  // [vocab]; overwritten
  int32_t vocab;
  const SampleParams* params;  // nullptr: score only
  int32_t position;            // absolute position of the sampled token (RNG counter)
  int32_t target;              // id to score instead of sampling, -1 = sample
  int32_t num_top;             // requested alternatives; -1 = no logprobs at all
  const int32_t* mask;         // bit i % 32 of word i / 32: whether id i is allowed; nullptr: all
  int32_t token;               // out
  float logprob;               // out: the value of `token`
  int32_t rank;                // out: 1 + number of ids with a larger logit
  int32_t* top_ids;            // out [num_top], descending, ties by lower id
  float* top_logprobs;         // out [num_top]
  void* scratch;               // vocab * 8 + 65536 bytes, 64-byte aligned
  bool prepared = false;       // sample_scan and sample_weigh have filled the scratch
};

// uniform(seed, position) in [0, 1): splitmix64 finalizer over seed + golden * (position + 1), top
// 53 bits.
inline double uniform(uint64_t seed, uint64_t position) {
  uint64_t z = seed + 0x9e3779b97f4a7c15ull * (position + 1);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  z ^= z >> 31;
  return static_cast<double>(z >> 11) * (1.0 / 9007199254740992.0);
}

}  // namespace cpuserve
