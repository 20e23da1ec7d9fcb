// Compares the simulator's prediction of a step on two threads with the measured step.
//
//   step_agreement [MODEL [LAYERS [ROUNDS]]]        default: 'Llama 3.2 1B' 4 11
//
// One executor runs a step on one thread, and another runs the same step on two threads, in turns.
// The prediction uses the times of the operations on one thread, and three probes of two threads:
// their bandwidth, the time of a barrier, and how much slower a thread multiplies
// while the other one works. A simulation divides the work among the threads (work_simulator.h).
// Each round is predicted from its own times, because the machine's speed drifts.
// Prints for each step the medians of all rounds: predicted, measured, and the difference.
// Needs two idle CPUs.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "measure.h"
#include "runtime/executor.h"
#include "work_simulator.h"

namespace cpuserve::simulate {
namespace {

constexpr int64_t kMostTokens = 512, kBlocks = 64;
constexpr int32_t kVocab = 32000;

// A decoder model with the sizes of a ModelShape, `layers` layers and bf16 weights.
class Decoder {
 public:
  Decoder(const KernelTable& table, const ModelShape& s, int layers)
      : program_(table, kMostTokens, 1) {
    Program& p = program_;
    const Id x = p.add_value("x", s.width, ActFormat::f32);
    const Id h = p.add_value("h", s.width, ActFormat::bf16);
    const Id qkv = p.add_value("qkv", s.qkv(), ActFormat::f32);
    const Id q = p.add_value("q", s.attended(), ActFormat::bf16);
    const Id a = p.add_value("a", s.attended(), ActFormat::bf16);
    const Id g = p.add_value("g", s.intermediate, ActFormat::bf16);
    const Id embed = matrix("embed", kVocab, s.width, {kVocab}, false);
    const Id norm = p.add_vector("norm", s.width);
    p.add(EmbedOp{x, embed, 1});
    for (int i = 0; i < layers; i++) {
      const Id layer = p.add_kv_layer(s.kv_heads, s.head_dim);
      const int64_t kv = int64_t{s.kv_heads} * s.head_dim;
      const float scale = 1.0f / static_cast<float>(s.head_dim);
      p.add(RmsNormOp{x, h, norm, 1e-5f});
      linear(h, qkv, matrix("qkv", s.qkv(), s.width, {s.attended(), kv, kv}, false), false);
      p.add(RopeStoreOp{qkv, q, layer, s.q_heads, 0, kNone, kNone, kNone, kNone, 1e-5f});
      p.add(AttentionOp{q, a, layer, s.q_heads, scale, s.window, 0, kNone, kNone});
      linear(a, x, matrix("out", s.width, s.attended(), {s.width}, false), true);
      p.add(RmsNormOp{x, h, norm, 1e-5f});
      const std::vector<int64_t> halves{s.intermediate, s.intermediate};
      linear(h, g, matrix("in", 2 * s.intermediate, s.width, halves, true), false, true);
      linear(g, x, matrix("down", s.width, s.intermediate, {s.width}, false), true);
    }
    p.add(RmsNormOp{x, h, norm, 1e-5f});
    p.add(LogitsOp{h, embed, kNone, 1, 0});
  }

  const Program& program() const { return program_; }

  void load(Executor& e) const {
    std::mt19937 engine(1);
    for (size_t i = 0; i < program_.matrices().size(); i++) {
      const Matrix& m = program_.matrices()[i];
      const size_t row = static_cast<size_t>(m.k) * sizeof(float);
      std::vector<float> data(static_cast<size_t>(m.n * m.k));
      const float spread = 1.0f / static_cast<float>(m.k);
      for (float& v : data) v = static_cast<float>(static_cast<int>(engine() >> 24) - 128) * spread;
      std::vector<SourceTensor> parts;
      const auto* at = reinterpret_cast<const uint8_t*>(data.data());
      for (const int64_t rows : m.parts) {
        parts.push_back({at, rows, row, SourceType::f32, nullptr});
        at += static_cast<size_t>(rows) * row;
      }
      e.weights().load_matrix(e.team(), static_cast<Id>(i), parts);
    }
    const std::vector<float> ones(static_cast<size_t>(program_.vectors()[0].count), 1.0f);
    e.weights().load_vector(0, ones);
  }

 private:
  Id matrix(const char* name, int64_t n, int64_t k, std::vector<int64_t> parts, bool glu) {
    return program_.add_matrix(name, WeightKind::dense_bf16, n, k, std::move(parts), glu);
  }
  void linear(Id x, Id out, Id m, bool add, bool glu = false) {
    program_.add(
        LinearOp{x, out, m, kNone, glu ? Activation::silu : Activation::none, glu, add, 0});
  }

  Program program_;
};

// Returns the int32 words of a step (runtime/executor.py: StepArrays) with one sequence:
// `tokens` tokens after `before` keys. Only the last token has logits. Its row has a target
// (row_target 0), so the step returns the log probability of id 0 and samples nothing.
std::vector<int32_t> words_of(int32_t tokens, int32_t before) {
  const int32_t keys = before + tokens, blocks = (keys + kBlock - 1) / kBlock;
  std::vector<int32_t> w{tokens, 1, 1, blocks, 0, 0, 0, 0};
  for (int32_t i = 0; i < tokens; i++) w.push_back((i * 7919 + 1) % kVocab);
  for (int32_t i = 0; i < tokens; i++) w.push_back(before + i);
  w.insert(w.end(), {0, tokens, keys, 0, blocks});
  for (int32_t i = 0; i < blocks; i++) w.push_back(i);
  w.insert(w.end(), {tokens - 1, 0, 0, -1});
  return w;
}

// The measured facts about the machine that the prediction uses.
struct Probes {
  std::vector<double> alone;  // the seconds that each operation takes on one thread
  double bandwidth, barrier;  // of two threads: bytes per second together; seconds of a barrier
  double slower;  // time of a thread's products while another thread works / their time alone
};

Machine machine_of(int threads) {
  Machine m;
  m.threads = threads;
  m.core_read = m.complex_read = m.memory_read = 1e99;
  return m;
}

// Predicts the seconds of a linear on two threads, if it takes `alone` seconds on one thread.
double predict_linear(const Matrix& matrix, const LinearKernel& kernel, int64_t rows, double alone,
                      double bandwidth) {
  const double elements = static_cast<double>(kPanel * matrix.k);
  const LinearSize size{matrix.panels() * kPanel, matrix.k, matrix.grain,
                        static_cast<double>(matrix.panel_bytes) / elements};
  Machine m = machine_of(2);
  m.tile_rows = kernel.tile_rows;
  m.tile_panels = kernel.tile_panels;
  if (rows <= LinearPlan::kFewRows) {  // limited by reads: `alone` shows the rate of one thread
    m.linear_seconds = 0;
    m.core_read = static_cast<double>(matrix.bytes()) / alone;
    m.memory_read = std::min(bandwidth, 2 * m.core_read);
    return run_linear(m, size, rows).end;
  }
  m.linear_seconds = 1;
  Machine one = m;
  one.threads = 1;
  return alone * run_linear(m, size, rows).end / run_linear(one, size, rows).end;
}

double predict_attention(const CacheLayer& kv, const AttentionOp& op, const Sequences& sequences,
                         double alone) {
  const HeadSize heads{op.q_heads, kv.kv_heads, kv.head_dim, op.window};
  Machine one = machine_of(1), two = machine_of(2);
  one.attention_seconds = two.attention_seconds = 1;
  one.merge_seconds = two.merge_seconds = 0;
  return alone * run_attention(two, heads, sequences).end /
         run_attention(one, heads, sequences).end;
}

double predict(const Program& p, const Sequences& sequences, const Probes& probes) {
  const int64_t tokens = sequences[0].first;
  const BarrierPlan barriers = plan_barriers(p);
  double sum = 0;
  for (size_t i = 0; i < p.ops().size(); i++) {
    const Op& op = p.ops()[i];
    const double alone = probes.alone[i];
    const auto linear = [&](Id id, int64_t rows) {
      const Matrix& m = p.matrices()[static_cast<size_t>(id)];
      const LinearKernel& kernel = p.table().linear[static_cast<int>(m.kind)];
      const double seconds = predict_linear(m, kernel, rows, alone, probes.bandwidth);
      return rows > LinearPlan::kFewRows ? seconds * probes.slower : seconds;
    };
    if (const auto* l = std::get_if<LinearOp>(&op)) {
      sum += linear(l->matrix, tokens);
    } else if (const auto* logits = std::get_if<LogitsOp>(&op)) {
      sum += linear(logits->matrix, 1) + 2 * probes.barrier;
    } else if (const auto* a = std::get_if<AttentionOp>(&op)) {
      const CacheLayer& kv = p.kv_layers()[static_cast<size_t>(a->layer)];
      sum += predict_attention(kv, *a, sequences, alone) * probes.slower;
    } else {
      sum += alone * static_cast<double>((tokens + 1) / 2) / static_cast<double>(tokens);
    }
    if (tokens == 1 ? !barriers.row_wise[i] : barriers.before[i]) sum += probes.barrier;
  }
  return sum;
}

double total(const std::vector<double>& x) { return std::accumulate(x.begin(), x.end(), 0.0); }

void compare(Executor& one, Executor& two, const char* name, int32_t tokens, int32_t before,
             int rounds) {
  const std::vector<int32_t> words = words_of(tokens, before);
  constexpr int kBf16 = static_cast<int>(DotKind::bf16);
  std::vector<Probes> probes;
  std::vector<double> measured, slower;
  for (int round = -1; round < rounds; round++) {  // round -1 warms up
    const std::vector<double> start = one.op_seconds();
    const double one_rate = one.probe_dot(kBf16, 0.1), two_rate = two.probe_dot(kBf16, 0.1);
    one.profile(true);
    one.step(words);
    one.profile(false);
    Probes here{one.op_seconds(), two.probe_bandwidth(0.1), two.probe_barrier(1000), 1};
    const int64_t begin = now_ns();
    two.step(words);
    const double seconds = 1e-9 * static_cast<double>(now_ns() - begin);
    if (round < 0) continue;
    for (size_t i = 0; i < start.size(); i++) here.alone[i] -= start[i];
    probes.push_back(here);
    measured.push_back(seconds);
    slower.push_back(2 * one_rate / two_rate);
  }
  std::vector<double> alone, predicted, off;
  for (size_t i = 0; i < probes.size(); i++) {
    probes[i].slower = std::max(1.0, median(slower));
    alone.push_back(total(probes[i].alone));
    predicted.push_back(predict(two.program(), {{tokens, before + tokens}}, probes[i]));
    off.push_back(predicted.back() / measured[i] - 1);
  }
  std::printf("%-22s one thread %8.2f ms, two: predicted %8.2f, measured %8.2f ms: %+.1f %%\n",
              name, 1e3 * median(alone), 1e3 * median(predicted), 1e3 * median(measured),
              100 * median(off));
}

int main_of(int argc, char** argv) {
  const std::string name = argc > 1 ? argv[1] : "Llama 3.2 1B";
  const int layers = argc > 2 ? std::atoi(argv[2]) : 4, rounds = argc > 3 ? std::atoi(argv[3]) : 11;
  const auto* model = std::find_if(std::begin(kModels), std::end(kModels),
                                   [&](const ModelShape& m) { return name == m.name; });
  if (model == std::end(kModels) || layers < 1 || rounds < 1) {
    std::fprintf(stderr, "step_agreement: no model '%s', or not a number of layers and rounds\n",
                 name.c_str());
    return 2;
  }
  const std::string level = supported_isa_levels(cpu_info()).back();
  const Decoder decoder(*find_kernels(level), *model, layers);
  std::printf("%s, %d layers in bf16, level %s\n", model->name, layers, level.c_str());
  Team alone(1, {{0}}), pair(2, {{0}, {1}});
  pair.run([&] {
    Executor one(alone, decoder.program(), kBlocks, KvType::bf16, 1, 0);
    Executor two(pair, decoder.program(), kBlocks, KvType::bf16, 1, 0);
    decoder.load(one);
    decoder.load(two);
    compare(one, two, "decode after 512", 1, 512, 3 * rounds);
    compare(one, two, "prompt of 40", 40, 0, rounds);
    compare(one, two, "prompt of 120", 120, 0, rounds);
    compare(one, two, "prompt of 512", 512, 0, rounds);
  });
  return 0;
}

}  // namespace
}  // namespace cpuserve::simulate

int main(int argc, char** argv) { return cpuserve::simulate::main_of(argc, argv); }
