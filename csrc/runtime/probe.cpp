// Roofline probes on the threads and the memory of an executor, and reports of its memory use.
#include <algorithm>
#include <atomic>

#include "base/check.h"
#include "runtime/executor.h"

namespace cpuserve {
namespace {

// The seconds of the calls of a probe: their mean, and the least.
struct PassTimes {
  double mean, least;
};

// Calls pass() (at least once) until `seconds` have passed.
template <class Pass>
PassTimes time_passes(double seconds, const Pass& pass) {
  const int64_t start = now_ns();
  int64_t passes = 0, before = start, now = start, least = INT64_MAX;
  do {
    pass();
    passes++;
    now = now_ns();
    least = std::min(least, now - before);
    before = now;
  } while (static_cast<double>(now - start) < seconds * 1e9);
  return {1e-9 * static_cast<double>(now - start) / static_cast<double>(passes),
          1e-9 * static_cast<double>(least)};
}

}  // namespace

// Each thread reads the panels that it packed, as in a decode step, but multiplies nothing by them.
double Executor::probe_bandwidth(double seconds) {
  std::atomic<uint64_t> sum{0};  // keeps the compiler from removing the reads
  size_t bytes = 0;
  for (size_t i = 0; i < program().matrices().size(); i++) {
    if (!step_.weights.pooled(i)) bytes += program().matrices()[i].bytes();
  }
  check_argument(bytes > 0, "this program has no weights to read");
  step_.team->call_all();
  const PassTimes pass = time_passes(seconds, [&] {
    step_.team->run_on_all([&](int thread, int) noexcept {
      uint64_t mine = 0;
      for (size_t i = 0; i < program().matrices().size(); i++) {
        if (step_.weights.pooled(i)) continue;
        const Matrix& m = program().matrices()[i];
        const Range p = m.panels_of(step_.team->share(m.units(), thread));
        const PackedWeight& w =
            step_.weights.matrix(static_cast<Id>(i), step_.team->rank_threads(thread).rank);
        mine += step_.kernels->probe_read(w.data + static_cast<size_t>(p.begin) * m.panel_bytes,
                                          static_cast<size_t>(p.size()) * m.panel_bytes);
        if (thread == 0) step_.advances.add();
      }
      sum.fetch_add(mine, std::memory_order_relaxed);
    });
  });
  return static_cast<double>(bytes) / pass.mean;
}

double Executor::probe_dot(int kind, double seconds) {
  constexpr int kKinds = static_cast<int>(DotKind::count);
  check_argument(kind >= 0 && kind < kKinds, "unknown dot-product probe ", kind,
                 "; it must be 0 to ", kKinds - 1);
  constexpr int64_t kIterations =
      200'000;  // less than a millisecond, so that time_passes ends on time
  step_.team->call_all();
  std::vector<double> operations(static_cast<size_t>(step_.team->threads()));
  // The fastest pass counts, because the rate is a limit of kernels, and other programs that run
  // meanwhile can only slow a pass down.
  const PassTimes pass = time_passes(seconds, [&] {
    step_.team->run_on_all([&](int thread, int) noexcept {
      operations[static_cast<size_t>(thread)] = step_.kernels->probe_dot[kind](kIterations);
    });
  });
  double total = 0;
  for (double o : operations) total += o;
  return total / pass.least;
}

double Executor::probe_barrier(int64_t rounds) {
  check_argument(rounds >= 1, "probe_barrier needs at least 1 round, not ", rounds);
  step_.team->call_all();
  const int64_t start = now_ns();
  step_.team->run_on_all([&](int thread, int) noexcept {
    for (int64_t i = 0; i < rounds; i++) step_.team->barrier(thread);
  });
  return 1e-9 * static_cast<double>(now_ns() - start) / static_cast<double>(rounds);
}

int64_t Executor::num_linears() const {
  return std::count_if(program().ops().begin(), program().ops().end(),
                       [](const Op& op) { return std::holds_alternative<LinearOp>(op); });
}

double Executor::probe_linears(int64_t rows, int64_t first, int64_t count) {
  check_argument(rows >= 1 && rows <= program().max_tokens(), "probe_linears needs from 1 to ",
                 program().max_tokens(), " rows, not ", rows);
  check_argument(first >= 0 && count >= 1 && num_linears() > 0,
                 "probe_linears needs a program with linears, and at least 1 of them");
  std::vector<int64_t> linears;
  for (size_t i = 0; i < program().ops().size(); i++) {
    if (std::holds_alternative<LinearOp>(program().ops()[i])) {
      linears.push_back(static_cast<int64_t>(i));
    }
  }
  step_.input = StepInput{};
  step_.input.tokens = rows;
  step_.team->call_all();
  const int64_t start = now_ns();
  for (int64_t i = 0; i < count; i++) {
    const int64_t op = linears[static_cast<size_t>(first + i) % linears.size()];
    if (!walk_.run(op, op + 1)) fail_system("the probe was cancelled");
  }
  return 1e-9 * static_cast<double>(now_ns() - start);
}

std::map<std::string, int64_t> Executor::memory() const {
  const ResidencyOfProcess process = residency_of_process();
  const auto bytes = [](const Buffer& b) { return static_cast<int64_t>(b.size()); };
  const auto all = [&](const std::vector<Buffer>& arenas, int64_t* size) {
    Residency sum;
    for (const Buffer& arena : arenas) {
      const Residency r = arena.residency(process);
      sum.resident += r.resident;
      sum.huge += r.huge;
      *size += bytes(arena);
    }
    return sum;
  };
  int64_t kv_bytes = 0, weight_bytes = 0, state_bytes = 0;
  const Residency states = all(step_.states.arenas(), &state_bytes);
  const Residency kv = all(step_.kv.arenas(), &kv_bytes);
  Residency weights = all(step_.weights.matrix_arenas(), &weight_bytes);
  if (const ExpertPool* pool = step_.weights.pool()) {
    const Residency experts = all(pool->arenas(), &weight_bytes);
    weights.resident += experts.resident;
    weights.huge += experts.huge;
  }
  return {{"weights", weight_bytes},
          {"weights_resident", weights.resident},
          {"weights_huge", weights.huge},
          {"weights_mapped", step_.weights.mapped() ? weight_bytes : 0},
          {"vectors", bytes(step_.weights.vector_arena())},
          {"activations_reserved", bytes(activations_)},
          {"activations_resident", activations_.residency(process).resident},
          {"work_reserved", bytes(work_)},
          {"work_resident", work_.residency(process).resident},
          {"state_reserved", state_bytes},
          {"state_resident", states.resident},
          {"kv_reserved", kv_bytes},
          {"kv_committed", static_cast<int64_t>(step_.kv.committed())},
          {"kv_resident", kv.resident},
          {"kv_huge", kv.huge}};
}

MemoryNodes Executor::memory_nodes() const {
  const PagesOfProcess pages = pages_of_process();
  MemoryNodes out;
  for (const Buffer& arena : step_.weights.matrix_arenas())
    out.weights.push_back(arena.nodes(pages));
  for (const Buffer& arena : step_.kv.arenas()) out.kv.push_back(arena.nodes(pages));
  return out;
}

}  // namespace cpuserve
