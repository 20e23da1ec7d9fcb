#include "runtime/guess_plan.h"

#include <algorithm>

#include "base/check.h"

namespace cpuserve {
namespace {

NextRouter next_router(const Program& program, const GuessOp& guess, size_t at) {
  const std::vector<Op>& ops = program.ops();
  const LinearOp* linear = nullptr;
  size_t i = at + 1;
  while (i < ops.size() && !std::holds_alternative<RouteOp>(ops[i])) i++;
  check_argument(i < ops.size(), "guess: no route op follows");
  const auto& route = std::get<RouteOp>(ops[i]);
  for (size_t j = at + 1; j < i; j++) {
    const auto* l = std::get_if<LinearOp>(&ops[j]);
    if (l && l->out == route.x) linear = l;
  }
  check_argument(linear != nullptr, "guess: no linear computes the logits of the next route op");
  const Matrix& m = program.matrix(linear->matrix);
  check_argument(!linear->glu && !linear->add && linear->out_column == 0 && m.n == route.experts &&
                     program.value(guess.out).width == m.n,
                 "guess: the linear of the next route op is no router of ", route.experts,
                 " experts");
  program.check_multiplies(guess.x, m);
  return {&route, i, linear->matrix, linear->bias, linear->activation};
}

}  // namespace

std::vector<NextRouter> next_routers(const Program& program) {
  std::vector<NextRouter> out(program.ops().size());
  for (size_t i = 0; i < out.size(); i++) {
    const auto* guess = std::get_if<GuessOp>(&program.ops()[i]);
    if (guess) out[i] = next_router(program, *guess, i);
  }
  return out;
}

std::vector<bool> guess_ops(const Program& program) {
  std::vector<bool> out(program.ops().size());
  for (size_t i = 0; i < out.size(); i++) {
    const auto* guess = std::get_if<GuessOp>(&program.ops()[i]);
    if (!guess) continue;
    const auto end = out.begin() + static_cast<int64_t>(i) + 1;
    std::fill(end - guess->before - 1, end, true);
  }
  return out;
}

int64_t most_guess_tokens(const Program& program) {
  int64_t most = INT64_MAX;
  for (const Op& op : program.ops()) {
    const auto* r = std::get_if<RouteOp>(&op);
    if (r) most = std::min<int64_t>(most, r->experts / r->chosen);
  }
  return most;
}

}  // namespace cpuserve
