// Norms, activations, additions, row formats and the roofline probes.
#include <algorithm>
#include <limits>

#include "activations.h"
#include "harness.h"

using namespace cpuserve;
using activations::activated, activations::other_half, activations::ungated;
using harness::Buffer;
using harness::from_bf16;
using harness::Rng;

namespace {

const int64_t kWidths[] = {1, 5, 16, 31, 32, 33, 48, 64, 100, 576, 1000};
const ActFormat kFormats[] = {ActFormat::f32,     ActFormat::bf16,    ActFormat::q8g32,
                              ActFormat::q8g32x2, ActFormat::q8g128,  ActFormat::q8row,
                              ActFormat::q8g256,  ActFormat::q8g256x2};

// `rows` rows in one of the formats; bytes start as 0xff, which is NaN in the float formats.
class Matrix {
 public:
  Matrix(int64_t rows, int64_t width, ActFormat format)
      : memory_(static_cast<size_t>(rows) * row_bytes(format, width)) {
    std::memset(memory_.data(), 0xff, memory_.size());
    rows_ = {memory_.data(), row_bytes(format, width), width, format};
  }
  const Rows& rows() const { return rows_; }
  uint8_t* bytes(int64_t row) { return memory_.data() + static_cast<size_t>(row) * rows_.stride; }
  float* f32(int64_t row) { return reinterpret_cast<float*>(bytes(row)); }
  uint16_t* bf16(int64_t row) { return reinterpret_cast<uint16_t*>(bytes(row)); }
  int64_t group() const {
    if (rows_.format == ActFormat::q8row) return round_up(rows_.width, 32);
    if (term_format(rows_.format) == ActFormat::q8g256) return 256;
    return rows_.format == ActFormat::q8g128 ? 128 : 32;
  }
  int64_t padded() const { return round_up(rows_.width, group()); }
  int8_t* q(int64_t row) { return reinterpret_cast<int8_t*>(bytes(row)); }
  float* scales(int64_t row) { return reinterpret_cast<float*>(bytes(row) + padded()); }
  int32_t* sums(int64_t row) {
    return reinterpret_cast<int32_t*>(scales(row) + padded() / group());
  }
  // Of a group of 256: those of 16 neighbours, and behind them those of 32.
  int16_t* block_sums(int64_t row, int64_t g) {
    return reinterpret_cast<int16_t*>(scales(row) + padded() / 256) + g * 24;
  }

  int8_t* second(int64_t row) { return q(row) + rows_.stride / 2; }
  float* second_scales(int64_t row) { return reinterpret_cast<float*>(second(row) + padded()); }

  // Returns a column as a number, for any format.
  double value(int64_t row, int64_t column) {
    switch (rows_.format) {
      case ActFormat::f32:
        return f32(row)[column];
      case ActFormat::bf16:
        return from_bf16(bf16(row)[column]);
      case ActFormat::q8g32:
      case ActFormat::q8g128:
      case ActFormat::q8row:
      case ActFormat::q8g256:
        return static_cast<double>(scales(row)[column / group()]) * q(row)[column];
      case ActFormat::q8g32x2:
      case ActFormat::q8g256x2:
        return static_cast<double>(scales(row)[column / group()]) * q(row)[column] +
               static_cast<double>(second_scales(row)[column / group()]) * second(row)[column];
    }
    return NAN;
  }
  void fill(Rng& rng, float scale = 1.0f) {
    for (size_t r = 0; r < memory_.size() / rows_.stride; r++) {
      for (int64_t i = 0; i < rows_.width; i++)
        f32(static_cast<int64_t>(r))[i] = scale * rng.uniform();
    }
  }

 private:
  Buffer<uint8_t> memory_;
  Rows rows_;
};

// Returns the largest error of storing a value in a group whose largest magnitude is `amax`.
double rounding(ActFormat format, double value, double amax) {
  switch (format) {
    case ActFormat::f32:
      return 0;
    case ActFormat::bf16:
      return std::fabs(value) / 256;
    case ActFormat::q8g32:
    case ActFormat::q8g128:
    case ActFormat::q8row:
    case ActFormat::q8g256:
      return amax / 127 * 0.5001;
    case ActFormat::q8g32x2:
    case ActFormat::q8g256x2:
      return amax / 127 / 127 * 0.501;
  }
  return 0;
}

double group_amax(const std::vector<double>& row, size_t column, size_t group) {
  double amax = 0;
  const size_t begin = column / group * group;
  for (size_t i = begin; i < std::min(row.size(), begin + group); i++) {
    amax = std::max(amax, std::fabs(row[i]));
  }
  return amax;
}

void check_row(Matrix& out, int64_t row, const std::vector<double>& want, double relative) {
  for (size_t i = 0; i < want.size(); i++) {
    const double amax = group_amax(want, i, static_cast<size_t>(out.group()));
    const double slack =
        rounding(out.rows().format, want[i], amax) + relative * std::max(amax, 1e-30);
    CHECK_NEAR(out.value(row, static_cast<int64_t>(i)), want[i], slack);
  }
}

std::vector<double> row_of(Matrix& m, int64_t row) {
  return std::vector<double>(m.f32(row), m.f32(row) + m.rows().width);
}

void activate(const KernelTable& k, Matrix& x, Matrix& out, Activation act, bool glu, int64_t m0,
              int64_t m1) {
  Buffer<float> scratch(static_cast<size_t>(out.rows().width));
  k.activation({x.rows(), out.rows(), act, glu, m0, m1, scratch.data()});
}

}  // namespace

KERNEL_TEST_OF(convert_rounds_to_nearest_even_bf16_and_zeroes_the_padding, convert) {
  Rng rng(1);
  for (int64_t width : kWidths) {
    Matrix x(3, width, ActFormat::f32), out(3, width, ActFormat::bf16);
    x.fill(rng, 100);
    const float special[] = {0.0f,    -0.0f,    1.00390625f, 1.01171875f, 1e-40f,
                             3.4e38f, INFINITY, -INFINITY,   NAN};
    for (int64_t i = 0; i < std::min<int64_t>(width, 9); i++) x.f32(1)[i] = special[i];
    k.convert({x.rows(), out.rows(), 0, 3});
    for (int64_t r = 0; r < 3; r++) {
      for (int64_t i = 0; i < width; i++) {
        const uint16_t want = harness::to_bf16(x.f32(r)[i]), got = out.bf16(r)[i];
        CHECK(got == want || (std::isnan(x.f32(r)[i]) && std::isnan(from_bf16(got))));
      }
      for (int64_t i = width; i < round_up(width, 32); i++) CHECK(out.bf16(r)[i] == 0);
    }
  }
}

static void check_quantized_groups(const KernelTable& k, ActFormat format) {
  Rng rng(2);
  for (int64_t width : kWidths) {
    Matrix x(2, width, ActFormat::f32), out(2, width, format);
    x.fill(rng, 3);
    k.convert({x.rows(), out.rows(), 0, 2});
    const int64_t group = out.group();
    for (int64_t r = 0; r < 2; r++) {
      for (int64_t g = 0; g < out.padded() / group; g++) {
        float amax = 0;
        for (int64_t i = group * g; i < std::min(width, group * g + group); i++)
          amax = std::max(amax, std::fabs(x.f32(r)[i]));
        CHECK(out.scales(r)[g] == amax / 127.0f);
        int32_t sum = 0, sums16[16] = {}, sums32[8] = {};
        for (int64_t i = group * g; i < group * g + group; i++) {
          const float v = i < width ? x.f32(r)[i] : 0.0f;
          CHECK(out.q(r)[i] == std::nearbyint(v * (127.0f / amax)));
          sum += out.q(r)[i];
          sums16[i / 16 % 16] += out.q(r)[i];
          sums32[i / 32 % 8] += out.q(r)[i];
        }
        if (format != ActFormat::q8g256) {
          CHECK(out.sums(r)[g] == sum);
          continue;
        }
        for (int i = 0; i < 16; i++) CHECK(out.block_sums(r, g)[i] == sums16[i]);
        for (int i = 0; i < 8; i++) CHECK(out.block_sums(r, g)[16 + i] == sums32[i]);
      }
    }
  }
}

KERNEL_TEST_OF(convert_quantizes_groups_of_32_with_their_sums, convert) {
  check_quantized_groups(k, ActFormat::q8g32);
}
KERNEL_TEST_OF(convert_quantizes_groups_of_128_and_whole_rows_with_their_sums, convert) {
  check_quantized_groups(k, ActFormat::q8g128);
  check_quantized_groups(k, ActFormat::q8row);
}
KERNEL_TEST_OF(convert_quantizes_groups_of_256_with_sums_of_16_and_32, convert) {
  check_quantized_groups(k, ActFormat::q8g256);
}

KERNEL_TEST_OF(convert_of_a_group_without_a_scale, convert) {
  Matrix x(4, 64, ActFormat::f32), out(4, 64, ActFormat::q8g32);
  for (int64_t r = 0; r < 4; r++) {
    for (int64_t i = 0; i < 64; i++) x.f32(r)[i] = i < 32 ? 0.0f : 1.0f;
  }
  x.f32(1)[3] = NAN;
  x.f32(2)[31] = -INFINITY;
  x.f32(3)[0] = 1e-38f;  // 127 / amax overflows: counts as zero
  k.convert({x.rows(), out.rows(), 0, 4});
  CHECK(out.scales(0)[0] == 0 && out.sums(0)[0] == 0 && out.q(0)[5] == 0);
  CHECK(std::isnan(out.scales(1)[0]));
  CHECK(std::isnan(out.scales(2)[0]));
  CHECK(out.scales(3)[0] == 0 && out.q(3)[0] == 0);
  for (int64_t r = 0; r < 4; r++) CHECK(out.q(r)[40] == 127 && out.sums(r)[1] == 32 * 127);
}

KERNEL_TEST_OF(convert_to_f32_copies_only_the_row, convert) {
  Matrix x(2, 37, ActFormat::f32), out(2, 37, ActFormat::f32);
  Rng rng(3);
  x.fill(rng);
  k.convert({x.rows(), out.rows(), 0, 2});
  CHECK(std::memcmp(out.f32(1), x.f32(1), 37 * 4) == 0);
  CHECK(std::isnan(out.f32(1)[37]));
}

KERNEL_TEST_OF(rms_norm_matches_fp64_in_every_format, rms_norm) {
  Rng rng(4);
  for (int64_t width : kWidths) {
    for (ActFormat format : kFormats) {
      Matrix x(3, width, ActFormat::f32), out(3, width, format);
      Buffer<float> weight(static_cast<size_t>(width)), scratch(static_cast<size_t>(width));
      x.fill(rng, 5);
      for (size_t i = 0; i < weight.size(); i++) weight[i] = 1 + rng.uniform() / 2;
      k.rms_norm({x.rows(), out.rows(), weight.data(), nullptr, 1e-5f, 0, 3, scratch.data()});
      for (int64_t r = 0; r < 3; r++) {
        std::vector<double> want = row_of(x, r);
        double sum = 0;
        for (double v : want) sum += v * v;
        for (size_t i = 0; i < want.size(); i++) {
          want[i] *= weight[i] / std::sqrt(sum / static_cast<double>(width) + 1e-5);
        }
        check_row(out, r, want, 1e-6);
      }
    }
  }
}

KERNEL_TEST_OF(layer_norm_matches_fp64_and_bias_is_optional, layer_norm) {
  Rng rng(5);
  for (int64_t width : kWidths) {
    for (bool biased : {false, true}) {
      Matrix x(2, width, ActFormat::f32), out(2, width, ActFormat::f32);
      Buffer<float> weight(static_cast<size_t>(width)), bias(static_cast<size_t>(width));
      Buffer<float> scratch(static_cast<size_t>(width));
      x.fill(rng, 2);
      for (int64_t i = 0; i < width; i++) x.f32(1)[i] += 50;  // a mean far from zero
      for (size_t i = 0; i < weight.size(); i++) {
        weight[i] = rng.uniform();
        bias[i] = rng.uniform();
      }
      k.layer_norm({x.rows(), out.rows(), weight.data(), biased ? bias.data() : nullptr, 1e-5f, 0,
                    2, scratch.data()});
      for (int64_t r = 0; r < 2; r++) {
        std::vector<double> want = row_of(x, r);
        double mean = 0, square = 0;
        for (double v : want) mean += v / static_cast<double>(width);
        for (double v : want) square += (v - mean) * (v - mean) / static_cast<double>(width);
        for (size_t i = 0; i < want.size(); i++) {
          want[i] =
              (want[i] - mean) / std::sqrt(square + 1e-5) * weight[i] + (biased ? bias[i] : 0.0f);
        }
        check_row(out, r, want, r ? 1e-4 : 2e-6);  // 50 + x keeps 3.8e-6 of x
      }
    }
  }
}

KERNEL_TEST(norms_of_a_row_depend_on_that_row_only) {
  Rng rng(6);
  Matrix x(7, 576, ActFormat::f32), all(7, 576, ActFormat::f32), one(7, 576, ActFormat::f32);
  Buffer<float> weight(576), scratch(576);
  x.fill(rng);
  for (size_t i = 0; i < 576; i++) weight[i] = rng.uniform();
  for (auto norm : {k.rms_norm, k.layer_norm}) {
    norm({x.rows(), all.rows(), weight.data(), nullptr, 1e-6f, 0, 7, scratch.data()});
    for (int64_t r : {6, 2, 0, 5}) {
      norm({x.rows(), one.rows(), weight.data(), nullptr, 1e-6f, r, r + 1, scratch.data()});
      CHECK(std::memcmp(one.f32(r), all.f32(r), 576 * 4) == 0);
    }
    Matrix in_place(7, 576, ActFormat::f32);
    for (int64_t r = 0; r < 7; r++) std::memcpy(in_place.f32(r), x.f32(r), 576 * 4);
    norm({in_place.rows(), in_place.rows(), weight.data(), nullptr, 1e-6f, 0, 7, scratch.data()});
    for (int64_t r = 0; r < 7; r++) CHECK(std::memcmp(in_place.f32(r), all.f32(r), 576 * 4) == 0);
  }
}

KERNEL_TEST_OF(add_adds_rows_in_range_and_no_others, add) {
  Rng rng(7);
  for (int64_t width : kWidths) {
    Matrix x(4, width, ActFormat::f32), out(4, width, ActFormat::f32),
        before(4, width, ActFormat::f32);
    x.fill(rng);
    out.fill(rng);
    for (int64_t r = 0; r < 4; r++)
      std::memcpy(before.f32(r), out.f32(r), static_cast<size_t>(width) * 4);
    k.add({x.rows(), out.rows(), 1, 3});
    for (int64_t r = 0; r < 4; r++) {
      for (int64_t i = 0; i < width; i++) {
        CHECK(out.f32(r)[i] ==
              (r == 1 || r == 2 ? before.f32(r)[i] + x.f32(r)[i] : before.f32(r)[i]));
      }
    }
  }
}

KERNEL_TEST_OF(activation_functions_are_accurate_to_fp32, activation) {
  std::vector<float> points;
  for (int i = -4000; i <= 4000; i++) points.push_back(static_cast<float>(i) / 250);
  for (float x = 1e-30f; x < 1e30f; x *= 3.7f) {
    points.push_back(x);
    points.push_back(-x);
  }
  const auto width = static_cast<int64_t>(points.size());
  Matrix x(1, width, ActFormat::f32), out(1, width, ActFormat::f32);
  std::copy(points.begin(), points.end(), x.f32(0));
  for (Activation act : ungated()) {
    activate(k, x, out, act, false, 0, 1);
    for (size_t i = 0; i < points.size(); i++) {
      const double p = points[i], want = activated(act, p);
      // 1 + erf and 1 + tanh cancel for negative x: three ulps of x / 2 there, relative elsewhere.
      const double cancelled = p < 0 && act != Activation::silu ? 1e-7 * std::min(-p, 6.0) : 0.0;
      const double tolerance = 6e-7 * std::fabs(want) + 2 * cancelled + 1e-37;
      if (want > std::numeric_limits<float>::max()) {  // the square of 1e30
        CHECK(out.f32(0)[i] == INFINITY);
      } else {
        CHECK_NEAR(out.f32(0)[i], want, tolerance);
      }
    }
  }
}

KERNEL_TEST_OF(scaled_and_capped_logits_match_fp64_wherever_a_row_is_cut, scale_logits) {
  constexpr int64_t kCount = 1003;
  Rng rng(31);
  for (const float softcap : {0.0f, 1.0f, 30.0f}) {
    for (const float scale : {1.0f, 0.0625f}) {
      Buffer<float> whole(kCount), cut(kCount);
      std::vector<float> x;
      for (size_t i = 0; i < kCount; i++) {
        const float size = std::ldexp(1.0f, static_cast<int>(i % 30) - 15);
        x.push_back(whole[i] = cut[i] = rng.uniform() * size * std::fmax(softcap, 1.0f) / scale);
      }
      k.scale_logits({whole.data(), kCount, scale, softcap});
      for (int64_t at = 0, step = 1; at < kCount; at += step, step = step % 37 + 5) {
        k.scale_logits({cut.data() + at, std::min(step, kCount - at), scale, softcap});
      }
      for (size_t i = 0; i < kCount; i++) {
        const double plain = static_cast<double>(x[i]) * scale, cap = softcap;
        const double want = softcap > 0 ? cap * std::tanh(plain / cap) : plain;
        CHECK_NEAR(whole[i], want, 8e-7 * std::fabs(want));
        CHECK(whole[i] == cut[i]);
      }
    }
  }
}

KERNEL_TEST_OF(capped_logits_keep_nan_and_reach_the_cap_at_infinity, scale_logits) {
  Buffer<float> x(19);
  for (size_t i = 0; i < 19; i++) x[i] = i % 3 == 0 ? NAN : i % 3 == 1 ? INFINITY : -INFINITY;
  k.scale_logits({x.data(), 19, 1.0f, 30.0f});
  for (size_t i = 0; i < 19; i++) {
    CHECK(i % 3 == 0 ? std::isnan(x[i]) : x[i] == (i % 3 == 1 ? 30.0f : -30.0f));
  }
}

KERNEL_TEST_OF(activation_passes_nan_and_handles_infinity, activation) {
  Matrix x(1, 40, ActFormat::f32), out(1, 40, ActFormat::f32);
  for (int64_t i = 0; i < 40; i++) x.f32(0)[i] = i % 3 ? INFINITY : NAN;
  for (Activation act : ungated()) {
    const float most = act == Activation::sigmoid || act == Activation::tanh ? 1 : INFINITY;
    activate(k, x, out, act, false, 0, 1);
    for (int64_t i = 0; i < 40; i++)
      CHECK(i % 3 ? out.f32(0)[i] == most : std::isnan(out.f32(0)[i]));
  }
}

KERNEL_TEST_OF(activation_with_glu_multiplies_the_second_half, activation) {
  Rng rng(8);
  for (Activation act : {Activation::silu, Activation::clamped_swiglu}) {
    for (int64_t width : kWidths) {
      for (ActFormat format : kFormats) {
        Matrix x(3, 2 * width, ActFormat::f32), out(3, width, format);
        x.fill(rng, act == Activation::silu ? 4 : 12);  // some are beyond the clamp
        activate(k, x, out, act, true, 0, 3);
        for (int64_t r = 0; r < 3; r++) {
          std::vector<double> want;
          for (int64_t i = 0; i < width; i++) {
            want.push_back(activated(act, x.f32(r)[i]) * other_half(act, x.f32(r)[width + i]));
          }
          check_row(out, r, want, 1e-6);
        }
      }
    }
  }
}

KERNEL_TEST_OF(clamped_swiglu_passes_nan_and_clamps_infinity, activation) {
  constexpr int64_t kWidth = 21;
  Matrix x(1, 2 * kWidth, ActFormat::f32), out(1, kWidth, ActFormat::f32);
  const float gates[] = {NAN, 1, INFINITY, -1e30f, 100};
  const float ups[] = {2, NAN, -INFINITY, 3, INFINITY};
  for (int64_t i = 0; i < kWidth; i++) {
    x.f32(0)[i] = gates[i % 5];
    x.f32(0)[kWidth + i] = ups[i % 5];
  }
  activate(k, x, out, Activation::clamped_swiglu, true, 0, 1);
  const double most = activated(Activation::clamped_swiglu, 7);
  for (int64_t i = 0; i < kWidth; i++) {
    const double y = out.f32(0)[i];
    if (i % 5 < 2) CHECK(std::isnan(y));
    if (i % 5 == 2) CHECK_NEAR(y, -6 * most, 1e-5);
    if (i % 5 == 3) CHECK(y == 0);
    if (i % 5 == 4) CHECK_NEAR(y, 8 * most, 1e-5);
  }
}

KERNEL_TEST_OF(probe_read_sums_every_byte, probe_read) {
  Rng rng(9);
  for (size_t bytes :
       {size_t{0}, size_t{1}, size_t{511}, size_t{512}, size_t{5000}, (size_t{5} << 20) + 77}) {
    Buffer<uint8_t> data(bytes + 1);
    uint64_t sum = 0;
    for (size_t i = 0; i < bytes; i++)
      sum += data[i] = static_cast<uint8_t>(i < 4096 ? 255 : rng.bits());
    CHECK(k.probe_read(data.data(), bytes) == sum);
  }
}

KERNEL_TEST(probe_dot_counts_whole_register_tiles) {
  // Without products of bf16, a level's probe of them is that of fp32.
  constexpr double kLeastDepth[] = {1, 1, 32, 32};
  CHECK(k.probe_dot[1](1) >= k.probe_dot[0](1));
  for (int kind : {0, 1, 2, 3}) {
    const double one = k.probe_dot[kind](1);
    CHECK(one >= 2.0 * kLeastDepth[kind] * 16);  // a panel of multiply-adds at least
    CHECK(k.probe_dot[kind](1000) == 1000 * one);
  }
}
