#include "parallel/thread_cpus.h"

#include <pthread.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <thread>

#include "parallel/barrier.h"

namespace cpuserve {

#if defined(__linux__)
namespace {

bool get_affinity(CpuMask& mask) {
  mask = {};
  return sched_getaffinity(0, sizeof mask, mask.data()) == 0;
}

int current_node() {
  unsigned cpu = 0, node = 0;
  return syscall(SYS_getcpu, &cpu, &node, nullptr) == 0 ? static_cast<int>(node) : -1;
}

}  // namespace

std::vector<int> allowed_cpus() {
  CpuMask mask;
  std::vector<int> out;
  if (!get_affinity(mask)) return out;
  for (int cpu = 0; cpu < kMaxCpus; cpu++) {
    if (CPU_ISSET_S(static_cast<size_t>(cpu), sizeof mask, mask.data())) out.push_back(cpu);
  }
  return out;
}

Bind::Bind(const std::vector<int>& cpus) {
  if (cpus.empty()) return;
  bound_ = get_affinity(before_);
  CpuMask mask{};
  for (int cpu : cpus) CPU_SET_S(static_cast<size_t>(cpu), sizeof mask, mask.data());
  sched_setaffinity(0, sizeof mask, mask.data());
}

Bind::~Bind() {
  if (bound_) sched_setaffinity(0, sizeof before_, before_.data());
}

int current_cpu() { return sched_getcpu(); }

int64_t thread_cpu_ns() {
  timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return int64_t{t.tv_sec} * 1'000'000'000 + t.tv_nsec;
}
#else
namespace {
int current_node() { return -1; }
}  // namespace

std::vector<int> allowed_cpus() {
  std::vector<int> out;
  for (unsigned cpu = 0; cpu < std::thread::hardware_concurrency(); cpu++) {
    out.push_back(static_cast<int>(cpu));
  }
  return out;
}
int current_cpu() { return -1; }
int64_t thread_cpu_ns() { return now_ns(); }  // wall time, so no thread seems to lose its core
#endif

int node_of(const std::vector<int>& cpus) {
  int node = -1;
  for (int cpu : cpus) {
    const Bind visit({cpu});
    const int here = current_node();
    if (cpu != cpus.front() && here != node) return -1;
    node = here;
  }
  return node;
}

bool share_cpus(const CpuSets& cpus) {
  std::vector<int> all;
  for (const std::vector<int>& mine : cpus) {
    if (static_cast<size_t>(std::count(cpus.begin(), cpus.end(), mine)) > mine.size()) return true;
    all.insert(all.end(), mine.begin(), mine.end());
  }
  std::sort(all.begin(), all.end());
  all.erase(std::unique(all.begin(), all.end()), all.end());
  return cpus.size() > all.size();
}

BlockSignals::BlockSignals() {
  sigset_t all;
  sigfillset(&all);
  for (int own : {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGTRAP, SIGSYS}) sigdelset(&all, own);
  pthread_sigmask(SIG_BLOCK, &all, &before_);
}

BlockSignals::~BlockSignals() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

}  // namespace cpuserve
