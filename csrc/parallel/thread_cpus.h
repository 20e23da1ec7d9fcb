// Binds threads to CPUs and blocks signals in them.
#pragma once
#include <sched.h>
#include <signal.h>

#include <array>
#include <cstdint>
#include <vector>

namespace cpuserve {

// For each thread, a list of the CPUs on which the thread may run.
using CpuSets = std::vector<std::vector<int>>;

#if defined(__linux__)
// Linux can be built for up to 8192 CPUs, but a cpu_set_t has bits for 1024 CPUs only.
constexpr int kMaxCpus = 1 << 14;
using CpuMask = std::array<cpu_set_t, kMaxCpus / CPU_SETSIZE>;

// Binds the calling thread to `cpus` unless they are empty,
// and restores its previous CPU mask when destroyed.
class Bind {
 public:
  explicit Bind(const std::vector<int>& cpus);
  ~Bind();
  Bind(const Bind&) = delete;
  Bind& operator=(const Bind&) = delete;

 private:
  bool bound_ = false;
  CpuMask before_;
};
#else
struct Bind {  // elsewhere, the operating system places the threads
  explicit Bind(const std::vector<int>&) {}
};
#endif

// Blocks signals in the calling thread until destroyed. Worker threads use it,
// so that signals go to the thread that runs Python, which has to wake up to run a signal handler.
// If a worker thread received a signal, the Python thread would keep waiting for its next message.
// Signals that a thread causes itself, such as SIGSEGV, stay unblocked:
// otherwise the process would end without a report of the faulting code.
class BlockSignals {
 public:
  BlockSignals();
  ~BlockSignals();
  BlockSignals(const BlockSignals&) = delete;
  BlockSignals& operator=(const BlockSignals&) = delete;

 private:
  sigset_t before_;
};

std::vector<int> allowed_cpus();  // CPUs that this process may use, ascending
int current_cpu();                // -1 if the system does not report it
int64_t thread_cpu_ns();          // CPU time of the calling thread

// Returns the NUMA node of `cpus`, or -1 if they are on several nodes.
// To find the node, the calling thread runs on each of these CPUs for a moment.
int node_of(const std::vector<int>& cpus);

// Returns whether a group of threads has fewer allowed CPUs than threads,
// so that one of these threads may have to wait for a CPU.
bool share_cpus(const CpuSets& cpus);

}  // namespace cpuserve
