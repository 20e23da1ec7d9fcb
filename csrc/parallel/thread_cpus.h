// On which CPUs threads run, and which of their signals they take.
#pragma once
#include <sched.h>
#include <signal.h>

#include <array>
#include <cstdint>
#include <vector>

namespace cpuserve {

// For each thread in thread order the CPUs on which it may run.
using CpuSets = std::vector<std::vector<int>>;

#if defined(__linux__)
// Linux can be built for up to 8192 CPUs; one cpu_set_t holds only 1024.
constexpr int kMaxCpus = 1 << 14;
using CpuMask = std::array<cpu_set_t, kMaxCpus / CPU_SETSIZE>;

// Binds the calling thread to `cpus` unless they are empty, and restores its previous CPU mask when
// destroyed.
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
struct Bind {  // the operating system places threads
  explicit Bind(const std::vector<int>&) {}
};
#endif

// Signals must go to the thread that runs Python: a signal that a worker thread takes does not
// interrupt its wait for the next message. Signals that a thread causes itself, such as
// SIGSEGV, stay unblocked: if they were blocked, the process would end without a report of where.
class BlockSignals {
 public:
  BlockSignals();
  ~BlockSignals();
  BlockSignals(const BlockSignals&) = delete;
  BlockSignals& operator=(const BlockSignals&) = delete;

 private:
  sigset_t before_;
};

std::vector<int> allowed_cpus();  // of this process, ascending
int current_cpu();                // -1 if the system does not report it
int64_t thread_cpu_ns();          // CPU time of the calling thread

// Returns the NUMA node of all of `cpus`, or -1 if they are on several. The calling thread visits
// each of them.
int node_of(const std::vector<int>& cpus);

// Whether some threads have fewer CPUs than they are, so that one may wait for a CPU of another.
bool share_cpus(const CpuSets& cpus);

}  // namespace cpuserve
