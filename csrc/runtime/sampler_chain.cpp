#include "runtime/sampler_chain.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"

namespace cpuserve {
namespace {

constexpr float kGreedyBelow = 1e-5f;  // below this temperature sampling is greedy (as in sample.h)
// The number of candidates that are sorted at first. If a sampler needs more sorted candidates,
// four times as many are sorted, and so on.
constexpr size_t kFirstOrdered = 256;
// This number is mixed into the seed,
// so that xtc and the final choice of the token use different random numbers.
constexpr uint64_t kXtcSeed = 0x2545f4914f6cdd1dull;
constexpr size_t kMirostatTokens = 100;  // m in the paper on mirostat: the likeliest m are fitted
constexpr size_t kMergedPrefixes = 256;  // candidates that infill compares in pairs
constexpr double kInfillShare = 0.2;     // infill keeps candidates with at least this probability

bool more_likely(const Candidate& a, const Candidate& b) {
  return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
}

}  // namespace

SamplerChain::SamplerChain(const ChainSettings& settings, int64_t vocab, Span<const int32_t> prompt,
                           Span<const int32_t> output, int64_t room)
    : settings_(settings), vocab_(vocab), next_mu_(settings.mirostat_mu) {
  bool uses_dry = false, uses_infill = false;
  for (Stage stage : settings.stages) {
    uses_dry |= stage == Stage::dry;
    uses_infill |= stage == Stage::infill;
  }
  for (int32_t id : settings.dry_breaker_ids) {
    check_argument(id >= 0 && id < vocab, "a sequence breaker has token id ", id,
                   ", but the vocabulary ends at ", vocab);
  }
  int32_t begin = 0;
  for (int32_t end : settings.dry_breaker_ends) {
    check_argument(end > begin && end <= static_cast<int32_t>(settings.dry_breaker_ids.size()),
                   "dry_breaker_ends has ", end, " after ", begin);
    breakers_.push_back({settings.dry_breaker_ids[static_cast<size_t>(begin)], begin, end});
    begin = end;
  }
  std::sort(breakers_.begin(), breakers_.end(),
            [](const Breaker& a, const Breaker& b) { return a.first < b.first; });
  const auto links = static_cast<int64_t>(settings.infill_prefixes.size());
  check_argument(!uses_infill || links == vocab, "infill needs ", vocab, " prefixes, not ", links);
  for (int32_t id : settings.infill_prefixes) {
    check_argument(id >= -1 && id < vocab, "infill_prefixes has token id ", id);
  }
  candidates_.reserve(static_cast<size_t>(vocab));
  if (!uses_dry) return;
  const auto most = static_cast<size_t>(prompt.size() + output.size() + room);
  tokens_.reserve(most);
  tokens_.insert(tokens_.end(), prompt.begin(), prompt.end());
  tokens_.insert(tokens_.end(), output.begin(), output.end());
  repeats_.resize(most);
  extends_.resize(static_cast<size_t>(vocab));
}

void SamplerChain::append(int32_t token) noexcept {
  settings_.mirostat_mu = next_mu_;
  if (tokens_.size() < tokens_.capacity()) tokens_.push_back(token);
}

int32_t SamplerChain::sample(const ChainRow& row) noexcept {
  if (!load(row)) return -1;
  for (Stage stage : settings_.stages) run(stage, row);
  if (settings_.mirostat > 0) mirostat();
  const int32_t token = draw(uniform(row.params.seed, static_cast<uint64_t>(row.position)));
  next_mu_ = settings_.mirostat_mu;
  for (const Candidate& c : candidates_) {
    if (settings_.mirostat == 0 || c.id != token) continue;
    const double surprise = -std::log2(c.p);
    next_mu_ -= settings_.mirostat_eta * static_cast<float>(surprise - settings_.mirostat_tau);
  }
  return token;
}

void SamplerChain::run(Stage stage, const ChainRow& row) noexcept {
  const SampleParams& p = row.params;
  switch (stage) {
    case Stage::penalties:
      return penalize(row);
    case Stage::dry:
      return dry();
    case Stage::top_n_sigma:
      return top_n_sigma();
    case Stage::top_k:
      return p.top_k > 0 ? cut(static_cast<size_t>(p.top_k)) : void();
    case Stage::typ_p:
      return typical(settings_.typical_p);
    case Stage::top_p:
      return top_p(p.top_p);
    case Stage::min_p:
      return min_p(p.min_p);
    case Stage::xtc:
      return xtc(row);
    case Stage::temperature:
      return temper(p.temperature);
    case Stage::infill:
      return infill(row);
  }
}

// Sets candidates_ from the logits, the bias, the allowed and banned ids, and the mask of the row.
// Returns false if a logit is NaN, or if the largest logit is not finite.
bool SamplerChain::load(const ChainRow& row) noexcept {
  const SampleParams& p = row.params;
  candidates_.resize(static_cast<size_t>(vocab_));
  ordered_ = 0;
  Candidate* all = candidates_.data();
  int32_t next = 0;  // index into p.allowed, which is in ascending order
  for (int32_t id = 0; id < vocab_; id++) {
    bool in = !row.mask || (static_cast<uint32_t>(row.mask[id / 32]) >> (id % 32) & 1u);
    if (p.num_allowed >= 0) {
      while (next < p.num_allowed && p.allowed[next] < id) next++;
      in = in && next < p.num_allowed && p.allowed[next] == id;
    }
    all[id] = {in ? row.logits[id] : -INFINITY, id, 0};
  }
  for (int32_t i = 0; i < p.num_bias; i++) all[p.bias[i].id].logit += p.bias[i].value;
  for (int32_t i = 0; i < p.num_banned; i++) all[p.banned[i]].logit = -INFINITY;
  likely_stop_ = {-INFINITY, -1, 0};
  for (int32_t id : row.stops) {
    if (all[id].logit > -INFINITY && more_likely(all[id], likely_stop_)) likely_stop_ = all[id];
  }
  float largest = -INFINITY;
  bool numbers = true;
  for (const Candidate& c : candidates_) {
    numbers = numbers && c.logit == c.logit;
    largest = std::max(largest, c.logit);
  }
  keep_if([](const Candidate& c) { return c.logit > -INFINITY; });
  return numbers && std::isfinite(largest);
}

// Moves the `count` most likely candidates to the beginning, in descending order of logits.
// Of equal logits, the lower id comes first.
void SamplerChain::order(size_t count) noexcept {
  count = std::min(count, candidates_.size());
  if (count <= ordered_) return;
  const auto begin = candidates_.begin() + static_cast<int64_t>(ordered_);
  const auto end = candidates_.begin() + static_cast<int64_t>(count);
  if (end != candidates_.end()) std::nth_element(begin, end, candidates_.end(), more_likely);
  std::sort(begin, end, more_likely);
  ordered_ = count;
}

// Computes the probabilities of the candidates. Returns the logarithm of the sum of exp(logit).
double SamplerChain::weigh() noexcept {
  double top = -INFINITY, sum = 0;
  for (const Candidate& c : candidates_) top = std::max(top, static_cast<double>(c.logit));
  for (Candidate& c : candidates_) sum += c.p = std::exp(static_cast<double>(c.logit) - top);
  for (Candidate& c : candidates_) c.p /= sum;
  return top + std::log(sum);
}

// Drops each candidate c with keep(c) == false. The order of the other candidates stays the same.
template <class Keep>
void SamplerChain::keep_if(const Keep& keep) noexcept {
  size_t kept = 0, in_order = 0;
  for (size_t i = 0; i < candidates_.size(); i++) {
    if (!keep(candidates_[i])) continue;
    candidates_[kept++] = candidates_[i];
    in_order += i < ordered_;
  }
  candidates_.resize(kept);
  ordered_ = in_order;
}

// Drops all candidates but the `count` most likely ones.
void SamplerChain::cut(size_t count) noexcept {
  if (count >= candidates_.size()) return;
  order(count);
  candidates_.resize(count);
  ordered_ = std::min(ordered_, count);
}

void SamplerChain::penalize(const ChainRow& row) noexcept {
  const SampleParams& p = row.params;
  if (!row.place) return;
  for (Candidate& c : candidates_) {
    const int32_t place = row.place[c.id];
    if (place == 0) continue;
    const TokenCount& count = p.counts[place - 1];
    if (count.prompt > 0 || count.output > 0) {
      c.logit = c.logit > 0 ? c.logit / p.repetition : c.logit * p.repetition;
    }
    if (count.output > 0) {
      c.logit -= p.frequency * static_cast<float>(count.output) + p.presence;
    }
  }
  ordered_ = 0;
}

// Lowers the logit of each token that would extend a repetition of the last tokens of the text.
void SamplerChain::dry() noexcept {
  const ChainSettings& s = settings_;
  auto length = static_cast<int64_t>(tokens_.size());
  if (s.dry_penalty_last_n >= 0) length = std::min<int64_t>(length, s.dry_penalty_last_n);
  const int64_t allowed = s.dry_allowed_length, limit = dry_limit(length);
  if (s.dry_multiplier == 0 || s.dry_base < 1 || length <= allowed || limit < allowed) return;
  find_repeats(length);
  const int32_t* ids = tokens_.data() + tokens_.size() - length;
  for (int64_t i = 0; i + 1 < length; i++) {  // ids[i] ends a repetition, which ids[i + 1] extends
    const auto repeat = static_cast<int32_t>(std::min<int64_t>(repeats_[i], limit));
    if (repeat < allowed) continue;
    int32_t& extended = extends_[static_cast<size_t>(ids[i + 1])];
    extended = std::max(extended, repeat + 1);
  }
  // The exponent has a limit, so that the penalty is a finite number.
  const double most = s.dry_base > 1.000001f ? std::floor(88.7228391 / std::log(s.dry_base)) : 0;
  for (Candidate& c : candidates_) {
    const int32_t extended = extends_[static_cast<size_t>(c.id)];
    if (extended == 0) continue;
    double exponent = static_cast<double>(extended - 1 - allowed);
    if (most > 0) exponent = std::min(exponent, most);
    c.logit -= static_cast<float>(s.dry_multiplier * std::pow(s.dry_base, exponent));
  }
  for (int64_t i = 0; i < length; i++) extends_[static_cast<size_t>(ids[i])] = 0;
  ordered_ = 0;
}

// Returns the maximum length of a repetition at the end of the text (the last `length` tokens):
// a repetition must not extend over the last sequence breaker.
int64_t SamplerChain::dry_limit(int64_t length) const noexcept {
  const int32_t* last = tokens_.data() + tokens_.size() - 1;
  const int32_t* ids = settings_.dry_breaker_ids.data();
  for (int64_t back = 0; back < length; back++) {
    int64_t longest = 0;
    auto b = std::lower_bound(breakers_.begin(), breakers_.end(), last[-back],
                              [](const Breaker& x, int32_t id) { return x.first < id; });
    for (; b != breakers_.end() && b->first == last[-back]; ++b) {
      const int64_t count = b->end - b->begin;
      if (count > back + 1 || count <= longest) continue;
      if (std::equal(ids + b->begin, ids + b->end, last - back)) longest = count;
    }
    if (longest > 0) return back + 1 - longest;
  }
  return length;
}

// Sets repeats_. For each of the last `length` tokens except the last one, computes how many tokens
// that end with it equal the last tokens of the text (the Z algorithm on the reversed tokens).
void SamplerChain::find_repeats(int64_t length) noexcept {
  const int32_t* last = tokens_.data() + tokens_.size() - 1;
  const int64_t end = length - 1;  // repeats_[end - back] is for the token `back` before the last
  int64_t from = 0, until = 0;     // counted back, tokens [from, until) equal [0, until - from)
  for (int64_t back = 1; back < length; back++) {
    int64_t n = 0;
    if (back < until) n = std::min<int64_t>(until - back, repeats_[end - (back - from)]);
    while (back + n < length && last[-n] == last[-(back + n)]) n++;
    repeats_[static_cast<size_t>(end - back)] = static_cast<int32_t>(n);
    if (back + n > until) from = back, until = back + n;
  }
}

// Drops candidates with logits more than top_n_sigma standard deviations below the largest logit.
void SamplerChain::top_n_sigma() noexcept {
  if (settings_.top_n_sigma <= 0 || candidates_.size() <= 1) return;
  double sum = 0, squares = 0, largest = -INFINITY;
  int64_t count = 0;
  for (const Candidate& c : candidates_) {
    if (!(c.logit > -INFINITY)) continue;
    largest = std::max(largest, static_cast<double>(c.logit));
    sum += c.logit;
    count++;
  }
  const double mean = sum / static_cast<double>(count);
  for (const Candidate& c : candidates_) {
    if (c.logit > -INFINITY) squares += (c.logit - mean) * (c.logit - mean);
  }
  const double sigma = std::sqrt(squares / static_cast<double>(count));
  const double least = largest - static_cast<double>(settings_.top_n_sigma) * sigma;
  keep_if([=](const Candidate& c) { return static_cast<double>(c.logit) >= least; });
}

// Keeps the most typical candidates (with a surprise near the entropy)
// until their total probability exceeds p.
void SamplerChain::typical(float p) noexcept {
  if (p >= 1) return;
  const double log_sum = weigh();
  const auto surprise = [=](const Candidate& c) { return log_sum - static_cast<double>(c.logit); };
  double entropy = 0;
  for (const Candidate& c : candidates_) {
    if (c.p > 0) entropy += c.p * surprise(c);
  }
  const auto nearer = [&](const Candidate& a, const Candidate& b) {
    const double x = std::abs(surprise(a) - entropy), y = std::abs(surprise(b) - entropy);
    return x < y || (x == y && a.id < b.id);
  };
  const auto least = static_cast<size_t>(std::max(settings_.min_keep, 1));
  const auto begin = candidates_.begin();
  size_t kept = 0, in_order = 0;
  double sum = 0;
  while (kept < candidates_.size() && !(sum > static_cast<double>(p) && kept >= least)) {
    if (kept == in_order) {
      in_order = std::min(candidates_.size(), std::max(kFirstOrdered, 4 * in_order));
      const auto from = begin + static_cast<int64_t>(kept);
      const auto to = begin + static_cast<int64_t>(in_order);
      if (to != candidates_.end()) std::nth_element(from, to, candidates_.end(), nearer);
      std::sort(from, to, nearer);
    }
    sum += candidates_[kept++].p;
  }
  candidates_.resize(kept);
  ordered_ = 0;
}

// Keeps the most likely candidates until their total probability reaches p.
void SamplerChain::top_p(float p) noexcept {
  if (p >= 1) return;
  weigh();
  const auto least = static_cast<size_t>(std::max(settings_.min_keep, 1));
  size_t kept = 0;
  double sum = 0;
  while (kept < candidates_.size() && !(kept >= least && sum >= static_cast<double>(p))) {
    if (kept >= ordered_) order(std::max(kFirstOrdered, 4 * ordered_));
    sum += candidates_[kept++].p;
  }
  cut(kept);
}

// Keeps candidates with at least p times the probability of the most likely one.
void SamplerChain::min_p(float p) noexcept {
  if (p <= 0 || candidates_.empty()) return;
  float largest = -INFINITY;
  for (const Candidate& c : candidates_) largest = std::max(largest, c.logit);
  const double least = static_cast<double>(largest) + std::log(static_cast<double>(p));
  size_t count = 0;
  const auto enough = [=](const Candidate& c) { return static_cast<double>(c.logit) >= least; };
  for (const Candidate& c : candidates_) count += enough(c);
  if (count < static_cast<size_t>(std::max(settings_.min_keep, 0))) {
    return cut(static_cast<size_t>(settings_.min_keep));
  }
  keep_if(enough);
}

// With a chance of xtc_probability, drops all candidates that reach the threshold,
// except the least likely one of them.
void SamplerChain::xtc(const ChainRow& row) noexcept {
  const ChainSettings& s = settings_;
  if (s.xtc_probability <= 0 || s.xtc_threshold > 0.5f || candidates_.size() < 2) return;
  const double chance = uniform(row.params.seed ^ kXtcSeed, static_cast<uint64_t>(row.position));
  if (chance > static_cast<double>(s.xtc_probability)) return;
  weigh();
  const auto reaches = [&](const Candidate& c) {
    return c.p >= static_cast<double>(s.xtc_threshold);
  };
  size_t count = 0;
  Candidate last{INFINITY, -1, 0};
  for (const Candidate& c : candidates_) {
    if (!reaches(c)) continue;
    count++;
    if (more_likely(last, c)) last = c;
  }
  if (count < 2) return;
  const size_t left = candidates_.size() - (count - 1);
  if (left < static_cast<size_t>(std::max(s.min_keep, 0))) return;
  keep_if([&](const Candidate& c) { return !reaches(c) || c.id == last.id; });
}

// Divides the logits by the temperature, which depends on the entropy if dynatemp_range is set.
void SamplerChain::temper(float temperature) noexcept {
  const double range = static_cast<double>(settings_.dynatemp_range);
  if (range <= 0) return divide(temperature);
  if (candidates_.size() <= 1) return;
  const double low = std::max(0.0, static_cast<double>(temperature) - range);
  const double high = static_cast<double>(temperature) + range, log_sum = weigh();
  double entropy = 0;
  for (const Candidate& c : candidates_) {
    if (c.p > 0) entropy += c.p * (log_sum - static_cast<double>(c.logit));
  }
  const double share = std::max(0.0, entropy / std::log(static_cast<double>(candidates_.size())));
  const double exponent = static_cast<double>(settings_.dynatemp_exponent);
  divide(static_cast<float>(low + (high - low) * std::pow(share, exponent)));
}

// Divides the logits by `temperature`; 0 sets all logits but the largest to -infinity.
void SamplerChain::divide(float temperature) noexcept {
  if (temperature >= kGreedyBelow) {
    for (Candidate& c : candidates_) c.logit /= temperature;
    return;
  }
  order(1);
  for (size_t i = 1; i < candidates_.size(); i++) candidates_[i].logit = -INFINITY;
  ordered_ = std::min<size_t>(ordered_, 1);
}

// The sampler infill, for fill-in-the-middle: ends the text unless a continuation is likely enough.
// If the text of one candidate begins with the text of another, both count as one candidate.
void SamplerChain::infill(const ChainRow& row) noexcept {
  weigh();
  const auto stops = [&](const Candidate& c) {
    return std::binary_search(row.stops.begin(), row.stops.end(), c.id);
  };
  double of_texts = 0, of_stops = 0;
  for (const Candidate& c : candidates_) (stops(c) ? of_stops : of_texts) += c.p;
  if (3 * of_stops * static_cast<double>(candidates_.size()) > of_texts) return keep_if(stops);
  order(kMergedPrefixes);
  const Candidate likely = candidates_[0];
  merge_prefixes();
  const auto keep_likely = [&](double least) {
    keep_if([&](const Candidate& c) { return stops(c) || c.p >= least; });
    double sum = 0;
    for (const Candidate& c : candidates_) sum += c.p;
    for (Candidate& c : candidates_) c.p /= sum;
  };
  keep_likely(kInfillShare);
  size_t texts = 0;
  for (const Candidate& c : candidates_) texts += !stops(c);
  if (texts > 0) return keep_likely(1.0 / static_cast<double>(texts + 1));
  candidates_.resize(1);
  candidates_[0] = likely_stop_.id < 0 ? likely : likely_stop_;
  ordered_ = 1;
}

// If the text of one candidate begins with the text of another, moves the probability
// of the less likely candidate to the other. Only the most likely candidates are compared,
// because the number of pairs grows with the square of the number of candidates.
void SamplerChain::merge_prefixes() noexcept {
  const auto begins = [&](int32_t id, int32_t with) {
    while (id >= 0 && id != with) id = settings_.infill_prefixes[static_cast<size_t>(id)];
    return id == with;
  };
  const size_t count = std::min(kMergedPrefixes, candidates_.size());
  for (size_t i = 0; i < count; i++) {
    for (size_t j = 0; j < count; j++) {
      Candidate &first = candidates_[i], &second = candidates_[j];
      if (first.logit == -INFINITY) break;
      if (&first == &second || second.logit == -INFINITY) continue;
      if (!begins(second.id, first.id)) continue;
      Candidate& to = second.p > first.p ? second : first;
      Candidate& from = second.p > first.p ? first : second;
      to.p += from.p;
      from.p = 0;
      from.logit = -INFINITY;
    }
  }
}

// Drops candidates so that the surprise of the next token will be near mirostat_tau.
void SamplerChain::mirostat() noexcept {
  const double mu = static_cast<double>(settings_.mirostat_mu);
  weigh();
  if (settings_.mirostat == 2) {
    order(1);
    const int32_t likely = candidates_[0].id;
    keep_if([=](const Candidate& c) { return c.id == likely || -std::log2(c.p) <= mu; });
    weigh();
    return;
  }
  order(kMirostatTokens);
  const size_t pairs = std::min(kMirostatTokens, candidates_.size()) - 1;
  double products = 0, squares = 0;  // sums for the fit of the exponent of Zipf's law
  for (size_t i = 0; i < pairs && candidates_[i + 1].p > 0; i++) {
    const auto rank = static_cast<double>(i);
    const double t = std::log((rank + 2) / (rank + 1));
    products += t * std::log(candidates_[i].p / candidates_[i + 1].p);
    squares += t * t;
  }
  double kept = 1;
  if (squares > 0) {
    const double s = products / squares, excess = s - 1;
    const double ratio = excess / (1 - std::pow(static_cast<double>(vocab_), -excess));
    kept = std::pow(std::pow(2.0, mu) * ratio, 1 / s);
  }
  const auto all = static_cast<double>(candidates_.size());
  // If s is 1, `kept` is NaN, and all candidates are kept. If s is 0, it is 0, 1 or infinite.
  cut(kept < all ? static_cast<size_t>(std::max(kept, 1.0)) : candidates_.size());
  weigh();
}

// Returns the first id where the running sum of probabilities, in order of ids,
// exceeds u times their sum.
int32_t SamplerChain::draw(double u) noexcept {
  weigh();
  const auto lower = [](const Candidate& a, const Candidate& b) { return a.id < b.id; };
  if (!std::is_sorted(candidates_.begin(), candidates_.end(), lower)) {
    std::sort(candidates_.begin(), candidates_.end(), lower);
  }
  ordered_ = 0;
  double total = 0, running = 0;
  int32_t last = -1;
  for (const Candidate& c : candidates_) total += c.p;
  for (const Candidate& c : candidates_) {
    if (!(c.p > 0)) continue;
    last = c.id;
    running += c.p;
    if (running > u * total) break;
  }
  return last;
}

float SamplerChain::report(int32_t token, int32_t count, int32_t* ids, float* logprobs) noexcept {
  order(static_cast<size_t>(std::max(count, 0)));
  for (int32_t i = 0; i < count; i++) {
    const bool is_one = static_cast<size_t>(i) < candidates_.size();
    const Candidate c = is_one ? candidates_[static_cast<size_t>(i)] : Candidate{0, -1, 0};
    ids[i] = c.id;
    logprobs[i] = static_cast<float>(std::log(c.p));
  }
  for (const Candidate& c : candidates_) {
    if (c.id == token) return static_cast<float>(std::log(c.p));
  }
  return NAN;
}

}  // namespace cpuserve
