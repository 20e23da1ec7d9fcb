// Finds what the GuessOps of a program apply, and which operations serve only them.
#pragma once
#include <vector>

#include "runtime/program.h"
#include "runtime/step_context.h"

namespace cpuserve {

// Returns by operation the router that a GuessOp applies, which must be a linear of its width.
// Throws std::invalid_argument if no such linear follows a GuessOp.
std::vector<NextRouter> next_routers(const Program& program);
// Returns the operations that are skipped in steps without guesses: one flag for each operation.
std::vector<bool> guess_ops(const Program& program);
// Returns the most tokens of a step for which guesses are made: with more, the step is likely to
// use most experts.
int64_t most_guess_tokens(const Program& program);

}  // namespace cpuserve
