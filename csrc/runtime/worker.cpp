#include "runtime/worker.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace cpuserve {

// Only thread 0 reads the cancel flag here. Before each barrier it copies the flag to stop_[0]
// or stop_[1] in turn, and all threads read this copy after the barrier. Thread 0 overwrites
// a copy only two barriers later, when every thread has read the copy.
//
// While the times of operations are measured, there is a barrier after each operation.
bool Worker::walk(int64_t first, int64_t last) noexcept {
  const std::vector<Op>& ops = step.program->ops();
  const bool timing = step.profiling;
  int64_t before = timing ? now_ns() : 0, turn = 0;
  bool ran = false;  // whether an op has run since the last barrier
  step.queue.enter(thread, phase);
  // The barrier before op i. The last thread that arrives runs ops [i, end) alone.
  const auto meet = [&](int64_t i, int64_t end) {
    bool& stop = step.stop[turn++ & 1];
    if (thread == 0) stop = step.cancelled.load(std::memory_order_relaxed);
    barrier([&] { run_alone(i, end); });
    ran = false;
    if (timing && thread == 0) {
      const int64_t now = now_ns();
      step.op_seconds[op] += 1e-9 * static_cast<double>(now - std::exchange(before, now));
    }
    return !stop;
  };
  for (int64_t i = first; i < last; i++) {
    if (skips(static_cast<size_t>(i))) continue;
    if (ran && (timing || step.barriers.before[static_cast<size_t>(i)])) {
      const int64_t end = end_of_row_wise(i, last);
      if (!meet(i, end)) return false;
      i = end;
      if (i == last) break;
    }
    if (is_idle(ops[static_cast<size_t>(i)])) continue;
    op = static_cast<size_t>(i);
    run(ops[op]);
    if (step.paused_op >= 0)
      return true;  // all threads see it, because a RouteOp ends in a barrier
    ran = timing || !ends_with_barrier(ops[op]);
  }
  return !ran || meet(last, last);
}

void Worker::run(const Op& op) noexcept {
  std::visit([this](const auto& o) { cpuserve::run(o, *this); }, op);
}

bool Worker::is_idle(const Op& op) const noexcept {
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
int64_t Worker::end_of_row_wise(int64_t first, int64_t last) const noexcept {
  if (tokens() > 1 || step.profiling || step.parting || !step.team->speeds().equal()) return first;
  const auto one_can_do = [&](size_t i) {
    const bool asks =
        step.weights.mapped() && std::holds_alternative<DispatchOp>(step.program->ops()[i]);
    return skips(i) || (step.barriers.row_wise[i] && !asks);
  };
  while (first < last && one_can_do(static_cast<size_t>(first))) first++;
  return first;
}

// GuessOps and their inputs follow a RouteOp, which ends with a barrier, and end with a barrier.
// So the barriers of the other operations are right without them.
bool Worker::skips(size_t i) const noexcept { return !step.guessing && step.guess_ops[i]; }

void Worker::run_alone(int64_t first, int64_t last) noexcept {
  alone = true;
  for (int64_t i = first; i < last; i++) {
    op = static_cast<size_t>(i);
    if (!skips(op) && !is_idle(step.program->ops()[op])) run(step.program->ops()[op]);
  }
  alone = false;
}

Worker::Product Worker::product(Id id, const Rows& x, const Epilogue& ep,
                                uint8_t* work) const noexcept {
  const Matrix& m = matrix(id);
  LinearArgs args{};
  args.x_stride = x.stride;
  args.ep = ep;
  args.scratch = work;
  args.terms = two_terms(x.format) ? 2 : 1;
  args.sizes = step.work_sizes;
  return {step.kernels->linear[static_cast<int>(m.kind)], m, x,
          m.panels_of(step.team->ranks().share(m.units(), peers.rank)), args};
}

LinearPlan Worker::Product::plan(int64_t rows, int threads) const noexcept {
  return LinearPlan(LinearShape::of(kernel, args.sizes, rows, args.x_stride, args.terms,
                                    panels.size(), matrix.grain, matrix.panel_bytes, threads));
}

void Worker::Product::run(const PackedWeight& w, int64_t row0,
                          const LinearTask& task) const noexcept {
  LinearArgs a = args;
  a.w = &w;
  a.x = row_of(x, row0 + task.row0);
  a.ep.out.data = row_of(args.ep.out, row0 + task.row0);
  a.m = task.rows;
  a.panel0 = panels.begin + task.panels.begin;
  a.panel1 = panels.begin + task.panels.end;
  kernel.run(a);
}

void Worker::multiply(Id id, const Rows& x, int64_t m, const Epilogue& ep) noexcept {
  const Product p = product(id, x, ep, scratch);
  const PackedWeight& w = step.weights.matrix(id, peers.rank);
  // In a slice, the threads that take part may change before the next one, but not the plan.
  const int64_t all = ranks().threads_of(peers.rank).size();
  const LinearPlan plan = p.plan(m, in_slice() ? static_cast<int>(all) : peers.size);
  const auto run = [&](int64_t begin, int64_t end) { p.run(w, 0, plan.task(begin, end)); };
  if (in_slice()) return drain_slice({0, plan.tasks()}, plan.chunk(), run);
  drain(peers, plan.tasks(), plan.chunk(), run);
}

bool run_ops(StepContext& step, int64_t first, int64_t last) {
  step.stop[0] = step.stop[1] = false;
  bool finished = true;
  int64_t end_phase = step.phase;
  if (std::exchange(step.queue_threads, step.team->members()) != step.team->members())
    step.queue.reset();
  step.team->run_on_all([&](int thread, int threads) noexcept {
    Worker w{step,       thread,
             threads,    step.team->rank_threads(thread),
             step.phase, step.scratch[static_cast<size_t>(thread)]};
    const bool walked = w.walk(first, last);
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
