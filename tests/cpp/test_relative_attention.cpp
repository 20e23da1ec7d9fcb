// Attention with scores that depend on the distance between query and key.
#include <algorithm>
#include <cmath>
#include <vector>

#include "harness.h"

using namespace cpuserve;
using harness::Buffer;
using harness::fewer;
using harness::Rng;

namespace {

constexpr int64_t kRows = 24;  // of the tables

size_t count(int64_t rows, int64_t columns) { return static_cast<size_t>(rows * columns); }

// A head of a sequence of n tokens, beside another head that must not be touched.
struct Head {
  const int64_t n;
  const int32_t width;
  const int64_t stride;
  Buffer<float> qkv, keys, queries, biases, places, scratch;

  Head(int64_t tokens, int32_t columns, uint64_t seed)
      : n(tokens),
        width(columns),
        stride(6 * columns + 5),
        qkv(count(tokens, 6 * columns + 5)),
        keys(count(columns, kRows)),
        queries(count(columns, kRows)),
        biases(kRows),
        places(static_cast<size_t>(2 * tokens + 1)),
        scratch(relative_attention_scratch(tokens, columns) / sizeof(float)) {
    Rng rng(seed);
    for (Buffer<float>* of : {&qkv, &keys, &queries, &biases}) {
      for (size_t i = 0; i < of->size(); i++) (*of)[i] = rng.uniform();
    }
    for (size_t i = 0; i < places.size(); i++) places[i] = static_cast<float>(rng.below(kRows));
    std::memset(scratch.data(), 0xff, scratch.size() * sizeof(float));  // NaN
  }

  RelativeAttentionArgs args(int tables, float* out) {
    RelativeAttentionArgs a{};
    a.q = qkv.data();
    a.k = a.q + 2 * width;
    a.v = a.q + 4 * width;
    a.stride = stride;
    a.n = n;
    a.width = width;
    a.key_table = tables & 1 ? keys.data() : nullptr;
    a.query_table = tables & 2 ? queries.data() : nullptr;
    a.bias_table = tables & 4 ? biases.data() : nullptr;
    a.count = kRows;
    a.places = places.data() + n;
    a.scale = 0.3f;
    a.out = out;
    a.out_stride = width + 3;
    a.scratch = scratch.data();
    return a;
  }

  // Returns the result of row i in fp64.
  std::vector<double> expected(int tables, int64_t i) const {
    std::vector<double> p(static_cast<size_t>(n)), out(static_cast<size_t>(width));
    double sum = 0.0;
    const float* q = qkv.data() + i * stride;
    for (int64_t j = 0; j < n; j++) {
      const float* k = qkv.data() + j * stride + 2 * width;
      const auto row = static_cast<int64_t>(places[static_cast<size_t>(n + j - i)]);
      double s = 0.0;
      for (int64_t d = 0; d < width; d++) {
        const size_t at = static_cast<size_t>(d * kRows + row);
        s += static_cast<double>(q[d]) * k[d];
        if (tables & 1) s += static_cast<double>(q[d]) * keys[at];
        if (tables & 2) s += static_cast<double>(k[d]) * queries[at];
      }
      s *= static_cast<double>(0.3f);
      if (tables & 4) s += static_cast<double>(biases[static_cast<size_t>(row)]);
      sum += p[static_cast<size_t>(j)] = std::exp(s);
    }
    for (int64_t j = 0; j < n; j++) {
      const float* v = qkv.data() + j * stride + 4 * width;
      for (int64_t d = 0; d < width; d++) {
        out[static_cast<size_t>(d)] += p[static_cast<size_t>(j)] / sum * static_cast<double>(v[d]);
      }
    }
    return out;
  }
};

}  // namespace

KERNEL_TEST_OF(relative_attention_matches_fp64_and_rows_do_not_depend_on_others,
               relative_attention) {
  const int64_t longest = fewer(200, 70);
  for (const int64_t n : {int64_t{1}, int64_t{2}, int64_t{63}, int64_t{65}, longest}) {
    for (const int32_t width : {4, 20, 64}) {
      Head head(n, width, static_cast<uint64_t>(n + width));
      const int64_t stride = width + 3;
      for (int tables = 1; tables < 8; tables++) {
        if (harness::few_shapes() && tables != 3 && tables != 4) continue;
        Buffer<float> whole(count(n, stride)), alone(count(n, stride));
        RelativeAttentionArgs a = head.args(tables, whole.data());
        for (a.row0 = 0; a.row0 < n; a.row0 += a.rows) {
          a.rows = std::min(kRelativeRows, n - a.row0);
          k.relative_attention(a);
        }
        a.out = alone.data();
        for (int64_t i = 0; i < n; i++) {
          a.row0 = i;
          a.rows = 1;
          k.relative_attention(a);
        }
        CHECK(std::memcmp(whole.data(), alone.data(), whole.size() * sizeof(float)) == 0);
        for (int64_t i = 0; i < n; i += std::max<int64_t>(1, n / 7)) {
          const std::vector<double> want = head.expected(tables, i);
          for (int64_t d = 0; d < width; d++) {
            CHECK_NEAR(whole[static_cast<size_t>(i * stride + d)], want[static_cast<size_t>(d)],
                       2e-5);
          }
        }
      }
    }
  }
}
