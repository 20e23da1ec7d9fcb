// Selections of keys (runtime/selection.h): the highest scores, the tokens that have one, and
// copies of keys and values.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "main.h"
#include "runtime/selection.h"

using namespace cpuserve;

namespace {

std::vector<float> highest(const std::vector<float>& scores, int64_t keep, int32_t pool) {
  std::vector<float> out(static_cast<size_t>(keep * pool));
  std::vector<uint8_t> scratch(kSelectScratch);
  select_highest(scores.data(), static_cast<int64_t>(scores.size()), keep, pool, out.data(),
                 scratch.data());
  return out;
}

// The positions of the first `keep` scores, sorted by descending score, then by index.
std::vector<float> sorted(const std::vector<float>& scores, int64_t keep, int32_t pool) {
  std::vector<size_t> order(scores.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return scores[a] > scores[b]; });
  order.resize(static_cast<size_t>(keep));
  std::sort(order.begin(), order.end());
  std::vector<float> out;
  for (const size_t i : order) {
    for (int32_t p = 0; p < pool; p++) {
      out.push_back(static_cast<float>(i) * static_cast<float>(pool) + static_cast<float>(p));
    }
  }
  return out;
}

}  // namespace

TEST(the_highest_scores_are_selected_in_order_of_their_positions) {
  std::mt19937 rng(3);
  std::normal_distribution<float> normal;
  for (const int n : {2, 33, 700, 5000}) {
    std::vector<float> scores;
    for (int i = 0; i < n; i++) scores.push_back(normal(rng) * (i % 7 ? 1.0f : 1e-30f));
    for (const int64_t keep : {int64_t{1}, int64_t{n / 2}, int64_t{n - 1}}) {
      EXPECT(highest(scores, keep, 1) == sorted(scores, keep, 1));
      EXPECT(highest(scores, keep, 4) == sorted(scores, keep, 4));
    }
  }
}

TEST(of_equal_scores_those_at_lower_positions_are_selected) {
  std::mt19937 rng(4);
  std::vector<float> scores;
  for (int i = 0; i < 400; i++) {
    const float values[] = {-1.0f, -0.0f, 0.0f, 2.0f};
    scores.push_back(values[rng() % 4]);
  }
  for (int64_t keep = 1; keep < 400; keep++) {
    EXPECT(highest(scores, keep, 1) == sorted(scores, keep, 1));
  }
}

TEST(extreme_scores_have_an_order_too) {
  const float most = std::numeric_limits<float>::max();
  const std::vector<float> scores = {0.0f, -INFINITY, most, INFINITY, -most, 1e-45f, -1e-45f};
  for (int64_t keep = 1; keep < 7; keep++) {
    EXPECT(highest(scores, keep, 1) == sorted(scores, keep, 1));
  }
}

TEST(late_tokens_see_more_keys_than_the_selection_holds) {
  // Three sequences: tokens at positions 0 to 3, 8 to 14, and 20.
  const int32_t query_start[] = {0, 4, 11, 12}, kv_len[] = {4, 15, 21};
  const int32_t positions[] = {0, 1, 2, 3, 8, 9, 10, 11, 12, 13, 14, 20};
  StepInput in{};
  in.tokens = 12;
  in.seqs = 3;
  in.query_start = query_start;
  in.kv_len = kv_len;
  in.positions = positions;
  for (const int64_t most : {1, 2, 4, 9, 12, 15, 20, 21, 100}) {
    const LateTokens late(in, most);
    int64_t count = 0, longest = 0;
    for (int64_t s = 0; s < 3; s++) {
      for (int64_t t = query_start[s]; t < query_start[s + 1]; t++) {
        if (positions[t] + 1 <= most) continue;
        const SequenceToken found = late[count++];
        EXPECT(found.seq == s && found.token == t);
        longest = std::max<int64_t>(longest, kv_len[s]);
      }
    }
    EXPECT(late.count() == count && late.longest() == longest);
  }
}

namespace {

// The bytes of a key or value of one token: its elements in the order of dimensions, and its scale.
std::vector<uint8_t> bytes_of(const KvLayer& kv, const uint8_t* half, int slot, bool value) {
  const size_t element = kv_elem_bytes(kv.type), row = kv_value_row_bytes(kv.type, kv.hd_pad);
  const int pair = kv.type == KvType::bf16 ? 2 : 1;
  std::vector<uint8_t> out;
  const bool bytes = value && kv.type == KvType::int8_v4;  // two columns in a byte
  for (int d = 0; d < (bytes ? static_cast<int>(row) : kv.hd_pad); d++) {
    if (bytes) {
      out.push_back(half[static_cast<size_t>(slot) * row + static_cast<size_t>(d)]);
      continue;
    }
    const int i = value ? (slot / pair * kv.hd_pad + d) * pair + slot % pair
                        : (d / pair * kBlock + slot) * pair + d % pair;
    const uint8_t* from = half + static_cast<size_t>(i) * element;
    out.insert(out.end(), from, from + element);
  }
  if (kv_scaled(kv.type)) {
    const size_t codes = (value ? row : static_cast<size_t>(kv.hd_pad)) * kBlock;
    const uint8_t* scale = half + codes + slot * 4;
    out.insert(out.end(), scale, scale + 4);
  }
  return out;
}

void check_copies(KvType type, bool latent) {
  constexpr int32_t kHeads = 2, kWidth = 48;
  const size_t keys = kv_key_bytes(type, kWidth), values = kv_value_bytes(type, kWidth);
  const size_t head = kSlabBlocks * (keys + (latent ? 0 : values));
  KvLayer kv{nullptr, kHeads * head, keys,   head,   latent ? 0 : kSlabBlocks * keys,
             values,  kHeads,        kWidth, kWidth, type};
  std::vector<uint8_t> cache(2 * kv.slab_stride);
  std::mt19937 rng(static_cast<uint32_t>(type));
  for (uint8_t& b : cache) b = static_cast<uint8_t>(rng());
  kv.base = cache.data();
  const int32_t table[] = {9, 2, 15, 4};
  std::vector<float> positions;
  for (int p = 1; p < 4 * kBlock; p += 1 + p % 3) positions.push_back(static_cast<float>(p));
  const auto n = static_cast<int64_t>(positions.size());
  std::vector<uint8_t> memory(selected_bytes(kv, n), 0xa5);
  const SelectedKeys got = copy_selected(kv, 1, table, positions.data(), n, memory.data());
  for (int64_t i = 0; i < n; i++) {
    const auto p = static_cast<int>(positions[static_cast<size_t>(i)]);
    const int32_t block = table[p / kBlock], copy = got.block_table[i / kBlock];
    const uint8_t *from = kv_block(kv, block, 1), *to = kv_block(got.layer, copy, 1);
    const int slot = p % kBlock, at = static_cast<int>(i % kBlock);
    EXPECT(bytes_of(kv, from, slot, false) == bytes_of(kv, to, at, false));
    EXPECT((kv.value_offset == 0) == (got.layer.value_offset == 0));
    if (latent) continue;
    EXPECT(bytes_of(kv, kv_values(kv, block, 1), slot, true) ==
           bytes_of(kv, kv_values(got.layer, copy, 1), at, true));
  }
}

}  // namespace

TEST(copies_of_selected_keys_and_values_have_their_bits) {
  for (KvType type : {KvType::bf16, KvType::f16, KvType::f32, KvType::int8, KvType::e4m3}) {
    for (bool latent : {false, true}) check_copies(type, latent);
  }
  check_copies(KvType::int8_v4, false);
}
