// Plans of attention, and the places of KV blocks on ranks.

#include "executor_decoder.h"

using namespace executor_decoder;

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
          static_cast<size_t>(s.kv_heads) * s.head_bytes(KvType::bf16);
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
