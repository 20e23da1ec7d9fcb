// store_index, pool_index and score_index against fp64 loops.
#include <cmath>
#include <numeric>
#include <vector>

#include "attention_reference.h"
#include "harness.h"

using namespace attention_reference;
using harness::Buffer;
using harness::Rng;

namespace {

constexpr KvType kTypes[] = {KvType::bf16, KvType::f16, KvType::f32, KvType::int8, KvType::e4m3};

// The relative error of an element that is stored in a type, and of the largest one of its row.
double error_of(KvType type) {
  return type == KvType::bf16   ? 1.0 / 256
         : type == KvType::f16  ? 1.0 / 2048
         : type == KvType::e4m3 ? 1.0 / 16
                                : 2e-6;
}
double step_of(KvType type) { return type == KvType::int8 ? 0.501 / 127 : 1e-5; }

Case latent(KvType type, int width) {
  Case c;
  c.type = type;
  c.kv_heads = 1;
  c.head_dim = width;
  c.latent = true;
  return c;
}

// A table of `blocks` blocks in another order.
std::vector<int32_t> shuffled(int blocks) {
  std::vector<int32_t> table;
  for (int i = 0; i < blocks; i++) table.push_back((i * 5 + 3) % blocks);
  return table;
}

struct Tables {
  static constexpr int kPositions = 1200;
  explicit Tables(int half) {
    for (int i = 0; i < kPositions * half; i++) {
      cosine.push_back(static_cast<float>(std::cos(i * 0.7)));
      sine.push_back(static_cast<float>(std::sin(i * 0.7)));
    }
  }
  std::vector<float> cosine, sine;
};

// Rotates columns i and i + half of a row together.
void turn(std::vector<double>& x, const Tables& t, int half, int position) {
  for (int i = 0; i < half; i++) {
    const double a = x[static_cast<size_t>(i)], b = x[static_cast<size_t>(i + half)];
    const auto at = static_cast<size_t>(position * half + i);
    x[static_cast<size_t>(i)] = a * t.cosine[at] - b * t.sine[at];
    x[static_cast<size_t>(i + half)] = b * t.cosine[at] + a * t.sine[at];
  }
}

double largest_of(const std::vector<double>& x) {
  double top = 0;
  for (double v : x) top = std::max(top, std::fabs(v));
  return top;
}

// Stores random rows at positions 0 to `keys` - 1 of a sequence, without a rotation.
void store_random(Cache& cache, const std::vector<int32_t>& table, int keys, int width,
                  const KernelTable& k, Rng& rng) {
  Matrix x(keys, width, ActFormat::f32);
  std::vector<int32_t> positions, slots;
  for (int t = 0; t < keys; t++) {
    for (int i = 0; i < width; i++) x.f32(t)[i] = rng.uniform();
    positions.push_back(t);
    slots.push_back(table[static_cast<size_t>(t / kBlock)] * kBlock + t % kBlock);
  }
  k.store_index(
      {x.rows(), cache.layer(), 0, nullptr, nullptr, positions.data(), slots.data(), 0, keys});
}

void check_store(KvType type, int width, int rotary, const KernelTable& k) {
  Rng rng(static_cast<uint64_t>(width + rotary));
  Cache cache(latent(type, width), 2);
  const Tables tables(rotary / 2);
  Matrix x(3, width, ActFormat::f32);
  for (int t = 0; t < 3; t++) {
    for (int i = 0; i < width; i++) x.f32(t)[i] = rng.uniform();
  }
  std::vector<std::vector<double>> want;
  const int32_t positions[] = {0, 1100, 7}, slots[] = {63, 0, 33};
  for (int t = 0; t < 3; t++) {
    want.emplace_back(x.f32(t), x.f32(t) + width);
    turn(want.back(), tables, rotary / 2, positions[t]);
  }
  for (int t : {1, 0}) {  // in two calls, so that rows outside [m0, m1) must stay
    k.store_index({x.rows(), cache.layer(), rotary, tables.cosine.data(), tables.sine.data(),
                   positions, slots, t, t ? 3 : 1});
  }
  for (int t = 0; t < 3; t++) {
    const double step = step_of(type) * largest_of(want[static_cast<size_t>(t)]);
    for (int i = 0; i < width; i++) {
      const double value = want[static_cast<size_t>(t)][static_cast<size_t>(i)];
      CHECK_NEAR(x.f32(t)[i], value, 1e-6);
      CHECK_NEAR(cache.key(slots[t] / kBlock, slots[t] % kBlock, 0, i), value,
                 error_of(type) * std::fabs(value) + step);
    }
  }
  int untouched = 0;
  for (int slot = 0; slot < 2 * kBlock; slot++) {
    untouched += std::isnan(cache.key(slot / kBlock, slot % kBlock, 0, 0));
  }
  CHECK(untouched == 2 * kBlock - 3);
}

struct Scores {
  KvType type;
  int heads, width, pool, keys;
  bool weighted;
};

void check_scores(const Scores& c, const KernelTable& k) {
  Rng rng(static_cast<uint64_t>(c.heads * 100 + c.width));
  const int tokens = c.keys * c.pool, part = c.width / c.pool;
  const std::vector<int32_t> table = shuffled((tokens + kBlock - 1) / kBlock);
  Cache cache(latent(c.type, part), static_cast<int>(table.size()));
  store_random(cache, table, tokens, part, k, rng);
  Matrix q(2, int64_t{c.heads} * c.width, ActFormat::f32);
  Buffer<float> weights(static_cast<size_t>(c.heads));
  for (int t = 0; t < 2; t++) {
    for (int i = 0; i < c.heads * c.width; i++) q.f32(t)[i] = rng.uniform();
  }
  for (size_t h = 0; h < weights.size(); h++) weights[h] = c.weighted ? rng.uniform() : 1.0f;
  Buffer<uint8_t> scratch(score_index_scratch(c.heads, c.width, c.pool));
  const auto padded = static_cast<size_t>(round_up(c.keys, kChunk));
  Buffer<float> scores(padded), again(padded);
  ScoreIndexArgs args{};
  args.q = q.rows();
  args.weights = c.weighted ? weights.data() : nullptr;
  args.layer = cache.layer();
  args.block_table = table.data();
  args.token = 1;
  args.heads = c.heads;
  args.width = c.width;
  args.pool = c.pool;
  args.scratch = scratch.data();
  args.end = c.keys;
  args.scores = scores.data();
  k.score_index(args);
  for (int key = 0; key < c.keys; key += kChunk) {  // chunk by chunk
    args.begin = key;
    args.end = std::min(c.keys, key + kChunk);
    args.scores = again.data() + key;
    k.score_index(args);
  }
  const bool rounds = c.pool == 1 && c.type != KvType::f16 && c.type != KvType::f32;
  for (int key = 0; key < c.keys; key++) {
    double want = 0, size = 0;
    for (int h = 0; h < c.heads; h++) {
      double dot = 0;
      for (int i = 0; i < c.width; i++) {
        const float x = q.f32(1)[h * c.width + i];
        const int token = key * c.pool + i / part;
        dot += static_cast<double>(rounds ? from_bf16(to_bf16(x)) : x) *
               cache.key(table[static_cast<size_t>(token / kBlock)], token % kBlock, 0, i % part);
      }
      want += weights[static_cast<size_t>(h)] * std::max(0.0, dot);
      size += std::fabs(weights[static_cast<size_t>(h)] * dot);
    }
    const auto at = static_cast<size_t>(key);
    CHECK_NEAR(scores[at], want, 1e-5 * size + 1e-6);
    CHECK(scores[at] == again[at]);
  }
}

struct Pools {
  KvType type;
  int width, pool, rotary;
  bool gates, norm;
};

// Returns the key of a pool from the rows of its tokens.
std::vector<double> pooled(const Pools& c, Cache& raw, int32_t block, int slot,
                           const std::vector<float>& ape) {
  std::vector<double> key;
  for (int i = 0; i < c.width; i++) {
    double sum = 0, weights = 0;
    for (int p = 0; p < c.pool; p++) {
      const double gate = c.gates ? static_cast<double>(raw.key(block, slot + p, 0, c.width + i)) +
                                        ape[static_cast<size_t>(p * c.width + i)]
                                  : 0.0;
      weights += std::exp(gate);
      sum += std::exp(gate) * raw.key(block, slot + p, 0, i);
    }
    key.push_back(sum / weights);
  }
  return key;
}

void check_pools(const Pools& c, const KernelTable& k) {
  Rng rng(static_cast<uint64_t>(c.width + c.pool));
  constexpr int kTokens = 3 * kBlock;
  const std::vector<int32_t> table = shuffled(3);
  const int raw_width = c.gates ? 2 * c.width : c.width, part = c.width / c.pool;
  Cache raw(latent(c.type, raw_width), 3), to(latent(c.type, part), 3);
  store_random(raw, table, kTokens, raw_width, k, rng);
  const Tables tables(c.rotary / 2);
  std::vector<float> ape, norm;
  for (int i = 0; i < c.pool * c.width; i++) ape.push_back(2 * rng.uniform());
  for (int i = 0; i < c.width; i++) norm.push_back(1 + rng.uniform() / 2);
  Buffer<uint8_t> scratch(pool_index_scratch(raw_width, c.pool));
  PoolIndexArgs args{};
  args.raw = raw.layer();
  args.to = to.layer();
  args.block_table = table.data();
  args.pool = c.pool;
  args.width = c.width;
  args.ape = c.gates ? ape.data() : nullptr;
  args.norm = c.norm ? norm.data() : nullptr;
  args.eps = 1e-3f;
  args.rotary = c.rotary;
  args.cos = tables.cosine.data();
  args.sin = tables.sine.data();
  args.first = 1;
  args.last = kTokens / c.pool;
  args.scratch = scratch.data();
  k.pool_index(args);
  CHECK(std::isnan(to.key(table[0], c.pool - 1, 0, 0)));  // pool 0 is not in the range
  for (int i = 1; i < kTokens / c.pool; i++) {
    const int position = i * c.pool, slot = position % kBlock;
    const int32_t block = table[static_cast<size_t>(position / kBlock)];
    std::vector<double> key = pooled(c, raw, block, slot, ape);
    if (c.norm) {
      const double squares = std::inner_product(key.begin(), key.end(), key.begin(), 0.0);
      const double scale = 1 / std::sqrt(squares / c.width + 1e-3);
      for (size_t j = 0; j < key.size(); j++) key[j] *= scale * norm[j];
    }
    turn(key, tables, c.rotary / 2, position);
    const double step = (step_of(c.type) + 1e-5) * largest_of(key);
    for (int j = 0; j < c.width; j++) {
      const double value = key[static_cast<size_t>(j)];
      CHECK_NEAR(to.key(block, slot + j / part, 0, j % part), value,
                 error_of(c.type) * std::fabs(value) + step);
    }
  }
}

}  // namespace

KERNEL_TEST_OF(store_index_turns_and_stores_rows, store_index) {
  for (KvType type : kTypes) {
    check_store(type, 16, 0, k);
    check_store(type, 64, 32, k);
    check_store(type, 128, 128, k);
  }
}

KERNEL_TEST_OF(score_index_adds_the_positive_products_of_all_heads, score_index) {
  for (KvType type : kTypes) {
    for (int heads : {1, 5, 16, 23}) check_scores({type, heads, 32, 1, 300, true}, k);
    check_scores({type, 8, 128, 1, 513, false}, k);
  }
}

KERNEL_TEST_OF(score_index_joins_the_parts_of_the_keys_of_pools, score_index) {
  for (KvType type : kTypes) {
    check_scores({type, 7, 32, 4, 270, true}, k);
    check_scores({type, 4, 48, 16, 20, false}, k);
  }
}

KERNEL_TEST_OF(pool_index_stores_means_of_pools, pool_index) {
  for (KvType type : kTypes) {
    check_pools({type, 32, 4, 0, true, false}, k);
    check_pools({type, 64, 16, 32, false, true}, k);
  }
}
