// Epilogues of the linear kernels against an fp64 reference, and batch invariance bit for bit.
#include <algorithm>

#include "activations.h"
#include "harness.h"
#include "linear_reference.h"

using activations::activated, activations::other_half, activations::ungated;
using namespace linear_reference;

namespace {

// Expected outputs of row r in fp64: + bias, activation, gate times up.
std::vector<double> expected_row(const Weights& w, const References& reference_of, int64_t r,
                                 const Epilogue& ep) {
  std::vector<double> y(static_cast<size_t>(w.panels * kPanel));
  for (int64_t c = 0; c < w.panels * kPanel; c++) {
    double& v = y[static_cast<size_t>(c)];
    v = reference_of(r, c).value + (ep.bias ? static_cast<double>(ep.bias[c]) : 0);
    v = ep.glu && c / kPanel % 2 == 1 ? other_half(ep.act, v) : activated(ep.act, v);
  }
  if (!ep.glu) return y;
  std::vector<double> half;
  for (int64_t p = 0; p < w.panels; p += 2) {
    for (int64_t c = 0; c < kPanel; c++) {
      half.push_back(y[static_cast<size_t>(p * kPanel + c)] *
                     y[static_cast<size_t>((p + 1) * kPanel + c)]);
    }
  }
  return half;
}

void check_f32_row(const Output& out, int64_t r, const std::vector<double>& y, double before) {
  for (int64_t c = 0; c < out.rows.width; c++) {
    const double e = y[static_cast<size_t>(c)] + before;
    CHECK_NEAR(static_cast<double>(read_at<float>(out.bytes(r) + c * 4)), e,
               4e-5 + 4e-6 * std::fabs(e));
  }
}
void check_bf16_row(const Output& out, int64_t r, const std::vector<double>& y) {
  for (int64_t c = 0; c < out.rows.width; c++) {
    const double e = y[static_cast<size_t>(c)];
    CHECK_NEAR(static_cast<double>(harness::from_bf16(read_at<uint16_t>(out.bytes(r) + c * 2))), e,
               4e-5 + std::fabs(e) * (std::ldexp(1, -8) + 1e-5));
  }
}
void check_q8_row(const Output& out, int64_t r, const std::vector<double>& y) {
  const int64_t groups = (out.rows.width + 31) / 32;
  const uint8_t* scales = out.bytes(r) + groups * 32;
  const uint8_t* sums = scales + groups * 4;
  for (int64_t g = 0; g < groups; g++) {
    const double scale = static_cast<double>(read_at<float>(scales + g * 4));
    double amax = 0;
    int32_t sum = 0;
    for (int64_t c = g * 32; c < g * 32 + 32; c++) {
      const int q = read_at<int8_t>(out.bytes(r) + c);
      sum += q;
      if (c >= out.rows.width) {
        CHECK(q == 0);
        continue;
      }
      amax = std::max(amax, std::fabs(y[static_cast<size_t>(c)]));
      CHECK_NEAR(q * scale, y[static_cast<size_t>(c)], 0.501 * scale + 5e-5);
    }
    CHECK_NEAR(scale, amax / 127, 1e-6 + 1e-5 * amax);
    CHECK(read_at<int32_t>(sums + g * 4) == sum);
  }
}

struct EpilogueCase {
  Activation act;
  bool glu, bias, add;
  ActFormat format;
  int64_t width;
};

void check_epilogue(const KernelTable& k, WeightKind kind, int64_t m, const EpilogueCase& c) {
  if (harness::from_below(k, kind)) return;
  const int64_t n = c.glu ? (c.width + 15) / 16 * 32 : c.width;
  Weights w(k, kind, n, 96, 7);
  const Inputs x(w.kernel.act, m, 96);
  Buffer<float> bias(static_cast<size_t>(w.panels * kPanel));
  Rng rng(8);
  // Some sums are beyond the clamp.
  const float most = c.act == Activation::clamped_swiglu ? 10.0f : 1.0f;
  for (size_t i = 0; i < bias.size(); i++) bias[i] = most * rng.uniform();
  Output out(c.format, m, c.width);
  Epilogue ep = plain(out);
  ep.act = c.act;
  ep.glu = c.glu;
  ep.add = c.add;
  ep.bias = c.bias ? bias.data() : nullptr;
  if (c.add) {
    for (int64_t r = 0; r < m; r++) std::fill(out.f32(r), out.f32(r) + c.width, 3.0f);
  }
  run(w, x, 0, m, ep);
  const References reference_of(w, x);
  for (int64_t r = 0; r < m; r++) {
    const std::vector<double> y = expected_row(w, reference_of, r, ep);
    if (c.format == ActFormat::f32) check_f32_row(out, r, y, c.add ? 3.0 : 0.0);
    if (c.format == ActFormat::bf16) check_bf16_row(out, r, y);
    if (c.format == ActFormat::q8g32) check_q8_row(out, r, y);
  }
}

}  // namespace

// Of few, a third: every epilogue of every kind with one or two numbers of rows.
KERNEL_TEST(linear_epilogues_match_fp64) {
  unsigned turn = 0;
  for (WeightKind kind : {WeightKind::dense_bf16, WeightKind::w4m_g32, WeightKind::w8_channel}) {
    for (int64_t m : {1, 8, 14, 40}) {  // 40: several tiles finished together
      const auto check = [&](const EpilogueCase& c) {
        if (turn++ % 3 == 0 || !harness::few_shapes()) check_epilogue(k, kind, m, c);
      };
      for (Activation act : ungated()) check({act, false, true, false, ActFormat::f32, 72});
      for (ActFormat format : {ActFormat::f32, ActFormat::bf16, ActFormat::q8g32}) {
        check({Activation::none, false, false, false, format, 200});
        check({Activation::silu, true, false, false, format, 96});
        check({Activation::gelu_tanh, true, true, false, format, 40});
        check({Activation::clamped_swiglu, true, true, false, format, 40});
        check({Activation::relu, false, true, false, format, 50});
      }
      check({Activation::none, false, false, true, ActFormat::f32, 72});
      check({Activation::none, false, true, true, ActFormat::f32, 64});
    }
  }
}

KERNEL_TEST(linear_epilogue_bits_do_not_depend_on_m_or_panel_split) {
  for (WeightKind kind :
       {WeightKind::dense_bf16, WeightKind::w8_g32, WeightKind::w8_channel_g128}) {
    if (harness::from_below(k, kind)) continue;
    for (ActFormat format : {ActFormat::bf16, ActFormat::q8g32, ActFormat::q8g32x2}) {
      const Weights w(k, kind, 16 * harness::fewer(24, 8), 96);
      const Inputs x(w.kernel.act, 50, 96);
      for (bool glu : {false, true}) {
        const int64_t width = glu ? w.n / 2 : w.n;
        const int64_t step = (glu ? 2 : 1) * (format == ActFormat::bf16 ? 1 : 2);
        Output whole(format, 50, width), parts(format, 50, width);
        Epilogue a = plain(whole), b = plain(parts);
        a.act = b.act = Activation::silu;
        a.glu = b.glu = glu;
        run(w, x, 0, 50, a);
        for (int64_t r = 0; r < 50; r += 5) {
          for (int64_t p = 0; p < w.panels; p += step) run(w, x, r, 5, b, p, p + step);
        }
        CHECK(std::memcmp(whole.data.data(), parts.data.data(), whole.data.size()) == 0);
      }
    }
  }
}

// Rows that do not stay in L2 pass over a span of strips, one block of K after the other.
KERNEL_TEST(linear_epilogue_bits_do_not_depend_on_work_sizes) {
  WorkSizes small{};
  small.strip_bytes = 2 << 10;
  small.rows = 64;
  const int64_t columns = harness::fewer(800, 288);
  CHECK(!rows_stay_in_l2(small.rows, static_cast<size_t>(columns), small));
  for (WeightKind kind : {WeightKind::dense_bf16, WeightKind::w8_g32, WeightKind::w4m_g128,
                          WeightKind::w8_channel, WeightKind::w8_channel_g128}) {
    if (harness::from_below(k, kind)) continue;
    for (ActFormat format :
         {ActFormat::f32, ActFormat::bf16, ActFormat::q8g32, ActFormat::q8g32x2}) {
      const Weights w(k, kind, 16 * 22, columns);
      const Inputs x(w.kernel.act, 70, columns);
      for (bool glu : {false, true}) {
        const int64_t width = glu ? 176 : 352;
        Output strips(format, 70, width), spans(format, 70, width);
        Epilogue a = plain(strips), b = plain(spans);
        a.act = b.act = glu ? Activation::silu : Activation::none;
        a.glu = b.glu = glu;
        run(w, x, 0, 70, a);
        run(w, x, 0, 70, b, 0, -1, small);
        CHECK(std::memcmp(strips.data.data(), spans.data.data(), strips.data.size()) == 0);
      }
    }
  }
}
