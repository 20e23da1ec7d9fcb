// attention, attention_merge, rope_store and latent_store against fp64 loops, and batch invariance
// bit for bit.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <random>
#include <string>

#include "harness.h"

using namespace cpuserve;
using harness::from_bf16;
using harness::from_f16;
using harness::to_bf16;
using harness::to_f16;

namespace {

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
double value_of(KvType type, int code) {
  if (type == KvType::int8) return static_cast<int8_t>(code);
  const int mantissa = type == KvType::e4m3 ? 3 : 2, bias = type == KvType::e4m3 ? 7 : 15;
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

const Codes& codes_of(KvType type) {
  static const Codes int8(KvType::int8), e4m3(KvType::e4m3), e5m2(KvType::e5m2);
  return type == KvType::int8 ? int8 : type == KvType::e4m3 ? e4m3 : e5m2;
}

double decoded(KvType type, uint8_t code) { return codes_of(type).values[code]; }

// The code of a whole number x.
uint8_t code_of(KvType type, float x) {
  const bool whole = std::fabs(x) <= Codes::kLargest && std::nearbyint(x) == x;
  const int code = whole ? codes_of(type).of_whole[static_cast<int>(x) + Codes::kLargest] : -1;
  if (code < 0) harness::fail(__FILE__, __LINE__, "no code is " + std::to_string(x));
  return static_cast<uint8_t>(std::max(code, 0));
}

// Scaled test values are multiples of this.
float scale_of(int position) { return 1.0f / static_cast<float>(128 + 32 * (position % 3)); }

// A paged cache in the layout of table/attention.h; every slot starts as NaN.
class Cache {
 public:
  Cache(const Case& c, int blocks) : c_(c) {
    const size_t half = kv_half_bytes(c.type, c.hd_pad()), element = kv_elem_bytes(c.type);
    const size_t heads = static_cast<size_t>(c.kv_heads), run = kSlabBlocks * half;
    layer_ = {
        nullptr, 2 * run * heads + 192, half, 2 * run, run, c.kv_heads, c.head_dim, c.hd_pad(),
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
    if (kv_scaled(c_.type)) {
      const float widen = c_.type == KvType::e4m3 ? 256.0f : 1.0f;
      scale_at(base, at) = scale_at(base + layer_.value_offset, at) = scale * widen;
      for (int d = 0; d < c_.hd_pad(); d++) {
        base[key_index(d, at)] = code_of(c_.type, d < c_.head_dim ? std::round(k[d] / scale) : 0);
        if (c_.latent) continue;
        base[layer_.value_offset + value_index(d, at)] =
            code_of(c_.type, d < c_.head_dim ? std::round(v[d] / scale) : 0);
      }
      return;
    }
    for (int d = 0; d < c_.hd_pad(); d++) {
      put(base, key_index(d, at), d < c_.head_dim ? k[d] : 0.0f);
      if (c_.latent) continue;
      put(base + layer_.value_offset, value_index(d, at), d < c_.head_dim ? v[d] : 0.0f);
    }
  }
  float key(int block, int at, int head, int d) {
    return get(kv_block(layer_, block, head), key_index(d, at), at);
  }
  float value(int block, int at, int head, int d) {
    return get(kv_block(layer_, block, head) + layer_.value_offset, value_index(d, at), at);
  }

 private:
  size_t key_index(int d, int at) const {
    const int pair = c_.type == KvType::bf16 ? 2 : 1;
    return static_cast<size_t>((d / pair * kBlock + at) * pair + d % pair);
  }
  size_t value_index(int d, int at) const {
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
  float& scale_at(uint8_t* half, int at) const {
    return reinterpret_cast<float*>(half + c_.hd_pad() * kBlock)[at];
  }
  float get(uint8_t* base, size_t i, int at) const {
    if (kv_scaled(c_.type)) {
      const float widen = c_.type == KvType::e4m3 ? 256.0f : 1.0f;
      return static_cast<float>(decoded(c_.type, base[i])) * (scale_at(base, at) / widen);
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

  // Keys and values n / 128 to n times the position's scale; fp8 has few bits.
  void round_to_codes() {
    const auto width = static_cast<size_t>(c.kv_heads * c.head_dim);
    for (std::vector<float>* x : {&keys, &values}) {
      for (size_t i = 0; i < x->size(); i++) {
        const int n = static_cast<int>((*x)[i] * 128);
        const int code = c.type == KvType::int8 ? n : n / 32 * 32;
        (*x)[i] = static_cast<float>(code) * scale_of(static_cast<int>(i / width));
      }
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
        kv.store(table[static_cast<size_t>(p / kBlock)], p % kBlock, h, key(p, h), value(p, h),
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
      if (c.alibi) s += static_cast<double>(slopes[static_cast<size_t>(h)]) * (p - position);
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
                              p_.c.hd_pad(), row0, token, a.sinks, a.out, scratch()});
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

std::string describe(const Case& c) {
  const char* types[] = {"bf16", "f16", "f32", "int8", "e4m3", "e5m2"};
  char text[200];
  std::snprintf(text, sizeof text,
                "%s group %d kv_heads %d head_dim %d context %d queries %d window %d%s%s%s%s%s",
                types[static_cast<int>(c.type)], c.group, c.kv_heads, c.head_dim, c.context,
                c.queries, c.window, c.softcap > 0 ? " softcap" : "", c.sinks ? " sinks" : "",
                c.alibi ? " alibi" : "", c.latent ? " latent" : "",
                c.causal ? "" : " bidirectional");
  return text;
}

void expect_equal_rows(Matrix& a, Matrix& b, int token, const Case& c, const std::string& what) {
  const size_t bytes = static_cast<size_t>(c.q_heads()) * static_cast<size_t>(c.head_dim) * 4;
  if (std::memcmp(a.f32(token), b.f32(token), bytes) == 0) return;
  harness::fail(__FILE__, __LINE__, what + ": token " + std::to_string(token) + " differs");
}

// Probabilities are rounded to bf16 with bf16 caches: half an ulp, 2^-9, of values below 1.
double tolerance(KvType type) { return type == KvType::bf16 || kv_scaled(type) ? 2.2e-3 : 4e-6; }

double largest_error(const Problem& p, Matrix& out) {
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

void check_values(const Problem& p, Matrix& out, const std::string& what) {
  const double error = largest_error(p, out);
  if (error <= tolerance(p.c.type)) return;
  harness::fail(__FILE__, __LINE__, what + ": error " + std::to_string(error));
}

// All queries at once must give the right values, and every other division of the work the same
// bits.
void check_case(const Case& c, uint32_t seed, const KernelTable& k) {
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

const int kContexts[] = {1, 31, 32, 33, 255, 256, 257, 1000};
const int kGroups[] = {1, 2, 3, 4, 5, 6, 7, 8, 16};
const int kHeadDims[] = {16, 32, 48, 64, 80, 96, 128, 256};
const int kWindows[] = {0, 0, 1, 2, 17, 100, 300};
const int kQueries[] = {1, 2, 5, 9, 40};

// Every context with every group size. Head sizes, windows and options vary along with them. Of
// few, a third: each context with three group sizes, each group size with two or three contexts,
// and with other ones for the next type.
void check_type(KvType type, const KernelTable& k) {
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

}  // namespace

KERNEL_TEST(attention_bf16_matches_fp64_and_is_batch_invariant) { check_type(KvType::bf16, k); }
KERNEL_TEST(attention_f16_matches_fp64_and_is_batch_invariant) { check_type(KvType::f16, k); }
KERNEL_TEST(attention_f32_matches_fp64_and_is_batch_invariant) { check_type(KvType::f32, k); }

KERNEL_TEST(attention_int8_matches_fp64_and_is_batch_invariant) { check_type(KvType::int8, k); }
KERNEL_TEST(attention_e4m3_matches_fp64_and_is_batch_invariant) { check_type(KvType::e4m3, k); }
KERNEL_TEST(attention_e5m2_matches_fp64_and_is_batch_invariant) { check_type(KvType::e5m2, k); }

// Encoders: a row sees the keys after its own, too, and a window reaches to both sides.
KERNEL_TEST(attention_to_both_sides_matches_fp64_and_is_batch_invariant) {
  unsigned turn = 0;
  for (KvType type :
       {KvType::bf16, KvType::f16, KvType::f32, KvType::int8, KvType::e4m3, KvType::e5m2}) {
    for (int context : {1, 31, 33, 256, 257, 600}) {
      for (int window : {0, 1, 65, 300}) {
        const unsigned now = turn++;
        if (harness::few_shapes() && (now + now / 8 * 2) % 3 != 0) continue;
        Case c;
        c.type = type;
        c.causal = false;
        c.window = window;
        c.context = context;
        // A whole prompt for one window in four.
        c.queries = std::min(context, now % 4 != now / 4 % 4 ? 40 : context > 300 ? 90 : 300);
        c.head_dim = kHeadDims[now % 5];
        c.group = 1 + static_cast<int>(now % 4 / 2);
        c.kv_heads = 1;
        c.q_format = tolerance(type) > 1e-3 && now % 2 ? ActFormat::bf16 : ActFormat::f32;
        check_case(c, 700 + now, k);
      }
    }
  }
}

// MLA: one KV head, whose keys are the values. DeepSeek's rows are 576 wide. Of few, a third: each
// type with both contexts and two widths, and every size of groups.
KERNEL_TEST(attention_over_keys_that_are_the_values) {
  unsigned turn = 0;
  for (KvType type :
       {KvType::bf16, KvType::f16, KvType::f32, KvType::int8, KvType::e4m3, KvType::e5m2}) {
    for (int head_dim : {40, 80, 576}) {
      for (int context : {33, 300}) {
        const unsigned now = turn++;
        if (harness::few_shapes() && (now / 6 + now / 2 + now % 2) % 3 != 0) continue;
        Case c;
        c.type = type;
        c.latent = true;
        c.kv_heads = 1;
        c.head_dim = head_dim;
        c.context = context;
        c.group = kGroups[(now + now / 6) % 9];
        c.queries = kQueries[now % 3];
        c.q_format = tolerance(type) > 1e-3 && now % 2 ? ActFormat::bf16 : ActFormat::f32;
        check_case(c, 300 + now, k);
      }
    }
  }
}

KERNEL_TEST(attention_bf16_error_is_the_rounding_of_probabilities) {
  Case c;
  c.context = 700;
  c.queries = 4;
  const Problem p(c, 5);
  const Cache kv = p.cache(0, c.context);
  Runner run(k, p);
  Matrix out = run.output();
  for (int h = 0; h < c.kv_heads; h++) run.run(kv, h, 0, 0, 4, out);
  const double error = largest_error(p, out);
  CHECK(error > 1e-6 && error < 5e-4);  // an exact result would mean that no bf16 product was used
}

KERNEL_TEST(attention_takes_long_prefills_in_more_than_one_row_block) {
  Case c;
  c.context = c.queries = 400;
  c.kv_heads = 1;
  c.group = 2;
  c.head_dim = 32;
  for (KvType type : {KvType::bf16, KvType::f32}) {
    c.type = type;
    check_case(c, 9, k);
  }
}

// Partial results are merged 64 chunks at a time, so 16,384 keys do not cover a second batch.
KERNEL_TEST(attention_over_more_chunks_than_are_merged_at_a_time) {
  Case c;
  c.context = 2 * 64 * kChunk + 300;
  c.queries = 2;
  c.kv_heads = 1;
  c.group = 3;
  c.head_dim = 16;
  for (KvType type : {KvType::bf16, KvType::f32}) {
    c.type = type;
    c.sinks = type == KvType::f32;
    check_case(c, 15, k);
  }
}

KERNEL_TEST(attention_output_in_the_consumers_format_is_its_f32_row_stored) {
  Case c;
  c.context = 300;
  c.queries = 3;
  c.group = 3;
  const Problem p(c, 12);
  const Cache kv = p.cache(0, c.context);
  const int64_t width = static_cast<int64_t>(c.q_heads()) * c.head_dim;
  Runner run(k, p);
  Matrix f32 = run.output();
  for (int h = 0; h < c.kv_heads; h++) run.run(kv, h, 0, 0, 9, f32);
  for (ActFormat format : {ActFormat::bf16, ActFormat::q8g32}) {
    Matrix direct(c.queries, width, format), stored(c.queries, width, format);
    for (int h = 0; h < c.kv_heads; h++) run.run(kv, h, 0, 0, 9, direct);
    k.convert({f32.rows(), stored.rows(), 0, c.queries});
    const auto bytes =
        static_cast<size_t>(format == ActFormat::bf16 ? width * 2 : width + width / 32 * 8);
    for (int t = 0; t < c.queries; t++) {
      CHECK(std::memcmp(direct.bf16(t), stored.bf16(t), bytes) == 0);
    }
  }
}

// A NaN in a visible value must reach the output, otherwise the answer would be wrong without a
// sign.
KERNEL_TEST(attention_passes_a_visible_nan_on) {
  Case c;
  c.context = 300;
  c.kv_heads = 1;
  Problem p(c, 3);
  p.values[static_cast<size_t>(20 * c.head_dim + 7)] = kNan;
  const Cache kv = p.cache(0, c.context);
  Runner run(k, p);
  Matrix out = run.output();
  run.run(kv, 0, 0, 0, 1, out);
  CHECK(std::isnan(out.f32(0)[7]) && std::isfinite(out.f32(0)[6]));
}

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

// Multiplies one head by the matrix that kv_mixed describes.
std::vector<double> mixed(const std::vector<double>& x, bool query) {
  const size_t n = x.size() & -x.size();
  std::vector<double> y(x.size());
  for (size_t i = 0; i < x.size(); i++) {
    for (size_t j = 0; j < n; j++) {
      const bool negative = __builtin_parityll(i % n & j);
      y[i] += negative ? -x[i / n * n + j] : x[i / n * n + j];
    }
    if (query) y[i] /= static_cast<double>(n);
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
                          : c.type == KvType::e5m2 ? 1.0 / 8
                                                   : 2e-6;
  // Half a code's smallest step, as a share of the head's largest magnitude.
  const double step = c.type == KvType::int8   ? 0.501 / 127
                      : c.type == KvType::e4m3 ? 1.0 / (448 * 1024)
                      : c.type == KvType::e5m2 ? 1e-9
                                               : 0.0;
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
      const double top_v = largest({value, value + c.head_dim});
      for (int d = 0; d < shape.hd_pad(); d++) {
        const float got_k = kv.key(block, at, h, d), got_v = kv.value(block, at, h, d);
        const double half_k = step * largest(want), half_v = step * top_v;
        ok &= d < c.head_dim ? close_to(got_k, want[static_cast<size_t>(d)], kv_error, half_k) &&
                                   close_to(got_v, value[d], kv_error, half_v)
                             : got_k == 0.0f && got_v == 0.0f;
      }
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
       {KvType::bf16, KvType::f16, KvType::f32, KvType::int8, KvType::e4m3, KvType::e5m2}) {
    for (int head_dim : {16, 40, 48, 64, 80, 100, 128}) {
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
KERNEL_TEST_OF(fp8_codes_are_the_nearest_and_of_two_as_near_the_even_one, rope_store) {
  for (KvType type : {KvType::e4m3, KvType::e5m2}) {
    const float largest = type == KvType::e4m3 ? 448.0f : 57344.0f;
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
}

KERNEL_TEST_OF(a_key_that_is_not_finite_makes_its_whole_head_nan, rope_store) {
  for (KvType type : {KvType::int8, KvType::e4m3, KvType::e5m2}) {
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
