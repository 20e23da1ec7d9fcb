// Tests how the attention of a step is divided among threads if sequences differ in length, by
// simulating the claims of the threads with the costs of the units.
#include <algorithm>
#include <numeric>
#include <tuple>

#include "base/allocations.h"
#include "main.h"
#include "runtime/attention_plan.h"

using namespace cpuserve;

namespace {

constexpr int32_t kLong = 128 << 10;

// One step: queries and keys of each sequence.
struct Step {
  std::vector<int32_t> query_start{0}, kv_len;
  StepInput in{};

  explicit Step(const std::vector<std::pair<int32_t, int32_t>>& sequences) {
    for (const auto& [queries, keys] : sequences) {
      query_start.push_back(query_start.back() + queries);
      kv_len.push_back(keys);
    }
    in.tokens = query_start.back();
    in.seqs = static_cast<int64_t>(kv_len.size());
    in.query_start = query_start.data();
    in.kv_len = kv_len.data();
  }
};

Step decode_step(int count, int32_t keys, const std::vector<std::pair<int, int32_t>>& longer = {}) {
  std::vector<std::pair<int32_t, int32_t>> sequences(static_cast<size_t>(count), {1, keys});
  for (const auto& [which, length] : longer) sequences[static_cast<size_t>(which)].second = length;
  return Step(sequences);
}

AttentionLimits limits_for(const Step& step) {
  const int32_t longest = *std::max_element(step.kv_len.begin(), step.kv_len.end());
  return {step.in.tokens, step.in.seqs, longest,
          std::accumulate(step.kv_len.begin(), step.kv_len.end(), int64_t{0})};
}

// Cost of a unit: chunks times heads. All take the same time if one token per sequence is decoded.
int64_t work(const AttentionUnit& u) { return int64_t{u.chunk1 - u.chunk0} * u.heads; }

int64_t total_work(const AttentionPlan& plan) {
  int64_t sum = 0;
  for (const AttentionUnit& u : plan.units()) sum += work(u);
  return sum;
}

// Returns when the last of `threads` has finished, relative to an even share. Each thread takes the
// units of its own share in order and then those of the threads after it, and `late` of them start
// last.
double slowest(const AttentionPlan& plan, int threads, int late = 0) {
  std::vector<int64_t> next, time(static_cast<size_t>(threads));
  for (int t = 0; t < threads; t++) {
    next.push_back(plan.units_of(t, t + 1).begin);
    if (t < late) time[static_cast<size_t>(t)] = total_work(plan);
  }
  while (true) {
    const auto me = std::min_element(time.begin(), time.end()) - time.begin();
    int64_t unit = -1;
    for (int i = 0; i < threads && unit < 0; i++) {
      const int owner = static_cast<int>((me + i) % threads);
      int64_t& at = next[static_cast<size_t>(owner)];
      if (at < plan.units_of(owner, owner + 1).end) unit = at++;
    }
    if (unit < 0) break;
    time[static_cast<size_t>(me)] += work(plan.units()[static_cast<size_t>(unit)]);
  }
  const auto last = *std::max_element(time.begin() + late, time.end());
  return static_cast<double>(last) * (threads - late) / static_cast<double>(total_work(plan));
}

bool visits_every_chunk_once(const AttentionPlan& plan, const Step& step) {
  const AttentionGeometry& g = plan.geometry();
  std::vector<std::vector<int>> seen;
  for (const int32_t keys : step.kv_len) {
    seen.emplace_back(static_cast<size_t>((keys + kChunk - 1) / kChunk * g.kv_heads));
  }
  for (const AttentionUnit& u : plan.units()) {
    for (int32_t h = u.kv_head; h < u.kv_head + u.heads; h++) {
      for (int32_t c = u.chunk0; c < u.chunk1; c++) {
        seen[static_cast<size_t>(u.seq)][static_cast<size_t>(c * g.kv_heads + h)]++;
      }
    }
  }
  return std::all_of(seen.begin(), seen.end(), [](const std::vector<int>& of) {
    return std::all_of(of.begin(), of.end(), [](int n) { return n == 1; });
  });
}

// Checks that each partial result of a unit is in its place, and that exactly one merge reads it.
bool merges_what_was_split(const AttentionPlan& plan) {
  const int64_t slot = 16 + plan.geometry().hd_pad;
  std::vector<std::tuple<int64_t, int32_t, int32_t, int64_t>> written, read;
  for (const AttentionUnit& u : plan.units()) {
    if (u.partial < 0) continue;
    for (int64_t r = 0; r < u.rows; r++) {
      for (int32_t c = u.chunk0; c < u.chunk1; c++) {
        written.emplace_back(u.partial + (r * u.partial_stride + c - u.chunk0) * slot, u.seq,
                             u.kv_head, u.row0 + r);
      }
    }
  }
  for (const MergeUnit& m : plan.merges()) {
    for (int64_t i = 0; i < m.rows * m.chunks; i++) {
      read.emplace_back(m.partial + i * slot, m.seq, m.kv_head, m.row0 + i / m.chunks);
    }
  }
  std::sort(written.begin(), written.end());
  std::sort(read.begin(), read.end());
  const bool fits = written.empty() || std::get<0>(written.back()) + slot <= plan.partial_floats();
  return written == read && fits;
}

}  // namespace

TEST(one_long_stream_among_many_short_ones_is_shared_by_all_threads) {
  for (const int threads : {2, 3, 16, 64, 192}) {
    for (const int which : {0, 20, 63}) {
      const Step step = decode_step(64, 256, {{which, kLong}});
      AttentionPlan plan({64, 8, 128, 0}, limits_for(step), threads);
      plan.build(step.in);
      EXPECT(slowest(plan, threads) <= 1.15);
      EXPECT(visits_every_chunk_once(plan, step) && merges_what_was_split(plan));
    }
  }
}

TEST(one_stream_at_128k_keeps_every_thread_busy_to_the_last_head) {
  for (const int threads : {2, 3, 16, 64, 192}) {
    const Step step = decode_step(1, kLong);
    AttentionPlan plan({64, 8, 128, 0}, limits_for(step), threads);
    plan.build(step.in);
    EXPECT(slowest(plan, threads) <= 1.15);
    EXPECT(visits_every_chunk_once(plan, step) && merges_what_was_split(plan));
  }
}

TEST(streams_of_any_lengths_are_shared_evenly) {
  for (const int threads : {2, 5, 48}) {
    for (const AttentionGeometry g :
         {AttentionGeometry{9, 3, 64, 0}, {32, 8, 128, 0}, {16, 1, 64, 0}}) {
      const Step step = decode_step(
          9, 3000, {{0, 40'000}, {2, 90'000}, {3, 500}, {5, 257}, {6, 20'000}, {8, 60'000}});
      AttentionPlan plan(g, limits_for(step), threads);
      plan.build(step.in);
      EXPECT(slowest(plan, threads) <= 1.15);
      EXPECT(visits_every_chunk_once(plan, step) && merges_what_was_split(plan));
    }
  }
}

TEST(equal_streams_stay_whole_and_need_no_merge) {
  for (const int threads : {2, 4, 8, 64}) {
    const Step step = decode_step(64, 9000);
    AttentionPlan plan({32, 8, 128, 0}, limits_for(step), threads);
    plan.build(step.in);
    EXPECT(plan.merges().empty());
    EXPECT(slowest(plan, threads) <= 1.01);
  }
}

TEST(a_thread_that_is_held_up_leaves_most_of_its_share_to_others) {
  const Step step = decode_step(1, kLong);
  AttentionPlan plan({8, 1, 128, 0}, limits_for(step), 4);
  plan.build(step.in);
  EXPECT(slowest(plan, 4, 1) <= 1.15);
}

TEST(ranks_share_skewed_streams_evenly_too) {
  const Ranks ranks(std::vector<int>{4, 4});
  const Step step = decode_step(64, 256, {{5, kLong}});
  AttentionPlan plan({32, 8, 128, 0}, limits_for(step), ranks);
  plan.build(step.in);
  EXPECT(visits_every_chunk_once(plan, step) && merges_what_was_split(plan));
  for (int r = 0; r < 2; r++) {
    int64_t of_rank = 0;
    for (int64_t i = plan.units_of(r).begin; i < plan.units_of(r).end; i++) {
      of_rank += work(plan.units()[static_cast<size_t>(i)]);
    }
    EXPECT(std::abs(of_rank - total_work(plan) / 2) * 50 <= total_work(plan));
  }
}

// The keys that a row of an encoder sees end with its sequence, or its window on the right.
TEST(without_a_causal_mask_every_tile_visits_what_its_rows_see) {
  for (const int32_t window : {0, 65, 300}) {
    const Step step({{700, 700}, {1, 1}, {128, 128}, {513, 513}});
    AttentionGeometry g{12, 12, 32, window};
    g.causal = false;
    AttentionPlan plan(g, limits_for(step), 3);
    plan.build(step.in);
    int64_t rows = 0;
    for (const AttentionUnit& u : plan.units()) {
      if (u.partial >= 0) continue;
      const int64_t keys = step.kv_len[static_cast<size_t>(u.seq)], last = u.row0 + u.rows - 1;
      const int64_t end = window > 0 ? std::min(keys, last + window) : keys;
      const int64_t first = window > 0 ? std::max<int64_t>(0, u.row0 - window + 1) : 0;
      EXPECT(u.end_key == end && u.chunk1 == (end + kChunk - 1) / kChunk);
      EXPECT(u.chunk0 == first / kChunk);
      rows += u.rows * u.heads;
    }
    EXPECT(plan.merges().empty() ? rows == step.in.tokens * 12 : rows < step.in.tokens * 12);
    EXPECT(merges_what_was_split(plan));
  }
}

// A tile has rows of one picture only, which see it up to its end, or rows that see no later token.
TEST(tiles_end_with_the_pictures_that_rows_see_whole) {
  const Step step({{700, 900}, {1, 300}, {64, 64}});
  std::vector<int32_t> ends;
  for (size_t s = 0; s < step.kv_len.size(); s++) {
    const int32_t queries = step.query_start[s + 1] - step.query_start[s];
    for (int32_t t = 0; t < queries; t++) {
      const int32_t position = step.kv_len[s] - queries + t;
      const bool seen = s == 0 && position >= 250 && position < 600;
      ends.push_back(seen ? 600 : position + 1);
    }
  }
  for (const int32_t window : {0, 100}) {
    AttentionGeometry g{8, 4, 32, window};
    g.spans = true;
    StepInput in = step.in;
    AttentionPlan plan(g, limits_for(step), 3);
    for (int32_t* seen : {static_cast<int32_t*>(nullptr), ends.data()}) {
      in.ends = seen;
      plan.build(in);
      int64_t pictured = 0;
      for (const AttentionUnit& u : plan.units()) {
        if (u.partial >= 0) continue;
        const auto s = static_cast<size_t>(u.seq);
        const int64_t queries = step.query_start[s + 1] - step.query_start[s];
        for (int64_t row = u.row0; row < u.row0 + u.rows; row++) {
          const int64_t position = step.kv_len[s] - queries + row / 2;
          const bool whole = seen && s == 0 && position >= 250 && position < 600;
          EXPECT(u.both_sides == whole);
          EXPECT(u.end_key >= (whole ? 600 : position + 1));
          EXPECT(!whole || u.end_key == 600);
          pictured += whole * u.heads;
        }
      }
      EXPECT(pictured == (seen ? 350 * 8 : 0));
    }
  }
}

// A tile has rows of one section only, and its first chunk is the first one of the section.
TEST(tiles_end_with_their_section) {
  const Step step({{700, 900}, {1, 600}, {1, 513}, {512, 512}, {256, 300}});
  AttentionGeometry g{8, 4, 32, 256};
  g.sections = true;
  AttentionPlan plan(g, limits_for(step), 3);
  plan.build(step.in);
  int64_t rows = 0;
  for (const AttentionUnit& u : plan.units()) {
    if (u.partial >= 0) continue;
    const auto s = static_cast<size_t>(u.seq);
    const int64_t pos0 = step.kv_len[s] - (step.query_start[s + 1] - step.query_start[s]);
    const int64_t first = (pos0 + u.row0 / 2) / 256;
    const int64_t last = (pos0 + (u.row0 + u.rows - 1) / 2) / 256;
    EXPECT(first == last && u.chunk0 == first && u.chunk1 == first + 1);
    rows += u.rows * u.heads;
  }
  EXPECT(rows == step.in.tokens * 8);
}

// One token of a latent layer (MLA) has a row for each head, and all of them read the same keys.
TEST(one_token_of_a_latent_layer_keeps_threads_busy) {
  struct Case {
    int32_t q_heads, keys;
    int threads;
    size_t units;
  };
  for (const Case& c : {Case{16, 200, 1, 1},
                        {16, 200, 2, 2},
                        {16, 200, 64, 4},
                        {128, 200, 2, 6},
                        {128, 200, 64, 8},
                        {128, 200, 192, 16},
                        {128, 256, 16, 6},
                        {16, 1000, 64, 2 * 4},
                        {128, 2000, 64, 6 * 8}}) {
    const Step step = decode_step(1, c.keys);
    AttentionPlan plan({c.q_heads, 1, 576, 0}, limits_for(step), c.threads);
    plan.build(step.in);
    EXPECT(plan.units().size() == c.units);
    int64_t rows = 0;
    for (const AttentionUnit& u : plan.units()) rows += u.rows * (u.chunk1 - u.chunk0);
    EXPECT(rows == c.q_heads * ((c.keys + kChunk - 1) / kChunk));
    EXPECT(merges_what_was_split(plan));
  }
}

TEST(plans_with_low_tiles_allocate_nothing) {
  for (const int threads : {2, 64, 192}) {
    AttentionPlan plan({128, 1, 576, 0}, {512, 16, 512, 4096}, threads);
    const Step one = decode_step(1, 256), some = decode_step(16, 256), prompt({{30, 60}, {1, 500}});
    const int64_t before = allocations();
    for (const Step* step : {&one, &some, &prompt}) plan.build(step->in);
    EXPECT(allocations() == before);
  }
}

// Tables for the largest step are large enough for an uneven one, too.
TEST(planning_skewed_streams_allocates_nothing) {
  const Step skewed = decode_step(64, 256, {{7, kLong}}), even = decode_step(64, 256);
  AttentionPlan plan({64, 8, 128, 0}, limits_for(skewed), 192);
  const int64_t before = allocations();
  for (int i = 0; i < 4; i++) plan.build(i % 2 ? even.in : skewed.in);
  EXPECT(allocations() == before);
}
