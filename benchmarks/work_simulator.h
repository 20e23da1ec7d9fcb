// A simulator of how the threads of a team share the work of a layer: the executor's own plans
// (LinearPlan, AttentionPlan) and its rule for claims (WorkQueue: a thread's own share first,
// then the shares of the threads after it), with modelled costs instead of kernels.
//
// Costs. A claim takes as long as its arithmetic or its reads from memory, whichever takes longer.
// Three limits bound the read rate of a core: its own limit, its part of the link of its core
// complex (the cores that share an L3), and its part of its rank's memory. Threads that still work
// have equal parts. So a waiting thread costs nothing while others keep the memory busy,
// but its whole arithmetic rate is lost if arithmetic is the limit.
// The idle share of an operation is the part of its time that an even division of the same work
// over all threads would save: 1 - max(bytes / bandwidth, seconds / threads) / end.
// `bytes` and `seconds` are sums over all claims, and the last thread finishes at `end`.
#pragma once
#include <algorithm>
#include <cstdint>
#include <numeric>
#include <queue>
#include <tuple>
#include <utility>
#include <vector>

#include "model_shapes.h"
#include "parallel/partition.h"
#include "runtime/attention_plan.h"
#include "runtime/linear_plan.h"

namespace cpuserve::simulate {

struct Machine {
  int threads = 2, ranks = 1;
  int complex_cores = 8;  // number of cores that share an L3
  // Seconds a core needs for a multiplication and an addition, in matrices and in attention.
  double linear_seconds = 1 / 250e9, attention_seconds = 1 / 180e9;
  double core_read = 30e9, complex_read = 60e9, memory_read = 60e9;  // bytes per second
  double claim_seconds = 50e-9;  // an atomic addition in a cache line that several cores write
  double merge_seconds = 31e-9;  // merging one partial result of attention (4 us for 128 results)
  int64_t tile_rows = 6, tile_panels = 4;
  std::vector<double> speeds;  // speed of each thread, a factor of the rates above; empty: all 1

  double speed(int thread) const {
    return speeds.empty() ? 1 : speeds[static_cast<size_t>(thread)];
  }
  double all_speeds() const {
    return speeds.empty() ? threads : std::accumulate(speeds.begin(), speeds.end(), 0.0);
  }
  Ranks groups() const {
    std::vector<int> sizes;
    for (int r = 0; r < ranks; r++) {
      sizes.push_back(static_cast<int>(split(threads, r, ranks).size()));
    }
    return Ranks(sizes);
  }
};

// A server. Its memory delivers 4.5 GB/s for each core (576 GB/s for 128),
// and at least the 60 GB/s of two channels, which is more for up to 13 cores.
// The other figures are from a Zen 5 core in bf16 (docs/performance.md).
inline Machine server(int threads, int ranks) {
  Machine m;
  m.threads = threads;
  m.ranks = ranks;
  m.memory_read = std::max(60e9, 4.5e9 * threads);
  return m;
}

// A client CPU with fast and slow cores, one L3 for all of them, and two channels of memory:
// 70 GB/s. A slow core (E core of Intel) has 0.4 of the arithmetic rate
// and of the read rate of a fast one. The other figures are from an AVX2 core.
// Placement leaves one of eight slow cores to the front end (platforms/placement.py).
struct HybridCpu {
  const char* name;
  int fast, slow;
  int helpers() const { return slow - std::max(1, slow / 8); }
};
constexpr HybridCpu kHybrids[] = {
    {"4P+4E", 4, 4}, {"6P+8E", 6, 8}, {"8P+8E", 8, 8}, {"8P+16E", 8, 16}};
inline Machine hybrid(int fast, int helpers) {
  constexpr double kSlow = 0.4;
  Machine m;
  m.threads = m.complex_cores = fast + helpers;
  m.complex_read = m.memory_read = 70e9;
  m.linear_seconds = 1 / 50e9;
  m.attention_seconds = 1 / 40e9;
  m.tile_panels = 1;
  for (int i = 0; i < m.threads; i++) m.speeds.push_back(i < fast ? 1 : kSlow);
  return m;
}

// The cost of one claim: bytes read from memory, and seconds of arithmetic.
struct Work {
  double bytes = 0, seconds = 0;
};

struct Time {
  double end = 0;    // seconds until the last thread has finished
  double even = 0;   // seconds that all threads would take if the work were divided evenly
  double least = 0;  // as `even`, without the work that exists only because work is divided
  Time& operator+=(const Time& o) {
    end += o.end;
    even += o.even;
    least += o.least;
    return *this;
  }
  double idle() const { return end > 0 ? 1 - even / end : 0; }
  // Returns the fraction of the time that threads are idle or do work that the division adds.
  double lost() const { return end > 0 ? 1 - least / end : 0; }
};

// The threads (members) of one rank in one operation.
// share(i) returns the range of items that member i owns, and cost(begin, end)
// the work of computing these items, without the time to claim them (Machine::claim_seconds).
template <class Share, class Cost>
class Phase {
 public:
  Phase(const Machine& machine, int size, double memory, const Share& share, int64_t chunk,
        const Cost& cost)
      : machine_(machine),
        size_(size),
        memory_(memory),
        chunk_(chunk),
        share_(share),
        cost_(cost),
        next_(static_cast<size_t>(size)),
        owner_(static_cast<size_t>(size)),
        jobs_(static_cast<size_t>(size)),
        readers_(static_cast<size_t>(size / machine.complex_cores) + 1) {
    for (int i = 0; i < size; i++) next_[at(i)] = share(i).begin;
  }

  // Returns the seconds until the last thread has finished, and adds the work of all claims to
  // `total`. While there is something left to claim, the rate of a claim is fixed when it begins.
  double run(Work* total) {
    total_ = total;
    // Events in order of time; if threads finish together,
    // threads that still have a share of their own come first.
    using Event = std::tuple<double, bool, int>;
    std::priority_queue<Event, std::vector<Event>, std::greater<>> events;
    double now = 0;
    const auto push = [&](int member) {
      Job& job = jobs_[at(member)];
      job.whole = duration(member);
      events.push({now + job.whole, next_[at(member)] >= share_(member).end, member});
    };
    bool exhausted = false;
    for (const bool owners : {true, false}) {  // first the own share of a thread, then the others
      for (int i = 0; i < size_; i++) {
        if ((share_(i).size() > 0) == owners) exhausted |= !claim(i);
      }
    }
    for (int i = 0; i < size_; i++) {
      if (jobs_[at(i)].left > 0) push(i);
    }
    while (!exhausted) {
      const int member = std::get<2>(events.top());
      now = std::get<0>(events.top());
      events.pop();
      stop(member);
      if (claim(member)) {
        push(member);
      } else {
        exhausted = true;
      }
    }
    for (; !events.empty(); events.pop()) {
      const auto [end, own, member] = events.top();
      jobs_[at(member)].left = (end - now) / jobs_[at(member)].whole;
      if (end - now < kMoment) stop(member);
    }
    return finish(now);
  }

 private:
  struct Job {
    Work work;
    // left: the part of a claim's work that remains (0 to 1); whole: seconds of the whole claim.
    double left = 0, whole = 0;
  };
  static constexpr double kMoment = 1e-12;  // seconds: less remaining work than this counts as done
  static size_t at(int i) { return static_cast<size_t>(i); }
  int complex_of(int member) const { return member / machine_.complex_cores; }

  bool claim(int me) {
    for (; owner_[at(me)] < size_; owner_[at(me)]++) {
      const int owner = (me + owner_[at(me)]) % size_;
      const int64_t end = share_(owner).end, begin = next_[at(owner)];
      if (begin >= end) continue;
      next_[at(owner)] = begin + chunk_;
      Work work = cost_(begin, std::min(begin + chunk_, end));
      work.seconds += machine_.claim_seconds;
      total_->bytes += work.bytes;
      total_->seconds += work.seconds;
      jobs_[at(me)] = {work, 1, 0};
      if (work.bytes > 0) {
        readers_[at(complex_of(me))]++;
        all_readers_++;
      }
      return true;
    }
    return false;
  }
  void stop(int member) {
    Job& job = jobs_[at(member)];
    job.left = 0;
    if (job.work.bytes <= 0) return;
    readers_[at(complex_of(member))]--;
    all_readers_--;
  }
  double duration(int member) const {
    const Work& work = jobs_[at(member)].work;
    const double seconds = work.seconds / machine_.speed(member);
    if (work.bytes <= 0) return seconds;
    const double rate = std::min({machine_.core_read * machine_.speed(member),
                                  machine_.complex_read / readers_[at(complex_of(member))],
                                  memory_ / all_readers_});
    return std::max(work.bytes / rate, seconds);
  }

  // Nothing is left to claim: each thread finishes its work, faster as others stop to read.
  double finish(double now) {
    while (true) {
      double soonest = 1e99;
      for (int i = 0; i < size_; i++) {
        Job& job = jobs_[at(i)];
        if (job.left <= 0) continue;
        job.whole = duration(i);
        soonest = std::min(soonest, job.left * job.whole);
      }
      if (soonest == 1e99) return now;
      now += soonest;
      for (int i = 0; i < size_; i++) {
        Job& job = jobs_[at(i)];
        if (job.left <= 0) continue;
        job.left -= soonest / job.whole;
        if (job.left * job.whole < kMoment) stop(i);
      }
    }
  }

  const Machine& machine_;
  const int size_;
  const double memory_;
  const int64_t chunk_;
  const Share& share_;
  const Cost& cost_;
  std::vector<int64_t> next_;
  std::vector<int> owner_;  // by member: the share that it claims from, relative to its own
  std::vector<Job> jobs_;
  std::vector<int> readers_;  // by core complex: the number of threads that read from memory
  int all_readers_ = 0;
  Work* total_ = nullptr;
};

template <class Share, class Cost>
double run_phase(const Machine& m, int size, double memory, const Share& share, int64_t chunk,
                 const Cost& cost, Work* total) {
  return Phase<Share, Cost>(m, size, memory, share, chunk, cost).run(total);
}

inline double even_time(const Machine& m, const Work& total) {
  return std::max(total.bytes / m.memory_read, total.seconds / m.all_speeds());
}

struct LinearSize {
  int64_t n, k;         // outputs (gate and up together if the MLP has both), and inputs
  int64_t grain;        // panels that must stay in one task (Matrix::grain)
  double weight_bytes;  // bytes of one weight: 2 in bf16, 0.53 in 4 bits
};

// Returns the bytes that each task reads from memory. Consecutive tasks of one core complex with
// the same panels read these once, and an equal part of the bytes counts for each of the tasks.
inline std::vector<double> reads_of(const Machine& m, const LinearPlan& plan, int crew,
                                    double panel_bytes) {
  std::vector<double> bytes(static_cast<size_t>(plan.tasks()));
  int64_t first = 0, panel = -1, complex = -1;
  for (int member = 0; member < crew; member++) {
    const Range own = split(plan.tasks(), member, crew);
    for (int64_t i = own.begin; i < own.end; i++) {
      const LinearTask task = plan.task(i, i + 1);
      if (task.panels.begin != panel || member / m.complex_cores != complex) first = i;
      panel = task.panels.begin;
      complex = member / m.complex_cores;
      const double each = static_cast<double>(task.panels.size()) * panel_bytes /
                          static_cast<double>(i + 1 - first);
      std::fill(bytes.begin() + first, bytes.begin() + i + 1, each);
    }
  }
  return bytes;
}

// Simulates one linear with `rows` rows of activations.
inline Time run_linear(const Machine& m, const LinearSize& size, int64_t rows) {
  const Ranks ranks = m.groups();
  const int64_t panels = (size.n + kPanel - 1) / kPanel;
  const int64_t units = (panels + size.grain - 1) / size.grain;
  const double panel_bytes = static_cast<double>(kPanel * size.k) * size.weight_bytes;
  const double row_seconds = static_cast<double>(kPanel * size.k) * m.linear_seconds;
  Time time;
  Work total;
  for (int r = 0; r < ranks.count(); r++) {
    const Range own = ranks.share(units, r), threads = ranks.threads_of(r);
    const Range part{own.begin * size.grain, std::min(own.end * size.grain, panels)};
    const int crew = static_cast<int>(threads.size());
    const LinearPlan plan({rows, part.size(), size.grain, static_cast<int64_t>(panel_bytes),
                           m.tile_rows, m.tile_panels, crew});
    const auto share = [&](int i) { return split(plan.tasks(), i, crew); };
    const std::vector<double> reads = reads_of(m, plan, crew, panel_bytes);
    const auto cost = [&](int64_t begin, int64_t end) {
      const LinearTask task = plan.task(begin, end);
      const double extra = rows <= LinearPlan::kFewRows ? 0 : LinearPlan::kTaskRows;
      Work work{0, static_cast<double>(task.panels.size()) *
                       (static_cast<double>(task.rows) + extra) * row_seconds};
      for (int64_t i = begin; i < end; i++) work.bytes += reads[static_cast<size_t>(i)];
      return work;
    };
    const double memory = m.memory_read * crew / m.threads;
    time.end = std::max(time.end, run_phase(m, crew, memory, share, plan.chunk(), cost, &total));
  }
  time.even = even_time(m, total);
  time.least = even_time(m, {static_cast<double>(panels) * panel_bytes,
                             static_cast<double>(panels * rows) * row_seconds});
  return time;
}

// The sequences of a step: (tokens in this step, keys including the keys of these tokens).
using Sequences = std::vector<std::pair<int32_t, int32_t>>;

struct HeadSize {
  int32_t q_heads, kv_heads, dim, window;
};

// Simulates the attention of one layer, with bf16 keys and values.
inline Time run_attention(const Machine& m, const HeadSize& heads, const Sequences& sequences) {
  std::vector<int32_t> query_start{0}, kv_len;
  int32_t longest = 0;
  int64_t keys = 0;
  for (const auto& [queries, length] : sequences) {
    query_start.push_back(query_start.back() + queries);
    kv_len.push_back(length);
    longest = std::max(longest, length);
    keys += length;
  }
  StepInput in{};
  in.tokens = query_start.back();
  in.seqs = static_cast<int64_t>(kv_len.size());
  in.query_start = query_start.data();
  in.kv_len = kv_len.data();
  const AttentionGeometry geometry{heads.q_heads, heads.kv_heads,
                                   static_cast<int32_t>(round_up(heads.dim, 16)), heads.window};
  const Ranks ranks = m.groups();
  AttentionPlan plan(geometry, {in.tokens, in.seqs, longest, keys}, ranks);
  plan.build(in);
  const auto cost = [&](int64_t begin, int64_t end) {
    Work work;
    for (int64_t i = begin; i < end; i++) {
      const AttentionUnit& u = plan.units()[static_cast<size_t>(i)];
      const auto s = static_cast<size_t>(u.seq);
      const int64_t queries = query_start[s + 1] - query_start[s];
      const int64_t last = kv_len[s] - queries + (u.row0 + u.rows - 1) / geometry.group();
      const int64_t seen =
          std::min<int64_t>(u.chunk1 * kChunk, last + 1) - u.chunk0 * int64_t{kChunk};
      const auto values = static_cast<double>(seen * u.heads * geometry.hd_pad);
      // Keys of a prompt stay in caches: only decode reads them from memory.
      if (queries == 1) work.bytes += 4 * values;
      work.seconds += 2 * values * static_cast<double>(u.rows) * m.attention_seconds;
    }
    return work;
  };
  Time time;
  Work total;
  for (int r = 0; r < ranks.count(); r++) {
    const Range threads = ranks.threads_of(r);
    const int crew = static_cast<int>(threads.size());
    const auto share = [&](int i) {
      return plan.units_of(threads.begin + i, threads.begin + i + 1);
    };
    const double memory = m.memory_read * crew / m.threads;
    time.end = std::max(time.end, run_phase(m, crew, memory, share, 1, cost, &total));
  }
  time.even = time.least = even_time(m, total);
  if (plan.merges().empty()) return time;
  Work folded;
  const auto merge = [&](int64_t begin, int64_t) {
    const MergeUnit& u = plan.merges()[static_cast<size_t>(begin)];
    return Work{0,
                static_cast<double>(u.rows * u.chunks * geometry.hd_pad) / 128 * m.merge_seconds};
  };
  const auto share = [&](int i) {
    return split(static_cast<int64_t>(plan.merges().size()), i, m.threads);
  };
  time.end += run_phase(m, m.threads, m.memory_read, share, 1, merge, &folded);
  time.even += even_time(m, folded);
  return time;
}

// The operations of a layer that threads share by claims.
struct Layer {
  Time qkv, attention, out, mlp_in, mlp_out;
  Time sum() const {
    Time all;
    for (const Time& t : {qkv, attention, out, mlp_in, mlp_out}) all += t;
    return all;
  }
};

// Simulates a layer with weights of 2 bytes (bf16) or of fewer bytes;
// with fewer, the activations between the matrices of the MLP are quantized.
inline Layer run_layer(const Machine& m, const ModelShape& s, const Sequences& sequences,
                       double weight_bytes = 2) {
  int64_t rows = 0;
  for (const auto& [queries, keys] : sequences) rows += queries;
  const auto linear = [&](int64_t n, int64_t k, int64_t grain) {
    return run_linear(m, {n, k, grain, weight_bytes}, rows);
  };
  const HeadSize heads{s.q_heads, s.kv_heads, s.head_dim, s.window};
  Layer layer;
  layer.qkv = linear(s.qkv(), s.width, 1);
  layer.attention = run_attention(m, heads, sequences);
  layer.out = linear(s.width, s.attended(), 1);
  const int64_t grain = (s.gated ? 2 : 1) * (weight_bytes < 2 ? 2 : 1);
  layer.mlp_in = linear((s.gated ? 2 : 1) * s.intermediate, s.width, grain);
  layer.mlp_out = linear(s.width, s.intermediate, 1);
  return layer;
}

// The steps that simulate.cpp shows in its tables, and that the test checks.
struct StepKind {
  const char* name;
  Sequences sequences;
};
inline std::vector<StepKind> step_kinds() {
  return {{"decode, 1 stream", {{1, 1024}}},
          {"decode, 32 streams", Sequences(32, {1, 1024})},
          {"prompt of 64", {{64, 64}}},
          {"prompt of 512", {{512, 512}}}};
}

}  // namespace cpuserve::simulate
