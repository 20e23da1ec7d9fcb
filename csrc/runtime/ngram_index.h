// Guesses the next tokens of a text: the tokens after an earlier occurrence of its last tokens.
// cpuserve/core/speculation/ngram.py has the same index in Python, and says what chances are.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "base/span.h"

namespace cpuserve {

// For each length of a match, the probability that a guess after such a match is right.
// Longer matches than `kLongest` tokens count as matches of kLongest tokens.
struct NgramChances {
  static constexpr int64_t kLongest = 16;
  double right[kLongest + 1];
  NgramChances();
};

// The positions of all n-grams of `least` to `most` tokens in a growing text.
//
// A table has open addressing. An entry has the position after an n-gram and the size of the
// n-gram; the n-gram itself is read from the text, so a match is never wrong. Tables do not grow,
// because copying the entries would delay a step. When a table is full, a new table follows it,
// for as many tokens as the text has. So a lookup tries the newest table first.
class NgramIndex {
 public:
  // shared: the chances of new texts, which all texts update.
  // tokens: the number of tokens that the first table is made for.
  NgramIndex(int32_t least, int32_t most, std::shared_ptr<NgramChances> shared, int64_t tokens);

  // Appends tokens to the text, without a guess, and forgets the last match.
  void add(Span<const int32_t> tokens);
  // Appends tokens to the text, learns which of them were guessed, and looks for the next match.
  void advance(Span<const int32_t> tokens);
  // Returns `count` tokens that may follow the text; none if nothing was found.
  std::vector<int32_t> guess(int64_t count) const;
  // Returns for each of the first `count` guesses the probability that it is right
  // if all guesses before it are.
  std::vector<double> chances(int64_t count) const;
  int64_t tokens() const { return static_cast<int64_t>(text_.size()); }
  int64_t bytes() const;

 private:
  struct Table {
    std::unique_ptr<uint32_t[], void (*)(void*)> entries;
    uint64_t capacity, used;
  };

  void add_table(int64_t tokens);
  void check(int32_t token);
  void append(int32_t token);
  void look_up();
  bool matches(uint32_t entry, size_t size, size_t end) const;
  void record(size_t size, size_t end);
  size_t find(size_t size) const;

  size_t least_, most_;
  std::vector<int32_t> text_;
  std::vector<Table> tables_;
  // The token at position source_ is the guess for the next token (0: there is no guess),
  // because the length_ tokens before it equal the last length_ tokens of the text.
  size_t source_ = 0, length_ = 0;
  std::shared_ptr<NgramChances> shared_;
  NgramChances chances_;
};

}  // namespace cpuserve
