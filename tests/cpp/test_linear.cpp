// Linear kernels of every weight kind against a plain fp64 reference that reads the packed bytes by
// an independent implementation of the layouts in kernels/table/weights.h, and batch invariance
// bit for bit.
#include <algorithm>

#include "harness.h"

using namespace cpuserve;
using harness::Buffer;
using harness::for_each_kind;
using harness::Rng;

namespace {

constexpr WeightKind kKinds[] = {
    WeightKind::dense_bf16, WeightKind::dense_f16,  WeightKind::dense_f32,
    WeightKind::w8_g32,     WeightKind::w4_g32,     WeightKind::w4m_g32,
    WeightKind::w4m_g128,   WeightKind::w8_channel, WeightKind::w8_channel_g128};

bool grouped(WeightKind kind) { return kind >= WeightKind::w8_g32; }
bool channel(WeightKind kind) {
  return kind == WeightKind::w8_channel || kind == WeightKind::w8_channel_g128;
}
SourceType native_source(WeightKind kind) {
  constexpr SourceType kSources[] = {
      SourceType::bf16,      SourceType::f16,        SourceType::f32,
      SourceType::gguf_q8_0, SourceType::gguf_q4_0,  SourceType::gguf_q4_1,
      SourceType::u4m_g128,  SourceType::s8_channel, SourceType::s8_channel};
  return kSources[static_cast<int>(kind)];
}
// Rows of u4m_g128 are whole blocks of 128; others come from floats.
SourceType source_of(WeightKind kind, int64_t k) {
  return kind == WeightKind::w4m_g128 && k % 128 ? SourceType::bf16 : native_source(kind);
}
const LinearKernel& kernel_of(const KernelTable& k, WeightKind kind) {
  return k.linear[static_cast<int>(kind)];
}

template <class T>
T read_at(const uint8_t* p) {
  T x;
  std::memcpy(&x, p, sizeof x);
  return x;
}

// -- sources
// ---------------------------------------------------------------------------------------

// A byte of a quantized row; with --unsigned one like it whose weights are not negative.
uint8_t weight_byte(uint8_t byte, SourceType type) {
  if (!harness::unsigned_bytes()) return byte;
  if (type == SourceType::s8_channel || type == SourceType::gguf_q8_0) return byte & 0x7f;
  return type == SourceType::gguf_q4_0 ? byte | 0x88 : byte;
}
uint8_t weight_byte(Rng& rng, SourceType type) {
  return weight_byte(static_cast<uint8_t>(rng.bits()), type);
}

void fill_source_row(Rng& rng, SourceType type, int64_t k, uint8_t* row) {
  if (type == SourceType::f32) {
    for (int64_t i = 0; i < k; i++) {
      const float x = rng.uniform();
      std::memcpy(row + i * 4, &x, 4);
    }
  } else if (type == SourceType::f16 || type == SourceType::bf16) {
    for (int64_t i = 0; i < k; i++) {
      const float x = rng.uniform();
      const uint16_t h = type == SourceType::f16 ? harness::to_f16(x) : harness::to_bf16(x);
      std::memcpy(row + i * 2, &h, 2);
    }
  } else if (type == SourceType::s8_channel) {
    for (int64_t i = 0; i < k + 4; i++) row[i] = weight_byte(rng, type);
    const float scale = rng.uniform() * 0.05f;
    std::memcpy(row, &scale, 4);
  } else {
    const bool wide = type == SourceType::u4m_g128;
    const size_t block = source_row_bytes(type, wide ? 128 : 32);
    for (size_t at = 0; at < source_row_bytes(type, k); at += block) {
      for (size_t i = 0; i < block; i++) row[at + i] = weight_byte(rng, type);
      const uint16_t d = harness::to_f16(rng.uniform() * 0.05f), m = harness::to_f16(rng.uniform());
      std::memcpy(row + at, &d, 2);
      if (wide || type == SourceType::gguf_q4_1) std::memcpy(row + at + 2, &m, 2);
    }
  }
}

// Element i of a source row, from the definition of its format.
double source_value(SourceType type, const uint8_t* row, int64_t i) {
  if (type == SourceType::s8_channel) {
    return static_cast<double>(read_at<float>(row)) * static_cast<int8_t>(row[4 + i]);
  }
  if (type == SourceType::u4m_g128) {
    const uint8_t* at = row + i / 128 * 68;
    const int byte = at[4 + i % 128 / 2], q = i % 2 ? byte >> 4 : byte & 15;
    return static_cast<double>(harness::from_f16(read_at<uint16_t>(at))) * q +
           static_cast<double>(harness::from_f16(read_at<uint16_t>(at + 2)));
  }
  const uint8_t* block = row + source_row_bytes(type, i / 32 * 32);
  const int64_t j = i % 32;
  switch (type) {
    case SourceType::f32:
      return static_cast<double>(read_at<float>(row + i * 4));
    case SourceType::f16:
      return static_cast<double>(harness::from_f16(read_at<uint16_t>(row + i * 2)));
    case SourceType::bf16:
      return static_cast<double>(harness::from_bf16(read_at<uint16_t>(row + i * 2)));
    default:
      break;
  }
  const double d = static_cast<double>(harness::from_f16(read_at<uint16_t>(block)));
  if (type == SourceType::gguf_q8_0) return d * static_cast<int8_t>(block[2 + j]);
  const uint8_t* nibbles = block + (type == SourceType::gguf_q4_1 ? 4 : 2);
  const int q = j < 16 ? nibbles[j] & 15 : nibbles[j - 16] >> 4;
  if (type == SourceType::gguf_q4_0) return d * (q - 8);
  return d * q + static_cast<double>(harness::from_f16(read_at<uint16_t>(block + 2)));
}

// -- packed weights
// --------------------------------------------------------------------------------

// Packed weights, and how many bytes of a column lie side by side in them.
struct View : PackedWeight {
  int64_t side;
};

struct Weights {
  Weights(const KernelTable& table, WeightKind kind_, int64_t n_, int64_t k_, uint64_t seed = 1)
      : Weights(table, kind_, source_of(kind_, k_), n_, k_, seed) {}
  Weights(const KernelTable& table, WeightKind kind_, SourceType type_, int64_t n_, int64_t k_,
          uint64_t seed)
      : kernel(kernel_of(table, kind_)),
        kind(kind_),
        type(type_),
        n(n_),
        k(k_),
        panels((n_ + kPanel - 1) / kPanel),
        row_size(source_row_bytes(type_, k_)),
        source(static_cast<size_t>(n_) * row_size),
        packed(static_cast<size_t>(panels) * kernel.panel_bytes(k_)) {
    Rng rng(seed);
    for (int64_t r = 0; r < n; r++) fill_source_row(rng, type, k, row(r));
    pack();
  }
  uint8_t* row(int64_t r) { return source.data() + static_cast<size_t>(r) * row_size; }
  void pack() {
    for (int64_t p = 0; p < panels; p++) {
      const void* rows[kPanel];
      for (int64_t r = 0; r < kPanel; r++)
        rows[r] = p * kPanel + r < n ? row(p * kPanel + r) : nullptr;
      kernel.pack({rows, type, k, packed.data() + static_cast<size_t>(p) * kernel.panel_bytes(k)});
    }
  }
  View view() const {
    return {{packed.data(), kernel.panel_bytes(k), n, k, kind}, kernel.column_bytes};
  }

  const LinearKernel& kernel;
  WeightKind kind;
  SourceType type;
  int64_t n, k, panels;
  size_t row_size;
  Buffer<uint8_t> source, packed;
};

// Where byte i of column c lies in a panel.
int64_t place(const View& w, int64_t i, int64_t c) {
  return (i / w.side * kPanel + c) * w.side + i % w.side;
}
// 8-bit codes: with 4 bytes of a column side by side their zero is 128, with 8 they are signed.
int code8(const View& w, const uint8_t* codes, int64_t i, int64_t c) {
  const uint8_t byte = codes[place(w, i, c)];
  return w.side == 4 ? byte - 128 : static_cast<int8_t>(byte);
}
// 4-bit codes: a byte holds two elements that are as far apart as bytes of a column are side by
// side.
int code4(const View& w, const uint8_t* codes, int64_t i, int64_t c) {
  const int64_t pair = 2 * w.side, in_line = i % pair;
  const int byte = codes[place(w, i / pair * w.side + i % w.side, c)];
  return in_line < w.side ? byte & 15 : byte >> 4;
}

// One group of a quantized column as table/weights.h describes it: w = scale * q + least.
struct Group {
  double scale = 0, least = 0;
  int q[32] = {};
};
Group packed_group(const View& w, int64_t column, int64_t g) {
  const size_t bytes = w.kind == WeightKind::w8_g32   ? 544
                       : w.kind == WeightKind::w4_g32 ? 288
                                                      : 320;
  const uint8_t* at =
      w.data + static_cast<size_t>(column / 16) * w.panel_bytes + static_cast<size_t>(g) * bytes;
  const int64_t c = column % 16;
  Group out;
  out.scale = static_cast<double>(harness::from_f16(read_at<uint16_t>(at + c * 2)));
  if (w.kind == WeightKind::w4m_g32)
    out.least = static_cast<double>(harness::from_f16(read_at<uint16_t>(at + 32 + c * 2)));
  const uint8_t* q = at + (w.kind == WeightKind::w4m_g32 ? 64 : 32);
  for (int i = 0; i < 32; i++) {
    out.q[i] = w.kind == WeightKind::w8_g32 ? code8(w, q, i, c) : code4(w, q, i, c);
    if (w.kind == WeightKind::w4_g32) out.q[i] -= 8;
  }
  return out;
}

double packed_value(const View& w, int64_t column, int64_t i) {
  const uint8_t* panel = w.data + static_cast<size_t>(column / 16) * w.panel_bytes;
  const int64_t c = column % 16;
  if (channel(w.kind)) {
    const uint8_t* scales = panel + (w.k + w.side - 1) / w.side * w.side * kPanel;
    return static_cast<double>(read_at<float>(scales + c * 4)) * code8(w, panel, i, c);
  }
  if (w.kind == WeightKind::w4m_g128) {
    const uint8_t* group = panel + i / 128 * 1088;
    const int q = code4(w, group + 64, i % 128, c);
    return static_cast<double>(harness::from_f16(read_at<uint16_t>(group + c * 2))) * q +
           static_cast<double>(harness::from_f16(read_at<uint16_t>(group + 32 + c * 2)));
  }
  switch (w.kind) {
    case WeightKind::dense_bf16:
      return static_cast<double>(harness::from_bf16(read_at<uint16_t>(panel + place(w, i * 2, c))));
    case WeightKind::dense_f16:
      return static_cast<double>(harness::from_f16(read_at<uint16_t>(panel + (i * 16 + c) * 2)));
    case WeightKind::dense_f32:
      return static_cast<double>(read_at<float>(panel + (i * 16 + c) * 4));
    default:
      break;
  }
  const Group g = packed_group(w, column, i / 32);
  return g.scale * g.q[i % 32] + g.least;
}

// -- activations
// -----------------------------------------------------------------------------------

struct Inputs {
  Inputs(ActFormat format_, int64_t m_, int64_t k_, uint64_t seed = 2)
      : format(format_),
        m(m_),
        k(k_),
        stride(row_bytes(format_, k_)),
        data(static_cast<size_t>(m_) * stride) {
    Rng rng(seed);
    std::vector<float> x(static_cast<size_t>(k));
    for (int64_t r = 0; r < m; r++) {
      for (float& v : x) {
        v = rng.uniform();
        if (harness::unsigned_bytes()) v = std::fabs(v);
      }
      set_row(r, x);
    }
  }
  uint8_t* row(int64_t r) { return data.data() + static_cast<size_t>(r) * stride; }
  const uint8_t* row(int64_t r) const { return data.data() + static_cast<size_t>(r) * stride; }
  int64_t group() const {
    return format == ActFormat::q8row ? (k + 31) / 32 * 32 : format == ActFormat::q8g128 ? 128 : 32;
  }
  int64_t groups() const { return (k + group() - 1) / group(); }
  float* scales(int64_t r) { return reinterpret_cast<float*>(row(r) + groups() * group()); }
  int32_t* sums(int64_t r) { return reinterpret_cast<int32_t*>(scales(r) + groups()); }
  const float* scales(int64_t r) const {
    return reinterpret_cast<const float*>(row(r) + groups() * group());
  }

  // Writes a row by the description in table/rows.h of the format.
  void set_row(int64_t r, const std::vector<float>& x) {
    std::memset(row(r), 0, stride);
    if (format == ActFormat::f32) {
      std::memcpy(row(r), x.data(), x.size() * 4);
    } else if (format == ActFormat::bf16) {
      for (size_t i = 0; i < x.size(); i++) {
        const uint16_t h = harness::to_bf16(x[i]);
        std::memcpy(row(r) + i * 2, &h, 2);
      }
    } else {
      for (int64_t g = 0; g < groups(); g++) set_group(r, g, x);
    }
  }
  void set_group(int64_t r, int64_t g, const std::vector<float>& x) {
    const size_t size = static_cast<size_t>(group());
    const size_t begin = static_cast<size_t>(g) * size, end = std::min(x.size(), begin + size);
    float amax = 0;
    for (size_t i = begin; i < end; i++) amax = std::max(amax, std::fabs(x[i]));
    int32_t sum = 0;
    for (size_t i = begin; i < end; i++) {
      const int8_t q = static_cast<int8_t>(amax > 0 ? std::nearbyint(x[i] * (127 / amax)) : 0);
      std::memcpy(row(r) + i, &q, 1);
      sum += q;
    }
    scales(r)[g] = amax / 127;
    sums(r)[g] = sum;
  }
  double value(int64_t r, int64_t i) const {
    if (format == ActFormat::f32) return static_cast<double>(read_at<float>(row(r) + i * 4));
    if (format == ActFormat::bf16)
      return static_cast<double>(harness::from_bf16(read_at<uint16_t>(row(r) + i * 2)));
    return static_cast<double>(scales(r)[i / group()]) * read_at<int8_t>(row(r) + i);
  }

  ActFormat format;
  int64_t m, k;
  size_t stride;
  Buffer<uint8_t> data;
};

// -- the reference
// ---------------------------------------------------------------------------------

struct Expected {
  double value = 0;
  double magnitude = 0;  // sum of |products|: rounding errors are relative to it
};
Expected reference(const View& w, const Inputs& x, int64_t row, int64_t column) {
  Expected e;
  for (int64_t i = 0; i < w.k; i++) {
    const double p = packed_value(w, column, i) * x.value(row, i);
    e.value += p;
    e.magnitude += std::fabs(p);
  }
  return e;
}
// The same for every row and column of a product. Decoding weights takes most of the time of a
// reference, above all in an emulator, so each of them is decoded once.
class References {
 public:
  References(const Weights& w, const Inputs& x)
      : k_(w.k),
        weights_(static_cast<size_t>(w.panels * kPanel * w.k)),
        inputs_(static_cast<size_t>(x.m * x.k)) {
    const auto view = w.view();
    for (size_t i = 0; i < weights_.size(); i++) {
      const auto at = static_cast<int64_t>(i);
      weights_[i] = packed_value(view, at / k_, at % k_);
    }
    for (size_t i = 0; i < inputs_.size(); i++) {
      const auto at = static_cast<int64_t>(i);
      inputs_[i] = x.value(at / k_, at % k_);
    }
  }
  Expected operator()(int64_t row, int64_t column) const {
    const double* x = inputs_.data() + row * k_;
    const double* w = weights_.data() + column * k_;
    Expected e;
    for (int64_t i = 0; i < k_; i++) {
      const double p = w[i] * x[i];
      e.value += p;
      e.magnitude += std::fabs(p);
    }
    return e;
  }

 private:
  const int64_t k_;
  std::vector<double> weights_, inputs_;
};
// One rounding of 2^-24 a product or group term, all in the same direction, and a few at the ends.
// bf16 dot products may flush denormals.
double tolerance(const PackedWeight& w, const Expected& e) {
  const double steps =
      grouped(w.kind) ? 4.0 * static_cast<double>((w.k + 31) / 32) : static_cast<double>(w.k);
  return e.magnitude * (steps + 4) * std::ldexp(1, -24) + 1e-35 * static_cast<double>(w.k);
}

struct Output {
  Output(ActFormat format, int64_t m_, int64_t width)
      : m(m_), stride(row_bytes(format, width)), data(static_cast<size_t>(m_) * stride) {
    std::memset(data.data(), 0x5a, data.size());
    rows = {data.data(), stride, width, format};
  }
  float* f32(int64_t r) {
    return reinterpret_cast<float*>(data.data() + static_cast<size_t>(r) * stride);
  }
  const uint8_t* bytes(int64_t r) const { return data.data() + static_cast<size_t>(r) * stride; }
  int64_t m;
  size_t stride;
  Buffer<uint8_t> data;
  Rows rows;
};

void run(const Weights& w, const Inputs& x, int64_t row0, int64_t m, Epilogue ep,
         int64_t panel0 = 0, int64_t panel1 = -1, const WorkSizes& sizes = {}) {
  Buffer<uint8_t> scratch(kLinearScratch);
  for (size_t i = 0; i < scratch.size();
       i += 4) {  // NaN, to detect reads of memory that was not written
    const float nan = NAN;
    std::memcpy(scratch.data() + i, &nan, 4);
  }
  const View view = w.view();
  ep.out.data = static_cast<uint8_t*>(ep.out.data) + static_cast<size_t>(row0) * ep.out.stride;
  LinearArgs a{};
  a.w = &view;
  a.x = x.row(row0);
  a.x_stride = x.stride;
  a.m = m;
  a.panel0 = panel0;
  a.panel1 = panel1 < 0 ? w.panels : panel1;
  a.ep = ep;
  a.scratch = scratch.data();
  a.sizes = sizes;
  w.kernel.run(a);
}

Epilogue plain(const Output& out) {
  Epilogue ep{};
  ep.out = out.rows;
  return ep;
}

void check_against_reference(const KernelTable& table, WeightKind kind, int64_t m, int64_t n,
                             int64_t k) {
  if (harness::from_below(table, kind)) return;
  const Weights w(table, kind, n, k, static_cast<uint64_t>(n * 1000 + k));
  const Inputs x(w.kernel.act, m, k);
  Output out(ActFormat::f32, m, n);
  run(w, x, 0, m, plain(out));
  const View view = w.view();
  const References reference_of(w, x);
  for (int64_t r = 0; r < m; r++) {
    for (int64_t c = 0; c < n; c++) {
      const Expected e = reference_of(r, c);
      CHECK_NEAR(static_cast<double>(out.f32(r)[c]), e.value, tolerance(view, e));
    }
    for (int64_t c = n; c < static_cast<int64_t>(out.stride / 4); c++) {
      CHECK(read_at<uint32_t>(out.bytes(r) + c * 4) == 0x5a5a5a5au);
    }
  }
}

bool same_row(const Output& a, const Output& b, int64_t r) {
  return std::memcmp(a.bytes(r), b.bytes(r), static_cast<size_t>(a.rows.width) * 4) == 0;
}

int64_t least_k(WeightKind kind) { return grouped(kind) ? 32 : 2; }

}  // namespace

// -- packing
// ---------------------------------------------------------------------------------------

KERNEL_TEST(linear_panel_bytes_are_the_documented_ones) {
  for (int64_t size : {1, 2, 31, 32, 33, 576, 1536}) {
    const auto bytes = [&](WeightKind kind) {
      return static_cast<int64_t>(kernel_of(k, kind).panel_bytes(size));
    };
    const int64_t dense = kernel_of(k, WeightKind::dense_bf16).column_bytes;
    const int64_t channel = kernel_of(k, WeightKind::w8_channel).column_bytes;
    CHECK((dense == 4 || dense == 8) && (channel == 4 || channel == 8));
    CHECK(bytes(WeightKind::dense_bf16) == round_up(size * 2, dense) * 16);
    CHECK(bytes(WeightKind::dense_f16) == size * 32);
    CHECK(bytes(WeightKind::dense_f32) == size * 64);
    CHECK(bytes(WeightKind::w8_g32) == (size + 31) / 32 * 16 * 34);
    CHECK(bytes(WeightKind::w4_g32) == (size + 31) / 32 * 16 * 18);
    CHECK(bytes(WeightKind::w4m_g32) == (size + 31) / 32 * 16 * 20);
    CHECK(bytes(WeightKind::w4m_g128) == (size + 127) / 128 * 16 * 68);
    CHECK(bytes(WeightKind::w8_channel) == round_up(size, channel) * 16 + 64);
    CHECK(bytes(WeightKind::w8_channel_g128) == round_up(size, channel) * 16 + 64);
  }
}

KERNEL_TEST(linear_pack_of_the_native_source_keeps_every_value) {
  for_each_kind(k, kKinds, [&](WeightKind kind) {
    for (int64_t size : {least_k(kind), int64_t{96}, int64_t{640}}) {
      Weights w(k, kind, 37, size);
      if (w.type != native_source(kind)) continue;
      const View view = w.view();
      std::vector<float> row(static_cast<size_t>(size));
      for (int64_t r = 0; r < w.panels * kPanel; r++) {
        w.kernel.row(view, r, row.data());
        for (int64_t i = 0; i < size; i++) {
          const double expected = r < w.n ? source_value(w.type, w.row(r), i) : 0.0;
          CHECK(packed_value(view, r, i) == expected);
          CHECK(row[static_cast<size_t>(i)] == static_cast<float>(expected));
        }
      }
    }
  });
}

KERNEL_TEST(linear_pack_of_another_float_type_rounds_to_nearest) {
  for (WeightKind kind : {WeightKind::dense_bf16, WeightKind::dense_f16, WeightKind::dense_f32}) {
    for (SourceType type : {SourceType::f32, SourceType::f16, SourceType::bf16,
                            SourceType::gguf_q8_0, SourceType::gguf_q4_0, SourceType::gguf_q4_1}) {
      const bool blocks = type >= SourceType::gguf_q8_0;
      Weights w(k, kind, type, 16, blocks ? 96 : 77, 5);
      const View view = w.view();
      for (int64_t r = 0; r < w.n; r++) {
        for (int64_t i = 0; i < w.k; i++) {
          const float x = static_cast<float>(source_value(type, w.row(r), i));
          float expected = x;
          if (kind == WeightKind::dense_bf16) expected = harness::from_bf16(harness::to_bf16(x));
          if (kind == WeightKind::dense_f16) expected = harness::from_f16(harness::to_f16(x));
          CHECK(packed_value(view, r, i) == static_cast<double>(expected));
        }
      }
    }
  }
}

KERNEL_TEST(linear_pack_of_floats_into_channels_is_off_by_half_a_step) {
  for (SourceType type : {SourceType::f32, SourceType::f16, SourceType::bf16}) {
    Weights w(k, WeightKind::w8_channel, type, 21, 83, 5);
    std::memset(w.row(3), 0, w.row_size);
    w.pack();
    for (int64_t r = 0; r < w.n; r++) {
      double amax = 0;
      for (int64_t i = 0; i < w.k; i++)
        amax = std::max(amax, std::fabs(source_value(type, w.row(r), i)));
      for (int64_t i = 0; i < w.k; i++) {
        CHECK_NEAR(packed_value(w.view(), r, i), source_value(type, w.row(r), i),
                   amax / 127 * 0.5001);
      }
    }
  }
}

// The search for a smaller range must only reduce the squared error of plain [min, max] in 15
// steps.
KERNEL_TEST(linear_pack_of_floats_into_wide_groups_is_no_worse_than_the_plain_range) {
  Weights w(k, WeightKind::w4m_g128, SourceType::f32, 21, 300, 5);  // 44 in the last group
  const float outlier = 6;
  std::memcpy(w.row(5) + 4 * 7, &outlier, 4);
  w.pack();
  double saved = 0;
  for (int64_t r = 0; r < w.n; r++) {
    for (int64_t g = 0; g < 3; g++) {
      const int64_t begin = g * 128, end = std::min(w.k, begin + 128);
      double least = 1e9, most = -1e9, error = 0, plain_error = 0;
      for (int64_t i = begin; i < end; i++) {
        const double x = source_value(w.type, w.row(r), i);
        least = std::min(least, x);
        most = std::max(most, x);
      }
      const double step = (most - least) / 15;
      for (int64_t i = begin; i < end; i++) {
        const double x = source_value(w.type, w.row(r), i);
        error += std::pow(packed_value(w.view(), r, i) - x, 2);
        plain_error += std::pow(least + step * std::nearbyint((x - least) / step) - x, 2);
        CHECK_NEAR(packed_value(w.view(), r, i), x, 2.5 * step);
      }
      // scale and minimum are rounded to fp16, and the padding has an influence
      CHECK(error <= plain_error * 1.1);
      saved += plain_error - error;
    }
  }
  CHECK(saved > 0);
}

KERNEL_TEST(linear_pack_of_floats_into_groups_is_off_by_half_a_step) {
  for (WeightKind kind : {WeightKind::w8_g32, WeightKind::w4_g32, WeightKind::w4m_g32}) {
    Weights w(k, kind, SourceType::f32, 16, 80, 6);  // the last group is half padding
    const View view = w.view();
    for (int64_t r = 0; r < w.n; r++) {
      for (int64_t i = 0; i < w.k; i++) {
        const Group g = packed_group(view, r, i / 32);
        // The scale itself is rounded to fp16 (2^-11 of at most 127 steps); Q4_0 has no +8.
        const double steps = kind == WeightKind::w8_g32   ? 0.57
                             : kind == WeightKind::w4_g32 ? 1.01
                                                          : 0.52;
        CHECK_NEAR(packed_value(view, r, i), source_value(SourceType::f32, w.row(r), i),
                   steps * std::fabs(g.scale) + std::fabs(g.least) * std::ldexp(1, -11));
      }
    }
  }
}

// Q4_0's rule, from its text: the value of largest magnitude becomes -8 steps, and every other one
// the nearest of -8 to 7 steps, a half going up. With a step of 1 or -1 nothing else is rounded.
KERNEL_TEST(linear_pack_of_floats_into_q4_0_takes_the_nearest_step) {
  for (const float step : {1.0f, -1.0f}) {
    Weights w(k, WeightKind::w4_g32, SourceType::f32, 16, 32 * 12, 6);
    for (int64_t r = 0; r < w.n; r++) {
      std::vector<float> x(static_cast<size_t>(w.k));
      for (size_t i = 0; i < x.size(); i++) {
        const auto part = static_cast<float>((static_cast<size_t>(r) * x.size() + i) * 37 % 255);
        x[i] = i % 32 == 0 ? -8.0f * step : (part - 127.0f) / 16.0f * step;  // sixteenths
      }
      std::memcpy(w.row(r), x.data(), x.size() * sizeof(float));
    }
    w.pack();
    for (int64_t r = 0; r < w.n; r++) {
      for (int64_t i = 0; i < w.k; i++) {
        const double steps = source_value(SourceType::f32, w.row(r), i) / static_cast<double>(step);
        CHECK(packed_value(w.view(), r, i) ==
              std::min(7.0, std::floor(steps + 0.5)) * static_cast<double>(step));
      }
    }
  }
}

// -- values
// ----------------------------------------------------------------------------------------

KERNEL_TEST(linear_matches_fp64_at_every_kind_and_shape) {
  for_each_kind(k, kKinds, [&](WeightKind kind) {
    check_against_reference(k, kind, 1, 64, 576);
    check_against_reference(k, kind, 3, 16, least_k(kind));
    check_against_reference(k, kind, 4, 72, 32);
    check_against_reference(k, kind, 7, 1, 96);
    check_against_reference(k, kind, 13, 200, 320);
    check_against_reference(k, kind, 2, 33, 1536);
  });
}

KERNEL_TEST(linear_matches_fp64_at_every_number_of_rows) {
  for_each_kind(k, kKinds, [&](WeightKind kind) {
    for (int64_t m = 1; m <= 26; m++) check_against_reference(k, kind, m, 80, 64);
  });
}

KERNEL_TEST(linear_of_odd_k_ignores_what_lies_beyond) {
  for (WeightKind kind : {WeightKind::dense_bf16, WeightKind::dense_f16, WeightKind::dense_f32}) {
    for (int64_t size : {1, 3, 33, 577}) check_against_reference(k, kind, 5, 20, size);
  }
}

KERNEL_TEST(linear_of_several_k_blocks_matches_fp64) {
  check_against_reference(k, WeightKind::dense_bf16, 14, 80, 4160);
  check_against_reference(k, WeightKind::dense_f32, 14, 20, 2100);
  check_against_reference(k, WeightKind::w8_g32, 14, 80, 4160);
  check_against_reference(k, WeightKind::w4m_g32, 14, 20, 8256);
  check_against_reference(k, WeightKind::w4m_g128, 14, 20, 8256);
  check_against_reference(k, WeightKind::w8_channel, 14, 80, 4164);
  check_against_reference(k, WeightKind::w8_channel_g128, 14, 80, 4164);
}

// The largest integer sums stay exact: every product has the same sign.
KERNEL_TEST(linear_of_extreme_bytes_is_exact) {
  for (WeightKind kind : kKinds) {
    if (!grouped(kind) || harness::from_below(k, kind)) continue;
    for (int extreme : {-1, 1}) {
      if (extreme < 0 && harness::unsigned_bytes()) continue;
      for (int byte : {0x00, 0x7f, 0x80, 0xff}) {
        Weights w(k, kind, 16, 128);
        const bool wide = w.type == SourceType::u4m_g128;
        const size_t block = source_row_bytes(w.type, wide || channel(kind) ? 128 : 32);
        const uint16_t one = harness::to_f16(1), zero = 0;
        const float whole = 1;
        for (size_t at = 0; at < w.source.size(); at += block) {
          const uint8_t same = weight_byte(static_cast<uint8_t>(byte), w.type);
          std::memset(w.source.data() + at, same, block);
          std::memcpy(w.source.data() + at, &one, 2);
          if (wide || w.type == SourceType::gguf_q4_1)
            std::memcpy(w.source.data() + at + 2, &zero, 2);
          if (channel(kind)) std::memcpy(w.source.data() + at, &whole, 4);
        }
        w.pack();
        Inputs x(w.kernel.act, 13, 128);
        for (int64_t r = 0; r < x.m; r++) {
          x.set_row(r, std::vector<float>(128, 127.0f * static_cast<float>(extreme)));
        }
        for (int64_t m : {1, 13}) {
          Output out(ActFormat::f32, 13, 16);
          run(w, x, 0, m, plain(out));
          for (int64_t r = 0; r < m; r++) {
            for (int64_t c = 0; c < 16; c++) {
              CHECK(static_cast<double>(out.f32(r)[c]) == reference(w.view(), x, r, c).value);
            }
          }
        }
      }
    }
  }
}

KERNEL_TEST(linear_of_denormal_weights_and_inputs_loses_at_most_the_denormals) {
  for (WeightKind kind : {WeightKind::dense_f16, WeightKind::dense_f32, WeightKind::dense_bf16}) {
    Weights w(k, kind, 16, 64);
    const size_t size = kind == WeightKind::dense_f32 ? 4 : 2;
    for (size_t i = 0; i < w.source.size(); i += size) {  // smallest subnormals and ones, mixed
      const uint32_t tiny = 3;
      std::memset(w.source.data() + i, 0, size);
      if (i % 3) std::memcpy(w.source.data() + i, &tiny, 2);
    }
    w.pack();
    const Inputs x(w.kernel.act, 13, 64);
    Output out(ActFormat::f32, 13, 16);
    run(w, x, 0, 13, plain(out));
    for (int64_t r = 0; r < 13; r++) {
      for (int64_t c = 0; c < 16; c++) {
        const Expected e = reference(w.view(), x, r, c);
        CHECK_NEAR(static_cast<double>(out.f32(r)[c]), e.value, tolerance(w.view(), e));
      }
    }
  }
}

KERNEL_TEST(linear_nan_and_infinity_reach_their_row_and_no_other) {
  for_each_kind(k, kKinds, [&](WeightKind kind) {
    const Weights w(k, kind, 80, 64);
    Inputs x(w.kernel.act, 13, 64);
    Output clean(ActFormat::f32, 13, 80);
    run(w, x, 0, 13, plain(clean));
    for (float bad : {NAN, INFINITY}) {
      for (int64_t m : {3, 13}) {
        std::vector<float> row(64, 0.5f);
        row[37] = bad;
        Inputs y(w.kernel.act, 13, 64);
        if (grouped(kind)) {
          y.scales(1)[y.groups() - 1] = bad;
        } else {
          y.set_row(1, row);
        }
        Output out(ActFormat::f32, 13, 80);
        run(w, y, 0, m, plain(out));
        for (int64_t r = 0; r < m; r++) {
          if (r != 1) CHECK(same_row(clean, out, r));
        }
        for (int64_t c = 0; c < 80; c++) CHECK(!std::isfinite(out.f32(1)[c]));
      }
    }
  });
}

// -- batch invariance
// ---------------------------------------------------------------------------------------

namespace {

void check_same_bits_at_every_m(const KernelTable& k, WeightKind kind, int64_t n, int64_t size,
                                int64_t most, const std::vector<int64_t>& counts) {
  if (harness::from_below(k, kind)) return;
  const Weights w(k, kind, n, size);
  const Inputs x(w.kernel.act, most, size);
  Output whole(ActFormat::f32, most, n);
  run(w, x, 0, most, plain(whole));
  for (int64_t m : counts) {
    for (int64_t row0 : {int64_t{0}, most / 2, most - m}) {
      if (row0 + m > most) continue;
      Output part(ActFormat::f32, most, n);
      run(w, x, row0, m, plain(part));
      for (int64_t r = row0; r < row0 + m; r++) CHECK(same_row(whole, part, r));
    }
  }
}

}  // namespace

KERNEL_TEST(linear_row_has_the_same_bits_at_every_m) {
  for_each_kind(k, kKinds, [&](WeightKind kind) {
    check_same_bits_at_every_m(k, kind, 208, 160, harness::fewer(512, 130),
                               {1, 2, 5, 6, 7, 13, 64});
    check_same_bits_at_every_m(k, kind, 20, 64, 531, {1, 3, 4, 8, 9, 10, 11, 12, 14, 25});
  });
}

// Few rows may stream over packed weights while more rows share unpacked ones.
KERNEL_TEST(linear_row_has_the_same_bits_in_any_small_number_of_rows) {
  for_each_kind(k, kKinds, [&](WeightKind kind) {
    check_same_bits_at_every_m(k, kind, 24, 2624, 13, {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12});
    check_against_reference(k, kind, 6, 24, 2624);
    check_against_reference(k, kind, 11, 24, 2624);
  });
  check_same_bits_at_every_m(k, WeightKind::w8_channel_g128, 24, 1036, 13, {1, 3, 6, 7});
  check_against_reference(k, WeightKind::w8_channel_g128, 13, 24, 1036);
}

KERNEL_TEST(linear_row_has_the_same_bits_over_several_k_blocks) {
  check_same_bits_at_every_m(k, WeightKind::dense_bf16, 80, 4160, 14, {1, 6, 7, 13});
  check_same_bits_at_every_m(k, WeightKind::dense_f16, 80, 4160, 14, {1, 6, 7, 13});
  check_same_bits_at_every_m(k, WeightKind::dense_f32, 80, 2100, 14, {1, 6, 7, 13});
  check_same_bits_at_every_m(k, WeightKind::w8_g32, 80, 4160, 14, {1, 6, 7, 13});
  check_same_bits_at_every_m(k, WeightKind::w4_g32, 80, 8256, 14, {1, 13});
  check_same_bits_at_every_m(k, WeightKind::w4m_g32, 80, 8256, 14, {1, 13});
  check_same_bits_at_every_m(k, WeightKind::w4m_g128, 80, 8256, 14, {1, 13});
  check_same_bits_at_every_m(k, WeightKind::w8_channel, 80, 8300, 14, {1, 6, 7, 13});
  check_same_bits_at_every_m(k, WeightKind::w8_channel_g128, 80, 8300, 14, {1, 6, 7, 13});
}

KERNEL_TEST(linear_row_has_the_same_bits_at_every_panel_split) {
  for_each_kind(k, kKinds, [&](WeightKind kind) {
    const Weights w(k, kind, 16 * harness::fewer(21, 9), 96);
    for (int64_t m : {1, 5, 8, 12, 30}) {
      const Inputs x(w.kernel.act, m, 96);
      Output whole(ActFormat::f32, m, w.n);
      run(w, x, 0, m, plain(whole));
      for (int64_t step : {1, 2, 3, 4, 6, 8, 16}) {
        Output parts(ActFormat::f32, m, w.n);
        for (int64_t p = 0; p < w.panels; p += step) {
          run(w, x, 0, m, plain(parts), p, std::min(w.panels, p + step));
        }
        for (int64_t r = 0; r < m; r++) CHECK(same_row(whole, parts, r));
      }
    }
  });
}

KERNEL_TEST(linear_row_has_the_same_bits_with_every_work_size) {
  for_each_kind(k, kKinds, [&](WeightKind kind) {
    constexpr int64_t kK = 1120;
    const Weights w(k, kind, 80, kK);
    const Inputs x(w.kernel.act, 70, kK);
    WorkSizes small{};
    small.strip_bytes = 8 << 10;
    small.rows = 24;
    small.near_bytes = 2 << 10;
    small.ahead_bytes = 256;
    small.float_pass_rows = 6;
    CHECK(w.kernel.block_k(kK, small) < kK);
    WorkSizes large{};
    large.strip_bytes = 4 << 20;
    large.ahead_bytes = 64 << 10;
    large.float_pass_rows = 12;
    large.far_pass_rows = kMostPassRows;
    large.near_blocks = 0;
    WorkSizes odd{};
    odd.strip_bytes = 20 << 10;
    odd.rows = 2;
    odd.near_bytes = 3 << 10;
    odd.ahead_bytes = 0;
    odd.float_pass_rows = 1;
    odd.far_pass_rows = 0;
    for (int64_t m : {1, 8, 14, 17, 70}) {
      Output whole(ActFormat::f32, m, w.n);
      run(w, x, 0, m, plain(whole));
      for (const WorkSizes& sizes : {small, large, odd}) {
        Output other(ActFormat::f32, m, w.n);
        run(w, x, 0, m, plain(other), 0, -1, sizes);
        for (int64_t r = 0; r < m; r++) CHECK(same_row(whole, other, r));
      }
    }
  });
}

KERNEL_TEST(linear_kernels_state_their_geometry) {
  for_each_kind(k, kKinds, [&](WeightKind kind) {
    const LinearKernel& kernel = kernel_of(k, kind);
    CHECK(kernel.tile_rows >= 1 && kernel.tile_columns >= 4 && kernel.tile_panels >= 1);
    CHECK(kernel.tile_columns <= kStripPanels * kPanel && kernel.pass_rows >= 1);
    for (int64_t size : {1, 96, 896, 8192}) {
      const int64_t block = kernel.block_k(size, {});
      CHECK(block >= 1 && block <= size);
    }
    CHECK(kernel.block_k(65536, {}) < 65536);
  });
}

KERNEL_TEST(linear_writes_only_its_panels) {
  for_each_kind(k, kKinds, [&](WeightKind kind) {
    const Weights w(k, kind, 16 * 12, 64);
    for (int64_t m : {2, 20}) {
      const Inputs x(w.kernel.act, m, 64);
      Output out(ActFormat::f32, m, w.n);
      run(w, x, 0, m, plain(out), 4, 8);
      for (int64_t r = 0; r < m; r++) {
        for (int64_t c = 0; c < w.n; c++) {
          const bool written = read_at<uint32_t>(out.bytes(r) + c * 4) != 0x5a5a5a5au;
          CHECK(written == (c >= 64 && c < 128));
        }
      }
    }
  });
}

KERNEL_TEST(linear_of_no_rows_or_no_panels_does_nothing) {
  for_each_kind(k, kKinds, [&](WeightKind kind) {
    const Weights w(k, kind, 64, 64);
    const Inputs x(w.kernel.act, 1, 64);
    Output out(ActFormat::f32, 1, 64);
    run(w, x, 0, 0, plain(out));
    run(w, x, 0, 1, plain(out), 4, 4);
    for (size_t i = 0; i < out.data.size(); i++) CHECK(out.data[i] == 0x5a);
  });
}

// -- epilogues
// -------------------------------------------------------------------------------------

namespace {

double activate(Activation act, double x) {
  switch (act) {
    case Activation::none:
      return x;
    case Activation::relu:
      return x > 0 ? x : 0;
    case Activation::gelu:
      return 0.5 * x * (1 + std::erf(x / std::sqrt(2.0)));
    case Activation::gelu_tanh:
      return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
    case Activation::silu:
      return x / (1 + std::exp(-x));
    case Activation::clamped_swiglu: {
      const double g = std::min(x, 7.0);
      return g / (1 + std::exp(-1.702 * g));
    }
  }
  return x;
}

// With glu: what the activated gate is multiplied with.
double activate_up(Activation act, double x) {
  return act == Activation::clamped_swiglu ? 1 + std::max(-7.0, std::min(x, 7.0)) : x;
}

// Expected outputs of row r in fp64: + bias, activation, gate times up.
std::vector<double> expected_row(const Weights& w, const References& reference_of, int64_t r,
                                 const Epilogue& ep) {
  std::vector<double> y(static_cast<size_t>(w.panels * kPanel));
  for (int64_t c = 0; c < w.panels * kPanel; c++) {
    double& v = y[static_cast<size_t>(c)];
    v = reference_of(r, c).value + (ep.bias ? static_cast<double>(ep.bias[c]) : 0);
    v = ep.glu && c / kPanel % 2 == 1 ? activate_up(ep.act, v) : activate(ep.act, v);
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
  constexpr Activation kActs[] = {Activation::none, Activation::relu, Activation::gelu,
                                  Activation::gelu_tanh, Activation::silu};
  unsigned turn = 0;
  for (WeightKind kind : {WeightKind::dense_bf16, WeightKind::w4m_g32, WeightKind::w8_channel}) {
    for (int64_t m : {1, 8, 14, 40}) {  // 40: several tiles finished together
      const auto check = [&](const EpilogueCase& c) {
        if (turn++ % 3 == 0 || !harness::few_shapes()) check_epilogue(k, kind, m, c);
      };
      for (Activation act : kActs) check({act, false, true, false, ActFormat::f32, 72});
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
