// The experts that the tokens of a step use, and the order of the routed rows.
// A routed row is a pair of a token and one of its experts (or its adapter).
// Routed rows are sorted by expert, then by token.
#pragma once
#include <cstdint>
#include <vector>

#include "kernels/table.h"

namespace cpuserve {

class Routing {
 public:
  // Allocates all arrays for the largest step, so that build() allocates nothing.
  Routing(int64_t max_rows, int64_t max_experts)
      : tokens_(static_cast<size_t>(max_rows)),
        places_(static_cast<size_t>(max_rows)),
        first_(static_cast<size_t>(max_experts + 1)) {}

  // Sorts the routed rows of a step. Row t of `ids` begins with the ids of the `chosen` experts
  // of token t; an id of -1 adds no routed row.
  void build(int32_t experts, int32_t chosen, const Rows& ids, int64_t tokens) noexcept;

  int64_t experts() const noexcept { return experts_; }
  // Expert e has the routed rows [first_row(e), first_row(e) + rows(e)).
  int64_t first_row(int64_t expert) const noexcept { return first_[static_cast<size_t>(expert)]; }
  int64_t rows(int64_t expert) const noexcept { return first_row(expert + 1) - first_row(expert); }
  int64_t rows() const noexcept { return first_row(experts_); }
  // Returns the token of a routed row.
  int64_t token(int64_t row) const noexcept { return tokens_[static_cast<size_t>(row)]; }
  // Returns the routed row for expert number `rank` of a token, where 0 is the best expert,
  // or -1 if there is no such row.
  int64_t row(int64_t token, int64_t rank) const noexcept {
    return places_[static_cast<size_t>(token * chosen_ + rank)];
  }

 private:
  std::vector<int32_t> tokens_, places_;
  std::vector<int64_t> first_;
  int64_t experts_ = 0, chosen_ = 0;
};

}  // namespace cpuserve
