#include "runtime/executor.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include "base/allocations.h"
#include "base/check.h"
#include "cpu/features.h"
#include "runtime/guess_plan.h"
#include "runtime/parts.h"

namespace cpuserve {
namespace {

// There is memory for the index scores of this number of tokens of the longest sequences. A
// batch of tokens ends with two barriers, so a batch of fewer tokens would cost time in long steps.
constexpr int64_t kTokensOfScores = 8;

size_t most_scratch_bytes(const Program& program, KvType type) {
  size_t bytes = std::max(kLinearScratch, kAttentionScratch);
  for (const Value& v : program.values()) {  // norms and activations need one row in fp32
    bytes = std::max(bytes, row_bytes(ActFormat::f32, v.width));
  }
  for (const Op& op : program.ops()) {
    if (const auto* a = std::get_if<AttentionOp>(&op)) {
      bytes = std::max(bytes, attention_scratch(*a, program, type));
    }
    if (const auto* a = std::get_if<EntryAttentionOp>(&op)) {
      bytes = std::max(bytes, entry_scratch(*a, program, type));
    }
    bytes = std::max(bytes, std::visit([](const auto& o) { return scratch_bytes(o); }, op));
  }
  for (const Matrix& m : program.matrices()) {  // EmbedOp packs one panel of a gathered matrix
    if (m.gathered) bytes = std::max(bytes, m.panel_bytes);
  }
  const auto sampling = static_cast<size_t>(program.vocab()) * 8 + 65536;  // SampleArgs::scratch
  bytes = std::max(bytes, sampling);
  return bytes;
}

// Returns the number of floats for the scores of index keys: enough for several tokens that see as
// many keys as a sequence can have. If the sequences of a step are shorter, the scores of more
// tokens have room.
int64_t index_score_floats(const Program& program, int64_t num_blocks) {
  int64_t most = 0;
  for (const Op& op : program.ops()) {
    const auto* select = std::get_if<SelectKeysOp>(&op);
    if (!select) continue;
    const int64_t keys = std::min(num_blocks * kBlock, program.max_positions());
    most = std::max(most, round_up(keys / select->pool + 1, kChunk));
  }
  return kTokensOfScores * most;
}

StepLimits limits_of(const Program& p, int64_t num_blocks, int64_t num_slots, int64_t max_top,
                     int64_t num_states, int64_t num_media) {
  return {p.max_tokens(),  p.max_seqs(),     p.max_positions(),
          num_blocks,      num_slots,        p.embed_rows(),
          p.vocab(),       max_top,          p.hidden_width() > 0,
          p.adapters(),    p.table_groups(), p.states().empty() ? 0 : num_states,
          num_media,       p.fold(),         p.axes(),
          p.needs_angles()};
}

int64_t checked(const char* what, int64_t value, int64_t least) {
  check_argument(value >= least, what, " must be at least ", least, ", not ", value);
  return value;
}

}  // namespace

Executor::Executor(Team& team, const Program& program, int64_t num_blocks, KvType kv_type,
                   int64_t num_slots, int64_t max_top, int64_t num_states, PackedFile packed,
                   int64_t num_media, int64_t rows_per_seq, const SharedKv& shared)
    : step_(team, program,
            limits_of(program, num_blocks, checked("num_slots", num_slots, 1),
                      checked("max_top", max_top, 0), num_states,
                      checked("num_media", program.media_width() > 0 ? num_media : 0, 0)),
            kv_type, std::move(packed), shared.owner ? &shared.owner->step_ : nullptr,
            shared.layers),
      walk_(program, step_),
      activations_(make_activations(program, step_.values)) {
  step_.work_sizes = work_sizes_for(read_cache_sizes(team.first_cpu()), cpu_info().vendor);
  check_argument(step_.kv.num_blocks() == num_blocks && step_.kv.type() == kv_type,
                 "shared KV layers have ", step_.kv.num_blocks(),
                 " blocks of another type or number");
  check_kernels(shared.owner == nullptr);
  bind_memory();
  plan_attention();
  carve_work_memory(checked("rows_per_seq", rows_per_seq, 1));
  const auto rows = static_cast<size_t>(program.max_tokens());
  if (step_.weights.pool()) step_.failed_tokens = std::make_unique<std::atomic<bool>[]>(rows);
  // Sequences with draft tokens are not parked: drafters read the hidden rows of the whole step.
  const ExpertPool* pool = step_.weights.pool();
  if (pool && !pool->has_all() && rows_per_seq == 1 && can_park(program)) {
    step_.parked = std::make_unique<ParkedRows>(program);
  }
  const auto tops = rows * static_cast<size_t>(max_top);
  step_.results.tokens.resize(rows);
  step_.results.ranks.resize(rows);
  step_.results.logprobs.resize(rows);
  step_.results.top_ids.resize(tops);
  step_.results.top_logprobs.resize(tops);
  const int64_t vectors = program.max_tokens() / program.fold() * program.hidden_width();
  step_.results.vectors.resize(static_cast<size_t>(vectors));
}

Buffer Executor::make_activations(const Program& program, std::vector<Rows>& values) {
  const auto size_of = [&](const Value& v) {
    return v.rows(program.max_tokens()) * static_cast<int64_t>(row_bytes(v.format, v.width));
  };
  Carver sizes(nullptr);
  for (const Value& v : program.values()) sizes.take<uint8_t>(size_of(v));
  Buffer arena(sizes.used());
  Carver carver(arena.data());
  for (const Value& v : program.values()) {
    values.push_back(
        {carver.take<uint8_t>(size_of(v)), row_bytes(v.format, v.width), v.width, v.format});
  }
  return arena;
}

// Checks that the kernel table has the kernels for the KV type and for all operations.
// The Program has already checked each operation by itself. own: the executor may store keys.
void Executor::check_kernels(bool own) const {
  const KernelTable& t = *step_.kernels;
  const auto attention = t.attention[static_cast<int>(step_.kv.type())];
  check_argument(t.rms_norm && t.layer_norm && t.convert && t.add && t.activation && t.rope_store &&
                     t.latent_store && attention.attend && t.attention_merge && t.store_index &&
                     t.pool_index && t.score_index && t.recurrent && t.short_conv && t.gated_norm &&
                     t.scale_logits && t.sample_scan && t.sample_weigh && t.sample &&
                     t.probe_read &&
                     std::all_of(std::begin(t.probe_dot), std::end(t.probe_dot),
                                 [](auto probe) { return probe != nullptr; }),
                 "level ", t.isa, " lacks a kernel");
  for (const Op& op : program().ops()) {
    const auto* rope = std::get_if<RopeStoreOp>(&op);
    const auto* latent = std::get_if<LatentStoreOp>(&op);
    check_argument(own || (!latent && !(rope && rope->stores)), "shared KV layers are read only");
    if ((!rope && !latent) || step_.kv.type() == KvType::bf16 || kv_scaled(step_.kv.type()))
      continue;
    const Id q = rope ? rope->q : latent->out;
    check_argument(step_.values[static_cast<size_t>(q)].format == ActFormat::f32,
                   "queries of an f16 or f32 KV cache must be f32");
  }
}

void Executor::plan_attention() {
  const int64_t keys = step_.kv.num_blocks() * kBlock;
  const AttentionLimits limits{program().max_tokens(), program().max_seqs(),
                               std::min(keys, program().max_positions()), keys};
  for (const Op& op : program().ops()) {
    step_.plan_of_op.push_back(-1);
    const auto* a = std::get_if<AttentionOp>(&op);
    if (!a) continue;
    const CacheLayer& kv = program().kv_layers()[static_cast<size_t>(a->layer)];
    const int64_t most = a->selection == kNone ? 0 : program().value(a->selection).width;
    const AttentionGeometry geometry{a->q_heads, kv.kv_heads, kv.hd_pad,
                                     a->window,  a->causal,   static_cast<int32_t>(most),
                                     a->spans,   a->sections};
    if (a->spans) step_.ends.resize(static_cast<size_t>(program().max_tokens()));
    size_t plan = 0;
    while (plan < step_.plans.size() && !(step_.plans[plan].geometry() == geometry)) plan++;
    if (plan == step_.plans.size()) {
      step_.plans.emplace_back(geometry, limits, step_.team->ranks());
    }
    step_.plan_of_op.back() = static_cast<int>(plan);
  }
}

void Executor::carve_work_memory(int64_t rows_per_seq) {
  const auto scratch = static_cast<int64_t>(most_scratch_bytes(program(), step_.kv.type()));
  for (const Op& op : program().ops()) {
    const auto* l = std::get_if<LogitsOp>(&op);
    if (l) step_.logit_input = step_.values[static_cast<size_t>(l->x)];
  }
  const int64_t vocab = program().vocab();
  int64_t partials = 0;  // floats of the buffer of partial results, which all layers share
  for (const AttentionPlan& plan : step_.plans)
    partials = std::max(partials, plan.partial_floats());
  step_.index_floats = index_score_floats(program(), step_.kv.num_blocks());
  const size_t logit_stride = vocab ? row_bytes(ActFormat::f32, vocab) : 0;
  step_.logit_rows =
      std::clamp(program().max_seqs() * rows_per_seq, kLeastLogitRows, kMostLogitRows);

  const auto carve = [&](Carver& c) {
    step_.scratch.clear();
    for (int t = 0; t < step_.team->threads(); t++) {
      const int rank = step_.team->ranks().of_thread(t);
      if (t > 0 && rank != step_.team->ranks().of_thread(t - 1)) c.align(Buffer::kPage);
      // There are 4096 unused bytes after each scratch,
      // so that threads share no cache lines or cache sets.
      step_.scratch.push_back(c.take<uint8_t>(scratch + 4096));
    }
    step_.logit_input.data =
        c.take<uint8_t>(step_.logit_rows * static_cast<int64_t>(step_.logit_input.stride));
    step_.logits = {c.take<uint8_t>(step_.logit_rows * static_cast<int64_t>(logit_stride)),
                    logit_stride, vocab, ActFormat::f32};
    step_.partials = c.take<float>(partials);
    step_.media = c.take<float>(step_.limits.media * program().media_width());
    step_.patches = c.take<uint8_t>(program().max_tokens() * program().patch_width());
    step_.index_scores = c.take<float>(step_.index_floats);
    step_.turns.clear();
    for (const AxialRope& rope : program().axial_ropes()) {
      const int64_t count = program().max_tokens() * static_cast<int64_t>(rope.axes.size());
      float* const cos = c.take<float>(count);
      step_.turns.push_back({cos, c.take<float>(count)});
    }
    step_.token_numbers = c.take<int32_t>(step_.turns.empty() ? 0 : program().max_tokens());
  };
  Carver sizes(nullptr);
  carve(sizes);
  work_ = Buffer(sizes.used());
  Carver carver(work_.data());
  carve(carver);
  if (!step_.turns.empty())
    std::iota(step_.token_numbers, step_.token_numbers + program().max_tokens(), 0);
}

// Makes the arenas of each rank prefer memory of the NUMA node that the rank is pinned to.
// If the system refuses, a page is on the node of the thread that touches it first,
// which is a thread of the rank.
void Executor::bind_memory() {
  binding_.mode = "none";
  if (step_.team->ranks().count() == 1) return;
  binding_.mode = "bind";
  binding_.nodes = step_.team->nodes_of_ranks();
  for (size_t r = 0; r < binding_.nodes.size(); r++) {
    const int node = binding_.nodes[r];
    std::vector<Buffer*> arenas{&step_.weights.matrix_arenas()[r], &step_.kv.arenas()[r],
                                &step_.states.arenas()[r]};
    for (size_t i = r; step_.weights.pool() && i < step_.weights.pool()->arenas().size();
         i += binding_.nodes.size()) {
      arenas.push_back(&step_.weights.pool()->arenas()[i]);
    }
    for (Buffer* arena : arenas) {
      const int error = node < 0 ? 0 : arena->prefer_node(node);
      if (node >= 0 && error == 0) continue;
      binding_.mode = "first_touch";
      binding_.error = node < 0 ? "a rank's threads are not pinned to one node"
                                : std::string("mbind: ") + std::strerror(error);
    }
  }
}

void Executor::interleave(const std::vector<int>& nodes) {
  binding_ = {"interleave", "", nodes};
  for (std::vector<Buffer>* arenas :
       {&step_.weights.matrix_arenas(), &step_.kv.arenas(), &step_.states.arenas()}) {
    for (Buffer& arena : *arenas) {
      const int error = arena.interleave(nodes);
      if (error == 0) continue;
      binding_.mode = "first_touch";
      binding_.error = std::string("mbind: ") + std::strerror(error);
    }
  }
}

StepInput Executor::parse(Span<const int32_t> words, Span<const int32_t> masks) {
  const StepInput in = parse_step(words, step_.limits, step_.tables, masks);
  check_argument(program().patch_width() == 0 || in.tokens <= num_patches_, "the step has ",
                 in.tokens, " patches, but only ", num_patches_, " were written");
  for (int64_t r = 0; r < in.rows; r++) {
    check_argument(in.row_target[r] != kSampledRow || step_.sampler.admitted(in.row_slot[r]),
                   "row_slot[", r, "] = ", in.row_slot[r], " has not been admitted");
  }
  return in;
}

// Checks the input of a step and applies its new entries to the block tables.
StepInput Executor::accept(Span<const int32_t> words, Span<const int32_t> masks) {
  const StepInput in = parse(words, masks);
  for (int64_t s = 0; s < in.seqs; s++) {
    for (int64_t g = 0; g < in.groups; g++) {
      const int64_t first = in.table_first[s * in.groups + g];
      step_.tables.change(in.seq_slot[s], g, first, in.new_entries(s, g));
    }
  }
  return in;
}

void Executor::begin_step(const StepInput& in) {
  tap_next_ = started_next_ = -1;
  step_.slice.begin_op();
  step_.parting = false;
  step_.part_failed.clear();
  if (ExpertPool* pool = step_.weights.pool()) {
    pool->begin_step();
    step_.guessing = pool->guesses() && in.tokens <= most_guess_tokens(program());
  }
  step_.set_input(in);
}

void Executor::write_patches(Span<const uint8_t> rows) {
  const int64_t width = program().patch_width();
  check_argument(
      width > 0 && rows.size() % width == 0 && rows.size() / width <= program().max_tokens(),
      "write_patches: ", rows.size(), " bytes are not at most ", program().max_tokens(),
      " patches of ", width);
  tap_next_ = started_next_ = -1;
  std::copy(rows.begin(), rows.end(), step_.patches);
  num_patches_ = rows.size() / width;
}

void Executor::start(Span<const int32_t> words, int64_t first) {
  check_argument(program().hidden_width() > 0, "start: the program has no hidden op");
  const auto ops = walk_.num_ops();
  check_argument(first >= 0 && first < ops, "start: the program has no operation ", first);
  started_.assign(words.begin(), words.end());
  begin_step(accept(started_));
  started_next_ = first;
}

// Returns whether threads may stop after any task of an operation: whether it has no barrier.
bool Executor::can_pause(int64_t op) const noexcept {
  const auto i = static_cast<size_t>(op);
  if (std::holds_alternative<LinearOp>(program().ops()[i])) return true;
  const auto* attention = std::get_if<AttentionOp>(&program().ops()[i]);
  if (!attention || attention->selection != kNone) return false;
  return step_.plans[static_cast<size_t>(step_.plan_of_op[i])].merges().empty();
}

// Runs a part of an operation, until the time `end`, and at least one task of each thread or one
// part of its rows. Returns whether the operation is complete. Throws if the step was cancelled.
bool Executor::run_slice(int64_t op, int64_t end) {
  const auto i = static_cast<size_t>(op);
  step_.slice.end = can_pause(op) ? std::max<int64_t>(end, 1) : 0;
  const int64_t parts = walk_.barriers.row_wise[i] ? ceil_div(step_.input.tokens, Slice::kRows) : 1;
  step_.slice.parts = static_cast<int>(parts);
  step_.slice.more = false;
  const bool finished = walk_.run(op, op + 1);
  const bool complete = ++step_.slice.part >= step_.slice.parts && !step_.slice.more;
  if (complete || !finished) step_.slice.begin_op();
  step_.slice.end = 0;
  step_.slice.parts = 1;
  if (!finished) fail_system("the step was cancelled");
  return complete;
}

bool Executor::advance(double seconds, int64_t last) {
  check_argument(started_next_ >= 0, "advance: no step has been started");
  const auto all = walk_.num_ops();
  const int64_t ops = last < 0 ? all : last;
  check_argument(ops > started_next_ && ops <= all, "advance: operation ", ops, " is not later");
  const int64_t end = now_ns() + static_cast<int64_t>(seconds * 1e9);
  int64_t op = std::exchange(started_next_, -1);
  do {
    op += run_slice(op, end);
  } while (op < ops && now_ns() < end);
  step_.team->adapt();
  if (op < ops) started_next_ = op;
  return op == ops;
}

int64_t Executor::run_step(Span<const int32_t> words, Span<const int32_t> masks, float* logits) {
  const StepInput in = accept(words, masks);
  const int64_t allocations_before = allocations();
  begin_step(in);
  step_.logits_copy = logits;
  const bool parts = can_part(step_, in) && !logits;
  const bool finished = parts ? run_parts(walk_, in) : walk_.run(0, walk_.num_ops());
  step_.logits_copy = nullptr;
  if (!finished) fail_system("the step was cancelled");
  append_samples();
  if (step_.parting) order_results(step_, in);
  step_.team->adapt();
  if (!step_.parting) step_allocations_ += allocations() - allocations_before;
  return in.rows;
}

// Appends the sampled tokens to the sampler states of their requests, except accepted draft tokens:
// sample_rows has already appended each of those before it sampled the next row.
void Executor::append_samples() {
  for (int64_t r = 0; r < step_.input.rows; r++) {
    const int32_t token = step_.results.tokens[static_cast<size_t>(r)];
    const bool accepted = token >= 0 && token == step_.input.draft(r);
    if (step_.input.row_target[r] == kSampledRow && !accepted)
      step_.sampler.append(step_.input.row_slot[r], token);
  }
}

void Executor::release(int64_t slot) {
  forget_parked(step_, slot);
  step_.sampler.release(slot);
  step_.tables.release(slot);
}

std::vector<int32_t> Executor::parked_sequences() const {
  return cpuserve::parked_sequences(step_);
}

std::vector<int32_t> Executor::failed_sequences() const {
  std::vector<int32_t> out;
  for (int64_t s = 0; step_.failed_tokens && s < step_.input.seqs; s++) {
    bool failed = false;
    for (int64_t t = step_.input.query_start[s]; t < step_.input.query_start[s + 1]; t++) {
      failed =
          failed || step_.failed_tokens[static_cast<size_t>(t)].load(std::memory_order_relaxed);
    }
    if (failed)
      out.push_back(step_.parting ? step_.part[static_cast<size_t>(s)] : static_cast<int32_t>(s));
  }
  out.insert(out.end(), step_.part_failed.begin(), step_.part_failed.end());
  std::sort(out.begin(), out.end());
  out.erase(std::unique(out.begin(), out.end()), out.end());
  return out;
}

void Executor::check_block(int32_t block) const {
  check_argument(block >= 0 && block < step_.kv.num_blocks(), "there is no KV block ", block,
                 "; they are 0 to ", step_.kv.num_blocks() - 1);
}

void Executor::check_group(int32_t group) const {
  check_argument(group >= 0 && group < program().cache_groups(), "there is no group ", group,
                 " of KV layers; the program has ", program().cache_groups());
}

void Executor::read_blocks(Span<const int32_t> blocks, int32_t group, uint8_t* to) const {
  check_group(group);
  for (const int32_t block : blocks) {
    check_block(block);
    step_.kv.read_block(block, group, to);
    to += step_.kv.block_bytes();
  }
}

void Executor::write_blocks(Span<const int32_t> blocks, int32_t group, const uint8_t* from) {
  check_group(group);
  tap_next_ = -1;
  for (const int32_t block : blocks) check_block(block);
  for (const int32_t block : blocks) step_.kv.want(block);
  step_.kv.use(*step_.team);
  for (const int32_t block : blocks) {
    step_.kv.write_block(block, group, from);
    from += step_.kv.block_bytes();
  }
}

void Executor::write_media(int64_t first, Span<const float> rows) {
  const int64_t width = program().media_width();
  check_argument(width > 0 && rows.size() % width == 0, "write_media: ", rows.size(),
                 " floats are no whole rows of ", width);
  const int64_t count = rows.size() / width;
  check_argument(first >= 0 && first <= step_.limits.media - count,
                 "write_media: the media buffer has ", step_.limits.media, " rows, not ", count,
                 " from row ", first, " on");
  tap_next_ = -1;
  std::copy(rows.begin(), rows.end(), step_.media_row(first));
}

void Executor::check_slot(int64_t slot) const {
  check_argument(slot >= 0 && slot < step_.states.slots(), "there is no state slot ", slot,
                 "; there are ", step_.states.slots());
}

void Executor::read_snapshot(int64_t slot, uint8_t* to) const {
  check_slot(slot);
  step_.states.read_snapshot(slot, to);
}

void Executor::write_snapshot(int64_t slot, const uint8_t* from) {
  check_slot(slot);
  step_.states.write_snapshot(slot, from);
}

int64_t Executor::step(Span<const int32_t> words, Span<const int32_t> masks) {
  return run_step(words, masks, nullptr);
}

int64_t Executor::step_logits(Span<const int32_t> words, float* logits) {
  return run_step(words, {}, logits);
}

}  // namespace cpuserve
