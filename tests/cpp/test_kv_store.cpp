// rope_store and latent_store against fp64 loops.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <random>
#include <string>

#include "attention_reference.h"
#include "harness.h"

using namespace attention_reference;

namespace {

struct RopeCase {
  KvType type;
  int q_heads, kv_heads, head_dim, rotary;
  bool norms;
  ActFormat q_format;
};

double rms_scale(const float* x, int n, double eps) {
  double sum = 0;
  for (int i = 0; i < n; i++) sum += static_cast<double>(x[i]) * x[i];
  return 1.0 / std::sqrt(sum / n + eps);
}

std::vector<double> turned(const float* x, const RopeCase& c, const std::vector<float>& norm,
                           const float* cosine, const float* sine) {
  std::vector<double> y(x, x + c.head_dim);
  if (c.norms) {
    const double s = rms_scale(x, c.head_dim, 1e-5);
    for (int i = 0; i < c.head_dim; i++)
      y[static_cast<size_t>(i)] *= s * norm[static_cast<size_t>(i)];
  }
  const int half = c.rotary / 2;
  for (int i = 0; i < half; i++) {
    double& a = y[static_cast<size_t>(i)];
    double& b = y[static_cast<size_t>(i + half)];
    const double ra = a * cosine[i] - b * sine[i], rb = b * cosine[i] + a * sine[i];
    a = ra;
    b = rb;
  }
  return y;
}

bool close_to(double x, double want, double relative, double absolute = 0) {
  return std::fabs(x - want) <= relative * std::fabs(want) + absolute + 4e-6;
}

double largest(const std::vector<double>& x) {
  double top = 0;
  for (double v : x) top = std::max(top, std::fabs(v));
  return top;
}

void check_rope(const RopeCase& c, const KernelTable& k) {
  constexpr int kTokens = 5, kPositions = 40;
  std::mt19937 rng(static_cast<uint32_t>(c.head_dim + c.q_heads));
  std::normal_distribution<float> normal;
  Case shape;
  shape.type = c.type;
  shape.kv_heads = c.kv_heads;
  shape.head_dim = c.head_dim;
  Cache kv(shape, 3);
  const int heads = c.q_heads + 2 * c.kv_heads, half = std::max(1, c.rotary / 2);
  Matrix qkv(kTokens, static_cast<int64_t>(heads) * c.head_dim, ActFormat::f32);
  Matrix q(kTokens, static_cast<int64_t>(c.q_heads) * shape.hd_pad(), c.q_format);
  std::vector<float> source, cosine, sine, norm_q, norm_k;
  for (int t = 0; t < kTokens; t++) {
    for (int i = 0; i < heads * c.head_dim; i++) source.push_back(qkv.f32(t)[i] = normal(rng));
  }
  for (int i = 0; i < kPositions * half; i++) {
    const double angle = normal(rng);
    cosine.push_back(static_cast<float>(std::cos(angle)));
    sine.push_back(static_cast<float>(std::sin(angle)));
  }
  for (int i = 0; i < c.head_dim; i++) {
    norm_q.push_back(1 + normal(rng) / 8);
    norm_k.push_back(1 + normal(rng) / 8);
  }
  const int32_t positions[kTokens] = {0, 39, 7, 8, 21}, slots[kTokens] = {95, 31, 32, 0, 41};
  const float* norms[] = {c.norms ? norm_q.data() : nullptr, c.norms ? norm_k.data() : nullptr};
  for (int t : {3, 0}) {  // in two calls, so that rows outside [m0, m1) must stay
    k.rope_store({qkv.rows(), q.rows(), kv.layer(), c.q_heads, c.rotary, cosine.data(), sine.data(),
                  norms[0], norms[1], 1e-5f, positions, slots, t, t ? kTokens : 3});
  }
  const double q_error = c.q_format == ActFormat::bf16 ? 1.0 / 256 : 2e-6;
  const double kv_error = c.type == KvType::bf16   ? 1.0 / 256
                          : c.type == KvType::f16  ? 1.0 / 2048
                          : c.type == KvType::e4m3 ? 1.0 / 16
                                                   : 2e-6;
  // Half a code's smallest step, as a share of the head's largest magnitude.
  const double step = kv_mixed(c.type)         ? 0.501 / 127
                      : c.type == KvType::e4m3 ? 1.0 / (448 * 1024)
                                               : 0.0;
  // Of 4-bit values, the largest ones may become a fifth smaller, so that the others are closer.
  const double value_step = c.type == KvType::int8_v4 ? 0.25 : step;
  bool ok = true;
  for (int t = 0; t < kTokens; t++) {
    const float* x = &source[static_cast<size_t>(t * heads * c.head_dim)];
    const float* cs = &cosine[static_cast<size_t>(positions[t] * half)];
    const float* sn = &sine[static_cast<size_t>(positions[t] * half)];
    for (int h = 0; h < c.q_heads; h++) {
      std::vector<double> want = turned(x + h * c.head_dim, c, norm_q, cs, sn);
      if (kv_mixed(c.type)) want = mixed(want, true);
      for (int d = 0; d < shape.hd_pad(); d++) {
        const int column = h * shape.hd_pad() + d;
        const float got =
            c.q_format == ActFormat::bf16 ? from_bf16(q.bf16(t)[column]) : q.f32(t)[column];
        ok &= d < c.head_dim ? close_to(got, want[static_cast<size_t>(d)], q_error) : got == 0.0f;
      }
    }
    const int block = slots[t] / kBlock, at = slots[t] % kBlock;
    for (int h = 0; h < c.kv_heads; h++) {
      const float* key = x + (c.q_heads + h) * c.head_dim;
      const float* value = x + (c.q_heads + c.kv_heads + h) * c.head_dim;
      std::vector<double> want = turned(key, c, norm_k, cs, sn);
      if (kv_mixed(c.type)) want = mixed(want, false);
      std::vector<double> want_v(value, value + c.head_dim);
      if (kv_mixes_values(c.type)) want_v = mixed(want_v, false);
      const double top_v = largest(want_v);
      double error = 0, size = 0;
      for (int d = 0; d < shape.hd_pad(); d++) {
        const float got_k = kv.key(block, at, h, d), got_v = kv.value(block, at, h, d);
        const double half_k = step * largest(want), half_v = value_step * top_v;
        if (d >= c.head_dim) {
          ok &= got_k == 0.0f && (got_v == 0.0f || c.type == KvType::int8_v4);
          continue;
        }
        const auto i = static_cast<size_t>(d);
        ok &= close_to(got_k, want[i], kv_error, half_k) &&
              close_to(got_v, want_v[i], kv_error, half_v);
        error += (got_v - want_v[i]) * (got_v - want_v[i]);
        size += want_v[i] * want_v[i];
      }
      ok &= std::sqrt(error / size) < 0.12;
    }
  }
  int untouched = 0;  // every other slot still holds NaN
  for (int slot = 0; slot < 3 * kBlock; slot++) {
    untouched += std::isnan(kv.key(slot / kBlock, slot % kBlock, 0, 0)) &&
                 std::isnan(kv.value(slot / kBlock, slot % kBlock, 0, c.head_dim - 1));
  }
  if (!ok) {
    harness::fail(__FILE__, __LINE__,
                  "rope_store: head_dim " + std::to_string(c.head_dim) + " type " +
                      std::to_string(static_cast<int>(c.type)));
  }
  CHECK(untouched == 3 * kBlock - kTokens);
}

}  // namespace

KERNEL_TEST_OF(rope_store_turns_norms_and_places_every_element, rope_store) {
  for (KvType type :
       {KvType::bf16, KvType::f16, KvType::f32, KvType::int8, KvType::e4m3, KvType::int8_v4}) {
    for (int head_dim : {16, 40, 48, 64, 80, 100, 128, 256}) {
      check_rope({type, 3, 1, head_dim, head_dim, head_dim == 64, ActFormat::f32}, k);
      check_rope({type, 4, 2, head_dim, head_dim / 4 * 2, true, ActFormat::f32}, k);
    }
    check_rope({type, 2, 2, 64, 0, false, ActFormat::f32}, k);
  }
  check_rope({KvType::bf16, 6, 2, 80, 80, true, ActFormat::bf16}, k);
}

namespace {

// Columns of a query or row: `latent` of them as they are, then the others, rotated, the first ones
// of all pairs before the second ones.
std::vector<double> latent_row(std::vector<double> latent, const float* x, int rotary,
                               bool interleaved, const float* cosine, const float* sine) {
  const int half = rotary / 2;
  std::vector<double> second;
  for (int i = 0; i < half; i++) {
    const double a = interleaved ? x[2 * i] : x[i], b = interleaved ? x[2 * i + 1] : x[half + i];
    latent.push_back(a * cosine[i] - b * sine[i]);
    second.push_back(b * cosine[i] + a * sine[i]);
  }
  latent.insert(latent.end(), second.begin(), second.end());
  return latent;
}

void check_latent(KvType type, int rank, int rotary, bool interleaved, bool once,
                  const KernelTable& k) {
  constexpr int kTokens = 4, kHeads = 3, kNope = 5, kPositions = 40;
  std::mt19937 rng(static_cast<uint32_t>(rank + rotary));
  std::normal_distribution<float> normal;
  Case shape;
  shape.type = type;
  shape.kv_heads = 1;
  shape.head_dim = rank + rotary;
  shape.latent = once;
  Cache cache(shape, 2);
  const ActFormat format = type == KvType::bf16 ? ActFormat::bf16 : ActFormat::f32;
  Matrix q(kTokens, kHeads * (kNope + rotary), ActFormat::f32);
  Matrix latent(kTokens, int64_t{kHeads} * rank, ActFormat::f32);
  Matrix kv(kTokens, shape.head_dim, ActFormat::f32);
  Matrix out(kTokens, int64_t{kHeads} * shape.hd_pad(), format);
  for (int t = 0; t < kTokens; t++) {
    for (Matrix* m : {&q, &latent, &kv}) {
      for (int64_t i = 0; i < m->rows().width; i++) m->f32(t)[i] = normal(rng);
    }
  }
  std::vector<float> cosine, sine, norm;
  for (int i = 0; i < kPositions * rotary / 2; i++) {
    cosine.push_back(std::cos(static_cast<float>(i)));
    sine.push_back(std::sin(static_cast<float>(i)));
  }
  for (int i = 0; i < rank; i++) norm.push_back(1 + normal(rng) / 8);
  const int32_t positions[kTokens] = {0, 39, 7, 8}, slots[kTokens] = {63, 31, 32, 0};
  for (int t : {2, 0}) {  // in two calls, so that rows outside [m0, m1) must stay
    k.latent_store({q.rows(), latent.rows(), kv.rows(), out.rows(), cache.layer(), kHeads, kNope,
                    rank, rotary, cosine.data(), sine.data(), norm.data(), 1e-5f, interleaved,
                    positions, slots, t, t ? kTokens : 2});
  }
  const double q_error = format == ActFormat::bf16 ? 1.0 / 256 : 2e-6;
  const double kv_error = type == KvType::bf16   ? 1.0 / 256
                          : type == KvType::f16  ? 1.0 / 2048
                          : type == KvType::e4m3 ? 1.0 / 16
                                                 : 2e-6;
  bool ok = true;
  for (int t = 0; t < kTokens; t++) {
    const float *cs = &cosine[static_cast<size_t>(positions[t] * rotary / 2)],
                *sn = &sine[static_cast<size_t>(positions[t] * rotary / 2)];
    const float* x = kv.f32(t);
    const double scale = rms_scale(x, rank, 1e-5);
    std::vector<double> row;
    for (int i = 0; i < rank; i++) row.push_back(x[i] * scale * norm[static_cast<size_t>(i)]);
    row = latent_row(row, x + rank, rotary, interleaved, cs, sn);
    const double step = type == KvType::int8   ? largest(row) * 0.501 / 127
                        : type == KvType::e4m3 ? largest(row) / (448 * 1024)
                                               : 0.0;
    for (int d = 0; d < shape.head_dim; d++) {
      const double want = row[static_cast<size_t>(d)];
      ok &= close_to(cache.key(slots[t] / kBlock, slots[t] % kBlock, 0, d), want, kv_error, step);
      if (once) continue;
      ok &= close_to(cache.value(slots[t] / kBlock, slots[t] % kBlock, 0, d), want, kv_error, step);
    }
    for (int h = 0; h < kHeads; h++) {
      const float* absorbed = latent.f32(t) + h * rank;
      const std::vector<double> want =
          latent_row({absorbed, absorbed + rank}, q.f32(t) + h * (kNope + rotary) + kNope, rotary,
                     interleaved, cs, sn);
      for (int d = 0; d < shape.hd_pad(); d++) {
        const int column = h * shape.hd_pad() + d;
        const float got =
            format == ActFormat::bf16 ? from_bf16(out.bf16(t)[column]) : out.f32(t)[column];
        ok &=
            d < shape.head_dim ? close_to(got, want[static_cast<size_t>(d)], q_error) : got == 0.0f;
      }
    }
  }
  int untouched = 0;  // every other slot still holds NaN
  for (int slot = 0; slot < 2 * kBlock; slot++) {
    untouched += std::isnan(cache.key(slot / kBlock, slot % kBlock, 0, 0));
  }
  if (!ok) {
    harness::fail(__FILE__, __LINE__,
                  "latent_store: rank " + std::to_string(rank) + " rotary " +
                      std::to_string(rotary) + " type " + std::to_string(static_cast<int>(type)));
  }
  CHECK(untouched == 2 * kBlock - kTokens);
}

}  // namespace

KERNEL_TEST_OF(latent_store_makes_rows_and_queries, latent_store) {
  for (KvType type : {KvType::bf16, KvType::f16, KvType::f32, KvType::int8, KvType::e4m3}) {
    for (bool once : {true, false}) {
      check_latent(type, 32, 16, true, once, k);
      check_latent(type, 48, 10, false, once, k);
    }
  }
  check_latent(KvType::bf16, 512, 64, true, true, k);
}

namespace {

// Returns what rope_store writes for the key of one token, `head` values (the value is the same):
// codes and scale.
struct StoredHead {
  StoredHead(KvType type, const std::vector<float>& head, const KernelTable& k) {
    Case shape;
    shape.type = type;
    shape.kv_heads = 1;
    shape.head_dim = static_cast<int>(head.size());
    Cache kv(shape, 1);
    Matrix qkv(1, 3 * shape.head_dim, ActFormat::f32), q(1, shape.head_dim, ActFormat::f32);
    for (int part = 0; part < 3; part++) {
      std::copy(head.begin(), head.end(), qkv.f32(0) + part * shape.head_dim);
    }
    const int32_t position = 0, slot = 5;
    k.rope_store({qkv.rows(), q.rows(), kv.layer(), 1, 0, nullptr, nullptr, nullptr, nullptr, 1e-5f,
                  &position, &slot, 0, 1});
    for (int d = 0; d < shape.head_dim; d++) {
      keys.push_back(kv.key(0, slot, 0, d));
      values.push_back(kv.value(0, slot, 0, d));
    }
  }
  std::vector<float> keys, values;
};

}  // namespace

// A head whose largest magnitude is the largest code has a scale of 1, so that codes are values.
KERNEL_TEST_OF(e4m3_codes_are_the_nearest_and_of_two_as_near_the_even_one, rope_store) {
  constexpr KvType type = KvType::e4m3;
  constexpr float largest = 448.0f;
  int last = 0;
  while (decoded(type, static_cast<uint8_t>(last)) < static_cast<double>(largest)) last++;
  for (int code = 0; code < last; code++) {
    const double low = decoded(type, static_cast<uint8_t>(code));
    const double high = decoded(type, static_cast<uint8_t>(code + 1));
    const auto tie = static_cast<float>((low + high) / 2);
    const auto even = static_cast<float>(code % 2 == 0 ? low : high);
    std::vector<float> head(16), want(16);
    head[0] = want[0] = largest;
    head[1] = tie, want[1] = even;
    head[2] = -tie, want[2] = -even;
    head[3] = std::nextafterf(tie, 0.0f), want[3] = static_cast<float>(low);
    head[4] = std::nextafterf(tie, largest), want[4] = static_cast<float>(high);
    head[5] = static_cast<float>(low), want[5] = head[5];
    const StoredHead stored(type, head, k);
    CHECK(stored.keys == want && stored.values == want);
  }
}

KERNEL_TEST_OF(a_key_that_is_not_finite_makes_its_whole_head_nan, rope_store) {
  for (KvType type : {KvType::int8, KvType::e4m3, KvType::int8_v4}) {
    for (const float bad : {NAN, INFINITY, -INFINITY}) {
      std::vector<float> head(48, 0.5f);
      const StoredHead good(type, head, k);
      head[37] = bad;
      const StoredHead stored(type, head, k);
      for (size_t d = 0; d < head.size(); d++) {
        CHECK(std::isnan(stored.keys[d]) && std::isnan(stored.values[d]));
        CHECK(std::isfinite(good.keys[d]) && std::isfinite(good.values[d]));
      }
    }
  }
}

// With one key, the output of attention is its value: the largest error that 4 bits can have.
// Heads of 96 and 80 columns are mixed in blocks of 32 and 16.
KERNEL_TEST_OF(the_value_of_one_key_comes_back_with_an_error_of_a_tenth, rope_store) {
  std::mt19937 rng(7);
  std::normal_distribution<float> normal;
  for (const int head_dim : {16, 64, 80, 96, 100, 128, 256}) {
    Case c;
    c.type = KvType::int8_v4;
    c.kv_heads = 1;
    c.head_dim = head_dim;
    const Problem p(c, 1);
    Cache kv(c, p.pool_blocks());
    Matrix qkv(1, 3 * head_dim, ActFormat::f32), q(1, c.hd_pad(), ActFormat::f32);
    for (int i = 0; i < 3 * head_dim; i++) qkv.f32(0)[i] = normal(rng);
    qkv.f32(0)[2 * head_dim + 5] = 8.0f;  // a channel that is larger than the others
    const std::vector<double> value(qkv.f32(0) + 2 * head_dim, qkv.f32(0) + 3 * head_dim);
    const int32_t position = 0, slot = p.table[0] * kBlock;
    k.rope_store({qkv.rows(), q.rows(), kv.layer(), 1, 0, nullptr, nullptr, nullptr, nullptr, 1e-5f,
                  &position, &slot, 0, 1});
    Runner run(k, p);
    Matrix out = run.output(), split = run.output();
    run.run(kv, 0, 0, 0, 1, out);
    run.run_split(kv, 0, 0, 0, 1, 1, split);
    expect_equal_rows(out, split, 0, c, describe(c));
    double error = 0, size = 0, worst = 0;
    for (int d = 0; d < head_dim; d++) {
      const double x = value[static_cast<size_t>(d)], wrong = std::fabs(out.f32(0)[d] - x);
      error += wrong * wrong;
      size += x * x;
      worst = std::max(worst, wrong);
    }
    CHECK(std::sqrt(error / size) < 0.12 && std::sqrt(error / size) > 0.02);
    CHECK(worst < 0.25 * largest(value));
  }
}
