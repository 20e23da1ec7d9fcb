#include "runtime/worker.h"

namespace cpuserve {

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

}  // namespace cpuserve
