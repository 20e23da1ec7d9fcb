// What lives longer than a step: the sampler's slots, and memory that grows with use.
#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "executor_decoder.h"

using namespace executor_decoder;

TEST(sampler_counts_prompt_and_output_and_forgets_on_release) {
  Sampler sampler(2, 100, 10);
  SlotRequest r;
  r.frequency_penalty = 1;
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
  r.allowed_token_ids.emplace();
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
