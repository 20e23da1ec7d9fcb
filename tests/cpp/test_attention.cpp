// attention and attention_merge against fp64 loops, and batch invariance bit for bit.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <random>
#include <string>

#include "attention_reference.h"
#include "harness.h"

using namespace attention_reference;

KERNEL_TEST(attention_bf16_matches_fp64_and_is_batch_invariant) { check_type(KvType::bf16, k); }
KERNEL_TEST(attention_f16_matches_fp64_and_is_batch_invariant) { check_type(KvType::f16, k); }
KERNEL_TEST(attention_f32_matches_fp64_and_is_batch_invariant) { check_type(KvType::f32, k); }

KERNEL_TEST(attention_int8_matches_fp64_and_is_batch_invariant) { check_type(KvType::int8, k); }
KERNEL_TEST(attention_e4m3_matches_fp64_and_is_batch_invariant) { check_type(KvType::e4m3, k); }
KERNEL_TEST(attention_int8_v4_matches_fp64_and_is_batch_invariant) {
  check_type(KvType::int8_v4, k);
}

// Encoders: a row sees the keys after its own, too, and a window reaches to both sides.
KERNEL_TEST(attention_to_both_sides_matches_fp64_and_is_batch_invariant) {
  unsigned turn = 0;
  for (KvType type :
       {KvType::bf16, KvType::f16, KvType::f32, KvType::int8, KvType::e4m3, KvType::int8_v4}) {
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
  for (KvType type : {KvType::bf16, KvType::f16, KvType::f32, KvType::int8, KvType::e4m3}) {
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
