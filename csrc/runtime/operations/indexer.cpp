// The operations of indexers.
#include "runtime/operations/indexer.h"

#include <algorithm>

#include "base/check.h"
#include "runtime/operations/attention.h"
#include "runtime/operations/checks.h"
#include "runtime/operations/pools.h"
#include "runtime/selection.h"
#include "runtime/worker.h"

namespace cpuserve {
namespace {

// The number of chunks of index keys that a thread scores at a time, at most: with 64 heads of 128
// dimensions, the products of one chunk take 0.1 ms.
constexpr int64_t kMostSpan = 8;
// The number of spans (runs of chunks) per thread, so that threads finish at about the same time.
constexpr int64_t kSpansPerThread = 4;

// Late tokens (selection.h) with scores that are in memory at the same time. Row i of `scores`
// belongs to late token `first` + i.
struct ScoreBatch {
  const LateTokens& late;
  int64_t first, count;
  float* scores;
  int64_t stride;
};

// Returns the number of whole pools (of op.pool tokens) that the token at `position` sees.
int64_t pools_of(const SelectKeysOp& op, int32_t position) { return (position + 1) / op.pool; }

void score(const SelectKeysOp& op, const ScoreBatch& batch, int64_t row, int64_t begin,
           int64_t keys, Worker& w) noexcept {
  const SequenceToken at = batch.late[batch.first + row];
  const int64_t end = std::min(begin + keys, pools_of(op, w.input().positions[at.token]));
  if (begin >= end) return;
  ScoreIndexArgs args{};
  args.q = w.value(op.q);
  if (op.weights != kNone) args.weights = floats_of(w.value(op.weights), at.token);
  args.layer = *w.kv().heads(op.layer);
  args.block_table = w.block_table(at.seq, op.layer);
  args.token = at.token;
  args.heads = op.heads;
  args.width = op.width;
  args.pool = op.pool;
  args.begin = begin;
  args.end = end;
  args.scores = batch.scores + row * batch.stride + begin;
  args.scratch = w.scratch;
  w.kernels().score_index(args);
}

void select(const SelectKeysOp& op, const ScoreBatch& batch, int64_t row, Worker& w) noexcept {
  const int64_t token = batch.late[batch.first + row].token;
  const int32_t position = w.input().positions[token];
  const int64_t pools = pools_of(op, position);
  float* out = floats_of(w.value(op.out), token);
  select_highest(batch.scores + row * batch.stride, pools, op.keep, op.pool, out, w.scratch);
  int64_t n = int64_t{op.keep} * op.pool;
  for (int64_t p = pools * op.pool; p <= position; p++) out[n++] = static_cast<float>(p);
  std::fill(out + n, out + op.most(), -1.0f);
}

// Writes the selection of a token that sees at most op.most() keys: all keys that it sees.
void select_all(const SelectKeysOp& op, int64_t token, Worker& w) noexcept {
  float* out = floats_of(w.value(op.out), token);
  const int64_t n = w.input().positions[token] + 1;
  for (int64_t p = 0; p < n; p++) out[p] = static_cast<float>(p);
  std::fill(out + n, out + op.most(), -1.0f);
}

// Moves the first elements of the pairs in x[0, rotary) before the second elements.
void unpair(float* x, int32_t rotary) {
  float second[kMaxHeadDim / 2];
  for (int32_t i = 0; i < rotary / 2; i++) {
    second[i] = x[2 * i + 1];
    x[i] = x[2 * i];
  }
  std::copy(second, second + rotary / 2, x + rotary / 2);
}

}  // namespace

void prepare(const StoreIndexOp& op, Declarations& p) {
  const CacheLayer& kv = p.kv_layer(op.layer);
  p.check_tokens("store_index_keys", {op.x});
  check_argument(kv.latent && kv.head_dim == kv.hd_pad, "store_index_keys: layer ", op.layer,
                 " must be latent, and ", kv.head_dim, " columns must be a multiple of 16");
  check_argument(p.f32_value(op.x, "store_index_keys x").width == kv.head_dim,
                 "store_index_keys: layer ", op.layer, " does not keep rows of ",
                 p.value(op.x).width);
  check_argument(op.rotary >= 0 && op.rotary % 2 == 0 && op.rotary <= kv.head_dim,
                 "store_index_keys: cannot rotate ", op.rotary, " of ", kv.head_dim, " columns");
  if (op.rotary > 0) check_rope(p, "store_index_keys", op.rotary, op.cos, op.sin);
}

void run(const StoreIndexOp& op, Worker& w) noexcept {
  const Range rows = w.share(w.tokens());
  if (rows.size() == 0) return;
  StoreIndexArgs args{};
  args.x = w.value(op.x);
  args.layer = *w.kv().heads(op.layer);
  args.rotary = op.rotary;
  args.cos = w.vector(op.cos);
  args.sin = w.vector(op.sin);
  args.positions = w.input().positions;
  args.slots = w.kv_slots(op.layer);
  args.m0 = rows.begin;
  args.m1 = rows.end;
  for (int64_t t = rows.begin; op.interleaved && t < rows.end; t++) {
    unpair(floats_of(args.x, t), op.rotary);
  }
  w.kernels().store_index(args);
}

void prepare(const PoolIndexOp& op, Declarations& p) {
  p.check_tokens("pool_index_keys", {op.x});
  const CacheLayer &raw = p.kv_layer(op.raw), &to = p.kv_layer(op.to);
  check_argument(op.pool >= 1 && kBlock % op.pool == 0 && op.width >= 1 && op.width % 16 == 0 &&
                     op.width % op.pool == 0,
                 "pool_index_keys: cannot divide ", op.width, " columns among pools of ", op.pool,
                 " tokens, which must divide a block of ", kBlock);
  check_argument(raw.latent && raw.head_dim == (op.ape == kNone ? 1 : 2) * op.width && to.latent &&
                     to.head_dim == op.width / op.pool && raw.group == to.group,
                 "pool_index_keys: layers ", op.raw, " and ", op.to, " do not keep keys of ",
                 op.width, " columns and their gates");
  check_argument(p.f32_value(op.x, "pool_index_keys x").width == raw.head_dim,
                 "pool_index_keys: value ", p.value(op.x).name, " must have ", raw.head_dim,
                 " columns");
  p.check_vector(op.ape, int64_t{op.pool} * op.width, "pool_index_keys ape");
  p.check_vector(op.norm, op.width, "pool_index_keys norm");
  check_argument(op.rotary >= 0 && op.rotary % 2 == 0 && op.rotary <= op.width,
                 "pool_index_keys: cannot rotate ", op.rotary, " of ", op.width, " columns");
  if (op.rotary > 0) check_rope(p, "pool_index_keys", op.rotary, op.cos, op.sin);
}

void run(const PoolIndexOp& op, Worker& w) noexcept {
  PoolIndexArgs args{};
  args.raw = *w.kv().heads(op.raw);
  args.to = *w.kv().heads(op.to);
  args.pool = op.pool;
  args.width = op.width;
  args.ape = w.vector(op.ape);
  args.norm = w.vector(op.norm);
  args.eps = op.eps;
  args.rotary = op.rotary;
  args.cos = w.vector(op.cos);
  args.sin = w.vector(op.sin);
  args.scratch = w.scratch;
  each_pools(op.pool, w, [&](int64_t s, int64_t first, int64_t last) {
    args.block_table = w.block_table(s, op.raw);
    args.first = first;
    args.last = last;
    w.kernels().pool_index(args);
  });
}

void prepare(SelectKeysOp& op, const Declarations& p) {
  p.check_tokens("select_keys", {op.q, op.out});
  check_argument(op.heads >= 1 && op.keep >= 1 && op.pool >= 1 && kBlock % op.pool == 0,
                 "select_keys: cannot select ", op.keep, " pools of ", op.pool, " tokens with ",
                 op.heads, " heads; a pool must divide a block of ", kBlock);
  const CacheLayer& kv = p.kv_layer(op.layer);
  op.width = kv.head_dim * op.pool;
  check_argument(kv.latent && op.width % 16 == 0 && (op.pool > 1 || op.width == kv.hd_pad),
                 "select_keys: layer ", op.layer, " of ", kv.head_dim,
                 " columns does not keep index keys");
  p.check_columns(op.q, 0, int64_t{op.heads} * op.width, "select_keys q");
  if (op.weights != kNone) {
    p.check_tokens("select_keys", {op.weights});
    p.check_columns(op.weights, 0, op.heads, "select_keys weights");
  }
  check_argument(p.f32_value(op.out, "select_keys out").width == op.most(), "select_keys: value ",
                 p.value(op.out).name, " must have ", op.most(), " columns");
}

size_t scratch_bytes(const SelectKeysOp& op) {
  return std::max(score_index_scratch(op.heads, op.width, op.pool), kSelectScratch);
}

// The scores of a token take memory for each key that it sees, so late tokens are computed
// in batches. All threads score the keys for the tokens of a batch, and then select keys for them.
void run(const SelectKeysOp& op, Worker& w) noexcept {
  const StepInput& in = w.input();
  const Range own = split(w.tokens(), w.thread, w.threads);
  for (int64_t t = own.begin; t < own.end; t++) {
    if (in.positions[t] < op.most()) select_all(op, t, w);
  }
  const LateTokens late(in, op.most());
  if (late.count() == 0) return;
  const int64_t chunks = ceil_div(late.longest() / op.pool, kChunk), stride = chunks * kChunk;
  const int64_t rows = w.index_floats() / stride;
  for (int64_t first = 0; first < late.count(); first += rows) {
    const ScoreBatch batch{late, first, std::min(rows, late.count() - first), w.index_scores(),
                           stride};
    const int64_t span =
        std::clamp<int64_t>(batch.count * chunks / (w.threads * kSpansPerThread), 1, kMostSpan);
    const int64_t spans = ceil_div(chunks, span);
    if (first > 0) w.barrier();
    w.drain(w.everyone(), batch.count * spans, 1, [&](int64_t i, int64_t) {
      score(op, batch, i / spans, i % spans * span * kChunk, span * kChunk, w);
    });
    w.barrier();
    w.drain(w.everyone(), batch.count, 1, [&](int64_t i, int64_t) { select(op, batch, i, w); });
  }
}

}  // namespace cpuserve
