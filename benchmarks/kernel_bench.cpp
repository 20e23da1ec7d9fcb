// Measures linear kernels, as shares of this machine's limits, which are probed in the same run.
//
//   kernel_bench [--isa LEVEL] [--kind NAME] [--shape N,K] [--threads T] [--rows M,M,...]
//                [--panels P]
//                [--sizes STRIP,ROWS,NEAR,AHEAD,FLOAT_PASS_ROWS,FAR_PASS_ROWS,NEAR_BLOCKS]
//
// --panels: one kernel call covers P panels of 16 columns, like a task of the engine,
// which has up to 4 (0: all columns of a thread).
// --sizes: the first fields of WorkSizes (csrc/kernels/table/work_sizes.h) in their order;
// -1 keeps the size that this CPU gets by default.
//
// Prints for each weight kind: GB/s of packed weights for m = 1..16 rows, with the share of a plain
// read, and GFLOP/s for m = 16..512, with the share of a dot product that uses registers only.
// Weights are read from several copies, which are much larger than the last-level cache.
// Results are the best of several runs, by the CPU time of each thread: they exclude the time
// of other processes on the core, but include the effect of processes that take memory bandwidth.
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "measure.h"
#include "runtime/work_sizes.h"

namespace cpuserve {
namespace {

constexpr size_t kStreamBytes = 400 << 20;  // about 12 times an L3 cache of 32 MiB
constexpr int64_t kMostFewRows = 64;        // up to so many rows, a run reads each weight copy once

// A group of threads: time(work) runs work(thread) on all of them at once,
// and returns the CPU seconds of the slowest thread.
class Crew {
 public:
  explicit Crew(int threads) : threads_(threads), seconds_(static_cast<size_t>(threads)) {
    for (int t = 1; t < threads; t++) helpers_.emplace_back([this, t] { help(t); });
  }
  ~Crew() {
    stop_ = true;
    epoch_.fetch_add(1, std::memory_order_release);
    for (std::thread& t : helpers_) t.join();
  }
  int threads() const { return threads_; }
  double time(const std::function<void(int)>& work) {
    work_ = &work;
    done_.store(0, std::memory_order_relaxed);
    epoch_.fetch_add(1, std::memory_order_release);  // pairs with the acquire in help()
    run(0);
    while (done_.load(std::memory_order_acquire) != threads_ - 1) std::this_thread::yield();
    return *std::max_element(seconds_.begin(), seconds_.end());
  }

 private:
  void run(int t) {
    const double start = thread_seconds();
    (*work_)(t);
    seconds_[static_cast<size_t>(t)] = thread_seconds() - start;
  }
  void help(int t) {
    for (int seen = 0;;) {
      while (epoch_.load(std::memory_order_acquire) == seen) std::this_thread::yield();
      seen++;
      if (stop_) return;
      run(t);
      done_.fetch_add(1, std::memory_order_release);
    }
  }
  int threads_;
  std::vector<double> seconds_;
  std::vector<std::thread> helpers_;
  std::atomic<int> epoch_{0}, done_{0};
  const std::function<void(int)>* work_ = nullptr;
  bool stop_ = false;
};

struct Kind {
  const char* name;
  WeightKind kind;
  int dot;  // the DotKind for KernelTable::probe_dot
};
constexpr Kind kKinds[] = {{"dense_bf16", WeightKind::dense_bf16, 1},
                           {"dense_f16", WeightKind::dense_f16, 0},
                           {"dense_f32", WeightKind::dense_f32, 0},
                           {"w8_g32", WeightKind::w8_g32, 2},
                           {"w4_g32", WeightKind::w4_g32, 3},
                           {"w4m_g32", WeightKind::w4m_g32, 3},
                           {"w4m_g128", WeightKind::w4m_g128, 3},
                           {"w8_channel", WeightKind::w8_channel, 2},
                           {"w8_channel_g128", WeightKind::w8_channel_g128, 2},
                           {"q4_k", WeightKind::q4_k, 3},
                           {"q5_k", WeightKind::q5_k, 3},
                           {"q6_k", WeightKind::q6_k, 3},
                           {"q2_k", WeightKind::q2_k, 3},
                           {"q3_k", WeightKind::q3_k, 3},
                           {"q5_0", WeightKind::q5_0, 3},
                           {"q5_1", WeightKind::q5_1, 3},
                           {"iq4_nl", WeightKind::iq4_nl, 2},
                           {"iq4_xs", WeightKind::iq4_xs, 2},
                           {"iq3_s", WeightKind::iq3_s, 2},
                           {"iq3_xxs", WeightKind::iq3_xxs, 2},
                           {"iq2_s", WeightKind::iq2_s, 2},
                           {"iq2_xs", WeightKind::iq2_xs, 2},
                           {"iq2_xxs", WeightKind::iq2_xxs, 2},
                           {"iq1_m", WeightKind::iq1_m, 2},
                           {"iq1_s", WeightKind::iq1_s, 3},
                           {"mxfp4", WeightKind::mxfp4, 3},
                           {"tq2_0", WeightKind::tq2_0, 3},
                           {"q2_0", WeightKind::q2_0, 3},
                           {"pq2_0", WeightKind::pq2_0, 3},
                           {"q1_0", WeightKind::q1_0, 3},
                           {"e4m3_g128", WeightKind::e4m3_g128, 1},
                           {"nf4_g64", WeightKind::nf4_g64, 1},
                           {"fp4_g64", WeightKind::fp4_g64, 1},
                           {"nvfp4", WeightKind::nvfp4, 1},
                           {"w8z_g32", WeightKind::w8z_g32, 2},
                           {"w8z_g128", WeightKind::w8z_g128, 2},
                           {"w4z_g32", WeightKind::w4z_g32, 3},
                           {"w4z_g64", WeightKind::w4z_g64, 3},
                           {"w2z_g32", WeightKind::w2z_g32, 3},
                           {"w2z_g64", WeightKind::w2z_g64, 3},
                           {"w2z_g128", WeightKind::w2z_g128, 3},
                           {"w2z_g256", WeightKind::w2z_g256, 3},
                           {"w3z_g32", WeightKind::w3z_g32, 3},
                           {"w3z_g64", WeightKind::w3z_g64, 3},
                           {"w3z_g128", WeightKind::w3z_g128, 3},
                           {"w3z_g256", WeightKind::w3z_g256, 3}};

// Packs arbitrary weights, `copies` times. Their bytes do not matter, except that float fields must
// not be denormal or NaN.
void pack_weights(const LinearKernel& kernel, PackedWeight& w, uint8_t* to, int64_t copies) {
  std::vector<float> row(static_cast<size_t>(w.k));
  for (size_t i = 0; i < row.size(); i++)
    row[i] = static_cast<float>(i * 2654435761u % 1000) / 1000.0f - 0.5f;
  const SourceType source = only_source(w.kind);
  std::vector<uint8_t> blocks(source_row_bytes(source, w.k));
  // Two bytes from 32 to 95 are never the fp16 of a NaN or of a denormal number.
  for (size_t i = 0; i < blocks.size(); i++) {
    blocks[i] = static_cast<uint8_t>(32 + (i * 2654435761u >> 8) % 64);
  }
  const void* rows[kPanel];
  for (const void*& r : rows) {
    r = source == SourceType::f32 ? static_cast<const void*>(row.data()) : blocks.data();
  }
  kernel.pack({rows, source, w.k, to});
  const int64_t panels = (w.n + kPanel - 1) / kPanel * copies;
  for (int64_t p = 1; p < panels; p++)
    memcpy(to + p * static_cast<int64_t>(w.panel_bytes), to, w.panel_bytes);
  w.data = to;
}

struct Activations {
  uint8_t* data;
  size_t stride;
};

Activations make_rows(const KernelTable& table, ActFormat format, int64_t m, int64_t k) {
  std::vector<float> x(static_cast<size_t>(m * k));
  for (size_t i = 0; i < x.size(); i++) x[i] = static_cast<float>(i % 17) / 17.0f - 0.4f;
  Activations a{reserve(static_cast<size_t>(m) * row_bytes(format, k) + 4096),
                row_bytes(format, k)};
  Rows from{x.data(), static_cast<size_t>(k) * 4, k, ActFormat::f32};
  table.convert({from, {a.data, a.stride, k, format}, 0, m});
  return a;
}

class Bench {
 public:
  Bench(const KernelTable& table, int threads, std::vector<int64_t> rows, int64_t panels,
        const WorkSizes& sizes)
      : table_(table),
        crew_(threads),
        rows_(std::move(rows)),
        panels_per_call_(panels),
        sizes_(sizes) {
    for (int t = 0; t < threads; t++) scratch_.push_back(reserve(kLinearScratch));
  }

  double read_rate() {
    if (!buffer_) {
      buffer_ = reserve(kStreamBytes);
      memset(buffer_, 1, kStreamBytes);
    }
    const size_t part = kStreamBytes / static_cast<size_t>(crew_.threads()) / 64 * 64;
    std::atomic<uint64_t> sum{0};
    double best = 1e9;
    for (int i = 0; i < 3; i++) {
      best = std::min(best, crew_.time([&](int t) {
        sum += table_.probe_read(buffer_ + part * static_cast<size_t>(t), part);
      }));
    }
    return static_cast<double>(part) * crew_.threads() / best;
  }

  double dot_rate(int kind) {
    constexpr int64_t kIterations = 2000000;
    double best = 0;
    std::vector<double> operations(static_cast<size_t>(crew_.threads()));
    for (int i = 0; i < 3; i++) {
      const double s = crew_.time(
          [&](int t) { operations[static_cast<size_t>(t)] = table_.probe_dot[kind](kIterations); });
      double all = 0;
      for (double o : operations) all += o;
      best = std::max(best, all / s);
    }
    return best;
  }

  void run(const Kind& kind, int64_t n, int64_t k) {
    const LinearKernel& kernel = table_.linear[static_cast<int>(kind.kind)];
    PackedWeight w{nullptr, kernel.panel_bytes(k), n, k, kind.kind};
    const int64_t panels = (n + kPanel - 1) / kPanel;
    const size_t bytes = static_cast<size_t>(panels) * w.panel_bytes;
    const int64_t copies = std::max<int64_t>(2, static_cast<int64_t>(kStreamBytes / bytes));
    uint8_t* memory = reserve(bytes * static_cast<size_t>(copies));
    pack_weights(kernel, w, memory, copies);
    const double bandwidth = read_rate(), peak = dot_rate(kind.dot);
    std::printf("%s n %ld k %ld: read %.1f GB/s, dot %.0f G/s\n", kind.name, static_cast<long>(n),
                static_cast<long>(k), bandwidth / 1e9, peak / 1e9);
    for (int64_t m : rows_) {
      const int64_t passes = m >= kMostFewRows ? 2 : copies;
      const double seconds = time_linear(kernel, w, bytes, m, passes) / static_cast<double>(passes);
      const double rate = static_cast<double>(bytes) / seconds;
      const double operations = 2.0 * static_cast<double>(m * n) * static_cast<double>(k) / seconds;
      std::printf("  m %3ld  %6.1f GB/s %4.0f %%   %7.0f G/s %4.0f %%\n", static_cast<long>(m),
                  rate / 1e9, 100 * rate / bandwidth, operations / 1e9, 100 * operations / peak);
    }
    munmap(memory, bytes * static_cast<size_t>(copies));
  }

 private:
  double time_linear(const LinearKernel& kernel, const PackedWeight& w, size_t bytes, int64_t m,
                     int64_t passes) {
    const Activations x = make_rows(table_, kernel.act, m, w.k);
    const size_t out_stride = row_bytes(ActFormat::f32, w.n);
    float* out = reinterpret_cast<float*>(reserve(out_stride * static_cast<size_t>(m)));
    const int64_t strips = (w.n + kPanel * kStripPanels - 1) / (kPanel * kStripPanels);
    const int64_t panels = (w.n + kPanel - 1) / kPanel;
    double best = 1e9;
    for (int i = 0; i < 4; i++) {
      best = std::min(best, crew_.time([&](int t) {
        for (int64_t pass = 0; pass < passes; pass++) {
          PackedWeight copy = w;
          copy.data += static_cast<size_t>(pass) * bytes;
          LinearArgs a{};
          a.w = &copy;
          a.x = x.data;
          a.x_stride = x.stride;
          a.m = m;
          a.ep.out = {out, out_stride, w.n, ActFormat::f32};
          a.scratch = scratch_[static_cast<size_t>(t)];
          a.sizes = sizes_;
          const int64_t last = strips * (t + 1) / crew_.threads();
          const int64_t end = std::min(panels, last * kStripPanels);
          a.panel1 = strips * t / crew_.threads() * kStripPanels;
          while ((a.panel0 = a.panel1) < end) {
            a.panel1 = panels_per_call_ > 0 ? std::min(end, a.panel0 + panels_per_call_) : end;
            kernel.run(a);
          }
        }
      }));
    }
    munmap(x.data, static_cast<size_t>(m) * x.stride);
    munmap(out, out_stride * static_cast<size_t>(m));
    return best;
  }

  const KernelTable& table_;
  Crew crew_;
  const std::vector<int64_t> rows_;
  const int64_t panels_per_call_;
  const WorkSizes sizes_;
  std::vector<uint8_t*> scratch_;
  uint8_t* buffer_ = nullptr;
};

std::vector<int64_t> numbers(const std::string& list) {
  std::vector<int64_t> out;
  for (size_t at = 0; at < list.size();) {
    const size_t end = std::min(list.find(',', at), list.size());
    out.push_back(std::atol(list.substr(at, end - at).c_str()));
    at = end + 1;
  }
  return out;
}

int main_of(int argc, char** argv) {
  std::string isa = supported_isa_levels(cpu_info()).back(), only;
  std::vector<std::pair<int64_t, int64_t>> shapes = {{9728, 896}, {2048, 8192}, {8192, 2048}};
  std::vector<int64_t> rows = {1, 2, 4, 6, 8, 12, 16, 24, 32, 64, 512};
  int64_t panels = 0;
  WorkSizes sizes = work_sizes_for({}, cpu_info().vendor);
  int threads = static_cast<int>(std::thread::hardware_concurrency());
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string option = argv[i], value = argv[i + 1];
    if (option == "--isa") isa = value;
    if (option == "--kind") only = value;
    if (option == "--threads") threads = std::max(1, std::atoi(value.c_str()));
    if (option == "--rows") rows = numbers(value);
    if (option == "--panels") panels = std::atol(value.c_str());
    if (option == "--sizes") {
      int32_t* const fields[] = {
          &sizes.strip_bytes,     &sizes.rows,          &sizes.near_bytes, &sizes.ahead_bytes,
          &sizes.float_pass_rows, &sizes.far_pass_rows, &sizes.near_blocks};
      const std::vector<int64_t> given = numbers(value);
      for (size_t f = 0; f < std::min(given.size(), std::size(fields)); f++) {
        if (given[f] >= 0) *fields[f] = static_cast<int32_t>(given[f]);
      }
    }
    if (option == "--shape") {
      const std::vector<int64_t> shape = numbers(value);
      if (shape.size() != 2) {
        std::fprintf(stderr, "kernel_bench: --shape wants N,K; got %s\n", value.c_str());
        return 2;
      }
      shapes = {{shape[0], shape[1]}};
    }
  }
  const KernelTable& table = kernels_of(isa);
  std::printf("level %s, %d threads\n", isa.c_str(), threads);
  Bench bench(table, threads, rows, panels, sizes);
  for (const Kind& kind : kKinds) {
    if (!only.empty() && only != kind.name) continue;
    for (const auto& [n, k] : shapes) {
      if (k % block_shape(only_source(kind.kind)).weights == 0) bench.run(kind, n, k);
    }
  }
  return 0;
}

}  // namespace
}  // namespace cpuserve

int main(int argc, char** argv) { return cpuserve::main_of(argc, argv); }
