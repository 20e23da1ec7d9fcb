// The executor and its parts without Python, so that it also runs under an emulator and sanitizers:
// index checks, the attention plan, sampler state, and one program at several thread counts.
//
// test_executor [--isa LEVEL] [--few] [SUBSTRING] runs the tests whose names contain SUBSTRING with
// the kernels of LEVEL; without --isa, with those of the highest level this CPU can run. With
// --few, for emulators, which take hundreds of times as long, texts are fewer and shorter.
#include "executor_decoder.h"

using namespace executor_decoder;

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
  const Decoder decoder(1, 0, *kernels, 6);
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
  EXPECT(barriers_of(Decoder(1, 0, *kernels, 6), {}) == Counts(12, 17));
  // Where a slow core could be the one that all others wait for, nothing is done at barriers.
  EXPECT(barriers_of(Decoder(), {2, 1}) == Counts(10, 10));
}

TEST(an_operation_waits_for_others_unless_all_divide_the_same_rows) {
  const Decoder decoder(1, 0, *kernels, 6);
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
    request.presence_penalty = 0.5f;
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
  SlotRequest greedy, warm;
  greedy.temperature = 0;
  greedy.presence_penalty = 0.3f;
  greedy.frequency_penalty = 0.1f;
  greedy.prompt = prompt;
  warm.temperature = 0.8f;
  warm.seed = 7;
  warm.repetition_penalty = 1.2f;
  warm.top_k = 30;
  warm.min_tokens = 33;
  warm.stop_ids = stops;
  warm.logit_bias = {{20, 0.5f}};
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
  penalized.presence_penalty = 0.5f;
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
