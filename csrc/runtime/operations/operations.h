// The variant Op of all operations, and the functions that visit it.
#pragma once
#include <variant>
#include <vector>

#include "runtime/operations/attention.h"
#include "runtime/operations/columns.h"
#include "runtime/operations/dense.h"
#include "runtime/operations/entries.h"
#include "runtime/operations/experts.h"
#include "runtime/operations/indexer.h"
#include "runtime/operations/latent.h"
#include "runtime/operations/logits.h"
#include "runtime/operations/norms.h"
#include "runtime/operations/recurrent.h"
#include "runtime/operations/streams.h"
#include "runtime/operations/wkv.h"

namespace cpuserve {

// Joins the operations of several families to one variant.
template <class... Ops>
std::variant<Ops...> joined(Family<Ops...>);
template <class... A, class... B, class... More>
auto joined(Family<A...>, Family<B...>, More... more) {
  return joined(Family<A..., B...>{}, more...);
}
using Op =
    decltype(joined(DenseOps{}, NormOps{}, ExpertOps{}, AttentionOps{}, LatentOps{}, IndexerOps{},
                    EntryOps{}, RecurrentOps{}, WkvOps{}, ColumnOps{}, StreamOps{}, ResultOps{}));

inline const char* op_name(const Op& op) {
  return std::visit([](const auto& o) { return o.kName; }, op);
}
inline Accesses accesses_of(const Op& op, const Declarations& program) {
  return std::visit([&](const auto& o) { return accesses(o, program); }, op);
}

}  // namespace cpuserve
