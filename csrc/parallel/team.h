// The compute threads of the engine: one OpenMP parallel region that lasts as long as the engine.
// Inside the region, threads wait as barrier.h describes.
#pragma once
#include <atomic>
#include <exception>
#include <functional>
#include <memory>
#include <thread>
#include <type_traits>
#include <vector>

#include "parallel/barrier.h"
#include "parallel/partition.h"
#include "parallel/thread_cpus.h"
#include "parallel/thread_roster.h"

namespace cpuserve {

class Team {
 public:
  //   cpus           the CPUs that each thread is bound to; empty: threads are not bound
  //   passive_waits  whether threads spin only for a short time before they sleep, which suits
  //                  a process under a CFS quota of CPU time
  //   ranks          the number of threads of each rank (their sum is `threads`); empty: one rank
  //   complexes      the number of the core complex of each thread: cores with equal numbers
  //                  share an L3 cache; empty: all cores share one L3
  //   speeds         the relative speed of the core of each thread; empty: equal speeds
  // Throws std::invalid_argument for a CPU that this process may not use.
  Team(int threads, CpuSets cpus, bool passive_waits = false, const std::vector<int>& ranks = {},
       const std::vector<int>& complexes = {}, const std::vector<int>& speeds = {});
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  // Opens the parallel region and runs `main` on thread 0, which is the calling thread.
  // The other threads wait for calls of run_on_all() until `main` returns or throws.
  // run() rethrows an exception of `main`. During run() threads are bound to their CPUs.
  // Throws std::runtime_error in a process that was forked after a team had run:
  // OpenMP would wait for threads that exist only in the parent process.
  void run(const std::function<void()>& main);

  // Runs f(member, members) on every thread that takes part, including the calling thread,
  // and returns when all threads are done. Members are numbered from 0 to members() - 1.
  // Only thread 0 inside run() may call this function, but a team of one thread works anywhere.
  // f must not throw. Throws std::runtime_error in a forked child.
  template <class F>
  void run_on_all(F&& f) {
    const auto function = [](void* context, int thread, int threads) noexcept {
      (*static_cast<std::remove_reference_t<F>*>(context))(thread, threads);
    };
    make_call({function, const_cast<void*>(static_cast<const void*>(&f))});
  }

  // Inside a call of run_on_all(): returns when every member has called barrier().
  void barrier(int member) noexcept {
    barrier(member, [] {});
  }
  // Does the same as barrier(member), and the last member to arrive calls last()
  // before any member returns.
  template <class Last>
  void barrier(int member, const Last& last) noexcept {
    if (roster_.members().size() == 1) return last();
    Slot& slot = slot_of(member);
    barrier_.wait(slot.complex, slot.in_step, last);
  }

  // Thread 0 calls adapt() and call_all() between two calls of run_on_all(). After adapt(),
  // a thread that kept losing its core to other processes takes no part in the next calls
  // of run_on_all() (thread_roster.h). call_all() makes all threads take part again.
  void adapt() noexcept;
  void call_all() noexcept;

  // Returns the number of threads that take part in the next call of run_on_all().
  int members() const { return static_cast<int>(roster_.members().size()); }
  int threads() const { return threads_; }
  // Returns the first CPU that thread 0 is bound to, or 0 if threads are not bound.
  int first_cpu() const { return cpus_.empty() ? 0 : cpus_.front().front(); }
  const Ranks& ranks() const { return ranks_; }
  const Speeds& speeds() const { return speeds_; }
  // Inside a call of run_on_all(): returns the members of the rank of `member`, itself included.
  RankThreads rank_threads(int member) const noexcept {
    return rank_threads_[static_cast<size_t>(member)];
  }
  // Inside a call of run_on_all(): returns the part of [0, items) for `member`.
  // The items are divided among the ranks, and the part of a rank among its members.
  Range share(int64_t items, int member) const noexcept {
    const RankThreads c = rank_threads(member);
    const Range rank = ranks_.share(items, c.rank);
    const Range mine = split(rank.size(), member - c.first, c.size);
    return {rank.begin + mine.begin, rank.begin + mine.end};
  }
  // Returns for each rank the NUMA node that all its threads are bound to, or -1 if the threads
  // are not bound to a single node. Only thread 0 inside run() may call this function.
  std::vector<int> nodes_of_ranks();

  // Returns the CPU on which each thread finished its last call of f; -1 before its first call.
  std::vector<int> placement() const;
  // Returns the time that threads have waited for others inside calls of run_on_all() so far, in
  // nanoseconds, as the sum over all threads. The wait of thread 0 for the end of a call is part
  // of it. Waits of up to about a microsecond are not. Any thread may call this function.
  int64_t waited_ns() const noexcept;

 private:
  struct Call {
    void (*function)(void* context, int thread, int threads) noexcept;
    void* context;
  };
  // The data of one thread, in cache lines of its own: a waiting thread does not slow down others.
  struct alignas(64) Slot {
    WaitState in_step, between_steps;
    int member = 0;   // number of this thread among the members; published by epoch_
    int complex = 0;  // number of its core complex (cores that share an L3)
    // The first epoch (call of run_on_all) that this thread takes part in, or kNever while absent.
    // Thread 0 writes `joins` before it advances the epoch, and the thread reads `joins` (acquire)
    // after it has read the epoch, so a thread that is several epochs late reads a correct value.
    std::atomic<uint64_t> joins{0};
    // The time in the last call of f during which the thread was ready to run but had no core.
    std::atomic<int64_t> lost_ns{0};
    // The time that the thread has waited in calls of f: a copy of in_step.waited_ns for readers.
    std::atomic<int64_t> waited_ns{0};
    std::atomic<int> cpu{-1};
  };
  static constexpr uint64_t kNever = ~uint64_t{0};

  void make_call(Call call);
  void run_call(Slot& slot, int threads) noexcept;
  void change_members() noexcept;
  void find_rank_threads() noexcept;
  void expect_members() noexcept;
  void lead(const std::function<void()>& main) noexcept;
  void work(int thread) noexcept;
  void member(int thread, const std::function<void()>& main) noexcept;
  int open_region(const std::function<void()>& main);
  void configure_waits();
  Slot& slot_of(int member) noexcept {
    return slots_[static_cast<size_t>(roster_.members()[static_cast<size_t>(member)])];
  }

  const int threads_;
  const Ranks ranks_;
  const Speeds speeds_;
  const CpuSets cpus_;
  const std::vector<int> complexes_;  // by thread: its core complex, numbered from 0
  const bool passive_waits_;
  std::unique_ptr<Slot[]> slots_;
  Barrier barrier_;
  Signal epoch_;   // advances at each call of run_on_all, and to stop; publishes call_ and members
  Signal recall_;  // advanced when absent threads shall take part again
  uint64_t first_epoch_ = 0;  // value of epoch_ when run() began
  Call call_{};
  int call_threads_ = 1;
  std::atomic<bool> stop_{false};
  ThreadRoster roster_;
  std::vector<RankThreads> rank_threads_;  // by member: its rank's threads; published by epoch_
  std::vector<int64_t> lost_;
  std::vector<int> arrivals_;  // by core complex: number of threads in the next run_on_all()
  int64_t call_wall_ns_ = 0, call_waited_ns_ = 0;
  std::atomic<bool> running_{false};
  int process_ = 0;  // the process that opened the region; a forked child does not have its threads
  std::thread::id leader_;
  std::exception_ptr error_;
};

}  // namespace cpuserve
