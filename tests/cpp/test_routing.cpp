// Tests the choice of experts and the order of routed rows.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <set>
#include <vector>

#include "main.h"
#include "runtime/operations/experts.h"
#include "runtime/routing.h"

using namespace cpuserve;

namespace {

RouteOp op(int32_t experts, int32_t chosen, Score score = Score::softmax, bool renormalize = false,
           float scale = 1) {
  return {0, 1, experts, chosen, score, renormalize, scale, kNone};
}

// The row that `of` makes of these logits: ids, then weights.
std::vector<float> route(const RouteOp& of, const std::vector<float>& logits,
                         const float* bias = nullptr) {
  std::vector<float> out(static_cast<size_t>(2 * of.chosen)), scratch(3 * logits.size());
  route_row(of, logits.data(), bias, out.data(), scratch.data());
  return out;
}

bool close(float a, double b) { return std::fabs(a - b) < 1e-6; }

}  // namespace

TEST(the_best_experts_come_first_and_of_equal_scores_the_lower_id) {
  const std::vector<float> row = route(op(5, 3), {1, 3, 2, 3, 0});
  EXPECT(row[0] == 1 && row[1] == 3 && row[2] == 2);
  const double sum = std::exp(1) + 2 * std::exp(3) + std::exp(2) + 1;
  EXPECT(close(row[3], std::exp(3) / sum) && close(row[5], std::exp(2) / sum));
}

TEST(every_number_of_experts_is_chosen_as_if_all_were_sorted) {
  std::mt19937 random(1);
  for (const int32_t experts : {1, 2, 7, 64, 257}) {
    for (const int32_t chosen : {1, 2, 8, 200}) {
      if (chosen > experts) continue;
      std::vector<float> logits(static_cast<size_t>(experts)), ids(logits.size());
      for (float& logit : logits) logit = static_cast<float>(random() % 16);  // many are equal
      std::iota(ids.begin(), ids.end(), 0.0f);
      std::stable_sort(ids.begin(), ids.end(), [&](float a, float b) {
        return logits[static_cast<size_t>(a)] > logits[static_cast<size_t>(b)];
      });
      const std::vector<float> row = route(op(experts, chosen), logits);
      EXPECT(std::equal(ids.begin(), ids.begin() + chosen, row.begin()));
    }
  }
}

TEST(weights_follow_the_score_and_the_scale) {
  const std::vector<float> logits{0.5f, -1, 2};
  const auto sigmoid = [](double x) { return 1 / (1 + std::exp(-x)); };
  const std::vector<float> s = route(op(3, 2, Score::sigmoid, true, 1.5f), logits);
  const double sum = sigmoid(2) + sigmoid(0.5);
  EXPECT(close(s[2], 1.5 * sigmoid(2) / sum) && close(s[3], 1.5 * sigmoid(0.5) / sum));
  const std::vector<float> c = route(op(3, 2, Score::chosen_softmax), logits);
  EXPECT(close(c[2] + c[3], 1) && close(c[2] / c[3], std::exp(1.5)));
}

TEST(near_softmax_counts_experts_that_are_near_and_not_chosen_before) {
  RouteOp of = op(4, 2, Score::near_softmax);
  of.near = 0.1f;
  const std::vector<float> row = route(of, {1.95f, 2, 1.85f, -1});
  EXPECT(row[0] == 1 && row[1] == 0);
  EXPECT(close(row[2], 1 / (1 + std::exp(-0.05) + std::exp(-0.15))));
  EXPECT(close(row[3], 1 / (1 + std::exp(-0.1))));
  // Of negative logits none is near: the quotient of the best one and itself is 0.
  const std::vector<float> low = route(of, {-3, -1, -2, -4});
  EXPECT(low[0] == 1 && close(low[2], 1));
}

TEST(chosen_sigmoids_are_of_the_experts_with_the_highest_sums_of_logit_and_bias) {
  const float bias[] = {0, 2.5f, 0};
  const std::vector<float> row = route(op(3, 2, Score::chosen_sigmoid, true), {1, -1, 1.25f}, bias);
  const double weights[] = {1 / (1 + std::exp(1.0)), 1 / (1 + std::exp(-1.25))};
  EXPECT(row[0] == 1 && row[1] == 2);
  EXPECT(close(row[2], weights[0] / (weights[0] + weights[1])));
}

TEST(identities_are_chosen_but_have_no_routed_rows) {
  RouteOp of = op(4, 3);
  of.identities = 2;
  const std::vector<float> row = route(of, {1, 2, 3, 0});
  EXPECT(row[0] == -1 && row[1] == 1 && row[2] == 0);
  EXPECT(row[3] > row[4] && row[4] > row[5] && row[5] > 0);
}

TEST(a_bias_chooses_but_does_not_weigh) {
  const float bias[] = {0, 0, 5};
  const std::vector<float> row = route(op(3, 1, Score::sigmoid), {3, 2, -3}, bias);
  EXPECT(row[0] == 2 && close(row[1], 1 / (1 + std::exp(3.0))));
}

TEST(only_experts_of_the_best_groups_are_chosen) {
  RouteOp of = op(6, 3, Score::sigmoid);
  of.groups = 3;
  of.kept = 2;
  // The best expert is in the group of the second one, but the sums of two leave that group out.
  const std::vector<float> logits{2, 1.9f, 3, -9, 1.5f, 1.6f};
  of.best = 1;
  std::vector<float> row = route(of, logits);
  EXPECT(row[0] == 2 && row[1] == 0 && row[2] == 1);
  of.best = 2;
  row = route(of, logits);
  EXPECT(row[0] == 0 && row[1] == 1 && row[2] == 5);
  EXPECT(close(row[3], 1 / (1 + std::exp(-2.0))));
  of.kept = 1;
  of.chosen = 2;
  row = route(of, {1, 1, 1, 1, 1, 1});  // of equal groups, the first
  EXPECT(row[0] == 0 && row[1] == 1);
}

TEST(logits_that_are_not_numbers_choose_different_experts) {
  const float nan = std::numeric_limits<float>::quiet_NaN(), inf = INFINITY;
  for (const std::vector<float>& logits :
       {std::vector<float>{nan, nan, nan, nan}, {1, nan, -inf, -inf}, {-inf, -inf, -inf, -inf}}) {
    const std::vector<float> row = route(op(4, 4), logits);
    const std::set<float> ids(row.begin(), row.begin() + 4);
    EXPECT(ids == (std::set<float>{0, 1, 2, 3}));
    const std::vector<float> two = route(op(4, 2), logits);
    EXPECT(two[0] != two[1] && two[0] >= 0 && two[0] < 4 && two[1] >= 0 && two[1] < 4);
  }
}

TEST(routed_rows_are_sorted_by_expert_then_token) {
  const RouteOp of = op(6, 2);
  // Experts of four tokens, with room for weights. Nobody chooses 1 and 5.
  std::vector<float> chosen{4, 0, 0, 0, 2, 4, 0, 0, 0, 4, 0, 0, 3, 2, 0, 0};
  const Rows rows{chosen.data(), 4 * sizeof(float), 4, ActFormat::f32};
  Routing routing(10, 8);
  for (int twice = 0; twice < 2; twice++) {  // a step leaves nothing behind
    routing.build(of.experts, of.chosen, rows, 4);
    const std::vector<int64_t> want{2, 0, 2, 1, 3, 0};
    for (int64_t e = 0; e < 6; e++) EXPECT(routing.rows(e) == want[static_cast<size_t>(e)]);
    const int64_t tokens[] = {0, 2, 1, 3, 3, 0, 1, 2};
    for (int64_t r = 0; r < 8; r++) EXPECT(routing.token(r) == tokens[r]);
    for (int64_t t = 0; t < 4; t++) {
      for (int64_t rank = 0; rank < 2; rank++) {
        const int64_t row = routing.row(t, rank);
        const auto expert = static_cast<int64_t>(chosen[static_cast<size_t>(t * 4 + rank)]);
        EXPECT(routing.token(row) == t && row >= routing.first_row(expert));
        EXPECT(row < routing.first_row(expert) + routing.rows(expert));
      }
    }
  }
}

TEST(a_token_without_expert_has_no_row) {
  std::vector<float> chosen{1, 2, -1, 0, 1, 3, -1, 0, 0, 4};  // ids and weights of five tokens
  const Rows rows{chosen.data(), 2 * sizeof(float), 2, ActFormat::f32};
  Routing routing(5, 2);
  routing.build(2, 1, rows, 5);
  EXPECT(routing.rows() == 3 && routing.rows(0) == 1 && routing.rows(1) == 2);
  EXPECT(routing.token(0) == 4 && routing.token(1) == 0 && routing.token(2) == 2);
  const int64_t want[] = {1, -1, 2, -1, 0};
  for (int64_t t = 0; t < 5; t++) EXPECT(routing.row(t, 0) == want[t]);
  for (float& id : chosen) id = -1;
  routing.build(2, 1, rows, 5);
  EXPECT(routing.rows() == 0 && routing.row(3, 0) == -1);
}
