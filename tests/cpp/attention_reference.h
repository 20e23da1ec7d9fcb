// Attention over a KV cache of every type in fp64 loops, which read the cache by an independent
// implementation of its layout.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <random>
#include <string>

#include "harness.h"

namespace attention_reference {

using namespace cpuserve;
using harness::from_bf16;
using harness::from_f16;
using harness::to_bf16;
using harness::to_f16;

constexpr float kNan = NAN;
constexpr int32_t kNoBlock = -(1 << 24);  // reading from it faults

struct Case {
  KvType type = KvType::bf16;
  int group = 1, kv_heads = 2, head_dim = 64, context = 1, queries = 1, window = 0;
  float softcap = 0.0f;
  bool sinks = false, alibi = false;
  bool latent = false;  // the keys are the values
  bool causal = true;   // else rows see the keys after them, too
  ActFormat q_format = ActFormat::f32;
  int q_heads() const { return group * kv_heads; }
  int hd_pad() const { return (head_dim + 15) / 16 * 16; }
  int first_position() const { return context - queries; }
  // Keys [first_key, end_key) are what the row at a position sees.
  int first_key(int position) const { return window > 0 ? std::max(0, position - window + 1) : 0; }
  int end_key(int position) const {
    if (causal) return position + 1;
    return window > 0 ? std::min(context, position + window) : context;
  }
};

// Returns the value that an 8-bit code represents.
inline double value_of(KvType type, int code) {
  if (type != KvType::e4m3) return static_cast<int8_t>(code);
  constexpr int mantissa = 3, bias = 7;  // e4m3
  const int exponent = (code & 0x7f) >> mantissa, part = code & ((1 << mantissa) - 1);
  const double size = exponent == 0
                          ? std::ldexp(part, 1 - bias - mantissa)
                          : std::ldexp(part + (1 << mantissa), exponent - bias - mantissa);
  return code & 0x80 ? -size : size;
}

// Tables of all codes of a type, and of the codes of whole numbers, because tests need them for
// each element of a cache, also in emulators.
struct Codes {
  static constexpr int kLargest = 128;

  explicit Codes(KvType type) {
    std::fill(std::begin(of_whole), std::end(of_whole), -1);
    for (int code = 255; code >= 0;
         code--) {  // downwards, so that of equal values (0, -0) the lower code stays
      const double x = values[code] = value_of(type, code);
      if (std::fabs(x) <= kLargest && std::nearbyint(x) == x) {
        of_whole[static_cast<int>(x) + kLargest] = code;
      }
    }
  }
  double values[256];
  int of_whole[2 * kLargest + 1];  // -1: the number has no code
};

inline const Codes& codes_of(KvType type) {
  static const Codes int8(KvType::int8), e4m3(KvType::e4m3);
  return type == KvType::e4m3 ? e4m3 : int8;
}

inline double decoded(KvType type, uint8_t code) { return codes_of(type).values[code]; }

// The code of a whole number x.
inline uint8_t code_of(KvType type, float x) {
  const bool whole = std::fabs(x) <= Codes::kLargest && std::nearbyint(x) == x;
  const int code = whole ? codes_of(type).of_whole[static_cast<int>(x) + Codes::kLargest] : -1;
  if (code < 0) harness::fail(__FILE__, __LINE__, "no code is " + std::to_string(x));
  return static_cast<uint8_t>(std::max(code, 0));
}

// The levels of 4-bit values.
constexpr int kLevels[16] = {-127, -97, -76, -59, -45, -31, -18, -6,
                             6,    18,  31,  45,  59,  76,  97,  127};

// The code of a level; 0 has none, but the columns after head_dim may have any code.
inline int level_code(float x) {
  const int* const level = std::find(kLevels, kLevels + 16, static_cast<int>(std::lround(x)));
  return level == kLevels + 16 ? 0 : static_cast<int>(level - kLevels);
}

// Scaled test values are multiples of this.
inline float scale_of(int position) { return 1.0f / static_cast<float>(128 + 32 * (position % 3)); }

// A paged cache in the layout of table/attention.h; every slot starts as NaN.
class Cache {
 public:
  Cache(const Case& c, int blocks) : c_(c) {
    const size_t keys = kv_key_bytes(c.type, c.hd_pad()), element = kv_elem_bytes(c.type);
    const size_t values = kv_value_bytes(c.type, c.hd_pad()), head = kSlabBlocks * (keys + values);
    layer_ = {nullptr,
              head * static_cast<size_t>(c.kv_heads) + 192,
              keys,
              head,
              kSlabBlocks * keys,
              values,
              c.kv_heads,
              c.head_dim,
              c.hd_pad(),
              c.type};
    if (c.latent) layer_.value_offset = 0;  // values would leave NaN where they are not read
    bytes_.resize(layer_.slab_stride * static_cast<size_t>(blocks / kSlabBlocks + 1));
    layer_.base = bytes_.data();
    if (kv_scaled(c.type)) {
      std::fill(bytes_.begin(), bytes_.end(), uint8_t{0xff});  // scales of NaN
    } else {
      for (size_t i = 0; i < bytes_.size() / element; i++) put(bytes_.data(), i, kNan);
    }
  }
  const KvLayer& layer() const { return layer_; }

  // k and v are multiples of `scale`.
  void store(int block, int at, int head, const float* k, const float* v, float scale) {
    uint8_t* base = kv_block(layer_, block, head);
    uint8_t* values = kv_values(layer_, block, head);
    if (kv_scaled(c_.type)) {
      const float widen = c_.type == KvType::e4m3 ? 256.0f : 1.0f;
      scale_at(base, at, false) = scale * widen;
      if (!c_.latent) scale_at(values, at, true) = scale * widen;
      for (int d = 0; d < c_.hd_pad(); d++) {
        base[key_index(d, at)] = code_of(c_.type, d < c_.head_dim ? std::round(k[d] / scale) : 0);
        if (c_.latent) continue;
        const float number = d < c_.head_dim ? std::round(v[d] / scale) : 0;
        uint8_t& code = values[value_index(d, at)];
        if (c_.type != KvType::int8_v4) {
          code = code_of(c_.type, number);
        } else if (d / 16 % 2 == 0) {
          code = static_cast<uint8_t>((code & 0xf0) | level_code(number));
        } else {
          code = static_cast<uint8_t>((code & 15) | level_code(number) << 4);
        }
      }
      return;
    }
    for (int d = 0; d < c_.hd_pad(); d++) {
      put(base, key_index(d, at), d < c_.head_dim ? k[d] : 0.0f);
      if (c_.latent) continue;
      put(values, value_index(d, at), d < c_.head_dim ? v[d] : 0.0f);
    }
  }
  float key(int block, int at, int head, int d) {
    return get(kv_block(layer_, block, head), key_index(d, at), at, false);
  }
  float value(int block, int at, int head, int d) {
    uint8_t* values = kv_values(layer_, block, head);
    if (c_.type != KvType::int8_v4) return get(values, value_index(d, at), at, true);
    const int level = kLevels[values[value_index(d, at)] >> d / 16 % 2 * 4 & 15];
    return static_cast<float>(level) * scale_at(values, at, true);
  }

 private:
  size_t key_index(int d, int at) const {
    const int pair = c_.type == KvType::bf16 ? 2 : 1;
    return static_cast<size_t>((d / pair * kBlock + at) * pair + d % pair);
  }
  size_t value_index(int d, int at) const {
    if (c_.type == KvType::int8_v4) {  // columns d and d + 16 of 32 share a byte
      return static_cast<size_t>(at * four_bit_row() + d / 32 * 16 + d % 16);
    }
    const int pair = c_.type == KvType::bf16 ? 2 : 1;
    return static_cast<size_t>((at / pair * c_.hd_pad() + d) * pair + at % pair);
  }
  void put(uint8_t* base, size_t i, float x) {
    if (c_.type == KvType::f32) {
      std::memcpy(base + i * 4, &x, 4);
    } else {
      const uint16_t h = c_.type == KvType::bf16 ? to_bf16(x) : to_f16(x);
      std::memcpy(base + i * 2, &h, 2);
    }
  }
  int four_bit_row() const { return (c_.hd_pad() + 31) / 32 * 16; }
  float& scale_at(uint8_t* half, int at, bool value) const {
    const int row = value && c_.type == KvType::int8_v4 ? four_bit_row() : c_.hd_pad();
    return reinterpret_cast<float*>(half + row * kBlock)[at];
  }
  float get(uint8_t* base, size_t i, int at, bool value) const {
    if (kv_scaled(c_.type)) {
      const float widen = c_.type == KvType::e4m3 ? 256.0f : 1.0f;
      return static_cast<float>(decoded(c_.type, base[i])) * (scale_at(base, at, value) / widen);
    }
    if (c_.type == KvType::f32) return reinterpret_cast<const float*>(base)[i];
    const uint16_t h = reinterpret_cast<const uint16_t*>(base)[i];
    if (c_.type == KvType::bf16) return from_bf16(h);
    return from_f16(h);
  }

  Case c_;
  KvLayer layer_;
  std::vector<uint8_t> bytes_;
};

// Multiplies one head by the matrix that kv_mixed describes, or by its inverse.
inline std::vector<double> mixed(const std::vector<double>& x, bool inverse) {
  const size_t n = x.size() & -x.size();
  std::vector<double> y(x.size());
  for (size_t i = 0; i < x.size(); i++) {
    for (size_t j = 0; j < n; j++) {
      const bool negative = __builtin_parityll(i % n & j);
      y[i] += negative ? -x[i / n * n + j] : x[i / n * n + j];
    }
    if (inverse) y[i] /= static_cast<double>(n);
  }
  return y;
}

// Random queries, keys and values of one sequence, with the fp64 answer.
class Problem {
 public:
  Problem(const Case& c, uint32_t seed) : c(c), rng_(seed) {
    const auto fill = [this](std::vector<float>& x, size_t n, int range) {
      x.resize(n);
      for (float& v : x) {
        v = static_cast<float>(static_cast<int>(rng_() % (2 * static_cast<unsigned>(range) + 1)) -
                               range) /
            128.0f;
      }
    };
    const auto size = [](int a, int b, int d) { return static_cast<size_t>(a) * b * d; };
    fill(keys, size(c.context, c.kv_heads, c.head_dim), 127);
    fill(values, size(c.context, c.kv_heads, c.head_dim), 127);
    if (c.latent) values = keys;
    fill(queries, size(c.queries, c.q_heads(), c.head_dim), 127);
    fill(slopes, static_cast<size_t>(c.q_heads()), 30);
    fill(sinks, static_cast<size_t>(c.q_heads()), 255);
    for (float& s : slopes) s = std::fabs(s) / 8;
    if (kv_scaled(c.type)) round_to_codes();
    const int blocks = (c.context + kBlock - 1) / kBlock;
    table.resize(static_cast<size_t>(blocks) * 2 + 3);
    std::iota(table.begin(), table.end(), 0);
    std::shuffle(table.begin(), table.end(), rng_);
    table.resize(static_cast<size_t>(blocks));
  }

  // Keys and values n / 128 to n times the position's scale; fp8 has few bits. Mixed values are
  // levels times the scale, so `values` have what attention has to make of them.
  void round_to_codes() {
    const auto width = static_cast<size_t>(c.kv_heads * c.head_dim);
    for (std::vector<float>* x : {&keys, &values}) {
      for (size_t i = 0; i < x->size(); i++) {
        const int n = static_cast<int>((*x)[i] * 128);
        const int code = c.type == KvType::int8 ? n : n / 32 * 32;
        (*x)[i] = static_cast<float>(code) * scale_of(static_cast<int>(i / width));
        if (x != &values || !kv_mixes_values(c.type)) continue;
        (*x)[i] =
            static_cast<float>(kLevels[(n + 128) / 16]) * scale_of(static_cast<int>(i / width));
      }
    }
    if (!kv_mixes_values(c.type)) return;
    for (size_t i = 0; i < values.size(); i += static_cast<size_t>(c.head_dim)) {
      const std::vector<double> head = mixed({&values[i], &values[i] + c.head_dim}, true);
      std::copy(head.begin(), head.end(), &values[i]);
    }
  }

  float scale() const { return 1.0f / std::sqrt(static_cast<float>(c.head_dim)); }
  int pool_blocks() const { return 2 * static_cast<int>(table.size()) + 3; }
  const float* key(int p, int h) const {
    return &keys[static_cast<size_t>((p * c.kv_heads + h) * c.head_dim)];
  }
  const float* value(int p, int h) const {
    return &values[static_cast<size_t>((p * c.kv_heads + h) * c.head_dim)];
  }
  const float* query(int t, int h) const {
    return &queries[static_cast<size_t>((t * c.q_heads() + h) * c.head_dim)];
  }

  // Positions [from, to) stored, everything else NaN.
  Cache cache(int from, int to) const {
    Cache kv(c, pool_blocks());
    for (int p = from; p < to; p++) {
      for (int h = 0; h < c.kv_heads; h++) {
        std::vector<float> v(value(p, h), value(p, h) + c.head_dim);
        if (kv_mixes_values(c.type)) {
          const std::vector<double> head = mixed({v.begin(), v.end()}, false);
          std::copy(head.begin(), head.end(), v.begin());
        }
        kv.store(table[static_cast<size_t>(p / kBlock)], p % kBlock, h, key(p, h), v.data(),
                 scale_of(p));
      }
    }
    return kv;
  }

  std::vector<double> reference(int t, int h) const {
    const int position = c.first_position() + t, kv_head = h / c.group;
    const int first = c.first_key(position), end = c.end_key(position);
    std::vector<double> score, out(static_cast<size_t>(c.head_dim));
    double top = c.sinks ? static_cast<double>(sinks[static_cast<size_t>(h)]) : -1e300;
    for (int p = first; p < end; p++) {
      double s = 0;
      for (int d = 0; d < c.head_dim; d++)
        s += static_cast<double>(query(t, h)[d]) * key(p, kv_head)[d];
      s *= scale();
      if (c.softcap > 0) s = c.softcap * std::tanh(s / c.softcap);
      if (c.alibi)
        s -= static_cast<double>(slopes[static_cast<size_t>(h)]) * std::abs(p - position);
      score.push_back(s);
      top = std::max(top, s);
    }
    double sum = c.sinks ? std::exp(static_cast<double>(sinks[static_cast<size_t>(h)]) - top) : 0.0;
    for (int p = first; p < end; p++) {
      const double w = std::exp(score[static_cast<size_t>(p - first)] - top);
      sum += w;
      for (int d = 0; d < c.head_dim; d++) out[static_cast<size_t>(d)] += w * value(p, kv_head)[d];
    }
    for (double& x : out) x /= sum;
    return out;
  }

  Case c;
  std::vector<float> keys, values, queries, slopes, sinks;
  std::vector<int32_t> table;

 private:
  std::mt19937 rng_;
};

// A matrix with rows of row_bytes, 64-byte aligned, filled with NaN bits.
class Matrix {
 public:
  Matrix(int64_t rows, int64_t width, ActFormat format)
      : memory_(static_cast<size_t>(rows) * row_bytes(format, width) + 64, 0xff) {
    const size_t skip = 64 - reinterpret_cast<uintptr_t>(memory_.data()) % 64;
    rows_ = {memory_.data() + skip, row_bytes(format, width), width, format};
  }
  const Rows& rows() const { return rows_; }
  float* f32(int64_t row) {
    return reinterpret_cast<float*>(static_cast<uint8_t*>(rows_.data) +
                                    static_cast<size_t>(row) * rows_.stride);
  }
  uint16_t* bf16(int64_t row) { return reinterpret_cast<uint16_t*>(f32(row)); }

 private:
  std::vector<uint8_t> memory_;
  Rows rows_;
};

class Runner {
 public:
  Runner(const KernelTable& kernels, const Problem& p)
      : kernels_(kernels),
        p_(p),
        q_(p.c.queries, static_cast<int64_t>(p.c.q_heads()) * p.c.hd_pad(), p.c.q_format),
        scratch_(kAttentionScratch + kv_chunk_bytes(p.c.type, p.c.hd_pad()) + 64, 0xff) {
    for (int t = 0; t < p.c.queries; t++) {
      for (int h = 0; h < p.c.q_heads(); h++) {
        for (int d = 0; d < p.c.hd_pad(); d++) {
          const float x = d < p.c.head_dim ? p.query(t, h)[d] : 0.0f;
          const int column = h * p.c.hd_pad() + d;
          if (p.c.q_format == ActFormat::bf16) {
            q_.bf16(t)[column] = to_bf16(x);
          } else {
            q_.f32(t)[column] = x;
          }
        }
      }
    }
  }

  Matrix output() const {
    return Matrix(p_.c.queries, static_cast<int64_t>(p_.c.q_heads()) * p_.c.head_dim,
                  ActFormat::f32);
  }

  // Sets all arguments except rows and chunks; `token` is the first query of the sequence in the
  // step.
  AttentionArgs args(const Cache& kv, int kv_head, int token, const Matrix& out) {
    AttentionArgs a{};
    a.q = q_.rows();
    a.kv = kv.layer();
    a.kv_head = kv_head;
    a.group = p_.c.group;
    a.t0 = token;
    a.pos0 = p_.c.first_position() + token;
    a.block_table = table_.data();
    a.window = p_.c.window;
    a.keys = p_.c.causal ? 0 : p_.c.context;
    a.scale = p_.scale();
    a.softcap = p_.c.softcap;
    a.slopes = p_.c.alibi ? p_.slopes.data() : nullptr;
    a.sinks = p_.c.sinks ? p_.sinks.data() : nullptr;
    a.out = out.rows();
    a.scratch = scratch();
    a.scratch_bytes = scratch_bytes;
    a.values = static_cast<uint8_t*>(scratch()) + kAttentionScratch;
    return a;
  }

  // Rows [row0, row0 + rows) counted from `token`; only the blocks this unit may touch are listed.
  void run(const Cache& kv, int kv_head, int token, int64_t row0, int64_t rows, const Matrix& out) {
    AttentionArgs a = unit(kv, kv_head, token, row0, rows, out);
    kernels_.attention[static_cast<int>(a.kv.type)](a);
  }

  // The same rows by partial results: chunks are split at `cuts`, then merged.
  void run_split(const Cache& kv, int kv_head, int token, int64_t row0, int64_t rows,
                 int chunks_a_piece, const Matrix& out) {
    AttentionArgs a = unit(kv, kv_head, token, row0, rows, out);
    const int first = a.chunk0, chunks = a.chunk1 - a.chunk0;
    const size_t slot = static_cast<size_t>(16 + p_.c.hd_pad());
    std::vector<float> partial(static_cast<size_t>(rows) * static_cast<size_t>(chunks) * slot,
                               kNan);
    for (int c = 0; c < chunks; c += chunks_a_piece) {
      a.chunk0 = first + c;
      a.chunk1 = first + std::min(c + chunks_a_piece, chunks);
      a.partial = partial.data() + static_cast<size_t>(c) * slot;
      a.partial_stride = chunks;
      kernels_.attention[static_cast<int>(a.kv.type)](a);
    }
    kernels_.attention_merge({partial.data(), rows, chunks, kv_head, a.group, p_.c.head_dim,
                              p_.c.hd_pad(), row0, token, a.sinks, a.out, scratch(),
                              kv_mixes_values(p_.c.type)});
  }

  int32_t scratch_bytes = kAttentionScratch / 2;

 private:
  void* scratch() {
    return scratch_.data() + (64 - reinterpret_cast<uintptr_t>(scratch_.data()) % 64);
  }

  AttentionArgs unit(const Cache& kv, int kv_head, int token, int64_t row0, int64_t rows,
                     const Matrix& out) {
    const int first = p_.c.first_position() + token + static_cast<int>(row0 / p_.c.group);
    const int last =
        p_.c.first_position() + token + static_cast<int>((row0 + rows - 1) / p_.c.group);
    const int low = p_.c.first_key(first), end = p_.c.end_key(last);
    table_.assign(p_.table.size() + 64, kNoBlock);
    for (int b = low / kBlock; b <= (end - 1) / kBlock; b++) {
      table_[static_cast<size_t>(b)] = p_.table[static_cast<size_t>(b)];
    }
    AttentionArgs a = args(kv, kv_head, token, out);
    a.row0 = row0;
    a.rows = rows;
    a.chunk0 = low / kChunk;
    a.chunk1 = (end - 1) / kChunk + 1;
    return a;
  }

  const KernelTable& kernels_;
  const Problem& p_;
  Matrix q_;
  std::vector<uint8_t> scratch_;
  std::vector<int32_t> table_;
};

inline std::string describe(const Case& c) {
  const char* types[] = {"bf16", "f16", "f32", "int8", "e4m3", "int8_v4"};
  char text[200];
  std::snprintf(text, sizeof text,
                "%s group %d kv_heads %d head_dim %d context %d queries %d window %d%s%s%s%s%s",
                types[static_cast<int>(c.type)], c.group, c.kv_heads, c.head_dim, c.context,
                c.queries, c.window, c.softcap > 0 ? " softcap" : "", c.sinks ? " sinks" : "",
                c.alibi ? " alibi" : "", c.latent ? " latent" : "",
                c.causal ? "" : " bidirectional");
  return text;
}

inline void expect_equal_rows(Matrix& a, Matrix& b, int token, const Case& c,
                              const std::string& what) {
  const size_t bytes = static_cast<size_t>(c.q_heads()) * static_cast<size_t>(c.head_dim) * 4;
  if (std::memcmp(a.f32(token), b.f32(token), bytes) == 0) return;
  harness::fail(__FILE__, __LINE__, what + ": token " + std::to_string(token) + " differs");
}

// Probabilities are rounded to bf16 with bf16 caches: half an ulp, 2^-9, of values below 1.
inline double tolerance(KvType type) {
  return type == KvType::bf16 || kv_scaled(type) ? 2.2e-3 : 4e-6;
}

inline double largest_error(const Problem& p, Matrix& out) {
  double worst = 0;
  for (int t = 0; t < p.c.queries; t++) {
    for (int h = 0; h < p.c.q_heads(); h++) {
      const std::vector<double> want = p.reference(t, h);
      for (int d = 0; d < p.c.head_dim; d++) {
        const double error =
            std::fabs(out.f32(t)[h * p.c.head_dim + d] - want[static_cast<size_t>(d)]);
        worst = error <= worst ? worst : error;  // NaN becomes the worst
      }
    }
  }
  return worst;
}

inline void check_values(const Problem& p, Matrix& out, const std::string& what) {
  const double error = largest_error(p, out);
  if (error <= tolerance(p.c.type)) return;
  harness::fail(__FILE__, __LINE__, what + ": error " + std::to_string(error));
}

// All queries at once must give the right values, and every other division of the work the same
// bits.
inline void check_case(const Case& c, uint32_t seed, const KernelTable& k) {
  const auto kernels = [&](const KernelTable& t) {
    return std::make_pair(t.attention[static_cast<int>(c.type)].for_head(c.hd_pad()),
                          t.attention_merge);
  };
  if (harness::from_below(k, kernels)) return;
  const Problem p(c, seed);
  const Cache kv = p.cache(0, c.context);
  const int64_t all = static_cast<int64_t>(c.queries) * c.group;
  const std::string what = describe(c);
  std::mt19937 rng(seed);
  Runner run(k, p);
  Matrix whole = run.output(), cut = run.output(), split = run.output(), alone = run.output();
  for (int h = 0; h < c.kv_heads; h++) {
    run.run(kv, h, 0, 0, all, whole);
    for (int64_t row = 0; row < all;) {
      const auto random = static_cast<int64_t>(rng() % static_cast<unsigned>(2 * c.group + 9));
      const int64_t n = std::min<int64_t>(all - row, 1 + random);
      run.run(kv, h, 0, row, n, cut);
      run.run_split(kv, h, 0, row, n, 1 + static_cast<int>(rng() % 3), split);
      row += n;
    }
  }
  check_values(p, whole, what);
  Matrix narrow = run.output();
  run.scratch_bytes = 96 << 10;  // the least (runtime/work_sizes.cpp)
  for (int h = 0; h < c.kv_heads; h++) run.run(kv, h, 0, 0, all, narrow);
  run.scratch_bytes = kAttentionScratch / 2;
  for (int t = 0; t < c.queries; t++) {
    expect_equal_rows(whole, cut, t, c, what + ", rows cut");
    expect_equal_rows(whole, narrow, t, c, what + ", less scratch");
    expect_equal_rows(whole, split, t, c, what + ", partials merged");
  }
  // Alone: one token per step, with a cache that holds nothing after what it sees and nothing left
  // of its window.
  for (int t : {0, c.queries / 2, c.queries - 1}) {
    const int position = c.first_position() + t;
    const Cache past = p.cache(c.first_key(position), c.end_key(position));
    for (int h = 0; h < c.kv_heads; h++) run.run(past, h, t, 0, c.group, alone);
    expect_equal_rows(whole, alone, t, c, what + ", alone");
  }
}

inline const int kContexts[] = {1, 31, 32, 33, 255, 256, 257, 1000};
inline const int kGroups[] = {1, 2, 3, 4, 5, 6, 7, 8, 16};
inline const int kHeadDims[] = {16, 32, 48, 64, 80, 96, 128, 256};
inline const int kWindows[] = {0, 0, 1, 2, 17, 100, 300};
inline const int kQueries[] = {1, 2, 5, 9, 40};

// Every context with every group size. Head sizes, windows and options vary along with them. Of
// few, a third: each context with three group sizes, each group size with two or three contexts,
// and with other ones for the next type.
inline void check_type(KvType type, const KernelTable& k) {
  const auto first = static_cast<unsigned>(type);
  unsigned turn = first;
  for (unsigned i = 0; i < std::size(kContexts); i++) {
    for (unsigned j = 0; j < std::size(kGroups); j++, turn++) {
      if (harness::few_shapes() && (i + j + j / 3 + first) % 3 != 0) continue;
      const int context = kContexts[i], group = kGroups[j];
      Case c;
      c.type = type;
      c.group = group;
      c.context = context;
      c.head_dim = kHeadDims[(turn * 3 + turn / 8) % 8];
      c.kv_heads = 1 + static_cast<int>(turn % 2);
      c.queries = std::min(context, kQueries[turn % 5]);
      // Many queries of long contexts take emulators minutes, and divide as those of short ones do.
      if (c.head_dim * group > 800 || context * group > 3000) c.queries = std::min(c.queries, 5);
      c.window = kWindows[turn % 7];
      c.softcap = turn % 4 == 1 ? 2.0f : 0.0f;
      c.sinks = turn % 3 == 1;
      c.alibi = turn % 5 == 2;
      c.q_format = tolerance(type) > 1e-3 && turn % 2 ? ActFormat::bf16 : ActFormat::f32;
      check_case(c, 100 + turn, k);
    }
  }
}

}  // namespace attention_reference
