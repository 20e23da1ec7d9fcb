// The operations of mixtures of experts, and of adapters.
#pragma once
#include <vector>

#include "kernels/table.h"
#include "runtime/choices.h"
#include "runtime/operations/operation.h"

namespace cpuserve {

// Chooses the experts of each token from its router logits x. The following operations
// use this choice (the routing) until the next RouteOp or AdapterOp.
struct RouteOp {
  static constexpr const char* kName = "route";
  Id x, out;
  int32_t experts, chosen;
  Score score;
  bool renormalize;
  float scale;
  Id bias;
  // The experts form `groups` equal groups, and only the `kept` best groups take part
  // in the choice. The score of a group is the sum of the `best` highest scores of its experts.
  int32_t groups = 1, kept = 1, best = 1;
  Id factors = kNone;  // vector [experts]; its elements multiply the weights of the experts
  // near_softmax: the weight of an expert is its softmax over the experts that are not chosen
  // before it and have logits near its own: (own - logit) / max(own, |logit|) is at most `near`.
  float near = 0;
  // The last experts return their input. Their ids become -1: they have no routed rows.
  int32_t identities = 0;
  // A vector [token ids][chosen]: the experts of each token id. kNone: their scores decide.
  Id table = kNone;
  CPUSERVE_FIELDS_WITH_DEFAULTS(7, x, out, experts, chosen, score, renormalize, scale, bias, groups,
                                kept, best, factors, near, identities, table)
};
void prepare(const RouteOp& op, Declarations& p);
void run(const RouteOp& op, Worker& w) noexcept;
inline Accesses accesses(const RouteOp& op, const Declarations&) {
  return {{own(op.x)}, {own(op.out), any(kRouting)}};
}

// Writes the output row of RouteOp for one token to out[0 .. 2 * chosen): the ids of the chosen
// experts, best first (the lower id first if scores are equal), then their weights.
// `logits` has one float for each expert, and `scratch` holds 3 * experts floats.
// NaN logits lead to NaN weights, but the ids stay valid. `given` has the ids of the experts if
// the logits do not choose them.
void route_row(const RouteOp& op, const float* logits, const float* bias, float* out,
               float* scratch, const float* given = nullptr) noexcept;

// Guesses the experts of the next RouteOp, so that the pool of experts can read them early: applies
// the router of the next layer (the linear before its RouteOp) to x, which has what this router
// would read now, and writes the logits to `out`. Only reads follow from the result.
// `before` operations before this one compute nothing but x; they are skipped as this one is.
struct GuessOp {
  static constexpr const char* kName = "guess";
  Id x, out;
  int32_t before = 0;
  CPUSERVE_FIELDS_WITH_DEFAULTS(1, x, out, before)
};
void prepare(const GuessOp& op, const Declarations& p);
void run(const GuessOp& op, Worker& w) noexcept;
inline Accesses accesses(const GuessOp& op, const Declarations&) {
  return claimed({any(op.x)}, {any(op.out)});
}
size_t scratch_bytes(const GuessOp& op);

// Routes each token to the LoRA adapter of its sequence, if the sequence has one.
// Row t of out has the number of the adapter of token t, or -1 if there is none.
// The next column of the row is the product of the adapter's scale and the sequence's scale.
struct AdapterOp {
  static constexpr const char* kName = "adapter";
  Id out;
  int32_t adapters;
  Id scales;
  CPUSERVE_FIELDS(out, adapters, scales)
};
void prepare(const AdapterOp& op, Declarations& p);
void run(const AdapterOp& op, Worker& w) noexcept;
inline Accesses accesses(const AdapterOp& op, const Declarations&) {
  return {{}, {any(op.out), any(kRouting)}};
}

// Copies the row of each token to the routed rows of the token:
// one routed row for each of its experts.
struct DispatchOp {
  static constexpr const char* kName = "dispatch";
  Id x, routing, out;
  CPUSERVE_FIELDS(x, routing, out)
};
void prepare(const DispatchOp& op, const Declarations& p);
void run(const DispatchOp& op, Worker& w) noexcept;
inline Accesses accesses(const DispatchOp& op, const Declarations&) {
  return {{any(op.x), any(op.routing), any(kRouting)}, {any(op.out)}};
}

// Multiplies the routed rows of each expert by the matrix of the expert, and adds its bias, if any.
// `matrices` has a matrix for each expert, with consecutive ids and equal shape and kind.
// `biases` has a vector for each expert, or is empty. Expert e uses `first` + e and `bias` + e.
struct ExpertLinearOp {
  static constexpr const char* kName = "expert_linear";
  Id x, routing, out;
  std::vector<Id> matrices, biases;
  Activation activation;
  bool glu;
  int32_t experts = 0;
  Id first = kNone, bias = kNone;  // the matrix and the bias of expert 0
  CPUSERVE_FIELDS(x, routing, out, matrices, biases, activation, glu)
};
void prepare(ExpertLinearOp& op, Declarations& p);
void run(const ExpertLinearOp& op, Worker& w) noexcept;
inline Accesses accesses(const ExpertLinearOp& op, const Declarations&) {
  return claimed({any(op.x), any(op.routing), any(kRouting)}, {any(op.out)});
}

size_t scratch_bytes(const ExpertLinearOp& op);

// Multiplies each routed row of x by the weight of its expert.
struct WeighRowsOp {
  static constexpr const char* kName = "weigh_rows";
  Id x, routing;
  CPUSERVE_FIELDS(x, routing)
};
void prepare(const WeighRowsOp& op, const Declarations& p);
void run(const WeighRowsOp& op, Worker& w) noexcept;
inline Accesses accesses(const WeighRowsOp& op, const Declarations&) {
  return {{any(op.x), own(op.routing), any(kRouting)}, {any(op.x)}};
}

// Adds x, times the weights of the identities that a token has chosen (RouteOp), to out.
struct AddIdentitiesOp {
  static constexpr const char* kName = "add_identities";
  Id x, routing, out;
  CPUSERVE_FIELDS(x, routing, out)
};
void prepare(const AddIdentitiesOp& op, const Declarations& p);
void run(const AddIdentitiesOp& op, Worker& w) noexcept;
inline Accesses accesses(const AddIdentitiesOp& op, const Declarations&) {
  return changes({own(op.x), own(op.routing)}, op.out);
}

// Adds up the routed rows of each token, each multiplied by the weight of its expert,
// in the order of the experts from best to worst.
struct CombineOp {
  static constexpr const char* kName = "combine";
  Id x, routing, out;
  bool add = true;       // true: the sum is added to out; false: it replaces out
  bool weighted = true;  // false: rows are added as they are, because WeighRowsOp weighed them
  CPUSERVE_FIELDS_WITH_DEFAULTS(2, x, routing, out, add, weighted)
};
void prepare(const CombineOp& op, const Declarations& p);
void run(const CombineOp& op, Worker& w) noexcept;
inline Accesses accesses(const CombineOp& op, const Declarations&) {
  return {with({any(op.x), own(op.routing), any(kRouting)}, op.add, own(op.out)), {own(op.out)}};
}

using ExpertOps = Family<RouteOp, GuessOp, AdapterOp, DispatchOp, ExpertLinearOp, WeighRowsOp,
                         AddIdentitiesOp, CombineOp>;

}  // namespace cpuserve
