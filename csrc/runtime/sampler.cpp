#include "runtime/sampler.h"

#include <algorithm>
#include <memory>

#include "base/check.h"

namespace cpuserve {

Sampler::Sampler(int64_t num_slots, int64_t vocab, int64_t max_outputs)
    : vocab_(vocab), max_outputs_(max_outputs), slots_(static_cast<size_t>(num_slots)) {}

Sampler::Slot& Sampler::slot(int64_t index) {
  check_argument(index >= 0 && index < static_cast<int64_t>(slots_.size()), "there is no slot ",
                 index, "; the number of slots is ", slots_.size());
  return slots_[static_cast<size_t>(index)];
}

void Sampler::check_ids(const char* what, Span<const int32_t> ids) const {
  for (int32_t id : ids) {
    check_argument(id >= 0 && id < vocab_, what, " has token id ", id,
                   ", but the vocabulary ends at ", vocab_);
  }
}

void Sampler::admit(int64_t index, const SlotRequest& r) {
  Slot& s = slot(index);
  check_ids("scored_ids", r.scored_ids);
  check_ids("stop_ids", r.stop_ids);
  check_ids("prompt", r.prompt);
  check_ids("output", r.output);
  check_ids("exempt_ids", r.exempt_ids);
  const Span<const int32_t> allowed = r.allowed_token_ids.value_or(Span<const int32_t>{});
  check_ids("allowed_token_ids", allowed);

  Slot fresh;
  fresh.used = true;
  fresh.banned.assign(r.stop_ids.begin(), r.stop_ids.end());
  fresh.num_stops = r.stop_ids.size();
  fresh.banned.resize(fresh.banned.size() + r.bad_word_ids.size());
  for (const std::vector<int32_t>& word : r.bad_word_ids) {
    check_ids("bad_word_ids", word);
    check_argument(!word.empty(), "bad_word_ids has an empty word");
    fresh.bad_ids.insert(fresh.bad_ids.end(), word.begin(), word.end());
    fresh.bad_ends.push_back(static_cast<int32_t>(fresh.bad_ids.size()));
    fresh.most_recent = std::max(fresh.most_recent, word.size() - 1);
  }
  fresh.recent.reserve(fresh.most_recent);
  for (int32_t id : r.output) add_recent(fresh, id);
  if (r.banned_ngram_size > 0) {
    const int64_t room = r.output.size() + max_outputs_;
    fresh.repeats =
        std::make_unique<RepeatBan>(r.banned_ngram_size, r.banned_ngram_window, r.exempt_ids, room);
    for (int32_t id : r.output) fresh.repeats->append(id);
    fresh.banned.resize(fresh.banned.size() + static_cast<size_t>(room));
  }
  fresh.scored.assign(r.scored_ids.begin(), r.scored_ids.end());
  fresh.allowed.assign(allowed.begin(), allowed.end());
  std::sort(fresh.allowed.begin(), fresh.allowed.end());
  fresh.allowed.erase(std::unique(fresh.allowed.begin(), fresh.allowed.end()), fresh.allowed.end());
  for (const auto& [id, value] : r.logit_bias) {
    check_ids("logit_bias", {&id, 1});
    fresh.bias.push_back({id, value});
  }
  fresh.outputs_until_stop = std::max<int64_t>(0, r.min_tokens - r.output.size());
  SampleParams& p = fresh.params;
  p.temperature = r.temperature;
  p.top_p = r.top_p;
  p.min_p = r.min_p;
  p.top_k = r.top_k;
  p.repetition = r.repetition_penalty;
  p.frequency = r.frequency_penalty;
  p.presence = r.presence_penalty;
  p.seed = r.seed;
  p.bias = fresh.bias.data();
  p.num_bias = static_cast<int32_t>(fresh.bias.size());
  p.allowed = fresh.allowed.data();
  p.num_allowed = r.allowed_token_ids ? static_cast<int32_t>(fresh.allowed.size()) : -1;
  ban(fresh);
  const bool penalizes = p.repetition != 1 || p.frequency != 0 || p.presence != 0;
  if (penalizes && r.penalty_window != 0) make_counts(fresh, r);
  if (r.chain) {
    fresh.chain =
        std::make_unique<SamplerChain>(*r.chain, vocab_, r.prompt, r.output, max_outputs_);
  }
  s = std::move(fresh);  // moving keeps the storage of vectors, so pointers in params stay valid
}

// Appends a token to s.recent, the last `most_recent` ids of the output, without an allocation.
void Sampler::add_recent(Slot& s, int32_t token) noexcept {
  if (s.most_recent == 0) return;
  if (s.recent.size() == s.most_recent) s.recent.erase(s.recent.begin());
  s.recent.push_back(token);
}

// Sets the banned ids for the next token: stop ids, and last ids of bad words and of n-grams.
void Sampler::ban(Slot& s) noexcept {
  const bool stops = s.outputs_until_stop > 0;
  int64_t count = s.num_stops;
  int32_t begin = 0;
  for (int32_t end : s.bad_ends) {
    const auto before = static_cast<size_t>(end - begin - 1);
    const int32_t* word = s.bad_ids.data() + begin;
    if (before <= s.recent.size() && std::equal(word, word + before, s.recent.end() - before)) {
      s.banned[static_cast<size_t>(count++)] = word[before];
    }
    begin = end;
  }
  if (s.repeats) count += s.repeats->write(s.banned.data() + count);
  const int64_t skipped = stops ? 0 : s.num_stops;
  s.params.banned = s.banned.data() + skipped;
  s.params.num_banned = static_cast<int32_t>(count - skipped);
}

// Allocates `counts` for all tokens that the request can have, and `place` for the vocabulary.
// Pages that are never touched take no memory.
void Sampler::make_counts(Slot& s, const SlotRequest& r) {
  s.capacity = std::min(vocab_, r.prompt.size() + r.output.size() + max_outputs_);
  s.counts.reset(new TokenCount[static_cast<size_t>(s.capacity)]);
  s.place.reset(new int32_t[static_cast<size_t>(vocab_)]());
  s.params.counts = s.counts.get();
  if (r.penalty_window < 0) {
    for (int32_t id : r.prompt) count_of(s, id)->prompt++;
    for (int32_t id : r.output) count_of(s, id)->output++;
    return;
  }
  s.window_size = static_cast<size_t>(
      std::min(r.penalty_window, r.prompt.size() + r.output.size() + max_outputs_));
  s.window.reserve(s.window_size);
  for (int32_t id : r.prompt) count(s, id);
  for (int32_t id : r.output) count(s, id);
}

// Counts a token as output. If the window of the last tokens is full, its oldest token leaves it.
void Sampler::count(Slot& s, int32_t token) noexcept {
  if (s.window_size > 0 && s.window.size() < s.window_size) {
    s.window.push_back(token);
  } else if (s.window_size > 0) {
    count_of(s, s.window[s.oldest])->output--;
    s.window[s.oldest] = token;
    s.oldest = (s.oldest + 1) % s.window_size;
  }
  count_of(s, token)->output++;
}

TokenCount* Sampler::count_of(Slot& s, int32_t token) noexcept {
  int32_t& place = s.place[static_cast<size_t>(token)];
  if (place == 0) {
    s.counts[static_cast<size_t>(s.params.num_counts)] = {token, 0, 0};
    place = ++s.params.num_counts;
  }
  return &s.counts[static_cast<size_t>(place - 1)];
}

void Sampler::append(int64_t index, int32_t token) noexcept {
  if (token < 0) return;  // the row got no token
  Slot& s = slots_[static_cast<size_t>(index)];
  if (s.outputs_until_stop > 0 || !s.bad_ends.empty() || s.repeats) {
    s.outputs_until_stop -= s.outputs_until_stop > 0;
    add_recent(s, token);
    if (s.repeats) s.repeats->append(token);
    ban(s);
  }
  if (s.chain) s.chain->append(token);
  if (!s.counts) return;
  if (s.place[static_cast<size_t>(token)] == 0 && s.params.num_counts == s.capacity) return;
  count(s, token);
}

int32_t Sampler::sample(int64_t index, const float* logits, const int32_t* mask,
                        int32_t position) noexcept {
  const Slot& s = slots_[static_cast<size_t>(index)];
  const Span<const int32_t> stops(s.banned.data(), s.outputs_until_stop > 0 ? 0 : s.num_stops);
  return s.chain->sample({logits, s.params, mask, s.place.get(), stops, position});
}

void Sampler::release(int64_t index) { slot(index) = Slot{}; }

}  // namespace cpuserve
