// The executor and its parts without Python, so that it also runs under an emulator and sanitizers:
// index checks, the attention plan, sampler state, and one program at several thread counts.
//
// test_executor [--isa LEVEL] [--few] [SUBSTRING] runs the tests whose names contain SUBSTRING with
// the kernels of LEVEL; without --isa, with those of the highest level this CPU can run. With
// --few, for emulators, which take hundreds of times as long, texts are fewer and shorter.
#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <algorithm>
#include <atomic>
#include <cmath>
#include <random>
#include <stdexcept>
#include <string_view>

#include "base/allocations.h"
#include "cpu/features.h"
#include "kernels/resolve.h"
#include "runtime/executor.h"
#include "testing.h"

using namespace cpuserve;

namespace {

// Returns the kernels of `isa`, or of the highest level if it is empty; nullptr if this CPU or this
// build does not support it.
const KernelTable* find_level(std::string_view isa) {
  const KernelTable* found = nullptr;
  for (const std::string& level : supported_isa_levels(cpu_info())) {
    const KernelTable* table = find_kernels(level);
    if (table && (isa.empty() || isa == level)) found = table;
  }
  return found;
}

const KernelTable* kernels = nullptr;  // the kernels that main() selected
bool few = false;                      // --few

constexpr int64_t kVocab = 50, kWidth = 48, kHeads = 3, kHeadDim = 16, kHidden = 40;
constexpr int64_t kMaxTokens = 900, kBlocks = 40;

std::vector<float> random_floats(int64_t count, uint32_t seed) {
  std::mt19937 engine(seed);
  std::vector<float> out(static_cast<size_t>(count));
  for (float& x : out) x = (static_cast<float>(engine() >> 8) / (1 << 23) - 1.0f) * 0.3f;
  return out;
}

// One decoder layer with one KV head, and maybe a mixture of experts after it.
struct Decoder {
  Program program;
  std::vector<std::pair<Id, int64_t>> matrices;  // id, elements
  std::vector<std::pair<Id, int64_t>> vectors;

  Id matrix(const char* name, int64_t n, int64_t k, std::vector<int64_t> parts, bool glu = false) {
    matrices.emplace_back(
        program.add_matrix(name, WeightKind::dense_f32, n, k, std::move(parts), glu), n * k);
    return matrices.back().first;
  }
  Id vector(const char* name, int64_t count) {
    vectors.emplace_back(program.add_vector(name, count), count);
    return vectors.back().first;
  }

  // Operations that touch own rows of tokens alone stand next to each other, and next to others.
  void add_mixture(Id x, Id h) {
    constexpr int32_t kExperts = 6, kChosen = 2;
    Program& p = program;
    const Id scores = p.add_value("scores", kExperts, ActFormat::f32);
    const Id routing = p.add_value("routing", 2 * kChosen, ActFormat::f32);
    const Id dispatched = p.add_value("dispatched", kWidth, ActFormat::f32, kChosen);
    const Id inner = p.add_value("inner", kHidden, ActFormat::f32, kChosen);
    const Id result = p.add_value("result", kWidth, ActFormat::f32, kChosen);
    p.add(RmsNormOp{x, h, vector("mixture norm", kWidth), 1e-5f});
    p.add(LinearOp{h, scores, matrix("router", kExperts, kWidth, {kExperts}), kNone,
                   Activation::none, false, false, 0});
    p.add(RouteOp{scores, routing, kExperts, kChosen, Score::softmax, true, 1.0f, kNone});
    p.add(DispatchOp{h, routing, dispatched});
    std::vector<Id> in, out;
    for (int32_t e = 0; e < kExperts; e++) {
      in.push_back(matrix("expert up", 2 * kHidden, kWidth, {kHidden, kHidden}, true));
    }
    for (int32_t e = 0; e < kExperts; e++) {
      out.push_back(matrix("expert down", kWidth, kHidden, {kWidth}));
    }
    p.add(ExpertLinearOp{dispatched, routing, inner, in, {}, Activation::silu, true});
    p.add(ExpertLinearOp{inner, routing, result, out, {}, Activation::none, false});
    p.add(CombineOp{result, routing, h, false});
    p.add(ScaleOp{h, vector("factors", kWidth)});
    p.add(AddOp{h, x});
  }

  explicit Decoder(float scale = 1, float softcap = 0, const KernelTable& table = *kernels,
                   bool mixture = false)
      : program(table, kMaxTokens, 4) {
    Program& p = program;
    const Id x = p.add_value("x", kWidth, ActFormat::f32);
    const Id h = p.add_value("h", kWidth, ActFormat::f32);
    const Id qkv = p.add_value("qkv", (kHeads + 2) * kHeadDim, ActFormat::f32);
    const Id q = p.add_value("q", kHeads * kHeadDim, ActFormat::f32);
    const Id a = p.add_value("a", kHeads * kHeadDim, ActFormat::f32);
    const Id g = p.add_value("g", kHidden, ActFormat::f32);
    const Id embed = matrix("embed", kVocab, kWidth, {kVocab});
    const Id norm = vector("norm", kWidth);
    const Id layer = p.add_kv_layer(1, kHeadDim);
    p.add(EmbedOp{x, embed, 1});
    p.add(RmsNormOp{x, h, norm, 1e-5f});
    const int64_t rows = (kHeads + 2) * kHeadDim;
    p.add(LinearOp{h, qkv, matrix("qkv", rows, kWidth, {kHeads * kHeadDim, kHeadDim, kHeadDim}),
                   kNone, Activation::none, false, false, 0});
    p.add(RopeStoreOp{qkv, q, layer, kHeads, 0, kNone, kNone, kNone, kNone, 1e-5f});
    p.add(AttentionOp{q, a, layer, kHeads, 0.25f, 0, 0, kNone, kNone});
    p.add(LinearOp{a, x, matrix("o", kWidth, kHeads * kHeadDim, {kWidth}), kNone, Activation::none,
                   false, true, 0});
    p.add(LinearOp{x, g, matrix("up", 2 * kHidden, kWidth, {kHidden, kHidden}, true), kNone,
                   Activation::silu, true, false, 0});
    p.add(LinearOp{g, x, matrix("down", kWidth, kHidden, {kWidth}), kNone, Activation::none, false,
                   true, 0});
    if (mixture) add_mixture(x, h);
    p.add(LogitsOp{x, embed, kNone, scale, softcap});
  }

  void load(Executor& e) const {
    uint32_t seed = 1;
    for (const auto& [id, count] : matrices) {
      const std::vector<float> data = random_floats(count, seed++);
      const Matrix& m = program.matrices()[static_cast<size_t>(id)];
      std::vector<SourceTensor> parts;
      const auto* at = reinterpret_cast<const uint8_t*>(data.data());
      const size_t bytes = static_cast<size_t>(m.k) * sizeof(float);
      for (int64_t rows : m.parts) {
        parts.push_back({at, rows, bytes, SourceType::f32, nullptr});
        at += static_cast<size_t>(rows) * bytes;
      }
      e.weights().load_matrix(e.team(), id, parts);
    }
    for (const auto& [id, count] : vectors) {
      const std::vector<float> ones(static_cast<size_t>(count), 1.0f);
      e.weights().load_vector(id, ones);
    }
  }
};

// Words of one sequence of `ids` from `start` on, all its rows scored; blocks 0, 1, 2 ... in slot
// 0, which has the first `kept` of them.
std::vector<int32_t> words_of(const std::vector<int32_t>& ids, int32_t start, int32_t kept = 0) {
  const auto n = static_cast<int32_t>(ids.size());
  const int32_t keys = start + n, blocks = (keys + kBlock - 1) / kBlock - kept;
  std::vector<int32_t> w{n, 1, n, blocks, 0, 0, 0, 0};
  const auto append = [&w](int32_t count, auto value) {
    for (int32_t i = 0; i < count; i++) w.push_back(value(i));
  };
  append(n, [&](int32_t i) { return ids[static_cast<size_t>(i)]; });
  append(n, [&](int32_t i) { return start + i; });
  w.insert(w.end(), {0, n, keys, 0, kept, 0, blocks});
  append(blocks, [&](int32_t i) { return kept + i; });
  append(n, [](int32_t i) { return i; });
  for (int32_t fill : {0, 1, -1}) append(n, [fill](int32_t) { return fill; });
  return w;
}

// Words of a sequence whose last token is `last` and whose further tokens are `drafts`, which its
// rows sample and verify.
std::vector<int32_t> verifying(int32_t last, const std::vector<int32_t>& drafts, int32_t start) {
  std::vector<int32_t> ids{last};
  ids.insert(ids.end(), drafts.begin(), drafts.end());
  std::vector<int32_t> w = words_of(ids, start);
  const auto rows = static_cast<std::ptrdiff_t>(ids.size());
  std::fill(w.end() - 2 * rows, w.end() - rows, -1);  // row_target: sample
  std::fill(w.end() - rows, w.end(), 3);              // row_top
  w.insert(w.end(), drafts.begin(), drafts.end());
  w.push_back(-1);
  w[7] = static_cast<int32_t>(rows);
  return w;
}

std::vector<int32_t> token_ids(int64_t count) {
  std::mt19937 engine(11);
  std::vector<int32_t> ids(static_cast<size_t>(count));
  for (int32_t& id : ids) id = static_cast<int32_t>(engine() % kVocab);
  return ids;
}

// Logits of `ids` run in chunks of `step` tokens by a team of `threads`.
std::vector<float> logits_of(int threads, const std::vector<int32_t>& ids, size_t step,
                             const std::vector<int>& ranks = {},
                             const Decoder& decoder = Decoder()) {
  Team team(threads, {}, false, ranks);
  std::vector<float> out(ids.size() * kVocab);
  team.run([&] {
    Executor e(team, decoder.program, kBlocks, KvType::f32, 2, 4);
    decoder.load(e);
    for (size_t at = 0; at < ids.size(); at += step) {
      const size_t n = std::min(step, ids.size() - at);
      const std::vector<int32_t> part(ids.begin() + static_cast<std::ptrdiff_t>(at),
                                      ids.begin() + static_cast<std::ptrdiff_t>(at + n));
      e.step_logits(words_of(part, static_cast<int32_t>(at)), out.data() + at * kVocab);
    }
  });
  return out;
}

constexpr AttentionLimits kLimits{4096, 4, 100'000, 400'000};  // of the plans below

// Of slots without tables.
StepInput parse_alone(const std::vector<int32_t>& words, const StepLimits& limits,
                      Span<const int32_t> masks = {}) {
  BlockTables tables(limits.num_slots, limits.groups);
  return parse_step(words, limits, tables, masks);
}

StepInput one_sequence(std::vector<int32_t>& words, int32_t queries, int32_t keys) {
  words = words_of(std::vector<int32_t>(static_cast<size_t>(queries)), keys - queries);
  return parse_alone(words, {4096, 4, INT32_MAX, 1 << 20, 2, kVocab, kVocab, 4});
}

// Counts how often each (row, head, chunk) that a row can see is visited.
bool covers_everything_once(const AttentionPlan& plan, int32_t queries, int32_t keys) {
  const AttentionGeometry& g = plan.geometry();
  const int64_t rows = int64_t{queries} * g.group(), chunks = keys / kChunk + 1;
  std::vector<int> visits(static_cast<size_t>(g.kv_heads * rows * chunks));
  for (const AttentionUnit& u : plan.units()) {
    for (int64_t i = 0; i < u.heads * u.rows; i++) {
      const int64_t head = u.kv_head + i / u.rows, r = u.row0 + i % u.rows;
      for (int32_t c = u.chunk0; c < u.chunk1; c++) {
        visits[static_cast<size_t>((head * rows + r) * chunks + c)]++;
      }
    }
  }
  for (int32_t head = 0; head < g.kv_heads; head++) {
    for (int64_t r = 0; r < rows; r++) {
      const int64_t position = keys - queries + r / g.group();
      const int64_t first = g.window ? std::max<int64_t>(0, position - g.window + 1) : 0;
      for (int64_t c = first / kChunk; c <= position / kChunk; c++) {
        if (visits[static_cast<size_t>((head * rows + r) * chunks + c)] != 1) return false;
      }
    }
  }
  return true;
}

}  // namespace

TEST(threads_and_chunks_never_change_a_bit) {
  const std::vector<int32_t> ids = token_ids(few ? 300 : 600);
  const std::vector<float> whole = logits_of(1, ids, ids.size());
  EXPECT(std::all_of(whole.begin(), whole.end(), [](float x) { return std::isfinite(x); }));
  // The last token: decode over three chunks (of few, two), split.
  EXPECT(logits_of(2, ids, ids.size() - 1) == whole);
  EXPECT(logits_of(5, ids, 64) == whole);
  if (few) return;
  EXPECT(logits_of(1, ids, 7) == whole);
  EXPECT(logits_of(3, ids, 250) == whole);
}

TEST(capped_logits_are_the_tanh_of_plain_ones_and_no_number_of_threads_changes_a_bit) {
  const std::vector<int32_t> ids = token_ids(70);  // more rows than are sampled at a time
  const std::vector<float> plain = logits_of(1, ids, ids.size());
  const std::vector<float> capped = logits_of(1, ids, ids.size(), {}, Decoder(0.5f, 0.25f));
  double worst = 0;
  for (size_t i = 0; i < plain.size(); i++) {
    const double want = 0.25 * std::tanh(0.5 * static_cast<double>(plain[i]) / 0.25);
    worst = std::max(worst, std::fabs(static_cast<double>(capped[i]) - want));
  }
  EXPECT(worst < 3e-7);
  for (int threads : {2, 3, 5}) {
    EXPECT(logits_of(threads, ids, 64, {}, Decoder(0.5f, 0.25f)) == capped);
  }
}

TEST(threads_and_chunks_never_change_a_bit_of_a_mixture) {
  const Decoder decoder(1, 0, *kernels, true);
  const std::vector<int32_t> ids = token_ids(80);
  const std::vector<float> whole = logits_of(1, ids, ids.size(), {}, decoder);
  EXPECT(std::all_of(whole.begin(), whole.end(), [](float x) { return std::isfinite(x); }));
  for (int threads : {2, 3, 5}) {
    for (size_t step : {1, 3, 64}) EXPECT(logits_of(threads, ids, step, {}, decoder) == whole);
  }
  EXPECT(logits_of(4, ids, 1, {1, 3}, decoder) == whole);
}

// Of steps with one token and with several, how many barriers there are.
std::pair<int64_t, int64_t> barriers_of(const Decoder& decoder, const std::vector<int>& speeds) {
  std::pair<int64_t, int64_t> out;
  Team team(2, {}, false, {}, {}, speeds);
  team.run([&] {
    Executor e(team, decoder.program, kBlocks, KvType::f32, 2, 4);
    decoder.load(e);
    const auto count = [&](int64_t tokens) {
      const int64_t before = e.progress().first;
      e.step(words_of(token_ids(tokens), 0));
      return e.progress().first - before;
    };
    out = {count(1), count(20)};
  });
  return out;
}

TEST(threads_wait_only_where_one_needs_what_another_wrote) {
  using Counts = std::pair<int64_t, int64_t>;
  // qkv, attention, o, up, down, gathered rows, logits, and the end of the step; a prompt has one
  // more between RoPE and attention, and one between norm and qkv.
  EXPECT(barriers_of(Decoder(), {}) == Counts(9, 10));
  // The mixture adds router, up and down to one token; a prompt has others before and after the
  // router, after the choice, and after the rows are dispatched. Combine, scale and add need none.
  EXPECT(barriers_of(Decoder(1, 0, *kernels, true), {}) == Counts(12, 17));
  // Where a slow core could be the one that all others wait for, nothing is done at barriers.
  EXPECT(barriers_of(Decoder(), {2, 1}) == Counts(10, 10));
}

TEST(an_operation_waits_for_others_unless_all_divide_the_same_rows) {
  const Decoder decoder(1, 0, *kernels, true);
  const BarrierPlan barriers = plan_barriers(decoder.program);
  std::string found;
  for (size_t i = 0; i < barriers.before.size(); i++) {
    found += std::string(barriers.before[i] ? "| " : "") + op_name(decoder.program.ops()[i]) + " ";
  }
  EXPECT(
      found ==
      "embed rms_norm | linear | rope_store_kv | attention | linear | linear | linear | rms_norm "
      "| linear | route dispatch | expert_linear | expert_linear | combine scale add | logits ");
}

TEST(ranks_never_change_a_bit) {
  const std::vector<int32_t> ids = token_ids(few ? 300 : 600);
  const std::vector<float> whole = logits_of(1, ids, ids.size());
  EXPECT(logits_of(3, ids, ids.size() - 1, {1, 1, 1}) == whole);
  EXPECT(logits_of(4, ids, 250, {1, 3}) == whole);
  if (few) return;
  EXPECT(logits_of(2, ids, 599, {1, 1}) == whole);
  EXPECT(logits_of(6, ids, 300, {1, 1, 1, 1, 1, 1}) == whole);
}

TEST(a_step_allocates_nothing) {
  Decoder decoder;
  Team team(2, {});
  team.run([&] {
    Executor e(team, decoder.program, kBlocks, KvType::f32, 2, 4);
    decoder.load(e);
    SlotRequest request;
    request.presence = 0.5f;
    e.sampler().admit(0, request);
    const std::vector<int32_t> prompt = words_of(token_ids(600), 0);
    std::vector<int32_t> decode = words_of(token_ids(1), 600);
    decode[decode.size() - 2] = -1;  // row_target: sample
    e.step(prompt);
    const int64_t before = allocations();
    e.step(prompt);
    e.step(decode);
    EXPECT(allocations() == before);
    EXPECT(e.step_allocations() == 0);
  });
}

// What a row sampled, with its alternatives.
struct Sampled {
  int32_t token, rank;
  float logprob;
  std::vector<int32_t> ids;
  bool operator==(const Sampled& o) const {
    return token == o.token && rank == o.rank && logprob == o.logprob && ids == o.ids;
  }
};

Sampled sampled(const Executor& e, int64_t row) {
  const auto r = static_cast<size_t>(row);
  const StepResults& got = e.results();
  const auto first = got.top_ids.begin() + row * e.max_top();
  return {got.tokens[r], got.ranks[r], got.logprobs[r], {first, first + 3}};
}

// An answer of 90 tokens to `prompt`, of which each step verifies `drafts` with every `wrong`th one
// spoiled. `truth` is the answer; empty if steps of one token are to find it.
std::vector<Sampled> answer_of(int threads, const SlotRequest& request, size_t drafts, size_t wrong,
                               const std::vector<Sampled>& truth) {
  const Decoder decoder;
  const std::vector<int32_t> prompt = token_ids(40);
  std::vector<Sampled> out;
  Team team(threads, {});
  team.run([&] {
    Executor e(team, decoder.program, kBlocks, KvType::f32, 2, 4);
    decoder.load(e);
    e.sampler().admit(0, request);
    e.step(words_of({prompt.begin(), prompt.end() - 1}, 0));
    int32_t last = prompt.back(), start = static_cast<int32_t>(prompt.size()) - 1;
    while (out.size() < 90) {
      std::vector<int32_t> guess;
      for (size_t i = out.size(); i < std::min(truth.size(), out.size() + drafts); i++) {
        const int32_t token = truth[i].token;
        guess.push_back(wrong > 0 && i % wrong == 0 ? (token + 1) % kVocab : token);
      }
      const int64_t rows = e.step(verifying(last, guess, start));
      bool right = true;
      for (int64_t r = 0; r < rows; r++) {
        const Sampled s = sampled(e, r);
        EXPECT(right == (s.token >= 0));
        if (!right) continue;
        out.push_back(s);
        last = s.token;
        start++;
        right = r + 1 < rows && s.token == guess[static_cast<size_t>(r)];
      }
    }
    EXPECT(e.step_allocations() == 0);
  });
  out.resize(90);
  return out;
}

std::vector<size_t> numbers(std::vector<size_t> all, std::vector<size_t> with_few) {
  return few ? with_few : all;
}

TEST(verified_drafts_give_what_steps_of_one_token_give) {
  const std::vector<int32_t> prompt = token_ids(40), stops{3, 4, 5, 6, 7, 8, 9, 10, 11, 12};
  const std::vector<int32_t> biased{20};
  const std::vector<float> bias{0.5f};
  SlotRequest greedy, warm;
  greedy.temperature = 0;
  greedy.presence = 0.3f;
  greedy.frequency = 0.1f;
  greedy.prompt = prompt;
  warm.temperature = 0.8f;
  warm.seed = 7;
  warm.repetition = 1.2f;
  warm.top_k = 30;
  warm.min_tokens = 33;
  warm.stop_ids = stops;
  warm.bias_ids = biased;
  warm.bias_values = bias;
  warm.prompt = prompt;
  for (const SlotRequest& request : {greedy, warm}) {
    const std::vector<Sampled> truth = answer_of(1, request, 0, 0, {});
    // With 40 drafts the rows of a sequence are sampled in two blocks.
    for (size_t drafts : numbers({1, 5, 31, 32, 40}, {5, 40})) {
      for (size_t wrong : numbers({0, 1, 4, 37}, {4})) {
        const int threads = static_cast<int>(drafts % 3) + 1;
        EXPECT(answer_of(threads, request, drafts, wrong, truth) == truth);
      }
    }
  }
}

// Logits alone, of a vocabulary that threads share in pieces.
struct Sampling {
  static constexpr int64_t kWords = 20'000;
  Program program{*kernels, 64, 4};
  Id embed = program.add_matrix("embed", WeightKind::dense_f32, kWords, 16, {kWords}, false);

  Sampling() {
    const Id x = program.add_value("x", 16, ActFormat::f32);
    program.add(EmbedOp{x, embed, 1});
    program.add_kv_layer(1, 16);
    program.add(LogitsOp{x, embed, kNone, 3.0f, 0.0f});
  }
  std::vector<Sampled> sample(int threads, const SlotRequest& request, int32_t drafts) const {
    std::vector<Sampled> out;
    Team team(threads, {});
    team.run([&] {
      Executor e(team, program, 8, KvType::f32, 2, 4);
      const std::vector<float> data = random_floats(kWords * 16, 3);
      const std::vector<SourceTensor> parts{{reinterpret_cast<const uint8_t*>(data.data()), kWords,
                                             16 * sizeof(float), SourceType::f32, nullptr}};
      e.weights().load_matrix(e.team(), embed, parts);
      e.sampler().admit(0, request);
      std::vector<int32_t> guess;
      for (int32_t i = 0; i < drafts; i++) guess.push_back(700 * i);
      for (const int32_t top : {3, 0, -1}) {
        std::vector<int32_t> words = verifying(9, guess, 0);
        const auto rows = static_cast<std::ptrdiff_t>(guess.size()) + 1;
        std::fill(words.end() - 2 * rows, words.end() - rows, top);
        const int64_t count = e.step(words);
        for (int64_t r = 0; r < count; r++) {
          out.push_back(sampled(e, r));
          if (top < 3) out.back().ids.clear();
          if (top < 0) out.back().rank = 0, out.back().logprob = 0;
        }
      }
    });
    return out;
  }
};

TEST(threads_that_share_a_row_of_logits_sample_what_one_thread_samples) {
  const Sampling sampling;
  SlotRequest greedy, warm, penalized;
  greedy.temperature = 0;
  warm.temperature = 0.8f;
  warm.top_p = 0.9f;
  warm.seed = 5;
  penalized = warm;
  penalized.presence = 0.5f;
  penalized.top_k = 40;
  for (const SlotRequest& request : {greedy, warm, penalized}) {
    for (int32_t drafts : {0, 2}) {
      const std::vector<Sampled> one = sampling.sample(1, request, drafts);
      for (int threads : {2, 3, 5, 8}) EXPECT(sampling.sample(threads, request, drafts) == one);
    }
  }
}

// The executor that the first norm of a step cancels, and the number of calls of the operation
// after the next one, by any thread.
Executor* cancelled_by_norm = nullptr;
std::atomic<int> stores{0};

KernelTable cancelling_kernels() {
  KernelTable table = *kernels;
  table.rms_norm = [](const NormArgs& a) noexcept {
    if (cancelled_by_norm) cancelled_by_norm->cancel(true);
    kernels->rms_norm(a);
  };
  table.rope_store = [](const RopeStoreArgs& a) noexcept {
    stores++;
    kernels->rope_store(a);
  };
  return table;
}

TEST(a_step_that_is_cancelled_while_it_runs_goes_no_further) {
  const KernelTable table = cancelling_kernels();
  const Decoder decoder(1, 0, table);
  const std::vector<int32_t> ids = token_ids(64);
  const std::vector<float> want = logits_of(1, ids, ids.size());
  std::vector<float> got(want.size());
  for (int threads : {1, 2, 3}) {
    Team team(threads, {});
    team.run([&] {
      Executor e(team, decoder.program, kBlocks, KvType::f32, 2, 4);
      decoder.load(e);
      cancelled_by_norm = &e;
      stores = 0;
      EXPECT_THROWS(std::runtime_error, "cancelled", e.step(words_of(ids, 0)));
      EXPECT(stores == 0);
      cancelled_by_norm = nullptr;
      e.step_logits(words_of(ids, 0), got.data());
      EXPECT(stores > 0 && got == want);
    });
  }
}

// Runs `good` with every word spoiled in several ways, each refused or harmless; then `good`. Each
// time after `before`, if that is a step.
void spoil(Executor& e, const std::vector<int32_t>& good, int64_t rows,
           const std::vector<int32_t>& before = {}) {
  int refused = 0;
  for (size_t at = 0; at < good.size(); at++) {
    for (int32_t value : {-1, INT32_MIN, INT32_MAX, good[at] + 1, 1 << 20}) {
      std::vector<int32_t> bad = good;
      bad[at] = value;
      if (!before.empty()) e.step(before);
      try {
        e.step(bad);
      } catch (const std::invalid_argument&) {
        refused++;
      }
    }
  }
  EXPECT(refused > static_cast<int>(good.size()));
  if (!before.empty()) e.step(before);
  EXPECT(e.step(good) == rows);
}

TEST(words_with_any_one_word_spoiled_run_or_are_refused) {
  Decoder decoder;
  Team team(1, {});
  Executor e(team, decoder.program, kBlocks, KvType::f32, 2, 4);
  decoder.load(e);
  const int64_t rows = few ? 6 : 40;  // in two blocks or three
  spoil(e, words_of(token_ids(rows), 30), rows);
  spoil(e, words_of(token_ids(9), 90, 3), 9, words_of(token_ids(1), 89));
  e.sampler().admit(0, {});
  spoil(e, verifying(1, token_ids(rows - 1), 30), rows);
}

TEST(drafts_that_the_next_row_does_not_follow_are_refused) {
  const StepLimits limits{64, 2, 100, 8, 2, kVocab, kVocab, 4};
  const std::vector<int32_t> good = verifying(1, {2, 3, 4}, 30);
  EXPECT(parse_alone(good, limits).draft(1) == 3 && parse_alone(good, limits).draft(3) == -1);
  // Five sections of a word for each of 4 rows, from the end: token, slot, target, top, draft.
  const size_t draft = good.size() - 4, target = draft - 8, slot = target - 4, token = slot - 4;
  const std::vector<std::pair<size_t, int32_t>> faults{
      {draft, 3},      {draft + 3, 1}, {draft, kVocab}, {target, 5},
      {target + 1, 5}, {slot + 2, 1},  {token + 1, 0},  {7, 3}};
  for (const auto& [at, value] : faults) {
    std::vector<int32_t> bad = good;
    bad[at] = value;
    EXPECT(!testing::message_of<std::invalid_argument>([&] { parse_alone(bad, limits); }).empty());
  }
  // Without the middle draft there are two runs of rows for one slot, of which threads could
  // change the state at a time.
  std::vector<int32_t> two = good;
  two[draft + 1] = -1;
  EXPECT_THROWS(std::invalid_argument, "verified by other rows", parse_alone(two, limits));
}

TEST(masks_are_refused_unless_every_row_names_one_that_exists) {
  std::vector<int32_t> words = words_of(token_ids(2), 3);
  const StepLimits limits{16, 2, 100, 8, 2, kVocab, kVocab, 4};
  const std::vector<int32_t> masks(static_cast<size_t>(3 * mask_words(kVocab)));
  const auto refusal = [&](int32_t first, int32_t second, size_t num_words) {
    std::vector<int32_t> with = words;
    with[4] = 3;
    with.insert(with.end(), {first, second});
    const Span<const int32_t> given(masks.data(), static_cast<int64_t>(num_words));
    return testing::message_of<std::invalid_argument>([&] { parse_alone(with, limits, given); });
  };
  EXPECT(refusal(-1, 2, masks.size()).empty());
  EXPECT(refusal(0, 3, masks.size()).find("row_mask[1] = 3") != std::string::npos);
  EXPECT(refusal(-2, 0, masks.size()).find("row_mask[0] = -2") != std::string::npos);
  EXPECT(refusal(0, 0, masks.size() - 1).find("masks of the step") != std::string::npos);
  EXPECT(refusal(0, 0, 0).find("masks of the step") != std::string::npos);
  EXPECT(parse_alone(words, limits).row_mask == nullptr);
  words[4] = INT32_MAX;
  EXPECT(!testing::message_of<std::invalid_argument>([&] { parse_alone(words, limits); }).empty());
}

TEST(words_cut_anywhere_are_refused) {
  const StepLimits limits{16, 2, 100, 8, 2, kVocab, kVocab, 4};
  for (const auto& good : {words_of(token_ids(9), 3), verifying(1, token_ids(8), 3)}) {
    for (size_t n = 0; n < good.size(); n++) {
      const std::vector<int32_t> cut(good.begin(), good.begin() + static_cast<std::ptrdiff_t>(n));
      EXPECT(
          !testing::message_of<std::invalid_argument>([&] { parse_alone(cut, limits); }).empty());
    }
    EXPECT(parse_alone(good, limits).tokens == 9);
  }
}

// Words of two sequences, of 40 and 70 keys, each of which decodes a token; every table is
// {first, its new entries}.
using NewEntries = std::pair<int32_t, std::vector<int32_t>>;
std::vector<int32_t> two_sequences(int32_t slot0, int32_t slot1,
                                   const std::vector<NewEntries>& tables) {
  std::vector<int32_t> starts{0}, entries, firsts;
  for (const auto& [first, own] : tables) {
    firsts.push_back(first);
    entries.insert(entries.end(), own.begin(), own.end());
    starts.push_back(static_cast<int32_t>(entries.size()));
  }
  const auto groups = static_cast<int32_t>(tables.size() / 2);
  std::vector<int32_t> w{2, 2, 0, starts.back(), 0, 0, groups - 1, 0};
  w.insert(w.end(), {1, 1, 39, 69, 0, 1, 2, 40, 70, slot0, slot1});
  for (const auto* part : {&firsts, &starts, &entries})
    w.insert(w.end(), part->begin(), part->end());
  return w;
}

constexpr int32_t kGone = 8;  // with 9 blocks; state slots are 9, 10 ...
StepLimits limits_of_groups(int64_t groups, int64_t states) {
  StepLimits limits{64, 2, 100, 9, 3, kVocab, kVocab, 4};
  limits.groups = groups;
  limits.states = states;
  return limits;
}

// The refusal of a step; if there is none, the tables change as in an executor.
std::string take(BlockTables& tables, const StepLimits& limits, const std::vector<int32_t>& words) {
  return testing::message_of<std::invalid_argument>([&] {
    const StepInput in = parse_step(words, limits, tables);
    for (int64_t s = 0; s < in.seqs; s++) {
      for (int64_t g = 0; g < in.groups; g++) {
        tables.change(in.seq_slot[s], g, in.table_first[s * in.groups + g], in.new_entries(s, g));
      }
    }
  });
}

TEST(every_new_entry_of_every_groups_table_is_checked) {
  const StepLimits limits = limits_of_groups(3, 4);
  BlockTables tables(3, 3);
  const std::vector<NewEntries> good{{0, {1, 2}},    {0, {8, 3}},    {0, {8, 9}},
                                     {0, {4, 5, 6}}, {0, {8, 8, 7}}, {0, {8, 8, 8, 12}}};
  EXPECT(take(tables, limits, two_sequences(2, 0, good)).empty());
  for (size_t t = 0; t < good.size(); t++) {
    for (size_t at = 0; at < good[t].second.size(); at++) {
      for (int32_t bad : {-1, t % 3 == 2 ? 7 : 9, 13, INT32_MIN, INT32_MAX}) {
        std::vector<NewEntries> one = good;
        one[t].second[at] = bad;
        EXPECT(!take(tables, limits, two_sequences(2, 0, one)).empty());
      }
    }
  }
  const Span<const int32_t> kept = tables.table(0, 2);  // no refused step has changed it
  EXPECT(std::vector<int32_t>(kept.begin(), kept.end()) == good[5].second);
}

TEST(a_step_goes_on_with_the_tables_of_its_slots) {
  const StepLimits limits = limits_of_groups(2, 4);
  BlockTables tables(3, 2);
  const auto refusal = [&](int32_t slot0, int32_t slot1, const std::vector<NewEntries>& changes) {
    return take(tables, limits, two_sequences(slot0, slot1, changes));
  };
  const auto has = [](const std::string& message, const char* part) {
    return message.find(part) != std::string::npos;
  };
  const std::vector<NewEntries> whole{{0, {1, 2}}, {0, {9, 10}}, {0, {4, 5, 6}}, {0, {8, 8, 12}}};
  const std::vector<NewEntries> same{{2, {}}, {2, {}}, {3, {}}, {3, {}}};
  EXPECT(has(refusal(0, 1, same), "table_first[0] = 2"));  // nothing has been sent
  EXPECT(refusal(0, 1, whole).empty());
  EXPECT(refusal(0, 1, same).empty());
  EXPECT(has(refusal(0, 2, same), "table_first[2] = 3"));  // of another slot
  const std::vector<NewEntries> same_of_one{{3, {}}, {3, {}}, {3, {}}, {3, {}}};
  EXPECT(has(refusal(1, 0, same_of_one), "table_first[2] = 3"));
  EXPECT(has(refusal(1, 1, same_of_one), "seq_slot[1] = 1"));
  EXPECT(has(refusal(0, 3, same), "seq_slot[1] = 3") && has(refusal(-1, 1, same), "seq_slot[0]"));
  EXPECT(
      has(refusal(0, 1, {{2, {}}, {2, {}}, {-1, {4, 5, 6, 7}}, {3, {}}}), "table_first[2] = -1"));
  EXPECT(has(refusal(0, 1, {{2, {}}, {2, {}}, {4, {}}, {3, {}}}), "table_first[2] = 4"));
  // A table may end earlier than before, but not before its keys do.
  EXPECT(has(refusal(0, 1, {{1, {}}, {2, {}}, {3, {}}, {3, {}}}), "1 blocks for 40 keys"));
  EXPECT(has(refusal(0, 1, {{2, {}}, {2, {}}, {3, {}}, {2, {}}}), "no state slot"));
  EXPECT(has(refusal(0, 1, {{2, {}}, {2, {}}, {3, {}}, {2, {kGone, kGone}}}), "no state slot"));
  // Only the entries from `first` on change.
  EXPECT(refusal(0, 1, {{1, {7, 3}}, {2, {11}}, {3, {}}, {0, {9, 8, 8, 10}}}).empty());
  const auto table = [&](int64_t slot, int64_t group) {
    const Span<const int32_t> kept = tables.table(slot, group);
    return std::vector<int32_t>(kept.begin(), kept.end());
  };
  EXPECT((table(0, 0) == std::vector<int32_t>{1, 7, 3}));
  EXPECT((table(0, 1) == std::vector<int32_t>{9, 10, 11}));
  EXPECT((table(1, 0) == std::vector<int32_t>{4, 5, 6}));
  EXPECT((table(1, 1) == std::vector<int32_t>{9, 8, 8, 10}));
  tables.release(0);
  EXPECT(table(0, 0).empty() && table(0, 1).empty() && table(1, 0).size() == 3);
}

TEST(attention_plans_cover_every_visible_chunk_once) {
  std::vector<int32_t> words;
  for (int threads : {1, 2, 3, 8, 64}) {
    for (int32_t window : {0, 300}) {
      for (AttentionGeometry g : {AttentionGeometry{3, 1, 64, window},
                                  {14, 2, 64, window},
                                  {8, 8, 128, window},
                                  {9, 3, 16, window}}) {
        AttentionPlan plan(g, kLimits, threads);
        for (auto [queries, keys] :
             {std::pair{1, 1}, {1, 256}, {1, 257}, {1, 5000}, {5, 900}, {700, 700}, {1024, 3000}}) {
          plan.build(one_sequence(words, queries, keys));
          EXPECT(covers_everything_once(plan, queries, keys));
        }
      }
    }
  }
}

TEST(a_long_decode_is_split_among_idle_threads_and_a_balanced_one_is_not) {
  std::vector<int32_t> words;
  AttentionPlan one_head({4, 1, 64, 0}, kLimits, 2);
  one_head.build(one_sequence(words, 1, 4000));
  EXPECT(one_head.units().size() >= 2 && one_head.merges().size() == 1);
  AttentionPlan two_heads({14, 2, 64, 0}, kLimits, 2);
  two_heads.build(one_sequence(words, 1, 4000));
  EXPECT(two_heads.units().size() == 2 && two_heads.merges().empty());
}

TEST(ranks_split_attention_evenly_and_by_heads_where_heads_divide) {
  std::vector<int32_t> words;
  for (const std::vector<int>& sizes :
       {std::vector<int>{1, 1}, {2, 2}, {1, 1, 1}, {1, 1, 1, 1, 1, 1}, {3, 1}}) {
    const Ranks ranks(sizes);
    for (AttentionGeometry g :
         {AttentionGeometry{3, 1, 64, 0}, {14, 2, 64, 0}, {8, 8, 128, 0}, {12, 12, 64, 0}}) {
      AttentionPlan plan(g, kLimits, ranks);
      for (auto [queries, keys] : {std::pair{1, 1}, {1, 9000}, {700, 700}, {1024, 3000}}) {
        plan.build(one_sequence(words, queries, keys));
        EXPECT(covers_everything_once(plan, queries, keys));
        int64_t at = 0;
        for (int r = 0; r < ranks.count(); r++) {
          const Range own = plan.units_of(r);
          EXPECT(own.begin == at && own.end >= own.begin);
          at = own.end;
          if (g.kv_heads % ranks.threads() != 0) continue;
          for (int64_t i = own.begin; i < own.end; i++) {
            const AttentionUnit& u = plan.units()[static_cast<size_t>(i)];
            EXPECT(ranks.owner_of_middle(u.kv_head, g.kv_heads) == r);
            EXPECT(ranks.owner_of_middle(u.kv_head + u.heads - 1, g.kv_heads) == r);
          }
        }
        EXPECT(at == static_cast<int64_t>(plan.units().size()));
      }
    }
  }
}

// Writes and reads blocks of all groups in turn, on ranks of these sizes.
void check_blocks(const std::vector<CacheLayer>& layers, int32_t groups) {
  const std::vector<int> sizes[] = {{4}, {1, 3}, {1, 1, 1, 1}, {1, 1, 1, 1, 1, 1}};
  std::vector<uint8_t> got;
  for (const std::vector<int>& size : sizes) {
    const Ranks ranks(size);
    Team team(ranks.threads(), {}, false, size);
    KvCache kv(layers, 20, KvType::bf16, ranks);
    team.run([&] {
      for (int64_t block = 0; block < 20; block++) kv.want(block);
      kv.use(team);
    });
    size_t arenas = 0;
    for (const Buffer& b : kv.arenas()) arenas += b.size();
    EXPECT(kv.committed() == arenas);
    got.resize(kv.block_bytes());
    std::vector<size_t> used(static_cast<size_t>(groups));
    for (const CacheLayer& s : layers) {
      used[static_cast<size_t>(s.group)] +=
          2 * static_cast<size_t>(s.kv_heads) * kv_half_bytes(KvType::bf16, s.hd_pad);
    }
    const auto pattern = [&](int64_t block, int32_t group) {
      std::vector<uint8_t> bytes(kv.block_bytes());
      for (size_t i = 0; i < used[static_cast<size_t>(group)]; i++) {
        bytes[i] = static_cast<uint8_t>(i * 7 + i / 251 + static_cast<size_t>(block * 31 + group));
      }
      return bytes;
    };
    for (int64_t block = 19; block >= 0; block--) {
      const auto group = static_cast<int32_t>(block) % groups;
      kv.write_block(block, group, pattern(block, group).data());
    }
    for (int64_t block = 0; block < 20; block++) {
      const auto group = static_cast<int32_t>(block) % groups;
      kv.read_block(block, group, got.data());
      EXPECT(got == pattern(block, group));
    }
    for (size_t l = 0; l < layers.size(); l++) {
      for (int32_t h = 0; h < layers[l].kv_heads; h++) {
        const int owner = ranks.owner_of_middle(h, layers[l].kv_heads);
        const Buffer& arena = kv.arenas()[static_cast<size_t>(owner)];
        const uint8_t* at = kv_block(kv.heads(static_cast<Id>(l))[h], 19, h);
        EXPECT(at >= arena.data() && at < arena.data() + arena.size());
      }
    }
  }
}

TEST(ranks_keep_kv_heads_apart_and_blocks_look_alike) {
  check_blocks({{3, 64, 64}, {8, 20, 32}, {1, 16, 16}}, 1);
}

TEST(any_block_serves_any_group_of_layers) {
  // The second group has a layer less, the third one the same shapes in the same order.
  check_blocks({{3, 64, 64, 0}, {3, 64, 64, 1}, {8, 20, 32, 0}, {3, 64, 64, 2}, {8, 20, 32, 2}}, 3);
  // Groups of different shapes.
  check_blocks({{4, 64, 64, 0}, {1, 128, 128, 1}, {1, 128, 128, 1}, {2, 16, 16, 1}}, 2);
}

TEST(split_units_have_room_of_their_own_in_the_partial_buffer) {
  std::vector<int32_t> words;
  AttentionPlan plan({24, 3, 128, 0}, kLimits, 64);
  for (int32_t keys : {3000, 100'000}) {
    plan.build(one_sequence(words, 8, keys));
    EXPECT(!plan.merges().empty());
    int64_t end = 0;
    for (const MergeUnit& m : plan.merges()) {
      EXPECT(m.partial >= end);
      end = m.partial + m.rows * m.chunks * (16 + 128);
    }
    EXPECT(end <= plan.partial_floats());
  }
}

TEST(building_a_plan_allocates_nothing) {
  std::vector<int32_t> words;
  AttentionPlan plan({14, 2, 64, 0}, kLimits, 3);
  const StepInput prefill = one_sequence(words, 4096, 4096);
  std::vector<int32_t> more;
  const StepInput decode = one_sequence(more, 1, 50'000);
  const int64_t before = allocations();
  for (int i = 0; i < 4; i++) plan.build(i % 2 ? decode : prefill);
  EXPECT(allocations() == before);
}

TEST(sampler_counts_prompt_and_output_and_forgets_on_release) {
  Sampler sampler(2, 100, 10);
  SlotRequest r;
  r.frequency = 1;
  r.min_tokens = 2;
  const std::vector<int32_t> prompt{5, 7, 5}, stop{3};
  r.prompt = prompt;
  r.stop_ids = stop;
  sampler.admit(1, r);
  const SampleParams& p = sampler.params(1);
  EXPECT(p.num_counts == 2 && p.counts[0].id == 5 && p.counts[0].prompt == 2);
  EXPECT(p.num_banned == 1 && p.banned[0] == 3 && p.num_allowed == -1);
  sampler.append(1, 7);
  EXPECT(p.num_counts == 2 && p.counts[1].prompt == 1 && p.counts[1].output == 1);
  EXPECT(p.num_banned == 1);
  sampler.append(1, 99);
  EXPECT(p.num_counts == 3 && p.counts[2].id == 99 && p.num_banned == 0);
  sampler.append(1, -1);  // the token of a row for which none could be sampled
  EXPECT(p.num_counts == 3);
  for (int i = 0; i < 30; i++) sampler.append(1, i);  // more than announced: must not overrun
  EXPECT(p.num_counts <= 13);
  sampler.release(1);
  EXPECT(!sampler.admitted(1) && !sampler.admitted(0));
}

// A preempted request is admitted again with the tokens it has generated, which count.
TEST(a_request_that_is_admitted_again_owes_only_the_rest_of_its_min_tokens) {
  const std::vector<int32_t> stop{3, 4}, output{8, 8, 9};
  Sampler sampler(1, 100, 10);
  SlotRequest r;
  r.min_tokens = 5;
  r.stop_ids = stop;
  r.output = output;
  sampler.admit(0, r);
  const SampleParams& p = sampler.params(0);
  EXPECT(p.num_banned == 2);
  sampler.append(0, 7);
  EXPECT(p.num_banned == 2);
  sampler.append(0, 7);
  EXPECT(p.num_banned == 0);
  for (const int64_t least : {3, 2}) {  // has them all
    r.min_tokens = least;
    sampler.admit(0, r);
    EXPECT(sampler.params(0).num_banned == 0);
  }
}

TEST(an_empty_list_of_allowed_ids_is_not_all_ids) {
  Sampler sampler(1, 100, 10);
  SlotRequest r;
  r.has_allowed = true;
  sampler.admit(0, r);
  EXPECT(sampler.params(0).num_allowed == 0);
}

TEST(buffers_are_aligned_zeroed_and_commit_nothing_when_reserved) {
  Buffer buffer(size_t{1} << 30);
  EXPECT(reinterpret_cast<uintptr_t>(buffer.data()) % (2 << 20) == 0);
  EXPECT(buffer.data()[12345] == 0);
  buffer.data()[(size_t{1} << 30) - 1] = 1;
#if defined(__linux__)
  const Residency r = buffer.residency(residency_of_process());
  EXPECT(r.resident > 0 && r.resident <= 4 << 20 && r.huge <= r.resident);
#endif
  Buffer moved(std::move(buffer));
  EXPECT(buffer.data() == nullptr && moved.data()[(size_t{1} << 30) - 1] == 1);
}

#if defined(__linux__)
// qemu's user mode accepts any advice, also this invalid one, and applies none of it.
bool kernel_takes_advice() {
  Buffer buffer(1);
  return madvise(buffer.data(), 4096, 12345) != 0;
}
#endif

TEST(committing_pages_keeps_what_is_in_them) {
  Buffer buffer(3 * Buffer::kPage);
  buffer.data()[5000] = 7;
  buffer.commit(4096, Buffer::kPage + 1);
  buffer.commit(Buffer::kPage, 99 * Buffer::kPage);  // beyond the end: up to the end
  EXPECT(buffer.data()[5000] == 7 && buffer.data()[4096] == 0);
#if defined(__linux__)
  const auto all = static_cast<int64_t>(3 * Buffer::kPage - 4096);
  EXPECT(!kernel_takes_advice() || buffer.residency(residency_of_process()).resident >= all);
#endif
}

TEST(kv_memory_comes_with_use_and_a_step_ahead_of_it) {
  constexpr size_t kPage = Buffer::kPage;
  Team team(2, {});
  team.run([&] {
    KvCache kv({{8, 64, 64}, {8, 64, 64}}, 1000, KvType::bf16);  // 128 KB a block, 16 in a page
    const auto use = [&](int64_t first, int64_t last) {
      for (int64_t block = first; block <= last; block++) kv.want(block);
      kv.use(team);
    };
    EXPECT(kv.committed() == 0);
    use(0, 16);  // 24 blocks in whole slabs
    EXPECT(kv.committed() == 2 * kPage);
    use(0, 2);
    EXPECT(kv.committed() == 2 * kPage);
    use(100, 100);  // its slab is half of page 6; the slabs between get memory when used
    EXPECT(kv.committed() == 3 * kPage);
    EXPECT(kv.grow(team, 9));  // 110 blocks, in slabs 112: 7 pages, one per thread at a time
    EXPECT(kv.committed() == 5 * kPage);
    EXPECT(!kv.grow(team, 9) && kv.committed() == 7 * kPage);
    EXPECT(!kv.grow(team, 9) && kv.committed() == 7 * kPage);
    use(990, 990);
    while (kv.grow(team, 64)) {
    }
    EXPECT(kv.committed() == kv.arenas()[0].size());  // the end of the pool, and no further
  });
}

int main(int argc, char** argv) {
  std::string_view isa;
  const char* filter = "";
  for (int i = 1; i < argc; i++) {
    const std::string_view option = argv[i];
    if (option == "--few") {
      few = true;
    } else if (option == "--isa" && i + 1 < argc) {
      isa = argv[++i];
    } else {
      filter = argv[i];
    }
  }
  kernels = find_level(isa);
  if (!kernels) {
    std::fprintf(stderr, "test_executor: this CPU or this build has no level '%s'\n",
                 std::string(isa).c_str());
    return 2;
  }
  std::printf("level %s\n", kernels->isa);
  return testing::run_all(filter);
}
