// A decoder of one layer for the tests of the executor, and the words of its steps.
#pragma once
#include <algorithm>
#include <atomic>
#include <cmath>
#include <random>
#include <stdexcept>
#include <string_view>

#include "base/allocations.h"
#include "cpu/features.h"
#include "kernels/resolve.h"
#include "runtime/executor.h"
#include "testing.h"

namespace executor_decoder {

using namespace cpuserve;

inline const KernelTable* kernels = nullptr;  // the kernels that main() selected
inline bool few = false;                      // --few

constexpr int64_t kVocab = 50, kWidth = 48, kHeads = 3, kHeadDim = 16, kHidden = 40;
constexpr int64_t kMaxTokens = 900, kBlocks = 40;

inline std::vector<float> random_floats(int64_t count, uint32_t seed) {
  std::mt19937 engine(seed);
  std::vector<float> out(static_cast<size_t>(count));
  for (float& x : out) x = (static_cast<float>(engine() >> 8) / (1 << 23) - 1.0f) * 0.3f;
  return out;
}

// One decoder layer with one KV head, and maybe a mixture of experts after it.
struct Decoder {
  Program program;
  std::vector<std::pair<Id, int64_t>> matrices;  // id, elements
  std::vector<std::pair<Id, int64_t>> vectors;

  Id matrix(const char* name, int64_t n, int64_t k, std::vector<int64_t> parts, bool glu = false) {
    matrices.emplace_back(
        program.add_matrix(name, WeightKind::dense_f32, n, k, std::move(parts), glu), n * k);
    return matrices.back().first;
  }
  Id vector(const char* name, int64_t count) {
    vectors.emplace_back(program.add_vector(name, count), count);
    return vectors.back().first;
  }

  // Operations that touch own rows of tokens alone stand next to each other, and next to others.
  void add_mixture(Id x, Id h, int32_t experts) {
    constexpr int32_t kChosen = 2;
    Program& p = program;
    const Id scores = p.add_value("scores", experts, ActFormat::f32);
    const Id routing = p.add_value("routing", 2 * kChosen, ActFormat::f32);
    const Id dispatched = p.add_value("dispatched", kWidth, ActFormat::f32, kChosen);
    const Id inner = p.add_value("inner", kHidden, ActFormat::f32, kChosen);
    const Id result = p.add_value("result", kWidth, ActFormat::f32, kChosen);
    p.add(RmsNormOp{x, h, vector("mixture norm", kWidth), 1e-5f});
    p.add(LinearOp{h, scores, matrix("router", experts, kWidth, {experts}), kNone, Activation::none,
                   false, false, 0});
    p.add(RouteOp{scores, routing, experts, kChosen, Score::softmax, true, 1.0f, kNone});
    p.add(DispatchOp{h, routing, dispatched});
    std::vector<Id> in, out;
    for (int32_t e = 0; e < experts; e++) {
      in.push_back(matrix("expert up", 2 * kHidden, kWidth, {kHidden, kHidden}, true));
    }
    for (int32_t e = 0; e < experts; e++) {
      out.push_back(matrix("expert down", kWidth, kHidden, {kWidth}));
    }
    p.add(ExpertLinearOp{dispatched, routing, inner, in, {}, Activation::silu, true});
    p.add(ExpertLinearOp{inner, routing, result, out, {}, Activation::none, false});
    p.add(CombineOp{result, routing, h, false});
    p.add(ScaleOp{h, vector("factors", kWidth)});
    p.add(AddOp{h, x});
  }

  explicit Decoder(float scale = 1, float softcap = 0, const KernelTable& table = *kernels,
                   int32_t experts = 0)
      : program(table, kMaxTokens, 4) {
    Program& p = program;
    const Id x = p.add_value("x", kWidth, ActFormat::f32);
    const Id h = p.add_value("h", kWidth, ActFormat::f32);
    const Id qkv = p.add_value("qkv", (kHeads + 2) * kHeadDim, ActFormat::f32);
    const Id q = p.add_value("q", kHeads * kHeadDim, ActFormat::f32);
    const Id a = p.add_value("a", kHeads * kHeadDim, ActFormat::f32);
    const Id g = p.add_value("g", kHidden, ActFormat::f32);
    const Id embed = matrix("embed", kVocab, kWidth, {kVocab});
    const Id norm = vector("norm", kWidth);
    const Id layer = p.add_kv_layer(1, kHeadDim);
    p.add(EmbedOp{x, embed, 1});
    p.add(RmsNormOp{x, h, norm, 1e-5f});
    const int64_t rows = (kHeads + 2) * kHeadDim;
    p.add(LinearOp{h, qkv, matrix("qkv", rows, kWidth, {kHeads * kHeadDim, kHeadDim, kHeadDim}),
                   kNone, Activation::none, false, false, 0});
    p.add(RopeStoreOp{qkv, q, layer, kHeads, 0, kNone, kNone, kNone, kNone, 1e-5f});
    p.add(AttentionOp{q, a, layer, kHeads, 0.25f, 0, 0, kNone, kNone});
    p.add(LinearOp{a, x, matrix("o", kWidth, kHeads * kHeadDim, {kWidth}), kNone, Activation::none,
                   false, true, 0});
    p.add(LinearOp{x, g, matrix("up", 2 * kHidden, kWidth, {kHidden, kHidden}, true), kNone,
                   Activation::silu, true, false, 0});
    p.add(LinearOp{g, x, matrix("down", kWidth, kHidden, {kWidth}), kNone, Activation::none, false,
                   true, 0});
    if (experts > 0) add_mixture(x, h, experts);
    p.add(LogitsOp{x, embed, kNone, scale, softcap});
  }

  void load(Executor& e) const {
    uint32_t seed = 1;
    for (const auto& [id, count] : matrices) {
      const std::vector<float> data = random_floats(count, seed++);
      const Matrix& m = program.matrices()[static_cast<size_t>(id)];
      std::vector<SourceTensor> parts;
      const auto* at = reinterpret_cast<const uint8_t*>(data.data());
      const size_t bytes = static_cast<size_t>(m.k) * sizeof(float);
      for (int64_t rows : m.parts) {
        parts.push_back({at, rows, bytes, SourceType::f32, nullptr});
        at += static_cast<size_t>(rows) * bytes;
      }
      e.weights().load_matrix(e.team(), id, parts);
    }
    load_vectors(e);
  }

  void load_vectors(Executor& e) const {
    for (const auto& [id, count] : vectors) {
      const std::vector<float> ones(static_cast<size_t>(count), 1.0f);
      e.weights().load_vector(id, ones);
    }
  }
};

// Words of one sequence of `ids` from `start` on, all its rows scored; blocks 0, 1, 2 ... in slot
// 0, which has the first `kept` of them.
inline std::vector<int32_t> words_of(const std::vector<int32_t>& ids, int32_t start,
                                     int32_t kept = 0) {
  const auto n = static_cast<int32_t>(ids.size());
  const int32_t keys = start + n, blocks = (keys + kBlock - 1) / kBlock - kept;
  std::vector<int32_t> w{n, 1, n, blocks, 0, 0, 0, 0, 0, 0, 0, 0};
  const auto append = [&w](int32_t count, auto value) {
    for (int32_t i = 0; i < count; i++) w.push_back(value(i));
  };
  append(n, [&](int32_t i) { return ids[static_cast<size_t>(i)]; });
  append(n, [&](int32_t i) { return start + i; });
  w.insert(w.end(), {0, n, keys, 0, kept, 0, blocks});
  append(blocks, [&](int32_t i) { return kept + i; });
  append(n, [](int32_t i) { return i; });
  for (int32_t fill : {0, 1, -1}) append(n, [fill](int32_t) { return fill; });
  return w;
}

// Words of a sequence whose last token is `last` and whose further tokens are `drafts`, which its
// rows sample and verify.
inline std::vector<int32_t> verifying(int32_t last, const std::vector<int32_t>& drafts,
                                      int32_t start) {
  std::vector<int32_t> ids{last};
  ids.insert(ids.end(), drafts.begin(), drafts.end());
  std::vector<int32_t> w = words_of(ids, start);
  const auto rows = static_cast<std::ptrdiff_t>(ids.size());
  std::fill(w.end() - 2 * rows, w.end() - rows, -1);  // row_target: sample
  std::fill(w.end() - rows, w.end(), 3);              // row_top
  w.insert(w.end(), drafts.begin(), drafts.end());
  w.push_back(-1);
  w[7] = static_cast<int32_t>(rows);
  return w;
}

inline std::vector<int32_t> token_ids(int64_t count) {
  std::mt19937 engine(11);
  std::vector<int32_t> ids(static_cast<size_t>(count));
  for (int32_t& id : ids) id = static_cast<int32_t>(engine() % kVocab);
  return ids;
}

// Logits of `ids` run in chunks of `step` tokens by a team of `threads`.
inline std::vector<float> logits_of(int threads, const std::vector<int32_t>& ids, size_t step,
                                    const std::vector<int>& ranks = {},
                                    const Decoder& decoder = Decoder()) {
  Team team(threads, {}, false, ranks);
  std::vector<float> out(ids.size() * kVocab);
  team.run([&] {
    Executor e(team, decoder.program, kBlocks, KvType::f32, 2, 4);
    decoder.load(e);
    for (size_t at = 0; at < ids.size(); at += step) {
      const size_t n = std::min(step, ids.size() - at);
      const std::vector<int32_t> part(ids.begin() + static_cast<std::ptrdiff_t>(at),
                                      ids.begin() + static_cast<std::ptrdiff_t>(at + n));
      e.step_logits(words_of(part, static_cast<int32_t>(at)), out.data() + at * kVocab);
    }
  });
  return out;
}

constexpr AttentionLimits kLimits{4096, 4, 100'000, 400'000};  // of the plans below

// Of slots without tables.
inline StepInput parse_alone(const std::vector<int32_t>& words, const StepLimits& limits,
                             Span<const int32_t> masks = {}) {
  BlockTables tables(limits.num_slots, limits.groups);
  return parse_step(words, limits, tables, masks);
}

inline StepInput one_sequence(std::vector<int32_t>& words, int32_t queries, int32_t keys) {
  words = words_of(std::vector<int32_t>(static_cast<size_t>(queries)), keys - queries);
  return parse_alone(words, {4096, 4, INT32_MAX, 1 << 20, 2, kVocab, kVocab, 4});
}

// Counts how often each (row, head, chunk) that a row can see is visited.
inline bool covers_everything_once(const AttentionPlan& plan, int32_t queries, int32_t keys) {
  const AttentionGeometry& g = plan.geometry();
  const int64_t rows = int64_t{queries} * g.group(), chunks = keys / kChunk + 1;
  std::vector<int> visits(static_cast<size_t>(g.kv_heads * rows * chunks));
  for (const AttentionUnit& u : plan.units()) {
    for (int64_t i = 0; i < u.heads * u.rows; i++) {
      const int64_t head = u.kv_head + i / u.rows, r = u.row0 + i % u.rows;
      for (int32_t c = u.chunk0; c < u.chunk1; c++) {
        visits[static_cast<size_t>((head * rows + r) * chunks + c)]++;
      }
    }
  }
  for (int32_t head = 0; head < g.kv_heads; head++) {
    for (int64_t r = 0; r < rows; r++) {
      const int64_t position = keys - queries + r / g.group();
      const int64_t first = g.window ? std::max<int64_t>(0, position - g.window + 1) : 0;
      for (int64_t c = first / kChunk; c <= position / kChunk; c++) {
        if (visits[static_cast<size_t>((head * rows + r) * chunks + c)] != 1) return false;
      }
    }
  }
  return true;
}

}  // namespace executor_decoder
