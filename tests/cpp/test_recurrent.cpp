// Recurrent layers: gated delta nets and Mamba2 in chunks, the short convolution, the gated norm.
#include <algorithm>
#include <vector>

#include "harness.h"

using namespace cpuserve;
using harness::Buffer;
using harness::Rng;

namespace {

// Widths of models, and others that end in every part of a vector.
const RecurrentShape kShapes[] = {
    {8, 8, 1, true},           {12, 12, 3, true},   {16, 16, 2, false},    {7, 5, 1, false},
    {20, 33, 2, true},         {1, 1, 1, true},     {37, 100, 2, false},   {40, 272, 1, true},
    {128, 128, 2, true},       {128, 64, 3, false}, {8, 8, 1, true, true}, {37, 33, 1, true, true},
    {128, 128, 1, true, true},
};
constexpr int64_t kTokens = 75;  // four chunks and a part of the fifth

size_t count(int64_t a, int64_t b = 1, int64_t c = 1) { return static_cast<size_t>(a * b * c); }

// What a layer is given for kTokens tokens. Rows have gaps of NaN between them. With a decay by
// row, `g` is given to the kernel without its bias, rate and softplus.
struct Inputs {
  static constexpr int64_t kGap = 3;
  RecurrentShape shape;
  int64_t k_stride, v_stride, g_stride, beta_stride;
  Buffer<float> k, q, v, g, beta, bias;
  float rate = 0.7f;

  Inputs(const RecurrentShape& s, uint64_t seed)
      : shape(s),
        k_stride(s.key_width + kGap),
        v_stride(int64_t{s.heads} * s.value_width + kGap),
        g_stride((s.by_row ? s.key_width : s.heads) + kGap),
        beta_stride(s.heads + kGap),
        k(count(kTokens, k_stride)),
        q(count(kTokens, k_stride)),
        v(count(kTokens, v_stride)),
        g(count(kTokens, g_stride)),
        beta(count(kTokens, beta_stride)),
        bias(count(s.key_width)) {
    Rng rng(seed);
    for (Buffer<float>* b : {&k, &q, &v, &g, &beta}) std::fill_n(b->data(), b->size(), NAN);
    const float size = 1 / std::sqrt(static_cast<float>(s.key_width));  // keys of length 0.6
    for (int64_t d = 0; d < s.key_width; d++) bias[count(d)] = rng.uniform();
    for (int64_t t = 0; t < kTokens; t++) {
      for (int64_t d = 0; d < s.key_width; d++) {
        if (s.by_row) g[count(t, g_stride) + count(d)] = t == 37 ? 40.0f : 3 * rng.uniform() - 3;
        k[count(t, k_stride) + count(d)] = rng.uniform() * size;
        q[count(t, k_stride) + count(d)] = rng.uniform();
      }
      for (int64_t c = 0; c < v_stride - kGap; c++)
        v[count(t, v_stride) + count(c)] = rng.uniform();
      for (int64_t h = 0; h < s.heads; h++) {
        const float g_h = t == 37 ? -30.0f : -0.05f * (1 + rng.uniform());  // one token forgets all
        if (!s.by_row) g[count(t, g_stride) + count(h)] = g_h;
        beta[count(t, beta_stride) + count(h)] = 0.5f + 0.5f * rng.uniform();
      }
    }
  }
  // The logarithm of the decay of row d of the state of head h.
  double log_decay(int64_t t, int64_t h, int64_t d) const {
    if (!shape.by_row) return g[count(t, g_stride) + count(h)];
    const double x = static_cast<double>(g[count(t, g_stride) + count(d)]) + bias[count(d)];
    return -rate * std::log1p(std::exp(x));
  }
};

// A sequence's memory for one unit, and its results. All memory begins as NaN, except for the
// state.
struct Sequence {
  RecurrentShape shape;
  int64_t num_open = 0;
  Buffer<float> closed, open;
  Buffer<uint8_t> scratch;

  explicit Sequence(const RecurrentShape& s)
      : shape(s),
        closed(count(s.heads, s.key_width, s.value_width)),
        open(count(recurrent_open_floats(s))),
        scratch(recurrent_scratch_bytes(s)) {
    std::fill_n(open.data(), open.size(), NAN);
    std::memset(scratch.data(), 0xff, scratch.size());
  }

  RecurrentArgs args(const Inputs& in, int64_t t, int64_t rows, float* out) {
    RecurrentArgs a{};
    a.shape = shape;
    a.closed = a.closed_to = closed.data();
    a.open = open.data();
    a.num_open = num_open;
    a.rows = rows;
    a.k = in.k.data() + t * in.k_stride;
    a.q = in.q.data() + t * in.k_stride;
    a.v = in.v.data() + t * in.v_stride;
    a.k_stride = a.q_stride = in.k_stride;
    a.v_stride = a.out_stride = in.v_stride;
    a.g = in.g.data() + t * in.g_stride;
    a.beta = in.beta.data() + t * in.beta_stride;
    a.g_stride = in.g_stride;
    a.beta_stride = in.beta_stride;
    a.bias = in.bias.data();
    a.rate = in.rate;
    a.out = out;
    a.scratch = scratch.data();
    return a;
  }
  // Tokens [t, t + rows), which may be of several chunks; row 0 of `out` is token 0.
  void run(const KernelTable& k, const Inputs& in, int64_t t, int64_t rows, Buffer<float>& out) {
    for (const int64_t end = t + rows; t < end;) {
      const int64_t n = std::min(end - t, kStateChunk - num_open);
      k.recurrent(args(in, t, n, out.data() + t * in.v_stride));
      num_open = (num_open + n) % kStateChunk;
      t += n;
    }
  }
};

// The recurrent form in fp64: the state is rewritten by every token.
std::vector<double> reference(const Inputs& in) {
  const RecurrentShape& s = in.shape;
  const auto depth = count(s.key_width), width = count(s.value_width);
  std::vector<double> out(count(kTokens, s.heads, s.value_width));
  for (size_t h = 0; h < count(s.heads); h++) {
    std::vector<double> state(depth * width);
    for (size_t t = 0; t < count(kTokens); t++) {
      const float *k = &in.k[t * count(in.k_stride)], *q = &in.q[t * count(in.k_stride)];
      const float* v = &in.v[t * count(in.v_stride) + h * width];
      const auto token = static_cast<int64_t>(t), head = static_cast<int64_t>(h);
      for (size_t d = 0; d < depth; d++) {
        const double decay = std::exp(in.log_decay(token, head, static_cast<int64_t>(d)));
        for (size_t c = 0; c < width; c++) state[d * width + c] *= decay;
      }
      for (size_t c = 0; c < width; c++) {
        double kept = 0, y = 0;
        for (size_t d = 0; d < depth && s.delta; d++) kept += state[d * width + c] * k[d];
        const double u = (v[c] - kept) * in.beta[t * count(in.beta_stride) + h];
        for (size_t d = 0; d < depth; d++) {
          state[d * width + c] += k[d] * u;
          y += state[d * width + c] * q[d];
        }
        out[(t * count(s.heads) + h) * width + c] = y;
      }
    }
  }
  return out;
}

bool equal(const Buffer<float>& a, const Buffer<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// All tokens in as few calls as there can be.
void run_whole(const KernelTable& k, const Inputs& in, Sequence& s, Buffer<float>& out) {
  std::fill_n(out.data(), out.size(), -7.0f);
  s.run(k, in, 0, kTokens, out);
}

// One input of the short convolution: `tokens` rows behind taps - 1 zeros.
struct Convolution {
  int64_t channels, tokens;
  int32_t taps;
  Buffer<float> x, weight, bias;
  Convolution(int64_t columns, int64_t rows, int32_t num_taps, uint64_t seed)
      : channels(columns),
        tokens(rows),
        taps(num_taps),
        x(count(rows + num_taps - 1, columns)),
        weight(count(num_taps, columns)),
        bias(count(columns)) {
    Rng rng(seed);
    for (Buffer<float>* b : {&x, &weight, &bias}) {
      for (size_t i = 0; i < b->size(); i++) (*b)[i] = rng.uniform();
    }
    std::fill_n(x.data(), count(taps - 1, channels), 0.0f);
  }
  // Rows [t, t + rows) to `out`, whose row 0 is token 0. `silu` goes with a bias.
  ShortConvArgs args(int64_t t, int64_t rows, bool silu, float* out) {
    ShortConvArgs a{};
    a.before = x.data() + t * channels;
    a.x = a.before + (taps - 1) * channels;
    a.x_stride = a.out_stride = channels;
    a.weight = weight.data();
    a.bias = silu ? bias.data() : nullptr;
    a.silu = silu;
    a.taps = taps;
    a.channels = channels;
    a.rows = rows;
    a.out = out + t * channels;
    return a;
  }
};

double silu(double x) { return x / (1 + std::exp(-x)); }

}  // namespace

KERNEL_TEST_OF(recurrent_matches_fp64_token_by_token, recurrent) {
  for (const RecurrentShape& shape : kShapes) {
    const Inputs in(shape, 1);
    Sequence sequence(shape);
    Buffer<float> out(count(kTokens, in.v_stride));
    run_whole(k, in, sequence, out);
    const std::vector<double> want = reference(in);
    const int64_t row = in.v_stride - Inputs::kGap;
    double largest = 0;
    for (double x : want) largest = std::max(largest, std::fabs(x));
    for (int64_t t = 0; t < kTokens; t++) {
      for (int64_t c = 0; c < in.v_stride; c++) {
        const float got = out[count(t, in.v_stride) + count(c)];
        if (c >= row) {
          CHECK(got == -7.0f);
        } else {
          CHECK_NEAR(got, want[count(t, row) + count(c)], 4e-6 * largest);
        }
      }
    }
  }
}

KERNEL_TEST_OF(recurrent_has_equal_bits_however_tokens_are_cut_and_rejected, recurrent) {
  Rng rng(2);
  for (const RecurrentShape& shape : kShapes) {
    const Inputs in(shape, 3), drafts(shape, 4);
    Sequence whole(shape);
    Buffer<float> want(count(kTokens, in.v_stride)), junk(count(kTokens, in.v_stride));
    run_whole(k, in, whole, want);
    // The first five differ in kind.
    const bool large = shape.key_width * shape.value_width > 4000;
    const int64_t trials = large ? harness::fewer(6, 5) : harness::fewer(25, 6);
    for (int64_t trial = 0; trial < trials; trial++) {
      Sequence cut(shape);
      Buffer<float> out(want.size());
      std::fill_n(out.data(), out.size(), -7.0f);
      const int64_t most = trial == 0 ? 1 : trial % 2 ? 5 : 30;
      for (int64_t t = 0; t < kTokens;) {
        // A draft never fills a chunk, so its rejection leaves the closed state alone.
        const int64_t room = std::min(kTokens - t, kStateChunk - 1 - cut.num_open);
        if (trial > 2 && room > 0) {
          const int64_t before = cut.num_open;
          cut.run(k, drafts, t, 1 + rng.below(room), junk);
          cut.num_open = before;
        }
        const int64_t rows = std::min(kTokens - t, 1 + rng.below(most));
        cut.run(k, in, t, rows, out);
        t += rows;
      }
      CHECK(equal(out, want));
      CHECK(equal(cut.closed, whole.closed));
    }
  }
}

KERNEL_TEST_OF(recurrent_heads_of_a_unit_do_not_touch_each_other, recurrent) {
  for (const RecurrentShape& shape : {RecurrentShape{12, 20, 3, true}, {24, 64, 3, false}}) {
    const Inputs in(shape, 5);
    Sequence all(shape);
    Buffer<float> want(count(kTokens, in.v_stride)), out(count(kTokens, in.v_stride));
    run_whole(k, in, all, want);
    std::fill_n(out.data(), out.size(), -7.0f);
    RecurrentShape single = shape;
    single.heads = 1;
    for (int64_t h = 0; h < shape.heads; h++) {
      Sequence one(single);
      for (int64_t t = 0; t < kTokens; t++) {
        RecurrentArgs a = one.args(in, t, 1, out.data() + t * in.v_stride + h * shape.value_width);
        a.v += h * shape.value_width;
        a.g += h;
        a.beta += h;
        k.recurrent(a);
        one.num_open = (one.num_open + 1) % kStateChunk;
      }
      const size_t state = one.closed.size();
      CHECK(std::memcmp(one.closed.data(), all.closed.data() + count(h) * state,
                        state * sizeof(float)) == 0);
    }
    CHECK(equal(out, want));
  }
}

KERNEL_TEST_OF(recurrent_closes_into_another_state_and_only_a_full_chunk, recurrent) {
  const RecurrentShape shape{20, 36, 2, true};
  const Inputs in(shape, 6);
  Sequence here(shape), there(shape);
  Buffer<float> out(count(kTokens, in.v_stride)), to(here.closed.size()), before(to.size());
  here.run(k, in, 0, 31, out);
  there.run(k, in, 0, 31, out);
  std::memcpy(before.data(), there.closed.data(), before.size() * sizeof(float));
  CHECK(equal(here.closed, before));
  here.run(k, in, 31, 1, out);
  RecurrentArgs a = there.args(in, 31, 1, out.data());
  a.closed_to = to.data();
  k.recurrent(a);
  CHECK(equal(there.closed, before));
  CHECK(equal(here.closed, to));
  CHECK(!equal(before, to));
}

KERNEL_TEST_OF(short_conv_matches_fp64_and_its_bits_do_not_depend_on_the_cut, short_conv) {
  for (const int64_t channels : {1, 5, 16, 40, 1100}) {
    for (const int32_t taps : {1, 2, 4, kMaxTaps}) {
      constexpr int64_t kRows = 21;
      Convolution c(channels, kRows, taps, 7);
      for (const bool with_silu : {false, true}) {
        Buffer<float> whole(count(kRows, channels)), cut(whole.size());
        k.short_conv(c.args(0, kRows, with_silu, whole.data()));
        for (int64_t t = 0, rows = 1; t < kRows; t += rows, rows = rows % 4 + 1) {
          k.short_conv(c.args(t, std::min(rows, kRows - t), with_silu, cut.data()));
        }
        CHECK(equal(whole, cut));
        for (size_t i = 0; i < whole.size(); i++) {
          double sum = with_silu ? c.bias[i % count(channels)] : 0.0f;
          for (size_t j = 0; j < count(taps); j++) {
            sum += static_cast<double>(c.weight[j * count(channels) + i % count(channels)]) *
                   c.x[i + j * count(channels)];
          }
          CHECK_NEAR(whole[i], with_silu ? silu(sum) : sum, 2e-6);
        }
      }
    }
  }
}

KERNEL_TEST_OF(short_conv_of_some_channels_has_the_bits_of_all, short_conv) {
  constexpr int64_t kChannels = 50, kRows = 6, kFirst = 17;
  Convolution c(kChannels, kRows, 4, 8);
  Buffer<float> whole(count(kRows, kChannels)), parts(whole.size());
  k.short_conv(c.args(0, kRows, true, whole.data()));
  for (const int64_t first : {int64_t{0}, kFirst}) {
    ShortConvArgs a = c.args(0, kRows, true, parts.data());
    a.channels = first ? kChannels - kFirst : kFirst;
    a.before_stride = a.weight_stride = kChannels;
    for (const float** p : {&a.x, &a.before, &a.weight, &a.bias}) *p += first;
    a.out += first;
    k.short_conv(a);
  }
  CHECK(equal(whole, parts));
}

KERNEL_TEST_OF(selective_scan_matches_fp64_and_its_bits_do_not_depend_on_the_cut, selective_scan) {
  constexpr int64_t kRows = 2 * kStateChunk + 5;
  Rng rng(11);
  for (const int64_t channels : {1, 5, 16, 40}) {
    for (const int32_t width : {1, 12, 16}) {
      const int64_t wide = channels + 3;  // rows of the values are further apart than channels
      Buffer<float> x(count(kRows, wide)), steps(x.size()), z(x.size()), rates(count(width, wide));
      Buffer<float> b(count(kRows, width)), c(b.size()), d(count(channels));
      for (Buffer<float>* p : {&x, &steps, &z, &b, &c, &d}) {
        for (size_t i = 0; i < p->size(); i++) (*p)[i] = 2 * rng.uniform();
      }
      for (size_t i = 0; i < rates.size(); i++) rates[i] = -std::fabs(3 * rng.uniform());
      const auto scan = [&](int64_t most, Buffer<float>& out) {
        Buffer<float> closed(count(width, channels));
        Buffer<float> open(static_cast<size_t>(selective_scan_open_floats(channels, width)));
        std::fill_n(closed.data(), closed.size(), 0.0f);
        for (int64_t t = 0, rows = 1; t < kRows; t += rows, rows = rows % most + 1) {
          const int64_t num_open = t % kStateChunk;
          rows = std::min({rows, kRows - t, kStateChunk - num_open});
          SelectiveScanArgs a{};
          a.channels = channels;
          a.width = width;
          a.closed = a.closed_to = closed.data();
          a.closed_to = closed.data();
          a.open = open.data();
          a.num_open = num_open;
          a.rows = rows;
          a.x = x.data() + t * wide;
          a.steps = steps.data() + t * wide;
          a.z = z.data() + t * wide;
          a.b = b.data() + t * width;
          a.c = c.data() + t * width;
          a.x_stride = a.steps_stride = a.z_stride = a.rates_stride = a.out_stride = wide;
          a.b_stride = a.c_stride = width;
          a.rates = rates.data();
          a.d = d.data();
          a.out = out.data() + t * wide;
          k.selective_scan(a);
        }
      };
      Buffer<float> whole(x.size()), cut(x.size());
      std::fill_n(whole.data(), whole.size(), -7.0f);
      std::fill_n(cut.data(), cut.size(), -7.0f);
      scan(kStateChunk, whole);
      scan(3, cut);
      CHECK(equal(whole, cut));
      for (int64_t i = 0; i < channels; i++) {
        std::vector<double> state(count(width), 0.0), size(state);
        for (int64_t t = 0; t < kRows; t++) {
          const double in = x[count(t, wide) + count(i)];
          const double dt =
              std::log1p(std::exp(static_cast<double>(steps[count(t, wide) + count(i)])));
          double sum = d[count(i)] * in, sizes = std::fabs(sum);
          for (size_t n = 0; n < state.size(); n++) {
            const double rate = rates[n * count(wide) + count(i)];
            const double added = b[count(t, width) + n] * dt * in, key = c[count(t, width) + n];
            state[n] = std::exp(dt * rate) * state[n] + added;
            size[n] = std::exp(dt * rate) * size[n] + std::fabs(added);
            sum += key * state[n];
            sizes += std::fabs(key) * size[n];
          }
          // decayed() errs by 4e-7 for each token that a state still remembers, here about ten.
          const double gate = silu(z[count(t, wide) + count(i)]);
          CHECK_NEAR(whole[count(t, wide) + count(i)], sum * gate,
                     1e-7 + 4e-6 * sizes * std::fabs(gate));
        }
      }
      for (int64_t t = 0; t < kRows; t++) CHECK(whole[count(t, wide) + count(channels)] == -7.0f);
    }
  }
}

KERNEL_TEST_OF(gated_norm_matches_fp64_and_may_work_in_place, gated_norm) {
  constexpr int64_t kRows = 3, kGroups = 4;
  constexpr float kEps = 1e-5f;
  Rng rng(9);
  for (const int64_t width : {1, 8, 12, 33, 128}) {
    const int64_t x_stride = kGroups * width + 2, z_stride = x_stride + 3;
    Buffer<float> x(count(kRows, x_stride)), z(count(kRows, z_stride));
    Buffer<float> weight(count(kGroups, width)), out(x.size());
    for (Buffer<float>* b : {&x, &z, &weight}) {
      for (size_t i = 0; i < b->size(); i++) (*b)[i] = 3 * rng.uniform();
    }
    for (const bool gate_first : {false, true}) {
      for (const bool shared : {false, true}) {
        std::fill_n(out.data(), out.size(), -7.0f);
        GatedNormArgs a{x.data(), x_stride,   z.data(), z_stride,   weight.data(), kGroups, width,
                        kEps,     gate_first, shared,   out.data(), x_stride,      kRows};
        a.sigmoid = shared && !gate_first;
        k.gated_norm(a);
        for (int64_t r = 0; r < kRows; r++) {
          CHECK(out[count(r + 1, x_stride) - 1] == -7.0f);
          for (int64_t g = 0; g < kGroups; g++) {
            const float* from = x.data() + r * x_stride + g * width;
            const float* gate = z.data() + r * z_stride + g * width;
            std::vector<double> y(from, from + width);
            for (size_t i = 0; i < y.size() && gate_first; i++) y[i] *= silu(gate[i]);
            double sum = 0;
            for (double v : y) sum += v * v;
            for (size_t i = 0; i < y.size(); i++) {
              double want = y[i] / std::sqrt(sum / static_cast<double>(width) + kEps) *
                            weight[(shared ? 0 : count(g, width)) + i];
              if (!gate_first) want *= a.sigmoid ? silu(gate[i]) / gate[i] : silu(gate[i]);
              CHECK_NEAR(out[count(r, x_stride) + count(g, width) + i], want,
                         2e-6 * (1 + std::fabs(want)));
            }
          }
        }
        Buffer<float> in_place(x.size());
        std::fill_n(in_place.data(), in_place.size(), -7.0f);
        for (int64_t r = kRows - 1; r >= 0; r--) {  // and one row at a time
          std::memcpy(in_place.data() + r * x_stride, x.data() + r * x_stride,
                      count(kGroups, width) * sizeof(float));
          a.x = a.out = in_place.data() + r * x_stride;
          a.z = z.data() + r * z_stride;
          a.rows = 1;
          k.gated_norm(a);
        }
        CHECK(equal(in_place, out));
      }
    }
  }
}
