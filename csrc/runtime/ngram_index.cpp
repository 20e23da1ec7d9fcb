#include "runtime/ngram_index.h"

#include <algorithm>
#include <cstdlib>
#include <new>

#include "base/check.h"

namespace cpuserve {
namespace {

// cpuserve/core/speculation/ngram.py has the same numbers.
constexpr double kGain = 0.1, kSharedGain = 0.01;

// An entry is 32 x (the position after an n-gram) + (its size - least_); 0 = unused.
constexpr int32_t kMostSizes = 32;
constexpr int64_t kMostTokens = 1 << 27;
// At most 5 of 8 entries of a table are used, so that a search takes two probes on average.
constexpr uint64_t kUsed = 5, kOf = 8;
constexpr int64_t kLeastTokens = 256;  // the tokens of the smallest table

uint64_t hash_of(const int32_t* ids, size_t size) {
  uint64_t h = size;
  for (size_t i = 0; i < size; i++) {
    h = (h ^ static_cast<uint32_t>(ids[i])) * 0x9e3779b97f4a7c15u;
    h ^= h >> 32;
  }
  return h * 0xd6e8feb86659fd93u;
}

// Maps a hash to a place of a table: its upper 32 bits, scaled to the capacity.
uint64_t place_of(uint64_t hash, uint64_t capacity) { return (hash >> 32) * capacity >> 32; }

}  // namespace

NgramChances::NgramChances() {
  for (int64_t n = 0; n <= kLongest; n++) {
    right[n] = static_cast<double>(n) / static_cast<double>(n + 4);
  }
}

NgramIndex::NgramIndex(int32_t least, int32_t most, std::shared_ptr<NgramChances> shared,
                       int64_t tokens)
    : shared_(std::move(shared)), chances_(*shared_) {
  check_argument(least >= 1 && most >= least && most - least < kMostSizes,
                 "an index has n-grams of 1 or more tokens, and of at most ", kMostSizes,
                 " sizes, not of ", least, " to ", most, " tokens");
  check_argument(tokens >= 0 && tokens < kMostTokens, "an index has at most ", kMostTokens - 1,
                 " tokens, not ", tokens);
  least_ = static_cast<size_t>(least);
  most_ = static_cast<size_t>(most);
  add_table(std::max(tokens, kLeastTokens));
}

void NgramIndex::add_table(int64_t tokens) {
  const uint64_t grams = static_cast<uint64_t>(tokens) * (most_ - least_ + 1);
  const uint64_t capacity = grams * kOf / kUsed + 1;
  // Memory from calloc has no pages until they are used, so a large table delays no step.
  auto* entries = static_cast<uint32_t*>(std::calloc(capacity, sizeof(uint32_t)));
  if (!entries) throw std::bad_alloc();
  tables_.push_back({{entries, std::free}, capacity, 0});
  text_.reserve(text_.size() + static_cast<size_t>(tokens));
}

void NgramIndex::add(Span<const int32_t> tokens) {
  check_argument(this->tokens() + tokens.size() < kMostTokens, "an index has at most ",
                 kMostTokens - 1, " tokens");
  source_ = length_ = 0;
  for (int32_t token : tokens) append(token);
}

void NgramIndex::advance(Span<const int32_t> tokens) {
  check_argument(this->tokens() + tokens.size() < kMostTokens, "an index has at most ",
                 kMostTokens - 1, " tokens");
  for (int32_t token : tokens) {
    check(token);
    append(token);
  }
  look_up();
}

// Learns whether the guess for the next token was right, and moves the source by one token.
// After a wrong guess the index goes on copying, with a match of length 0.
void NgramIndex::check(int32_t token) {
  if (source_ == 0) return;
  const bool right = text_[source_] == token;
  const size_t length = std::min(length_, static_cast<size_t>(NgramChances::kLongest));
  chances_.right[length] += kGain * (right - chances_.right[length]);
  shared_->right[length] += kSharedGain * (right - shared_->right[length]);
  source_++;
  length_ = right ? length_ + 1 : 0;
}

// Appends a token, after recording the n-grams that end just before it.
void NgramIndex::append(int32_t token) {
  const size_t end = text_.size();
  for (size_t size = most_; size >= least_; size--) {
    if (size <= end) record(size, end);
  }
  text_.push_back(token);
}

bool NgramIndex::matches(uint32_t entry, size_t size, size_t end) const {
  if (entry % kMostSizes != size - least_) return false;
  const int32_t* found = text_.data() + entry / kMostSizes - size;
  return std::equal(found, found + size, text_.data() + end - size);
}

void NgramIndex::record(size_t size, size_t end) {
  const uint64_t hash = hash_of(text_.data() + end - size, size);
  Table& table = tables_.back();
  const auto mine = static_cast<uint32_t>(end * kMostSizes + size - least_);
  for (uint64_t at = place_of(hash, table.capacity);; at = at + 1 < table.capacity ? at + 1 : 0) {
    uint32_t& entry = table.entries[at];
    if (entry != 0 && !matches(entry, size, end)) continue;
    table.used += entry == 0;
    entry = mine;
    break;
  }
  if (table.used * kOf >= table.capacity * kUsed) add_table(static_cast<int64_t>(end));
}

// Returns the position after the latest occurrence of the last `size` tokens; 0: there is none.
size_t NgramIndex::find(size_t size) const {
  const size_t end = text_.size();
  if (size > end) return 0;
  const uint64_t hash = hash_of(text_.data() + end - size, size);
  for (size_t i = tables_.size(); i-- > 0;) {
    const Table& table = tables_[i];
    uint64_t at = place_of(hash, table.capacity);
    while (const uint32_t entry = table.entries[at]) {
      if (matches(entry, size, end)) return entry / kMostSizes;
      at = at + 1 < table.capacity ? at + 1 : 0;
    }
  }
  return 0;
}

// Looks for a match of the last tokens that is longer than the present match.
void NgramIndex::look_up() {
  for (size_t size = most_; size >= least_ && size > length_; size--) {
    if (const size_t source = find(size)) {
      source_ = source;
      length_ = size;
      return;
    }
  }
}

std::vector<int32_t> NgramIndex::guess(int64_t count) const {
  std::vector<int32_t> out;
  if (source_ == 0) return out;
  // Where the text ends, the tokens after the source are repeated.
  const size_t period = text_.size() - source_;
  for (size_t i = 0; i < static_cast<size_t>(std::max<int64_t>(count, 0)); i++) {
    out.push_back(text_[source_ + i % period]);
  }
  return out;
}

std::vector<double> NgramIndex::chances(int64_t count) const {
  std::vector<double> out;
  for (int64_t i = 0; i < count; i++) {
    const int64_t length = std::min(static_cast<int64_t>(length_) + i, NgramChances::kLongest);
    out.push_back(chances_.right[length]);
  }
  return out;
}

int64_t NgramIndex::bytes() const {
  uint64_t sum = text_.capacity() * sizeof(int32_t);
  for (const Table& table : tables_) sum += table.capacity * sizeof(uint32_t);
  return static_cast<int64_t>(sum);
}

}  // namespace cpuserve
