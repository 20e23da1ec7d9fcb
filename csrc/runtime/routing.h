// Which experts the tokens of a step go to, and the order of their rows. A routed row is one token
// for one of its experts; routed rows are sorted by expert, then token.
#pragma once
#include <cstdint>
#include <vector>

#include "kernels/table.h"
#include "runtime/operations/experts.h"

namespace cpuserve {

// Writes the row of a Route op for one token: the ids of the chosen experts, best first (of equal
// scores the lower id first), then their weights. `scratch` holds 3 * experts floats. Logits that
// are NaN lead to NaN weights and valid ids.
void route_row(const RouteOp& op, const float* logits, const float* bias, float* out,
               float* scratch) noexcept;

class Routing {
 public:
  // Sizes everything for the largest step, so that build() allocates nothing.
  Routing(int64_t max_rows, int64_t max_experts)
      : tokens_(static_cast<size_t>(max_rows)),
        places_(static_cast<size_t>(max_rows)),
        first_(static_cast<size_t>(max_experts + 1)) {}

  // Sorts the rows of a step from the ids of `chosen` experts for each token; an id of -1 adds no
  // row.
  void build(int32_t experts, int32_t chosen, const Rows& ids, int64_t tokens) noexcept;

  int64_t experts() const noexcept { return experts_; }
  // The routed rows of an expert.
  int64_t first_row(int64_t expert) const noexcept { return first_[static_cast<size_t>(expert)]; }
  int64_t rows(int64_t expert) const noexcept { return first_row(expert + 1) - first_row(expert); }
  int64_t rows() const noexcept { return first_row(experts_); }
  // The token of a routed row.
  int64_t token(int64_t row) const noexcept { return tokens_[static_cast<size_t>(row)]; }
  // The routed row of a token's expert of this rank (0: the best), or -1.
  int64_t row(int64_t token, int64_t rank) const noexcept {
    return places_[static_cast<size_t>(token * chosen_ + rank)];
  }

 private:
  std::vector<int32_t> tokens_, places_;
  std::vector<int64_t> first_;
  int64_t experts_ = 0, chosen_ = 0;
};

}  // namespace cpuserve
