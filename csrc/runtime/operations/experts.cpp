// The operations of mixtures of experts, and of adapters.
#include "runtime/operations/experts.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "base/check.h"
#include "runtime/operations/checks.h"
#include "runtime/worker.h"

namespace cpuserve {
namespace {

// The most experts of a route operation, and the most adapters.
// Routings store ids as floats, which are exact up to 2^24.
constexpr int32_t kMostExperts = 4096;
constexpr int64_t kClaims = 16;  // with so many claims per thread, threads are evenly loaded

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

// sums[i] += w * from[i]. The product is rounded before it is added (no fused multiply-add).
void add_weighted(float* sums, const float* from, float w, int64_t n) noexcept {
  for (int64_t i = 0; i < n; i++) sums[i] += w * from[i];
}
void add_weighted(float* sums, const uint16_t* from, float w, int64_t n) noexcept {
  for (int64_t i = 0; i < n; i++) sums[i] += w * bf16_to_float(from[i]);
}

// Returns the id of a vector with the bias of expert 0 in the column order of the packed matrix.
// The biases of the other experts have the following ids.
Id expert_biases(Declarations& p, const std::vector<Id>& biases, const Matrix& m) {
  Id first = kNone;
  for (size_t e = 0; e < biases.size(); e++) {
    check_argument(biases[e] == biases[0] + static_cast<Id>(e), "expert_linear: bias ", e,
                   " does not follow that of the expert before");
    check_argument(p.vector(biases[e]).count == m.n, "expert_linear: bias ", e, " has ",
                   p.vector(biases[e]).count, " elements, not ", m.n);
    const Id packed = m.glu ? p.pack_bias(biases[e], m) : biases[e];
    if (e == 0) first = packed;
  }
  return first;
}

// Asks the system to read the weights of the chosen experts of this step, if they are mapped from
// a file. The requests are in the order of the computation: while threads compute the first
// experts, the system reads the other experts. Threads share the calls,
// because a call looks up every page of a matrix, even if the matrix is in memory.
void fetch_experts(Worker& w) noexcept {
  int next = 0;
  for (const ExpertMatrices& l : w.program().expert_matrices()) {
    if (l.op < w.op) continue;
    if (l.route > w.op) break;
    for (int32_t expert = 0; expert < l.experts; expert++) {
      if (w.routing().rows(expert) == 0) continue;
      if (next == w.thread) w.weights().will_need(l.first + expert);
      next = next + 1 < w.threads ? next + 1 : 0;
    }
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

void prepare(const RouteOp& op, Declarations& p) {
  p.check_tokens("route", {op.x, op.out});
  check_argument(op.experts >= 1 && op.experts <= kMostExperts, "route: ", op.experts,
                 " experts are not between 1 and ", kMostExperts);
  check_argument(op.chosen >= 1 && op.chosen <= op.experts, "route: cannot choose ", op.chosen,
                 " of ", op.experts, " experts");
  check_argument(p.f32_value(op.x, "route x").width == op.experts, "route: x has width ",
                 p.value(op.x).width, ", but there are ", op.experts, " experts");
  check_argument(p.f32_value(op.out, "route out").width == 2 * op.chosen,
                 "route: out must hold an id and a weight for each chosen expert");
  p.check_vector(op.bias, op.experts, "router bias");
  p.check_vector(op.factors, op.experts, "factors of experts");
  p.check_vector(op.table, p.embed_rows() * op.chosen, "experts of token ids");
  check_argument(op.groups >= 1 && op.experts % op.groups == 0, "route: ", op.experts,
                 " experts are not ", op.groups, " equal groups");
  const int32_t size = op.experts / op.groups;
  check_argument(op.kept >= 1 && op.kept <= op.groups && op.kept * size >= op.chosen &&
                     op.best >= 1 && op.best <= std::min(size, 2),
                 "route: cannot choose ", op.chosen, " experts from ", op.kept, " groups of ", size,
                 " by their best ", op.best);
  check_argument(op.identities >= 0 && op.identities < op.experts &&
                     (op.identities == 0 || op.factors == kNone),
                 "route: ", op.identities, " of ", op.experts, " experts cannot be identities");
  p.set_routing(op.out, {op.experts - op.identities, op.chosen}, true);
}

void run(const RouteOp& op, Worker& w) noexcept {
  const Range mine = w.share(w.tokens());
  for (int64_t t = mine.begin; t < mine.end; t++) {
    float* out = reinterpret_cast<float*>(row_of(w.value(op.out), t));
    const float* given = w.vector(op.table);
    if (given) given += int64_t{w.input().token_ids[t]} * op.chosen;
    route_row(op, reinterpret_cast<const float*>(row_of(w.value(op.x), t)), w.vector(op.bias), out,
              reinterpret_cast<float*>(w.scratch), given);
    const float* factors = w.vector(op.factors);
    for (int64_t i = 0; factors && i < op.chosen; i++) {
      out[op.chosen + i] *= factors[static_cast<int64_t>(out[i])];
    }
  }
  const auto build = [&] {
    w.routing().build(op.experts - op.identities, op.chosen, w.value(op.out), w.tokens());
    ExpertPool* pool = w.weights().pool();
    if (pool && !w.pauses()) pool->want(w.op, w.routing());
  };
  w.alone ? build() : w.barrier(build);
}

void prepare(const GuessOp& op, const Declarations& p) {
  p.check_tokens("guess", {op.x, op.out});
  p.f32_value(op.out, "guess out");
  check_argument(op.before >= 0 && op.before <= static_cast<int64_t>(p.num_ops()),
                 "guess: there are no ", op.before, " operations before it");
}

// The scratch has the scratch and the result of route_row, and the ids of the guessed experts.
size_t scratch_bytes(const GuessOp&) { return size_t{6} * kMostExperts * sizeof(float); }

void run(const GuessOp& op, Worker& w) noexcept {
  const NextRouter& next = w.next_router();
  const RouteOp& route = *next.route;
  w.multiply(next.matrix, w.value(op.x), w.tokens(),
             {w.vector(next.bias), next.activation, false, false, w.value(op.out)});
  w.barrier([&] {
    auto* scratch = reinterpret_cast<float*>(w.scratch);
    float* out = scratch + 3 * route.experts;
    auto* ids = reinterpret_cast<int32_t*>(out + 2 * route.experts);
    const int64_t tokens = w.tokens();
    for (int64_t t = 0; t < tokens; t++) {  // the best expert of each token first, and so on
      const auto* logits = reinterpret_cast<const float*>(row_of(w.value(op.out), t));
      route_row(route, logits, w.vector(route.bias), out, scratch);
      for (int64_t i = 0; i < route.chosen; i++) {
        ids[i * tokens + t] = static_cast<int32_t>(out[i]);
      }
    }
    w.weights().pool()->guess(next.op, {ids, tokens * route.chosen});
  });
}

void prepare(const AdapterOp& op, Declarations& p) {
  p.check_tokens("adapter", {op.out});
  check_argument(p.limits().adapters == 0, "a program can have only one adapter op");
  check_argument(op.adapters >= 1 && op.adapters <= kMostExperts, "adapter: ", op.adapters,
                 " adapters are not between 1 and ", kMostExperts);
  check_argument(p.f32_value(op.out, "adapter out").width == 2,
                 "adapter: out must hold an id and a weight");
  check_argument(op.scales != kNone, "adapter: the scales are missing");
  p.check_vector(op.scales, op.adapters, "adapter scales");
  p.limits().adapters = op.adapters;
  p.set_routing(op.out, {op.adapters, 1}, false);
}

void run(const AdapterOp& op, Worker& w) noexcept {
  if (w.thread > 0 && !w.alone) return;
  const StepInput& in = w.input();
  const Rows& out = w.value(op.out);
  for (int64_t s = 0; s < in.seqs; s++) {
    const int32_t adapter = in.adapters ? in.adapters[s] : -1;
    const float scale = adapter < 0 ? 0.0f : w.vector(op.scales)[adapter] * in.adapter_scale(s);
    for (int64_t t = in.query_start[s]; t < in.query_start[s + 1]; t++) {
      float* row = reinterpret_cast<float*>(row_of(out, t));
      row[0] = static_cast<float>(adapter);
      row[1] = scale;
    }
  }
  w.routing().build(op.adapters, 1, out, w.tokens());
}

void prepare(const DispatchOp& op, const Declarations& p) {
  p.check_tokens("dispatch", {op.x});
  const Value &x = p.value(op.x), &out = p.routed_value(op.out, op.routing, "dispatch out");
  check_argument(x.width == out.width && x.format == out.format,
                 "dispatch: x and out differ in width or format");
}

void run(const DispatchOp& op, Worker& w) noexcept {
  if (w.weights().mapped()) fetch_experts(w);
  const Rows &x = w.value(op.x), &out = w.value(op.out);
  const Range mine = w.share(w.routing().rows());
  for (int64_t r = mine.begin; r < mine.end; r++) {
    std::memcpy(row_of(out, r), row_of(x, w.routing().token(r)), x.stride);
  }
}

void prepare(ExpertLinearOp& op, Declarations& p) {
  p.routed_value(op.x, op.routing, "expert_linear x");
  const Value& out = p.routed_value(op.out, op.routing, "expert_linear out");
  const int32_t experts = p.experts_of(op.routing, "expert_linear").count;
  check_argument(static_cast<int32_t>(op.matrices.size()) == experts,
                 "expert_linear: ", op.matrices.size(), " matrices for ", experts, " experts");
  check_argument(op.biases.empty() || op.biases.size() == op.matrices.size(),
                 "expert_linear: ", op.biases.size(), " biases for ", experts, " experts");
  check_gated("expert_linear", op.activation, op.glu);
  op.first = op.matrices[0];
  op.experts = experts;
  const Matrix& one = p.matrix(op.first);
  for (size_t e = 0; e < op.matrices.size(); e++) {
    const Matrix& m = p.matrix(op.matrices[e]);
    check_argument(op.matrices[e] == op.first + static_cast<Id>(e), "expert_linear: matrix ",
                   m.name, " does not follow that of the expert before");
    check_argument(m.n == one.n && m.k == one.k && m.kind == one.kind && m.glu == op.glu,
                   "expert_linear: op.matrices ", one.name, " and ", m.name, " differ in shape");
    p.set_grain(op.matrices[e], out.format);
  }
  p.check_multiplies(op.x, one);
  check_argument(op.x != op.out && one.out_width() == out.width, "expert_linear: value ", out.name,
                 " has width ", out.width, ", not ", one.out_width());
  check_argument(!whole_row(out.format), "expert_linear: value ", out.name,
                 " has scales wider than a tile; only convert can write such rows");
  op.bias = expert_biases(p, op.biases, one);
  p.add_experts(op.first, op.experts);
}

// The scratch of a thread has one int64 for each expert (the index after the expert's last task),
// and then the scratch of a linear.
size_t scratch_bytes(const ExpertLinearOp& op) {
  return kLinearScratch + static_cast<size_t>(op.experts) * 8 + 64;
}

// Marks all tokens that use this expert, which could not be read. Their rows stay undefined.
void fail_tokens(const Worker& w, int64_t expert) noexcept {
  const Routing& routing = w.routing();
  const int64_t first = routing.first_row(expert);
  for (int64_t r = first; r < first + routing.rows(expert); r++) w.fail_token(routing.token(r));
}

// The tasks of all experts in use form one list, expert after expert,
// and the threads of a rank claim tasks of this list. The rows of an expert are consecutive,
// so each expert is a linear with its own LinearPlan. Because the experts share the threads,
// a LinearPlan is made for (threads / experts in use) threads, rounded up.
//
// If the experts are in a pool, those in memory come first. While others are being read,
// all threads claim tasks from the front of the list, in the order of the reads.
void run(const ExpertLinearOp& op, Worker& w) noexcept {
  const Routing& routing = w.routing();
  ExpertPool* pool = w.weights().pool();
  if (pool && !pool->holds(op.first)) pool = nullptr;  // adapters are not in the pool
  const Span<const int32_t> order = pool ? pool->order(op.first) : Span<const int32_t>{};
  const int64_t count = pool ? order.size() : op.experts;
  const auto expert_at = [&](int64_t i) { return pool ? order[i] : i; };
  // The index after the last task of each expert.
  // The scratch of the kernel begins after this array.
  int64_t* ends = reinterpret_cast<int64_t*>(w.scratch);
  const int64_t taken = op.experts * static_cast<int64_t>(sizeof(int64_t));
  const Worker::Product p =
      w.product(op.first, w.value(op.x),
                {nullptr, op.activation, w.matrix(op.first).glu, false, w.value(op.out)},
                w.scratch + round_up(taken, 64));
  int64_t used = 0;
  for (int64_t i = 0; i < op.experts; i++) used += routing.rows(i) > 0;
  const auto plan_of = [&](int64_t expert) {
    return p.plan(routing.rows(expert), static_cast<int>((w.peers.size + used - 1) / used));
  };
  int64_t tasks = 0, chunk = INT64_MAX, most_rows = 0;
  for (int64_t i = 0; i < count; i++) {
    const int64_t expert = expert_at(i);
    if (routing.rows(expert) > 0) {
      const LinearPlan plan = plan_of(expert);
      tasks += plan.tasks();
      chunk = std::min(chunk, plan.chunk());
      most_rows = std::max(most_rows, routing.rows(expert));
    }
    ends[i] = tasks;
  }
  // Between two claims a core writes results and reads no weights,
  // so fewer and larger claims are faster. All experts together have enough tasks for claims
  // that are twice as large: the operation then takes 1 to 3 % less time with 8 to 32 tokens.
  const bool few = most_rows <= LinearPlan::kFewRows;  // the plan of each expert has one row block
  if (few && tasks >= 2 * kClaims * chunk * w.peers.size) chunk *= 2;
  const auto compute = [&](int64_t begin, int64_t end) {
    while (begin < end) {
      const int64_t i = std::upper_bound(ends, ends + count, begin) - ends;
      const int64_t last = std::min(end, ends[i]), before = i > 0 ? ends[i - 1] : 0;
      const int64_t expert = expert_at(i);
      const Id at = static_cast<Id>(expert);
      Worker::Product one = p;
      one.args.ep.bias = op.bias == kNone ? nullptr : w.vector(op.bias + at);
      PackedWeight weight = w.weights().matrix(op.first + at, w.peers.rank);
      if (pool) weight.data = pool->wait(op.first, at, w.peers.rank, w.cancelled());
      if (weight.data) {
        one.run(weight, routing.first_row(expert),
                plan_of(expert).task(begin - before, last - before));
      } else {
        fail_tokens(w, expert);
      }
      if (pool) pool->done(op.first, at, w.peers.rank, last - begin, ends[i] - before);
      begin = last;
    }
  };
  if (pool && pool->ordered(op.first)) {
    const auto share = [&](int owner) { return Range{0, owner == 0 ? tasks : 0}; };
    w.drain_shares(w.peers, share, chunk, compute);
  } else {
    w.drain(w.peers, tasks, chunk, compute);
  }
}

void prepare(const WeighRowsOp& op, const Declarations& p) {
  const Value& x = p.routed_value(op.x, op.routing, "weigh_rows x");
  check_argument(x.format == ActFormat::f32, "weigh_rows: value ", x.name, " must be f32");
}

void run(const WeighRowsOp& op, Worker& w) noexcept {
  const Rows &x = w.value(op.x), &routing = w.value(op.routing);
  const int64_t chosen = routing.width / 2;
  const Range mine = w.share(w.tokens());
  for (int64_t t = mine.begin; t < mine.end; t++) {
    const float* weights = floats_of(routing, t) + chosen;
    for (int64_t rank = 0; rank < chosen; rank++) {
      const int64_t row = w.routing().row(t, rank);
      if (row < 0) continue;
      float* to = floats_of(x, row);
      for (int64_t i = 0; i < x.width; i++) to[i] *= weights[rank];
    }
  }
}

void prepare(const AddIdentitiesOp& op, const Declarations& p) {
  p.check_tokens("add_identities", {op.x, op.out});
  p.experts_of(op.routing, "add_identities");
  check_argument(p.f32_value(op.x, "add_identities x").width ==
                     p.f32_value(op.out, "add_identities out").width,
                 "add_identities: x and out differ in width");
}

void run(const AddIdentitiesOp& op, Worker& w) noexcept {
  const Rows &x = w.value(op.x), &routing = w.value(op.routing), &out = w.value(op.out);
  const int64_t chosen = routing.width / 2;
  const Range mine = w.share(w.tokens());
  for (int64_t t = mine.begin; t < mine.end; t++) {
    const float* ids = floats_of(routing, t);
    float weight = 0;
    for (int64_t rank = 0; rank < chosen; rank++) {
      if (ids[rank] < 0) weight += ids[chosen + rank];
    }
    if (weight != 0) add_weighted(floats_of(out, t), floats_of(x, t), weight, out.width);
  }
}

void prepare(const CombineOp& op, const Declarations& p) {
  const Value& x = p.routed_value(op.x, op.routing, "combine x");
  p.check_tokens("combine", {op.out});
  check_argument(x.format == ActFormat::f32 || x.format == ActFormat::bf16, "combine: x, value ",
                 x.name, ", must be f32 or bf16");
  check_argument(x.width == p.f32_value(op.out, "combine out").width,
                 "combine: x and out differ in width");
}

void run(const CombineOp& op, Worker& w) noexcept {
  const Rows &x = w.value(op.x), &routing = w.value(op.routing), &out = w.value(op.out);
  const int64_t chosen = routing.width / 2;
  const Range mine = w.share(w.tokens());
  for (int64_t t = mine.begin; t < mine.end; t++) {
    float* to = reinterpret_cast<float*>(row_of(out, t));
    const float* weights = reinterpret_cast<const float*>(row_of(routing, t)) + chosen;
    // Adds 256 columns of all routed rows of the token in one pass:
    // the sums stay in L1, and the core reads several rows in parallel.
    // During a prompt the routed rows are no longer in the caches of the core.
    constexpr int64_t kColumns = 256;
    for (int64_t begin = 0; begin < out.width; begin += kColumns) {
      const int64_t n = std::min(kColumns, out.width - begin);
      float* sums = to + begin;
      if (!op.add) std::fill_n(sums, n, 0.0f);
      for (int64_t rank = 0; rank < chosen; rank++) {
        const int64_t row = w.routing().row(t, rank);
        if (row < 0) continue;
        const uint8_t* from = row_of(x, row);
        const float weight = op.weighted ? weights[rank] : 1.0f;
        if (x.format == ActFormat::bf16) {
          add_weighted(sums, reinterpret_cast<const uint16_t*>(from) + begin, weight, n);
        } else {
          add_weighted(sums, reinterpret_cast<const float*>(from) + begin, weight, n);
        }
      }
    }
  }
}

}  // namespace cpuserve
