// Measures attention kernels as shares of limits that are probed in the same minute.
// Prints one JSON record a line, with medians of alternating rounds:
// - decode at 8k and 32k tokens, as a share of a plain read of the same KV bytes;
// - prefill of 4k tokens, as a share of the dot-product peak (only visible keys count as work);
// - decode at 16k tokens over eight-bit keys and values, as a speed-up over bf16.
//
//   OMP_PROC_BIND=true attention_bench [decode|prefill|types|all] [group [head_dim]]
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "measure.h"
#include "runtime/work_sizes.h"

namespace {
using namespace cpuserve;

constexpr size_t kDecodeBytes = 400'000'000;  // several times the size of the last-level cache
constexpr int kRounds = 9;

// Returns the kernels of the highest ISA level that both this CPU and the build support.
const KernelTable& kernels() {
  static const KernelTable* const table = [] {
    const KernelTable* best = nullptr;
    for (const std::string& level : supported_isa_levels(cpu_info())) {
      if (const KernelTable* found = find_kernels(level)) best = found;
    }
    return best;
  }();
  return *table;
}

double now() { return seconds_of_clock(CLOCK_MONOTONIC); }

template <class Call>
double seconds_of(const Call& call) {
  const double start = now();
  call();
  return now() - start;
}

// Fills memory with values that are finite and of mixed sign, whether they are read
// as bf16 or as an eight-bit code. Each thread writes the pages that it reads later.
void fill(uint16_t* p, size_t n) {
#pragma omp parallel for schedule(static)
  for (size_t i = 0; i < n; i++) {
    p[i] = static_cast<uint16_t>(0x3c00 + (i * 2654435761u >> 9 & 0x13f) +
                                 (i * 40503u >> 3 & 1) * 0x8000);
  }
}

void read_bare(const uint8_t* data, size_t bytes) {
  uint64_t sum = 0;
#pragma omp parallel reduction(+ : sum)
  {
    const size_t t = static_cast<size_t>(omp_get_thread_num());
    const size_t share = bytes / static_cast<size_t>(omp_get_num_threads()) / 4096 * 4096;
    sum += kernels().probe_read(data + t * share, share);
  }
  volatile uint64_t sink = sum;
  (void)sink;
}

double peak_gflops() {
  double operations = 0;
  const double start = now();
#pragma omp parallel reduction(+ : operations)
  operations += kernels().probe_dot[static_cast<int>(DotKind::bf16)](500000);
  return operations / (now() - start) / 1e9;
}

struct Shape {
  int hd, group, kv_heads, context;
  KvType type = KvType::bf16;

  // The bytes of the keys and values of all tokens in one layer.
  size_t layer_bytes() const {
    return (kv_key_bytes(type, hd) + kv_value_bytes(type, hd)) *
           static_cast<size_t>(kv_heads * (context / kBlock));
  }
};

// Returns layer number `layer` of a KV cache at `base` with `layers` layers (runtime/kv_cache.h).
KvLayer layer_of(uint8_t* base, const Shape& s, size_t layer, size_t layers) {
  const size_t keys = kv_key_bytes(s.type, s.hd), values = kv_value_bytes(s.type, s.hd);
  const size_t head = kSlabBlocks * (keys + values), slab = head * static_cast<size_t>(s.kv_heads);
  return {base + layer * slab, layers * slab, keys, head,  kSlabBlocks * keys, values,
          s.kv_heads,          s.hd,          s.hd, s.type};
}

// The inputs and results of attention: queries, results, and the keys and values of `layers`
// layers. The memory of keys and values (kDecodeBytes) is allocated once for all shapes.
struct Buffers {
  Buffers(const Shape& s, int tokens, size_t layers)
      : layers(layers),
        q(static_cast<size_t>(tokens) * static_cast<size_t>(s.kv_heads * s.group * s.hd)),
        out(q.size()),
        table(static_cast<size_t>(s.context) / kBlock) {
    fill(q.data(), q.size());
    for (size_t i = 0; i < table.size(); i++) table[i] = static_cast<int32_t>(i);
  }
  static uint8_t* kv() {
    static uint8_t* const memory = [] {
      uint8_t* const empty = reserve(kDecodeBytes);
      fill(reinterpret_cast<uint16_t*>(empty), kDecodeBytes / 2);
      return empty;
    }();
    return memory;
  }
  size_t layers;
  std::vector<uint16_t> q, out;
  std::vector<int32_t> table;
};

// Scratch memory of one thread, aligned to 64 bytes.
class Scratch {
 public:
  Scratch() : memory_(kAttentionScratch + 64) {}
  void* data() { return memory_.data() + (64 - reinterpret_cast<uintptr_t>(memory_.data()) % 64); }

 private:
  std::vector<uint8_t> memory_;
};

AttentionArgs args_of(const Shape& s, Buffers& b, size_t layer, int head, void* scratch) {
  const int64_t width = static_cast<int64_t>(s.kv_heads) * s.group * s.hd;
  const Rows q{b.q.data(), static_cast<size_t>(width) * 2, width, ActFormat::bf16};
  const Rows out{b.out.data(), static_cast<size_t>(width) * 2, width, ActFormat::bf16};
  AttentionArgs a{};
  a.q = q;
  a.kv = layer_of(Buffers::kv(), s, layer, b.layers);
  a.kv_head = head;
  a.group = s.group;
  a.block_table = b.table.data();
  a.scale = 1.0f / std::sqrt(static_cast<float>(s.hd));
  a.out = out;
  a.scratch = scratch;
  a.near_keys = work_sizes_for({}, cpu_info().vendor).near_keys != 0;
  return a;
}

// Computes attention of one new token after `context` tokens, in every layer.
// Each KV head is an attention unit, as in the runtime's plan if the heads load the threads evenly.
void decode(const Shape& s, Buffers& b) {
#pragma omp parallel
  {
    Scratch scratch;
    for (size_t layer = 0; layer < b.layers; layer++) {
#pragma omp for schedule(dynamic, 1)
      for (int head = 0; head < s.kv_heads; head++) {
        AttentionArgs a = args_of(s, b, layer, head, scratch.data());
        a.rows = s.group;
        a.pos0 = s.context - 1;
        a.chunk1 = s.context / kChunk;
        kernels().attention[static_cast<int>(a.kv.type)](a);
      }
    }
  }
}

Buffers decode_buffers(const Shape& s) { return {s, 1, kDecodeBytes / s.layer_bytes()}; }

void show_decode(const Shape& s) {
  Buffers b = decode_buffers(s);
  const size_t bytes = s.layer_bytes() * b.layers;
  const auto read = [&] { return seconds_of([&] { read_bare(Buffers::kv(), bytes); }); };
  std::vector<double> shares, reads, rates;
  decode(s, b);
  double before = read();
  for (int round = 0; round < kRounds; round++) {
    const double seconds = seconds_of([&] { decode(s, b); }), after = read();
    shares.push_back((before + after) / 2 / seconds);
    rates.push_back(static_cast<double>(bytes) / seconds / 1e9);
    reads.push_back(static_cast<double>(bytes) / after / 1e9);
    before = after;
  }
  std::printf(
      "{\"metric\": \"decode_attention\", \"head_dim\": %d, \"group\": %d, \"context\": %d, "
      "\"gb_s\": %.1f, \"read_gb_s\": %.1f, \"fraction\": %.3f, \"goal\": 0.8}\n",
      s.hd, s.group, s.context, median(rates), median(reads), median(shares));
}

// Computes causal attention over `context` new tokens; the longest attention units come first.
void prefill(const Shape& s, Buffers& b) {
  constexpr int kUnitRows = 240;  // the unit size of runtime/attention_plan
  const int tokens_a_unit = std::max(1, kUnitRows / s.group);
  const int units = (s.context + tokens_a_unit - 1) / tokens_a_unit;
#pragma omp parallel
  {
    Scratch scratch;
#pragma omp for schedule(dynamic, 1)
    for (int unit = 0; unit < units * s.kv_heads; unit++) {
      AttentionArgs a = args_of(s, b, 0, unit % s.kv_heads, scratch.data());
      const int token0 = (units - 1 - unit / s.kv_heads) * tokens_a_unit;
      const int token1 = std::min(s.context, token0 + tokens_a_unit);
      a.row0 = static_cast<int64_t>(token0) * s.group;
      a.rows = static_cast<int64_t>(token1 - token0) * s.group;
      a.chunk1 = (token1 + kChunk - 1) / kChunk;
      kernels().attention[static_cast<int>(a.kv.type)](a);
    }
  }
}

void show_prefill(const Shape& s) {
  Buffers b(s, s.context, 1);
  const double work = 4.0 * s.hd * s.kv_heads * s.group * 0.5 * s.context * (s.context + 1.0);
  std::vector<double> shares, rates, peaks;
  prefill(s, b);
  double before = peak_gflops();
  for (int round = 0; round < kRounds; round++) {
    const double rate = work / seconds_of([&] { prefill(s, b); }) / 1e9, after = peak_gflops();
    shares.push_back(2 * rate / (before + after));
    rates.push_back(rate);
    peaks.push_back(after);
    before = after;
  }
  std::printf(
      "{\"metric\": \"prefill_attention\", \"head_dim\": %d, \"group\": %d, \"tokens\": %d, "
      "\"gflops\": %.0f, \"peak_gflops\": %.0f, \"fraction\": %.3f, \"goal\": %.2f}\n",
      s.hd, s.group, s.context, median(rates), median(peaks), median(shares),
      s.hd == 64 ? 0.68 : 0.76);
}

// Measures seconds per layer with bf16 and with each eight-bit type, in alternation.
void show_types(Shape s) {
  const struct {
    KvType type;
    const char* name;
  } kinds[] = {{KvType::int8, "int8"}, {KvType::e4m3, "fp8_e4m3"}, {KvType::int8_v4, "int8_v4"}};
  const auto layer_seconds = [&](KvType type, Buffers& b) {
    s.type = type;
    return seconds_of([&] { decode(s, b); }) / static_cast<double>(b.layers);
  };
  Buffers plain = decode_buffers(s);
  for (const auto& kind : kinds) {
    s.type = kind.type;
    Buffers b = decode_buffers(s);
    std::vector<double> ratios;
    double before = layer_seconds(KvType::bf16, plain);
    for (int round = 0; round < kRounds; round++) {
      const double seconds = layer_seconds(kind.type, b);
      const double after = layer_seconds(KvType::bf16, plain);
      ratios.push_back((before + after) / 2 / seconds);
      before = after;
    }
    std::printf(
        "{\"metric\": \"decode_attention_vs_bf16\", \"kv\": \"%s\", \"head_dim\": %d, "
        "\"group\": %d, \"context\": %d, \"speed\": %.2f%s}\n",
        kind.name, s.hd, s.group, s.context, median(ratios),
        kind.type == KvType::int8 ? ", \"goal\": 1.7" : "");
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::string which = argc > 1 ? argv[1] : "all";
  const int only_group = argc > 2 ? std::atoi(argv[2]) : 0;
  const int only_hd = argc > 3 ? std::atoi(argv[3]) : 0;
  const auto wanted = [&](const char* part) { return which == "all" || which == part; };
  for (int hd : {64, 128}) {
    for (int group : {1, 3, 4, 7, 8}) {
      if ((only_group && group != only_group) || (only_hd && hd != only_hd)) continue;
      for (int context : {8192, 32768}) {
        if (wanted("decode")) show_decode({hd, group, 8, context});
      }
      if (wanted("prefill")) show_prefill({hd, group, 4, 4096});
      if (wanted("types")) show_types({hd, group, 8, 16384});
    }
  }
  return 0;
}
