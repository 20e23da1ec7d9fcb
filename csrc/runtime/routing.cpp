#include "runtime/routing.h"

#include <algorithm>

#include "runtime/rows.h"

namespace cpuserve {

// Sorts the routed rows by counting. The loop visits the tokens in order,
// so the routed rows of an expert are in the order of their tokens.
void Routing::build(int32_t experts, int32_t chosen, const Rows& ids, int64_t tokens) noexcept {
  experts_ = experts;
  chosen_ = chosen;
  const auto expert_of = [&](int64_t token, int64_t rank) {
    return static_cast<int64_t>(reinterpret_cast<const float*>(row_of(ids, token))[rank]);
  };
  // Returns the end of the rows of an expert, which is also the first row of the next expert.
  const auto end_of = [&](int64_t expert) -> int64_t& {
    return first_[static_cast<size_t>(expert + 1)];
  };
  std::fill_n(first_.begin(), experts_ + 1, 0);
  for (int64_t t = 0; t < tokens; t++) {
    for (int64_t r = 0; r < chosen_; r++) {
      if (const int64_t e = expert_of(t, r); e >= 0) end_of(e)++;
    }
  }
  for (int64_t e = 0; e < experts_; e++) end_of(e) += first_[static_cast<size_t>(e)];
  for (int64_t t = 0; t < tokens; t++) {
    for (int64_t r = 0; r < chosen_; r++) {
      const int64_t e = expert_of(t, r), row = e < 0 ? -1 : first_[static_cast<size_t>(e)]++;
      places_[static_cast<size_t>(t * chosen_ + r)] = static_cast<int32_t>(row);
      if (row >= 0) tokens_[static_cast<size_t>(row)] = static_cast<int32_t>(t);
    }
  }
  // The loop above has moved each entry of first_ to the first row of the next expert.
  for (int64_t e = experts_; e > 0; e--) {
    first_[static_cast<size_t>(e)] = first_[static_cast<size_t>(e - 1)];
  }
  first_[0] = 0;
}

}  // namespace cpuserve
