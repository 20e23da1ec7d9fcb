// Measures recurrent layers as shares of limits that are probed in the same minute.
// Prints one JSON record a line, with medians of alternating rounds:
// - decode of one token a sequence, as a share of the rate of a plain read of the same states;
// - the speed-up of this decode over the recurrent form, which rewrites the states with every token
//   (without and with prefetching of rows);
// - prefill of one layer, as a share of the fp32 multiply-add peak (only products count as work).
// Times are the CPU time of the slower thread: they exclude time while another process has
// the core, but include the effect of processes that take memory bandwidth. The recurrent form
// uses vectors of the CPU that this file is compiled for.
//
//   OMP_PROC_BIND=true recurrent_bench [--isa LEVEL] [--shape qwen3_next|granite4]
//     [--batch N] [--layers N] [--rounds N] [--small-pages] [--compact]
//
// By default, the k, q, v and results of a state unit are parts of the long rows of a layer,
// which prefill finds in L3. With --compact, the rows of all chunks share one small buffer,
// as in the engine, where the convolution writes each chunk just before the kernel reads it.
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "measure.h"

namespace {
using namespace cpuserve;

struct Shape {
  const char* name;
  int64_t layers, units;
  RecurrentShape unit;
};
constexpr Shape kShapes[] = {
    {"qwen3_next", 36, 16, {128, 128, 2, true}},  // 72 MiB of states for each sequence
    {"granite4", 36, 6, {128, 64, 8, false}},     // 54 MiB; 48 heads share one group of B and C
};

// Runs work(thread, threads) on all threads and returns the CPU seconds of the slowest thread.
template <class Work>
double time_threads(const Work& work) {
  double seconds = 0;
#pragma omp parallel reduction(max : seconds)
  {
    const double start = thread_seconds();
    work(omp_get_thread_num(), omp_get_num_threads());
    seconds = thread_seconds() - start;
  }
  return seconds;
}

float* reserve_floats(int64_t floats, bool huge) {
  return reinterpret_cast<float*>(reserve(static_cast<size_t>(floats) * sizeof(float), huge));
}

// The inputs of one state unit for some tokens. Rows are as wide as the convolution of Qwen3-Next.
// If `compact`, rows have the columns of the unit only, and all chunks share the same rows.
struct Inputs {
  const bool compact;
  const int64_t stride, out_stride;  // floats from one row to the next
  float* const rows;
  std::vector<float> gates;

  Inputs(const RecurrentShape& s, int64_t tokens, bool huge, bool compact_rows)
      : compact(compact_rows),
        stride(compact ? 2 * s.key_width + s.heads * s.value_width : 8192 + 16),
        out_stride(compact ? s.heads * s.value_width : stride),
        rows(reserve_floats(tokens * stride, huge)),
        gates(static_cast<size_t>(tokens * 2 * s.heads)) {
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    const float size = 1 / std::sqrt(static_cast<float>(s.key_width));
    for (int64_t i = 0; i < tokens * stride; i++) rows[i] = normal(random) * size;
    for (size_t i = 0; i < gates.size(); i++) {
      const bool is_beta = static_cast<int64_t>(i) / s.heads % 2;
      gates[i] = is_beta ? 1 / (1 + std::exp(-normal(random))) : -std::exp(normal(random) - 3);
    }
  }
  int64_t row_of(int64_t t) const { return compact ? t % kStateChunk : t; }
  RecurrentArgs args(const RecurrentShape& s, int64_t t) const {
    RecurrentArgs a{};
    a.shape = s;
    a.k = rows + row_of(t) * stride;
    a.q = a.k + (compact ? s.key_width : 1024);
    a.v = a.k + (compact ? 2 * s.key_width : 4096);
    a.k_stride = a.q_stride = a.v_stride = stride;
    a.g = gates.data() + t * 2 * s.heads;
    a.beta = a.g + s.heads;
    a.g_stride = a.beta_stride = 2 * s.heads;
    a.out_stride = out_stride;
    return a;
  }
};

typedef float Vec __attribute__((vector_size(64), aligned(4), may_alias));
constexpr int64_t kVec = 16;

// Computes one token of one head in the recurrent form, W vectors of columns at a time.
// W is so small that the second pass of the delta rule finds in L2 the columns
// that the first pass has read. With kFetch, prefetches 8 rows ahead.
template <int W, bool kDelta, bool kFetch>
void rewrite_state(float* state, const RecurrentShape& s, const float* k, const float* q,
                   const float* v, float g, float beta, float* out) {
  const auto at = [](const float* p, int w) -> const Vec& {
    return *reinterpret_cast<const Vec*>(p + w * kVec);
  };
  const float fade = std::exp(g);
  for (int64_t c = 0; c < s.value_width; c += W * kVec) {
    Vec u[W] = {}, y[W] = {};
    for (int64_t d = 0; d < s.key_width && kDelta; d++) {
      const float* row = state + d * s.value_width + c;
      for (int w = 0; w < W && kFetch; w++) {
        __builtin_prefetch(row + 8 * s.value_width + w * kVec);
      }
      for (int w = 0; w < W; w++) u[w] += at(row, w) * k[d];
    }
    for (int w = 0; w < W; w++) u[w] = beta * (at(v + c, w) - fade * u[w]);
    for (int64_t d = 0; d < s.key_width; d++) {
      float* row = state + d * s.value_width + c;
      for (int w = 0; w < W && kFetch && !kDelta; w++) {
        __builtin_prefetch(row + 8 * s.value_width + w * kVec, 1);
      }
      for (int w = 0; w < W; w++) {
        const Vec x = at(row, w) * fade + u[w] * k[d];
        *reinterpret_cast<Vec*>(row + w * kVec) = x;
        y[w] += x * q[d];
      }
    }
    for (int w = 0; w < W; w++) *reinterpret_cast<Vec*>(out + c + w * kVec) = y[w];
  }
}

// Rewrites the states of a state unit for one token. fetching: whole rows of a state at a time,
// with a prefetch of the next rows; otherwise 64 columns at a time, without a prefetch.
void rewrite_unit(float* state, const RecurrentArgs& a, bool fetching) {
  const RecurrentShape& s = a.shape;
  const auto form = s.delta
                        ? fetching ? rewrite_state<8, true, true> : rewrite_state<4, true, false>
                    : fetching ? rewrite_state<4, false, true>
                               : rewrite_state<4, false, false>;
  for (int64_t h = 0; h < s.heads; h++) {
    form(state + h * s.key_width * s.value_width, s, a.k, a.q, a.v + h * s.value_width, a.g[h],
         a.beta[h], a.out + h * s.value_width);
  }
}

class Bench {
 public:
  Bench(const KernelTable& table, const Shape& shape, int64_t batch, bool huge, bool compact)
      : table_(table),
        shape_(shape),
        batch_(batch),
        state_floats_(shape.unit.heads * shape.unit.key_width * shape.unit.value_width),
        unit_floats_(round_up(state_floats_ + recurrent_open_floats(shape.unit), 16)),
        units_(shape.layers * batch * shape.units),
        memory_(reserve_floats(units_ * unit_floats_, huge)),
        inputs_(shape.unit, kTokens, huge, compact) {
    time_threads([&](int thread, int threads) {  // each thread writes the pages that it reads later
      for_units(thread, threads, [&](float* unit, float*) {
        for (int64_t i = 0; i < unit_floats_; i++) unit[i] = static_cast<float>(i % 17) / 17 - 0.4f;
      });
    });
    for (int t = 0; t < omp_get_max_threads(); t++) {
      const size_t scratch = recurrent_scratch_bytes(shape.unit) / sizeof(float);
      scratch_.push_back(reserve_floats(static_cast<int64_t>(scratch), huge));
      out_.push_back(reserve_floats(kTokens * inputs_.out_stride, huge));
    }
  }

  void decode(int rounds) {
    std::vector<double> read, chunked, of_read, over_form, over_fetching;
    read_states();
    for (int i = 0; i < rounds; i++) {
      const double before = read_states(), seconds = decode_chunked(), after = read_states();
      read.push_back((before + after) / 2);
      chunked.push_back(seconds);
      of_read.push_back((before + after) / 2 / seconds);
      over_form.push_back(decode_rewriting(false) / seconds);
      over_fetching.push_back(decode_rewriting(true) / seconds);
    }
    const double bytes = static_cast<double>(units_ * state_floats_) * sizeof(float);
    std::printf(
        "{\"metric\":\"recurrent_decode\",\"shape\":\"%s\",\"isa\":\"%s\",\"threads\":%d,"
        "\"batch\":%ld,\"state_mb\":%.0f,\"read_gb_s\":%.1f,\"ms\":%.3f,%s,%s,%s}\n",
        shape_.name, table_.isa, omp_get_max_threads(), static_cast<long>(batch_), bytes / 1e6,
        bytes / median(read) / 1e9, median(chunked) * 1e3, range("of_read", of_read).c_str(),
        range("over_recurrent_form", over_form).c_str(),
        range("over_recurrent_form_fetching", over_fetching).c_str());
    std::fflush(stdout);
  }

  void prefill(int rounds) {
    std::vector<double> rate, share;
    const double work = prefill_operations();
    prefill_layer();
    for (int i = 0; i < rounds; i++) {
      const double before = peak(), s = prefill_layer(), after = peak();
      rate.push_back(work / s);
      share.push_back(work / s / ((before + after) / 2));
    }
    std::printf(
        "{\"metric\":\"recurrent_prefill\",\"shape\":\"%s\",\"isa\":\"%s\",\"threads\":%d,"
        "\"compact\":%s,\"tokens\":%ld,\"gflop_s\":%.1f,%s}\n",
        shape_.name, table_.isa, omp_get_max_threads(), inputs_.compact ? "true" : "false",
        static_cast<long>(kTokens), median(rate) / 1e9, range("of_peak", share).c_str());
    std::fflush(stdout);
  }

 private:
  static constexpr int64_t kTokens = 960;

  // Returns JSON members for a record: the median, and the 5th and 95th percentile of x.
  static std::string range(const char* name, std::vector<double> x) {
    std::sort(x.begin(), x.end());
    const auto at = [&](double share) {
      return x[static_cast<size_t>(share * static_cast<double>(x.size() - 1) + 0.5)];
    };
    char text[200];
    std::snprintf(text, sizeof text, "\"%s\":%.3f,\"%s_p5\":%.3f,\"%s_p95\":%.3f", name, median(x),
                  name, at(0.05), name, at(0.95));
    return text;
  }

  // Calls f(state of a unit, state of the next unit) for the state units of a thread,
  // which are the same units in each layer and each sequence.
  template <class F>
  void for_units(int thread, int threads, const F& f) const {
    const int64_t first = shape_.units * thread / threads;
    const int64_t end = shape_.units * (thread + 1) / threads;
    for (int64_t i = 0; i < shape_.layers * batch_; i++) {
      for (int64_t u = first; u < end; u++) {
        float* unit = memory_ + (i * shape_.units + u) * unit_floats_;
        const int64_t step = u + 1 < end ? 1 : shape_.units - (end - 1 - first);
        const bool last = u + 1 == end && i + 1 == shape_.layers * batch_;
        f(unit, last ? memory_ + first * unit_floats_ : unit + step * unit_floats_);
      }
    }
  }

  RecurrentArgs args(int thread, float* unit, const float* next, int64_t t) const {
    RecurrentArgs a = inputs_.args(shape_.unit, t);
    a.closed = a.closed_to = unit;
    a.open = unit + state_floats_;
    a.num_open = t % kStateChunk;
    a.rows = 1;
    a.out = out_[static_cast<size_t>(thread)];
    a.scratch = reinterpret_cast<uint8_t*>(scratch_[static_cast<size_t>(thread)]);
    a.next = next;
    return a;
  }

  double read_states() const {
    uint64_t sum = 0;
    const double seconds = time_threads([&](int thread, int threads) {
      uint64_t mine = 0;
      for_units(thread, threads, [&](float* unit, float*) {
        mine += table_.probe_read(unit, static_cast<size_t>(state_floats_) * sizeof(float));
      });
#pragma omp atomic
      sum += mine;
    });
    volatile uint64_t sink = sum;
    (void)sink;
    return seconds;
  }

  // Measures decode and returns the mean seconds per token over a whole chunk of tokens. The last
  // token of the chunk also updates the states by the whole chunk (kernels/table/recurrent.h).
  double decode_chunked() const {
    const double seconds = time_threads([&](int thread, int threads) {
      for (int64_t t = 0; t < kStateChunk; t++) {
        for_units(thread, threads,
                  [&](float* unit, float* next) { table_.recurrent(args(thread, unit, next, t)); });
      }
    });
    return seconds / static_cast<double>(kStateChunk);
  }
  double decode_rewriting(bool fetching) const {
    constexpr int64_t kSteps = kStateChunk / 2;
    const double seconds = time_threads([&](int thread, int threads) {
      for (int64_t t = 0; t < kSteps; t++) {
        for_units(thread, threads, [&](float* unit, float*) {
          rewrite_unit(unit, args(thread, unit, nullptr, t), fetching);
        });
      }
    });
    return seconds / static_cast<double>(kSteps);
  }

  // Measures the kernel on a whole prompt of one sequence in one layer, and returns the seconds.
  double prefill_layer() const {
    return time_threads([&](int thread, int threads) {
      for (int64_t u = shape_.units * thread / threads; u < shape_.units * (thread + 1) / threads;
           u++) {
        for (int64_t t = 0; t < kTokens; t += kStateChunk) {
          RecurrentArgs a = args(thread, memory_ + u * unit_floats_, nullptr, t);
          a.rows = kStateChunk;
          a.out += inputs_.row_of(t) * a.out_stride;
          table_.recurrent(a);
        }
      }
    });
  }
  // Returns the number of operations, two for each multiply-add:
  // products of q (and k) with the state and with the rows up to the token,
  // products of these results with u, and the update of the closed states by each whole chunk.
  double prefill_operations() const {
    const RecurrentShape& s = shape_.unit;
    const double vectors = s.delta ? 2 : 1, depth = s.key_width, width = s.value_width;
    const double rows = (kStateChunk + 1) / 2.0, heads = s.heads;
    const double token = heads * (vectors * depth * width + depth * width) +
                         vectors * rows * (depth + heads * width);
    return 2 * token * static_cast<double>(shape_.units * kTokens);
  }
  double peak() const {
    double operations = 0;
    const double seconds = time_threads([&](int, int) {
      const double mine = table_.probe_dot[static_cast<int>(DotKind::f32)](1'000'000);
#pragma omp atomic
      operations += mine;
    });
    return operations / seconds;
  }

  const KernelTable& table_;
  const Shape shape_;
  const int64_t batch_, state_floats_, unit_floats_, units_;
  float* const memory_;
  const Inputs inputs_;
  std::vector<float*> scratch_, out_;
};

int main_of(int argc, char** argv) {
  std::string isa = supported_isa_levels(cpu_info()).back(), only;
  int64_t batch = 0, layers = 0;
  int rounds = 9;
  bool huge = true, compact = false;
  for (int i = 1; i < argc; i++) {
    const std::string option = argv[i], value = i + 1 < argc ? argv[i + 1] : "";
    if (option == "--small-pages") huge = false;
    if (option == "--compact") compact = true;
    if (option == "--isa") isa = value;
    if (option == "--shape") only = value;
    if (option == "--batch") batch = std::atol(value.c_str());
    if (option == "--layers") layers = std::atol(value.c_str());
    if (option == "--rounds") rounds = std::max(1, std::atoi(value.c_str()));
  }
  const KernelTable& table = kernels_of(isa);
  for (Shape shape : kShapes) {
    if (!only.empty() && only != shape.name) continue;
    if (layers > 0) shape.layers = layers;
    for (const int64_t sequences : {1, 8}) {
      if (batch > 0 && batch != sequences) continue;
      Bench bench(table, shape, sequences, huge, compact);
      bench.decode(rounds);
      if (sequences == 1) bench.prefill(rounds);
    }
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) { return main_of(argc, argv); }
