// Attention, and the operations that prepare its queries, keys and values.
#include "runtime/operations/attention.h"

#include <algorithm>

#include "base/check.h"
#include "runtime/operations/checks.h"
#include "runtime/selection.h"
#include "runtime/worker.h"

namespace cpuserve {
namespace {

// How many tasks of late tokens (selection.h) a thread should have, and the fewest query heads
// of a task: with fewer heads, copying the keys of a task takes longer than multiplying them.
constexpr int64_t kTasksPerThread = 2, kLeastSelectedRows = 8;
constexpr int64_t kMergeRows = 16;  // rows of a task that merges partial results

// Returns where in the scratch the copies of selected keys begin: after the scratch of the kernel,
// and in a latent layer after the values of an attention chunk, too.
size_t copies_at(bool latent, KvType type, int32_t hd_pad) {
  return kAttentionScratch + (latent ? kv_chunk_bytes(type, hd_pad) : 0);
}

// Sets the arguments that all attention units of the operation have in common.
AttentionArgs common_args(const AttentionOp& op, Worker& w) noexcept {
  AttentionArgs args{};
  args.q = w.value(op.q);
  args.scale = op.scale;
  args.softcap = op.softcap;
  args.slopes = w.vector(op.slopes);
  args.sinks = w.vector(op.sinks);
  args.out = w.value(op.out);
  args.scratch = w.scratch;
  args.scratch_bytes = w.work_sizes().attention_bytes;
  args.near_keys = w.work_sizes().near_keys != 0;
  args.values = w.scratch + kAttentionScratch;
  return args;
}

void attend(const AttentionOp& op, const AttentionUnit& u, Worker& w) noexcept {
  const StepInput& in = w.input();
  AttentionArgs args = common_args(op, w);
  args.kv = w.kv().heads(op.layer)[u.kv_head];
  args.kv_head = u.kv_head;
  args.heads = u.heads;
  args.group = op.q_heads / args.kv.kv_heads;
  args.row0 = u.row0;
  args.rows = u.rows;
  args.t0 = in.query_start[u.seq];
  args.pos0 = in.positions[args.t0];
  args.block_table = w.block_table(u.seq, op.layer);
  args.chunk0 = u.chunk0;
  args.chunk1 = u.chunk1;
  args.window = op.sections ? 0 : op.window;  // a unit begins with the chunk of its section
  args.keys = u.both_sides ? u.end_key : op.causal ? 0 : in.kv_len[u.seq];
  if (u.both_sides && op.window > 0) {
    // Here a window limits only the keys before a row. The kernel's reaches to both sides of the
    // row's position: a position and a window that are larger by as much begin at the same key,
    // and end after the picture.
    args.window += u.end_key;
    args.pos0 += u.end_key;
  }
  args.partial = u.partial < 0 ? nullptr : w.partials() + u.partial;
  args.partial_stride = u.partial_stride;
  w.kernels().attention[static_cast<int>(args.kv.type)](args);
}

void merge(const AttentionOp& op, const MergeUnit& u, Worker& w) noexcept {
  const KvLayer& kv = *w.kv().heads(op.layer);
  AttentionMergeArgs args{};
  args.partial = w.partials() + u.partial;
  args.rows = u.rows;
  args.chunks = u.chunks;
  args.kv_head = u.kv_head;
  args.group = op.q_heads / kv.kv_heads;
  args.head_dim = kv.head_dim;
  args.hd_pad = kv.hd_pad;
  args.row0 = u.row0;
  args.t0 = w.input().query_start[u.seq];
  args.sinks = w.vector(op.sinks);
  args.out = w.value(op.out);
  args.scratch = w.scratch;
  args.mixed_values = kv_mixes_values(kv.type);
  w.kernels().attention_merge(args);
}

// The attention of late tokens, which read only the selected keys. A task has one token,
// one KV head, some of the query heads of this KV head, and all selected keys of the token.
// If there are fewer pairs of a token and a KV head than threads, a task has only one chunk
// of these keys, so that threads do not each copy all of them. Each chunk then has partial
// results. Merge tasks add these in ascending order of the chunks, like one task of all chunks.
class SelectedTasks {
 public:
  SelectedTasks(const AttentionOp& op, Worker& w) noexcept
      : op_(op),
        w_(w),
        most_(op.selection == kNone ? INT32_MAX : w.value(op.selection).width),
        late_(w.input(), most_),
        kv_heads_(w.kv().heads(op.layer)->kv_heads),
        group_(op.q_heads / kv_heads_),
        pairs_(late_.count() * kv_heads_),
        chunks_(pairs_ < w.threads ? ceil_div(most_, kChunk) : 1) {
    const int64_t wanted = ceil_div(kTasksPerThread * w.threads, pairs_ * chunks_ + 1);
    parts_ = std::clamp<int64_t>(wanted, 1, ceil_div(group_, kLeastSelectedRows));
  }

  int64_t count() const noexcept { return pairs_ * chunks_ * parts_; }
  int64_t merges() const noexcept {
    return chunks_ > 1 ? pairs_ * ceil_div(group_, kMergeRows) : 0;
  }

  // Copies the keys of the task to the scratch, where they form a sequence, and computes the rows
  // of the task as if their token were the last token of this sequence.
  void run(int64_t task) const noexcept {
    const Pair at = pair(task / parts_ / chunks_);
    const Range rows = split(group_, static_cast<int>(task % parts_), static_cast<int>(parts_));
    const int64_t chunk = task / parts_ % chunks_;
    const int64_t begin = chunk * kChunk, end = chunks_ > 1 ? begin + kChunk : at.keys;
    const int64_t n = std::min(end, at.keys) - begin;
    if (n <= 0) return;
    const KvLayer& kv = w_.kv().heads(op_.layer)[at.head];
    const SelectedKeys keys =
        copy_selected(kv, at.head, w_.block_table(at.seq, op_.layer), at.positions + begin, n,
                      w_.scratch + copies_at(kv.value_offset == 0, kv.type, kv.hd_pad));
    AttentionArgs args = common_args(op_, w_);
    args.kv = keys.layer;
    args.kv_head = at.head;
    args.group = group_;
    args.row0 = rows.begin;
    args.rows = rows.size();
    args.t0 = at.token;
    args.pos0 = static_cast<int32_t>(n) - 1;
    args.block_table = keys.block_table;
    args.chunk1 = static_cast<int32_t>(ceil_div(n, kChunk));
    if (chunks_ > 1) {
      args.partial_stride = ceil_div(at.keys, kChunk);
      args.partial = w_.partials() + partial(at, rows.begin) + chunk * w_.attention_plan().slot();
    }
    w_.kernels().attention[static_cast<int>(kv.type)](args);
  }

  void merge_rows(int64_t task) const noexcept {
    const int64_t tasks = ceil_div(group_, kMergeRows);
    const Pair at = pair(task / tasks);
    const int64_t row = task % tasks * kMergeRows;
    const int64_t first = (at.token - w_.input().query_start[at.seq]) * group_;
    merge(op_,
          {at.seq, at.head, first + row, std::min(kMergeRows, group_ - row),
           ceil_div(at.keys, kChunk), partial(at, row)},
          w_);
  }

 private:
  struct Pair {
    int64_t index, token;
    int32_t seq, head;
    const float* positions;  // of the selected keys
    int64_t keys;            // number of selected keys
  };
  Pair pair(int64_t index) const noexcept {
    const SequenceToken at = late_[index / kv_heads_];
    const float* positions = floats_of(w_.value(op_.selection), at.token);
    int64_t n = most_;
    while (n > 1 && positions[n - 1] < 0) n--;
    return {
        index,     at.token, static_cast<int32_t>(at.seq), static_cast<int32_t>(index % kv_heads_),
        positions, n};
  }
  // Returns the offset of the first partial result of a row in the buffer, in floats.
  int64_t partial(const Pair& at, int64_t row) const noexcept {
    const AttentionPlan& plan = w_.attention_plan();
    return plan.selected_partials() +
           (at.index * group_ * chunks_ + row * ceil_div(at.keys, kChunk)) * plan.slot();
  }

  const AttentionOp& op_;
  Worker& w_;
  const int64_t most_;
  const LateTokens late_;
  const int32_t kv_heads_, group_;
  const int64_t pairs_;   // number of pairs of a late token and a KV head
  const int64_t chunks_;  // number of chunks of a token's selected keys that are tasks of their own
  int64_t parts_;         // number of tasks for the query heads of one KV head
};

}  // namespace

size_t attention_scratch(const AttentionOp& op, const Declarations& p, KvType cache) {
  const CacheLayer& kv = p.kv_layer(op.layer);
  const KvType type = kv_layer_type(cache, kv.latent);
  const size_t before = copies_at(kv.latent, type, kv.hd_pad);
  if (op.selection == kNone) return before;
  KvLayer layer{};
  layer.value_offset = kv.latent ? 0 : 1;
  layer.hd_pad = kv.hd_pad;
  layer.type = type;
  return before + selected_bytes(layer, p.value(op.selection).width);
}

void check_rope(Declarations& p, const char* op, int32_t rotary, Id cos, Id sin) {
  const int64_t half = rotary / 2, count = p.vector(cos).count;
  check_argument(count % half == 0, op, ": a table of ", count,
                 " elements does not hold whole rows of ", half);
  p.check_vector(sin, count, "rope sin");
  check_argument(sin != kNone, op, ": cos is given, but sin is missing");
  p.limits().max_positions = std::min(p.limits().max_positions, count / half);
}

void prepare(RopeStoreOp& op, Declarations& p) {
  const CacheLayer& kv = p.kv_layer(op.layer);
  p.check_tokens("rope_store_kv", {op.qkv, op.q});
  const Value& qkv = p.f32_value(op.qkv, "rope_store_kv qkv");
  check_argument(op.q_heads >= 1 && op.q_heads % kv.kv_heads == 0, "rope_store_kv: ", op.q_heads,
                 " query heads over ", kv.kv_heads, " KV heads");
  const int32_t stored = op.stores ? 2 * kv.kv_heads : 0;
  check_argument(qkv.width >= int64_t{op.q_heads + stored} * kv.head_dim, "rope_store_kv: value ",
                 qkv.name, " of width ", qkv.width, " does not hold q, k and v");
  check_argument(
      p.value(op.q).width == int64_t{op.q_heads} * kv.hd_pad && !quantized(p.value(op.q).format),
      "rope_store_kv: q must be f32 or bf16 of q_heads padded heads");
  check_argument(op.rotary >= 0 && op.rotary % 2 == 0 && op.rotary <= kv.head_dim,
                 "rope_store_kv: cannot rotate ", op.rotary, " of ", kv.head_dim, " dimensions");
  check_argument(!kv.latent, "rope_store_kv: layer ", op.layer, " keeps no values");
  if (op.rotary > 0) check_rope(p, "rope_store_kv", op.rotary, op.cos, op.sin);
  if (!op.axes.empty()) {
    check_argument(static_cast<int64_t>(op.axes.size()) == op.rotary / 2,
                   "rope_store_kv: ", op.axes.size(), " axes for ", op.rotary / 2, " frequencies");
    op.axial = p.axial_rope({op.cos, op.sin, op.axes});
  }
  p.check_vector(op.q_norm, kv.head_dim, "q norm");
  p.check_vector(op.k_norm, kv.head_dim, "k norm");
}

void run(const RopeStoreOp& op, Worker& w) noexcept {
  const Range rows = w.share(w.tokens());
  if (rows.size() == 0) return;
  RopeStoreArgs args{};
  args.qkv = w.value(op.qkv);
  args.q = w.value(op.q);
  args.pieces = w.kv().heads(op.layer);
  args.kv = args.pieces[0];
  if (!op.stores) args.kv.kv_heads = 0;
  args.q_heads = op.q_heads;
  args.rotary = op.rotary;
  args.cos = w.vector(op.cos);
  args.sin = w.vector(op.sin);
  args.q_norm = w.vector(op.q_norm);
  args.k_norm = w.vector(op.k_norm);
  args.eps = op.eps;
  args.positions = w.input().positions;
  if (w.input().angles && op.axial != kNone) {
    args.cos = w.turns(op.axial).cos;
    args.sin = w.turns(op.axial).sin;
    args.positions = w.token_numbers();  // the tables of the step have a row for each token
  }
  args.slots = w.kv_slots(op.layer);
  args.m0 = rows.begin;
  args.m1 = rows.end;
  w.kernels().rope_store(args);
}

void prepare(const AttentionOp& op, const Declarations& p) {
  const CacheLayer& kv = p.kv_layer(op.layer);
  check_argument(op.q_heads >= 1 && op.q_heads % kv.kv_heads == 0, "attention: ", op.q_heads,
                 " query heads over ", kv.kv_heads, " KV heads");
  check_argument(p.value(op.q).width == int64_t{op.q_heads} * kv.hd_pad, "attention: q has width ",
                 p.value(op.q).width);
  p.check_tokens("attention", {op.q, op.out});
  const Value& out = p.value(op.out);
  check_argument(out.width == int64_t{op.q_heads} * kv.head_dim, "attention: out has width ",
                 out.width);
  // Attention writes one head at a time, so two heads must not share a quantization scale.
  check_argument(!whole_row(out.format), "attention: value ", out.name,
                 " has scales wider than a head; only convert can write such rows");
  check_argument(!quantized(out.format) || kv.head_dim % 32 == 0,
                 "attention: q8g32 rows need heads of a multiple of 32, not ", kv.head_dim);
  check_argument(op.window >= 0, "attention: window must be at least 0, not ", op.window);
  p.check_vector(op.slopes, op.q_heads, "ALiBi slopes");
  p.check_vector(op.sinks, op.q_heads, "attention sinks");
  check_argument(!op.spans || (op.causal && op.selection == kNone && op.slopes == kNone),
                 "attention: spans need causal attention to all keys, without ALiBi");
  check_argument(!op.sections || (op.causal && !op.spans && op.window > 0 &&
                                  op.window % kChunk == 0 && op.selection == kNone),
                 "attention: sections need causal attention and a window of whole chunks");
  if (op.selection == kNone) return;
  p.check_tokens("attention", {op.selection});
  p.f32_value(op.selection, "attention selection");
  check_argument(op.causal && op.window == 0 && op.slopes == kNone,
                 "attention: selected keys need causal attention without window and ALiBi");
}

void run(const AttentionOp& op, Worker& w) noexcept {
  const AttentionPlan& plan = w.attention_plan();
  // The plan is for all threads. If some threads of the rank do not take part in this step
  // (parallel/thread_roster.h), the other threads of the rank divide the units of these threads.
  const Range planned = w.ranks().threads_of(w.peers.rank);
  const auto share_of = [&](int owner) {
    const Range of = split(planned.size(), owner, w.peers.size);
    return plan.units_of(planned.begin + of.begin, planned.begin + of.end);
  };
  const AttentionUnit* units = plan.units().data();
  const auto run = [&](int64_t i, int64_t) { attend(op, units[i], w); };
  if (w.in_slice()) return w.drain_slice(plan.units_of(planned.begin, planned.end), 1, run);
  w.drain_shares(w.peers, share_of, 1, run);
  const auto& merges = plan.merges();
  const SelectedTasks selected(op, w);
  const auto parts = static_cast<int64_t>(merges.size());
  if (parts + selected.count() == 0) return;
  w.barrier();
  w.drain(w.everyone(), selected.count() + parts, 1, [&](int64_t i, int64_t) {
    const int64_t part = i - selected.count();
    part < 0 ? selected.run(i) : merge(op, merges[static_cast<size_t>(part)], w);
  });
  if (selected.merges() == 0) return;
  w.barrier();
  w.drain(w.everyone(), selected.merges(), 1, [&](int64_t i, int64_t) { selected.merge_rows(i); });
}

void prepare(const ScaleQueriesOp& op, Declarations& p) {
  p.check_tokens("scale_queries", {op.x});
  check_argument(op.width >= 1, "scale_queries: there must be at least 1 column, not ", op.width);
  p.check_columns(op.x, 0, op.width, "scale_queries x");
  check_argument(op.factors != kNone, "scale_queries: the factors are missing");
  p.limits().max_positions = std::min(p.limits().max_positions, p.vector(op.factors).count);
}

void run(const ScaleQueriesOp& op, Worker& w) noexcept {
  const Rows& x = w.value(op.x);
  const float* factors = w.vector(op.factors);
  const Range mine = w.share(w.tokens());
  for (int64_t t = mine.begin; t < mine.end; t++) {
    const float factor = factors[w.input().positions[t]];
    float* to = floats_of(x, t);
    for (int64_t i = 0; i < op.width; i++) to[i] *= factor;
  }
}

void prepare(const RotateOp& op, Declarations& p) {
  p.check_tokens("rotate", {op.x});
  check_argument(op.heads >= 1 && op.head_dim >= 1, "rotate: ", op.heads, " heads of ", op.head_dim,
                 " dimensions");
  p.check_columns(op.x, 0, int64_t{op.heads} * op.head_dim, "rotate x");
  check_argument(op.rotary >= 2 && op.rotary % 2 == 0 && op.rotary <= op.head_dim,
                 "rotate: cannot rotate ", op.rotary, " of ", op.head_dim, " dimensions");
  check_rope(p, "rotate", op.rotary, op.cos, op.sin);
}

void run(const RotateOp& op, Worker& w) noexcept {
  const Rows& x = w.value(op.x);
  const int64_t half = op.rotary / 2;
  const Range mine = w.share(w.tokens());
  for (int64_t t = mine.begin; t < mine.end; t++) {
    const float* cosine = w.vector(op.cos) + w.input().positions[t] * half;
    const float* sine = w.vector(op.sin) + w.input().positions[t] * half;
    float* head = floats_of(x, t) + (op.paired ? op.head_dim - op.rotary : 0);
    const int64_t step = op.paired ? 2 : 1, other = op.paired ? 1 : half;
    for (int32_t h = 0; h < op.heads; h++, head += op.head_dim) {
      for (int64_t i = 0; i < half; i++) {
        float &first = head[i * step], &second = head[i * step + other];
        const float a = first, b = second;
        first = a * cosine[i] - b * sine[i];
        second = b * cosine[i] + a * sine[i];
      }
    }
  }
}

void prepare(const SplitGatesOp& op, const Declarations& p) {
  p.check_tokens("split_gates", {op.x, op.out});
  const int64_t width = p.f32_value(op.x, "split_gates x").width;
  check_argument(op.x != op.out && p.f32_value(op.out, "split_gates out").width == width,
                 "split_gates: x and out must be two values of one width");
  check_argument(op.heads >= 1 && op.head_dim >= 1 && int64_t{2} * op.heads * op.head_dim <= width,
                 "split_gates: ", op.heads, " heads of ", op.head_dim,
                 " dimensions and as many gates do not fit ", width, " columns");
}

void run(const SplitGatesOp& op, Worker& w) noexcept {
  const Rows &x = w.value(op.x), &out = w.value(op.out);
  const int64_t d = op.head_dim, queries = op.heads * d, rest = x.width - 2 * queries;
  const Range mine = w.share(w.tokens());
  for (int64_t t = mine.begin; t < mine.end; t++) {
    const float* from = floats_of(x, t);
    float* to = floats_of(out, t);
    for (int64_t h = 0; h < op.heads; h++) {
      std::copy_n(from + 2 * h * d, d, to + h * d);
      std::copy_n(from + (2 * h + 1) * d, d, to + queries + rest + h * d);
    }
    std::copy_n(from + 2 * queries, rest, to + queries);
  }
}

void prepare(const ResizeHeadsOp& op, const Declarations& p) {
  p.check_tokens("resize_heads", {op.x, op.out});
  check_argument(op.begin >= 0 && op.heads >= 1 && op.from_width >= 1 && op.to_width >= 1,
                 "resize_heads: ", op.heads, " heads of ", op.from_width, " columns after ",
                 op.begin);
  check_argument(
      p.f32_value(op.x, "resize_heads x").width == op.begin + int64_t{op.heads} * op.from_width &&
          p.f32_value(op.out, "resize_heads out").width ==
              op.begin + int64_t{op.heads} * op.to_width,
      "resize_heads: x and out do not hold ", op.heads, " heads of ", op.from_width, " and ",
      op.to_width, " columns");
}

void run(const ResizeHeadsOp& op, Worker& w) noexcept {
  const Range mine = w.share(w.tokens());
  const int64_t kept = std::min(op.from_width, op.to_width);
  for (int64_t t = mine.begin; t < mine.end; t++) {
    const float* from = floats_of(w.value(op.x), t);
    float* to = floats_of(w.value(op.out), t);
    std::copy_n(from, op.begin, to);
    for (int64_t h = 0; h < op.heads; h++) {
      float* head = to + op.begin + h * op.to_width;
      std::copy_n(from + op.begin + h * op.from_width, kept, head);
      std::fill(head + kept, head + op.to_width, 0.0f);
    }
  }
}

void prepare(RelativeAttentionOp& op, Declarations& p) {
  p.check_tokens(op.kName, {op.qkv, op.out});
  const int64_t all = p.f32_value(op.out, "relative_attention out").width;
  check_argument(op.heads >= 1 && all % op.heads == 0, "relative_attention: ", all,
                 " columns are not those of ", op.heads, " heads");
  check_argument(p.f32_value(op.qkv, "relative_attention qkv").width == 3 * all && op.qkv != op.out,
                 "relative_attention: qkv must have ", 3 * all, " columns");
  check_argument(op.places != kNone, "relative_attention: the rows of the distances are missing");
  op.width = static_cast<int32_t>(all / op.heads);
  op.most = (p.vector(op.places).count + 1) / 2;
  p.check_vector(op.places, 2 * op.most - 1, "relative_attention places");
  for (const Id id : {op.key_table, op.query_table, op.bias_table}) {
    if (id == kNone) continue;
    const int64_t row = id == op.bias_table ? op.heads : all, count = p.vector(id).count;
    check_argument(count % row == 0 && (op.rows == 0 || op.rows == count / row),
                   "relative_attention: tables of ", count, " elements and of ", op.rows,
                   " rows do not fit");
    op.rows = count / row;
  }
  check_argument(op.rows > 0, "relative_attention: there must be a table");
  p.limits().max_positions = std::min(p.limits().max_positions, op.most);
}

// A task is a head of a sequence and some of its rows.
void run(const RelativeAttentionOp& op, Worker& w) noexcept {
  const StepInput& in = w.input();
  const Rows &qkv = w.value(op.qkv), &out = w.value(op.out);
  const int64_t parts = ceil_div(w.tokens(), kRelativeRows) + in.seqs;
  const int64_t width = op.width, all = op.heads * width, table = width * op.rows;
  const auto at_head = [](const float* of, int64_t at) { return of ? of + at : nullptr; };
  w.drain(w.everyone(), parts * op.heads, 1, [&](int64_t i, int64_t) {
    const int64_t head = i % op.heads;
    int64_t part = i / op.heads, seq = 0;
    const auto parts_of = [&](int64_t s) {
      return ceil_div(in.query_start[s + 1] - in.query_start[s], kRelativeRows);
    };
    while (seq < in.seqs && part >= parts_of(seq)) part -= parts_of(seq++);
    if (seq == in.seqs) return;  // there may be fewer parts than ceil_div counts
    const int64_t t0 = in.query_start[seq];
    RelativeAttentionArgs args{};
    args.n = in.query_start[seq + 1] - t0;
    args.row0 = part * kRelativeRows;
    args.rows = std::min(kRelativeRows, args.n - args.row0);
    args.q = floats_of(qkv, t0) + head * width;
    args.k = args.q + all;
    args.v = args.k + all;
    args.stride = float_stride(qkv);
    args.width = op.width;
    args.key_table = at_head(w.vector(op.key_table), head * table);
    args.query_table = at_head(w.vector(op.query_table), head * table);
    args.bias_table = at_head(w.vector(op.bias_table), head * op.rows);
    args.count = op.rows;
    args.places = w.vector(op.places) + op.most - 1;
    args.scale = op.scale;
    args.out = floats_of(out, t0) + head * width;
    args.out_stride = float_stride(out);
    args.scratch = w.scratch;
    w.kernels().relative_attention(args);
  });
}

}  // namespace cpuserve
