// Operations of hyper-connections: a row has several residual streams, which are equal parts of it.
#pragma once
#include "runtime/operations/operation.h"

namespace cpuserve {

constexpr int32_t kMaxStreams = 8;

// Replaces a row of `weights`, which is the product of a matrix and the streams,
// by the weights of the streams around a layer (mHC, Xie et al. 2026; GLM-5.3). The columns are:
// a weight of each stream in the layer's input; a weight of the layer's output in each stream;
// and a matrix [streams][streams], where row j has the weights of stream j in the new streams.
// The products are divided by the root mean square of x, multiplied by one of three `scales`,
// and added to `base`. The first columns become sigmoid + floor, and the next ones 2 sigmoid.
// The rows of the matrix become softmax + floor. Then its columns and rows are divided
// by their sums in turn, until the columns were divided `rounds` times.
//   parts  3: all of these; 2: only the weights of inputs, and weights of outputs, which are
//          most * sigmoid + floor (Hunyuan 4); 1: only the weights of inputs
//   most   replaces the 2 of 2 sigmoid
struct StreamWeightsOp {
  static constexpr const char* kName = "stream_weights";
  Id x, weights, scales, base;
  int32_t streams, rounds;
  float eps, floor;
  int32_t parts = 3;
  float most = 2.0f;
  CPUSERVE_FIELDS_WITH_DEFAULTS(2, x, weights, scales, base, streams, rounds, eps, floor, parts,
                                most)

  int64_t columns() const {  // the number of weights of a row
    return int64_t{streams} * (parts == 3 ? streams + 2 : parts);
  }
};
void prepare(const StreamWeightsOp& op, const Declarations& p);
void run(const StreamWeightsOp& op, Worker& w) noexcept;
inline Accesses accesses(const StreamWeightsOp& op, const Declarations&) {
  return changes({own(op.x)}, op.weights);
}

// out = scale * (sum over i of weights[i] * stream i of x). Without `weights`, all weights are 1.
struct MergeStreamsOp {
  static constexpr const char* kName = "merge_streams";
  Id x, weights, out;
  float scale;
  CPUSERVE_FIELDS(x, weights, out, scale)
};
void prepare(const MergeStreamsOp& op, const Declarations& p);
void run(const MergeStreamsOp& op, Worker& w) noexcept;
inline Accesses accesses(const MergeStreamsOp& op, const Declarations&) {
  return {with({own(op.x)}, op.weights != kNone, own(op.weights)), {own(op.out)}};
}

// Adds y to each of the n streams of x. With `mixed`, `weights` come from StreamWeightsOp,
// and stream i becomes weights[n + i] * y + sum over j of weights[2 n + j n + i] * stream j.
// With `given`, weights[n + i] * y is added to stream i, and weights come from StreamWeightsOp too.
// Otherwise 2 sigmoid(weights[i]) * y is added to stream i.
struct SpreadStreamsOp {
  static constexpr const char* kName = "spread_streams";
  Id y, weights, x;
  bool mixed;
  bool given = false;
  CPUSERVE_FIELDS_WITH_DEFAULTS(1, y, weights, x, mixed, given)
};
void prepare(const SpreadStreamsOp& op, const Declarations& p);
void run(const SpreadStreamsOp& op, Worker& w) noexcept;
inline Accesses accesses(const SpreadStreamsOp& op, const Declarations&) {
  return changes({own(op.y), own(op.weights)}, op.x);
}

// Stream i of out is sigmoid(g) * values, where d is the product of stream i of `keys`
// and stream i of `queries`, divided by the root of their width,
// and g has the sign of d and the size sqrt(max(|d|, 1e-6)); g is 0 if d is 0 (Qwen4-Exp).
struct GateStreamsOp {
  static constexpr const char* kName = "gate_streams";
  Id keys, queries, values, out;
  CPUSERVE_FIELDS(keys, queries, values, out)
};
void prepare(const GateStreamsOp& op, const Declarations& p);
void run(const GateStreamsOp& op, Worker& w) noexcept;
inline Accesses accesses(const GateStreamsOp& op, const Declarations&) {
  return {{own(op.keys), own(op.queries), own(op.values)}, {own(op.out)}};
}

using StreamOps = Family<StreamWeightsOp, MergeStreamsOp, SpreadStreamsOp, GateStreamsOp>;

}  // namespace cpuserve
