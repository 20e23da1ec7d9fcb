// Samples an id from one row of logits, or scores a given id. table/sampling.h lists the steps.
// The mass of an id is its unnormalized probability, exp((logit - largest) / temperature).
#pragma once
#include <float.h>

#include "kernels/generic/select.h"

namespace CPUSERVE_NS {

// The search for the cut of top_p (select.h), if threads share its passes over the row.
struct SharedCut {
  bool used;  // whether threads share the search for this row
  MassSearch search;
  Cut cut;
};

// The parts of the scratch memory: a copy of the logits (if unmodified logits are needed later),
// the masses, the sum and the maximum of each block of ids, ids for select.h, and the shared cut.
// In rows with a shared cut, the tallies of blocks take the place of the copy of the logits.
struct SampleScratch {
  float* logits;
  float* mass;
  double* block_mass;
  float* block_max;
  int32_t* ids;
  SharedCut* shared;
  BlockTally* tallies() const { return reinterpret_cast<BlockTally*>(logits); }
};

static inline SampleScratch carve_sample_scratch(void* scratch, int vocab) {
  uint8_t* p = static_cast<uint8_t*>(scratch);
  const auto take = [&p](size_t bytes) {
    uint8_t* at = p;
    p += (bytes + 63) / 64 * 64;
    return at;
  };
  SampleScratch s;
  s.logits = reinterpret_cast<float*>(take(static_cast<size_t>(vocab) * sizeof(float)));
  s.mass = reinterpret_cast<float*>(take(static_cast<size_t>(vocab) * sizeof(float)));
  s.block_mass = reinterpret_cast<double*>(take(kMaxBlocks * sizeof(double)));
  s.block_max = reinterpret_cast<float*>(take(kMaxBlocks * sizeof(float)));
  s.ids = reinterpret_cast<int32_t*>(take(kBandIds * sizeof(int32_t)));
  s.shared = reinterpret_cast<SharedCut*>(take(sizeof(SharedCut)));
  return s;
}

// Computes the largest logit of each of the blocks [first, last). Returns false if a logit is NaN.
// Because max(x, m) ignores a NaN in x, `bad` sums 0 * clamp(x):
// clamp keeps NaN (math.h), and a finite number adds 0.
static inline bool scan_blocks(const Row& r, int first, int last, float* block_max) {
  F bad = zero();
  for (int b = first; b < last; b++) {
    F m0 = set1(-INFINITY), m1 = m0;
    int i = b * r.block;
    const int end = block_end(r, b);
    for (; i + 2 * kLanes <= end; i += 2 * kLanes) {
      const F x0 = load(r.logits + i), x1 = load(r.logits + i + kLanes);
      m0 = max(x0, m0);
      m1 = max(x1, m1);
      bad = fma(clamp(x0, -FLT_MAX, FLT_MAX), zero(), bad);
      bad = fma(clamp(x1, -FLT_MAX, FLT_MAX), zero(), bad);
    }
    float m = reduce_max(max(m0, m1));
    for (; i < end; i++) {
      m = r.logits[i] > m ? r.logits[i] : m;
      if (r.logits[i] != r.logits[i]) bad = set1(NAN);
    }
    block_max[b] = m;
  }
  return reduce_add(bad) == 0.0f;
}

// Finds the largest block maximum. Returns false if it is not finite, or if a block maximum is NaN.
static inline bool find_largest(const Row& r, const float* block_max, float* largest) {
  float top = -INFINITY;
  bool numbers = true;
  for (int b = 0; b < r.blocks; b++) {
    numbers = numbers && block_max[b] == block_max[b];
    top = block_max[b] > top ? block_max[b] : top;
  }
  *largest = top;
  return numbers && top >= -FLT_MAX && top <= FLT_MAX;
}

// Computes the block maxima and the largest logit.
// Returns false if a logit is NaN or the largest logit is not finite.
static inline bool scan_row(const Row& r, float* block_max, float* largest) {
  const bool numbers = scan_blocks(r, 0, r.blocks, block_max);
  return find_largest(r, block_max, largest) && numbers;
}

static inline int32_t first_largest(const Row& r, float largest) {
  for (int b = 0; b < r.blocks; b++) {
    if (r.block_max[b] != largest) continue;
    for (int i = b * r.block; i < block_end(r, b); i++) {
      if (r.logits[i] == largest) return i;
    }
  }
  return -1;
}

// Computes mass = exp((x - largest) * inverse) for n logits x; inverse is 1 / temperature.
static inline void exp_block(const float* x, float* mass, int n, float largest, float inverse) {
  const F top = set1(largest), scale = set1(inverse);
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    store(mass + i, exp(mul(sub(load(x + i), top), scale)));
  }
  if (i < n) store_n(mass + i, exp(mul(sub(load_n(x + i, n - i), top), scale)), n - i);
}

static inline double sum_block(const float* mass, int n) {
  constexpr int kSums = 16;
  double s[kSums] = {};
  int i = 0;
  for (; i + kSums <= n; i += kSums) {
    for (int j = 0; j < kSums; j++) s[j] += static_cast<double>(mass[i + j]);
  }
  for (int j = 0; i < n; i++, j++) s[j] += static_cast<double>(mass[i]);
  for (int step = kSums / 2; step > 0; step /= 2) {
    for (int j = 0; j < step; j++) s[j] += s[j + step];
  }
  return s[0];
}

// Computes the masses of the ids in blocks [first, last), and the sum of the masses of each block.
static inline void weigh_blocks(const Row& r, int first, int last, float largest, float inverse,
                                float* mass, double* block_mass) {
  for (int b = first; b < last; b++) {
    const int i = b * r.block, n = block_end(r, b) - i;
    exp_block(r.logits + i, mass + i, n, largest, inverse);
    block_mass[b] = sum_block(mass + i, n);
  }
}

static inline double sum_blocks(const Row& r, const double* block_mass) {
  double total = 0;
  for (int b = 0; b < r.blocks; b++) total += block_mass[b];
  return total;
}

// Returns the total mass of the row. If `weighed` is false, computes the masses of its ids first.
static inline double weigh_row(const Row& r, float largest, float inverse, bool weighed,
                               float* mass, double* block_mass) {
  if (!weighed) weigh_blocks(r, 0, r.blocks, largest, inverse, mass, block_mass);
  return sum_blocks(r, block_mass);
}

static inline void keep_allowed(float* logits, int n, const int32_t* allowed, int count) {
  int from = 0;
  for (int i = 0; i <= count; i++) {
    const int to = i < count ? allowed[i] : n;
    for (int j = from; j < to; j++) logits[j] = -INFINITY;
    from = to + 1;
  }
}

static inline void apply_mask(float* logits, int n, const int32_t* mask) {
  for (int begin = 0; begin < n; begin += 32) {
    const uint32_t bits = static_cast<uint32_t>(mask[begin / 32]);
    const int end = begin + 32 < n ? begin + 32 : n;
    if (bits == 0xffffffffu) continue;
    if (bits == 0) {
      for (int i = begin; i < end; i++) logits[i] = -INFINITY;
      continue;
    }
    for (int i = begin; i < end; i++) {
      logits[i] = (bits >> (i - begin)) & 1u ? logits[i] : -INFINITY;
    }
  }
}

// Applies steps 2 and 3 of table/sampling.h: bias, allowed and banned ids, mask and penalties.
static inline void adjust_logits(const SampleParams& p, const int32_t* mask, float* logits, int n) {
  for (int i = 0; i < p.num_bias; i++) logits[p.bias[i].id] += p.bias[i].value;
  if (p.num_allowed >= 0) keep_allowed(logits, n, p.allowed, p.num_allowed);
  for (int i = 0; i < p.num_banned; i++) logits[p.banned[i]] = -INFINITY;
  if (mask) apply_mask(logits, n, mask);
  for (int i = 0; i < p.num_counts; i++) {
    const TokenCount& c = p.counts[i];
    if (c.id < 0) continue;
    float x = logits[c.id];
    if (c.prompt > 0 || c.output > 0) x = x > 0 ? x / p.repetition : x * p.repetition;
    if (c.output > 0) x = x - p.frequency * static_cast<float>(c.output) - p.presence;
    logits[c.id] = x;
  }
}

// Drops ids with a mass below min_p (the mass of the most probable id is 1).
// Returns the total mass of the other ids.
static inline double drop_improbable(const Row& r, float min_p, float* logits, float* mass,
                                     double* block_mass) {
  double total = 0;
  for (int b = 0; b < r.blocks; b++) {
    for (int i = b * r.block; i < block_end(r, b); i++) {
      const bool in = mass[i] >= min_p;
      logits[i] = in ? logits[i] : -INFINITY;
      mass[i] = in ? mass[i] : 0.0f;
    }
    block_mass[b] = sum_block(mass + b * r.block, block_end(r, b) - b * r.block);
    total += block_mass[b];
  }
  return total;
}

// Drops the ids of blocks [first, last) that the cut does not keep: sets their masses to 0. If a
// block keeps no id, only its block_mass is set to 0, and the masses of its ids do not change.
static inline void drop_blocks(const Row& r, Cut cut, int first, int last, float* mass,
                               double* block_mass) {
  for (int b = first; b < last; b++) {
    const int begin = b * r.block, end = block_end(r, b);
    block_mass[b] = 0;
    if (r.block_max[b] < cut.logit) continue;
    const int ties = cut.id + 1 < begin ? begin : cut.id + 1 > end ? end : cut.id + 1;
    for (int i = begin; i < ties; i++) mass[i] = r.logits[i] >= cut.logit ? mass[i] : 0.0f;
    for (int i = ties; i < end; i++) mass[i] = r.logits[i] > cut.logit ? mass[i] : 0.0f;
    block_mass[b] = sum_block(mass + begin, end - begin);
  }
}

// Drops all ids that the cut does not keep, and returns the total mass of the kept ids.
static inline double apply_cut(const Row& r, Cut cut, float* mass, double* block_mass) {
  drop_blocks(r, cut, 0, r.blocks, mass, block_mass);
  return sum_blocks(r, block_mass);
}

// Returns the first id where the running sum of masses, in the order of ids, exceeds `at`.
// Blocks with a block_mass of 0 are not read.
static inline int32_t draw(const Row& r, const float* mass, const double* block_mass, double at) {
  double sum = 0;
  int32_t last = -1;
  for (int b = 0; b < r.blocks; b++) {
    if (block_mass[b] <= 0) continue;
    if (sum + block_mass[b] <= at) {
      sum += block_mass[b];
      continue;
    }
    double running = sum;
    for (int i = b * r.block; i < block_end(r, b); i++) {
      if (mass[i] <= 0) continue;
      last = i;
      running += static_cast<double>(mass[i]);
      if (running > at) return i;
    }
    sum += block_mass[b];  // added in another order, `running` may end slightly below `at`
  }
  return last;
}

static inline int32_t draw_at(const SampleParams& p, const SampleScratch& s, const Row& r,
                              int32_t position, double total) {
  const double u = uniform(p.seed, static_cast<uint64_t>(position));
  return draw(r, s.mass, s.block_mass, u * total);
}

// Does steps 4 to 6 of table/sampling.h at a temperature above zero, and returns the sampled id.
// `logits` is the same memory as r.logits, but writable.
// If `weighed` is true, the scratch memory already has the masses at the temperature of p.
static inline int32_t sample_row(const SampleParams& p, const SampleScratch& s, Row& r,
                                 float* logits, float largest, int32_t position, bool weighed) {
  double total = weigh_row(r, largest, 1.0f / p.temperature, weighed, s.mass, s.block_mass);
  r.mass = s.mass;
  if (p.min_p > 0.0f) total = drop_improbable(r, p.min_p, logits, s.mass, s.block_mass);
  float least = -FLT_MAX;
  if (p.top_k > 0 && p.top_k < r.n) {
    const Cut cut = cut_count(r, largest, p.top_k);
    total = apply_cut(r, cut, s.mass, s.block_mass);
    least = cut.logit;
  }
  if (p.top_p < 1.0f) {
    const double target = static_cast<double>(p.top_p) * total;
    const MassSearch search = start_search(r, largest, least, p.temperature, total, target);
    const Cut cut = end_search(r, search, tally_row(r, search.thresholds));
    total = apply_cut(r, cut, s.mass, s.block_mass);
  }
  return draw_at(p, s, r, position, total);
}

static inline void sift_down(const float* logits, int32_t* ids, int root, int n) {
  for (int child = 2 * root + 1; child < n; child = 2 * root + 1) {
    if (child + 1 < n && before(logits, ids[child], ids[child + 1])) child++;
    if (!before(logits, ids[root], ids[child])) return;
    swap_ids(ids, root, child);
    root = child;
  }
}

static inline void sort_ids(const float* logits, int32_t* ids, int n) {
  for (int i = n / 2 - 1; i >= 0; i--) sift_down(logits, ids, i, n);
  for (int i = n - 1; i > 0; i--) {
    swap_ids(ids, 0, i);
    sift_down(logits, ids, 0, i);
  }
}

static inline void list_top(SampleArgs& a, const Row& r, float largest, double log_sum) {
  const int wanted = a.num_top < r.n ? a.num_top : r.n;
  if (wanted <= 0) return;
  const Cut cut = cut_count(r, largest, wanted);
  int found = 0;
  for (int b = 0; b < r.blocks; b++) {
    if (r.block_max[b] < cut.logit) continue;
    for (int i = b * r.block; i < block_end(r, b) && found < wanted; i++) {
      const float x = r.logits[i];
      if (x > cut.logit || (x == cut.logit && i <= cut.id)) a.top_ids[found++] = i;
    }
  }
  sort_ids(r.logits, a.top_ids, found);
  for (int i = 0; i < a.num_top; i++) {
    if (i >= found) a.top_ids[i] = -1;
    a.top_logprobs[i] =
        i < found ? static_cast<float>(static_cast<double>(r.logits[a.top_ids[i]]) - log_sum)
                  : -INFINITY;
  }
}

static inline int32_t rank_of(const Row& r, float logit) {
  int32_t larger = 0;
  for (int b = 0; b < r.blocks; b++) {
    if (!(r.block_max[b] > logit)) continue;
    for (int i = b * r.block; i < block_end(r, b); i++) larger += r.logits[i] > logit ? 1 : 0;
  }
  return larger + 1;
}

static inline void answer_invalid(SampleArgs& a) {
  a.token = -1;
  a.logprob = NAN;
  a.rank = 0;
  for (int i = 0; i < a.num_top; i++) {
    a.top_ids[i] = -1;
    a.top_logprobs[i] = NAN;
  }
}

// Returns the greedy or sampled token, or -1 if bans and the mask exclude every id.
// Bias, bans, mask and penalties change a.logits, or a copy of the logits if logprobs are reported.
// `raw` is the row of logits before these changes, and `largest` is its maximum.
static inline int32_t choose_token(const SampleArgs& a, const SampleScratch& s, const Row& raw,
                                   float* block_max, float largest) {
  const SampleParams& p = *a.params;
  const bool greedy = is_greedy(p), changes = a.mask || adjusts(p);
  if (greedy && !changes) return first_largest(raw, largest);
  Row r = raw;
  float* logits = a.logits;
  if (a.num_top >= 0) {
    memcpy(s.logits, a.logits, static_cast<size_t>(r.n) * sizeof(float));
    r.logits = logits = s.logits;
  }
  if (changes) {
    adjust_logits(p, a.mask, logits, r.n);
    if (!scan_row(r, block_max, &largest)) return -1;
  }
  if (greedy) return first_largest(r, largest);
  const bool weighed = a.prepared && !changes && a.num_top < 0;
  if (weighed && a.cut && s.shared->used) {
    return draw_at(p, s, r, a.position, sum_blocks(r, s.block_mass));
  }
  return sample_row(p, s, r, logits, largest, a.position, weighed);
}

static inline Row row_to_sample(const SampleArgs& a, const SampleScratch& s) {
  const int block = sample_block(a.vocab);
  return {a.logits, nullptr, a.vocab, block, (a.vocab + block - 1) / block, s.block_max, s.ids};
}

// Computes the maxima of the blocks of ids [begin, end).
// If one of the logits is NaN, the first of these maxima is set to NaN.
static inline void sample_scan(const SampleArgs& a, int32_t begin, int32_t end) noexcept {
  const SampleScratch s = carve_sample_scratch(a.scratch, a.vocab);
  const Row r = row_to_sample(a, s);
  const int first = begin / r.block, last = (end + r.block - 1) / r.block;
  if (!scan_blocks(r, first, last, s.block_max)) s.block_max[first] = NAN;
}

// Computes the masses of ids [begin, end) that sample() needs first:
// at temperature 1 if it reports logprobs, otherwise at the temperature of the request. Bias,
// bans and penalties are not considered here, because they can change until the row is sampled:
// if a request has any of these, sample() computes the masses again.
static inline void sample_weigh(const SampleArgs& a, int32_t begin, int32_t end) noexcept {
  const bool draws = a.target < 0 && a.params && !is_greedy(*a.params) && !a.mask;
  if (a.num_top < 0 && !draws) return;
  const SampleScratch s = carve_sample_scratch(a.scratch, a.vocab);
  const Row r = row_to_sample(a, s);
  float largest;
  if (!find_largest(r, s.block_max, &largest)) return;
  const float inverse = a.num_top < 0 ? 1.0f / a.params->temperature : 1.0f;
  const int first = begin / r.block, last = (end + r.block - 1) / r.block;
  weigh_blocks(r, first, last, largest, inverse, s.mass, s.block_mass);
}

// Starts the search for the cut of top_p that threads share (if shares_cut() returns true).
static inline void sample_guess(const SampleArgs& a) noexcept {
  const SampleScratch s = carve_sample_scratch(a.scratch, a.vocab);
  Row r = row_to_sample(a, s);
  float largest;
  s.shared->used = shares_cut(a) && find_largest(r, s.block_max, &largest);
  if (!s.shared->used) return;
  r.mass = s.mass;
  const double total = sum_blocks(r, s.block_mass);
  const double target = static_cast<double>(a.params->top_p) * total;
  s.shared->search = start_search(r, largest, -FLT_MAX, a.params->temperature, total, target);
}

// Counts the ids in [begin, end) at or above each threshold of the search, and sums their masses.
static inline void sample_tally(const SampleArgs& a, int32_t begin, int32_t end) noexcept {
  const SampleScratch s = carve_sample_scratch(a.scratch, a.vocab);
  if (!s.shared->used) return;
  Row r = row_to_sample(a, s);
  r.mass = s.mass;
  const int last = (end + r.block - 1) / r.block;
  for (int b = begin / r.block; b < last; b++) {
    s.tallies()[b] = tally_of(r, b, s.shared->search.thresholds);
  }
}

// Ends the search for the cut of top_p: computes the cut from the tallies of all blocks.
static inline void sample_cut(const SampleArgs& a) noexcept {
  const SampleScratch s = carve_sample_scratch(a.scratch, a.vocab);
  if (!s.shared->used) return;
  Row r = row_to_sample(a, s);
  r.mass = s.mass;
  Tally tally = {};
  for (int b = 0; b < r.blocks; b++) add_tally(s.tallies()[b], tally);
  s.shared->cut = end_search(r, s.shared->search, tally);
}

// Drops the token ids in [begin, end) that top-p does not keep:
// the ids after the cut in descending order of probability.
static inline void sample_drop(const SampleArgs& a, int32_t begin, int32_t end) noexcept {
  const SampleScratch s = carve_sample_scratch(a.scratch, a.vocab);
  if (!s.shared->used) return;
  const Row r = row_to_sample(a, s);
  drop_blocks(r, s.shared->cut, begin / r.block, (end + r.block - 1) / r.block, s.mass,
              s.block_mass);
}

// Sets a.token to -1 and a.logprob to NaN if the logits are not a distribution:
// a logit is NaN, the largest logit is infinite, or bans and the mask exclude every id.
static inline void sample(SampleArgs& a) noexcept {
  const SampleScratch s = carve_sample_scratch(a.scratch, a.vocab);
  const Row r = row_to_sample(a, s);
  float largest;
  const bool valid =
      a.prepared ? find_largest(r, s.block_max, &largest) : scan_row(r, s.block_max, &largest);
  if (!valid) return answer_invalid(a);
  double log_sum = 0;
  if (a.num_top >= 0) {
    const double mass = weigh_row(r, largest, 1.0f, a.prepared, s.mass, s.block_mass);
    log_sum = static_cast<double>(largest) + log(mass);
    list_top(a, r, largest, log_sum);
  }
  a.token = a.target;
  if (a.target < 0) a.token = a.params ? choose_token(a, s, r, s.block_max, largest) : -1;
  if (a.token < 0) return answer_invalid(a);
  if (a.num_top < 0) return;
  const float logit = a.logits[a.token];
  a.logprob = static_cast<float>(static_cast<double>(logit) - log_sum);
  if (a.target < 0) scan_row(r, s.block_max, &largest);  // again: bans changed some block maxima
  a.rank = rank_of(r, logit);
}

}  // namespace CPUSERVE_NS
