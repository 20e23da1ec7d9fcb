// Prints the modelled idle share of a layer for the thread counts of real machines,
// as the tables of docs/design/modelled-speed.md, or each operation of one case.
//
//   simulate                                 the tables
//   simulate --hybrid yes                    CPUs with fast and slow cores
//   simulate --model NAME [--threads T] [--ranks R]    the operations of a model's layer
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "work_simulator.h"

namespace cpuserve::simulate {
namespace {

constexpr int kThreads[] = {2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192};
constexpr int kRanks[] = {1, 2, 4, 8};

// Returns a cell of the table: the idle share in percent,
// or its range over the numbers of ranks, such as "2-5".
std::string cell(const ModelShape& model, const StepKind& step, int threads) {
  double least = 1, most = 0;
  for (const int ranks : kRanks) {
    if (ranks > threads) continue;
    const double idle = run_layer(server(threads, ranks), model, step.sequences).sum().idle();
    least = std::min(least, idle);
    most = std::max(most, idle);
  }
  char text[32];
  const int low = static_cast<int>(100 * least + 0.5), high = static_cast<int>(100 * most + 0.5);
  std::snprintf(text, sizeof text, low == high ? "%d" : "%d-%d", low, high);
  return text;
}

void print_table(const StepKind& step) {
  std::printf("\n**%s**\n\n| model |", step.name);
  for (const int threads : kThreads) std::printf(" %d |", threads);
  std::printf("\n|---|");
  for (size_t i = 0; i < std::size(kThreads); i++) std::printf("---|");
  std::printf("\n");
  for (const ModelShape& model : kModels) {
    std::printf("| %s |", model.name);
    for (const int threads : kThreads) std::printf(" %s |", cell(model, step, threads).c_str());
    std::printf("\n");
  }
}

// Prints a table of CPUs with slow cores:
// the time of a layer on the fast cores alone divided by its time on all cores
// (the mean of all models and the model that gains least), and the idle share.
void print_hybrids() {
  std::printf("\n| CPU | threads |");
  for (const StepKind& step : step_kinds()) std::printf(" %s |", step.name);
  std::printf("\n|---|---|");
  for (size_t i = 0; i < step_kinds().size(); i++) std::printf("---|");
  std::printf("\n");
  for (const HybridCpu& cpu : kHybrids) {
    std::printf("| %s | %d + %d |", cpu.name, cpu.fast, cpu.helpers());
    for (const StepKind& step : step_kinds()) {
      double sum = 0, least = 1e99, idle = 0;
      for (const ModelShape& model : kModels) {
        const Time alone = run_layer(hybrid(cpu.fast, 0), model, step.sequences).sum();
        const Time all = run_layer(hybrid(cpu.fast, cpu.helpers()), model, step.sequences).sum();
        sum += alone.end / all.end;
        least = std::min(least, alone.end / all.end);
        idle += all.idle();
      }
      const auto models = static_cast<double>(std::size(kModels));
      std::printf(" %.2f (%.2f), %.0f %% |", sum / models, least, 100 * idle / models);
    }
    std::printf("\n");
  }
}

void print_operation(const char* name, const Time& t) {
  std::printf("  %-10s %9.2f us   idle %5.1f %%   lost %5.1f %%\n", name, 1e6 * t.end,
              100 * t.idle(), 100 * t.lost());
}

void print_model(const ModelShape& model, int threads, int ranks) {
  const Machine machine = server(threads, ranks);
  for (const StepKind& step : step_kinds()) {
    const Layer layer = run_layer(machine, model, step.sequences);
    std::printf("%s, %d threads, %d ranks, %s\n", model.name, threads, ranks, step.name);
    print_operation("qkv", layer.qkv);
    print_operation("attention", layer.attention);
    print_operation("out", layer.out);
    print_operation("mlp in", layer.mlp_in);
    print_operation("mlp out", layer.mlp_out);
    print_operation("layer", layer.sum());
  }
}

int main_of(int argc, char** argv) {
  std::string name;
  int threads = 64, ranks = 1;
  for (int i = 1; i < argc; i += 2) {
    const std::string option = argv[i], value = i + 1 < argc ? argv[i + 1] : "";
    const int number = std::atoi(value.c_str());
    if (option == "--hybrid" && value == "yes") {
      print_hybrids();
      return 0;
    }
    if (option == "--model" && !value.empty()) {
      name = value;
    } else if (option == "--threads" && number > 0) {
      threads = number;
    } else if (option == "--ranks" && number > 0) {
      ranks = number;
    } else {
      std::fprintf(stderr, "simulate: cannot use %s %s; its first lines list the options\n",
                   option.c_str(), value.c_str());
      return 2;
    }
  }
  if (ranks > threads) {
    std::fprintf(stderr, "simulate: %d ranks need at least as many threads, not %d\n", ranks,
                 threads);
    return 2;
  }
  if (name.empty()) {
    for (const StepKind& step : step_kinds()) print_table(step);
    return 0;
  }
  for (const ModelShape& model : kModels) {
    if (name != model.name) continue;
    print_model(model, threads, ranks);
    return 0;
  }
  std::fprintf(stderr, "simulate: no model %s; they are", name.c_str());
  for (const ModelShape& model : kModels) std::fprintf(stderr, " '%s'", model.name);
  std::fprintf(stderr, "\n");
  return 2;
}

}  // namespace
}  // namespace cpuserve::simulate

int main(int argc, char** argv) { return cpuserve::simulate::main_of(argc, argv); }
