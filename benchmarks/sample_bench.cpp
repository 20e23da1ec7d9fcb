// Measures the microseconds to sample a token from one row of random logits.
// Prints a JSON record for each distribution and filter, with medians of 300 draws.
//
// One thread wrote all logits, and the same thread samples:
//   alone                    the whole sampling
//   scan, weigh, tally, drop the passes that the threads of a team share
//   guess, cut, rest         the steps of one thread between and after these passes
// Two threads each wrote half of the logits, as a matrix product on two threads does.
// So half of the row is in the cache of the other core:
//   one_of_two               the whole sampling on one of the two threads
//   both                     the sampling with passes that the two threads share
// modelled: estimates of one_of_two and both for 8, 16 and 64 threads. They are calculated from the
// times above, the time of barriers, and the fetches from one core's cache to another core.
//
//   sample_bench [--vocab 151936] [--isa avx512_bf16]
#include <omp.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "measure.h"
#include "parallel/barrier.h"
#include "parallel/partition.h"

namespace {
using namespace cpuserve;

constexpr int kDraws = 300;
constexpr int kPiece = 8192;  // logits of one claim (kLogitPiece in runtime/operations/logits.cpp)
constexpr int kModelled[] = {8, 16, 64};

double thread_us() { return 1e6 * thread_seconds(); }

// Estimates the microseconds of a barrier if all threads arrive at the same time. The threads
// of a complex (cores that share an L3) count one after another, then the complexes. The value that
// releases the threads reaches them in the same way. parallel/barrier.h has the time of an arrival.
double barrier_us(int threads) {
  constexpr int kComplex = 8;
  constexpr double kNear = 0.03, kFar = 0.1;
  const int complexes = (threads + kComplex - 1) / kComplex;
  return 2 * (std::min(threads, kComplex) * kNear + (complexes > 1 ? complexes * kFar : 0));
}

struct Cost {
  double alone, scan, weigh, guess, tally, cut, drop, rest, one_of_two, both;
  double shared() const { return scan + weigh + tally + drop; }
  double one_thread() const { return guess + cut + rest; }
  int barriers() const { return tally > 0 ? 6 : 2; }
};

// Estimates the microseconds to fetch logits that all threads have written. of_two: the measured
// time with two threads, where one thread fetches half of the logits from the cache of the other
// thread's core. Of `threads` threads, each wrote 1 / threads of the logits and fetches the rest.
double fetches_us(double of_two, int threads) {
  return std::max(0.0, of_two) * 2 * (threads - 1) / threads;
}

double one_thread_us(const Cost& cost, int threads) {
  return cost.alone + fetches_us(cost.one_of_two - cost.alone, threads);
}

// Estimates the microseconds to sample a row if all threads share the passes over its logits.
// Threads claim pieces, so a pass takes as long as the thread with the most pieces.
double shared_us(const Cost& cost, int pieces, int threads) {
  const auto computing = [&](int of) {
    const int most = (pieces + of - 1) / of;
    return cost.shared() * most / pieces + cost.barriers() * barrier_us(of) + cost.one_thread();
  };
  return computing(threads) + fetches_us(cost.both - computing(2), threads);
}

struct Filter {
  const char* name;
  float top_p;
  int32_t top_k;
  float min_p;
};

// A row of Gaussian logits and the other inputs of sampling. A standard deviation
// of 1 is the flattest distribution of real models; with 4, top_p keeps some hundred ids.
struct Job {
  Job(int vocab, double deviation, const Filter& filter) : source(static_cast<size_t>(vocab)) {
    std::mt19937 random(7);
    std::normal_distribution<float> normal(0.0f, static_cast<float>(deviation));
    for (float& x : source) x = normal(random);
    logits = source;
    scratch = std::aligned_alloc(64, (source.size() * 8 + 65536 + 63) / 64 * 64);
    params.temperature = 1.0f;
    params.top_p = filter.top_p;
    params.top_k = filter.top_k;
    params.min_p = filter.min_p;
    params.repetition = 1.0f;
    params.num_allowed = -1;
  }
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;
  ~Job() { std::free(scratch); }

  void write(Range of) {
    std::memcpy(logits.data() + of.begin, source.data() + of.begin,
                static_cast<size_t>(of.size()) * sizeof(float));
  }
  SampleArgs next_draw() {
    params.seed++;
    SampleArgs a{};
    a.logits = logits.data();
    a.vocab = vocab();
    a.params = &params;
    a.target = -1;
    a.num_top = -1;
    a.scratch = scratch;
    return a;
  }
  int vocab() const { return static_cast<int>(source.size()); }
  int pieces() const { return (vocab() + kPiece - 1) / kPiece; }
  int32_t end_of(int piece) const { return std::min((piece + 1) * kPiece, vocab()); }

  std::vector<float> source, logits;
  SampleParams params{};
  void* scratch;
};

using Pass = void (*)(const SampleArgs&, int32_t, int32_t) noexcept;

Cost one_thread(const KernelTable& kernels, Job& job) {
  std::vector<double> alone, scan, weigh, guess, tally, cut, drop, rest;
  const auto timed = [](std::vector<double>& times, const auto& run) {
    const double start = thread_us();
    run();
    times.push_back(thread_us() - start);
  };
  for (int i = 0; i < kDraws; i++) {
    job.write({0, job.vocab()});
    SampleArgs whole = job.next_draw();
    timed(alone, [&] { kernels.sample(whole); });
    job.write({0, job.vocab()});
    SampleArgs a = job.next_draw();
    const auto all = [&](Pass pass) {
      for (int p = 0; p < job.pieces(); p++) pass(a, p * kPiece, job.end_of(p));
    };
    timed(scan, [&] { all(kernels.sample_scan); });
    timed(weigh, [&] { all(kernels.sample_weigh); });
    a.prepared = true;
    a.cut = shares_cut(a);
    if (a.cut) {
      timed(guess, [&] { kernels.sample_guess(a); });
      timed(tally, [&] { all(kernels.sample_tally); });
      timed(cut, [&] { kernels.sample_cut(a); });
      timed(drop, [&] { all(kernels.sample_drop); });
    }
    timed(rest, [&] { kernels.sample(a); });
  }
  return {median(alone),
          median(scan),
          median(weigh),
          median(guess),
          median(tally),
          median(cut),
          median(drop),
          median(rest),
          0,
          0};
}

// Returns the wall time to sample a row of logits that two threads have written. shares: the two
// threads share the passes; otherwise one of them samples.
double by_two(const KernelTable& kernels, Job& job, bool shares) {
  constexpr int kThreads = 2;
  std::vector<double> times;
  SampleArgs a{};
  Barrier barrier(1);
  barrier.expect({kThreads});
#pragma omp parallel num_threads(kThreads)
  {
    const int thread = omp_get_thread_num();
    WaitState state;
    state.configure(1'000'000'000, 0);
    const auto meet = [&](const auto& last) { barrier.wait(0, state, last); };
    const auto share = [&](Pass pass) {
      const Range mine = split(job.pieces(), thread, kThreads);
      for (int64_t p = mine.begin; p < mine.end; p++) {
        pass(a, static_cast<int32_t>(p) * kPiece, job.end_of(static_cast<int>(p)));
      }
      meet([] {});
    };
    for (int i = 0; i < kDraws; i++) {
      job.write(split(job.vocab(), thread, kThreads));
      meet([&] { a = job.next_draw(); });
      const int64_t start = now_ns();
      if (shares) {
        share(kernels.sample_scan);
        share(kernels.sample_weigh);
        if (shares_cut(a)) {
          meet([&] { kernels.sample_guess(a); });
          share(kernels.sample_tally);
          meet([&] { kernels.sample_cut(a); });
          share(kernels.sample_drop);
        }
      }
      if (thread > 0) {
        meet([] {});
        continue;
      }
      a.prepared = shares;
      a.cut = shares && shares_cut(a);
      kernels.sample(a);
      times.push_back(1e-3 * static_cast<double>(now_ns() - start));
      meet([] {});
    }
  }
  return median(times);
}

void print(const KernelTable& kernels, int vocab, double deviation, const Filter& filter) {
  Job job(vocab, deviation, filter);
  Cost cost = one_thread(kernels, job);
  cost.one_of_two = by_two(kernels, job, false);
  cost.both = by_two(kernels, job, true);
  std::printf(
      "{\"metric\":\"sample\",\"unit\":\"us\",\"isa\":\"%s\",\"vocab\":%d,\"deviation\":%g,"
      "\"filter\":\"%s\",\"alone\":%.1f,\"scan\":%.1f,\"weigh\":%.1f,\"guess\":%.1f,"
      "\"tally\":%.1f,\"cut\":%.1f,\"drop\":%.1f,\"rest\":%.1f,\"one_of_two\":%.1f,"
      "\"both\":%.1f,\"modelled\":{",
      kernels.isa, vocab, deviation, filter.name, cost.alone, cost.scan, cost.weigh, cost.guess,
      cost.tally, cost.cut, cost.drop, cost.rest, cost.one_of_two, cost.both);
  for (const int threads : kModelled) {
    std::printf("%s\"%d\":[%.1f,%.1f]", threads == kModelled[0] ? "" : ",", threads,
                one_thread_us(cost, threads), shared_us(cost, job.pieces(), threads));
  }
  std::printf("}}\n");
}

}  // namespace

int main(int argc, char** argv) {
  int vocab = 151936;
  const char* isa = "avx512_bf16";
  for (int i = 1; i + 1 < argc; i += 2) {
    if (std::strcmp(argv[i], "--vocab") == 0) vocab = std::atoi(argv[i + 1]);
    if (std::strcmp(argv[i], "--isa") == 0) isa = argv[i + 1];
  }
  if (vocab < 1) {
    std::fprintf(stderr, "sample_bench: --vocab must be 1 or more\n");
    return 2;
  }
  const KernelTable& kernels = kernels_of(isa);
  const Filter filters[] = {{"none", 1.0f, 0, 0.0f},
                            {"top_p 0.9", 0.9f, 0, 0.0f},
                            {"top_p 0.5", 0.5f, 0, 0.0f},
                            {"top_k 50", 1.0f, 50, 0.0f},
                            {"min_p 0.05", 1.0f, 0, 0.05f}};
  for (double deviation : {1.0, 2.0, 4.0}) {
    for (const Filter& filter : filters) print(kernels, vocab, deviation, filter);
  }
  return 0;
}
