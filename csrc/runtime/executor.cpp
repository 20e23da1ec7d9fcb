#include "runtime/executor.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include "base/allocations.h"
#include "base/check.h"
#include "cpu/features.h"
#include "runtime/parts.h"
#include "runtime/worker.h"

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
    : team_(&team),
      program_(&program),
      table_(&program.table()),
      work_sizes_(work_sizes_for(read_cache_sizes(team.first_cpu()), cpu_info().vendor)),
      weights_(program, team.ranks(), std::move(packed)),
      activations_(make_activations(program, values_)),
      kv_(shared.owner ? KvCache(program.kv_layers(), shared.owner->kv_, shared.layers)
                       : KvCache(program.kv_layers(), num_blocks, kv_type, team.ranks())),
      states_(program.states(), num_states, team.ranks()),
      sampler_(checked("num_slots", num_slots, 1), program.vocab(),
               std::min(num_blocks * kBlock, program.max_positions())),
      limits_(limits_of(program, num_blocks, num_slots, checked("max_top", max_top, 0), num_states,
                        checked("num_media", program.media_width() > 0 ? num_media : 0, 0))),
      tables_(num_slots, program.table_groups()),
      barriers_(plan_barriers(program)),
      queue_(team.threads()),
      slots_(static_cast<size_t>(program.max_tokens() * program.cache_groups())),
      state_slots_(program.states().empty() ? 0 : static_cast<size_t>(program.max_tokens())),
      state_before_(program.states().empty() ? 0 : static_cast<size_t>(program.max_seqs())),
      guess_ops_(guess_ops(program)),
      routing_(make_routing(program)),
      slice_(team.ranks().count()),
      op_seconds_(program.ops().size()) {
  check_argument(kv_.num_blocks() == num_blocks && kv_.type() == kv_type, "shared KV layers have ",
                 kv_.num_blocks(), " blocks of another type or number");
  check_kernels(shared.owner == nullptr);
  bind_memory();
  plan_attention();
  carve_work_memory(checked("rows_per_seq", rows_per_seq, 1));
  const auto rows = static_cast<size_t>(program.max_tokens());
  if (weights_.pool()) failed_tokens_ = std::make_unique<std::atomic<bool>[]>(rows);
  // Sequences with draft tokens are not parked: drafters read the hidden rows of the whole step.
  const ExpertPool* pool = weights_.pool();
  if (pool && !pool->has_all() && rows_per_seq == 1 && ParkedRows::possible(program)) {
    parked_ = std::make_unique<ParkedRows>(program);
  }
  const auto tops = rows * static_cast<size_t>(max_top);
  results_.tokens.resize(rows);
  results_.ranks.resize(rows);
  results_.logprobs.resize(rows);
  results_.top_ids.resize(tops);
  results_.top_logprobs.resize(tops);
  const int64_t vectors = program.max_tokens() / program.fold() * program.hidden_width();
  results_.vectors.resize(static_cast<size_t>(vectors));
}

Routing Executor::make_routing(const Program& program) {
  int64_t chosen = 0, experts = 0;
  for (const Op& op : program.ops()) {
    if (const auto* r = std::get_if<RouteOp>(&op)) {
      chosen = std::max<int64_t>(chosen, r->chosen);
      experts = std::max<int64_t>(experts, r->experts);
    }
    if (const auto* a = std::get_if<AdapterOp>(&op)) {
      chosen = std::max<int64_t>(chosen, 1);
      experts = std::max<int64_t>(experts, a->adapters);
    }
  }
  return {program.max_tokens() * chosen, experts};
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
  const KernelTable& t = *table_;
  const auto attention = t.attention[static_cast<int>(kv_.type())];
  check_argument(t.rms_norm && t.layer_norm && t.convert && t.add && t.activation && t.rope_store &&
                     t.latent_store && attention.attend && t.attention_merge && t.store_index &&
                     t.pool_index && t.score_index && t.recurrent && t.short_conv && t.gated_norm &&
                     t.scale_logits && t.sample_scan && t.sample_weigh && t.sample &&
                     t.probe_read &&
                     std::all_of(std::begin(t.probe_dot), std::end(t.probe_dot),
                                 [](auto probe) { return probe != nullptr; }),
                 "level ", t.isa, " lacks a kernel");
  for (const Op& op : program_->ops()) {
    const auto* rope = std::get_if<RopeStoreOp>(&op);
    const auto* latent = std::get_if<LatentStoreOp>(&op);
    check_argument(own || (!latent && !(rope && rope->stores)), "shared KV layers are read only");
    if ((!rope && !latent) || kv_.type() == KvType::bf16 || kv_scaled(kv_.type())) continue;
    const Id q = rope ? rope->q : latent->out;
    check_argument(values_[static_cast<size_t>(q)].format == ActFormat::f32,
                   "queries of an f16 or f32 KV cache must be f32");
  }
}

void Executor::plan_attention() {
  const int64_t keys = kv_.num_blocks() * kBlock;
  const AttentionLimits limits{program_->max_tokens(), program_->max_seqs(),
                               std::min(keys, program_->max_positions()), keys};
  for (const Op& op : program_->ops()) {
    plan_of_op_.push_back(-1);
    const auto* a = std::get_if<AttentionOp>(&op);
    if (!a) continue;
    const CacheLayer& kv = program_->kv_layers()[static_cast<size_t>(a->layer)];
    const int64_t most = a->selection == kNone ? 0 : program_->value(a->selection).width;
    const AttentionGeometry geometry{a->q_heads, kv.kv_heads, kv.hd_pad,
                                     a->window,  a->causal,   static_cast<int32_t>(most),
                                     a->spans,   a->sections};
    if (a->spans) ends_.resize(static_cast<size_t>(program_->max_tokens()));
    size_t plan = 0;
    while (plan < plans_.size() && !(plans_[plan].geometry() == geometry)) plan++;
    if (plan == plans_.size()) {
      plans_.emplace_back(geometry, limits, team_->ranks());
    }
    plan_of_op_.back() = static_cast<int>(plan);
  }
}

void Executor::carve_work_memory(int64_t rows_per_seq) {
  const auto scratch = static_cast<int64_t>(most_scratch_bytes(*program_, kv_.type()));
  for (const Op& op : program_->ops()) {
    const auto* l = std::get_if<LogitsOp>(&op);
    if (l) logit_input_ = values_[static_cast<size_t>(l->x)];
  }
  const int64_t vocab = program_->vocab();
  int64_t partials = 0;  // floats of the buffer of partial results, which all layers share
  for (const AttentionPlan& plan : plans_) partials = std::max(partials, plan.partial_floats());
  index_floats_ = index_score_floats(*program_, kv_.num_blocks());
  const size_t logit_stride = vocab ? row_bytes(ActFormat::f32, vocab) : 0;
  logit_rows_ = std::clamp(program_->max_seqs() * rows_per_seq, kLeastLogitRows, kMostLogitRows);

  const auto carve = [&](Carver& c) {
    scratch_.clear();
    for (int t = 0; t < team_->threads(); t++) {
      const int rank = team_->ranks().of_thread(t);
      if (t > 0 && rank != team_->ranks().of_thread(t - 1)) c.align(Buffer::kPage);
      // There are 4096 unused bytes after each scratch,
      // so that threads share no cache lines or cache sets.
      scratch_.push_back(c.take<uint8_t>(scratch + 4096));
    }
    logit_input_.data = c.take<uint8_t>(logit_rows_ * static_cast<int64_t>(logit_input_.stride));
    logits_ = {c.take<uint8_t>(logit_rows_ * static_cast<int64_t>(logit_stride)), logit_stride,
               vocab, ActFormat::f32};
    partials_ = c.take<float>(partials);
    media_ = c.take<float>(limits_.media * program_->media_width());
    patches_ = c.take<uint8_t>(program_->max_tokens() * program_->patch_width());
    index_scores_ = c.take<float>(index_floats_);
    turns_.clear();
    for (const AxialRope& rope : program_->axial_ropes()) {
      const int64_t count = program_->max_tokens() * static_cast<int64_t>(rope.axes.size());
      float* const cos = c.take<float>(count);
      turns_.push_back({cos, c.take<float>(count)});
    }
    token_numbers_ = c.take<int32_t>(turns_.empty() ? 0 : program_->max_tokens());
  };
  Carver sizes(nullptr);
  carve(sizes);
  work_ = Buffer(sizes.used());
  Carver carver(work_.data());
  carve(carver);
  if (!turns_.empty()) std::iota(token_numbers_, token_numbers_ + program_->max_tokens(), 0);
}

// Makes the arenas of each rank prefer memory of the NUMA node that the rank is pinned to.
// If the system refuses, a page is on the node of the thread that touches it first,
// which is a thread of the rank.
void Executor::bind_memory() {
  binding_.mode = "none";
  if (team_->ranks().count() == 1) return;
  binding_.mode = "bind";
  binding_.nodes = team_->nodes_of_ranks();
  for (size_t r = 0; r < binding_.nodes.size(); r++) {
    const int node = binding_.nodes[r];
    std::vector<Buffer*> arenas{&weights_.matrix_arenas()[r], &kv_.arenas()[r],
                                &states_.arenas()[r]};
    for (size_t i = r; weights_.pool() && i < weights_.pool()->arenas().size();
         i += binding_.nodes.size()) {
      arenas.push_back(&weights_.pool()->arenas()[i]);
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
       {&weights_.matrix_arenas(), &kv_.arenas(), &states_.arenas()}) {
    for (Buffer& arena : *arenas) {
      const int error = arena.interleave(nodes);
      if (error == 0) continue;
      binding_.mode = "first_touch";
      binding_.error = std::string("mbind: ") + std::strerror(error);
    }
  }
}

StepInput Executor::parse(Span<const int32_t> words, Span<const int32_t> masks) {
  const StepInput in = parse_step(words, limits_, tables_, masks);
  check_argument(program_->patch_width() == 0 || in.tokens <= num_patches_, "the step has ",
                 in.tokens, " patches, but only ", num_patches_, " were written");
  for (int64_t r = 0; r < in.rows; r++) {
    check_argument(in.row_target[r] != kSampledRow || sampler_.admitted(in.row_slot[r]),
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
      tables_.change(in.seq_slot[s], g, first, in.new_entries(s, g));
    }
  }
  return in;
}

// Finds the state slot for every token of the step.
// A block without a state slot uses the state slot of the next block that has one.
void Executor::find_state_slots() {
  if (state_slots_.empty()) return;
  const int32_t gone = static_cast<int32_t>(limits_.num_blocks - 1);
  for (int64_t s = 0; s < input_.seqs; s++) {
    const int32_t* table = this->table(s, program_->cache_groups());
    const int64_t first = input_.query_start[s], last = input_.query_start[s + 1] - 1;
    int64_t at = input_.positions[last] / kBlock;
    while (table[at] == gone) at++;
    const auto slot_of = [&](int64_t position) {  // must be called with descending positions
      if (table[position / kBlock] != gone) at = position / kBlock;
      return int64_t{table[at] - gone - 1};
    };
    for (int64_t t = last; t >= first; t--) {
      state_slots_[static_cast<size_t>(t)] = slot_of(input_.positions[t]);
    }
    const int64_t base = input_.positions[first] / kStateChunk * kStateChunk;
    state_before_[static_cast<size_t>(s)] = base ? slot_of(base - 1) : -1;
  }
}

// Copies cos and sin of each token and frequency from the tables of the program, from the row that
// is the place of the token on the axis of the frequency.
void Executor::turn() {
  for (size_t i = 0; input_.angles && i < turns_.size(); i++) {
    const AxialRope& rope = program_->axial_ropes()[i];
    const auto half = static_cast<int64_t>(rope.axes.size());
    const float *cos = weights_.vector(rope.cos), *sin = weights_.vector(rope.sin);
    for (int64_t t = 0; t < input_.tokens; t++) {
      for (int64_t f = 0; f < half; f++) {
        const int64_t from = input_.angle(rope.axes[static_cast<size_t>(f)], t) * half + f;
        turns_[i].cos[t * half + f] = cos[from];
        turns_[i].sin[t * half + f] = sin[from];
      }
    }
  }
}

void Executor::begin_step(const StepInput& in) {
  tap_next_ = started_next_ = -1;
  slice_.begin_op();
  parting_ = false;
  part_failed_.clear();
  if (ExpertPool* pool = weights_.pool()) {
    pool->begin_step();
    guessing_ = pool->guesses() && in.tokens <= most_guess_tokens(*program_);
  }
  set_input(in);
}

// Finds what the operations need of the sequences that they run on.
void Executor::set_input(const StepInput& in) {
  input_ = in;
  for (int64_t t = 0; failed_tokens_ && t < in.tokens; t++) {
    failed_tokens_[static_cast<size_t>(t)].store(false, std::memory_order_relaxed);
  }
  for (int32_t g = 0; g < program_->cache_groups(); g++) {
    int32_t* slots = slots_.data() + g * program_->max_tokens();
    for (int64_t s = 0; s < in.seqs; s++) {
      const int32_t* table = this->table(s, g);
      for (int64_t t = in.query_start[s]; t < in.query_start[s + 1]; t++) {
        const int32_t p = in.positions[t];
        const int32_t block = table[p / kBlock];
        slots[t] = block * kBlock + p % kBlock;
        kv_.want(block);
      }
    }
  }
  kv_.use(*team_);
  find_state_slots();
  turn();
  find_ends();
  for (AttentionPlan& plan : plans_) plan.build(input_);
}

// Finds the last key of each token: the last token of its picture, or its own. A step has whole
// runs of neighbouring tokens of pictures, or ends of runs.
void Executor::find_ends() noexcept {
  if (ends_.empty() || !input_.media_rows) return;
  for (int64_t s = 0; s < input_.seqs; s++) {
    for (int64_t t = input_.query_start[s + 1] - 1, last = t; t >= input_.query_start[s]; t--) {
      const bool joined = t < last && input_.media_row(t) >= 0 && input_.media_row(t + 1) >= 0;
      const auto i = static_cast<size_t>(t);
      ends_[i] = joined ? ends_[i + 1] : input_.positions[t] + 1;
    }
  }
  input_.ends = ends_.data();
}

// Runs operations [first, last) on all threads. Returns false if the step was cancelled.
bool Executor::run_ops(int64_t first, int64_t last) {
  stop_[0] = stop_[1] = false;
  bool finished = true;
  int64_t end_phase = phase_;
  if (std::exchange(queue_threads_, team_->members()) != team_->members()) queue_.reset();
  team_->run_on_all([&](int thread, int threads) noexcept {
    Worker w{*this,   thread,
             threads, team_->rank_threads(thread),
             phase_,  scratch_[static_cast<size_t>(thread)]};
    const bool walked = w.walk(first, last);
    if (thread > 0) return;
    finished = walked;
    end_phase = w.phase;
  });
  phase_ = end_phase;
  // The cancel flag is read again here: other threads read it when they claim tasks,
  // and may have skipped tasks although thread 0 did not see the flag.
  // All threads have finished here, so this read comes after all of their reads.
  finished = finished && !cancelled_.load(std::memory_order_relaxed);
  if (!finished) cancelled_.store(false, std::memory_order_relaxed);
  return finished;
}

void Executor::write_patches(Span<const uint8_t> rows) {
  const int64_t width = program_->patch_width();
  check_argument(
      width > 0 && rows.size() % width == 0 && rows.size() / width <= program_->max_tokens(),
      "write_patches: ", rows.size(), " bytes are not at most ", program_->max_tokens(),
      " patches of ", width);
  tap_next_ = started_next_ = -1;
  std::copy(rows.begin(), rows.end(), patches_);
  num_patches_ = rows.size() / width;
}

void Executor::start(Span<const int32_t> words, int64_t first) {
  check_argument(program_->hidden_width() > 0, "start: the program has no hidden op");
  const auto ops = static_cast<int64_t>(program_->ops().size());
  check_argument(first >= 0 && first < ops, "start: the program has no operation ", first);
  started_.assign(words.begin(), words.end());
  begin_step(accept(started_));
  started_next_ = first;
}

// Returns whether threads may stop after any task of an operation: whether it has no barrier.
bool Executor::can_pause(int64_t op) const noexcept {
  const auto i = static_cast<size_t>(op);
  if (std::holds_alternative<LinearOp>(program_->ops()[i])) return true;
  const auto* attention = std::get_if<AttentionOp>(&program_->ops()[i]);
  if (!attention || attention->selection != kNone) return false;
  return plans_[static_cast<size_t>(plan_of_op_[i])].merges().empty();
}

// Runs a part of an operation, until the time `end`, and at least one task of each thread or one
// part of its rows. Returns whether the operation is complete. Throws if the step was cancelled.
bool Executor::run_slice(int64_t op, int64_t end) {
  const auto i = static_cast<size_t>(op);
  slice_.end = can_pause(op) ? std::max<int64_t>(end, 1) : 0;
  const int64_t parts = barriers_.row_wise[i] ? ceil_div(input_.tokens, Slice::kRows) : 1;
  slice_.parts = static_cast<int>(parts);
  slice_.more = false;
  const bool finished = run_ops(op, op + 1);
  const bool complete = ++slice_.part >= slice_.parts && !slice_.more;
  if (complete || !finished) slice_.begin_op();
  slice_.end = 0;
  slice_.parts = 1;
  if (!finished) fail_system("the step was cancelled");
  return complete;
}

bool Executor::advance(double seconds, int64_t last) {
  check_argument(started_next_ >= 0, "advance: no step has been started");
  const auto all = static_cast<int64_t>(program_->ops().size());
  const int64_t ops = last < 0 ? all : last;
  check_argument(ops > started_next_ && ops <= all, "advance: operation ", ops, " is not later");
  const int64_t end = now_ns() + static_cast<int64_t>(seconds * 1e9);
  int64_t op = std::exchange(started_next_, -1);
  do {
    op += run_slice(op, end);
  } while (op < ops && now_ns() < end);
  team_->adapt();
  if (op < ops) started_next_ = op;
  return op == ops;
}

int64_t Executor::run_step(Span<const int32_t> words, Span<const int32_t> masks, float* logits) {
  const StepInput in = accept(words, masks);
  const int64_t allocations_before = allocations();
  begin_step(in);
  logits_copy_ = logits;
  const bool parts = can_part(in) && !logits;
  const bool finished =
      parts ? run_parts(*this, in) : run_ops(0, static_cast<int64_t>(program_->ops().size()));
  logits_copy_ = nullptr;
  if (!finished) fail_system("the step was cancelled");
  append_samples();
  if (parting_) order_results(*this, in);
  team_->adapt();
  if (!parting_) step_allocations_ += allocations() - allocations_before;
  return in.rows;
}

// Appends the sampled tokens to the sampler states of their requests, except accepted draft tokens:
// sample_rows has already appended each of those before it sampled the next row.
void Executor::append_samples() {
  for (int64_t r = 0; r < input_.rows; r++) {
    const int32_t token = results_.tokens[static_cast<size_t>(r)];
    const bool accepted = token >= 0 && token == input_.draft(r);
    if (input_.row_target[r] == kSampledRow && !accepted)
      sampler_.append(input_.row_slot[r], token);
  }
}

std::vector<int32_t> Executor::failed_sequences() const {
  std::vector<int32_t> out;
  for (int64_t s = 0; failed_tokens_ && s < input_.seqs; s++) {
    bool failed = false;
    for (int64_t t = input_.query_start[s]; t < input_.query_start[s + 1]; t++) {
      failed = failed || failed_tokens_[static_cast<size_t>(t)].load(std::memory_order_relaxed);
    }
    if (failed) out.push_back(parting_ ? part_[static_cast<size_t>(s)] : static_cast<int32_t>(s));
  }
  out.insert(out.end(), part_failed_.begin(), part_failed_.end());
  std::sort(out.begin(), out.end());
  out.erase(std::unique(out.begin(), out.end()), out.end());
  return out;
}

void Executor::check_block(int32_t block) const {
  check_argument(block >= 0 && block < kv_.num_blocks(), "there is no KV block ", block,
                 "; they are 0 to ", kv_.num_blocks() - 1);
}

void Executor::check_group(int32_t group) const {
  check_argument(group >= 0 && group < program_->cache_groups(), "there is no group ", group,
                 " of KV layers; the program has ", program_->cache_groups());
}

void Executor::read_blocks(Span<const int32_t> blocks, int32_t group, uint8_t* to) const {
  check_group(group);
  for (const int32_t block : blocks) {
    check_block(block);
    kv_.read_block(block, group, to);
    to += kv_.block_bytes();
  }
}

void Executor::write_blocks(Span<const int32_t> blocks, int32_t group, const uint8_t* from) {
  check_group(group);
  tap_next_ = -1;
  for (const int32_t block : blocks) check_block(block);
  for (const int32_t block : blocks) kv_.want(block);
  kv_.use(*team_);
  for (const int32_t block : blocks) {
    kv_.write_block(block, group, from);
    from += kv_.block_bytes();
  }
}

void Executor::write_media(int64_t first, Span<const float> rows) {
  const int64_t width = program_->media_width();
  check_argument(width > 0 && rows.size() % width == 0, "write_media: ", rows.size(),
                 " floats are no whole rows of ", width);
  const int64_t count = rows.size() / width;
  check_argument(first >= 0 && first <= limits_.media - count, "write_media: the media buffer has ",
                 limits_.media, " rows, not ", count, " from row ", first, " on");
  tap_next_ = -1;
  std::copy(rows.begin(), rows.end(), media_row(first));
}

void Executor::check_slot(int64_t slot) const {
  check_argument(slot >= 0 && slot < states_.slots(), "there is no state slot ", slot,
                 "; there are ", states_.slots());
}

void Executor::read_snapshot(int64_t slot, uint8_t* to) const {
  check_slot(slot);
  states_.read_snapshot(slot, to);
}

void Executor::write_snapshot(int64_t slot, const uint8_t* from) {
  check_slot(slot);
  states_.write_snapshot(slot, from);
}

int64_t Executor::step(Span<const int32_t> words, Span<const int32_t> masks) {
  return run_step(words, masks, nullptr);
}

int64_t Executor::step_logits(Span<const int32_t> words, float* logits) {
  return run_step(words, {}, logits);
}

}  // namespace cpuserve
