// Attention against the roofs of the same minute: decode as a share of a bare read of the same KV
// bytes, prefill as a share of the dot-product peak (useful work: keys a row sees). Prints one JSON
// record a line. After a build in BUILD, from the repository root:
//   g++ -std=c++17 -O2 -fopenmp -Icsrc benchmarks/attention_bench.cpp BUILD/libcpuserve_core.a
//     $(find BUILD -path '*cpuserve_isa_*' -name '*.o') -o attention_bench
//   OMP_WAIT_POLICY=passive ./attention_bench [decode|prefill|all] [cpu]
#include <omp.h>
#include <sys/mman.h>
#include <time.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <vector>

#include "kernels/resolve.h"

namespace {
using namespace cpuserve;

constexpr double kDecodeBytes = 400e6;  // several times the last-level cache
constexpr int kRepeats = 8;             // short and many: a shared machine is quiet now and then

const KernelTable& kernels() {
  static const KernelTable* const table = find_kernels("avx512_bf16");
  return *table;
}

// Wall time, or with "cpu" the process's CPU time per thread: what a machine shared with other work
// would do alone (waiting threads must then sleep: OMP_WAIT_POLICY=passive).
bool cpu_time = false;
double now() {
  timespec t;
  clock_gettime(cpu_time ? CLOCK_PROCESS_CPUTIME_ID : CLOCK_MONOTONIC, &t);
  const double seconds = static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
  return cpu_time ? seconds / omp_get_max_threads() : seconds;
}

class Arena {
 public:
  explicit Arena(size_t bytes) : bytes_(bytes + (4 << 20)) {
    map_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    const uintptr_t huge = 2 << 20;
    data_ =
        reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(map_) + huge - 1) / huge * huge);
    madvise(data_, bytes, MADV_HUGEPAGE);
  }
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  ~Arena() { munmap(map_, bytes_); }
  uint8_t* data() const { return data_; }

 private:
  size_t bytes_;
  void* map_;
  uint8_t* data_;
};

// Finite values of mixed sign in bf16; two threads touch what they will read.
void fill(uint16_t* p, size_t n) {
#pragma omp parallel for schedule(static)
  for (size_t i = 0; i < n; i++) {
    p[i] = static_cast<uint16_t>(0x3c00 + (i * 2654435761u >> 9 & 0x1ff) +
                                 (i * 40503u >> 3 & 1) * 0x8000);
  }
}

double read_seconds(const uint8_t* data, size_t bytes) {
  const double start = now();
  uint64_t sum = 0;
#pragma omp parallel reduction(+ : sum)
  {
    const size_t t = static_cast<size_t>(omp_get_thread_num());
    const size_t share = bytes / static_cast<size_t>(omp_get_num_threads()) / 4096 * 4096;
    sum += kernels().probe_read(data + t * share, share);
  }
  volatile uint64_t sink = sum;
  (void)sink;
  return now() - start;
}

double peak_gflops() {
  double operations = 0;
  const double start = now();
#pragma omp parallel reduction(+ : operations)
  operations += kernels().probe_dot(1, 500000);
  return operations / (now() - start) / 1e9;
}

struct Shape {
  int hd, group, kv_heads, context;
};

// One layer of `layers` in the layout of runtime/kv_cache.
KvLayer layer_of(uint8_t* base, const Shape& s, size_t layer, size_t layers) {
  const size_t half = kv_half_bytes(KvType::bf16, s.hd), run = kSlabBlocks * half;
  const size_t slab = 2 * run * static_cast<size_t>(s.kv_heads);
  return {base + layer * slab, layers * slab, half, 2 * run,     run,
          s.kv_heads,          s.hd,          s.hd, KvType::bf16};
}

struct Buffers {
  Buffers(const Shape& s, int tokens, size_t layers)
      : layers(layers),
        layer_bytes(static_cast<size_t>(s.kv_heads) * s.hd * 4 * static_cast<size_t>(s.context)),
        kv(layer_bytes * layers),
        q(static_cast<size_t>(tokens) * s.kv_heads * s.group * s.hd),
        out(q.size()),
        table(static_cast<size_t>(s.context) / kBlock) {
    fill(reinterpret_cast<uint16_t*>(kv.data()), layer_bytes * layers / 2);
    fill(q.data(), q.size());
    for (size_t i = 0; i < table.size(); i++) table[i] = static_cast<int32_t>(i);
  }
  size_t layers, layer_bytes;
  Arena kv;
  std::vector<uint16_t> q, out;
  std::vector<int32_t> table;
};

AttentionArgs args_of(const Shape& s, Buffers& b, size_t layer, int head, void* scratch) {
  const int64_t width = static_cast<int64_t>(s.kv_heads) * s.group * s.hd;
  const Rows q{b.q.data(), static_cast<size_t>(width) * 2, width, ActFormat::bf16};
  const Rows out{b.out.data(), static_cast<size_t>(width) * 2, width, ActFormat::bf16};
  AttentionArgs a{};
  a.q = q;
  a.kv = layer_of(b.kv.data(), s, layer, b.layers);
  a.kv_head = head;
  a.group = s.group;
  a.block_table = b.table.data();
  a.scale = 1.0f / std::sqrt(static_cast<float>(s.hd));
  a.out = out;
  a.scratch = scratch;
  return a;
}

// One new token after `context` - 1: a unit for every KV head, as the runtime plans it where the
// heads load the threads evenly.
void decode(const Shape& s) {
  const size_t layers = std::max<size_t>(
      1, static_cast<size_t>(kDecodeBytes) /
             (static_cast<size_t>(s.kv_heads) * s.hd * 4 * static_cast<size_t>(s.context)));
  Buffers b(s, 1, layers);
  const int chunks = s.context / kChunk;
  double best = 1e9, read = 1e9;
  for (int rep = 0; rep < kRepeats; rep++) {
    read = std::min(read, read_seconds(b.kv.data(), b.layer_bytes * layers));
    const double start = now();
#pragma omp parallel
    {
      std::vector<uint8_t> memory(kAttentionScratch + 64);
      void* scratch = memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64);
      for (size_t layer = 0; layer < layers; layer++) {
#pragma omp for schedule(dynamic, 1)
        for (int head = 0; head < s.kv_heads; head++) {
          AttentionArgs a = args_of(s, b, layer, head, scratch);
          a.rows = s.group;
          a.pos0 = s.context - 1;
          a.chunk1 = chunks;
          kernels().attention(a);
        }
      }
    }
    best = std::min(best, now() - start);
  }
  const size_t bytes = b.layer_bytes * layers;
  std::printf(
      "{\"metric\": \"decode_attention\", \"head_dim\": %d, \"group\": %d, \"context\": %d, "
      "\"gb_s\": %.1f, \"read_gb_s\": %.1f, \"fraction\": %.3f}\n",
      s.hd, s.group, s.context, static_cast<double>(bytes) / best / 1e9,
      static_cast<double>(bytes) / read / 1e9, read / best);
}

void prefill(const Shape& s) {
  Buffers b(s, s.context, 1);
  const int tokens_a_unit = std::max(1, 256 / s.group),
            units = (s.context + tokens_a_unit - 1) / tokens_a_unit;
  double best = 1e9;
  double peak = 0;
  for (int rep = 0; rep < kRepeats / 2; rep++) {
    peak = std::max(peak, peak_gflops());
    const double start = now();
#pragma omp parallel
    {
      std::vector<uint8_t> memory(kAttentionScratch + 64);
      void* scratch = memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64);
#pragma omp for schedule(dynamic, 1)
      for (int unit = 0; unit < units * s.kv_heads; unit++) {
        AttentionArgs a = args_of(s, b, 0, unit % s.kv_heads, scratch);
        const int token0 = (units - 1 - unit / s.kv_heads) * tokens_a_unit;
        const int token1 = std::min(s.context, token0 + tokens_a_unit);
        a.row0 = static_cast<int64_t>(token0) * s.group;
        a.rows = static_cast<int64_t>(token1 - token0) * s.group;
        a.chunk1 = (token1 + kChunk - 1) / kChunk;
        kernels().attention(a);
      }
    }
    best = std::min(best, now() - start);
  }
  const double work = 4.0 * s.hd * s.kv_heads * s.group * 0.5 * s.context * (s.context + 1.0);
  std::printf(
      "{\"metric\": \"prefill_attention\", \"head_dim\": %d, \"group\": %d, \"tokens\": %d, "
      "\"gflops\": %.0f, \"peak_gflops\": %.0f, \"fraction\": %.3f}\n",
      s.hd, s.group, s.context, work / best / 1e9, peak, work / best / 1e9 / peak);
}

}  // namespace

int main(int argc, char** argv) {
  const char* which = argc > 1 ? argv[1] : "";
  cpu_time = argc > 2 && std::strcmp(argv[2], "cpu") == 0;
  for (int hd : {64, 128}) {
    for (int group : {1, 3, 4, 7, 8}) {
      for (int context : {8192, 32768}) {
        if (std::strcmp(which, "prefill") != 0) decode({hd, group, 8, context});
      }
    }
    for (int group : {1, 2, 4, 7, 8}) {
      if (std::strcmp(which, "decode") != 0) prefill({hd, group, 4, 4096});
    }
  }
  return 0;
}
