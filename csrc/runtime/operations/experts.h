// The operations of mixtures of experts, and of adapters.
#pragma once
#include "kernels/table.h"
#include "runtime/operations/operation.h"

namespace cpuserve {

struct Value;

enum class Score : int32_t { softmax = 0, sigmoid, chosen_softmax };

// Sets the routing that the operations up to the next RouteOp use.
struct RouteOp {
  static constexpr const char* kName = "route";
  Id x, out;
  int32_t experts, chosen;
  Score score;
  bool renormalize;
  float scale;
  Id bias;
  // Only experts of the `kept` best of `groups` equal groups are chosen, by the sums of their
  // `best` highest scores.
  int32_t groups = 1, kept = 1, best = 1;
  Id factors = kNone;  // by expert: the last factor of its weight

  static constexpr auto fields() {
    return std::make_tuple(
        field("x", &RouteOp::x), field("out", &RouteOp::out), field("experts", &RouteOp::experts),
        field("chosen", &RouteOp::chosen), field("score", &RouteOp::score),
        field("renormalize", &RouteOp::renormalize), field("scale", &RouteOp::scale),
        field("bias", &RouteOp::bias), optional("groups", &RouteOp::groups),
        optional("kept", &RouteOp::kept), optional("best", &RouteOp::best),
        optional("factors", &RouteOp::factors));
  }
};
void prepare(const RouteOp& op, const Program& p);
void run(const RouteOp& op, Worker& w) noexcept;
inline Accesses accesses(const RouteOp& op, const Program&) {
  return {{own(op.x)}, {own(op.out), any(kRouting)}};
}

// Routes each token to its sequence's adapter, or nowhere. Row t of out: the adapter (-1: none) and
// its scale.
struct AdapterOp {
  static constexpr const char* kName = "adapter";
  Id out;
  int32_t adapters;
  Id scales;

  static constexpr auto fields() {
    return std::make_tuple(field("out", &AdapterOp::out), field("adapters", &AdapterOp::adapters),
                           field("scales", &AdapterOp::scales));
  }
};
void prepare(const AdapterOp& op, Program& p);
void run(const AdapterOp& op, Worker& w) noexcept;
inline Accesses accesses(const AdapterOp& op, const Program&) {
  return {{}, {any(op.out), any(kRouting)}};
}

// Copies the row of each token to the places of its experts.
struct DispatchOp {
  static constexpr const char* kName = "dispatch";
  Id x, routing, out;

  static constexpr auto fields() {
    return std::make_tuple(field("x", &DispatchOp::x), field("routing", &DispatchOp::routing),
                           field("out", &DispatchOp::out));
  }
};
void prepare(const DispatchOp& op, const Program& p);
void run(const DispatchOp& op, Worker& w) noexcept;
inline Accesses accesses(const DispatchOp& op, const Program&) {
  return {{any(op.x), any(op.routing), any(kRouting)}, {any(op.out)}};
}

// matrices: one for each expert, in order, of equal shape and kind. biases: as many, or none.
// Expert e multiplies matrix `first` + e and adds vector `bias` + e, if there are biases.
struct ExpertLinearOp {
  static constexpr const char* kName = "expert_linear";
  Id x, routing, out;
  std::vector<Id> matrices, biases;
  Activation activation;
  bool glu;
  int32_t experts = 0;
  Id first = kNone, bias = kNone;  // of the first expert

  static constexpr auto fields() {
    return std::make_tuple(
        field("x", &ExpertLinearOp::x), field("routing", &ExpertLinearOp::routing),
        field("out", &ExpertLinearOp::out), field("matrices", &ExpertLinearOp::matrices),
        field("biases", &ExpertLinearOp::biases), field("activation", &ExpertLinearOp::activation),
        field("glu", &ExpertLinearOp::glu));
  }
};
void prepare(ExpertLinearOp& op, Program& p);
void run(const ExpertLinearOp& op, Worker& w) noexcept;
inline Accesses accesses(const ExpertLinearOp& op, const Program&) {
  return claimed({any(op.x), any(op.routing), any(kRouting)}, {any(op.out)});
}

size_t scratch_bytes(const ExpertLinearOp& op);

// Adds the rows of the experts of each token, weighted, in the order of choice.
struct CombineOp {
  static constexpr const char* kName = "combine";
  Id x, routing, out;
  bool add = true;  // to out

  static constexpr auto fields() {
    return std::make_tuple(field("x", &CombineOp::x), field("routing", &CombineOp::routing),
                           field("out", &CombineOp::out), optional("add", &CombineOp::add));
  }
};
void prepare(const CombineOp& op, const Program& p);
void run(const CombineOp& op, Worker& w) noexcept;
inline Accesses accesses(const CombineOp& op, const Program&) {
  return {with({any(op.x), own(op.routing), any(kRouting)}, op.add, own(op.out)), {own(op.out)}};
}

// The experts, or adapters, of a routing, which must come from the last operation that makes one.
struct Experts {
  int32_t count, chosen;
};
Experts experts_of(const Program& p, Id routing, const char* role);
// A value with one row for each token and expert of a routing.
const Value& routed_value(const Program& p, Id id, Id routing, const char* role);

using ExpertOps = Family<RouteOp, AdapterOp, DispatchOp, ExpertLinearOp, CombineOp>;

}  // namespace cpuserve
