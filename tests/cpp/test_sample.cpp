// Compares sample with an fp64 implementation of the text in table/sampling.h that sorts.
#include <algorithm>
#include <map>
#include <numeric>

#include "harness.h"

using namespace cpuserve;
using harness::Buffer;
using harness::Rng;

namespace {

SampleParams plain() {
  SampleParams p{};
  p.temperature = 1.0f;
  p.top_p = 1.0f;
  p.repetition = 1.0f;
  p.num_allowed = -1;
  return p;
}

struct Answer {
  int32_t token = -2, rank = -2;
  float logprob = -2;
  std::vector<int32_t> top_ids;
  std::vector<float> top_logprobs;
};

// The passes that threads share, over pieces of some blocks, the last ones first. `cut`: also those
// of the cut, in rows that have none as well.
void prepare(const KernelTable& k, SampleArgs* a, bool cut) {
  const int32_t piece = 3 * sample_block(a->vocab), pieces = (a->vocab + piece - 1) / piece;
  const auto share = [&](const auto pass) {
    for (int32_t i = pieces; i-- > 0;) {
      pass(*a, i * piece, std::min((i + 1) * piece, a->vocab));
    }
  };
  share(k.sample_scan);
  share(k.sample_weigh);
  a->prepared = true;
  if (!cut) return;
  k.sample_guess(*a);
  share(k.sample_tally);
  k.sample_cut(*a);
  share(k.sample_drop);
  a->cut = true;
}

enum class Passes { alone, shared, with_cut };

Answer run_once(const KernelTable& k, const std::vector<float>& logits, const SampleParams* p,
                int32_t position, int32_t target, int32_t num_top, const int32_t* mask,
                Passes passes) {
  Buffer<float> x(logits.size());
  Buffer<uint8_t> scratch(logits.size() * 8 + 65536);
  std::copy(logits.begin(), logits.end(), x.data());
  const size_t tops = static_cast<size_t>(std::max(0, num_top));
  Buffer<int32_t> ids(tops + 1);
  Buffer<float> logprobs(tops + 1);
  SampleArgs a{};
  a.logits = x.data();
  a.vocab = static_cast<int32_t>(logits.size());
  a.params = p;
  a.position = position;
  a.target = target;
  a.num_top = num_top;
  a.mask = mask;
  a.top_ids = ids.data();
  a.top_logprobs = logprobs.data();
  a.scratch = scratch.data();
  if (passes != Passes::alone) prepare(k, &a, passes == Passes::with_cut);
  k.sample(a);
  return {a.token, a.rank, a.logprob, std::vector<int32_t>(ids.data(), ids.data() + tops),
          std::vector<float>(logprobs.data(), logprobs.data() + tops)};
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

Answer run(const KernelTable& k, const std::vector<float>& logits, const SampleParams* p,
           int32_t position = 0, int32_t target = -1, int32_t num_top = -1,
           const int32_t* mask = nullptr) {
  const Answer one = run_once(k, logits, p, position, target, num_top, mask, Passes::alone);
  for (Passes passes : {Passes::shared, Passes::with_cut}) {
    const Answer shared = run_once(k, logits, p, position, target, num_top, mask, passes);
    CHECK(one.token == shared.token && one.rank == shared.rank && one.top_ids == shared.top_ids);
    CHECK(same_bits({one.logprob}, {shared.logprob}));
    CHECK(same_bits(one.top_logprobs, shared.top_logprobs));
  }
  return one;
}

// Steps 2 and 3 in table/sampling.h.
std::vector<float> adjusted(std::vector<float> x, const SampleParams& p) {
  for (int i = 0; i < p.num_bias; i++) x[static_cast<size_t>(p.bias[i].id)] += p.bias[i].value;
  if (p.num_allowed >= 0) {
    for (size_t i = 0; i < x.size(); i++) {
      if (!std::binary_search(p.allowed, p.allowed + p.num_allowed, static_cast<int32_t>(i))) {
        x[i] = -INFINITY;
      }
    }
  }
  for (int i = 0; i < p.num_banned; i++) x[static_cast<size_t>(p.banned[i])] = -INFINITY;
  for (int i = 0; i < p.num_counts; i++) {
    const TokenCount c = p.counts[i];
    if (c.id < 0) continue;
    float& l = x[static_cast<size_t>(c.id)];
    l = l > 0 ? l / p.repetition : l * p.repetition;
    if (c.output > 0) l = l - p.frequency * static_cast<float>(c.output) - p.presence;
  }
  return x;
}

std::vector<int32_t> descending(const std::vector<float>& x) {
  std::vector<int32_t> ids(x.size());
  std::iota(ids.begin(), ids.end(), 0);
  std::stable_sort(ids.begin(), ids.end(), [&](int32_t a, int32_t b) {
    return x[static_cast<size_t>(a)] > x[static_cast<size_t>(b)];
  });
  return ids;
}

// What depends on neither the filters nor the draw, because sorting takes emulators long: the
// logits, those after steps 2 and 3, ids from the largest of these on, and probabilities relative
// to its own.
struct Ranked {
  Ranked(const std::vector<float>& logits_, const SampleParams& p)
      : logits(logits_), x(adjusted(logits_, p)), order(descending(x)) {
    const double top = x[static_cast<size_t>(order[0])];
    for (float l : x) {
      mass.push_back(std::isinf(l) ? 0.0
                                   : std::exp((static_cast<double>(l) - top) /
                                              static_cast<double>(p.temperature)));
    }
  }
  std::vector<float> logits, x;
  std::vector<int32_t> order;
  std::vector<double> mass;
};

// The ids that steps 4 to 6 may return if every comparison may be off by `slack` of the mass:
// exactly one unless the draw or a filter is at an edge.
struct Reference {
  std::vector<double> mass;  // of kept ids, by id
  double kept = 0;
  bool edge = false;  // the decision of a filter depends on less than `slack`
};

Reference filtered(const Ranked& ranked, const SampleParams& p, double slack) {
  const auto& [logits, x, order, mass] = ranked;
  Reference r;
  size_t n = 0;
  while (n < order.size() && !std::isinf(x[static_cast<size_t>(order[n])])) n++;
  if (p.min_p > 0) {
    while (n > 1 && mass[static_cast<size_t>(order[n - 1])] < static_cast<double>(p.min_p)) n--;
    for (double m : mass) r.edge |= std::fabs(m / static_cast<double>(p.min_p) - 1) < 1e-5;
  }
  if (p.top_k > 0) n = std::min(n, static_cast<size_t>(p.top_k));
  if (p.top_p < 1) {
    double total = 0, sum = 0;
    for (size_t i = 0; i < n; i++) total += mass[static_cast<size_t>(order[i])];
    size_t kept = 0;
    while (kept < n) {
      sum += mass[static_cast<size_t>(order[kept++])];
      r.edge |= std::fabs(sum / total - static_cast<double>(p.top_p)) < slack;
      if (sum >= static_cast<double>(p.top_p) * total) break;
    }
    n = kept;
  }
  r.mass.assign(x.size(), 0.0);
  for (size_t i = 0; i < n; i++)
    r.mass[static_cast<size_t>(order[i])] = mass[static_cast<size_t>(order[i])];
  for (double m : r.mass) r.kept += m;
  return r;
}

// Returns the id at `u` of the kept mass, and whether a neighbour is within `slack`.
int32_t pick(const Reference& r, double u, double slack, bool* edge) {
  double sum = 0;
  int32_t last = -1;
  for (size_t i = 0; i < r.mass.size(); i++) {
    if (r.mass[i] <= 0) continue;
    last = static_cast<int32_t>(i);
    if (std::fabs(sum / r.kept - u) < slack && sum > 0) *edge = true;
    sum += r.mass[i];
    if (std::fabs(sum / r.kept - u) < slack) *edge = true;
    if (sum > u * r.kept) return last;
  }
  return last;
}

enum class Shape { normal, ties, peaked, wide, grid };
std::vector<float> random_logits(size_t n, Shape shape, Rng& rng) {
  std::vector<float> x(n);
  for (float& l : x) {
    const float sum = rng.uniform() + rng.uniform() + rng.uniform();  // about normal
    switch (shape) {
      case Shape::normal:
        l = 2.0f * sum;
        break;
      case Shape::ties:
        l = static_cast<float>(rng.below(7));
        break;
      case Shape::peaked:
        l = 12.0f * sum;
        break;
      case Shape::wide:
        l = sum * 1e6f;
        break;
      case Shape::grid:
        l = std::round(16.0f * sum) / 4.0f;
        break;
    }
  }
  return x;
}

// Draws that depend on the last bits of a sum are counted, not compared. There may only be a few.
// `ranked` is of parameters that differ from p in their filters at most.
void check_draws(const KernelTable& k, const Ranked& ranked, SampleParams p, int draws, Rng& rng,
                 int* compared) {
  constexpr double kSlack = 2e-6;  // fp32 exponentials
  const Reference r = filtered(ranked, p, kSlack);
  for (int i = 0; i < draws; i++) {
    p.seed = rng.bits();
    const int32_t position = static_cast<int32_t>(rng.below(100000));
    bool edge = r.edge;
    const int32_t want = pick(r, uniform(p.seed, static_cast<uint64_t>(position)), kSlack, &edge);
    const Answer got = run(k, ranked.logits, &p, position);
    if (edge) continue;
    (*compared)++;
    if (got.token != want) {
      char text[200];
      std::snprintf(text, sizeof text, "vocab %zu T %g top_p %g min_p %g top_k %d: %d, expected %d",
                    ranked.logits.size(), p.temperature, p.top_p, p.min_p, p.top_k, got.token,
                    want);
      harness::fail(__FILE__, __LINE__, text);
    }
  }
}

double log_sum_exp(const std::vector<float>& x) {
  const double top = *std::max_element(x.begin(), x.end());
  double sum = 0;
  for (float l : x) sum += std::exp(static_cast<double>(l) - top);
  return top + std::log(sum);
}

const size_t kVocabs[] = {1, 2, 15, 16, 17, 100, 255, 256, 257, 1000, 5003};
const Shape kShapes[] = {Shape::normal, Shape::ties, Shape::peaked, Shape::wide, Shape::grid};

}  // namespace

KERNEL_TEST_OF(sample_greedy_takes_the_lowest_id_of_the_largest_logit, sample) {
  Rng rng(1);
  SampleParams p = plain();
  p.temperature = 0;
  for (size_t n : kVocabs) {
    for (Shape shape : kShapes) {
      const std::vector<float> x = random_logits(n, shape, rng);
      const auto want = std::max_element(x.begin(), x.end()) - x.begin();
      CHECK(run(k, x, &p).token == want);
      CHECK(run(k, x, &p, 3, -1, 2).token == want);
    }
  }
}

KERNEL_TEST_OF(sample_draws_as_the_sorted_reference, sample) {
  Rng rng(2);
  int compared = 0;
  for (size_t n : kVocabs) {
    for (Shape shape : kShapes) {
      const std::vector<float> x = random_logits(n, shape, rng);
      for (int variant = 0; variant < 12; variant++) {
        SampleParams p = plain();
        p.temperature = variant % 4 == 3 ? 0.3f : variant % 4 == 1 ? 2.5f : 1.0f;
        if (variant & 1) p.top_k = 1 + static_cast<int32_t>(rng.below(static_cast<int64_t>(n) + 3));
        if (variant & 2) p.top_p = 0.02f + 0.97f * std::fabs(rng.uniform());
        if (variant % 3 == 2) p.min_p = 0.3f * std::fabs(rng.uniform()) + 1e-4f;
        check_draws(k, Ranked(x, p), p, 3, rng, &compared);
      }
    }
  }
  CHECK(compared > 1500);
}

KERNEL_TEST_OF(sample_of_a_large_vocabulary_draws_as_the_sorted_reference, sample) {
  Rng rng(3);
  int compared = 0;
  for (Shape shape : kShapes) {
    const Ranked ranked(random_logits(40000, shape, rng), plain());
    for (float top_p : {0.1f, 0.5f, 0.9f, 0.999f}) {
      for (int32_t top_k : {0, 1, 20, 5000}) {
        SampleParams p = plain();
        p.top_p = top_p;
        p.top_k = top_k;
        check_draws(k, ranked, p, 1, rng, &compared);
      }
    }
  }
  CHECK(compared > 40);
}

KERNEL_TEST_OF(sample_keeps_exactly_top_k_among_ties, sample) {
  SampleParams p = plain();
  p.temperature = 10;
  for (size_t n : {40u, 3000u, 20000u}) {
    for (int32_t top_k : {1, 3, 37}) {
      if (harness::few_shapes() && n == 20000 && top_k == 37) continue;
      std::vector<float> x(n, 1.5f);  // all equal: the lowest ids are kept
      p.top_k = top_k;
      int32_t largest = -1;
      // Enough draws for the last of the ids that are kept to be among them.
      const int32_t draws = top_k == 37 ? 400 : 40;
      for (int32_t i = 0; i < draws; i++) largest = std::max(largest, run(k, x, &p, i).token);
      CHECK(largest == top_k - 1);
    }
  }
}

KERNEL_TEST_OF(sample_applies_bias_masks_and_penalties_in_order, sample) {
  Rng rng(4);
  int compared = 0;
  for (int round = 0; round < 60; round++) {
    const size_t n = 300;
    std::vector<float> x = random_logits(n, kShapes[round % 3], rng);
    std::vector<TokenBias> bias;
    std::vector<int32_t> allowed, banned;
    std::vector<TokenCount> counts;
    const auto id = [&] { return static_cast<int32_t>(rng.below(static_cast<int64_t>(n))); };
    for (int i = 0; i < 10; i++) bias.push_back({id(), 5 * rng.uniform()});
    for (int32_t i = 0; i < static_cast<int32_t>(n); i++) {
      if (rng.below(3) == 0) allowed.push_back(i);
    }
    for (int i = 0; i < 20; i++) banned.push_back(id());
    for (int32_t i = 0; i < static_cast<int32_t>(n); i += 2) {
      counts.push_back({i % 10 ? i : -1, static_cast<int32_t>(rng.below(3)) + 1,
                        static_cast<int32_t>(rng.below(3))});
    }
    SampleParams p = plain();
    p.repetition = 1.3f;
    p.frequency = 0.25f;
    p.presence = 0.5f;
    p.bias = bias.data();
    p.allowed = allowed.data();
    p.banned = banned.data();
    p.counts = counts.data();
    p.num_bias = round & 1 ? 10 : 0;
    p.num_allowed = round & 2 ? static_cast<int32_t>(allowed.size()) : -1;
    p.num_banned = round & 4 ? 20 : 0;
    p.num_counts = round & 8 ? static_cast<int32_t>(counts.size()) : 0;
    p.top_k = round & 16 ? 250 : 0;  // more ids than the masks allow
    check_draws(k, Ranked(x, p), p, 3, rng, &compared);
    p.temperature = 0;
    const std::vector<float> y = adjusted(x, p);
    CHECK(run(k, x, &p).token == std::max_element(y.begin(), y.end()) - y.begin());
  }
  CHECK(compared > 150);
}

KERNEL_TEST_OF(sample_takes_only_ids_of_the_mask_and_scores_the_untouched_logits, sample) {
  Rng rng(6);
  for (size_t n : kVocabs) {
    for (int sparse : {1, 2, 40}) {
      const std::vector<float> x = random_logits(n, kShapes[n % 5], rng);
      std::vector<int32_t> mask((n + 31) / 32), allowed;
      for (size_t i = 0; i < n; i++) {
        if (rng.below(sparse) > 0) continue;
        mask[i / 32] |= static_cast<int32_t>(1u << (i % 32));
        allowed.push_back(static_cast<int32_t>(i));
      }
      // A bias cannot bring back an id that the mask excludes.
      std::vector<TokenBias> bias;
      for (size_t i = 0; i < n; i += 7) bias.push_back({static_cast<int32_t>(i), 50.0f});
      for (float temperature : {0.0f, 1.0f}) {
        SampleParams p = plain(), listed;
        p.temperature = temperature;
        p.seed = rng.bits();
        p.bias = bias.data();
        p.num_bias = static_cast<int32_t>(bias.size());
        listed = p;
        listed.allowed = allowed.data();
        listed.num_allowed = static_cast<int32_t>(allowed.size());
        const Answer got = run(k, x, &p, 3, -1, 2, mask.data()),
                     want = run(k, x, &listed, 3, -1, 2);
        CHECK(got.token == want.token && (got.token >= 0) == !allowed.empty());
        if (got.token < 0) continue;
        CHECK(got.logprob == want.logprob && got.rank == want.rank);
        CHECK(got.top_ids == want.top_ids && got.top_logprobs == want.top_logprobs);
      }
    }
  }
}

KERNEL_TEST_OF(sample_reports_logprob_rank_and_alternatives_of_untouched_logits, sample) {
  Rng rng(5);
  for (size_t n : {1u, 17u, 300u, 20000u}) {
    for (Shape shape : {Shape::normal, Shape::ties, Shape::grid}) {
      const std::vector<float> x = random_logits(n, shape, rng);
      const std::vector<int32_t> order = descending(x);
      const double log_sum = log_sum_exp(x);
      std::vector<TokenBias> bias = {{0, 3.0f}, {static_cast<int32_t>(n) - 1, 4.0f}};
      SampleParams p = plain();
      p.bias = bias.data();
      p.num_bias = 2;
      p.top_k = 5;
      for (int32_t target : {-1, static_cast<int32_t>(n / 2)}) {
        for (int32_t num_top : {0, 1, 20}) {
          const Answer a = run(k, x, target < 0 || num_top ? &p : nullptr, 7, target, num_top);
          CHECK(target < 0 ? a.token >= 0 : a.token == target);
          if (a.token < 0) continue;
          const float logit = x[static_cast<size_t>(a.token)];
          CHECK_NEAR(a.logprob, static_cast<double>(logit) - log_sum, 3e-6);
          CHECK(a.rank ==
                1 + std::count_if(x.begin(), x.end(), [&](float l) { return l > logit; }));
          for (size_t i = 0; i < static_cast<size_t>(num_top); i++) {
            const bool exists = i < n;
            CHECK(a.top_ids[i] == (exists ? order[i] : -1));
            if (!exists) continue;
            CHECK_NEAR(a.top_logprobs[i],
                       static_cast<double>(x[static_cast<size_t>(order[i])]) - log_sum, 3e-6);
          }
        }
      }
    }
  }
}

KERNEL_TEST_OF(sample_may_list_every_id, sample) {
  Rng rng(6);
  const std::vector<float> x = random_logits(9000, Shape::grid, rng);
  const SampleParams p = plain();
  CHECK(run(k, x, &p, 0, 4, 9000).top_ids == descending(x));
}

KERNEL_TEST_OF(sample_of_no_distribution_answers_minus_one, sample) {
  Rng rng(7);
  SampleParams greedy = plain();
  greedy.temperature = 0;
  const SampleParams warm = plain();
  for (size_t n : {1u, 33u, 1000u}) {
    for (size_t at : {size_t{0}, n / 2, n - 1}) {
      for (float bad : {static_cast<float>(NAN), static_cast<float>(INFINITY)}) {
        std::vector<float> x = random_logits(n, Shape::normal, rng);
        x[at] = bad;
        CHECK(run(k, x, &greedy).token == -1);
        CHECK(run(k, x, &warm).token == -1);
        const Answer scored = run(k, x, nullptr, 0, 0, 1);
        CHECK(scored.token == -1 && std::isnan(scored.logprob) && scored.top_ids[0] == -1);
      }
    }
  }
  const std::vector<float> x(50, 1.0f);
  SampleParams nothing = plain();
  nothing.num_allowed = 0;
  CHECK(run(k, x, &nothing).token == -1);
  CHECK(run(k, std::vector<float>(9, -INFINITY), &warm).token == -1);
}

KERNEL_TEST_OF(sample_never_draws_a_banned_id, sample) {
  std::vector<float> x(600, -INFINITY);
  const std::vector<int32_t> allowed = {5, 255, 256, 599};
  for (int32_t id : {5, 255, 256, 599, 300})
    x[static_cast<size_t>(id)] = 0.25f * static_cast<float>(id % 3);
  SampleParams p = plain();
  p.allowed = allowed.data();
  p.num_allowed = 4;
  p.top_p = 0.9999f;
  p.top_k = 50;
  for (int32_t i = 0; i < 300; i++) {
    CHECK(std::binary_search(allowed.begin(), allowed.end(), run(k, x, &p, i).token));
  }
}

KERNEL_TEST_OF(sample_draws_follow_the_probabilities, sample) {
  const std::vector<float> x = {0.0f, 1.0f, -2.0f, 0.5f, 1.0f, -INFINITY};
  SampleParams p = plain();
  p.temperature = 0.8f;
  p.seed = 99;
  const int32_t draws = harness::few_shapes() ? 4000 : 20000;
  std::map<int32_t, int> seen;
  for (int32_t i = 0; i < draws; i++) seen[run(k, x, &p, i).token]++;
  const Reference r = filtered(Ranked(x, p), p, 0);
  double chi2 = 0;
  for (size_t i = 0; i < 5; i++) {
    const double expected = draws * r.mass[i] / r.kept;
    chi2 += std::pow(seen[static_cast<int32_t>(i)] - expected, 2) / expected;
  }
  CHECK(chi2 < 18.5);  // 4 degrees of freedom: exceeded once in a thousand seeds
  CHECK(seen.size() == 5);
}

KERNEL_TEST_OF(sample_repeats_itself_and_depends_on_seed_and_position, sample) {
  Rng rng(8);
  const std::vector<float> x = random_logits(5000, Shape::normal, rng);
  SampleParams p = plain();
  int moved = 0;
  for (int32_t i = 0; i < 50; i++) {
    p.seed = static_cast<uint64_t>(i);
    const int32_t token = run(k, x, &p, 10).token;
    CHECK(run(k, x, &p, 10).token == token);
    moved += run(k, x, &p, 11).token != token;
  }
  CHECK(moved > 45);
}
