// The kinds of float codes (kernels/linear/coded.h), against an fp64 reference that reads single
// elements of the source rows by the text of their format, and batch invariance bit for bit.
#include <algorithm>

#include "divisions.h"
#include "harness.h"

using namespace cpuserve;
using harness::Buffer;
using harness::for_each_kind;
using harness::Rng;

namespace {

constexpr WeightKind kKinds[] = {WeightKind::e4m3_g128, WeightKind::nf4_g64, WeightKind::fp4_g64,
                                 WeightKind::nvfp4};
int64_t some_k(WeightKind kind, int64_t k) {
  return round_up(k, block_shape(only_source(kind)).weights);
}

template <class T>
T read_at(const uint8_t* p) {
  T x;
  std::memcpy(&x, p, sizeof x);
  return x;
}

// FP8 E4M3 of OCP, except that its two codes of NaN are numbers.
double e4m3(uint8_t code) {
  const int exponent = code >> 3 & 15, fraction = code & 7;
  const double x = exponent ? std::ldexp(8 + fraction, exponent - 10) : std::ldexp(fraction, -9);
  return code & 0x80 ? -x : x;
}
constexpr double kE2m1[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
constexpr double kNf4[16] = {-1.0,
                             -0.6961928009986877,
                             -0.5250730514526367,
                             -0.39491748809814453,
                             -0.28444138169288635,
                             -0.18477343022823334,
                             -0.09105003625154495,
                             0.0,
                             0.07958029955625534,
                             0.16093020141124725,
                             0.24611230194568634,
                             0.33791524171829224,
                             0.44070982933044434,
                             0.5626170039176941,
                             0.7229568362236023,
                             1.0};
constexpr double kFp4[8] = {0, 0.0625, 8, 12, 4, 6, 2, 3};  // twelfths

int nibble(const uint8_t* q, int64_t i) { return q[i / 2] >> i % 2 * 4 & 15; }

// Element i of a source row.
double source_value(WeightKind kind, const uint8_t* row, int64_t i) {
  switch (kind) {
    case WeightKind::e4m3_g128: {
      const uint8_t* block = row + i / 128 * 132;
      return static_cast<double>(read_at<float>(block)) * e4m3(block[4 + i % 128]);
    }
    case WeightKind::nf4_g64:
    case WeightKind::fp4_g64: {
      const uint8_t* block = row + i / 64 * 34;
      const int q = nibble(block + 2, i % 64);
      const double signed_fp4 = (q & 8 ? -1 : 1) * kFp4[q & 7] / 12;
      return static_cast<double>(harness::from_f16(read_at<uint16_t>(block))) *
             (kind == WeightKind::nf4_g64 ? kNf4[q] : signed_fp4);
    }
    default: {
      const uint8_t* block = row + 4 + i / 16 * 9;
      const int q = nibble(block + 1, i % 16);
      return static_cast<double>(read_at<float>(row)) * e4m3(block[0]) *
             (q & 8 ? -kE2m1[q & 7] : kE2m1[q & 7]);
    }
  }
}
// How far a value may be from that of the source: entries of NF4 are bf16, and other scales and
// products are rounded to fp32.
double off(WeightKind kind, double value) {
  return std::ldexp(std::fabs(value), kind == WeightKind::nf4_g64 ? -8 : -22);
}

struct Weights {
  Weights(const KernelTable& table, WeightKind kind_, int64_t n_, int64_t k_)
      : kernel(table.linear[static_cast<int>(kind_)]),
        kind(kind_),
        n(n_),
        k(some_k(kind_, k_)),
        panels((n_ + kPanel - 1) / kPanel),
        row_size(source_row_bytes(only_source(kind_), k)),
        source(static_cast<size_t>(n_) * row_size),
        packed(static_cast<size_t>(panels) * kernel.panel_bytes(k)) {
    Rng rng(static_cast<uint64_t>(n * 1000 + k));
    for (size_t i = 0; i < source.size(); i++) source[i] = static_cast<uint8_t>(rng.bits());
    for (int64_t r = 0; r < n; r++)
      set_scales(rng, source.data() + static_cast<size_t>(r) * row_size);
    for (int64_t p = 0; p < panels; p++) {
      const void* rows[kPanel];
      for (int64_t r = 0; r < kPanel; r++) {
        rows[r] = p * kPanel + r < n ? row(p * kPanel + r) : nullptr;
      }
      kernel.pack({rows, only_source(kind), k,
                   packed.data() + static_cast<size_t>(p) * kernel.panel_bytes(k)});
    }
  }
  void set_scales(Rng& rng, uint8_t* to) const {
    const auto next = [&] { return rng.uniform() * 0.01f; };
    if (kind == WeightKind::nf4_g64 || kind == WeightKind::fp4_g64) {
      for (int64_t b = 0; b < k / 64; b++) {
        const uint16_t half = harness::to_f16(next());
        std::memcpy(to + b * 34, &half, 2);
      }
      return;
    }
    for (int64_t at = 0; at < k; at += kind == WeightKind::nvfp4 ? k : 128) {
      const float x = next();
      std::memcpy(to + at / 128 * 132, &x, 4);
    }
  }
  const uint8_t* row(int64_t r) const { return source.data() + static_cast<size_t>(r) * row_size; }
  double value(int64_t r, int64_t i) const { return r < n ? source_value(kind, row(r), i) : 0.0; }
  PackedWeight view() const { return {packed.data(), kernel.panel_bytes(k), n, k, kind}; }

  const LinearKernel& kernel;
  WeightKind kind;
  int64_t n, k, panels;
  size_t row_size;
  Buffer<uint8_t> source, packed;
};

// Rows of bf16; what lies behind their values is NaN.
struct Inputs {
  Inputs(int64_t m_, int64_t k_)
      : m(m_),
        k(k_),
        stride(row_bytes(ActFormat::bf16, k_)),
        data(static_cast<size_t>(m_) * stride) {
    std::memset(data.data(), 0xff, data.size());
    Rng rng(static_cast<uint64_t>(m * 100 + k));
    for (int64_t r = 0; r < m; r++) {
      for (int64_t i = 0; i < k; i++) set(r, i, rng.uniform());
    }
  }
  uint8_t* row(int64_t r) { return data.data() + static_cast<size_t>(r) * stride; }
  void set(int64_t r, int64_t i, float x) {
    const uint16_t h = harness::to_bf16(x);
    std::memcpy(row(r) + i * 2, &h, 2);
  }
  double value(int64_t r, int64_t i) {
    return static_cast<double>(harness::from_bf16(read_at<uint16_t>(row(r) + i * 2)));
  }
  int64_t m, k;
  size_t stride;
  Buffer<uint8_t> data;
};

struct Output {
  Output(ActFormat format, int64_t m, int64_t width)
      : stride(row_bytes(format, width)), data(static_cast<size_t>(m) * stride) {
    std::memset(data.data(), 0x5a, data.size());
    rows = {data.data(), stride, width, format};
  }
  Output(int64_t m, int64_t width) : Output(ActFormat::f32, m, width) {}
  float* row(int64_t r) {
    return reinterpret_cast<float*>(data.data() + static_cast<size_t>(r) * stride);
  }
  bool same_row(Output& other, int64_t r) {
    return std::memcmp(row(r), other.row(r), static_cast<size_t>(rows.width) * 4) == 0;
  }
  size_t stride;
  Buffer<uint8_t> data;
  Rows rows;
};

void run(const Weights& w, Inputs& x, Output& out, int64_t row0, int64_t m, int64_t panel0 = 0,
         int64_t panel1 = -1, const WorkSizes& sizes = {}, bool glu = false) {
  Buffer<uint8_t> scratch(kLinearScratch);
  std::memset(scratch.data(), 0xff, scratch.size());  // NaN: nothing may be read unwritten
  const PackedWeight view = w.view();
  LinearArgs a{};
  a.w = &view;
  a.x = x.row(row0);
  a.x_stride = x.stride;
  a.m = m;
  a.panel0 = panel0;
  a.panel1 = panel1 < 0 ? w.panels : panel1;
  a.ep.out = out.rows;
  a.ep.out.data = out.row(row0);
  a.ep.glu = glu;
  if (glu) a.ep.act = Activation::silu;
  a.scratch = scratch.data();
  a.sizes = sizes;
  w.kernel.run(a);
}

// Against the values that the kernel's own row() gives, which another test compares with the
// source.
void check_against_reference(const KernelTable& table, WeightKind kind, int64_t m, int64_t n,
                             int64_t k) {
  const Weights w(table, kind, n, k);
  Inputs x(m, w.k);
  Output out(m, n);
  run(w, x, out, 0, m);
  const PackedWeight view = w.view();
  std::vector<float> values(static_cast<size_t>(w.k));
  for (int64_t c = 0; c < n; c++) {
    w.kernel.row(view, c, values.data());
    for (int64_t r = 0; r < m; r++) {
      double sum = 0, magnitude = 0;
      for (int64_t i = 0; i < w.k; i++) {
        const double p = static_cast<double>(values[static_cast<size_t>(i)]) * x.value(r, i);
        sum += p;
        magnitude += std::fabs(p);
      }
      // One rounding a product and a few a group, all in the same direction.
      const double steps = static_cast<double>(w.k + w.k / 32 + 8);
      CHECK_NEAR(static_cast<double>(out.row(r)[c]), sum,
                 magnitude * steps * std::ldexp(1, -24) + 1e-30);
    }
  }
}

}  // namespace

KERNEL_TEST(coded_kinds_take_at_most_a_twentieth_more_than_the_file) {
  for (int64_t size : {512, 2880, 4096}) {
    const auto bytes = [&](WeightKind kind) {
      return static_cast<double>(k.linear[static_cast<int>(kind)].panel_bytes(size)) / kPanel /
             static_cast<double>(size);
    };
    CHECK(bytes(WeightKind::e4m3_g128) <= 1.05);
    // An FP8 scale for each 64 weights, or a float.
    CHECK(bytes(WeightKind::nf4_g64) <= 1.05 * (0.5 + 1.0 / 64));
    CHECK(bytes(WeightKind::fp4_g64) == bytes(WeightKind::nf4_g64));
    CHECK(bytes(WeightKind::nvfp4) <= 1.05 * (0.5 + 1.0 / 16));
  }
}

KERNEL_TEST(coded_kinds_keep_every_value) {
  for_each_kind(k, kKinds, [&](WeightKind kind) {
    const Weights w(k, kind, 37, 608);
    const LinearKernel& dense = k.linear[static_cast<int>(WeightKind::dense_f32)];
    const PackedWeight view = w.view();
    std::vector<float> row(static_cast<size_t>(w.k)), read(row.size());
    for (int64_t p = 0; p < w.panels; p++) {
      Buffer<uint8_t> panel(dense.panel_bytes(w.k));
      const void* rows[kPanel];
      for (int64_t r = 0; r < kPanel; r++) {
        rows[r] = p * kPanel + r < w.n ? w.row(p * kPanel + r) : nullptr;
      }
      dense.pack({rows, only_source(kind), w.k, panel.data()});
      const PackedWeight floats{panel.data(), dense.panel_bytes(w.k), kPanel, w.k,
                                WeightKind::dense_f32};
      for (int64_t r = 0; r < kPanel; r++) {
        w.kernel.row(view, p * kPanel + r, row.data());
        dense.row(floats, r, read.data());
        for (int64_t i = 0; i < w.k; i++) {
          const double expected = w.value(p * kPanel + r, i);
          const auto at = static_cast<size_t>(i);
          CHECK_NEAR(static_cast<double>(row[at]), expected, off(kind, expected));
          CHECK_NEAR(static_cast<double>(read[at]), expected, std::ldexp(std::fabs(expected), -22));
        }
      }
    }
  });
}

// Every code of a table, times a scale of 1, and all of E4M3, whose denormals are small.
KERNEL_TEST(coded_kinds_multiply_every_code) {
  const Weights w(k, WeightKind::e4m3_g128, 16, 256);
  Buffer<uint8_t> source(source_row_bytes(SourceType::e4m3_g128, 256));
  const float one = 1;
  for (size_t b = 0; b < 2; b++) {
    std::memcpy(source.data() + b * 132, &one, 4);
    for (size_t i = 0; i < 128; i++) source[b * 132 + 4 + i] = static_cast<uint8_t>(b * 128 + i);
  }
  Buffer<uint8_t> panel(w.kernel.panel_bytes(256));
  const void* rows[kPanel];
  for (const void*& row : rows) row = source.data();
  w.kernel.pack({rows, SourceType::e4m3_g128, 256, panel.data()});
  const PackedWeight view{panel.data(), w.kernel.panel_bytes(256), 16, 256, WeightKind::e4m3_g128};
  for (int64_t i = 0; i < 256; i++) {
    Inputs x(1, 256);
    for (int64_t j = 0; j < 256; j++) x.set(0, j, j == i ? 1.0f : 0.0f);
    Output out(1, 16);
    Buffer<uint8_t> scratch(kLinearScratch);
    LinearArgs a{};
    a.w = &view;
    a.x = x.row(0);
    a.x_stride = x.stride;
    a.m = 1;
    a.panel1 = 1;
    a.ep.out = out.rows;
    a.scratch = scratch.data();
    w.kernel.run(a);
    for (int64_t c = 0; c < 16; c++) {
      CHECK(static_cast<double>(out.row(0)[c]) == e4m3(static_cast<uint8_t>(i)));
    }
  }
}

KERNEL_TEST(coded_kinds_match_fp64_at_every_shape) {
  for_each_kind(k, kKinds, [&](WeightKind kind) {
    check_against_reference(k, kind, 1, 64, 512);
    check_against_reference(k, kind, 3, 16, 32);
    check_against_reference(k, kind, 13, 72, 288);
    check_against_reference(k, kind, 2, 33, 1536);
    check_against_reference(k, kind, 40, 100, 416);
    check_against_reference(k, kind, 14, 20, 4224);
    for (int64_t m = 4; m <= 26; m += m < 13 ? 1 : 6) check_against_reference(k, kind, m, 36, 160);
  });
}

KERNEL_TEST(coded_row_has_the_same_bits_in_every_division) {
  for_each_kind(k, kKinds, [&](WeightKind kind) {
    constexpr int64_t kMost = 70;
    const Weights w(k, kind, 16 * harness::fewer(11, 5) - 3, harness::fewer(1312, 544));
    Inputs x(kMost, w.k);
    const auto compute = [&](Output& out, int64_t row0, int64_t m, int64_t panel0, int64_t panel1,
                             const WorkSizes& sizes) {
      run(w, x, out, row0, m, panel0, panel1, sizes);
    };
    harness::check_divisions<Output>(w, kMost, {1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 17, 33}, compute);
  });
}

KERNEL_TEST(coded_epilogue_bits_do_not_depend_on_m_or_panel_split) {
  for_each_kind(k, kKinds, [&](WeightKind kind) {
    const Weights w(k, kind, 16 * harness::fewer(24, 8), 192);
    Inputs x(50, w.k);
    for (ActFormat format : {ActFormat::f32, ActFormat::bf16, ActFormat::q8g32}) {
      for (bool glu : {false, true}) {
        const int64_t width = glu ? w.n / 2 : w.n;
        const int64_t step = (glu ? 2 : 1) * (format == ActFormat::q8g32 ? 2 : 1);
        Output whole(format, 50, width), parts(format, 50, width);
        run(w, x, whole, 0, 50, 0, -1, {}, glu);
        for (int64_t r = 0; r < 50; r += 5) {
          for (int64_t p = 0; p < w.panels; p += step) run(w, x, parts, r, 5, p, p + step, {}, glu);
        }
        CHECK(std::memcmp(whole.data.data(), parts.data.data(), whole.data.size()) == 0);
      }
    }
  });
}

KERNEL_TEST(coded_kinds_keep_nan_and_infinity_in_their_row) {
  for_each_kind(k, kKinds, [&](WeightKind kind) {
    const Weights w(k, kind, 40, 256);
    Inputs x(13, w.k);
    Output clean(13, w.n);
    run(w, x, clean, 0, 13);
    for (float bad : {NAN, INFINITY}) {
      x.set(1, 37, bad);
      for (int64_t m : {3, 13}) {
        Output out(13, w.n);
        run(w, x, out, 0, m);
        for (int64_t r = 0; r < m; r++) {
          if (r != 1) CHECK(clean.same_row(out, r));
        }
        for (int64_t c = 0; c < w.n; c++) {
          // A weight of 0 hides an infinity only as a NaN, and a NaN never.
          CHECK(!std::isfinite(out.row(1)[c]));
        }
      }
    }
  });
}

KERNEL_TEST(coded_kinds_state_their_geometry) {
  for_each_kind(k, kKinds, [&](WeightKind kind) {
    const LinearKernel& kernel = k.linear[static_cast<int>(kind)];
    CHECK(kernel.act == ActFormat::bf16);
    CHECK(kernel.tile_rows >= 1 && kernel.tile_columns >= 4 && kernel.tile_panels >= 1);
    CHECK(kernel.tile_columns <= kStripPanels * kPanel && kernel.pass_rows >= 1);
    for (int64_t size : {64, 896, 8192}) {
      CHECK(kernel.block_k(size, {}) >= 1 && kernel.block_k(size, {}) <= size);
    }
    CHECK(kernel.block_k(65536, {}) < 65536);
  });
}
