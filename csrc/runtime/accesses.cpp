#include "runtime/accesses.h"

#include <algorithm>

namespace cpuserve {
namespace {

using List = std::vector<Access>;

constexpr Access own(Id id) { return {id, 1}; }  // a row for each token
constexpr Access any(Id id) { return {id, 0}; }

// An operation that changes own rows of `to`, and reads these and own rows of `from`.
Accesses changes(List from, Id to) {
  from.push_back(own(to));
  return {std::move(from), {own(to)}};
}

// An operation that reads any rows of `from`, and that threads claim.
Accesses claimed(const List& from, const List& to) {
  Accesses out{from, to};
  out.writes.push_back(any(kQueue));
  return out;
}

List with(List list, bool more, Access one) {
  if (more) list.push_back(one);
  return list;
}

struct AccessesOf {
  const Program& program;

  Accesses operator()(const EmbedOp& o) { return {{}, {own(o.out)}}; }
  Accesses operator()(const PositionEmbedOp& o) { return changes({}, o.x); }
  Accesses operator()(const NormOp& o) { return {{own(o.x)}, {own(o.out)}}; }
  Accesses operator()(const PartNormOp& o) { return changes({}, o.x); }
  Accesses operator()(const ConvertOp& o) {
    if (o.routing != kNone) return {{any(o.x), any(kRouting)}, {any(o.out)}};
    const int64_t copies = program.values()[static_cast<size_t>(o.x)].copies;
    return {{{o.x, copies}}, {{o.out, copies}}};
  }
  Accesses operator()(const LinearOp& o) {
    return claimed(with({any(o.x)}, o.add, any(o.out)), {any(o.out)});
  }
  Accesses operator()(const RouteOp& o) { return {{own(o.x)}, {own(o.out), any(kRouting)}}; }
  Accesses operator()(const AdapterOp& o) { return {{}, {any(o.out), any(kRouting)}}; }
  Accesses operator()(const SpreadOp& o) {
    return {{any(o.x), any(o.routing), any(kRouting)}, {any(o.out)}};
  }
  Accesses operator()(const ExpertLinearOp& o) {
    return claimed({any(o.x), any(o.routing), any(kRouting)}, {any(o.out)});
  }
  Accesses operator()(const CombineOp& o) {
    return {with({any(o.x), own(o.routing), any(kRouting)}, o.add, own(o.out)), {own(o.out)}};
  }
  Accesses operator()(const RopeStoreOp& o) {  // rotates q and k in place first
    return {{own(o.qkv)}, {own(o.q), own(o.qkv), any(kCache)}};
  }
  Accesses operator()(const HeadLinearOp& o) { return claimed({any(o.x)}, {any(o.out)}); }
  Accesses operator()(const LatentStoreOp& o) {
    return {{own(o.q), own(o.latent), own(o.kv)}, {own(o.out), any(kCache)}};
  }
  Accesses operator()(const AttentionOp& o) {
    return claimed({any(o.q), any(kCache)}, {any(o.out)});
  }
  Accesses operator()(const SplitGatesOp& o) { return {{own(o.x)}, {own(o.out)}}; }
  Accesses operator()(const GateOp& o) { return changes({own(o.x)}, o.out); }
  Accesses operator()(const GatedNormOp& o) { return {{own(o.x), own(o.z)}, {own(o.out)}}; }
  Accesses operator()(const GatedDeltaOp& o) {
    return claimed({any(o.x), any(o.gates)}, {any(o.out)});
  }
  Accesses operator()(const ShortConvOp& o) { return claimed({any(o.x)}, {any(o.out)}); }
  Accesses operator()(const Mamba2Op& o) { return claimed({any(o.x), any(o.steps)}, {any(o.out)}); }
  Accesses operator()(const AddOp& o) { return changes({own(o.x)}, o.out); }
  Accesses operator()(const ScaleOp& o) { return changes({}, o.x); }
  Accesses operator()(const ColumnsOp& o) {
    return {with({own(o.x)}, o.more != kNone, own(o.more)), {own(o.out)}};
  }
  Accesses operator()(const MixPartsOp& o) {
    return changes(with({own(o.gates)}, o.target != kNone, own(o.target)), o.x);
  }
  Accesses operator()(const MatchRmsOp& o) { return changes({own(o.like)}, o.x); }
  Accesses operator()(const KeepTopOp& o) { return changes({}, o.x); }
  Accesses operator()(const ActivationOp& o) { return {{own(o.x)}, {own(o.out)}}; }
  Accesses operator()(const LogitsOp& o) { return claimed({any(o.x)}, {}); }
  Accesses operator()(const HiddenOp& o) { return {{any(o.x)}, {}}; }
};

bool meet(const List& a, const List& b) {
  return std::any_of(a.begin(), a.end(), [&](const Access& x) {
    return std::any_of(b.begin(), b.end(), [&](const Access& y) {
      return x.id == y.id && (x.rows != y.rows || x.rows == 0);
    });
  });
}

}  // namespace

bool Accesses::claim() const {
  return std::any_of(writes.begin(), writes.end(), [](const Access& a) { return a.id == kQueue; });
}

Accesses accesses_of(const Op& op, const Program& program) {
  return std::visit(AccessesOf{program}, op);
}

Waits find_waits(const Program& program) {
  Waits out;
  Accesses since;  // the last barrier
  for (const Op& op : program.ops()) {
    const Accesses now = accesses_of(op, program);
    const bool waits = meet(now.reads, since.writes) || meet(now.writes, since.writes) ||
                       meet(now.writes, since.reads);
    if (waits) since = {};
    since.reads.insert(since.reads.end(), now.reads.begin(), now.reads.end());
    since.writes.insert(since.writes.end(), now.writes.begin(), now.writes.end());
    if (ends_with_barrier(op)) since = {};
    out.before.push_back(waits);
    out.light.push_back(!now.claim());
  }
  return out;
}

}  // namespace cpuserve
