// The operations of compressed attention.
#include "runtime/operations/entries.h"

#include <algorithm>

#include "base/check.h"
#include "runtime/operations/attention.h"
#include "runtime/operations/checks.h"
#include "runtime/operations/pools.h"
#include "runtime/worker.h"

namespace cpuserve {
namespace {

// How many tasks a thread should have, and the fewest query heads of a task: with fewer heads,
// copying the rows of a task takes longer than multiplying them.
constexpr int64_t kEntryTasksPerThread = 2, kLeastHeads = 8;

void check_latent(const Declarations& p, const char* what, Id layer, int64_t width) {
  const CacheLayer& kv = p.kv_layer(layer);
  check_argument(kv.latent && kv.head_dim == width, what, ": layer ", layer,
                 " must be latent and keep rows of ", width, " columns");
}

void check_entries(const char* what, int32_t pool, int64_t width) {
  const bool whole = pool >= 1 && (pool % kBlock == 0 || kBlock % pool == 0);
  check_argument(whole && width % 16 == 0 && width % entry_parts(pool) == 0, what,
                 ": cannot divide ", width, " columns among pools of ", pool,
                 " tokens, which must divide a block of ", kBlock, " or be whole blocks");
}

// Returns the most entries that a token reads.
int64_t most_entries(const EntryAttentionOp& op, const Declarations& p) {
  if (op.entries == kNone) return 0;
  if (op.selection != kNone) return (p.value(op.selection).width + 1) / op.pool - 1;
  return p.max_positions() / op.pool;
}

size_t entry_copies_at(KvType type, int32_t hd_pad) {
  return kAttentionScratch + kv_chunk_bytes(type, hd_pad);
}

// Rows of a token that are copied to the scratch of a thread, where they form a sequence.
class Copies {
 public:
  Copies(const KvLayer& like, uint8_t* to) : layer_(like) {
    layer_.base = to;
    layer_.block_stride = kv_key_bytes(like.type, like.hd_pad);
    layer_.slab_stride = kSlabBlocks * layer_.block_stride;
    layer_.head_stride = layer_.value_offset = 0;
  }

  void add(const KvLayer& from, const int32_t* table, int32_t pool, const float* chosen,
           int64_t first, int64_t n, Worker& w) noexcept {
    w.kernels().gather_entries({from, layer_, table, pool, chosen, first, n, count_});
    count_ += n;
  }

  // Sets the arguments of attention to the copied rows, which are keys and values.
  void read_by(AttentionArgs& args) const noexcept {
    const int64_t blocks = ceil_div(count_, kBlock);
    auto* table =
        reinterpret_cast<int32_t*>(layer_.base + static_cast<size_t>(blocks) * layer_.block_stride);
    for (int64_t b = 0; b < blocks; b++) table[b] = static_cast<int32_t>(b);
    args.kv = layer_;
    args.block_table = table;
    args.pos0 = static_cast<int32_t>(count_) - 1;
    args.chunk1 = static_cast<int32_t>(ceil_div(count_, kChunk));
  }

 private:
  KvLayer layer_;
  int64_t count_ = 0;
};

int64_t sequence_of(const StepInput& in, int64_t token) noexcept {
  int64_t seq = 0;
  while (in.query_start[seq + 1] <= token) seq++;
  return seq;
}

// Computes the attention of some query heads of a token.
void attend(const EntryAttentionOp& op, int64_t token, Range heads, Worker& w) noexcept {
  const StepInput& in = w.input();
  const int64_t position = in.positions[token], seq = sequence_of(in, token);
  const KvLayer& rows = *w.kv().heads(op.layer);
  Copies copies(rows, w.scratch + entry_copies_at(rows.type, rows.hd_pad));
  if (op.entries != kNone) {
    const int64_t whole = (position + 1) / op.pool;
    const float* chosen = nullptr;
    int64_t n = whole;
    if (op.selection != kNone) {
      const Rows& selection = w.value(op.selection);
      chosen = floats_of(selection, token);
      n = std::min<int64_t>(whole, (selection.width + 1) / op.pool - 1);
    }
    copies.add(*w.kv().heads(op.entries), w.block_table(seq, op.entries), op.pool, chosen, 0, n, w);
  }
  const int64_t first = std::max<int64_t>(0, position - op.window + 1);
  copies.add(rows, w.block_table(seq, op.layer), 1, nullptr, first, position + 1 - first, w);
  AttentionArgs args{};
  args.q = w.value(op.q);
  args.scale = op.scale;
  args.sinks = w.vector(op.sinks);
  args.out = w.value(op.out);
  args.scratch = w.scratch;
  args.scratch_bytes = w.work_sizes().attention_bytes;
  args.near_keys = w.work_sizes().near_keys != 0;
  args.values = w.scratch + kAttentionScratch;
  args.group = op.q_heads;
  args.row0 = heads.begin;
  args.rows = heads.size();
  args.t0 = token;
  copies.read_by(args);
  w.kernels().attention[static_cast<int>(rows.type)](args);
}

}  // namespace

void prepare(const PoolEntriesOp& op, Declarations& p) {
  p.check_tokens(op.kName, {op.x});
  check_entries(op.kName, op.pool, op.width);
  for (Id layer = op.raw; layer < op.raw + 2 * op.series(); layer++) {
    check_latent(p, op.kName, layer, op.width);
    check_argument(p.kv_layer(layer).group == p.kv_layer(op.raw).group,
                   "pool_entries: keys and gates must be in one cache group");
  }
  check_latent(p, op.kName, op.to, op.width / entry_parts(op.pool));
  check_argument(p.f32_value(op.x, "pool_entries x").width == op.width, "pool_entries: value ",
                 p.value(op.x).name, " must have ", op.width, " columns");
  check_argument(op.ape != kNone && op.norm != kNone, "pool_entries: a weight is missing");
  p.check_vector(op.ape, int64_t{op.pool} * op.series() * op.width, "pool_entries ape");
  p.check_vector(op.norm, op.width, "pool_entries norm");
  check_argument(op.rotary >= 0 && op.rotary % 2 == 0 && op.rotary <= op.width,
                 "pool_entries: cannot rotate ", op.rotary, " of ", op.width, " columns");
  if (op.rotary > 0) check_rope(p, op.kName, op.rotary, op.cos, op.sin);
}

void run(const PoolEntriesOp& op, Worker& w) noexcept {
  PoolEntriesArgs args{};
  for (int s = 0; s < 2; s++) {
    const int own_series = op.overlap ? s : 0;
    args.keys[s] = *w.kv().heads(op.raw + own_series);
    args.gates[s] = *w.kv().heads(op.raw + op.series() + own_series);
  }
  args.to = *w.kv().heads(op.to);
  args.pool = op.pool;
  args.width = op.width;
  args.overlap = op.overlap;
  args.ape = w.vector(op.ape);
  args.norm = w.vector(op.norm);
  args.eps = op.eps;
  args.rotary = op.rotary;
  args.cos = w.vector(op.cos);
  args.sin = w.vector(op.sin);
  args.scratch = w.scratch;
  each_pools(op.pool, w, [&](int64_t s, int64_t first, int64_t last) {
    args.block_table = w.block_table(s, op.raw);
    args.to_table = w.block_table(s, op.to);
    args.first = first;
    args.last = last;
    w.kernels().pool_entries(args);
  });
}

void prepare(const EntryAttentionOp& op, const Declarations& p) {
  p.check_tokens(op.kName, {op.q, op.out});
  const CacheLayer& kv = p.kv_layer(op.layer);
  check_latent(p, op.kName, op.layer, kv.hd_pad);
  check_argument(op.q_heads >= 1 && op.window >= 1, "entry_attention: there must be heads and a ",
                 "window, not ", op.q_heads, " and ", op.window);
  const int64_t width = int64_t{op.q_heads} * kv.head_dim;
  check_argument(p.f32_value(op.q, "entry_attention q").width == width &&
                     p.f32_value(op.out, "entry_attention out").width == width,
                 "entry_attention: q and out must have ", op.q_heads, " heads of ", kv.head_dim);
  p.check_vector(op.sinks, op.q_heads, "attention sinks");
  if (op.entries == kNone) return;
  check_entries(op.kName, op.pool, kv.head_dim);
  check_latent(p, op.kName, op.entries, kv.head_dim / entry_parts(op.pool));
  if (op.selection == kNone) return;
  p.check_tokens(op.kName, {op.selection});
  const int64_t columns = p.f32_value(op.selection, "entry_attention selection").width;
  check_argument((columns + 1) % op.pool == 0 && columns >= op.pool, "entry_attention: ", columns,
                 " columns do not select pools of ", op.pool, " tokens");
}

size_t entry_scratch(const EntryAttentionOp& op, const Declarations& p, KvType cache) {
  const CacheLayer& kv = p.kv_layer(op.layer);
  const KvType type = kv_layer_type(cache, kv.latent);
  const int64_t window = std::min<int64_t>(op.window, p.max_positions());
  const auto blocks = static_cast<size_t>(ceil_div(most_entries(op, p) + window, kBlock));
  const size_t copies = blocks * (kv_key_bytes(type, kv.hd_pad) + sizeof(int32_t));
  return entry_copies_at(type, kv.hd_pad) + (copies + 63) / 64 * 64;
}

// A task is a token and some of its query heads.
void run(const EntryAttentionOp& op, Worker& w) noexcept {
  const int64_t wanted =
      ceil_div(kEntryTasksPerThread * w.threads, std::max<int64_t>(w.tokens(), 1));
  const int64_t most = ceil_div(op.q_heads, kLeastHeads);
  const int64_t parts = std::clamp<int64_t>(wanted, 1, most);
  w.drain(w.everyone(), w.tokens() * parts, 1, [&](int64_t i, int64_t) {
    const auto part = static_cast<int>(i % parts);
    attend(op, i / parts, split(op.q_heads, part, static_cast<int>(parts)), w);
  });
}

}  // namespace cpuserve
