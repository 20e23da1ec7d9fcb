#include "runtime/walk.h"

#include <utility>

#include "runtime/guess_plan.h"

namespace cpuserve {

Walk::Walk(const Program& a_program, StepContext& a_step)
    : program(a_program),
      step(a_step),
      barriers(plan_barriers(a_program)),
      guess_ops(cpuserve::guess_ops(a_program)) {
  step.next_routers = next_routers(program);
}

// Only thread 0 reads the cancel flag here. Before each barrier it copies the flag to stop[0]
// or stop[1] in turn, and all threads read this copy after the barrier. Thread 0 overwrites
// a copy only two barriers later, when every thread has read the copy.
//
// While the times of operations are measured, there is a barrier after each operation.
bool Walk::run_on(Worker& w, int64_t first, int64_t last) const noexcept {
  const std::vector<Op>& ops = program.ops();
  const bool timing = step.profiling;
  int64_t before = timing ? now_ns() : 0, turn = 0;
  bool ran = false;  // whether an op has run since the last barrier
  step.queue.enter(w.thread, w.phase);
  // The barrier before op i. The last thread that arrives runs ops [i, end) alone.
  const auto meet = [&](int64_t i, int64_t end) {
    bool& stop = step.stop[turn++ & 1];
    if (w.thread == 0) stop = step.cancelled.load(std::memory_order_relaxed);
    w.barrier([&] { run_alone(w, i, end); });
    ran = false;
    if (timing && w.thread == 0) {
      const int64_t now = now_ns();
      step.op_seconds[w.op] += 1e-9 * static_cast<double>(now - std::exchange(before, now));
    }
    return !stop;
  };
  for (int64_t i = first; i < last; i++) {
    if (skips(static_cast<size_t>(i))) continue;
    if (ran && (timing || barriers.before[static_cast<size_t>(i)])) {
      const int64_t end = end_of_row_wise(i, last);
      if (!meet(i, end)) return false;
      i = end;
      if (i == last) break;
    }
    const Op& op = ops[static_cast<size_t>(i)];
    if (is_idle(op)) continue;
    run_op(w, static_cast<size_t>(i));
    if (step.paused_op >= 0)
      return true;  // all threads see it, because a RouteOp ends in a barrier
    ran = timing || !ends_with_barrier(op);
  }
  return !ran || meet(last, last);
}

void Walk::run_op(Worker& w, size_t i) const noexcept {
  w.op = i;
  std::visit([&](const auto& op) { cpuserve::run(op, w); }, program.ops()[i]);
}

bool Walk::is_idle(const Op& op) const noexcept {
  const auto* combine = std::get_if<CombineOp>(&op);  // must write zeros if it does not add
  const bool routed = std::holds_alternative<DispatchOp>(op) ||
                      std::holds_alternative<ExpertLinearOp>(op) || (combine && combine->add);
  return routed && step.routing.rows() == 0;
}

// If cores have unequal speeds, no op runs on one thread alone: a slow core would delay all others.
// If sequences may be parked, the step can stop after any RouteOp, so no range is run alone.
// If weights are mapped from a file, the range of ops ends before a DispatchOp, where threads
// share the calls that ask the system to read the weights of the chosen experts.
// Ops that the step skips belong to the range, because the op at its end is run.
int64_t Walk::end_of_row_wise(int64_t first, int64_t last) const noexcept {
  const bool shared = step.input.tokens > 1 || step.profiling || step.parting;
  if (shared || !step.team->speeds().equal()) return first;
  const auto one_can_do = [&](size_t i) {
    const bool asks = step.weights.mapped() && std::holds_alternative<DispatchOp>(program.ops()[i]);
    return skips(i) || (barriers.row_wise[i] && !asks);
  };
  while (first < last && one_can_do(static_cast<size_t>(first))) first++;
  return first;
}

// GuessOps and their inputs follow a RouteOp, which ends with a barrier, and end with a barrier.
// So the barriers of the other operations stay right when a walk skips GuessOps.
bool Walk::skips(size_t i) const noexcept { return !step.guessing && guess_ops[i]; }

void Walk::run_alone(Worker& w, int64_t first, int64_t last) const noexcept {
  w.alone = true;
  for (int64_t i = first; i < last; i++) {
    const auto op = static_cast<size_t>(i);
    if (!skips(op) && !is_idle(program.ops()[op])) run_op(w, op);
  }
  w.alone = false;
}

bool Walk::run(int64_t first, int64_t last) {
  step.stop[0] = step.stop[1] = false;
  bool finished = true;
  int64_t end_phase = step.phase;
  if (std::exchange(step.queue_threads, step.team->members()) != step.team->members())
    step.queue.reset();
  step.team->run_on_all([&](int thread, int threads) noexcept {
    Worker w{step,       thread,
             threads,    step.team->rank_threads(thread),
             step.phase, step.scratch[static_cast<size_t>(thread)]};
    const bool walked = run_on(w, first, last);
    if (thread > 0) return;
    finished = walked;
    end_phase = w.phase;
  });
  step.phase = end_phase;
  // The cancel flag is read again here: other threads read it when they claim tasks,
  // and may have skipped tasks although thread 0 did not see the flag.
  // All threads have finished here, so this read comes after all of their reads.
  finished = finished && !step.cancelled.load(std::memory_order_relaxed);
  if (!finished) step.cancelled.store(false, std::memory_order_relaxed);
  return finished;
}

}  // namespace cpuserve
