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
  const std::vector<Op>& ops = e.program_->ops();
  const bool timing = e.profiling_;
  int64_t before = timing ? now_ns() : 0, turn = 0;
  bool ran = false;  // whether an op has run since the last barrier
  e.queue_.enter(thread, phase);
  // The barrier before op i. The last thread that arrives runs ops [i, end) alone.
  const auto meet = [&](int64_t i, int64_t end) {
    bool& stop = e.stop_[turn++ & 1];
    if (thread == 0) stop = e.cancelled_.load(std::memory_order_relaxed);
    barrier([&] { run_alone(i, end); });
    ran = false;
    if (timing && thread == 0) {
      const int64_t now = now_ns();
      e.op_seconds_[op] += 1e-9 * static_cast<double>(now - std::exchange(before, now));
    }
    return !stop;
  };
  for (int64_t i = first; i < last; i++) {
    if (skips(static_cast<size_t>(i))) continue;
    if (ran && (timing || e.barriers_.before[static_cast<size_t>(i)])) {
      const int64_t end = end_of_row_wise(i, last);
      if (!meet(i, end)) return false;
      i = end;
      if (i == last) break;
    }
    if (is_idle(ops[static_cast<size_t>(i)])) continue;
    op = static_cast<size_t>(i);
    run(ops[op]);
    if (e.paused_op_ >= 0) return true;  // all threads see it, because a RouteOp ends in a barrier
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
  return routed && e.routing_.rows() == 0;
}

// If cores have unequal speeds, no op runs on one thread alone: a slow core would delay all others.
// If sequences may be parked, the step can stop after any RouteOp, so no range is run alone.
// If weights are mapped from a file, the range of ops ends before a DispatchOp, where threads
// share the calls that ask the system to read the weights of the chosen experts.
// Ops that the step skips belong to the range, because the op at its end is run.
int64_t Worker::end_of_row_wise(int64_t first, int64_t last) const noexcept {
  if (tokens() > 1 || e.profiling_ || e.parting_ || !e.team_->speeds().equal()) return first;
  const auto one_can_do = [&](size_t i) {
    const bool asks =
        e.weights_.mapped() && std::holds_alternative<DispatchOp>(e.program_->ops()[i]);
    return skips(i) || (e.barriers_.row_wise[i] && !asks);
  };
  while (first < last && one_can_do(static_cast<size_t>(first))) first++;
  return first;
}

// GuessOps and their inputs follow a RouteOp, which ends with a barrier, and end with a barrier.
// So the barriers of the other operations are right without them.
bool Worker::skips(size_t i) const noexcept { return !e.guessing_ && e.guess_ops_[i]; }

void Worker::run_alone(int64_t first, int64_t last) noexcept {
  alone = true;
  for (int64_t i = first; i < last; i++) {
    op = static_cast<size_t>(i);
    if (!skips(op) && !is_idle(e.program_->ops()[op])) run(e.program_->ops()[op]);
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
  args.sizes = e.work_sizes_;
  return {e.table_->linear[static_cast<int>(m.kind)], m, x,
          m.panels_of(e.team_->ranks().share(m.units(), peers.rank)), args};
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
  const PackedWeight& w = e.weights_.matrix(id, peers.rank);
  // In a slice, the threads that take part may change before the next one, but not the plan.
  const int64_t all = ranks().threads_of(peers.rank).size();
  const LinearPlan plan = p.plan(m, in_slice() ? static_cast<int>(all) : peers.size);
  const auto run = [&](int64_t begin, int64_t end) { p.run(w, 0, plan.task(begin, end)); };
  if (in_slice()) return drain_slice({0, plan.tasks()}, plan.chunk(), run);
  drain(peers, plan.tasks(), plan.chunk(), run);
}

}  // namespace cpuserve
