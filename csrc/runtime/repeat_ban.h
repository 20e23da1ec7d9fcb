// Bans the tokens that would complete an n-gram which the output already has.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/span.h"

namespace cpuserve {

// size    the number of tokens of an n-gram, at least 1
// window  how many of the last output tokens an n-gram has to lie in; negative: all
// exempt  ids that are never banned
class RepeatBan {
 public:
  // room: the number of tokens that the output can get, so that append allocates nothing.
  RepeatBan(int64_t size, int64_t window, Span<const int32_t> exempt, int64_t room)
      : size_(size), window_(window), exempt_(exempt.begin(), exempt.end()) {
    std::sort(exempt_.begin(), exempt_.end());
    tokens_.reserve(static_cast<size_t>(room));
    matches_.reserve(static_cast<size_t>(room));
  }

  // Adds a token to the output, in a time that is proportional to its length.
  void append(int32_t token) noexcept {
    if (tokens_.size() == tokens_.capacity()) return;
    for (size_t i = tokens_.size(); i-- > 0;) {
      matches_[i] = tokens_[i] != token ? 0 : 1 + (i > 0 ? matches_[i - 1] : 0);
    }
    tokens_.push_back(token);
    matches_.push_back(0);
  }

  // Writes the banned ids for the next token to `ids`, which has room for the output.
  // Returns their number; an id may be there twice.
  int64_t write(int32_t* ids) const noexcept {
    const auto length = static_cast<int64_t>(tokens_.size());
    const int64_t begin = window_ < 0 ? 0 : std::max<int64_t>(0, length - window_);
    int64_t count = 0;
    for (int64_t last = begin + size_ - 1; last < length; last++) {
      if (size_ > 1 && matches_[static_cast<size_t>(last - 1)] < size_ - 1) continue;
      const int32_t id = tokens_[static_cast<size_t>(last)];
      if (!std::binary_search(exempt_.begin(), exempt_.end(), id)) ids[count++] = id;
    }
    return count;
  }

 private:
  int64_t size_, window_;
  std::vector<int32_t> exempt_, tokens_;
  // For each position but the last: how many tokens that end there equal the end of the output.
  std::vector<int64_t> matches_;
};

}  // namespace cpuserve
