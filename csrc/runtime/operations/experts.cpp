// The operations of mixtures of experts, and of adapters.
#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "runtime/operations/checks.h"
#include "runtime/worker.h"

namespace cpuserve {
namespace {

// Expert ids are stored in rows of floats, which are exact far beyond this.
constexpr int32_t kMostExperts = 4096;
constexpr int64_t kClaims = 16;  // per thread; so many even out the end of an operation

// sums[i] += w * from[i]: the product is rounded before it is added.
void add_weighted(float* sums, const float* from, float w, int64_t n) noexcept {
  for (int64_t i = 0; i < n; i++) sums[i] += w * from[i];
}
void add_weighted(float* sums, const uint16_t* from, float w, int64_t n) noexcept {
  for (int64_t i = 0; i < n; i++) sums[i] += w * bf16_to_float(from[i]);
}

}  // namespace

// The first of the experts' biases in packed column order, which follow one another.
Id Program::expert_biases(const std::vector<Id>& biases, const Matrix& m) {
  Id first = kNone;
  for (size_t e = 0; e < biases.size(); e++) {
    check_argument(biases[e] == biases[0] + static_cast<Id>(e), "expert_linear: bias ", e,
                   " does not follow that of the expert before");
    check_argument(vector(biases[e]).count == m.n, "expert_linear: bias ", e, " has ",
                   vector(biases[e]).count, " elements, not ", m.n);
    const Id packed = m.glu ? pack_bias(biases[e], m) : biases[e];
    if (e == 0) first = packed;
  }
  return first;
}

// The experts, or adapters, of a routing, which must come from the last op that makes one.
Program::Experts Program::experts_of(Id routing, const char* role) const {
  Id last = kNone;
  Experts experts{};
  for (const Op& op : ops_) {
    if (const auto* r = std::get_if<RouteOp>(&op)) {
      last = r->out;
      experts = {r->experts, r->chosen};
    } else if (const auto* a = std::get_if<AdapterOp>(&op)) {
      last = a->out;
      experts = {a->adapters, 1};
    }
  }
  check_argument(last != kNone && last == routing, role, ": value ", routing,
                 " is not the routing of the last route op");
  return experts;
}

// A value with one row for each token and expert of a routing.
const Value& Program::routed_value(Id id, Id routing, const char* role) const {
  const int32_t chosen = experts_of(routing, role).chosen;
  const Value& v = value(id);
  check_argument(v.copies == chosen, role, ": value ", v.name, " has ", v.copies,
                 " rows for each token, not ", chosen);
  return v;
}

void Program::route(const RouteOp& op) {
  check_tokens("route", {op.x, op.out});
  check_argument(op.experts >= 1 && op.experts <= kMostExperts, "route: ", op.experts,
                 " experts are not between 1 and ", kMostExperts);
  check_argument(op.chosen >= 1 && op.chosen <= op.experts, "route: cannot choose ", op.chosen,
                 " of ", op.experts, " experts");
  check_argument(f32_value(op.x, "route x").width == op.experts, "route: x has width ",
                 value(op.x).width, ", but there are ", op.experts, " experts");
  check_argument(f32_value(op.out, "route out").width == 2 * op.chosen,
                 "route: out must hold an id and a weight for each chosen expert");
  check_vector(op.bias, op.experts, "router bias");
  check_vector(op.factors, op.experts, "factors of experts");
  check_argument(op.groups >= 1 && op.experts % op.groups == 0, "route: ", op.experts,
                 " experts are not ", op.groups, " equal groups");
  const int32_t size = op.experts / op.groups;
  check_argument(op.kept >= 1 && op.kept <= op.groups && op.kept * size >= op.chosen &&
                     op.best >= 1 && op.best <= std::min(size, 2),
                 "route: cannot choose ", op.chosen, " experts from ", op.kept, " groups of ", size,
                 " by their best ", op.best);
  ops_.emplace_back(op);
}

void Program::adapter(const AdapterOp& op) {
  check_tokens("adapter", {op.out});
  check_argument(adapters_ == 0, "a program can have only one adapter op");
  check_argument(op.adapters >= 1 && op.adapters <= kMostExperts, "adapter: ", op.adapters,
                 " adapters are not between 1 and ", kMostExperts);
  check_argument(f32_value(op.out, "adapter out").width == 2,
                 "adapter: out must hold an id and a weight");
  check_argument(op.scales != kNone, "adapter: the scales are missing");
  check_vector(op.scales, op.adapters, "adapter scales");
  adapters_ = op.adapters;
  ops_.emplace_back(op);
}

void Program::spread(const SpreadOp& op) {
  check_tokens("spread", {op.x});
  const Value &x = value(op.x), &out = routed_value(op.out, op.routing, "spread out");
  check_argument(x.width == out.width && x.format == out.format,
                 "spread: x and out differ in width or format");
  ops_.emplace_back(op);
}

void Program::expert_linear(ExpertLinearOp op, const std::vector<Id>& matrices,
                            const std::vector<Id>& biases, bool glu) {
  routed_value(op.x, op.routing, "expert_linear x");
  const Value& out = routed_value(op.out, op.routing, "expert_linear out");
  const int32_t experts = experts_of(op.routing, "expert_linear").count;
  check_argument(static_cast<int32_t>(matrices.size()) == experts,
                 "expert_linear: ", matrices.size(), " matrices for ", experts, " experts");
  check_argument(biases.empty() || biases.size() == matrices.size(),
                 "expert_linear: ", biases.size(), " biases for ", experts, " experts");
  check_gated("expert_linear", op.activation, glu);
  op.first = matrices[0];
  op.experts = experts;
  const Matrix& one = matrix(op.first);
  for (size_t e = 0; e < matrices.size(); e++) {
    const Matrix& m = matrix(matrices[e]);
    check_argument(matrices[e] == op.first + static_cast<Id>(e), "expert_linear: matrix ", m.name,
                   " does not follow that of the expert before");
    check_argument(m.n == one.n && m.k == one.k && m.kind == one.kind && m.glu == glu,
                   "expert_linear: matrices ", one.name, " and ", m.name, " differ in shape");
    set_grain(matrices[e], out.format);
  }
  check_multiplies(op.x, one);
  check_argument(op.x != op.out && one.out_width() == out.width, "expert_linear: value ", out.name,
                 " has width ", out.width, ", not ", one.out_width());
  check_argument(!whole_row(out.format), "expert_linear: value ", out.name,
                 " has scales wider than a tile; only convert can write such rows");
  op.bias = expert_biases(biases, one);
  ops_.emplace_back(op);
}

void Program::combine(const CombineOp& op) {
  const Value& x = routed_value(op.x, op.routing, "combine x");
  check_tokens("combine", {op.out});
  check_argument(x.format == ActFormat::f32 || x.format == ActFormat::bf16, "combine: x, value ",
                 x.name, ", must be f32 or bf16");
  check_argument(x.width == f32_value(op.out, "combine out").width,
                 "combine: x and out differ in width");
  ops_.emplace_back(op);
}

void Executor::Worker::operator()(const RouteOp& op) noexcept {
  const Range mine = share(tokens());
  for (int64_t t = mine.begin; t < mine.end; t++) {
    float* out = reinterpret_cast<float*>(row_of(value(op.out), t));
    route_row(op, reinterpret_cast<const float*>(row_of(value(op.x), t)), vector(op.bias), out,
              reinterpret_cast<float*>(scratch));
    const float* factors = vector(op.factors);
    for (int64_t i = 0; factors && i < op.chosen; i++) {
      out[op.chosen + i] *= factors[static_cast<int64_t>(out[i])];
    }
  }
  const auto build = [&] { e.routing_.build(op.experts, op.chosen, value(op.out), tokens()); };
  alone ? build() : barrier(build);
}

void Executor::Worker::operator()(const AdapterOp& op) noexcept {
  if (thread > 0 && !alone) return;
  const StepInput& in = e.input_;
  const Rows& out = value(op.out);
  for (int64_t s = 0; s < in.seqs; s++) {
    const int32_t adapter = in.adapters ? in.adapters[s] : -1;
    for (int64_t t = in.query_start[s]; t < in.query_start[s + 1]; t++) {
      float* row = reinterpret_cast<float*>(row_of(out, t));
      row[0] = static_cast<float>(adapter);
      row[1] = adapter < 0 ? 0.0f : vector(op.scales)[adapter];
    }
  }
  e.routing_.build(op.adapters, 1, out, tokens());
}

bool Executor::Worker::is_idle(const Op& op) const noexcept {
  const auto* combine = std::get_if<CombineOp>(&op);  // that does not add writes zeros
  const bool routed = std::holds_alternative<SpreadOp>(op) ||
                      std::holds_alternative<ExpertLinearOp>(op) || (combine && combine->add);
  return routed && e.routing_.rows() == 0;
}

void Executor::Worker::operator()(const SpreadOp& op) noexcept {
  if (e.weights_.mapped()) fetch_experts();
  const Rows &x = value(op.x), &out = value(op.out);
  const Range mine = share(e.routing_.rows());
  for (int64_t r = mine.begin; r < mine.end; r++) {
    std::memcpy(row_of(out, r), row_of(x, e.routing_.token(r)), x.stride);
  }
}

// In the order of the computation: while the first experts are computed, others are read. All
// threads share the calls, since each looks up every page of a matrix, even of one in memory.
void Executor::Worker::fetch_experts() const noexcept {
  const std::vector<Op>& ops = e.program_->ops();
  int next = 0;
  for (size_t i = op + 1; i < ops.size() && !std::holds_alternative<RouteOp>(ops[i]); i++) {
    const auto* l = std::get_if<ExpertLinearOp>(&ops[i]);
    for (int32_t expert = 0; l && expert < l->experts; expert++) {
      if (e.routing_.rows(expert) == 0) continue;
      if (next == thread) e.weights_.will_need(l->first + expert);
      next = next + 1 < threads ? next + 1 : 0;
    }
  }
}

// The tasks of all experts in use are one list, expert after expert, which the crew claims. An
// expert's rows are consecutive, so each of them is a linear of its own with a plan of its own; the
// experts share the threads, so an expert is divided for its part of them.
void Executor::Worker::operator()(const ExpertLinearOp& op) noexcept {
  const Routing& routing = e.routing_;
  // Where each expert's tasks end, in scratch: the kernel's own scratch begins after it.
  int64_t* ends = reinterpret_cast<int64_t*>(scratch);
  const int64_t taken = op.experts * static_cast<int64_t>(sizeof(int64_t));
  const Product p = product(op.first, value(op.x),
                            {nullptr, op.activation, matrix(op.first).glu, false, value(op.out)},
                            scratch + round_up(taken, 64));
  int64_t used = 0;
  for (int64_t i = 0; i < op.experts; i++) used += routing.rows(i) > 0;
  const auto plan_of = [&](int64_t expert) {
    return p.plan(routing.rows(expert), static_cast<int>((crew.size + used - 1) / used));
  };
  int64_t tasks = 0, chunk = INT64_MAX, most_rows = 0;
  for (int64_t i = 0; i < op.experts; i++) {
    if (routing.rows(i) > 0) {
      const LinearPlan plan = plan_of(i);
      tasks += plan.tasks();
      chunk = std::min(chunk, plan.chunk());
      most_rows = std::max(most_rows, routing.rows(i));
    }
    ends[i] = tasks;
  }
  // Between two claims a core writes results and reads no weights, and all experts together have
  // enough work for claims twice as large: with 8 to 32 tokens they take 1 to 3 % less time.
  const bool few = most_rows <= LinearPlan::kFewRows;  // each plan has one row block
  if (few && tasks >= 2 * kClaims * chunk * crew.size) chunk *= 2;
  drain(crew, tasks, chunk, [&](int64_t begin, int64_t end) {
    while (begin < end) {
      const int64_t expert = std::upper_bound(ends, ends + op.experts, begin) - ends;
      const int64_t last = std::min(end, ends[expert]), before = expert > 0 ? ends[expert - 1] : 0;
      const Id at = static_cast<Id>(expert);
      Product one = p;
      one.args.ep.bias = op.bias == kNone ? nullptr : vector(op.bias + at);
      one.run(e.weights_.matrix(op.first + at, crew.rank), routing.first_row(expert),
              plan_of(expert).task(begin - before, last - before));
      begin = last;
    }
  });
}

void Executor::Worker::operator()(const CombineOp& op) noexcept {
  const Rows &x = value(op.x), &routing = value(op.routing), &out = value(op.out);
  const int64_t chosen = routing.width / 2;
  const Range mine = share(tokens());
  for (int64_t t = mine.begin; t < mine.end; t++) {
    float* to = reinterpret_cast<float*>(row_of(out, t));
    const float* weights = reinterpret_cast<const float*>(row_of(routing, t)) + chosen;
    // A few columns of all its rows at a time: their sums stay in L1, and a core reads several rows
    // at once, which prompts have written so long ago that they are no longer near.
    constexpr int64_t kColumns = 256;
    for (int64_t begin = 0; begin < out.width; begin += kColumns) {
      const int64_t n = std::min(kColumns, out.width - begin);
      float* sums = to + begin;
      if (!op.add) std::fill_n(sums, n, 0.0f);
      for (int64_t rank = 0; rank < chosen; rank++) {
        const int64_t row = e.routing_.row(t, rank);
        if (row < 0) continue;
        const uint8_t* from = row_of(x, row);
        if (x.format == ActFormat::bf16) {
          add_weighted(sums, reinterpret_cast<const uint16_t*>(from) + begin, weights[rank], n);
        } else {
          add_weighted(sums, reinterpret_cast<const float*>(from) + begin, weights[rank], n);
        }
      }
    }
  }
}

}  // namespace cpuserve
