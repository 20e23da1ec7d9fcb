// The recurrent layers of RWKV.
#include <algorithm>
#include <cstring>
#include <functional>
#include <vector>

#include "harness.h"

using namespace cpuserve;
using harness::Buffer;
using harness::Rng;

namespace {

constexpr int64_t kTokens = 2 * kStateChunk + 5;

size_t count(int64_t a, int64_t b = 1) { return static_cast<size_t>(a * b); }

// What a head of RWKV 7 is given, and with less of it one of RWKV 6 (r_k is then the bonus).
// Rows of inputs have gaps of NaN between them.
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
  double value(int64_t t, int64_t c) const { return v[count(t, value_stride) + count(c)]; }
};

using Floats = std::vector<float>;

// The memory of a head. All of it begins as NaN, except for the state and the results.
struct Memory {
  Buffer<float> closed, open, out;
  Buffer<uint8_t> scratch;

  Memory(const Head& h, int64_t open_floats, size_t scratch_bytes)
      : closed(count(h.key_width, h.value_width)),
        open(static_cast<size_t>(open_floats)),
        out(count(kTokens, h.value_stride)),
        scratch(scratch_bytes) {
    std::fill_n(closed.data(), closed.size(), 0.0f);
    std::fill_n(open.data(), open.size(), NAN);
    std::fill_n(scratch.data(), scratch.size(), uint8_t{0xff});
    std::fill_n(out.data(), out.size(), -7.0f);
  }
  Floats result() const { return Floats(out.data(), out.data() + out.size()); }

  // Sets what the arguments of both kernels have for `rows` tokens from t on.
  template <class Args>
  void set(Args& a, const Head& h, int64_t t, int64_t rows, bool normed) {
    a.key_width = h.key_width;
    a.value_width = h.value_width;
    a.closed = a.closed_to = closed.data();
    a.open = open.data();
    a.num_open = t % kStateChunk;
    a.rows = rows;
    const int64_t at = t * h.key_stride;
    a.r = h.r.data() + at;
    a.decay = h.decay.data() + at;
    a.key = h.key.data() + at;
    a.v = h.v.data() + t * h.value_stride;
    a.r_stride = a.decay_stride = a.key_stride = h.key_stride;
    a.v_stride = a.out_stride = h.value_stride;
    a.norm = normed ? h.norm.data() : nullptr;
    a.norm_bias = normed ? h.norm_bias.data() : nullptr;
    a.eps = 64e-5f;
    a.out = out.data() + t * h.value_stride;
    a.scratch = scratch.data();
  }
};

// Calls call(first token, tokens) for all tokens, at most `most` at a time, and up to 16 of a
// chunk.
void cut(int64_t most, const std::function<void(int64_t, int64_t)>& call) {
  for (int64_t t = 0, rows = 1; t < kTokens; t += rows, rows = rows % most + 1) {
    rows = std::min({rows, kTokens - t, kStateChunk - t % kStateChunk});
    call(t, rows);
  }
}

Floats computed(const KernelTable& k, const Head& h, int64_t most, bool normed) {
  Memory memory(h, wkv7_open_floats(h.key_width, h.value_width),
                wkv7_scratch_bytes(h.key_width, h.value_width));
  cut(most, [&](int64_t t, int64_t rows) {
    Wkv7Args a{};
    memory.set(a, h, t, rows, normed);
    a.rate = h.rate.data() + t * h.key_stride;
    a.rate_stride = h.key_stride;
    a.k_k = h.k_k.data();
    a.k_a = h.k_a.data();
    a.r_k = h.r_k.data();
    k.wkv7(a);
  });
  return memory.result();
}

Floats computed6(const KernelTable& k, const Head& h, int64_t most, bool normed, bool bonus) {
  Memory memory(h, wkv6_open_floats(h.key_width, h.value_width),
                wkv6_scratch_bytes(h.key_width, h.value_width));
  cut(most, [&](int64_t t, int64_t rows) {
    Wkv6Args a{};
    memory.set(a, h, t, rows, normed);
    a.bonus = bonus ? h.r_k.data() : nullptr;
    a.scale = 0.75f;
    k.wkv6(a);
  });
  return memory.result();
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
        s = w * s + step * z[count(d)] * removed + k * h.value(t, c);
        out[count(c)] += s * h.of(h.r, t, d);
        if (c == 0) bonus += static_cast<double>(h.of(h.r, t, d)) * h.r_k[count(d)] * k;
      }
    }
    return out;
  }
};

// The state of a head of RWKV 6 in fp64.
struct Exact6 {
  const Head& h;
  bool bonus;
  std::vector<double> state;

  Exact6(const Head& head, bool with_bonus)
      : h(head), bonus(with_bonus), state(count(h.key_width, h.value_width), 0.0) {}

  // Returns the row of token t without the norm.
  std::vector<double> next(int64_t t) {
    const int64_t width = h.value_width;
    std::vector<double> out(count(width), 0.0);
    for (int64_t d = 0; d < h.key_width; d++) {
      const double w = std::exp(-std::exp(static_cast<double>(h.of(h.decay, t, d))));
      const double r = 0.75 * h.of(h.r, t, d), k = h.of(h.key, t, d) * (bonus ? 1.0 : 1 - w);
      for (int64_t c = 0; c < width; c++) {
        double& s = state[count(d, width) + count(c)];
        const double added = k * h.value(t, c), before = s;
        s = w * s + added;
        out[count(c)] += r * (bonus ? before + h.r_k[count(d)] * added : s);
      }
    }
    return out;
  }
};

// Checks the rows of all tokens, without norms or with them, against wanted(t).
void check_rows(const Head& head, const Floats& got, bool normed,
                const std::function<std::vector<double>(int64_t)>& wanted) {
  const int64_t width = head.value_width;
  for (int64_t t = 0; t < kTokens; t++) {
    const std::vector<double> row = wanted(t);
    double mean = 0, square = 0, most = 0;
    for (const double x : row) {
      mean += x / static_cast<double>(width);
      most = std::max(most, std::fabs(x));
    }
    for (const double x : row) square += (x - mean) * (x - mean) / static_cast<double>(width);
    const double inverse = 1 / std::sqrt(square + 64e-5);
    const float* at = got.data() + t * head.value_stride;
    for (int64_t c = 0; c < width; c++) {
      double exact = row[count(c)], error = 3e-5 * (most + 1);
      if (normed) {
        exact = (exact - mean) * inverse * head.norm[count(c)] + head.norm_bias[count(c)];
        error *= 2 * inverse + 1;
      }
      CHECK_NEAR(at[c], exact, error);
    }
    for (int64_t c = width; c < head.value_stride; c++) CHECK(at[c] == -7.0f);
  }
}

}  // namespace

KERNEL_TEST_OF(wkv6_matches_fp64_and_its_bits_do_not_depend_on_the_cut, wkv6) {
  const int32_t shapes[][2] = {{64, 64}, {1, 1}, {7, 5}, {16, 33}, {20, 100}, {128, 64}};
  Rng rng(6);
  for (const auto& shape : shapes) {
    Head head(shape[0], shape[1], rng);
    // Some decays leave nothing of a row of the state: exp(-exp(4)), and less than fp32 can hold.
    for (int64_t t = 3; t < kTokens; t += 7) head.decay[count(t, head.key_stride)] = t % 2 ? 90 : 4;
    for (const bool normed : {false, true}) {
      for (const bool bonus : {false, true}) {
        const Floats whole = computed6(k, head, kStateChunk, normed, bonus);
        CHECK(equal(whole, computed6(k, head, 3, normed, bonus)));
        CHECK(equal(whole, computed6(k, head, 1, normed, bonus)));
        Exact6 exact(head, bonus);
        check_rows(head, whole, normed, [&](int64_t t) { return exact.next(t); });
      }
    }
  }
}

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
          const double v = head.value(t, c);
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
