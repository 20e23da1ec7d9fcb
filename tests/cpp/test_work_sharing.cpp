// Simulates how the threads of machines with 2 to 192 cores share the layers of public models, with
// the executor's own plans (benchmarks/work_simulator.h). The tables are in
// docs/design/modelled-speed.md.
#include <cstdio>

#include "../../benchmarks/work_simulator.h"
#include "main.h"

using namespace cpuserve;
using namespace cpuserve::simulate;

namespace {

constexpr int kThreads[] = {2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192};
constexpr int kRanks[] = {1, 2, 4, 8};
// Threads may be idle for this part of a layer, if the layer has this many weights for each of
// them: a model of 1.2 billion weights in 16 layers has them on 128 threads. With less work, some
// threads have no panel, or no chunk of keys, that could be theirs; the tables show what that
// costs.
constexpr double kMostIdle = 0.06;
constexpr int64_t kLeastWeights = 450'000;

// The idle share of every layer that is large enough, on every machine; returns their number.
int check_layers(const StepKind& step, const Machine& core) {
  int checked = 0;
  for (const ModelShape& model : kModels) {
    for (const int threads : kThreads) {
      if (model.layer_weights() < kLeastWeights * threads) continue;
      for (const int ranks : kRanks) {
        if (ranks > threads) continue;
        Machine machine = core;
        machine.threads = threads;
        machine.ranks = ranks;
        machine.memory_read = server(threads, ranks).memory_read;
        const double idle = run_layer(machine, model, step.sequences).sum().idle();
        EXPECT(idle <= kMostIdle);
        if (idle > kMostIdle) {
          std::printf("%s, %s, %d threads in %d ranks: idle %.1f %%\n", model.name, step.name,
                      threads, ranks, 100 * idle);
        }
        checked++;
      }
    }
  }
  return checked;
}

Machine avx2() {
  Machine m = server(2, 1);
  m.linear_seconds = 1 / 50e9;
  m.attention_seconds = 1 / 40e9;
  m.tile_rows = 4;
  m.tile_panels = 1;
  return m;
}

}  // namespace

TEST(threads_that_decode_are_idle_for_at_most_6_percent_of_a_layer) {
  EXPECT(check_layers(step_kinds()[0], server(2, 1)) > 700);
  EXPECT(check_layers(step_kinds()[0], avx2()) > 700);
}

TEST(threads_that_decode_many_streams_are_idle_for_at_most_6_percent_of_a_layer) {
  EXPECT(check_layers(step_kinds()[1], server(2, 1)) > 700);
}

TEST(threads_that_compute_a_prompt_are_idle_for_at_most_6_percent_of_a_layer) {
  EXPECT(check_layers(step_kinds()[3], server(2, 1)) > 700);
  EXPECT(check_layers(step_kinds()[3], avx2()) > 700);
}

// P and E cores: threads claim work, so slow cores take the part that they can compute.
TEST(slow_cores_speed_up_prompts_and_cost_one_stream_little) {
  constexpr double kLeastOfIdeal = 0.93, kLeastDecode = 0.94;
  for (const HybridCpu& cpu : kHybrids) {
    const Machine alone = hybrid(cpu.fast, 0), all = hybrid(cpu.fast, cpu.helpers());
    for (const ModelShape& model : kModels) {
      if (model.layer_weights() < kLeastWeights * all.threads) continue;
      const auto gain = [&](const StepKind& step) {
        const double with = run_layer(all, model, step.sequences).sum().end;
        return run_layer(alone, model, step.sequences).sum().end / with;
      };
      const double prompt = gain(step_kinds()[3]), decode = gain(step_kinds()[0]);
      const double idle = run_layer(all, model, step_kinds()[3].sequences).sum().idle();
      const double ideal = all.all_speeds() / alone.all_speeds();
      const bool good = prompt >= kLeastOfIdeal * ideal && decode >= kLeastDecode &&
                        gain(step_kinds()[1]) > 1 && idle <= kMostIdle;
      EXPECT(good);
      if (!good) {
        std::printf("%s, %s: prompt %.2f of %.2f, decode %.2f, idle %.1f %%\n", cpu.name,
                    model.name, prompt, ideal, decode, 100 * idle);
      }
    }
  }
}

// The simulator itself, on work whose end is known.
TEST(the_simulator_agrees_with_arithmetic) {
  Machine m;
  m.threads = 2;
  m.claim_seconds = 0;
  m.core_read = m.complex_read = m.memory_read = 1e99;
  m.linear_seconds = 1;
  // 9 strips as half strips: each thread computes 18 panels of 16 columns.
  const Time even = run_linear(m, {9 * 64, 1, 1, 2}, 100);
  EXPECT(even.end > 18 * 16 * 100 * 0.999 && even.end < 18 * 16 * 102.001);
  EXPECT(even.idle() < 0.001);
  // A thread of half the speed computes a third of it.
  m.speeds = {1, 0.5};
  const Time half = run_linear(m, {9 * 64, 1, 1, 2}, 100);
  EXPECT(half.end > 24 * 16 * 100 * 0.999 && half.end < 26 * 16 * 102.001);
  EXPECT(half.even <= half.end && half.even > 24 * 16 * 100);
  m.speeds = {};
  // Of three strips that stay whole, one thread computes two.
  const Time uneven = run_linear(m, {3 * 64, 1, 4, 2}, 1);
  EXPECT(uneven.end == 8 * 16 && uneven.even == 6 * 16);
  // Two threads share the memory, and the last strip is read by one alone, at a core's rate.
  m.linear_seconds = 0;
  m.memory_read = 128;
  m.core_read = 100;
  const Time read = run_linear(m, {3 * 64, 1, 4, 2}, 1);
  EXPECT(read.end > 2 + 1.27 && read.end < 2 + 1.29);
}
