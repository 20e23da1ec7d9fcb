#include "runtime/routing.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "runtime/rows.h"

namespace cpuserve {
namespace {

constexpr float kLinear = 20.0f;  // above it, softplus(x) is x in fp32

// Replaces n logits by their softmax.
void softmax(float* x, int64_t n) noexcept {
  float top = x[0], sum = 0;
  for (int64_t i = 1; i < n; i++) top = x[i] > top ? x[i] : top;
  for (int64_t i = 0; i < n; i++) sum += x[i] = std::exp(x[i] - top);
  for (int64_t i = 0; i < n; i++) x[i] /= sum;
}

// Sets the scores of all experts outside the op.kept best groups of experts to -inf.
// Of groups with equal totals, the first is kept. `totals` is scratch for op.groups floats.
void keep_groups(const RouteOp& op, float* scores, float* totals) noexcept {
  constexpr float kNone = -std::numeric_limits<float>::infinity();
  const int64_t size = op.experts / op.groups;
  for (int64_t g = 0; g < op.groups; g++) {
    float first = kNone, second = kNone;
    for (int64_t i = g * size; i < (g + 1) * size; i++) {
      if (scores[i] > first) {
        second = first;
        first = scores[i];
      } else if (scores[i] > second) {
        second = scores[i];
      }
    }
    totals[g] = op.best == 2 ? first + second : first;
  }
  for (int64_t g = 0; g < op.groups; g++) {
    int64_t better = 0;
    for (int64_t o = 0; o < op.groups; o++) {
      better += totals[o] > totals[g] || (totals[o] == totals[g] && o < g);
    }
    if (better >= op.kept) std::fill(scores + g * size, scores + (g + 1) * size, kNone);
  }
}

// Writes the indices of the `chosen` largest of n scores to `out`, in descending order of scores
// (the lower index first if scores are equal). `out` stays sorted, so almost every score costs
// one comparison. A NaN is chosen only if it is one of the first `chosen` scores.
void choose_best(const float* scores, int64_t n, int64_t chosen, float* out) noexcept {
  const auto score_at = [&](int64_t rank) { return scores[static_cast<int64_t>(out[rank])]; };
  float least = 0;  // the smallest score in `out`
  for (int64_t i = 0; i < n; i++) {
    if (i >= chosen && !(scores[i] > least)) continue;
    int64_t rank = std::min(i, chosen - 1);
    for (; rank > 0 && scores[i] > score_at(rank - 1); rank--) out[rank] = out[rank - 1];
    out[rank] = static_cast<float>(i);
    least = score_at(std::min(i, chosen - 1));
  }
}

// Writes the weights of the chosen experts (see RouteOp::near) to `weights`. `taken` is scratch
// for n logits.
void near_softmax(const RouteOp& op, const float* logits, const float* ids, float* weights,
                  float* taken) noexcept {
  constexpr float kNone = -std::numeric_limits<float>::infinity();
  std::copy(logits, logits + op.experts, taken);
  for (int64_t rank = 0; rank < op.chosen; rank++) {
    const auto own = static_cast<int64_t>(ids[rank]);
    const float top = logits[own];
    float sum = 0;
    for (int64_t i = 0; i < op.experts; i++) {
      const float least = std::max(std::fabs(logits[i]), top);
      const bool far = (top - logits[i]) / least > op.near;  // false for 0 / 0, its own logit
      if (!far) sum += std::exp(taken[i] - top);
    }
    weights[rank] = 1.0f / sum;
    taken[own] = kNone;
  }
}

}  // namespace

void route_row(const RouteOp& op, const float* logits, const float* bias, float* out,
               float* scratch, const float* given) noexcept {
  const int64_t experts = op.experts, chosen = op.chosen;
  float *scores = scratch, *wanted = scratch + experts, *weights = out + chosen;
  std::copy(logits, logits + experts, scores);
  if (op.score == Score::sigmoid) {
    for (int64_t i = 0; i < experts; i++) scores[i] = 1.0f / (1.0f + std::exp(-scores[i]));
  }
  for (int64_t i = 0; op.score == Score::sqrt_softplus && i < experts; i++) {
    scores[i] = std::sqrt(scores[i] > kLinear ? scores[i] : std::log1p(std::exp(scores[i])));
  }
  // Without a bias, experts are chosen by their logits instead of softmax,
  // because softmax could round two different logits to the same score.
  const bool early = op.score == Score::softmax && bias;
  if (early) softmax(scores, experts);
  for (int64_t i = 0; i < experts; i++) wanted[i] = bias ? scores[i] + bias[i] : scores[i];
  if (op.score == Score::softmax && !early) softmax(scores, experts);
  if (op.groups > 1) keep_groups(op, wanted, scratch + 2 * experts);
  if (given) std::copy(given, given + chosen, out);
  if (!given) choose_best(wanted, experts, chosen, out);
  for (int64_t rank = 0; rank < chosen; rank++) {
    weights[rank] = scores[static_cast<int64_t>(out[rank])];
  }
  if (op.score == Score::chosen_softmax) softmax(weights, chosen);
  for (int64_t i = 0; op.score == Score::chosen_sigmoid && i < chosen; i++) {
    weights[i] = 1.0f / (1.0f + std::exp(-weights[i]));
  }
  if (op.score == Score::near_softmax) near_softmax(op, scores, out, weights, wanted);
  if (op.renormalize) {
    float sum = 0;
    for (int64_t i = 0; i < chosen; i++) sum += weights[i];
    for (int64_t i = 0; i < chosen; i++) weights[i] /= sum;
  }
  for (int64_t i = 0; i < chosen; i++) weights[i] *= op.scale;
  for (int64_t i = 0; i < chosen; i++) {
    if (out[i] >= static_cast<float>(experts - op.identities)) out[i] = -1;
  }
}

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
