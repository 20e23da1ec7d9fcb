// Microseconds to sample a token from one row of logits on one thread, by distribution and filter.
// Prints one JSON record a line with the best and the median CPU time of 300 draws. After a build
// in BUILD, from the repository root:
//   g++ -std=c++17 -O2 -Icsrc benchmarks/sample_bench.cpp BUILD/libcpuserve_core.a
//     -fopenmp -o sample_bench
//   ./sample_bench [--vocab 151936] [--isa avx512_bf16]
#include <time.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "kernels/resolve.h"

namespace {
using namespace cpuserve;

constexpr int kDraws = 300;

double thread_us() {
  timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return 1e6 * static_cast<double>(t.tv_sec) + 1e-3 * static_cast<double>(t.tv_nsec);
}

struct Filter {
  const char* name;
  float top_p;
  int32_t top_k;
  float min_p;
};

// Gaussian logits with standard deviation `deviation`: 1 is the flattest distribution of real
// models; 4 leaves some hundred ids at top_p.
void measure(const KernelTable& kernels, int vocab, double deviation, const Filter& filter) {
  std::mt19937 random(7);
  std::normal_distribution<float> normal(0.0f, static_cast<float>(deviation));
  std::vector<float> source(static_cast<size_t>(vocab)), logits(source.size());
  for (float& x : source) x = normal(random);
  void* scratch = std::aligned_alloc(64, (source.size() * 8 + 65536 + 63) / 64 * 64);
  SampleParams p{};
  p.temperature = 1.0f;
  p.top_p = filter.top_p;
  p.top_k = filter.top_k;
  p.min_p = filter.min_p;
  p.repetition = 1.0f;
  p.num_allowed = -1;
  std::vector<double> times;
  for (int i = 0; i < kDraws; i++) {
    std::memcpy(logits.data(), source.data(), source.size() * sizeof(float));
    p.seed = static_cast<uint64_t>(i);
    SampleArgs a{};
    a.logits = logits.data();
    a.vocab = vocab;
    a.params = &p;
    a.target = -1;
    a.num_top = -1;
    a.scratch = scratch;
    const double start = thread_us();
    kernels.sample(a);
    times.push_back(thread_us() - start);
  }
  std::free(scratch);
  std::sort(times.begin(), times.end());
  std::printf(
      "{\"metric\":\"sample\",\"unit\":\"us\",\"isa\":\"%s\",\"vocab\":%d,\"deviation\":%g,"
      "\"filter\":\"%s\",\"best\":%.1f,\"median\":%.1f}\n",
      kernels.isa, vocab, deviation, filter.name, times.front(), times[times.size() / 2]);
}

}  // namespace

int main(int argc, char** argv) {
  int vocab = 151936;
  const char* isa = "avx512_bf16";
  for (int i = 1; i + 1 < argc; i += 2) {
    if (std::strcmp(argv[i], "--vocab") == 0) vocab = std::atoi(argv[i + 1]);
    if (std::strcmp(argv[i], "--isa") == 0) isa = argv[i + 1];
  }
  const KernelTable* kernels = find_kernels(isa);
  if (kernels == nullptr || vocab < 1) {
    std::fprintf(stderr, "sample_bench: no level %s, or no vocabulary\n", isa);
    return 2;
  }
  const Filter filters[] = {{"none", 1.0f, 0, 0.0f},
                            {"top_p 0.9", 0.9f, 0, 0.0f},
                            {"top_p 0.5", 0.5f, 0, 0.0f},
                            {"top_k 50", 1.0f, 50, 0.0f},
                            {"min_p 0.05", 1.0f, 0, 0.05f}};
  for (double deviation : {1.0, 2.0, 4.0}) {
    for (const Filter& filter : filters) measure(*kernels, vocab, deviation, filter);
  }
  return 0;
}
