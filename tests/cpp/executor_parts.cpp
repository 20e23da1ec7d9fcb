// Steps of several sequences whose experts are not all in memory (runtime/parts.h): the others go
// on, and a row has the bits of a step in which all experts are in memory.
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <thread>

#include "executor_decoder.h"

using namespace executor_decoder;

namespace {

// Tokens of a request slot, from position `start` on. `table` is its block table in this step.
struct Run {
  int32_t slot;
  std::vector<int32_t> ids;
  int32_t start = 0;
  std::vector<int32_t> table = {};  // empty: blocks of its own
};

// Words of a step with these sequences, all their rows scored.
std::vector<int32_t> words_of(const std::vector<Run>& runs) {
  std::vector<int32_t> ids, positions, start{0}, keys, slots, first, ends{0}, entries, rows;
  for (const Run& run : runs) {
    const auto count = static_cast<int32_t>(run.ids.size());
    for (int32_t i = 0; i < count; i++) {
      rows.push_back(run.slot);
      positions.push_back(run.start + i);
    }
    ids.insert(ids.end(), run.ids.begin(), run.ids.end());
    start.push_back(static_cast<int32_t>(ids.size()));
    keys.push_back(run.start + count);
    slots.push_back(run.slot);
    first.push_back(0);
    const int32_t blocks = (run.start + count + kBlock - 1) / kBlock;
    for (int32_t b = 0; b < blocks; b++) {
      const auto at = static_cast<size_t>(b);
      entries.push_back(at < run.table.size() ? run.table[at] : 8 * (run.slot + 1) + b);
    }
    ends.push_back(static_cast<int32_t>(entries.size()));
  }
  const auto n = static_cast<int32_t>(ids.size()), seqs = static_cast<int32_t>(runs.size());
  std::vector<int32_t> w{n, seqs, n, ends.back(), 0, 0, 0, 0, 0, 0, 0, 0};
  for (const auto* part : {&ids, &positions, &start, &keys, &slots, &first, &ends, &entries}) {
    w.insert(w.end(), part->begin(), part->end());
  }
  for (int32_t i = 0; i < n; i++) w.push_back(i);
  w.insert(w.end(), rows.begin(), rows.end());
  for (const int32_t fill : {1, -1}) w.insert(w.end(), static_cast<size_t>(n), fill);
  return w;
}

// An executor with ten of twelve experts in memory, and one with all. Reads wait while `shut`.
struct Mixture {
  const Decoder decoder{1, 0, *kernels, 12};
  std::FILE* const stream = std::tmpfile();
  std::atomic<bool> shut{false};
  std::atomic<int> waiting{0}, delay_ms{0};  // a read takes this much longer
  std::unique_ptr<Executor> whole, half;

  explicit Mixture(Team& team) {
    const Program& program = decoder.program;
    const auto bytes = static_cast<off_t>(packed_file_bytes(program, team.ranks()));
    EXPECT(ftruncate(fileno(stream), bytes) == 0);
    whole = std::make_unique<Executor>(team, program, kBlocks, KvType::f32, 4, 4, 0,
                                       PackedFile{fileno(stream), true});
    decoder.load(*whole);
    const size_t pool = 21 * pooled_bytes(program, team.ranks()).least_pool / 2;
    const auto read = [this](int fd, void* to, size_t size, size_t offset) -> int64_t {
      waiting++;
      while (shut) std::this_thread::yield();
      waiting--;
      std::this_thread::sleep_for(std::chrono::milliseconds(delay_ms));
      return pread(fd, to, size, static_cast<off_t>(offset));
    };
    half = std::make_unique<Executor>(team, program, kBlocks, KvType::f32, 4, 4, 0,
                                      PackedFile{fileno(stream), false, 0, pool, read});
    half->weights().read_packed(team, fileno(stream));
    decoder.load_vectors(*half);
  }
  ~Mixture() {
    shut = false;
    half.reset();
    whole.reset();
    std::fclose(stream);
  }

  // The log probabilities of the rows of one sequence, with all experts in memory.
  std::vector<float> want(const Run& run) {
    whole->step(words_of({run}));
    return {whole->results().logprobs.begin(),
            whole->results().logprobs.begin() + static_cast<std::ptrdiff_t>(run.ids.size())};
  }
  // Rows [first, first + the tokens of `run`) of the last step have these bits.
  bool right(const Run& run, size_t first) {
    const std::vector<float> wanted = want(run);
    return std::equal(wanted.begin(), wanted.end(),
                      half->results().logprobs.begin() + static_cast<std::ptrdiff_t>(first));
  }
  // Runs steps with these sequences until none is parked any more.
  void finish(const std::vector<Run>& runs) {
    do {
      half->step(words_of(runs));
    } while (!half->parked_sequences().empty());
  }

  std::vector<int32_t> experts_of(int32_t id) {
    const std::vector<Op>& ops = decoder.program.ops();
    size_t route = 0;
    while (!std::holds_alternative<RouteOp>(ops[route])) route++;
    const Tap tap = whole->tap(words_of({{0, {id}}}), static_cast<int64_t>(route));
    std::vector<int32_t> out;
    for (int i = 0; i < 2; i++) {
      out.push_back(static_cast<int32_t>(tap.output.data[static_cast<size_t>(i)]));
    }
    std::sort(out.begin(), out.end());
    return out;
  }
  // Tokens of which no two use the same expert.
  std::vector<int32_t> apart() {
    std::vector<int32_t> found, used;
    for (int32_t id = 0; id < kVocab && found.size() < 3; id++) {
      std::vector<int32_t> own = experts_of(id), both;
      std::set_intersection(own.begin(), own.end(), used.begin(), used.end(),
                            std::back_inserter(both));
      if (!both.empty()) continue;
      found.push_back(id);
      used.insert(used.end(), own.begin(), own.end());
      std::sort(used.begin(), used.end());
    }
    return found;
  }
};

using Numbers = std::vector<int32_t>;

template <class Test>
void with_mixture(const Test& test) {
  for (const int threads : {1, 2, 3}) {
    Team team(threads, {});
    team.run([&] {
      Mixture m(team);
      const std::vector<int32_t> ids = m.apart();
      EXPECT(ids.size() >= 2);
      if (ids.size() >= 2) test(m, *m.half, ids);
      EXPECT(m.half->weights().pool()->counts().held == 0);
    });
  }
}

}  // namespace

TEST(a_sequence_goes_on_while_the_experts_of_another_one_are_read) {
  with_mixture([](Mixture& m, Executor& e, const Numbers& ids) {
    const Run there{0, {ids[0]}}, missing{1, {ids[1]}};
    e.step(words_of({there}));
    m.shut = true;
    for (int i = 0; i < 3; i++) {  // in either order of the step
      const bool first = i % 2 == 0;
      e.step(words_of(first ? std::vector<Run>{there, missing} : std::vector<Run>{missing, there}));
      EXPECT(e.parked_sequences() == Numbers{first ? 1 : 0});
      EXPECT(m.right(there, first ? 0 : 1));
      EXPECT(e.results().tokens[first ? 1 : 0] == -1);
    }
    EXPECT(e.weights().pool()->counts().held > 0);
    m.shut = false;
    m.finish({missing, there});
    EXPECT(m.right(missing, 0) && m.right(there, 1));
  });
}

TEST(a_parked_sequence_that_is_released_or_changed_begins_again) {
  with_mixture([](Mixture& m, Executor& e, const Numbers& ids) {
    const Run there{0, {ids[0]}}, missing{1, {ids[1]}};
    e.step(words_of({there}));
    m.shut = true;
    e.step(words_of({there, missing}));
    EXPECT(e.parked_sequences() == Numbers{1});
    e.release(1);
    EXPECT(e.weights().pool()->counts().held == 0);
    e.step(words_of({there, missing}));
    EXPECT(e.parked_sequences() == Numbers{1});
    const Run other{1, {ids[0]}};
    e.step(words_of({there, other}));
    EXPECT(e.parked_sequences().empty() && m.right(there, 0) && m.right(other, 1));
  });
}

TEST(a_step_in_which_all_sequences_wait_can_be_cancelled) {
  with_mixture([](Mixture& m, Executor& e, const Numbers& ids) {
    const Run one{0, {ids[0]}}, two{1, {ids[0]}};  // both can be parked: they share experts
    m.shut = true;
    std::thread canceller([&] {
      while (m.waiting == 0) std::this_thread::yield();
      e.cancel(true);
    });
    EXPECT_THROWS(std::runtime_error, "cancelled", e.step(words_of({one, two})));
    canceller.join();
    EXPECT(e.weights().pool()->counts().held == 0);
    m.shut = false;
    m.finish({one, two});
    EXPECT(m.right(one, 0) && m.right(two, 1));
  });
}

TEST(sequences_that_share_a_block_of_the_step_are_not_parked) {
  with_mixture([](Mixture& m, Executor& e, const Numbers&) {
    const std::vector<int32_t> ids = token_ids(kBlock + 9);
    const Run writer{0, {ids.begin(), ids.begin() + kBlock}};
    const Run reader{1, {ids.begin() + kBlock, ids.end()}, kBlock, {8, 30}};
    m.want(writer);
    e.step(words_of({writer, reader}));
    EXPECT(e.parked_sequences().empty());
    EXPECT(m.right(reader, kBlock) && m.right(writer, 0));
  });
}

// Many steps with decode rows and short prompts; reads end in any order. Those of every second step
// take longer than computing does, also in an emulator, so that sequences are parked.
TEST(parts_never_change_a_bit) {
  with_mixture([](Mixture& m, Executor& e, const Numbers&) {
    std::mt19937 engine(3);
    std::vector<Run> runs;
    for (int32_t slot = 0; slot < 4; slot++) runs.push_back({slot, {slot}});
    int parked = 0;
    const int steps = few ? 6 : 40;
    for (int i = 0; i < steps || (parked == 0 && i < 200); i++) {
      m.delay_ms = i % 2 == 0 ? 0 : few ? 50 : 2;
      e.step(words_of(runs));
      const Numbers still = e.parked_sequences();
      parked += static_cast<int>(still.size());
      size_t row = 0;
      for (int32_t s = 0; s < 4; s++) {
        Run& run = runs[static_cast<size_t>(s)];
        const size_t first = std::exchange(row, row + run.ids.size());
        if (std::binary_search(still.begin(), still.end(), s)) continue;
        EXPECT(m.right(run, first));
        run.start += static_cast<int32_t>(run.ids.size());
        run.ids.resize(1 + engine() % 4);
        for (int32_t& id : run.ids) id = static_cast<int32_t>(engine() % kVocab);
      }
    }
    EXPECT(parked > 0);
    for (const Run& run : runs) e.release(run.slot);
  });
}
