// The parts of a step if not all of its sequences have their experts in memory.
//
// Where a router has chosen experts that are not in memory, the step stops. The sequences with
// all their experts there go on through the layers. The others are parked (parked_rows.h), and
// their reads go on meanwhile. If no sequence has its experts, the step waits until one has them,
// or ends if this is one that is parked at another operation: the next step begins there.
// So a sequence waits for its own reads only, and for kReaders reads that had begun before.
// A parked sequence goes on when a later step comes to its operation. A row has the same bits
// in all steps, whatever other rows they have.
#pragma once
#include <vector>

#include "runtime/step_input.h"

namespace cpuserve {

class Program;
struct StepContext;
struct Walk;

// Returns whether sequences of steps of a program may be parked: whether the rows of a token are
// all that later operations need of it.
bool can_park(const Program& program);
// Whether sequences of this step may be parked.
bool can_part(const StepContext& step, const StepInput& in) noexcept;
// Runs the operations of the step that has begun on the sequences that need not wait.
// Returns false if the step was cancelled.
bool run_parts(Walk& walk, const StepInput& whole);
// Puts the results of these sequences to their rows of the whole step; other rows get no token.
void order_results(StepContext& step, const StepInput& whole);

// Forgets the parked sequence of a request slot, which begins again.
void forget_parked(StepContext& step, int64_t slot);
// Returns the numbers of the parked sequences of the last step.
std::vector<int32_t> parked_sequences(const StepContext& step);

}  // namespace cpuserve
