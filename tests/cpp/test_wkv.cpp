// The recurrent layers of RWKV.
#include <algorithm>
#include <cstring>
#include <vector>

#include "harness.h"

using namespace cpuserve;
using harness::Buffer;
using harness::Rng;

namespace {

constexpr int64_t kTokens = 2 * kStateChunk + 5;

size_t count(int64_t a, int64_t b = 1) { return static_cast<size_t>(a * b); }

// What a head of RWKV 7 is given; rows of inputs have gaps of NaN between them.
struct Head {
  int32_t key_width, value_width;
  int64_t key_stride, value_stride;
  Buffer<float> r, decay, key, rate, v, k_k, k_a, r_k, norm, norm_bias;

  Head(int32_t keys, int32_t values, Rng& rng)
      : key_width(keys),
        value_width(values),
        key_stride(keys + 3),
        value_stride(values + 3),
        r(count(kTokens, key_stride)),
        decay(r.size()),
        key(r.size()),
        rate(r.size()),
        v(count(kTokens, value_stride)),
        k_k(count(keys)),
        k_a(count(keys)),
        r_k(count(keys)),
        norm(count(values)),
        norm_bias(count(values)) {
    for (Buffer<float>* p : {&r, &decay, &key, &rate}) {
      for (size_t i = 0; i < p->size(); i++) {
        const bool gap = static_cast<int64_t>(i) % key_stride >= keys;
        (*p)[i] = gap ? NAN : (p == &decay ? 4.0f : 1.5f) * rng.uniform();
      }
    }
    for (size_t i = 0; i < v.size(); i++) {
      v[i] = static_cast<int64_t>(i) % value_stride < values ? rng.uniform() : NAN;
    }
    for (Buffer<float>* p : {&k_k, &k_a, &r_k, &norm, &norm_bias}) {
      for (size_t i = 0; i < p->size(); i++) (*p)[i] = 1.0f + 0.3f * rng.uniform();
    }
  }
  float of(const Buffer<float>& x, int64_t t, int64_t d) const {
    return x[count(t, key_stride) + count(d)];
  }
};

using Floats = std::vector<float>;

// Computes all tokens, at most `most` in a call. All memory begins as NaN, except for the state.
Floats computed(const KernelTable& k, const Head& h, int64_t most, bool normed) {
  Buffer<float> closed(count(h.key_width, h.value_width));
  Buffer<float> open(static_cast<size_t>(wkv7_open_floats(h.key_width, h.value_width)));
  Buffer<uint8_t> scratch(wkv7_scratch_bytes(h.key_width, h.value_width));
  Buffer<float> out(count(kTokens, h.value_stride));
  std::fill_n(closed.data(), closed.size(), 0.0f);
  std::fill_n(open.data(), open.size(), NAN);
  std::fill_n(scratch.data(), scratch.size(), uint8_t{0xff});
  std::fill_n(out.data(), out.size(), -7.0f);
  for (int64_t t = 0, rows = 1; t < kTokens; t += rows, rows = rows % most + 1) {
    Wkv7Args a{};
    a.key_width = h.key_width;
    a.value_width = h.value_width;
    a.closed = a.closed_to = closed.data();
    a.open = open.data();
    a.num_open = t % kStateChunk;
    a.rows = rows = std::min({rows, kTokens - t, kStateChunk - a.num_open});
    const int64_t at = t * h.key_stride;
    a.r = h.r.data() + at;
    a.decay = h.decay.data() + at;
    a.key = h.key.data() + at;
    a.rate = h.rate.data() + at;
    a.v = h.v.data() + t * h.value_stride;
    a.r_stride = a.decay_stride = a.key_stride = a.rate_stride = h.key_stride;
    a.v_stride = a.out_stride = h.value_stride;
    a.k_k = h.k_k.data();
    a.k_a = h.k_a.data();
    a.r_k = h.r_k.data();
    a.norm = normed ? h.norm.data() : nullptr;
    a.norm_bias = normed ? h.norm_bias.data() : nullptr;
    a.eps = 64e-5f;
    a.out = out.data() + t * h.value_stride;
    a.scratch = scratch.data();
    k.wkv7(a);
  }
  return Floats(out.data(), out.data() + out.size());
}

bool equal(const Floats& a, const Floats& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// The state of a head in fp64, one token after another.
struct Exact {
  const Head& h;
  std::vector<double> state;

  explicit Exact(const Head& head) : h(head), state(count(h.key_width, h.value_width), 0.0) {}
  static double logistic(double x) { return 1 / (1 + std::exp(-x)); }

  // Returns the row of token t without the norm, and adds its bonus to `bonus`.
  std::vector<double> next(int64_t t, double& bonus) {
    const int64_t width = h.value_width;
    std::vector<double> z(count(h.key_width)), out(count(width), 0.0);
    double length = 0;
    for (int64_t d = 0; d < h.key_width; d++) {
      z[count(d)] = static_cast<double>(h.of(h.key, t, d)) * h.k_k[count(d)];
      length += z[count(d)] * z[count(d)];
    }
    for (double& x : z) x /= std::sqrt(length);
    for (int64_t c = 0; c < width; c++) {
      double removed = 0;
      for (int64_t d = 0; d < h.key_width; d++)
        removed -= state[count(d, width) + count(c)] * z[count(d)];
      for (int64_t d = 0; d < h.key_width; d++) {
        const double step = logistic(h.of(h.rate, t, d));
        const double w = std::exp(-std::exp(-0.5) * logistic(h.of(h.decay, t, d)));
        const double k = h.of(h.key, t, d) * (1 + (step - 1) * h.k_a[count(d)]);
        double& s = state[count(d, width) + count(c)];
        s = w * s + step * z[count(d)] * removed + k * h.v[count(t, h.value_stride) + count(c)];
        out[count(c)] += s * h.of(h.r, t, d);
        if (c == 0) bonus += static_cast<double>(h.of(h.r, t, d)) * h.r_k[count(d)] * k;
      }
    }
    return out;
  }
};

}  // namespace

KERNEL_TEST_OF(wkv7_matches_fp64_and_its_bits_do_not_depend_on_the_cut, wkv7) {
  const int32_t shapes[][2] = {{64, 64}, {1, 1}, {7, 5}, {16, 33}, {20, 100}, {128, 64}};
  Rng rng(5);
  for (const auto& shape : shapes) {
    const Head head(shape[0], shape[1], rng);
    const int64_t width = head.value_width;
    for (const bool normed : {false, true}) {
      const Floats whole = computed(k, head, kStateChunk, normed);
      CHECK(equal(whole, computed(k, head, 3, normed)));
      CHECK(equal(whole, computed(k, head, 1, normed)));
      Exact exact(head);
      for (int64_t t = 0; t < kTokens; t++) {
        double bonus = 0, mean = 0, square = 0;
        std::vector<double> row = exact.next(t, bonus);
        double most = 0;
        for (const double x : row) {
          mean += x / static_cast<double>(width);
          most = std::max(most, std::fabs(x));
        }
        for (const double x : row) square += (x - mean) * (x - mean) / static_cast<double>(width);
        const double inverse = 1 / std::sqrt(square + 64e-5);
        const float* got = whole.data() + t * head.value_stride;
        for (int64_t c = 0; c < width; c++) {
          const auto at = count(c);
          const double v = head.v[count(t, head.value_stride) + at];
          double wanted = row[at], error = 3e-5 * (most + 1);
          if (normed) {
            wanted = (wanted - mean) * inverse * head.norm[at] + head.norm_bias[at];
            error *= 2 * inverse + 1;
          }
          CHECK_NEAR(got[c], wanted + bonus * v, error + 1e-5 * (std::fabs(bonus) + 1));
        }
        for (int64_t c = width; c < head.value_stride; c++) CHECK(got[c] == -7.0f);
      }
    }
  }
}
