// Words of a step that are wrong are refused, and the block tables of slots change with steps.
#include <stdexcept>

#include "executor_decoder.h"

using namespace executor_decoder;

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

// words_of, with a row of the media buffer for each token.
std::vector<int32_t> with_media(const std::vector<int32_t>& ids, const std::vector<int32_t>& rows) {
  std::vector<int32_t> w = words_of(ids, 3);
  w[8] = static_cast<int32_t>(rows.size());
  // The section comes before the four sections of a word for each row of results.
  w.insert(w.end() - 4 * static_cast<std::ptrdiff_t>(ids.size()), rows.begin(), rows.end());
  return w;
}

TEST(media_rows_are_refused_unless_the_buffer_has_them) {
  StepLimits limits{16, 2, 100, 8, 2, kVocab, kVocab, 4};
  limits.media = 5;
  const auto refusal = [&](const std::vector<int32_t>& rows, size_t spoiled = 8) {
    std::vector<int32_t> words = with_media(token_ids(3), rows);
    if (spoiled > 8) words[spoiled] = 1;
    return testing::message_of<std::invalid_argument>([&] { parse_alone(words, limits); });
  };
  const std::vector<int32_t> good = with_media(token_ids(3), {-1, 4, 0});
  const StepInput in = parse_alone(good, limits);
  EXPECT(in.media_row(0) == -1 && in.media_row(1) == 4 && in.media_row(2) == 0);
  EXPECT(refusal({0, 5, 1}).find("media_rows[1] = 5") != std::string::npos);
  EXPECT(refusal({0, 4, -2}).find("media_rows[2] = -2") != std::string::npos);
  EXPECT(refusal({0, 1}).find("one for each, or none") != std::string::npos);
  for (size_t unused : {10, 11}) {
    EXPECT(refusal({0, 1, 2}, unused).find("header[") != std::string::npos);
  }
  const std::vector<int32_t> none = words_of(token_ids(3), 3);
  EXPECT(parse_alone(none, limits).media_rows == nullptr);
  EXPECT(parse_alone(none, limits).media_row(1) == -1);
}

TEST(angles_are_refused_unless_the_tables_of_the_ropes_have_them) {
  StepLimits limits{16, 2, 100, 8, 2, kVocab, kVocab, 4};
  limits.axes = 2;
  const auto with_angles = [](const std::vector<int32_t>& places, int32_t axes) {
    std::vector<int32_t> w = words_of(token_ids(3), 3);
    w[9] = axes;
    w.insert(w.end() - 4 * 3, places.begin(), places.end());
    return w;
  };
  const auto refusal = [&](const std::vector<int32_t>& places, int32_t axes = 2) {
    const std::vector<int32_t> words = with_angles(places, axes);
    return testing::message_of<std::invalid_argument>([&] { parse_alone(words, limits); });
  };
  const std::vector<int32_t> good = with_angles({0, 99, 7, 8, 2, 0}, 2);
  const StepInput in = parse_alone(good, limits);
  EXPECT(in.angle(0, 1) == 99 && in.angle(1, 0) == 8 && in.angle(1, 2) == 0);
  EXPECT(refusal({0, 100, 7, 8, 2, 0}).find("angles[1] = 100") != std::string::npos);
  EXPECT(refusal({0, 1, 7, 8, 2, -1}).find("angles[5] = -1") != std::string::npos);
  EXPECT(refusal({0, 1, 2}, 1).find("angles of 1 axes") != std::string::npos);
  EXPECT(refusal({0, 1, 2, 0, 1, 2, 0, 1, 2}, 3).find("angles of 3 axes") != std::string::npos);
  const std::vector<int32_t> none = words_of(token_ids(3), 3);
  EXPECT(parse_alone(none, limits).angles == nullptr);
  limits.needs_angles = true;
  EXPECT_THROWS(std::invalid_argument, "angles of 0 axes", parse_alone(none, limits));
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
  std::vector<int32_t> w{2, 2, 0, starts.back(), 0, 0, groups - 1, 0, 0, 0, 0, 0};
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
